"""What RIPT makes of practice: lessons of each group, and an iteration's updates of the policy."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pistar.agents.ript import (
    Label,
    Prompts,
    Ript,
    RiptBatch,
    RiptState,
    asked_by,
    chunk_weights,
    group_advantages,
    prompts_of,
)
from pistar.config import RiptConfig
from pistar.data.loader import to_devices
from pistar.models.tokenizer import PromptTokenizer
from pistar.training.experience import BestOf, Context, load_best, save_best
from pistar.training.exploring import Behaviour, Chunks, PromptLabels, join, with_prompts_of
from pistar.training.hosts import exchange, in_step, several
from pistar.training.metrics import Window, add_windows, as_sound_window
from pistar.training.plan import abstract_batch
from pistar.training.practice import Group, Practice, Practised, chance
from pistar.training.run import OnlineRun
from pistar.training.sharding import everywhere, on_own_devices, over_rows
from pistar.types import AnyArray, Observation

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Lesson:
    """Chunks of one rollout, and how much they count: its advantage, or what `best` says."""

    chunks: Chunks
    """With prompts as they are."""
    advantage: float
    told: Chunks | None = None
    """Where labels are learnt: the same, told how it went …"""
    asked: Chunks | None = None
    """… asked for good actions …"""
    acted: Chunks | None = None
    """… and as the policy was asked when it acted."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is kept of a group."""

    start: Context
    instruction: str
    asked: Label
    """What the policy was asked for."""
    lessons: Sequence[Lesson]


@dataclasses.dataclass(frozen=True)
class Stride:
    """How far an iteration goes, as multiples of what is configured."""

    rate: float = 1.0
    epochs: float = 1.0


