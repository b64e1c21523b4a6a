"""Settings of rollouts in a run that makes its own data: where, how many, how they explore, which start states."""

import dataclasses
import math
from typing import Literal, get_args

from pistar.errors import UserError, check_choice

StartStateChoice = Literal["uniform", "skip_solved", "curriculum", "unsolved_first"]
OnFailure = Literal["roll_back", "stop", "report"]
ExplorationKind = Literal["held_noise", "scaled_noise", "action_noise", "state_noise"]

EXPLORATION: tuple[ExplorationKind, ...] = get_args(ExplorationKind)
"""The ways to explore, in the order in which rollouts are assigned to them."""


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{name} is {value}; it is a fraction, from 0 to 1.")


@dataclasses.dataclass(frozen=True)
class ExplorationConfig:
    """Fractions of the rollouts that explore, each in one way. The rest acts as the policy does."""

    held_noise: float = 0.0
    """Fraction of rollouts that use the same flow noise for a whole episode."""
    held_noise_scale: float = 1.5
    """Maximum scale of the held noise, relative to the flow's own noise. The scale is drawn per episode."""
    scaled_noise: float = 0.0
    """Fraction of rollouts in which every chunk starts from larger flow noise."""
    scaled_noise_scale: float = 1.5
    """Maximum scale of the flow noise of online.exploration.scaled_noise, relative to the flow's own noise. The scale
    is drawn per episode."""
    action_noise: float = 0.0
    """Fraction of rollouts with noise added to every action. The policy learns from the executed actions."""
    action_noise_scale: float = 0.4
    """Maximum standard deviation of the action noise, in normalised units. The value is drawn per episode."""
    state_noise: float = 0.0
    """Fraction of rollouts in which the policy acts on a state with a constant offset. It learns from the true
    state."""
    state_noise_scale: float = 0.5
    """Maximum standard deviation of the offset of online.exploration.state_noise, in normalised units. The value is
    drawn per episode."""
    adaptive: bool = False
    """Scale exploration by the start state's failure rate. Start states that were tried and never solved always
    explore."""

    def __post_init__(self) -> None:
        for name in EXPLORATION:
            _check_fraction(f"online.exploration.{name}", getattr(self, name))
            scale = getattr(self, f"{name}_scale")
            least = 1 if name in ("held_noise", "scaled_noise") else 0
            if not least <= scale < math.inf:
                raise UserError(f"online.exploration.{name}_scale is {scale}; use a number of at least {least}.")
        if self.total > 1 + 1e-9:
            raise UserError(
                f"online.exploration's fractions add up to {self.total:g}; the sum must not exceed 1: lower some."
            )

    @property
    def total(self) -> float:
        """Fraction of the rollouts that explore."""
        return self.held_noise + self.scaled_noise + self.action_noise + self.state_noise


@dataclasses.dataclass(frozen=True)
class StartStatesConfig:
    """Choice of start states."""

    choice: StartStateChoice = "skip_solved"
    """How start states are chosen. uniform: all with the same probability. skip_solved: after all rollouts of a start
    state succeeded, skip it online.start_states.skips times. curriculum: prefer success rates near
    online.start_states.target. unsolved_first: choose solved ones rarely, and those that were tried and never
    solved twice as often."""
    pool: int = 400
    """Number of training start states per task."""
    skips: int = 3
    """Number of times that the choice skip_solved skips a solved start state."""
    target: tuple[float, float] = (0.7, 0.5)
    """Success rates that the choice curriculum prefers: at the start of the run and at its end."""
    uniform_fraction: float = 0.2
    """Fraction of start states that the choice curriculum draws uniformly."""

    def __post_init__(self) -> None:
        check_choice(self, "choice", StartStateChoice)
        if self.pool < 1:
            raise UserError(f"online.start_states.pool is {self.pool}; at least 1 start state is needed.")
        if self.skips < 0:
            raise UserError(f"online.start_states.skips is {self.skips}; give a number of times, or 0.")
        _check_fraction("online.start_states.uniform_fraction", self.uniform_fraction)
        for target in self.target:
            _check_fraction("online.start_states.target", target)


