"""Rollouts of the policy that is being trained: groups per start state, counts, and evaluations.

With several hosts each has environments of its own and runs some of the groups. All choose the same start states and
learn how all groups went, so counts and records are the same everywhere; episodes stay on the host that made them.
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
from pistar.config.online import OnlineConfig
from pistar.config.train import RLTrainConfig
from pistar.data.robots import input_transform, output_transform
from pistar.distributed.multihost import all_gather, on_this_host_alone, own_share
from pistar.envs.base import Scene
from pistar.envs.rollout import Clock, Rollout, batch_size, roll_out
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import LOST, Fault
from pistar.errors import UserError
from pistar.online.exploration import (
    ZERO_NOISE,
    Decision,
    ExplorationMode,
    Explorer,
    PolicySnapshot,
    draw_exploration_mode,
)
from pistar.online.start_states import StartState, StartStateSampler
from pistar.tables import from_table, to_table
from pistar.text import counted
from pistar.training.setup import OnlineRun
from pistar.types import Episode

T = TypeVar("T")

UPDATES, ROLLOUTS, EVALUATION, DRIFT = 1, 2, 3, 4
"""Purposes of a run's random numbers, see `purpose_key`."""


def purpose_key(config: RLTrainConfig, purpose: int) -> jax.Array:
    """The run's random key for one purpose."""
    return jax.random.fold_in(jax.random.key(config.seed), 2**31 + purpose)


@dataclasses.dataclass(frozen=True)
class Group:
    """Rollouts of one start state, which are compared with each other."""

    start: StartState
    rollouts: Sequence[Rollout]
    decisions: Sequence[Sequence[Decision]]
    modes: Sequence[ExplorationMode]

    @property
    def complete(self) -> bool:
        """Whether all rollouts could be finished. If not, the group is neither counted nor learnt from."""
        return all(rollout.episode is not None for rollout in self.rollouts)

    @property
    def episodes(self) -> list[Episode]:
        """The finished episodes: all, if it is complete."""
        return [rollout.episode for rollout in self.rollouts if rollout.episode is not None]

    @property
    def outcome(self) -> "Outcome":
        """What other hosts need to know of it."""
        return Outcome(
            self.start,
            tuple(bool(episode.success) for episode in self.episodes) if self.complete else None,
            tuple(mode.kind for mode in self.modes),
            tuple(fault for rollout in self.rollouts for fault in rollout.faults),
        )

    @property
    def rewards(self) -> Float[np.ndarray, " k"]:
        """0 or 1 for each rollout."""
        return np.array([float(episode.success) for episode in self.episodes])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a group went."""

    start: StartState
    successes: tuple[bool, ...] | None
    """None if it could not be finished."""
    modes: tuple[str, ...]
    """Kind of exploration of each rollout."""
    faults: tuple[Fault, ...]


@dataclasses.dataclass(frozen=True)
class SimulatorFault:
    """A failure of a simulator, and what it did to the rollouts of a start state."""

    start: StartState
    fault: Fault
    dropped: bool
    """Whether the group, or the episode, had to be dropped."""


@dataclasses.dataclass
class Counter:
    """Counts of an iteration's rollouts."""

    tried: list[StartState] = dataclasses.field(default_factory=list)
    informative: int = 0
    by_mode: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Successes and episodes by kind of exploration."""
    faults: list[SimulatorFault] = dataclasses.field(default_factory=list)

    def count(self, group: Outcome) -> None:
        """Count a group. Of one that could not be finished only its faults count."""
        self.tried.append(group.start)
        self.faults += [SimulatorFault(group.start, fault, group.successes is None) for fault in group.faults]
        if group.successes is None:
            return
        self.informative += bool(informative(np.array([group.successes], float))[0])
        for kind, success in zip(group.modes, group.successes, strict=True):
            successes, episodes = self.by_mode.get(kind, (0, 0))
            self.by_mode[kind] = (successes + success, episodes + 1)

    def metrics(self, seconds: float, clock: Clock, workers: int) -> dict[str, float]:
        """Counts and time spent, of all hosts together."""
        own: tuple[dict[str, float], int] = dataclasses.asdict(clock), max(workers, 1)
        clocks = all_gather("clocks", own)
        spent = Clock(**{name: sum(each[name] for each, _ in clocks) for name in own[0]})  # type: ignore[arg-type]
        workers = sum(each for _, each in clocks)
        successes, episodes = (
            (sum(counts) for counts in zip(*self.by_mode.values(), strict=True)) if self.by_mode else (0, 0)
        )
        return {
            "rollout/success_rate": successes / max(episodes, 1),
            "rollout/episodes": float(episodes),
            "rollout/informative_groups": float(self.informative),
            "rollout/groups": float(len(self.tried)),
            "rollout/env_steps": float(spent.steps),
            "rollout/faults": count_failures(self.faults),
            "time/rollout_seconds": seconds,
            "time/env_steps_per_second": spent.steps / seconds,
            "time/simulator_fraction": spent.simulators / seconds / workers,
            "time/policy_fraction": spent.policy / seconds / len(clocks),
            **{f"rollout/success_rate_{kind}": won / of for kind, (won, of) in self.by_mode.items()},
        }


@dataclasses.dataclass(frozen=True)
class Collected(Generic[T]):
    """What an iteration's rollouts gave."""

    kept: Sequence[T]
    """What the learner keeps of each complete group of this host."""
    metrics: dict[str, float]
    faults: Sequence[SimulatorFault]
    version: int
    """Iterations the policy that acted had learnt from."""


