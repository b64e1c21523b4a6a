"""ACRLPD in an online run: every episode goes into a replay buffer, and updates draw from it and from data (RLPD)."""

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

from pistar.agents.acrlpd import Acrlpd, AcrlpdState
from pistar.checkpoints.manager import saved_steps
from pistar.data.chunk_source import ChunkSource
from pistar.data.loader import Loader, Part
from pistar.data.replay import ReplayBuffer
from pistar.data.replay_io import load_replay, redistribute, save_replay
from pistar.distributed.multihost import all_gather, own_name, several
from pistar.distributed.sharding import batch_sharding
from pistar.errors import UserError
from pistar.online.collector import Collected, Group, RolloutCollector
from pistar.online.exploration import PolicySnapshot
from pistar.online.learner import NOTHING_LEARNT, IterationUpdates, UpdateScale
from pistar.policy.critic_selector import CriticSelector
from pistar.telemetry.metrics import MetricSums
from pistar.training.setup import OnlineRun
from pistar.types import ChunkBatch, Episode

EXPERIENCE_FILE, REPLAY_FOLDER = "experience.json", "replay"
"""In a checkpoint: how far the replay buffer and the batches drawn from it are, and its episodes; with several hosts,
see `own_name`."""


@dataclasses.dataclass
class Experience:
    """A host's own episodes, drawn from as soon as every host has enough: batches are mixed alike everywhere."""

    replay: ReplayBuffer
    enough: bool = False

    def source(self) -> ChunkSource | None:
        """The windows there are now, if they may be drawn from."""
        return self.replay.source() if self.enough else None


