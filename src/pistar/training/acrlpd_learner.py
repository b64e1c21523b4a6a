"""What ACRLPD makes of practice: every episode goes into a replay buffer, and updates draw from it and from data."""

import itertools
import json
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pistar.agents.acrlpd import Acrlpd, AcrlpdState
from pistar.agents.flow_bc import velocity_distance
from pistar.config import AcrlpdConfig
from pistar.data.loader import Loader, Part
from pistar.data.replay import Replay
from pistar.data.replay_files import load_replay, save_replay
from pistar.data.source import ChunkSource
from pistar.errors import UserError
from pistar.training.acting import Judge
from pistar.training.exploring import Behaviour
from pistar.training.learner import Stride
from pistar.training.metrics import Window, add_windows, as_sound_window
from pistar.training.practice import Group, Practice, Practised, chance
from pistar.training.run import OnlineRun
from pistar.training.saving import saved_steps
from pistar.training.sharding import over_rows
from pistar.types import ChunkBatch, Episode

EXPERIENCE_FILE = "experience.json"
"""In a checkpoint: how far the replay buffer and the batches drawn from it are."""


class AcrlpdLearner:
    """ACRLPD's updates, in part from datasets and in part from own experience (RLPD)."""

    def __init__(self, run: OnlineRun, practice: Practice, where: Any) -> None:  # noqa: ANN401  # shardings of the state
        assert isinstance(run.agent, Acrlpd)
        assert isinstance(run.config.algorithm, AcrlpdConfig)
        self._run, self._agent, self._practice = run, run.agent, practice
        self._candidates = run.config.algorithm.candidates
        config, online = run.config, run.config.online
        parts = () if run.demonstrations is None else run.demonstrations.parts
        self._data = [part.source for part in parts if isinstance(part.source, ChunkSource)]
        self.replay = Replay(
            online.replay_capacity,
            run.ground.inputs,
            config.windows(),
            config.data.rewards,
            # A row is a step, whatever rate a dataset says it was recorded at; `check` tells where they differ.
            fps=self._data[0].fps if self._data else float(practice.scene.fps),
            min_steps=online.replay_min_steps,
        )
        self.loader = Loader(
            [*_weighing(parts, online.demonstrations), Part(self.replay, 1 - online.demonstrations)],
            config.batch_size,
            config.seed,
            pool=config.data.pool,
            sharding=over_rows(run.mesh),
        )
        self._drawn = 0
        """Batches so far. Goes on after a rollback, so that no batch comes twice."""
        agent = self._agent

        def dispatch(
            state: AcrlpdState, batches: tuple[ChunkBatch, ...], keys: jax.Array, rate: jax.Array
        ) -> tuple[AcrlpdState, Window]:
            def update(state: AcrlpdState, given: tuple[ChunkBatch, jax.Array]) -> tuple[AcrlpdState, Window]:
                state, metrics = agent.update(state, *given, rate)
                return state, as_sound_window(metrics)

            if len(batches) == 1:
                return update(state, (batches[0], keys[0]))
            stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
            state, windows = jax.lax.scan(update, state, (stacked, keys))
            return state, jax.tree.map(jnp.sum, windows)

        def drift(state: AcrlpdState, behaviour: dict[str, jax.Array], batch: ChunkBatch, key: jax.Array) -> jax.Array:
            return velocity_distance(config.model, agent.raw_params(state), behaviour, batch, key)

        self._dispatch = jax.jit(dispatch, donate_argnums=0, out_shardings=(where, None))
        self._drift = jax.jit(drift)
        self._norm = jax.jit(lambda state: optax.tree.norm(state.policy.trained))

    # --- Acting -------------------------------------------------------------------------------------------------------

    def check(self, instruction: str) -> list[str]:
        """Refuse, before anything is rolled out, what the replay buffer could not take; and what to know about it."""
        del instruction
        scene, capacity = self._practice.scene, self._run.config.online.replay_capacity
        if capacity < scene.limit:
            raise UserError(
                f"online.replay_capacity is {capacity} steps and an episode of {scene.name} may have {scene.limit}; "
                "give it room for some hundred of them."
            )
        if not self._data or self._data[0].fps == scene.fps:
            return []
        return [
            f"the data says it has {self._data[0].fps:g} frames a second, and {scene.name} takes {scene.fps} actions; "
            "make sure that a row of the one is a step of the other"
        ]

    def behaviour(self, state: AcrlpdState, iteration: int, *, own_copy: bool = False) -> Behaviour:
        """The policy as it acts now, by the best of N in the eyes of its critic. A copy outlasts the updates, which use
        the state up."""
        params, critic = self._agent.policy_params(state), state.critic
        if own_copy:
            params, critic = jax.tree.map(jnp.copy, (params, critic))
        if self._candidates == 1:
            return Behaviour(params, iteration)
        return Behaviour(params, iteration, best_of=self._candidates, judge=Judge(self._agent.critic, critic))

    def practise(self, behaviour: Behaviour, iteration: int) -> Practised[list[Episode]]:
        """An iteration's rollouts."""
        return self._practice.practise(behaviour, iteration, _episodes, record=True, plans=False)

    # --- Learning -----------------------------------------------------------------------------------------------------

    def lessons(self, kept: Sequence[list[Episode]], iteration: int) -> int:
        """Take all episodes in; how many steps they had."""
        del iteration
        episodes = list(itertools.chain.from_iterable(kept))
        for episode in episodes:
            self.replay.add(episode)
        return sum(len(episode.actions) for episode in episodes)

    def learn(
        self, state: AcrlpdState, lessons: int, iteration: int, stride: Stride
    ) -> tuple[AcrlpdState, Window, dict[str, float]]:
        """As many updates as configured, or until the policy is far from the one that acted."""
        config, online, since = self._run.config, self._run.config.online, time.monotonic()
        own = self.replay.source()
        known = {
            "replay/steps": float(len(self.replay)),
            "replay/episodes": float(self.replay.episodes),
            "replay/bytes": float(self.replay.bytes),
        }
        if own is not None:
            known["replay/success"] = float(own.success.mean())
        if own is None and not self._data:
            return state, {}, known | {"learning/chunks": 0.0, "learning/updates": 0.0, "learning/drift": 0.0}
        rows = config.batch_size - self._run.demonstrated
        updates = online.updates or math.ceil(online.epochs * lessons / rows)
        calls = math.ceil(stride.epochs * updates / config.updates_per_dispatch)
        key = jax.random.fold_in(chance(config, 1), iteration)
        behaviour = jax.tree.map(jnp.copy, self._agent.policy_params(state))
        window: Window = {}
        probe: ChunkBatch | None = None
        made, drift, looks = 0, 0.0, max(1, calls // 10)
        with closing(self._batches(calls)) as groups:
            for call, batches in enumerate(groups):
                probe = batches[0] if probe is None else probe
                keys = jax.vmap(lambda at: jax.random.fold_in(key, at))(made + jnp.arange(len(batches)))
                state, measured = self._dispatch(state, batches, keys, jnp.float32(stride.rate))
                window, made = add_windows(window, measured), made + len(batches)
                if call == calls - 1 or (online.max_drift is not None and call % looks == looks - 1):
                    drift = float(self._drift(state, behaviour, probe, chance(config, 4)))
                    if online.max_drift is not None and drift > online.max_drift:
                        break
        self._drawn += made
        learnt = known | {
            "learning/chunks": float(sum(len(each.starts) for each in (*self._data, own) if each is not None)),
            "learning/own_share": 0.0 if own is None else rows / config.batch_size,
            "learning/updates": float(made),
            "learning/drift": drift,
            "learning/weight_norm": float(self._norm(state)),
            "time/learning_seconds": time.monotonic() - since,
        }
        return state, window, learnt

    def _batches(self, calls: int) -> Generator[tuple[ChunkBatch, ...]]:
        """As many at a time as one call takes."""
        each = self._run.config.updates_per_dispatch
        stream = self.loader.batches(self._drawn, self._drawn + calls * each)
        while group := tuple(itertools.islice(stream, each)):
            yield group

    # --- Remembering --------------------------------------------------------------------------------------------------

    def remembered(self) -> Callable[[Path], None]:
        """What writes its experience, as it is now, into a checkpoint."""
        kept, drawn, checkpoints = self.replay.contents(), self._drawn, self._run.config.folder / "checkpoints"

        def write(folder: Path) -> None:
            steps = saved_steps(checkpoints)
            save_replay(folder, kept, checkpoints / str(steps[-1]) if steps else None)
            table = {"drawn": drawn, "episodes": len(kept)}
            (folder / EXPERIENCE_FILE).write_text(json.dumps(table) + "\n", encoding="utf-8")

        return write

    def recall(self, folder: Path) -> None:
        """That of a checkpoint."""
        table = json.loads((folder / EXPERIENCE_FILE).read_text(encoding="utf-8"))
        self._drawn = table["drawn"]
        self.replay.refill(load_replay(folder, table["episodes"]))


def _episodes(group: Group) -> list[Episode]:
    """All of a group, whatever became of them: the critic learns from failures."""
    return group.episodes


def _weighing(parts: Sequence[Part], together: float) -> list[Part]:
    """The same parts with this share of each batch among them."""
    total = sum(part.weight for part in parts)
    return [Part(part.source, together * part.weight / total) for part in parts]