@dataclasses.dataclass(frozen=True)
class HealthConfig:
    """Limits checked after every iteration. None switches a check off."""

    on_failure: OnFailure = "roll_back"
    """What to do when a check of the policy fails. roll_back: continue from the last good checkpoint with half the
    learning rate. stop: end the run. report: only report it."""
    max_rollbacks: int = 3
    """Number of consecutive rollbacks after which the run stops."""
    max_drift: float | None = 1.0
    """Fail if the mean squared change of the velocity in an iteration exceeds this (actions are normalised)."""
    max_success_drop: float | None = 0.3
    """Fail if the success rate of an evaluation is more than this below the best one so far."""
    max_fault_rate: float | None = 0.5
    """Save and stop the run if simulators fail more often than this per episode."""

    def __post_init__(self) -> None:
        check_choice(self, "on_failure", OnFailure)
        if self.max_rollbacks < 0:
            raise UserError(f"online.health.max_rollbacks is {self.max_rollbacks}; use 0 to stop at once, or more.")
        for name in ("max_drift", "max_success_drop", "max_fault_rate"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise UserError(f"online.health.{name} is {limit}; use a positive number, or none for no limit.")


@dataclasses.dataclass(frozen=True)
class OnlineConfig:
    """Online training: each iteration makes rollouts and updates, and at intervals an evaluation."""

    environment: str
    """Environments as in `pistar eval --env`, separated by commas: metaworld/push-v3, or libero/goal for all tasks of a
    suite."""
    engine: Literal["processes", "ray"] = "processes"
    """Where simulators run. processes: in processes on each host. ray: in Ray actors on all machines of the Ray
    cluster."""
    hang_after: float = 120.0
    """Seconds after which a simulator's worker that does not answer is replaced."""
    limit: int | None = None
    """Maximum number of steps per episode. None uses the environment's own limit."""
    execute: int | None = None
    """Actions of a chunk that are executed before the policy is queried again. None uses the environment's default."""
    environments: int = 16
    """Number of environments that run in parallel on each host."""
    workers: int | None = None
    """Number of worker processes for the environments of a host. None uses one per core; 0 runs them in this
    process."""
    start_states_per_iteration: int = 24
    """Number of start states per iteration."""
    exploration: ExplorationConfig = dataclasses.field(default_factory=ExplorationConfig)
    start_states: StartStatesConfig = dataclasses.field(default_factory=StartStatesConfig)
    replay_capacity: int = 100_000
    """Number of steps kept, summed over all hosts. ACRLPD keeps the newest episodes (147 kB per step and camera of 224²
    pixels); RIPT with replay best keeps the shortest successes."""
    replay_min_steps: int = 1_000
    """Number of steps in ACRLPD's replay buffer before it is used. Until then, batches come from the datasets."""
    demonstrations: float = 0.1
    """Fraction of each batch drawn from the datasets, if there are any. RLPD uses 0.5."""
    epochs: float = 1.0
    """Average number of times that each chunk is trained on in an iteration."""
    updates: int | None = None
    """Updates per iteration; replaces online.epochs. Rounded up to a multiple of updates_per_dispatch."""
    max_drift: float | None = None
    """End an iteration's updates early if the velocity's mean squared distance from that of the policy that acted
    exceeds this. None sets no limit."""
    evaluate_every: int = 1
    """Number of iterations between evaluations on held-out start states. 0 evaluates only after the last iteration."""
    evaluate_episodes: int = 50
    """Number of held-out start states per task in an evaluation."""
    patience: int | None = None
    """End the run after this many consecutive evaluations without improvement. None never ends it early."""
    min_gain: float = 0.0
    """Minimum gain in success rate by which an evaluation counts as an improvement."""
    overlap: bool = False
    """Collect the next iteration's rollouts during the updates, with a policy that is one iteration old. Useful if
    simulators and training use different processors."""
    health: HealthConfig = dataclasses.field(default_factory=HealthConfig)

    def __post_init__(self) -> None:
        for name in ("environments", "start_states_per_iteration", "evaluate_episodes", "replay_min_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"online.{name} is {getattr(self, name)}; use a whole number of at least 1.")
        if self.replay_capacity < self.replay_min_steps:
            raise UserError(
                f"online.replay_capacity is {self.replay_capacity} and replay_min_steps {self.replay_min_steps}: it "
                "would never be used; raise replay_capacity or lower replay_min_steps."
            )
        for name in ("limit", "execute", "updates", "patience"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"online.{name} is {getattr(self, name)}; use at least 1, or none.")
        if not self.hang_after > 0:
            raise UserError(f"online.hang_after is {self.hang_after}; give a number of seconds (120).")
        if self.evaluate_every < 0:
            raise UserError(f"online.evaluate_every is {self.evaluate_every}; give a number of iterations, or 0.")
        if not 0 <= self.demonstrations < 1:
            raise UserError(f"online.demonstrations is {self.demonstrations}; it is a fraction below 1 (try 0.1).")
        if not 0 < self.epochs < math.inf:
            raise UserError(f"online.epochs is {self.epochs}; use a positive number.")
        _check_fraction("online.min_gain", self.min_gain)
        if self.max_drift is not None and not 0 < self.max_drift < math.inf:
            raise UserError(f"online.max_drift is {self.max_drift}; use a positive number, or none for no bound.")
