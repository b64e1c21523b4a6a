"""What ACRLPD makes of practice: every episode goes into a replay buffer, and updates draw from it and from data."""

import dataclasses
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
from pistar.data.replay_files import deal_out, load_replay, save_replay
from pistar.data.source import ChunkSource
from pistar.errors import UserError
from pistar.training.acting import Judge
from pistar.training.exploring import Behaviour
from pistar.training.hosts import exchange, in_step, own_name, several
from pistar.training.learner import Stride, copied
from pistar.training.metrics import Window, add_windows, as_sound_window
from pistar.training.practice import Group, Practice, Practised, chance
from pistar.training.run import OnlineRun
from pistar.training.saving import saved_steps
from pistar.training.sharding import everywhere, on_own_devices, over_rows
from pistar.types import ChunkBatch, Episode

EXPERIENCE_FILE, REPLAY_FOLDER = "experience.json", "replay"
"""In a checkpoint: how far the replay buffer and the batches drawn from it are, and its episodes; of several hosts, see
`own_name`."""


@dataclasses.dataclass
class Experience:
    """A host's own episodes, drawn from as soon as every host has enough: batches are mixed alike everywhere."""

    replay: Replay
    enough: bool = False

    def source(self) -> ChunkSource | None:
        """The windows there are now, if they may be drawn from."""
        return self.replay.source() if self.enough else None


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
        self.hosts: int = jax.process_count()
        self.replay = Replay(
            online.replay_capacity // self.hosts,
            run.ground.inputs,
            config.windows(),
            config.data.rewards,
            # A row is a step, whatever rate a dataset says it was recorded at; `check` tells where they differ.
            fps=self._data[0].fps if self._data else float(practice.scene.fps),
            min_steps=math.ceil(online.replay_min_steps / self.hosts),
        )
        self._own = Experience(self.replay)
        self.loader = Loader(
            [*_weighing(parts, online.demonstrations), Part(self._own, 1 - online.demonstrations)],
            config.batch_size,
            config.seed,
            pool=config.data.pool,
            host=jax.process_index(),
            hosts=self.hosts,
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

        self._dispatch = in_step("the update", jax.jit(dispatch, donate_argnums=0, out_shardings=(where, None)))
        self._drift = in_step("the drift", jax.jit(drift))
        self._norm = in_step("the norm", jax.jit(lambda state: optax.tree.norm(state.policy.trained)))
        self._copy = jax.jit(copied)
        self._gather = in_step("the policy that acts", jax.jit(copied, out_shardings=everywhere(run.mesh)))

    # --- Acting -------------------------------------------------------------------------------------------------------

    def check(self, instruction: str) -> list[str]:
        """Refuse, before anything is rolled out, what the replay buffer could not take; and what to know about it."""
        del instruction
        scene, capacity = self._practice.scene, self._run.config.online.replay_capacity
        if capacity < scene.limit * self.hosts:
            of_hosts = f" on each of {self.hosts} hosts" if several() else ""
            raise UserError(
                f"online.replay_capacity is {capacity} steps and an episode of {scene.name} may have {scene.limit}"
                f"{of_hosts}; give it room for some hundred of them."
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
        if several():
            params, critic = on_own_devices(self._gather((params, critic)))
        elif own_copy:
            params, critic = self._copy((params, critic))
        if self._candidates == 1:
            return Behaviour(params, iteration)
        return Behaviour(params, iteration, best_of=self._candidates, judge=Judge(self._agent.critic, critic))

    def practise(self, behaviour: Behaviour, iteration: int) -> Practised[list[Episode]]:
        """An iteration's rollouts."""
        return self._practice.practise(behaviour, iteration, _episodes, record=True, plans=False)

    # --- Learning -----------------------------------------------------------------------------------------------------

    def lessons(self, kept: Sequence[list[Episode]]) -> int:
        """Take all episodes in; how many steps they had, on all hosts."""
        episodes = list(itertools.chain.from_iterable(kept))
        for episode in episodes:
            self.replay.add(episode)
        self._own.enough = all(exchange("enough", self.replay.source() is not None))
        return sum(exchange("steps", sum(len(episode.actions) for episode in episodes)))

    def learn(
        self, state: AcrlpdState, lessons: int, iteration: int, stride: Stride
    ) -> tuple[AcrlpdState, Window, dict[str, float]]:
        """As many updates as configured, or until the policy is far from the one that acted."""
        config, online, since = self._run.config, self._run.config.online, time.monotonic()
        own = self._own.source()
        windows, successes = (0, 0) if own is None else (len(own.starts), int(own.success.sum()))
        counts = exchange("experience", (len(self.replay), self.replay.episodes, windows, successes))
        steps, episodes, windows, successes = (sum(each) for each in zip(*counts, strict=True))
        known = {
            "replay/steps": float(steps),
            "replay/episodes": float(episodes),
            "replay/bytes": float(self.replay.bytes),
        }
        if own is not None:
            known["replay/success"] = successes / episodes
        if own is None and not self._data:
            return state, {}, known | {"learning/chunks": 0.0, "learning/updates": 0.0, "learning/drift": 0.0}
        rows = config.batch_size - self._run.demonstrated
        updates = online.updates or math.ceil(online.epochs * lessons / rows)
        calls = math.ceil(stride.epochs * updates / config.updates_per_dispatch)
        key = jax.random.fold_in(chance(config, 1), iteration)
        behaviour = self._copy(self._agent.policy_params(state))
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
                    drift = exchange("drift", drift)[0]  # lest some stop by a last bit, and others wait for them
                    if online.max_drift is not None and drift > online.max_drift:
                        break
        self._drawn += made
        learnt = known | {
            "learning/chunks": float(windows + sum(len(each.starts) for each in self._data)),
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

    def updates(self, state: AcrlpdState) -> int:
        """Behind that state, since the run began: of the critic, if not of the policy."""
        return int(state.step)

    def remembered(self) -> Callable[[Path], None]:
        """What writes its experience, as it is now, into a checkpoint; each host its own."""
        kept, drawn, checkpoints = self.replay.contents(), self._drawn, self._run.config.folder / "checkpoints"
        replay, table = (own_name(name, jax.process_index(), self.hosts) for name in (REPLAY_FOLDER, EXPERIENCE_FILE))

        def write(folder: Path) -> None:
            steps = saved_steps(checkpoints)
            save_replay(folder / replay, kept, checkpoints / str(steps[-1]) / replay if steps else None)
            words = json.dumps({"drawn": drawn, "episodes": len(kept)})
            (folder / table).write_text(words + "\n", encoding="utf-8")

        return write

    def recall(self, folder: Path) -> None:
        """That of a checkpoint: its own by each of as many hosts as there were; by others, all episodes dealt out."""
        host, stem = jax.process_index(), Path(EXPERIENCE_FILE).stem
        own = folder / own_name(EXPERIENCE_FILE, host, self.hosts)
        tables = [own] if own.exists() else sorted(folder.glob(f"{stem}*.json"))
        if not tables:
            raise UserError(
                f"{folder} has no {EXPERIENCE_FILE}, what was lived so far; start a new run from its params."
            )
        buffers = []
        for table in tables:
            said = json.loads(table.read_text(encoding="utf-8"))
            self._drawn = said["drawn"]
            buffers.append(load_replay(folder / table.stem.replace(stem, REPLAY_FOLDER), said["episodes"]))
        self.replay.refill(buffers[0] if tables == [own] else deal_out(buffers, host, self.hosts))


def _episodes(group: Group) -> list[Episode]:
    """All of a group, whatever became of them: the critic learns from failures."""
    return group.episodes


def _weighing(parts: Sequence[Part], together: float) -> list[Part]:
    """The same parts with this share of each batch among them."""
    total = sum(part.weight for part in parts)
    return [Part(part.source, together * part.weight / total) for part in parts]
