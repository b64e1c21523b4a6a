"""The contract of an algorithm in an online run: from rollouts to updates. And what all of them share."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from pistar.agents.base import TRAINED
from pistar.agents.flow_bc import velocity_distance
from pistar.distributed.multihost import all_gather, compile_in_lockstep, several
from pistar.distributed.sharding import on_own_devices, replicated
from pistar.models.pi0 import Params
from pistar.online.collector import DRIFT, UPDATES, Collected, purpose_key
from pistar.online.exploration import PolicySnapshot
from pistar.telemetry.metrics import MetricSums, add_sums
from pistar.training.dispatch import make_dispatch
from pistar.training.setup import OnlineRun

T = TypeVar("T")
State = TypeVar("State")
Kept = TypeVar("Kept")
Learnt = TypeVar("Learnt")


@dataclasses.dataclass(frozen=True)
class UpdateScale:
    """Factors on what is configured for an iteration's updates."""

    lr: float = 1.0
    epochs: float = 1.0


@runtime_checkable
class OnlineLearner(Protocol[State, Kept, Learnt]):
    """An algorithm among its rollouts.

    `State` is its agent's, `Kept` what it keeps of a group, `Learnt` what an iteration learns from.
    """

    def check(self, instruction: str) -> list[str]:
        """Refuse, before anything is rolled out, a task that cannot be learnt; returns notes."""
        ...

    def snapshot(self, state: State, iteration: int, *, own_copy: bool = False) -> PolicySnapshot:
        """The policy as it acts now. An own copy outlasts the updates, which use the state up."""
        ...

    def collect(self, policy: PolicySnapshot, iteration: int) -> Collected[Kept]:
        """An iteration's rollouts. May run beside `learn`, so it changes nothing that is learnt from."""
        ...

    def take_in(self, kept: Sequence[Kept]) -> Learnt:
        """What an iteration learns from, given what was just kept."""
        ...

    def learn(
        self, state: State, learnt_from: Learnt, iteration: int, scale: UpdateScale, /
    ) -> tuple[State, MetricSums, dict[str, float]]:
        """An iteration's updates, their metrics, and other metrics of the iteration."""
        ...

    def updates(self, state: State) -> int:
        """Updates behind a state, since the run started."""
        ...

    def memory_writer(self) -> Callable[[Path], None]:
        """A function that writes its memory, as it is now, into a checkpoint's folder."""
        ...

    def load_memory(self, folder: Path) -> None:
        """Read its memory from a checkpoint's folder."""
        ...


NOTHING_LEARNT = {"train/chunks": 0.0, "train/updates": 0.0, "train/drift": 0.0}
"""Metrics of an iteration without updates."""


class IterationUpdates:
    """The compiled programs of an online run's updates, and the loop that calls them."""

    def __init__(self, run: OnlineRun, where: Any) -> None:  # noqa: ANN401  # shardings of the state
        self._run, agent = run, run.agent

        def drift(state: Any, behaviour: Params, batch: Any, key: jax.Array) -> jax.Array:  # noqa: ANN401
            return velocity_distance(run.config.model, agent.raw_params(state), behaviour, batch, key)

        def norm(state: Any) -> jax.Array:  # noqa: ANN401  # the agent's own
            length: jax.Array = optax.tree.norm(agent.components(state)[TRAINED])
            return length

        self._dispatch = make_dispatch(agent, where)
        self._drift = compile_in_lockstep("the drift", jax.jit(drift))
        self._norm = compile_in_lockstep("the norm", jax.jit(norm))
        self.copy = jax.jit(_copied)
        gather = jax.jit(_copied, out_shardings=replicated(run.mesh))
        self._gather = compile_in_lockstep("the acting policy", gather)

    def acting(self, weights: T, *, own_copy: bool) -> T:
        """Weights to act with on this host: gathered from all hosts, or copied if they must outlast the updates."""
        if several():
            gathered: T = self._gather(weights)
            return on_own_devices(gathered)
        return self.copy(weights) if own_copy else weights

    def run(
        self,
        state: Any,  # noqa: ANN401  # the agent's own
        groups: Iterator[tuple[Any, ...]],
        calls: int,
        iteration: int,
        lr_scale: float,
        probe: Callable[[tuple[Any, ...]], Any],
        behaviour: Params,
    ) -> tuple[Any, MetricSums, dict[str, float]]:
        """Make an iteration's updates, or stop early if the policy has drifted too far from the one that acted.

        `probe` makes, of the first call's batches, the batch on which the drift is measured.
        """
        config, most = self._run.config, self._run.online.max_drift
        key = jax.random.fold_in(purpose_key(config, UPDATES), iteration)
        sums: MetricSums = {}
        measured_on, made, drift, between = None, 0, 0.0, max(1, calls // 10)
        for call, batches in enumerate(groups):
            measured_on = probe(batches) if measured_on is None else measured_on
            state, measured = self._dispatch(state, batches, key, jnp.int32(made), jnp.float32(lr_scale))
            sums, made = add_sums(sums, measured), made + len(batches)
            if call == calls - 1 or (most is not None and call % between == between - 1):
                drift = float(self._drift(state, behaviour, measured_on, purpose_key(config, DRIFT)))
                drift = all_gather("drift", drift)[0]  # by one host's number: none must stop by a last bit
                if most is not None and drift > most:
                    break
        metrics = {
            "train/updates": float(made),
            "train/drift": drift,
            "train/weight_norm": float(self._norm(state)),
        }
        return state, sums, metrics


def _copied(tree: T) -> T:
    """Copy as one program: one for each array takes longer to compile."""
    return jax.tree.map(jnp.copy, tree)  # type: ignore[no-any-return]