class AcrlpdLearner:
    """ACRLPD's updates, in part from datasets and in part from own experience (RLPD)."""

    def __init__(self, run: OnlineRun, collector: RolloutCollector, where: Any) -> None:  # noqa: ANN401  # shardings
        assert isinstance(run.agent, Acrlpd)
        self._run, self._agent, self._collector = run, run.agent, collector
        config, online = run.config, run.online
        parts = () if run.demonstrations is None else run.demonstrations.parts
        self._data = [part.source for part in parts if isinstance(part.source, ChunkSource)]
        self.hosts: int = jax.process_count()
        self.replay = ReplayBuffer(
            online.replay_capacity // self.hosts,
            run.context.inputs,
            config.windows(),
            run.agent.config.rewards,
            # A row is a step, whatever rate a dataset says it was recorded at; `check` notes where they differ.
            fps=self._data[0].fps if self._data else float(collector.scene.fps),
            min_steps=math.ceil(online.replay_min_steps / self.hosts),
        )
        self._own = Experience(self.replay)
        self.loader = Loader(
            [*_with_share(parts, online.demonstrations), Part(self._own, 1 - online.demonstrations)],
            config.batch_size,
            config.seed,
            pool=config.data.pool,
            host=jax.process_index(),
            hosts=self.hosts,
            sharding=batch_sharding(run.mesh),
        )
        self._drawn = 0
        """Batches drawn so far. Not reset by a rollback, so that no batch comes twice."""
        self._updates = IterationUpdates(run, where)

    # --- Acting -------------------------------------------------------------------------------------------------------

    def check(self, instruction: str) -> list[str]:
        """Refuse a task whose episodes the replay buffer could not hold; note if frame rates differ."""
        del instruction
        scene, capacity = self._collector.scene, self._run.online.replay_capacity
        if capacity < scene.limit * self.hosts:
            of_hosts = f" on each of {self.hosts} hosts" if several() else ""
            raise UserError(
                f"online.replay_capacity is {capacity} steps and an episode of {scene.name} may have {scene.limit}"
                f"{of_hosts}; give it room for some hundred of them."
            )
        if not self._data or self._data[0].fps == scene.fps:
            return []
        return [
            f"the data has {self._data[0].fps:g} frames a second, and {scene.name} takes {scene.fps} actions; "
            "check that one dataset row corresponds to one simulator step"
        ]

    def snapshot(self, state: AcrlpdState, iteration: int, *, own_copy: bool = False) -> PolicySnapshot:
        """The policy as it acts now, by the best of N for its critic."""
        weights = (self._agent.policy_params(state), state.critic)
        params, critic = self._updates.acting(weights, own_copy=own_copy)
        candidates = self._agent.config.candidates
        if candidates == 1:
            return PolicySnapshot(params, iteration)
        selector = CriticSelector(self._agent.critic, critic)
        return PolicySnapshot(params, iteration, best_of=candidates, selector=selector)

    def collect(self, policy: PolicySnapshot, iteration: int) -> Collected[list[Episode]]:
        """An iteration's rollouts."""
        return self._collector.collect(policy, iteration, _episodes, record=True, decisions=False)

    # --- Learning -----------------------------------------------------------------------------------------------------

    def take_in(self, kept: Sequence[list[Episode]]) -> int:
        """Add all episodes to the replay buffer; returns their steps on all hosts."""
        episodes = list(itertools.chain.from_iterable(kept))
        for episode in episodes:
            self.replay.add(episode)
        self._own.enough = all(all_gather("enough", self.replay.source() is not None))
        return sum(all_gather("steps", sum(len(episode.actions) for episode in episodes)))

    def learn(
        self, state: AcrlpdState, new_steps: int, iteration: int, scale: UpdateScale
    ) -> tuple[AcrlpdState, MetricSums, dict[str, float]]:
        """As many updates as configured, or until the policy has drifted too far from the one that acted."""
        config, online, since = self._run.config, self._run.online, time.monotonic()
        own = self._own.source()
        windows, held = self._count(own)
        if own is None and not self._data:
            return state, {}, held | NOTHING_LEARNT
        rows = config.batch_size - self._run.demonstration_rows
        updates = online.updates or math.ceil(online.epochs * new_steps / rows)
        calls = math.ceil(scale.epochs * updates / config.updates_per_dispatch)
        behaviour = self._updates.copy(self._agent.policy_params(state))
        with closing(self._batches(calls)) as groups:
            state, sums, metrics = self._updates.run(
                state, groups, calls, iteration, scale.lr, lambda batches: batches[0], behaviour
            )
        self._drawn += int(metrics["train/updates"])
        metrics |= held | {
            "train/chunks": float(windows + sum(len(each.starts) for each in self._data)),
            "train/own_fraction": 0.0 if own is None else rows / config.batch_size,
            "time/update_seconds": time.monotonic() - since,
        }
        return state, sums, metrics

    def _count(self, own: ChunkSource | None) -> tuple[int, dict[str, float]]:
        """Windows of all hosts' experience, and its metrics."""
        windows, successes = (0, 0) if own is None else (len(own.starts), int(own.success.sum()))
        counts = all_gather("experience", (len(self.replay), self.replay.episodes, windows, successes))
        steps, episodes, windows, successes = (sum(each) for each in zip(*counts, strict=True))
        held = {
            "replay/steps": float(steps),
            "replay/episodes": float(episodes),
            "replay/bytes": float(self.replay.bytes),
        }
        if own is not None:
            held["replay/success_rate"] = successes / episodes
        return windows, held

    def _batches(self, calls: int) -> Generator[tuple[ChunkBatch, ...]]:
        """As many batches at a time as one call takes."""
        each = self._run.config.updates_per_dispatch
        stream = self.loader.batches(self._drawn, self._drawn + calls * each)
        while group := tuple(itertools.islice(stream, each)):
            yield group

    def updates(self, state: AcrlpdState) -> int:
        """Updates behind a state, since the run started: of the critic, if not of the policy."""
        return int(state.step)

    # --- Memory -------------------------------------------------------------------------------------------------------

    def memory_writer(self) -> Callable[[Path], None]:
        """A function that writes this host's experience, as it is now, into a checkpoint's folder."""
        kept, drawn, checkpoints = self.replay.contents(), self._drawn, self._run.config.folder / "checkpoints"
        replay, table = (own_name(name, jax.process_index(), self.hosts) for name in (REPLAY_FOLDER, EXPERIENCE_FILE))

        def write(folder: Path) -> None:
            steps = saved_steps(checkpoints)
            save_replay(folder / replay, kept, checkpoints / str(steps[-1]) / replay if steps else None)
            text = json.dumps({"drawn": drawn, "episodes": len(kept)})
            (folder / table).write_text(text + "\n", encoding="utf-8")

        return write

    def load_memory(self, folder: Path) -> None:
        """Read the experience of a checkpoint's folder.

        With as many hosts as wrote it each reads its own; otherwise all episodes are dealt out anew.
        """
        host, stem = jax.process_index(), Path(EXPERIENCE_FILE).stem
        own = folder / own_name(EXPERIENCE_FILE, host, self.hosts)
        tables = [own] if own.exists() else sorted(folder.glob(f"{stem}*.json"))
        if not tables:
            raise UserError(f"{folder} has no {EXPERIENCE_FILE}, its replay buffer; start a new run from its params.")
        buffers = []
        for table in tables:
            stored = json.loads(table.read_text(encoding="utf-8"))
            self._drawn = stored["drawn"]
            buffers.append(load_replay(folder / table.stem.replace(stem, REPLAY_FOLDER), stored["episodes"]))
        self.replay.refill(buffers[0] if tables == [own] else redistribute(buffers, host, self.hosts))


def _episodes(group: Group) -> list[Episode]:
    """All episodes of a group: the critic learns from failures too."""
    return group.episodes


def _with_share(parts: Sequence[Part], together: float) -> list[Part]:
    """The same parts with this fraction of each batch among them."""
    total = sum(part.weight for part in parts)
    return [Part(part.source, together * part.weight / total) for part in parts]
