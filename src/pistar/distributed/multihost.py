"""Several hosts in one run: joining them, barriers and messages between them, and which of them writes.

JAX's distributed runtime does the work; these are the few things a run asks of it.
"""

import atexit
import collections
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils

from pistar.distributed.sharding import own_mesh
from pistar.errors import UserError

START_SECONDS = 300
HEARTBEAT_SECONDS = 45
"""Seconds without a heartbeat after which a host counts as dead and the others end: they could only wait for it. Less
than a minute, and long enough for a machine that pauses for a while."""

BARRIER_SECONDS = 2 * 60 * 60
"""Longest wait at a barrier. One host may decode a dataset while others wait; a dead one is noticed by its
heartbeat."""

T = TypeVar("T")

_barriers = itertools.count()
_preemption_checks = itertools.count()
_gathered: collections.Counter[str] = collections.Counter()


def join_hosts(
    coordinator: str | None,
    hosts: int | None,
    host: int | None,
    timeout: int = START_SECONDS,
    say: Callable[[str], object] = lambda _: None,
) -> None:
    """Join the other hosts at the coordinator's HOST:PORT, or where Slurm, Open MPI or Kubernetes says.

    Call it before anything else is asked of JAX.
    """
    if (coordinator is None) != (hosts is None) or (hosts is None) != (host is None):
        raise UserError(
            "Give --coordinator HOST:PORT, --hosts and --host together, or none of them with --distributed."
        )
    if hosts is not None and host is not None and not 0 <= host < hosts:
        raise UserError(f"--host is {host} of {hosts} hosts; they are numbered 0 to {hosts - 1}.")
    if coordinator is not None:
        name, _, port = coordinator.rpartition(":")
        if not name or not port.isdecimal():
            raise UserError(
                f"--coordinator is {coordinator}; give host 0's name and a free port of it, as node0:29400."
            )
    where = coordinator or "the launcher's address"
    say(f"waiting for the other hosts at {where}, at most {timeout} s …")
    if coordinator is not None and host:
        _wait_for_coordinator(coordinator, timeout)
    on_death = _MessageOnDeath()
    on_death.set(
        f"the hosts did not join within {timeout} s at {where}; check that all of them run, that the address is host "
        "0's own, that its port is free and that no firewall is in between."
    )
    try:
        jax.distributed.initialize(
            coordinator,
            hosts,
            host,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except Exception as error:  # of several unrelated types, with pages of text
        reason = " ".join(str(error).split())[:200]
        if coordinator is None and "coordinator_address" in reason:
            raise UserError(
                "--distributed finds no launcher (Slurm, Open MPI, Kubernetes); start by one, or give --coordinator "
                "HOST:PORT, --hosts and --host."
            ) from error
        raise UserError(
            f"The hosts did not join ({reason}); check that all of them run and that the port is free."
        ) from error
    if jax.default_backend() == "cpu":
        # CPU programs read back from the compilation cache lose the order of their collectives; between processes they
        # then mix them up ("20 vs 1 bytes") and die.
        jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call]
    on_death.set(LOST)


def _wait_for_coordinator(coordinator: str, timeout: int) -> None:
    """Wait until the coordinator answers. JAX itself would end the process with pages of text."""
    name, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((name.strip("[]"), int(port)), timeout=max(1, timeout)).close()
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise UserError(
                f"{coordinator} could not be reached within {timeout} s ({error}); check that host 0 runs, that the "
                "address is its own and that no firewall is in between."
            ) from error
        return


LOST = (
    "another host was lost, or this process was ended; the checkpoints saved so far are complete: see above for the "
    "cause, and continue with --resume."
)


class _MessageOnDeath:
    """Prints a message when this process dies.

    JAX ends a process whose peers died from within, with a page of C++ output. A small process beside it then says what
    that means.
    """

    _PROGRAM = """
import sys
words = sys.stdin.read().splitlines()
if words and words[-1]:
    print("error:", words[-1], file=sys.stderr)
"""

    def __init__(self) -> None:
        # In its own process group: a signal that ends this process must not end that one.
        self._beside = subprocess.Popen(
            [sys.executable, "-c", self._PROGRAM], stdin=subprocess.PIPE, start_new_session=True, text=True
        )
        atexit.register(self.set, "")

    def set(self, message: str) -> None:
        """Set the message from now on; an empty one prints nothing."""
        assert self._beside.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._beside.stdin.write(f"{message}\n")
            self._beside.stdin.flush()