class Learner:
    """RIPT's updates, from own rollouts and demonstrations."""

    def __init__(self, run: OnlineRun, practice: Practice, where: Any) -> None:  # noqa: ANN401  # shardings of the state
        assert isinstance(run.agent, Ript)
        assert isinstance(run.config.algorithm, RiptConfig)
        self._run, self._agent, self._algorithm, self._practice = run, run.agent, run.config.algorithm, practice
        online = run.config.online
        self._best = BestOf(online.replay_keeps, online.replay_capacity // jax.process_count())
        agent, inputs = self._agent, run.ground.inputs
        assert isinstance(inputs.tokenizer, PromptTokenizer)
        self._labels = (
            PromptLabels(inputs.tokenizer, inputs.discrete_state, inputs.robot.state_dim)
            if self._algorithm.weighting == "cfg"
            else None
        )

        def dispatch(
            state: RiptState, batches: RiptBatch, keys: jax.Array, rate: jax.Array
        ) -> tuple[RiptState, Window]:
            def update(state: RiptState, given: tuple[RiptBatch, jax.Array]) -> tuple[RiptState, Window]:
                state, metrics = agent.update(state, *given, rate)
                return state, as_sound_window(metrics)

            state, windows = jax.lax.scan(update, state, (batches, keys))
            return state, jax.tree.map(jnp.sum, windows)

        self._dispatch = in_step("the update", jax.jit(dispatch, donate_argnums=0, out_shardings=(where, None)))
        self._restart = in_step("a restart", jax.jit(agent.restarted, donate_argnums=0, out_shardings=where))
        self._drift = in_step("the drift", jax.jit(agent.drift))
        self._told_apart = in_step("the labels", jax.jit(agent.told_apart))
        self._norm = in_step("the norm", jax.jit(lambda state: optax.tree.norm(state.policy.trained)))
        self._copy = jax.jit(copied)
        self._gather = in_step("the policy that acts", jax.jit(copied, out_shardings=everywhere(run.mesh)))

    # --- Acting -------------------------------------------------------------------------------------------------------

    def check(self, instruction: str) -> list[str]:
        """Refuse, before anything is rolled out, a task that cannot be labelled."""
        if self._labels is not None:
            self._labels.check(instruction)
        return []

    def behaviour(self, state: RiptState, iteration: int, *, own_copy: bool = False) -> Behaviour:
        """The policy as it acts now. A copy outlasts the updates, which use the state up."""
        params = self._agent.policy_params(state)
        if several():
            params = on_own_devices(self._gather(params))
        elif own_copy:
            params = self._copy(params)
        taught = self._labels is not None and int(state.policy.step) > 0  # before, no label means anything to it
        return Behaviour(params, iteration, self._labels if taught else None, self._algorithm.guidance)

    def practise(self, behaviour: Behaviour, iteration: int) -> Practised[Kept]:
        """An iteration's rollouts."""
        looked = self._run.config.online.windows == "looked"
        keep = functools.partial(self._keep, asked="none" if behaviour.labels is None else "positive")
        return self._practice.practise(behaviour, iteration, keep, record=not looked, plans=looked)

    def _keep(self, group: Group, asked: Label) -> Kept:
        replay = self._run.config.online.replay
        advantages = group_advantages(self._algorithm, group.rewards[None])[0]
        weights = chunk_weights(self._algorithm, jnp.asarray(advantages))
        wanted = [
            episode.success if replay == "best" else bool(weight != 0 and advantage != 0)  # 0: its group ended alike
            for episode, weight, advantage in zip(group.episodes, weights, advantages, strict=True)
        ]
        lessons = [
            Lesson(self._practice.chunks(episode, plans), float(advantage))
            for episode, plans, advantage, good in zip(group.episodes, group.plans, advantages, wanted, strict=True)
            if good
        ]
        return Kept(group.start, group.episodes[0].task, asked, lessons)

    # --- Learning -----------------------------------------------------------------------------------------------------

    def learn(
        self, state: RiptState, lessons: Sequence[Lesson], iteration: int, stride: Stride
    ) -> tuple[RiptState, Window, dict[str, float]]:
        """As many updates as configured, or until the policy is far from the one that acted.

        Of several hosts each learns from its own lessons, in its own rows of every batch.
        """
        config, online, since = self._run.config, self._run.config.online, time.monotonic()
        counts = exchange("chunks", sum(len(lesson.chunks) for lesson in lessons))
        held = {"replay/bytes": float(self._best.bytes)} if online.replay == "best" else {}
        if not any(counts):
            return state, {}, held | {"learning/chunks": 0.0, "learning/updates": 0.0, "learning/drift": 0.0}
        count, most = counts[jax.process_index()], max(counts)
        lessons = lessons or [Lesson(self._blank(), 0.0)]
        chunks = join([lesson.chunks for lesson in lessons])
        # How far it goes is seen where it acted: by labels it has yet to learn, any policy changes out of all bounds.
        told, asked, acted = None, None, chunks
        if self._labels is not None:
            told = with_prompts_of(chunks, [lesson.told or lesson.chunks for lesson in lessons])
            asked = with_prompts_of(chunks, [lesson.asked or lesson.chunks for lesson in lessons])
            acted = with_prompts_of(chunks, [lesson.acted or lesson.chunks for lesson in lessons])
        advantages = np.concatenate([np.full(len(each.chunks), each.advantage, np.float32) for each in lessons])
        rows = (config.batch_size - self._run.demonstrated) // len(counts)
        updates = online.updates or math.ceil(online.epochs * most / rows)
        calls = math.ceil(stride.epochs * updates / config.updates_per_dispatch)
        key = jax.random.fold_in(chance(config, 1), iteration)
        behaviour = self._copy(self._agent.policy_params(state))
        if online.restart:
            state = self._restart(state)
        picks = _picks(np.random.default_rng([config.seed, iteration, 2**20]), count, rows, most)
        window: Window = {}
        probe: RiptBatch | None = None
        labels: RiptBatch | None = None
        made, drift = 0, 0.0
        looks = max(1, calls // 10)
        before = int(state.policy.step)  # asked once: the device works on one call while the next is made ready
        for call in range(calls):
            picked = list(itertools.islice(picks, config.updates_per_dispatch))
            batches = [
                self._batch(chunks, advantages, own, rows, before + made + at, told) for at, own in enumerate(picked)
            ]
            if probe is None:
                first = batches[0] if told is None else self._batch(acted, advantages, picked[0], rows, before)
                probe = self._own_part(first)
                if asked is not None:
                    plain, good = (self._batch(each, advantages, picked[0], rows, before) for each in (chunks, asked))
                    labels = self._own_part(dataclasses.replace(good, unlabelled=prompts_of(plain.observations)))
            keys = jax.vmap(lambda at: jax.random.fold_in(key, at))(made + jnp.arange(len(batches)))
            stacked = jax.tree.map(lambda *each: np.stack(each), *batches)
            stacked = to_devices(stacked, over_rows(self._run.mesh, stacked=True))
            state, measured = self._dispatch(state, stacked, keys, jnp.float32(stride.rate))
            window, made = add_windows(window, measured), made + len(batches)
            if call == calls - 1 or (online.max_drift is not None and call % looks == looks - 1):
                drift = float(self._drift(state, behaviour, probe, chance(config, 4)))
                drift = exchange("drift", drift)[0]  # lest some stop by a last bit, and others wait for them
                if online.max_drift is not None and drift > online.max_drift:
                    break
        learnt = held | {
            "learning/chunks": float(sum(counts)),
            "learning/updates": float(made),
            "learning/drift": drift,
            "learning/weight_norm": float(self._norm(state)),
            "time/learning_seconds": time.monotonic() - since,
        }
        if labels is not None:
            learnt["learning/label_distance"] = float(self._told_apart(state, labels, chance(config, 4)))
        return state, window, learnt

    def _own_part(self, batch: RiptBatch) -> RiptBatch:
        """What it practised of a batch, on the devices."""
        own = np.asarray(batch.valid) & ~np.asarray(batch.demonstration)[:, None]
        return to_devices(dataclasses.replace(batch, valid=own), over_rows(self._run.mesh))

    def lessons(self, kept: Sequence[Kept]) -> list[Lesson]:
        """What an iteration learns from, of what was just kept or of the best so far."""
        if self._run.config.online.replay == "best":
            for each in kept:
                for lesson in each.lessons:
                    self._best.add(each.start, lesson.chunks)
            if several():
                self._best.let_go(exchange("successes", self._best.lengths), jax.process_index())
            return [Lesson(chunks, weight) for chunks, weight in self._best.weighed(self._practice.starts)]
        return [self._label(lesson, each) for each in kept for lesson in each.lessons]

    def _label(self, lesson: Lesson, of: Kept) -> Lesson:
        """Where labels are learnt, with what its chunks say of it then."""
        if self._labels is None:
            return lesson
        went: Label = "positive" if lesson.advantage > 0 else "negative"
        ways: tuple[Label, ...] = went, "positive", of.asked
        told, asked, acted = (self._labels.write(lesson.chunks, of.instruction, label) for label in ways)
        return dataclasses.replace(lesson, told=told, asked=asked, acted=acted)

    def _blank(self) -> Chunks:
        """A chunk for the rows of a host that has nothing to learn from."""
        batch: Any = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), abstract_batch(self._run.config, 1))
        return Chunks(batch.observations, batch.actions, np.zeros_like(batch.valid))

    def _batch(
        self,
        chunks: Chunks,
        advantages: np.ndarray,
        picked: np.ndarray,
        rows: int,
        update: int,
        told: Chunks | None = None,
    ) -> RiptBatch:
        """`told`: the same chunks with labels, but for a share that is drawn anew every time."""
        there = np.arange(rows) < len(picked)
        picked = np.pad(picked, (0, rows - len(picked)))  # some chunk, of which no step is learnt from
        own = jax.tree.map(lambda leaf: leaf[picked], chunks.observations)
        anchored = told is not None and self._algorithm.anchor > 0
        plain = prompts_of(own) if anchored else None
        if told is not None:
            rng = np.random.default_rng([self._run.config.seed, update, 2**21])
            labelled = rng.uniform(size=(rows, 1)) >= self._algorithm.label_dropout
            both = zip(prompts_of(told.observations), prompts_of(own), strict=True)
            own = asked_by(own, *(np.where(labelled, label[picked], without) for label, without in both))
        valid = chunks.valid[picked] & there[:, None]
        parts = [(own, chunks.actions[picked], valid, advantages[picked] * there, plain)]
        if self._run.demonstrations is not None:
            shown = self._run.demonstrations.sample_policy_batch(update)
            seen, none = shown.observations, np.zeros(len(shown.actions), np.float32)
            parts.append((seen, shown.actions, shown.valid, none, prompts_of(seen) if anchored else None))
        together: tuple[Observation, AnyArray, AnyArray, AnyArray, Prompts | None] = jax.tree.map(
            lambda *each: np.concatenate([np.asarray(rows) for rows in each]), *parts
        )
        demonstration = np.arange(len(together[1])) >= rows
        return RiptBatch(*together[:4], demonstration, together[4])

    def updates(self, state: RiptState) -> int:
        """Behind that state, since the run began."""
        return int(state.policy.step)

    # --- Remembering --------------------------------------------------------------------------------------------------

    def remembered(self) -> Callable[[Path], None]:
        """What writes the successes it keeps, as they are now, into a checkpoint."""
        kept = {start: list(all_) for start, all_ in self._best.kept.items()}
        return lambda folder: save_best(folder, kept, jax.process_index(), jax.process_count())

    def recall(self, folder: Path) -> None:
        """Those of a checkpoint."""
        cameras = self._run.config.model.cameras
        load_best(folder, self._best, cameras, jax.process_index(), jax.process_count())


def copied(tree: T) -> T:
    """As one program: one for each of its arrays takes longer to compile."""
    return jax.tree.map(jnp.copy, tree)  # type: ignore[no-any-return]


def _picks(rng: np.random.Generator, count: int, rows: int, most: int) -> Iterator[np.ndarray]:
    """Rows for batch after batch: everything once, in a new order each time round.

    A host that has less than another fills as many rows fewer: every chunk is learnt from as often as any.
    """
    order = np.zeros(0, int)
    for batch in itertools.count():
        wanted = (batch + 1) * rows * count // most - batch * rows * count // most
        while len(order) < wanted:
            order = np.concatenate([order, rng.permutation(count)])
        yield order[:wanted]
        order = order[wanted:]