class RolloutCollector:
    """Rolls out a policy that is being trained."""

    def __init__(self, run: OnlineRun, envs: Environments) -> None:
        self._config, self._online, self._envs = run.config, run.online, envs
        inputs, horizon = run.context.inputs, run.config.model.action_horizon
        self._robot = inputs.robot
        self.start_states = StartStateSampler(
            run.online.start_states, {name: scene.train for name, scene in envs.scenes.items()}
        )
        execute = run.config.algorithm.executed(run.online.execute)
        self.execute = min(execute or envs.scene.execute or horizon, horizon)
        self.inputs = input_transform(
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
        """The scene of the environments."""
        return self._envs.scene

    @on_this_host_alone()
    def collect(
        self,
        policy: PolicySnapshot,
        iteration: int,
        keep: Callable[[Group], T],
        *,
        attempts: int = 1,
        record: bool,
        decisions: bool,
    ) -> Collected[T]:
        """Roll out each of an iteration's start states as often as the algorithm wants.

        Start states whose rollouts all end alike are replaced by others, up to `attempts` times as many in all. `keep`
        is called with each group as soon as it is complete; nothing else of it stays. `record` keeps observations in
        episodes, `decisions` keeps what the policy saw and decided in groups.
        """
        config, online = self._config, self._online
        since, counter, clock, kept = time.monotonic(), Counter(), Clock(), list[T]()
        for round_ in itertools.count():
            room = attempts * online.start_states_per_iteration - len(counter.tried)
            wanted = min(online.start_states_per_iteration - counter.informative, room)
            rng = np.random.default_rng([config.seed, iteration, round_])
            progress = iteration / config.steps
            starts = self.start_states.choose(wanted, rng, progress, counter.tried) if wanted > 0 else []
            if not starts:
                break
            key = jax.random.fold_in(jax.random.fold_in(purpose_key(config, ROLLOUTS), iteration), round_)
            ours, outcomes = own_share(len(starts)), list[Outcome]()
            explorer = self._explorer(policy, key, self._draw_modes(online, rng, starts), keep=decisions)
            explorer.first = ours.start * config.algorithm.rollouts
            for group in self._groups(explorer, starts, ours, record=record, clock=clock):
                outcomes.append(group.outcome)
                if group.complete:
                    kept.append(keep(group))
            for outcome in _gather_outcomes(outcomes):
                counter.count(outcome)
                if outcome.successes is not None:
                    self.start_states.record(outcome.start, sum(outcome.successes), len(outcome.successes))
        metrics = counter.metrics(time.monotonic() - since, clock, self._envs.workers)
        metrics["rollout/solved_start_states"] = float(self.start_states.solved)
        return Collected(kept, metrics, counter.faults, policy.version)

    def _draw_modes(
        self, online: OnlineConfig, rng: np.random.Generator, starts: Sequence[StartState]
    ) -> list[ExplorationMode]:
        scene, dim = self._envs.scene, self._robot.state_dim
        return [
            draw_exploration_mode(online.exploration, rng, scene, dim, self.start_states.success_rate(start))
            for start in starts
            for _ in range(self._config.algorithm.rollouts)
        ]

    def _explorer(
        self, policy: PolicySnapshot, key: jax.Array, modes: Sequence[ExplorationMode], *, keep: bool
    ) -> Explorer:
        return Explorer(
            model=self._config.model,
            inputs=self.inputs,
            outputs=self._outputs,
            action_dim=self._robot.action_dim,
            scene=self._envs.scene,
            batch=batch_size(self._envs.count),
            policy=policy,
            key=key,
            modes=modes,
            keep=keep,
        )

    def _groups(
        self, explorer: Explorer, starts: Sequence[StartState], ours: range, *, record: bool, clock: Clock
    ) -> Iterator[Group]:
        """This host's groups, each as soon as its rollouts are done."""
        times = self._config.algorithm.rollouts
        episodes = [starts[at] for at in ours for _ in range(times)]
        rollouts = roll_out(self._envs, episodes, explorer, execute=self.execute, record=record, clock=clock)
        for at in ours:
            numbers = range(at * times, (at + 1) * times)
            done = list(itertools.islice(rollouts, times))
            decisions = [explorer.decisions.pop(number, []) for number in numbers]
            yield Group(starts[at], done, decisions, [explorer.modes[number] for number in numbers])

    @on_this_host_alone()
    def evaluate(self, policy: PolicySnapshot) -> tuple[dict[str, float], list[SimulatorFault]]:
        """Count successes on held-out start states, with zero noise and with the flow's own; the noise is the same
        every time. Where a critic chooses in rollouts, it does so in a third count. Also returns simulator faults.
        """
        per_task, scenes = self._online.evaluate_episodes, self._envs.scenes
        starts = [(task, start) for task, scene in scenes.items() for start in scene.held_out[:per_task]]
        trials = {
            "zero_noise": (ZERO_NOISE, policy.without_critic),
            "sampled": (ExplorationMode(), policy.without_critic),
        }
        if policy.selector is not None:
            trials["best_of_n"] = (ExplorationMode(), policy)
        counts, failed = dict[str, float](), list[Outcome]()
        ours = own_share(len(starts))
        for name, (mode, acting) in trials.items():
            key = purpose_key(self._config, EVALUATION)
            explorer = self._explorer(acting, key, [mode] * len(starts), keep=False)
            explorer.first = ours.start
            for rollout in roll_out(self._envs, starts[ours.start : ours.stop], explorer, execute=self.execute):
                if rollout.faults:
                    over = None if rollout.episode is None else (bool(rollout.episode.success),)
                    failed.append(Outcome((rollout.task, rollout.start_id), over, (name,), (*rollout.faults,)))
                if rollout.episode is None:
                    continue
                for task in ("", *((f"/{rollout.task}",) if len(scenes) > 1 else ())):
                    won, of = f"eval/{name}_successes{task}", f"eval/{name}_episodes{task}"
                    counts[won] = counts.get(won, 0.0) + rollout.episode.success
                    counts[of] = counts.get(of, 0.0) + 1
        return self._evaluation_of_all_hosts(counts, failed, tuple(trials), len(starts))

    def _evaluation_of_all_hosts(
        self, counts: dict[str, float], failed: list[Outcome], trials: tuple[str, ...], episodes: int
    ) -> tuple[dict[str, float], list[SimulatorFault]]:
        everywhere = all_gather("evaluation", counts)
        names = dict.fromkeys(name for each in everywhere for name in each)
        faults = [
            SimulatorFault(each.start, fault, each.successes is None)
            for each in _gather_outcomes(failed)
            for fault in each.faults
        ]
        for name in trials:
            if f"eval/{name}_episodes" not in names:
                last = faults[-1].fault
                raise UserError(
                    f"None of {counted(episodes, 'held-out episode')} could be finished: {last.kind}, {last.detail}. "
                    "Try the simulator alone, with `pistar eval`."
                )
        total = {name: sum(each.get(name, 0.0) for each in everywhere) for name in names}
        return total | {"eval/faults": count_failures(faults)}, faults


def count_failures(faults: Sequence[SimulatorFault]) -> float:
    """How often a simulator failed. Episodes lost with it are not another failure."""
    return float(sum(each.fault.kind != LOST for each in faults))


def _gather_outcomes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes of all hosts, in the order of their start states."""
    tables = itertools.chain.from_iterable(all_gather("groups", [to_table(each) for each in outcomes]))
    return [from_table(Outcome, table, "a host's outcome", whole=True) for table in tables]
