"""Practice: a policy among its environments, group by group, and what is counted and kept of it."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from pistar.agents.estimators import informative
from pistar.agents.ript import chunk_weights, group_advantages
from pistar.config import RiptConfig
from pistar.data.robots import input_transform, output_transform
from pistar.envs.rollout import Clock, Rollout, batch_size, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import Fault
from pistar.training.config import RLTrainConfig
from pistar.training.experience import BestOf, Starts, save_practice
from pistar.training.exploring import (
    ZERO_NOISE,
    Chunks,
    Explorer,
    Mood,
    Plan,
    draw_mood,
    executed_chunks,
    stepwise_chunks,
)
from pistar.training.run import OnlineRun
from pistar.types import Episode


@dataclasses.dataclass(frozen=True)
class Lesson:
    """Chunks of one rollout, and how much they count: its advantage, or what `best` says."""

    chunks: Chunks
    advantage: float


@dataclasses.dataclass(frozen=True)
class Group:
    """Rollouts of one start state, which judge each other."""

    start: int
    rollouts: Sequence[Rollout]
    plans: Sequence[Sequence[Plan]]
    moods: Sequence[Mood]

    @property
    def whole(self) -> bool:
        """Whether all could be finished. One that could not takes its group with it: not counted, nor learnt from."""
        return all(rollout.episode is not None for rollout in self.rollouts)

    @property
    def episodes(self) -> list[Episode]:
        """Of a whole one, all."""
        return [rollout.episode for rollout in self.rollouts if rollout.episode is not None]

    @property
    def rewards(self) -> Float[np.ndarray, " k"]:
        """0 or 1 each."""
        return np.array([float(episode.success) for episode in self.episodes])


@dataclasses.dataclass
class Tally:
    """What is counted while practising."""

    tried: list[int] = dataclasses.field(default_factory=list)
    teaching: int = 0
    by_kind: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Of exploration: successes, of how many episodes."""
    faults: list[tuple[int, Fault, bool]] = dataclasses.field(default_factory=list)
    clock: Clock = dataclasses.field(default_factory=Clock)

    def count(self, group: Group) -> bool:
        """Whether it counts."""
        self.tried.append(group.start)
        self.faults += [(group.start, fault, not group.whole) for one in group.rollouts for fault in one.faults]
        if not group.whole:
            return False
        self.teaching += bool(informative(group.rewards[None])[0])
        for mood, episode in zip(group.moods, group.episodes, strict=True):
            won, of = self.by_kind.get(mood.kind, (0, 0))
            self.by_kind[mood.kind] = (won + episode.success, of + 1)
        return True

    def measured(self, seconds: float, workers: int) -> dict[str, float]:
        """As metrics."""
        won, of = (sum(counts) for counts in zip(*self.by_kind.values(), strict=True)) if self.by_kind else (0, 0)
        return {
            "practice/success": won / max(of, 1),
            "practice/episodes": float(of),
            "practice/informative": float(self.teaching),
            "practice/start_states": float(len(self.tried)),
            "practice/environment_steps": float(self.clock.steps),
            "practice/faults": float(len(self.faults)),
            "time/practice_seconds": seconds,
            "time/steps_per_second": self.clock.steps / seconds,
            "time/simulators_share": self.clock.simulators / seconds / workers,
            "time/policy_share": self.clock.policy / seconds,
            **{f"practice/success_{kind}": won / of for kind, (won, of) in self.by_kind.items()},
        }


@dataclasses.dataclass(frozen=True)
class Practised:
    """What an iteration's rollouts brought."""

    lessons: Sequence[Lesson]
    measured: dict[str, float]
    faults: Sequence[tuple[int, Fault, bool]]
    """Of which start state, what, and whether its group had to be dropped."""