@contextlib.contextmanager
def explain_lost_hosts() -> Iterator[None]:
    """Turn the failure of a program whose peer host is gone into an error that says so."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if several() and any(word in str(error) for word in ("Gloo", "NCCL", "Connection", "UNAVAILABLE")):
            raise UserError(LOST) from error
        raise


def is_leader() -> bool:
    """Whether this is the one host that writes what all share."""
    return int(jax.process_index()) == 0


def several() -> bool:
    """Whether the run has more than one host."""
    return int(jax.process_count()) > 1


def barrier(name: str) -> None:
    """Wait until all hosts are here. Goes through the coordinator; only programs communicate between devices."""
    if several():
        import orbax.checkpoint as ocp  # a second to import

        # Numbered: a barrier's name can be used once, and two saves of one step are possible.
        processes = set(range(jax.process_count()))
        ocp.multihost.sync_global_processes(f"{next(_barriers)}: {name}", processes=processes, timeout=BARRIER_SECONDS)


def all_gather(name: str, value: T) -> list[T]:
    """The values of all hosts, in their order. Every host calls it equally often; a value is what JSON can hold.

    Goes through the coordinator, as `barrier`, so it may happen beside programs that communicate between devices.
    """
    if not several():
        return [value]
    import orbax.checkpoint as ocp  # a second to import

    client = ocp.multihost.get_jax_distributed_client()
    number, own = _gathered[name], int(jax.process_index())
    _gathered[name] += 1
    client.key_value_set(f"pistar/{name}/{number}/{own}", json.dumps(value))
    values = [
        client.blocking_key_value_get(f"pistar/{name}/{number}/{host}", BARRIER_SECONDS * 1000)
        for host in range(jax.process_count())
    ]
    if number:  # every host has sent its next value, so every host has read the one before
        client.key_value_delete(f"pistar/{name}/{number - 1}/{own}")
    return [json.loads(each) for each in values]


@contextlib.contextmanager
def on_this_host_alone() -> Iterator[None]:
    """Compile programs for this host's devices alone: the other hosts need not run them."""
    with jax.set_mesh(own_mesh()) if several() else contextlib.nullcontext():
        yield


def own_share(count: int) -> range:
    """The indices, out of `count`, that are this host's."""
    host, hosts = int(jax.process_index()), int(jax.process_count())
    return range(host * count // hosts, (host + 1) * count // hosts)


def own_name(name: str, host: int, hosts: int) -> str:
    """The name of a file or folder that each host has its own of: `successes-0-of-2.npz` of two hosts."""
    stem, dot, suffix = name.partition(".")
    return name if hosts == 1 else f"{stem}-{host}-of-{hosts}{dot}{suffix}"


def compile_in_lockstep(name: str, program: Any) -> Callable[..., Any]:  # noqa: ANN401  # what jax.jit gives
    """Wrap a jitted program so that it first runs when all hosts have compiled it.

    A collective times out while another host still compiles. Arguments of one tree structure must have one shape.
    """
    if not several():
        called: Callable[..., Any] = program
        return called
    compiled: dict[Any, Callable[..., Any]] = {}

    def call(*args: object) -> Any:  # noqa: ANN401  # the program's
        structure = jax.tree.structure(args)
        if structure not in compiled:
            compiled[structure] = program.lower(*args).compile()
            barrier(f"{name} is compiled")
        return compiled[structure](*args)

    return call


def preempted() -> bool:
    """Whether a SIGTERM to any host has reached all of them. Every host calls it equally often.

    The calls are counted, because JAX names one of them, the next, and a step may be skipped.
    """
    return several() and bool(multihost_utils.reached_preemption_sync_point(next(_preemption_checks)))


def leave_hosts() -> None:
    """Leave in order, so that no host counts as dead."""
    with contextlib.suppress(RuntimeError):  # this host never joined
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
