"""Learning from practice: an iteration's updates of the policy."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pistar.agents.ript import RiptBatch, RiptState
from pistar.training.exploring import Chunks, join
from pistar.training.metrics import Window, add_windows, as_window
from pistar.training.practice import Lesson, chance
from pistar.training.run import OnlineRun
from pistar.types import AnyArray, Observation


class Learner:
    """Updates of the policy, from lessons and demonstrations."""

    def __init__(self, run: OnlineRun, where: Any) -> None:  # noqa: ANN401  # shardings of the state
        self._run = run
        agent = run.agent

        def dispatch(state: RiptState, batches: RiptBatch, keys: jax.Array) -> tuple[RiptState, Window]:
            def update(state: RiptState, given: tuple[RiptBatch, jax.Array]) -> tuple[RiptState, Window]:
                state, metrics = agent.update(state, *given)
                return state, as_window(metrics)

            state, windows = jax.lax.scan(update, state, (batches, keys))
            return state, jax.tree.map(jnp.sum, windows)

        self._dispatch = jax.jit(dispatch, donate_argnums=0, out_shardings=(where, None))
        self._restart = jax.jit(agent.restarted, donate_argnums=0, out_shardings=where)
        self._drift = jax.jit(agent.drift)

    def learn(
        self, state: RiptState, lessons: Sequence[Lesson], iteration: int
    ) -> tuple[RiptState, Window, dict[str, float]]:
        """As many updates as configured, or until the policy is far from the one that acted."""
        config, online, since = self._run.config, self._run.config.online, time.monotonic()
        if not lessons:
            return state, {}, {"learning/chunks": 0.0, "learning/updates": 0.0, "learning/drift": 0.0}
        chunks = join([lesson.chunks for lesson in lessons])
        advantages = np.concatenate([np.full(len(each.chunks), each.advantage, np.float32) for each in lessons])
        rows = config.batch_size - self._run.demonstrated
        updates = online.updates or math.ceil(online.epochs * len(chunks) / rows)
        calls = math.ceil(updates / config.updates_per_dispatch)
        key = jax.random.fold_in(chance(config, 1), iteration)
        behaviour = jax.tree.map(jnp.copy, self._run.agent.policy_params(state))
        if online.restart:
            state = self._restart(state)
        picks = _picks(np.random.default_rng([config.seed, iteration, 2**20]), len(chunks), rows)
        window: Window = {}
        probe: RiptBatch | None = None
        made, drift = 0, 0.0
        looks = max(1, calls // 10)
        before = int(state.policy.step)  # asked once: the device works on one call while the next is made ready
        for call in range(calls):
            first = before + made
            batches = [
                self._batch(chunks, advantages, next(picks), first + at) for at in range(config.updates_per_dispatch)
            ]
            probe = probe if probe is not None else batches[0]
            keys = jax.vmap(lambda at: jax.random.fold_in(key, at))(made + jnp.arange(len(batches)))
            stacked = jax.tree.map(lambda *each: np.stack(each), *batches)
            state, measured = self._dispatch(state, stacked, keys)
            window, made = add_windows(window, measured), made + len(batches)
            if call == calls - 1 or (online.max_drift is not None and call % looks == looks - 1):
                drift = float(self._drift(state, behaviour, probe, chance(config, 4)))
                if online.max_drift is not None and drift > online.max_drift:
                    break
        learnt = {
            "learning/chunks": float(len(chunks)),
            "learning/updates": float(made),
            "learning/drift": drift,
            "time/learning_seconds": time.monotonic() - since,
        }
        return state, window, learnt

    def _batch(self, chunks: Chunks, advantages: np.ndarray, picked: np.ndarray, update: int) -> RiptBatch:
        own = jax.tree.map(lambda rows: rows[picked], chunks.observations)
        parts = [(own, chunks.actions[picked], chunks.valid[picked], advantages[picked])]
        if self._run.demonstrations is not None:
            shown = self._run.demonstrations.sample_policy_batch(update)
            parts.append((shown.observations, shown.actions, shown.valid, np.zeros(len(shown.actions), np.float32)))
        together: tuple[Observation, AnyArray, AnyArray, AnyArray] = jax.tree.map(
            lambda *each: np.concatenate([np.asarray(rows) for rows in each]), *parts
        )
        demonstration = np.arange(len(together[1])) >= len(picked)
        return RiptBatch(*together, demonstration)


def _picks(rng: np.random.Generator, count: int, rows: int) -> Iterator[np.ndarray]:
    """Rows for batch after batch: everything once, in a new order each time round."""
    order = np.zeros(0, int)
    while True:
        while len(order) < rows:
            order = np.concatenate([order, rng.permutation(count)])
        yield order[:rows]
        order = order[rows:]
