"""Practice: a policy among its environments, group by group, and what is counted of it.

Of several hosts each has environments of its own and practises some of the groups. All choose the same start states and
are told how all groups went, so what is counted and remembered of them is the same everywhere; episodes stay where they
were made.
"""

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
from pistar.data.words import counted
from pistar.envs.env import Scene
from pistar.envs.rollout import Clock, Rollout, batch_size, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import LOST, Fault
from pistar.errors import UserError
from pistar.tables import from_table, to_table
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
from pistar.training.hosts import by_itself, exchange, own_share
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
    def outcome(self) -> "Outcome":
        """In a few words."""
        return Outcome(
            self.start,
            tuple(bool(episode.success) for episode in self.episodes) if self.whole else None,
            tuple(mood.kind for mood in self.moods),
            tuple(fault for rollout in self.rollouts for fault in rollout.faults),
        )

    @property
    def rewards(self) -> Float[np.ndarray, " k"]:
        """0 or 1 each."""
        return np.array([float(episode.success) for episode in self.episodes])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What everybody is told of a group."""

    start: Context
    successes: tuple[bool, ...] | None
    """None where it could not be finished."""
    kinds: tuple[str, ...]
    """Of exploration."""
    faults: tuple[Fault, ...]


ToldFault = tuple[Context, Fault, bool]
"""Of which start state, what, and whether its group, or its episode, had to be dropped."""


@dataclasses.dataclass
class Tally:
    """What is counted while practising."""

    tried: list[Context] = dataclasses.field(default_factory=list)
    teaching: int = 0
    by_kind: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Of exploration: successes, of how many episodes."""
    faults: list[ToldFault] = dataclasses.field(default_factory=list)

    def count(self, group: Outcome) -> None:
        """One more. Of one that could not be finished nothing but that."""
        self.tried.append(group.start)
        self.faults += [(group.start, fault, group.successes is None) for fault in group.faults]
        if group.successes is None:
            return
        self.teaching += bool(informative(np.array([group.successes], float))[0])
        for kind, success in zip(group.kinds, group.successes, strict=True):
            won, of = self.by_kind.get(kind, (0, 0))
            self.by_kind[kind] = (won + success, of + 1)

    def measured(self, seconds: float, clock: Clock, workers: int) -> dict[str, float]:
        """As metrics, with what was spent on it, of all hosts together."""
        own: tuple[dict[str, float], int] = dataclasses.asdict(clock), max(workers, 1)
        clocks = exchange("clocks", own)
        spent = Clock(**{name: sum(each[name] for each, _ in clocks) for name in own[0]})  # type: ignore[arg-type]
        workers = sum(each for _, each in clocks)
        won, of = (sum(counts) for counts in zip(*self.by_kind.values(), strict=True)) if self.by_kind else (0, 0)
        return {
            "practice/success": won / max(of, 1),
            "practice/episodes": float(of),
            "practice/informative": float(self.teaching),
            "practice/start_states": float(len(self.tried)),
            "practice/environment_steps": float(spent.steps),
            "practice/faults": _failures(self.faults),
            "time/practice_seconds": seconds,
            "time/steps_per_second": spent.steps / seconds,
            "time/simulators_share": spent.simulators / seconds / workers,
            "time/policy_share": spent.policy / seconds / len(clocks),
            **{f"practice/success_{kind}": won / of for kind, (won, of) in self.by_kind.items()},
        }


