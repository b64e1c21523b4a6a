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

from pistar.cli_runs import STOPPED
from pistar.errors import UserError
from pistar.training.hosts import join_hosts
from pistar.training.metrics import read_metrics
from pistar.training.saving import saved_steps
from several_hosts import finish, free_port, start_hosts


def start(folder: Path, hosts: int, *flags: str, **changes: object) -> "list[subprocess.Popen[str]]":
    """A small run, by so many."""
    return start_hosts("train_together.py", hosts, str(folder), json.dumps(changes), *flags)


def told(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "runs" / "debug" / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def compare(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=2e-3, atol=1e-4, err_msg=name)


def lose_a_host(folder: Path) -> tuple[list[int], str]:
    """Two train, one is killed once they have saved: what is saved, and what the other said of it."""
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


def test_two_hosts_train_what_one_trains_and_one_goes_on_where_a_dead_host_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTBEAT_SECONDS", "15")  # a third of what it is for users: nobody has to wait for so long
    alone, together = tmp_path / "alone", tmp_path / "together"
    finish(start(alone, 1))
    steps, said = lose_a_host(together)
    if not steps and "stopped sending heartbeats" in said:  # this machine stood still for so long: once more
        together = tmp_path / "again"
        steps, said = lose_a_host(together)
    assert steps, f"they ended before one was killed: {said}"
    assert steps[-1] < 12, "it was done before a host could be killed"
    assert "another host was lost" in said, said
    assert "go on with --resume" in said
    finish(start(together, 1, "--resume"))
    compare(told(together), told(alone))


def test_a_stop_of_one_host_reaches_the_other_and_both_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTBEAT_SECONDS", "300")  # a busy machine may stand still: here nobody is to be given up
    processes = start(tmp_path, 2, steps=2000, save_every=1000, imitate=True)
    folder = tmp_path / "runs" / "debug"
    while not read_metrics(folder / "metrics.jsonl") and all(process.poll() is None for process in processes):
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    said = finish(processes, code=STOPPED)
    assert "Stopped on request at step" in said[0]
    (step,) = saved_steps(folder / "checkpoints")
    assert 2 <= step < 1000


def test_an_address_where_nobody_is_names_itself_and_a_remedy() -> None:
    port = free_port()
    with pytest.raises(UserError, match=f"127.0.0.1:{port} could not be reached within 1 s .* check that host 0 runs"):
        join_hosts(f"127.0.0.1:{port}", 2, 1, timeout=1)


def test_a_host_that_nobody_comes_to_says_so() -> None:
    """JAX ends such a process from within."""
    port = free_port()
    program = f"from pistar.training.hosts import join_hosts; join_hosts('127.0.0.1:{port}', 2, 0, timeout=2)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert f"error: the hosts did not meet within 2 s at 127.0.0.1:{port}; check that all of them run" in done.stderr


def test_a_host_that_stands_still_is_given_up() -> None:
    port = free_port()
    program = f"""
import sys, time
from pistar.training import hosts
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


def test_two_hosts_rehearse_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTBEAT_SECONDS", "300")
    said = finish(start(tmp_path, 2, "--dry-run", imitate=True))
    assert "data, weights and shapes agree" in said[0]
    assert not (tmp_path / "runs").exists()


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(UserError, match="--coordinator is node0; give host 0's name and a free port"):
        join_hosts("node0", 2, 1)


def test_half_an_address_is_refused() -> None:
    with pytest.raises(UserError, match="together, or none of them"):
        join_hosts("127.0.0.1:1", None, None)
    with pytest.raises(UserError, match="--host is 2 of 2 hosts; they are numbered 0 to 1"):
        join_hosts("127.0.0.1:1", 2, 2)
