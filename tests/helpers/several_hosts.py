"""Programs of the tests as several hosts: real processes on loopback, with four devices in all."""

import os
import socket
import subprocess
import sys

import pytest

from helpers.paths import program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_hosts(name: str, hosts: int, *args: str) -> "list[subprocess.Popen[str]]":
    """A program of the tests, told its port, how many hosts there are and which it is, and these arguments."""
    devices = f"--xla_force_host_platform_device_count={4 // hosts}"
    env = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}"}
    path, port = program(name), str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, path, port, str(hosts), str(host), *args],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(hosts)
    ]


def finish(processes: "list[subprocess.Popen[str]]", code: int = 0) -> list[str]:
    """What each said; all must have ended with this code."""
    said = [process.communicate(timeout=600)[1] for process in processes]
    if any(process.returncode != code for process in processes):
        pytest.fail("\n\n".join(f"host {host} said: {text[-3000:]}" for host, text in enumerate(said)), pytrace=False)
    return said