@dataclasses.dataclass(frozen=True)
class Practised(Generic[T]):
    """What an iteration's rollouts brought."""

    kept: Sequence[T]
    """Of each whole group of this host what its learner keeps."""
    measured: dict[str, float]
    faults: Sequence[ToldFault]
    version: int
    """Of the policy that acted: iterations it had learnt from."""


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

    @by_itself()
    def practise(
        self, behaviour: Behaviour, iteration: int, keep: Callable[[Group], T], *, record: bool, plans: bool
    ) -> Practised[T]:
        """K rollouts from each of some start states, others in place of those that teach nothing, up to a cap.

        `keep` is given each group as soon as it is whole: what it does not return is gone. `record`: episodes have
        their observations; `plans`: groups have what the policy looked at and decided.
        """
        config, online = self._config, self._config.online
        since, tally, clock, kept = time.monotonic(), Tally(), Clock(), list[T]()
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
            ours, outcomes = own_share(len(starts)), list[Outcome]()
            explorer = self._explorer(behaviour, key, moods, ours.start * online.rollouts, keep=plans)
            for group in self._groups(explorer, starts, ours, record=record, clock=clock):
                outcomes.append(group.outcome)
                if group.whole:
                    kept.append(keep(group))
            for outcome in _of_all_hosts(outcomes):
                tally.count(outcome)
                if outcome.successes is not None:
                    self.starts.learn(outcome.start, sum(outcome.successes), len(outcome.successes))
        measured = tally.measured(time.monotonic() - since, clock, self._envs.workers)
        measured["practice/solved_start_states"] = float(self.starts.solved)
        return Practised(kept, measured, tally.faults, behaviour.version)

    def _explorer(
        self, behaviour: Behaviour, key: jax.Array, moods: Sequence[Mood], first: int, *, keep: bool
    ) -> Explorer:
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
            first=first,
            keep=keep,
        )

    def _groups(
        self, explorer: Explorer, starts: Sequence[Context], ours: range, *, record: bool, clock: Clock
    ) -> Iterator[Group]:
        """Rollouts of each start state that is ours as soon as they are done."""
        times = self._config.online.rollouts
        episodes = [starts[at] for at in ours for _ in range(times)]
        rollouts = roll_out(self._envs, episodes, explorer, execute=self.execute, record=record, clock=clock)
        for at in ours:
            numbers = range(at * times, (at + 1) * times)
            done = list(itertools.islice(rollouts, times))
            plans = [explorer.plans.pop(number, []) for number in numbers]
            yield Group(starts[at], done, plans, [explorer.moods[number] for number in numbers])

    def chunks(self, episode: Episode, plans: Sequence[Plan]) -> Chunks:
        """What is learnt from of an episode, as configured."""
        if self._config.online.windows == "looked":
            return executed_chunks(plans, episode, self.execute)
        return stepwise_chunks(episode, self._inputs, self._config.model.action_horizon)

    @by_itself()
    def judge(self, behaviour: Behaviour) -> tuple[dict[str, float], list[ToldFault]]:
        """Successes on held-out start states: without noise, and with the flow's own. The same noise every time. Where
        a critic chooses in practice, it does so in a count of its own. And what failed of the simulators meanwhile."""
        episodes, scenes = self._config.online.evaluate_episodes, self._envs.scenes
        starts = [(task, start) for task, scene in scenes.items() for start in scene.held_out[:episodes]]
        trials = {"zero_noise": (ZERO_NOISE, behaviour.alone), "sampled": (Mood(), behaviour.alone)}
        if behaviour.judge is not None:
            trials["best_of_n"] = (Mood(), behaviour)
        found, failed = dict[str, float](), list[Outcome]()
        ours = own_share(len(starts))
        for name, (mood, acting) in trials.items():
            key = chance(self._config, 3)
            explorer = self._explorer(acting, key, [mood] * len(starts), ours.start, keep=False)
            for rollout in roll_out(self._envs, starts[ours.start : ours.stop], explorer, execute=self.execute):
                if rollout.faults:
                    over = None if rollout.episode is None else (bool(rollout.episode.success),)
                    failed.append(Outcome((rollout.task, rollout.start_id), over, (name,), (*rollout.faults,)))
                if rollout.episode is None:
                    continue
                for what in (name, *((f"{name}/{rollout.task}",) if len(scenes) > 1 else ())):
                    won, of = f"evaluation/{what}", f"evaluation/{what}_of"
                    found[won] = found.get(won, 0.0) + rollout.episode.success
                    found[of] = found.get(of, 0.0) + 1
        everywhere = exchange("evaluation", found)
        names = dict.fromkeys(name for each in everywhere for name in each)
        told = [(each.start, fault, each.successes is None) for each in _of_all_hosts(failed) for fault in each.faults]
        for name in trials:
            if f"evaluation/{name}_of" not in names:
                raise UserError(
                    f"None of {counted(len(starts), 'held-out episode')} could be finished: "
                    f"{told[-1][1].kind}, {told[-1][1].detail}. Try the simulator alone, by `pistar eval`."
                )
        counts = {name: sum(each.get(name, 0.0) for each in everywhere) for name in names}
        return counts | {"evaluation/faults": _failures(told)}, told


def _failures(faults: Sequence[ToldFault]) -> float:
    """How often a simulator failed. What went with it is not another failure."""
    return float(sum(fault.kind != LOST for _, fault, _ in faults))


def _of_all_hosts(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """In the order of their start states, which are shared out one after the other."""
    tables = itertools.chain.from_iterable(exchange("groups", [to_table(each) for each in outcomes]))
    return [from_table(Outcome, table, "a host's word", whole=True) for table in tables]


def chance(config: RLTrainConfig, purpose: int) -> jax.Array:
    """Of this run's chance; updates use purpose 1, practice 2, evaluation 3, drift 4."""
    return jax.random.fold_in(jax.random.key(config.seed), 2**31 + purpose)