class Practice:
    """The policy among its environments, and what it remembers of them."""

    def __init__(self, run: OnlineRun, envs: Environments) -> None:
        self._run, self._envs = run, envs
        online, inputs = run.config.online, run.ground.inputs
        self.starts = Starts(online.starts, envs.scene.train)
        self.best = BestOf(online.replay_keeps)
        horizon = run.config.model.action_horizon
        self.execute = min(online.execute or envs.scene.execute or horizon, horizon)
        self._inputs = input_transform(
            inputs.robot,
            inputs.stats,
            inputs.norm,
            inputs.tokenizer,
            action_dim=inputs.action_dim,
            image_size=inputs.image_size,
            discrete_state=inputs.discrete_state,
            default_prompt=None,
        )
        self._outputs = output_transform(inputs.robot, inputs.stats, inputs.norm)

    def _explorer(self, params: Any, version: int, key: Any, moods: Sequence[Mood], *, keep: bool) -> Explorer:  # noqa: ANN401
        return Explorer(
            model=self._run.config.model,
            inputs=self._inputs,
            outputs=self._outputs,
            action_dim=self._run.ground.inputs.robot.action_dim,
            scene=self._envs.scene,
            batch=batch_size(self._envs.count),
            params=params,
            version=version,
            key=key,
            moods=moods,
            keep=keep,
        )

    def practise(self, params: Any, iteration: int) -> Practised:  # noqa: ANN401
        """K rollouts from each of some start states, others in place of those that teach nothing, up to a cap."""
        config, online = self._run.config, self._run.config.online
        since, tally, lessons = time.monotonic(), Tally(), list[Lesson]()
        for round_ in itertools.count():
            room = online.attempts * online.contexts - len(tally.tried)
            wanted = min(online.contexts - tally.teaching, room)
            rng = np.random.default_rng([config.seed, iteration, round_])
            starts = self.starts.choose(wanted, rng, iteration / config.steps, tally.tried) if wanted > 0 else []
            if not starts:
                break
            key = jax.random.fold_in(jax.random.fold_in(chance(config, 2), iteration), round_)
            for group in self._groups(params, iteration, starts, rng, key, tally.clock):
                if tally.count(group):
                    lessons += self._lessons(group)
        if online.replay == "best":
            lessons = [Lesson(chunks, weight) for chunks, weight in self.best.weighed(self.starts)]
        measured = tally.measured(time.monotonic() - since, max(len(self._envs._workers), 1))
        measured["practice/solved_start_states"] = float(self.starts.solved)
        return Practised(lessons, measured, tally.faults)

    def _groups(
        self,
        params: Any,  # noqa: ANN401
        version: int,
        starts: Sequence[int],
        rng: np.random.Generator,
        key: jax.Array,
        clock: Clock,
    ) -> Iterator["Group"]:
        """Each start state's rollouts as soon as they are done: what a group does not teach is not kept."""
        online, state_dim = self._run.config.online, self._run.ground.inputs.robot.state_dim
        episodes = [start for start in starts for _ in range(online.rollouts)]
        moods = [draw_mood(online.exploration, rng, self._envs.scene, state_dim) for _ in episodes]
        explorer = self._explorer(params, version, key, moods, keep=online.windows == "looked")
        record = online.windows == "every_step"
        rollouts = roll_out(self._envs, episodes, explorer, execute=self.execute, record=record, clock=clock)
        for at, start in enumerate(starts):
            numbers = range(at * online.rollouts, (at + 1) * online.rollouts)
            done = list(itertools.islice(rollouts, online.rollouts))
            plans = [explorer.plans.pop(number, []) for number in numbers]
            yield Group(start, done, plans, [moods[number] for number in numbers])

    def _lessons(self, group: "Group") -> list[Lesson]:
        """What is learnt from it now. Successes worth remembering are remembered."""
        algorithm, replay = self._run.config.algorithm, self._run.config.online.replay
        assert isinstance(algorithm, RiptConfig)
        rewards = group.rewards
        self.starts.learn(group.start, int(rewards.sum()), len(rewards))
        advantages = group_advantages(algorithm, rewards[None])[0]
        weights = chunk_weights(algorithm, jnp.asarray(advantages))
        lessons = []
        for episode, plans, advantage, weight in zip(group.episodes, group.plans, advantages, weights, strict=True):
            if replay == "best" and episode.success:
                self.best.add(group.start, self._chunks(episode, plans))
            if replay == "none" and weight != 0:
                lessons.append(Lesson(self._chunks(episode, plans), float(advantage)))
        return lessons

    def _chunks(self, episode: Episode, plans: Sequence[Plan]) -> Chunks:
        if self._run.config.online.windows == "looked":
            return executed_chunks(plans, episode, self.execute)
        return stepwise_chunks(episode, self._inputs, self._run.config.model.action_horizon)

    def judge(self, params: Any) -> dict[str, float]:  # noqa: ANN401
        """Successes on held-out start states: without noise, and with the flow's own. The same noise every time."""
        config = self._run.config
        starts = self._envs.scene.held_out[: config.online.evaluate_episodes]
        found: dict[str, float] = {}
        for name, mood in (("zero_noise", ZERO_NOISE), ("sampled", Mood())):
            explorer = self._explorer(params, 0, chance(config, 3), [mood] * len(starts), keep=False)
            rollouts = roll_out(self._envs, starts, explorer, execute=self.execute)
            ended = [rollout.episode for rollout in rollouts if rollout.episode is not None]
            found[f"evaluation/{name}"] = float(sum(episode.success for episode in ended))
            found[f"evaluation/{name}_of"] = float(len(ended))
        return found

    def remembered(self) -> Any:  # noqa: ANN401
        """What writes it, as it is now."""
        known = {start: dataclasses.replace(one) for start, one in self.starts.known.items()}
        kept = {start: list(all_) for start, all_ in self.best.kept.items()}
        return lambda folder: save_practice(folder, known, kept)


def chance(config: RLTrainConfig, purpose: int) -> jax.Array:
    """Of this run's chance; updates use purpose 1, practice 2, evaluation 3."""
    return jax.random.fold_in(jax.random.key(config.seed), 2**31 + purpose)
