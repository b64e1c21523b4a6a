"""Practice: a policy among its environments, group by group, and what is counted of it."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from pistar.agents.estimators import informative
from pistar.data.robots import input_transform, output_transform
from pistar.envs.env import Scene
from pistar.envs.rollout import Clock, Rollout, batch_size, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import Fault
from pistar.training.config import RLTrainConfig
from pistar.training.experience import Context, Starts
from pistar.training.exploring import (
    ZERO_NOISE,
    Behaviour,
    Chunks,
    Explorer,
    Mood,
    Plan,
    draw_mood,
    executed_chunks,
    stepwise_chunks,
)
from pistar.training.run import Ground
from pistar.types import Episode

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Group:
    """Rollouts of one start state, which judge each other."""

    start: Context
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

    tried: list[Context] = dataclasses.field(default_factory=list)
    teaching: int = 0
    by_kind: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Of exploration: successes, of how many episodes."""
    faults: list[tuple[Context, Fault, bool]] = dataclasses.field(default_factory=list)
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
class Practised(Generic[T]):
    """What an iteration's rollouts brought."""

    kept: Sequence[T]
    """Of each whole group what its learner keeps."""
    measured: dict[str, float]
    faults: Sequence[tuple[Context, Fault, bool]]
    """Of which start state, what, and whether its group had to be dropped."""


class Practice:
    """Rollouts of a policy that is being trained."""

    def __init__(self, config: RLTrainConfig, ground: Ground, envs: Environments) -> None:
        self._config, self._envs, self._robot = config, envs, ground.inputs.robot
        inputs, horizon = ground.inputs, config.model.action_horizon
        self.starts = Starts(config.online.starts, {name: scene.train for name, scene in envs.scenes.items()})
        self.execute = min(config.executes or envs.scene.execute or horizon, horizon)
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

    @property
    def scene(self) -> Scene:
        """Where it practises."""
        return self._envs.scene

    def practise(
        self, behaviour: Behaviour, iteration: int, keep: Callable[[Group], T], *, record: bool, plans: bool
    ) -> Practised[T]:
        """K rollouts from each of some start states, others in place of those that teach nothing, up to a cap.

        `keep` is given each group as soon as it is whole: what it does not return is gone. `record`: episodes have
        their observations; `plans`: groups have what the policy looked at and decided.
        """
        config, online = self._config, self._config.online
        since, tally, kept = time.monotonic(), Tally(), list[T]()
        for round_ in itertools.count():
            room = online.attempts * online.contexts - len(tally.tried)
            wanted = min(online.contexts - tally.teaching, room)
            rng = np.random.default_rng([config.seed, iteration, round_])
            starts = self.starts.choose(wanted, rng, iteration / config.steps, tally.tried) if wanted > 0 else []
            if not starts:
                break
            key = jax.random.fold_in(jax.random.fold_in(chance(config, 2), iteration), round_)
            moods = [
                draw_mood(online.exploration, rng, self._envs.scene, self._robot.state_dim, self.starts.success(start))
                for start in starts
                for _ in range(online.rollouts)
            ]
            explorer = self._explorer(behaviour, key, moods, keep=plans)
            for group in self._groups(explorer, starts, record=record, clock=tally.clock):
                if tally.count(group):
                    self.starts.learn(group.start, int(group.rewards.sum()), len(group.rewards))
                    kept.append(keep(group))
        measured = tally.measured(time.monotonic() - since, max(self._envs.workers, 1))
        measured["practice/solved_start_states"] = float(self.starts.solved)
        return Practised(kept, measured, tally.faults)

    def _explorer(self, behaviour: Behaviour, key: jax.Array, moods: Sequence[Mood], *, keep: bool) -> Explorer:
        return Explorer(
            model=self._config.model,
            inputs=self._inputs,
            outputs=self._outputs,
            action_dim=self._robot.action_dim,
            scene=self._envs.scene,
            batch=batch_size(self._envs.count),
            behaviour=behaviour,
            key=key,
            moods=moods,
            keep=keep,
        )

    def _groups(self, explorer: Explorer, starts: Sequence[Context], *, record: bool, clock: Clock) -> Iterator[Group]:
        """Each start state's rollouts as soon as they are done."""
        times = self._config.online.rollouts
        episodes = [start for start in starts for _ in range(times)]
        rollouts = roll_out(self._envs, episodes, explorer, execute=self.execute, record=record, clock=clock)
        for at, start in enumerate(starts):
            numbers = range(at * times, (at + 1) * times)
            done = list(itertools.islice(rollouts, times))
            plans = [explorer.plans.pop(number, []) for number in numbers]
            yield Group(start, done, plans, [explorer.moods[number] for number in numbers])

    def chunks(self, episode: Episode, plans: Sequence[Plan]) -> Chunks:
        """What is learnt from of an episode, as configured."""
        if self._config.online.windows == "looked":
            return executed_chunks(plans, episode, self.execute)
        return stepwise_chunks(episode, self._inputs, self._config.model.action_horizon)

    def judge(self, behaviour: Behaviour) -> dict[str, float]:
        """Successes on held-out start states: without noise, and with the flow's own. The same noise every time. Where
        a critic chooses in practice, it does so in a count of its own."""
        episodes, scenes = self._config.online.evaluate_episodes, self._envs.scenes
        starts = [(task, start) for task, scene in scenes.items() for start in scene.held_out[:episodes]]
        trials = {"zero_noise": (ZERO_NOISE, behaviour.alone), "sampled": (Mood(), behaviour.alone)}
        if behaviour.judge is not None:
            trials["best_of_n"] = (Mood(), behaviour)
        found: dict[str, float] = {}
        for name, (mood, acting) in trials.items():
            explorer = self._explorer(acting, chance(self._config, 3), [mood] * len(starts), keep=False)
            for rollout in roll_out(self._envs, starts, explorer, execute=self.execute):
                if rollout.episode is None:
                    continue
                for what in (name, *((f"{name}/{rollout.task}",) if len(scenes) > 1 else ())):
                    won, of = f"evaluation/{what}", f"evaluation/{what}_of"
                    found[won] = found.get(won, 0.0) + rollout.episode.success
                    found[of] = found.get(of, 0.0) + 1
        return found


def chance(config: RLTrainConfig, purpose: int) -> jax.Array:
    """Of this run's chance; updates use purpose 1, practice 2, evaluation 3, drift 4."""
    return jax.random.fold_in(jax.random.key(config.seed), 2**31 + purpose)
