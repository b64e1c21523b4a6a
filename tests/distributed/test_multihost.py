"""Two real processes on loopback: they train what one trains, save together, and stop together."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pistar.checkpoints.manager import saved_steps
from pistar.cli.runs import STOPPED
from pistar.distributed.multihost import join_hosts
from pistar.errors import UserError
from pistar.telemetry.metrics import read_metrics

from helpers.several_hosts import finish, free_port, start_hosts


def start(folder: Path, hosts: int, *flags: str, **changes: object) -> "list[subprocess.Popen[str]]":
    """Start a small run on this many hosts."""
    return start_hosts("train_together", hosts, str(folder), json.dumps(changes), *flags)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "runs" / "debug" / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def compare(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=2e-3, atol=1e-4, err_msg=name)


def lose_a_host(folder: Path) -> tuple[list[int], str]:
    """Kill one of two hosts once they have saved. Return the saved steps and what the other host printed."""
    processes = start(folder, 2)
    checkpoints = folder / "runs" / "debug" / "checkpoints"
    while not saved_steps(checkpoints) and all(process.poll() is None for process in processes):
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    said = processes[0].communicate(timeout=120)[1]
    assert time.monotonic() - killed < 60, "the other host waited too long for the dead one"
    assert processes[0].returncode != 0
    processes[1].communicate()
    return saved_steps(checkpoints), said


def test_two_hosts_equal_one_and_a_run_that_lost_a_host_resumes_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTBEAT_SECONDS", "15")  # a third of the default, so that the test is shorter
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start(alone, 1))
    steps, said = lose_a_host(together)
    if not steps and "stopped sending heartbeats" in said:  # the machine itself was paused: try once more
        together = tmp_path / "again"
        steps, said = lose_a_host(together)
    assert steps, f"both ended before one was killed: {said}"
    assert steps[-1] < 12, "the run ended before a host was killed"
    assert "another host was lost" in said, said
    assert "continue with --resume" in said
    finish(start(together, 1, "--resume"))
    compare(metrics(together), metrics(alone))


def test_a_request_to_stop_one_host_stops_both_after_they_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTBEAT_SECONDS", "300")  # a busy machine may be paused; no host may be given up here
    processes = start(tmp_path, 2, steps=2000, save_every=1000, imitate=True)
    folder = tmp_path / "runs" / "debug"
    while not read_metrics(folder / "metrics.jsonl") and all(process.poll() is None for process in processes):
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    said = finish(processes, code=STOPPED)
    assert "Stopped on request at step" in said[0]
    (step,) = saved_steps(folder / "checkpoints")
    assert 2 <= step < 1000


def test_an_unreachable_coordinator_is_one_error_with_a_remedy() -> None:
    port = free_port()
    with pytest.raises(UserError, match=f"127.0.0.1:{port} could not be reached within 1 s .* check that host 0 runs"):
        join_hosts(f"127.0.0.1:{port}", 2, 1, timeout=1)


def test_a_coordinator_that_no_host_joins_ends_with_an_error() -> None:
    """JAX itself ends such a process."""
    port = free_port()
    program = f"from pistar.distributed.multihost import join_hosts; join_hosts('127.0.0.1:{port}', 2, 0, timeout=2)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert f"error: the hosts did not join within 2 s at 127.0.0.1:{port}; check that all of them run" in done.stderr


def test_a_host_that_hangs_ends_the_others() -> None:
    port = free_port()
    program = f"""
import sys, time
from pistar.distributed import multihost as hosts
hosts.HEARTBEAT_SECONDS = 4
hosts.join_hosts("127.0.0.1:{port}", 2, int(sys.argv[1]))
print("met", flush=True)
time.sleep(300)
"""
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", program, host], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for host in "01"
    )
    try:
        assert second.stdout is not None
        assert second.stdout.readline() == "met\n"
        second.send_signal(signal.SIGSTOP)
        said = first.communicate(timeout=100)[1]
        assert first.returncode != 0
        assert "error: another host was lost" in said, said
    finally:
        second.kill()
        second.communicate()


def test_two_hosts_make_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTBEAT_SECONDS", "300")
    said = finish(start(tmp_path, 2, "--dry-run", imitate=True))
    assert "data, weights and shapes fit together" in said[0]
    assert not (tmp_path / "runs").exists()


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(UserError, match="--coordinator is node0; give host 0's name and a free port"):
        join_hosts("node0", 2, 1)


def test_incomplete_or_impossible_host_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="together, or none of them"):
        join_hosts("127.0.0.1:1", None, None)
    with pytest.raises(UserError, match="--host is 2 of 2 hosts; they are numbered 0 to 1"):
        join_hosts("127.0.0.1:1", 2, 2)
