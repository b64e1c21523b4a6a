"""Several hosts as one: how they find each other, who writes, and where they wait for one another.

JAX's own runtime does the work; these are the few things a run asks of it.
"""

import contextlib

import jax
from jax.experimental import multihost_utils

from pistar.errors import UserError

START_SECONDS = 300
HEARTBEAT_SECONDS = 30
"""A host that has not been heard of for so long is dead, and the others end too: they could only wait for it."""


def join_hosts(coordinator: str | None, hosts: int | None, host: int | None, timeout: int = START_SECONDS) -> None:
    """Meet the others at the coordinator's HOST:PORT; with nothing given, where Slurm, Open MPI or Kubernetes says.

    Before anything else is asked of JAX.
    """
    if (coordinator is None) != (hosts is None) or (hosts is None) != (host is None):
        raise UserError(
            "Give --coordinator HOST:PORT, --hosts and --host together, or none of them with --distributed."
        )
    if hosts is not None and host is not None and not 0 <= host < hosts:
        raise UserError(f"--host is {host} of {hosts} hosts; they are numbered 0 to {hosts - 1}.")
    where = coordinator or "the coordinator the launcher names"
    try:
        jax.distributed.initialize(
            coordinator,
            hosts,
            host,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except Exception as error:  # of several unrelated types, and with pages of text
        reason = " ".join(str(error).split())[:200]
        if coordinator is None and "coordinator_address" in reason:
            raise UserError(
                "--distributed finds no launcher (Slurm, Open MPI, Kubernetes); start by one, or give --coordinator "
                "HOST:PORT, --hosts and --host."
            ) from error
        raise UserError(
            f"{where} could not be reached within {timeout} s ({reason}); check that host 0 runs, that the address is "
            "its own and that no firewall is between."
        ) from error


def is_leader() -> bool:
    """The one host that writes what all share."""
    return int(jax.process_index()) == 0


def several() -> bool:
    """Whether there is anybody to wait for."""
    return int(jax.process_count()) > 1


def meet(where: str) -> None:
    """Wait until all are there."""
    if several():
        multihost_utils.sync_global_devices(where)


def preempted(step: int) -> bool:
    """Whether a SIGTERM of any host has reached all of them, at a step that is the same for all."""
    return several() and bool(multihost_utils.reached_preemption_sync_point(step))


def part() -> None:
    """Leave in order, so that nobody is taken for dead."""
    with contextlib.suppress(RuntimeError):  # it was never joined
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
