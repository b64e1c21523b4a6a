"""Several hosts as one: how they find each other, who writes, and where they wait for one another.

JAX's own runtime does the work; these are the few things a run asks of it.
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

from pistar.errors import UserError
from pistar.training.sharding import own_mesh

START_SECONDS = 300
HEARTBEAT_SECONDS = 45
"""A host that has not been heard of for so long is dead, and the others end too: they could only wait for it.

Under a minute, and long enough for a machine that stands still for a while."""

MEETING_SECONDS = 2 * 60 * 60
"""One host may decode a dataset while others wait. One that died is noticed by its heart."""

T = TypeVar("T")

_meetings = itertools.count()
_questions = itertools.count()
_said: collections.Counter[str] = collections.Counter()


def join_hosts(
    coordinator: str | None,
    hosts: int | None,
    host: int | None,
    timeout: int = START_SECONDS,
    say: Callable[[str], object] = lambda _: None,
) -> None:
    """Meet the others at the coordinator's HOST:PORT; with nothing given, where Slurm, Open MPI or Kubernetes says.

    Before anything else is asked of JAX.
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
    say(f"waiting for the other hosts at {coordinator or 'the place the launcher names'}, at most {timeout} s …")
    if coordinator is not None and host:
        _knock(coordinator, timeout)
    last_words = _LastWords()
    last_words.are(
        f"the hosts did not meet within {timeout} s at {coordinator or 'the place the launcher names'}; check that all "
        "of them run, that the address is host 0's own, its port free and no firewall between."
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
    except Exception as error:  # of several unrelated types, and with pages of text
        reason = " ".join(str(error).split())[:200]
        if coordinator is None and "coordinator_address" in reason:
            raise UserError(
                "--distributed finds no launcher (Slurm, Open MPI, Kubernetes); start by one, or give --coordinator "
                "HOST:PORT, --hosts and --host."
            ) from error
        raise UserError(
            f"The hosts did not meet ({reason}); check that all of them run and the port is free."
        ) from error
    if jax.default_backend() == "cpu":
        # XLA's CPU programs forget, when read back from the cache, that their collectives keep an order; between
        # processes they then take one for another ("20 vs 1 bytes") and die.
        jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call]
    last_words.are(LOST)


def _knock(coordinator: str, timeout: int) -> None:
    """Until somebody answers. JAX itself would end the process, with pages of text."""
    name, _, port = coordinator.rpartition(":")
    patience = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((name.strip("[]"), int(port)), timeout=max(1, timeout)).close()
        except OSError as error:
            if time.monotonic() < patience:
                time.sleep(0.2)
                continue
            raise UserError(
                f"{coordinator} could not be reached within {timeout} s ({error}); check that host 0 runs, that the "
                "address is its own and that no firewall is between."
            ) from error
        return


LOST = (
    "another host was lost, or this process was ended; what the run has saved, if anything, is whole: see above for "
    "the cause, and go on with --resume."
)


class _LastWords:
    """JAX ends a process whose fellows died from within, in a page of C++. A process beside it says what that means."""

    _PROGRAM = """
import sys
words = sys.stdin.read().splitlines()
if words and words[-1]:
    print("error:", words[-1], file=sys.stderr)
"""

    def __init__(self) -> None:
        # In a group of its own: what ends this process must not end that one.
        self._beside = subprocess.Popen(
            [sys.executable, "-c", self._PROGRAM], stdin=subprocess.PIPE, start_new_session=True, text=True
        )
        atexit.register(self.are, "")

    def are(self, words: str) -> None:
        """From now on; none, if this process may end as it likes."""
        assert self._beside.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._beside.stdin.write(f"{words}\n")
            self._beside.stdin.flush()


@contextlib.contextmanager
def lost_hosts_named() -> Iterator[None]:
    """Where a program fails because a host it speaks with is gone, that is what the user is told."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if several() and any(word in str(error) for word in ("Gloo", "NCCL", "Connection", "UNAVAILABLE")):
            raise UserError(LOST) from error
        raise


def is_leader() -> bool:
    """The one host that writes what all share."""
    return int(jax.process_index()) == 0


def several() -> bool:
    """Whether there is anybody to wait for."""
    return int(jax.process_count()) > 1


def meet(where: str) -> None:
    """Wait until all are there. By messages to the coordinator: words between devices are for programs alone."""
    if several():
        import orbax.checkpoint as ocp  # a second to import

        # Told apart by number: a barrier's name serves once, and two saves of one step are possible.
        processes = set(range(jax.process_count()))
        ocp.multihost.sync_global_processes(f"{next(_meetings)}: {where}", processes=processes, timeout=MEETING_SECONDS)


def exchange(subject: str, word: T) -> list[T]:
    """What each host says on a subject, in their order. All are asked equally often; a word is what JSON holds.

    By messages to the coordinator, as `meet`: it may happen beside programs that speak between devices.
    """
    if not several():
        return [word]
    import orbax.checkpoint as ocp  # a second to import

    client = ocp.multihost.get_jax_distributed_client()
    number, own = _said[subject], int(jax.process_index())
    _said[subject] += 1
    client.key_value_set(f"pistar/{subject}/{number}/{own}", json.dumps(word))
    said = [
        client.blocking_key_value_get(f"pistar/{subject}/{number}/{host}", MEETING_SECONDS * 1000)
        for host in range(jax.process_count())
    ]
    if number:  # everybody has spoken again, so everybody has heard what was said before
        client.key_value_delete(f"pistar/{subject}/{number - 1}/{own}")
    return [json.loads(each) for each in said]


@contextlib.contextmanager
def by_itself() -> Iterator[None]:
    """Programs made meanwhile are of this host's devices alone: the others need not run them."""
    with jax.set_mesh(own_mesh()) if several() else contextlib.nullcontext():
        yield


def own_share(count: int) -> range:
    """Which of so many things are this host's."""
    host, hosts = int(jax.process_index()), int(jax.process_count())
    return range(host * count // hosts, (host + 1) * count // hosts)


def own_name(name: str, host: int, hosts: int) -> str:
    """Of a file or folder that each host has of its own: best.npz where there is one, best-0-of-2.npz of two."""
    stem, dot, suffix = name.partition(".")
    return name if hosts == 1 else f"{stem}-{host}-of-{hosts}{dot}{suffix}"


def in_step(name: str, program: Any) -> Callable[..., Any]:  # noqa: ANN401  # what jax.jit gives
    """The same, but first called when all hosts have compiled it: a collective does not wait for one that still does.

    Arguments of one structure have one shape.
    """
    if not several():
        called: Callable[..., Any] = program
        return called
    compiled: dict[Any, Callable[..., Any]] = {}

    def call(*args: object) -> Any:  # noqa: ANN401  # the program's
        structure = jax.tree.structure(args)
        if structure not in compiled:
            compiled[structure] = program.lower(*args).compile()
            meet(f"{name} is compiled")
        return compiled[structure](*args)

    return call


def preempted() -> bool:
    """Whether a SIGTERM of any host has reached all of them. Asked by all equally often.

    By the count of these questions, because JAX names one of them, the next, and a step may be skipped.
    """
    return several() and bool(multihost_utils.reached_preemption_sync_point(next(_questions)))


def part() -> None:
    """Leave in order, so that nobody is taken for dead."""
    with contextlib.suppress(RuntimeError):  # it was never joined
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
