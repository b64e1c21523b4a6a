"""RIPT in an online run: from groups of rollouts to weighted chunks, and an iteration's updates."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pistar.agents.prompt_labels import Label, PromptLabeller, Prompts, prompts_of, with_prompts
from pistar.agents.ript import Ript, RiptBatch, RiptState, chunk_weights, group_advantages
from pistar.data.loader import to_devices
from pistar.distributed.multihost import all_gather, compile_in_lockstep, several
from pistar.distributed.sharding import batch_sharding
from pistar.models.tokenizer import PromptTokenizer
from pistar.online.chunks import ExecutedChunks, chunks_of_decisions, chunks_of_every_step, join, with_prompts_of
from pistar.online.collector import DRIFT, Collected, Group, RolloutCollector, purpose_key
from pistar.online.exploration import Decision, PolicySnapshot
from pistar.online.learner import NOTHING_LEARNT, IterationUpdates, UpdateScale
from pistar.online.start_states import StartState
from pistar.online.success_buffer import SuccessBuffer, load_successes, save_successes
from pistar.telemetry.metrics import MetricSums
from pistar.training.setup import OnlineRun
from pistar.types import AnyArray, Episode, Observation


@dataclasses.dataclass(frozen=True)
class WeightedChunks:
    """Chunks of one rollout, and its advantage, or the weight that replay `best` gives it."""

    chunks: ExecutedChunks
    """With plain prompts."""
    advantage: float
    labelled: Observation | None = None
    """Where labels are learnt: the observations with prompts that say how the rollout went."""
    asked: Observation | None = None
    """The same with prompts that are labelled as positive."""
    acted: Observation | None = None
    """The same with the prompts the policy acted with."""


@dataclasses.dataclass(frozen=True)
class GroupChunks:
    """What is kept of a group."""

    start: StartState
    instruction: str
    asked: Label
    """The label the policy acted with."""
    rollouts: Sequence[WeightedChunks]


@dataclasses.dataclass(frozen=True)
class _JoinedChunks:
    """All chunks of an iteration, in one piece."""

    chunks: ExecutedChunks
    advantages: np.ndarray
    labelled: ExecutedChunks | None
    asked: ExecutedChunks | None
    acted: ExecutedChunks

    @staticmethod
    def of(rollouts: Sequence[WeightedChunks], *, labels: bool) -> "_JoinedChunks":
        chunks = join([each.chunks for each in rollouts])
        advantages = np.concatenate([np.full(len(each.chunks), each.advantage, np.float32) for each in rollouts])
        if not labels:
            return _JoinedChunks(chunks, advantages, None, None, chunks)
        labelled, asked, acted = (
            with_prompts_of(chunks, [getattr(each, name) or each.chunks.observations for each in rollouts])
            for name in ("labelled", "asked", "acted")
        )
        return _JoinedChunks(chunks, advantages, labelled, asked, acted)


class RiptLearner:
    """RIPT's updates, from own rollouts and demonstrations."""

    def __init__(self, run: OnlineRun, collector: RolloutCollector, where: Any) -> None:  # noqa: ANN401  # shardings
        assert isinstance(run.agent, Ript)
        self._run, self._agent, self._collector = run, run.agent, collector
        self._algorithm, inputs = run.agent.config, run.context.inputs
        self._successes = SuccessBuffer(self._algorithm.replay_keeps, run.online.replay_capacity // jax.process_count())
        assert isinstance(inputs.tokenizer, PromptTokenizer)
        labeller = PromptLabeller(inputs.tokenizer, inputs.robot.state_dim if inputs.discrete_state else None)
        self._labeller = labeller if self._algorithm.labels_prompts else None
        self._updates = IterationUpdates(run, where)
        restart = jax.jit(self._agent.restarted, donate_argnums=0, out_shardings=where)
        self._restart = compile_in_lockstep("a restart", restart)
        self._label_distance = compile_in_lockstep("the labels", jax.jit(self._agent.label_distance))

    # --- Acting -------------------------------------------------------------------------------------------------------

    def check(self, instruction: str) -> list[str]:
        """Refuse a task whose instruction leaves no room for a label."""
        if self._labeller is not None:
            self._labeller.check(instruction)
        return []

    def snapshot(self, state: RiptState, iteration: int, *, own_copy: bool = False) -> PolicySnapshot:
        """The policy as it acts now."""
        params = self._updates.acting(self._agent.policy_params(state), own_copy=own_copy)
        # Before the first update no label means anything to the policy.
        labeller = self._labeller if self._labeller is not None and int(state.policy.step) > 0 else None
        return PolicySnapshot(params, iteration, labeller, self._algorithm.guidance)

    def collect(self, policy: PolicySnapshot, iteration: int) -> Collected[GroupChunks]:
        """An iteration's rollouts."""
        looked = self._algorithm.windows == "looked"
        keep = functools.partial(self._keep, asked="none" if policy.labeller is None else "positive")
        attempts = self._algorithm.attempts
        return self._collector.collect(policy, iteration, keep, attempts=attempts, record=not looked, decisions=looked)

    def _keep(self, group: Group, asked: Label) -> GroupChunks:
        advantages = group_advantages(self._algorithm, group.rewards[None])[0]
        weights = chunk_weights(self._algorithm, jnp.asarray(advantages))
        wanted = [
            # An advantage of 0 means that the whole group ended alike.
            episode.success if self._algorithm.replay == "best" else bool(weight != 0 and advantage != 0)
            for episode, weight, advantage in zip(group.episodes, weights, advantages, strict=True)
        ]
        rollouts = [
            WeightedChunks(self._chunks(episode, decisions), float(advantage))
            for episode, decisions, advantage, good in zip(
                group.episodes, group.decisions, advantages, wanted, strict=True
            )
            if good
        ]
        return GroupChunks(group.start, group.episodes[0].task, asked, rollouts)

    def _chunks(self, episode: Episode, decisions: Sequence[Decision]) -> ExecutedChunks:
        if self._algorithm.windows == "looked":
            return chunks_of_decisions(decisions, episode, self._collector.execute)
        return chunks_of_every_step(episode, self._collector.inputs, self._run.config.model.action_horizon)

    # --- Learning -----------------------------------------------------------------------------------------------------

    def take_in(self, kept: Sequence[GroupChunks]) -> list[WeightedChunks]:
        """What an iteration learns from: what was just kept, or the shortest successes so far."""
        if self._algorithm.replay == "best":
            for each in kept:
                for rollout in each.rollouts:
                    self._successes.add(each.start, rollout.chunks)
            if several():
                lengths = all_gather("successes", self._successes.lengths)
                self._successes.drop_longer_than_others(lengths, jax.process_index())
            return [WeightedChunks(*each) for each in self._successes.weighted(self._collector.start_states)]
        return [self._with_labels(rollout, each) for each in kept for rollout in each.rollouts]

    def _with_labels(self, rollout: WeightedChunks, of: GroupChunks) -> WeightedChunks:
        """The same rollout with labelled prompts, where labels are learnt."""
        if self._labeller is None:
            return rollout
        outcome: Label = "positive" if rollout.advantage > 0 else "negative"
        ways: tuple[Label, ...] = outcome, "positive", of.asked
        labelled, asked, acted = (
            self._labeller.write(rollout.chunks.observations, of.instruction, label) for label in ways
        )
        return dataclasses.replace(rollout, labelled=labelled, asked=asked, acted=acted)

    def learn(
        self, state: RiptState, rollouts: Sequence[WeightedChunks], iteration: int, scale: UpdateScale
    ) -> tuple[RiptState, MetricSums, dict[str, float]]:
        """As many updates as configured, or until the policy has drifted too far from the one that acted.

        With several hosts each learns from its own chunks, in its own rows of every batch.
        """
        config, online, since = self._run.config, self._run.online, time.monotonic()
        counts = all_gather("chunks", sum(len(each.chunks) for each in rollouts))
        held = {"replay/bytes": float(self._successes.bytes)} if self._algorithm.replay == "best" else {}
        if not any(counts):
            return state, {}, held | NOTHING_LEARNT
        count, most = counts[jax.process_index()], max(counts)
        own = _JoinedChunks.of(rollouts or [WeightedChunks(self._blank(), 0.0)], labels=self._labeller is not None)
        rows = (config.batch_size - self._run.demonstration_rows) // len(counts)
        updates = online.updates or math.ceil(online.epochs * most / rows)
        calls = math.ceil(scale.epochs * updates / config.updates_per_dispatch)
        behaviour = self._updates.copy(self._agent.policy_params(state))
        if self._algorithm.restart:
            state = self._restart(state)
        picks = _picks(np.random.default_rng([config.seed, iteration, 2**20]), count, rows, most)
        first = next(picks)
        step = int(state.policy.step)  # read once: the device works on one call while the next is prepared

        def groups() -> Iterator[tuple[RiptBatch, ...]]:
            numbered = enumerate(itertools.chain([first], picks))
            for _ in range(calls):
                picked = itertools.islice(numbered, config.updates_per_dispatch)
                batches = [self._batch(own, own.labelled, each, rows, step + number) for number, each in picked]
                yield tuple(to_devices(batch, batch_sharding(self._run.mesh)) for batch in batches)

        # The drift is measured where the policy acted: by labels it has yet to learn any policy changes without bound.
        probe = self._own_part(self._batch(own, None, first, rows, step, acted=own.acted))
        state, sums, metrics = self._updates.run(
            state, groups(), calls, iteration, scale.lr, lambda _: probe, behaviour
        )
        metrics |= held | {
            "train/chunks": float(sum(counts)),
            "time/update_seconds": time.monotonic() - since,
        }
        if own.asked is not None:
            asked = self._batch(own, None, first, rows, step, acted=own.asked)
            plain = prompts_of(self._batch(own, None, first, rows, step).observations)
            labels = self._own_part(dataclasses.replace(asked, unlabelled=plain))
            distance = self._label_distance(state, labels, purpose_key(config, DRIFT))
            metrics["train/label_distance"] = float(distance)
        return state, sums, metrics

    def _own_part(self, batch: RiptBatch) -> RiptBatch:
        """A batch without its demonstrations, on the devices."""
        own = np.asarray(batch.valid) & ~np.asarray(batch.demonstration)[:, None]
        return to_devices(dataclasses.replace(batch, valid=own), batch_sharding(self._run.mesh))

    def _blank(self) -> ExecutedChunks:
        """A chunk without valid steps, for the rows of a host that has nothing to learn from."""
        batch: Any = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), self._agent.abstract_batch(1))
        return ExecutedChunks(batch.observations, batch.actions, np.zeros_like(batch.valid))

    def _batch(
        self,
        joined: _JoinedChunks,
        labelled: ExecutedChunks | None,
        picked: np.ndarray,
        rows: int,
        update: int,
        acted: ExecutedChunks | None = None,
    ) -> RiptBatch:
        """Picked chunks and demonstrations as a batch.

        With `labelled`, the prompts carry labels but for a fraction that is drawn anew every time; `acted` gives the
        prompts instead.
        """
        chunks = acted or joined.chunks
        real = np.arange(rows) < len(picked)
        picked = np.pad(picked, (0, rows - len(picked)))  # any chunk, of which no step is valid
        own = jax.tree.map(lambda leaf: leaf[picked], chunks.observations)
        anchored = labelled is not None and self._algorithm.anchor > 0
        plain = prompts_of(own) if anchored else None
        if labelled is not None:
            rng = np.random.default_rng([self._run.config.seed, update, 2**21])
            with_label = rng.uniform(size=(rows, 1)) >= self._algorithm.label_dropout
            both = zip(prompts_of(labelled.observations), prompts_of(own), strict=True)
            own = with_prompts(own, *(np.where(with_label, label[picked], without) for label, without in both))
        valid = chunks.valid[picked] & real[:, None]
        parts = [(own, chunks.actions[picked], valid, joined.advantages[picked] * real, plain)]
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
        """Updates behind a state, since the run started."""
        return int(state.policy.step)

    # --- Memory -------------------------------------------------------------------------------------------------------

    def memory_writer(self) -> Callable[[Path], None]:
        """A function that writes the kept successes, as they are now, into a checkpoint's folder."""
        kept = {start: list(successes) for start, successes in self._successes.kept.items()}
        return lambda folder: save_successes(folder, kept, jax.process_index(), jax.process_count())

    def load_memory(self, folder: Path) -> None:
        """Read the kept successes from a checkpoint's folder."""
        cameras = self._run.config.model.cameras
        load_successes(folder, self._successes, cameras, jax.process_index(), jax.process_count())


def _picks(rng: np.random.Generator, count: int, rows: int, most: int) -> Iterator[np.ndarray]:
    """Rows for batch after batch: every chunk once, then all of them again in another order.

    A host that has fewer chunks than another fills fewer rows, so that every chunk is learnt from equally often.
    """
    order = np.zeros(0, int)
    for batch in itertools.count():
        wanted = (batch + 1) * rows * count // most - batch * rows * count // most
        while len(order) < wanted:
            order = np.concatenate([order, rng.permutation(count)])
        yield order[:wanted]
        order = order[wanted:]
