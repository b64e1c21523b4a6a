"""How a policy practises: where, how often, how it explores, and which start states it takes."""

import dataclasses
import math
from typing import Literal

from pistar.errors import UserError

Choice = Literal["uniform", "skip_solved", "curriculum", "unsolved_first"]
Replay = Literal["none", "best"]
Windows = Literal["looked", "every_step"]


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{name} is {value}; it is a share, from 0 to 1.")


@dataclasses.dataclass(frozen=True)
class ExplorationConfig:
    """Shares of the rollouts that explore, each in one way; the rest acts as the policy does."""

    held_noise: float = 0.0
    """One flow noise for a whole episode …"""
    held_noise_scale: float = 1.5
    """… up to so many times as large as the flow's own, drawn for the episode."""
    warm_noise: float = 0.0
    """Every chunk from a noise …"""
    warm_noise_scale: float = 1.5
    """… up to so many times as large, drawn for the episode."""
    action_noise: float = 0.0
    """Each action is off by chance, and what was executed is what is learnt from …"""
    action_noise_scale: float = 0.4
    """… with a deviation of up to this, drawn for the episode, in the model's units: of the action's deviation in the
    data, or with quantiles of half its range."""
    misled: float = 0.0
    """The policy is told a state that is off by the same for a whole episode, and learns from the true one …"""
    misled_scale: float = 0.5
    """… with a deviation of up to this, drawn for the episode, in the model's units."""
    adaptive: bool = False
    """Explore the less, the oftener a start state succeeds: the shares times its rate of failure so far. One that was
    tried and never succeeded explores in every rollout."""

    def __post_init__(self) -> None:
        for name in ("held_noise", "warm_noise", "action_noise", "misled"):
            _check_share(f"online.exploration.{name}", getattr(self, name))
            scale = getattr(self, f"{name}_scale")
            least = 1 if name in ("held_noise", "warm_noise") else 0
            if not least <= scale < math.inf:
                raise UserError(f"online.exploration.{name}_scale is {scale}; use a number of at least {least}.")
        if self.total > 1 + 1e-9:
            raise UserError(
                f"online.exploration's shares add up to {self.total:g}; what is left of 1 acts without: lower some."
            )

    @property
    def total(self) -> float:
        """Share of the rollouts that explore."""
        return self.held_noise + self.warm_noise + self.action_noise + self.misled


@dataclasses.dataclass(frozen=True)
class StartsConfig:
    """Which start states are practised."""

    choice: Choice = "skip_solved"
    """`uniform`. `skip_solved`: one that was solved K times of K is passed over `skips` times, then tried again.
    `curriculum`: rather those that succeed about as often as the target. `unsolved_first`: solved ones seldom, those
    tried and never solved twice as often."""
    pool: int = 400
    """So many of each task's, the first ones to learn from."""
    skips: int = 3
    target: tuple[float, float] = (0.7, 0.5)
    """The curriculum's success rate, at the beginning of the run and at its end."""
    at_random: float = 0.2
    """Share of the curriculum's choices that are uniform."""

    def __post_init__(self) -> None:
        if self.pool < 1:
            raise UserError(f"online.starts.pool is {self.pool}; at least 1 start state is practised.")
        if self.skips < 0:
            raise UserError(f"online.starts.skips is {self.skips}; give how often a solved one is passed over, or 0.")
        _check_share("online.starts.at_random", self.at_random)
        for target in self.target:
            _check_share("online.starts.target", target)


@dataclasses.dataclass(frozen=True)
class HealthConfig:
    """What is looked at after every iteration. None: never mind."""

    on_trouble: Literal["roll_back", "stop", "tell"] = "roll_back"
    """With the policy. `roll_back`: to the last good checkpoint, with half the learning rate."""
    rollbacks: int = 3
    """So many one after the other, then it stops."""
    max_skipped: float = 0.5
    """Share of an iteration's updates whose gradient is not finite. Each of them is skipped in any case."""
    max_gradient_norm: float | None = 1e3
    """Mean over an iteration, before clipping."""
    max_weight_growth: float | None = 2.0
    """Of the weights' norm, since the first iteration."""
    max_drift: float | None = 1.0
    """Mean square of the velocity's change in an iteration. Data has deviation 1."""
    max_success_drop: float | None = 0.3
    """Below the best evaluation so far."""
    max_fault_rate: float | None = 0.5
    """Failures of simulators per episode; more than this, and the run stops."""
    max_memory_growth: float | None = 1.0
    """Of this process since the second iteration that had something to learn from, relative; more than this, and it
    stops."""

    def __post_init__(self) -> None:
        _check_share("online.health.max_skipped", self.max_skipped)
        if self.rollbacks < 0:
            raise UserError(f"online.health.rollbacks is {self.rollbacks}; give a number, 0 to stop at once.")
        for name in ("gradient_norm", "weight_growth", "drift", "success_drop", "fault_rate", "memory_growth"):
            limit = getattr(self, f"max_{name}")
            if limit is not None and not limit > 0:
                raise UserError(f"online.health.max_{name} is {limit}; use a positive number, or none for no limit.")


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the learning rate and the length of an iteration are adapted, if they are (`online.auto_tune`)."""

    target_drift: float = 0.01
    """Mean square of the velocity's change in an iteration: where it is smaller the rate rises, else it falls …"""
    tolerance: float = 2.0
    """… when it is so many times too small or too large …"""
    factor: float = 1.5
    """… by this factor …"""
    most: float = 4.0
    """… to at most so many times, and at least so small a part of, what is configured."""
    scarce: float = 0.2
    """Below this share of informative groups an iteration is made shorter: there is little to learn …"""
    plenty: float = 0.6
    """… and above this longer."""

    def __post_init__(self) -> None:
        if not 0 < self.target_drift < math.inf:
            raise UserError(f"online.tuning.target_drift is {self.target_drift}; use a positive number (0.01).")
        for name in ("tolerance", "factor", "most"):
            if not 1 < getattr(self, name) < math.inf:
                raise UserError(f"online.tuning.{name} is {getattr(self, name)}; it is a factor, above 1.")
        for name in ("scarce", "plenty"):
            _check_share(f"online.tuning.{name}", getattr(self, name))


@dataclasses.dataclass(frozen=True)
class OnlineConfig:
    """An iteration: rollouts, updates, and now and then an evaluation."""

    environment: str | None = None
    """As in `pistar eval --env`: metaworld/push-v3, or libero/goal, whose tasks are all practised; several with commas
    between them."""
    engine: Literal["processes", "ray"] = "processes"
    """Where simulators are: in processes of this machine, or in actors of Ray, on as many as it has."""
    hang_after: float = 120.0
    """Seconds without an answer after which a simulator's worker is taken to hang, and replaced."""
    limit: int | None = None
    """Steps of an episode. None: the environment's own."""
    execute: int | None = None
    """Actions of a chunk before the policy looks again. None: as the environment's policies usually do."""
    environments: int = 16
    """At once, on each host."""
    workers: int | None = None
    """Processes they are spread over, of each host. None: as many as cores."""
    contexts: int = 24
    """Start states an iteration wants to learn from …"""
    rollouts: int = 8
    """… and how often each is tried: K."""
    attempts: int = 1
    """Start states that teach nothing, because all K succeeded or all failed, are replaced by others, up to so many
    times `contexts` in all. 1: never."""
    exploration: ExplorationConfig = dataclasses.field(default_factory=ExplorationConfig)
    starts: StartsConfig = dataclasses.field(default_factory=StartsConfig)
    replay: Replay = "none"
    """`none`: an iteration learns from its own rollouts, by their advantages. `best`: from the shortest successes of
    every start state so far, the more the seldomer it succeeds."""
    replay_keeps: int = 2
    """Successes of a start state `best` keeps."""
    replay_capacity: int = 100_000
    """Steps that are kept, of all hosts together: by ACRLPD's replay buffer those of the newest episodes, 147 kB each
    for every camera of 224²; by `best` those of the shortest successes, one look for every chunk."""
    replay_min_steps: int = 1_000
    """ACRLPD's buffer has to hold before it is drawn from. Until then batches are all from the datasets."""
    windows: Windows = "looked"
    """Where chunks to learn from begin. `looked`: where the policy looked, as it put them out. `every_step`: at every
    step executed, with what was done from there on in that step's own frame: several times as many, but cameras have
    to see every step."""
    demonstrations: float = 0.1
    """Share of each batch that is from the datasets, if there are any. RLPD: half."""
    epochs: float = 1.0
    """Times each chunk is learnt from in an iteration, on average (ACRLPD: own windows drawn for each step done) …"""
    updates: int | None = None
    """… or so many updates, however many chunks there are; whole calls of `updates_per_dispatch`."""
    restart: bool = False
    """Each iteration trains on from the averaged weights, with fresh moments and its rate from the beginning: the
    optimiser's schedule is then an iteration's, and the policy that practises next is one whose rate has come down."""
    max_drift: float | None = None
    """An iteration's updates end when the velocity has moved this far (mean square) from the policy that acted."""
    evaluate_every: int = 1
    """Iterations between evaluations on held-out start states; 0 for none but the last."""
    evaluate_episodes: int = 50
    patience: int | None = None
    """The run ends when so many evaluations one after the other were no better than the best. None: never."""
    min_gain: float = 0.0
    """By how much an evaluation must be better to count as such, as a share of the start states."""
    overlap: bool = False
    """Practise for the next iteration while learning from this one: by a policy that is one iteration old, except after
    a checkpoint or an evaluation. Worth it where simulators and devices do not share processors."""
    health: HealthConfig = dataclasses.field(default_factory=HealthConfig)
    auto_tune: bool = False
    """Adapt the learning rate and the length of an iteration within bounds, and say why."""
    tuning: TuningConfig = dataclasses.field(default_factory=TuningConfig)

    def __post_init__(self) -> None:
        counts = ("environments", "contexts", "rollouts", "attempts", "replay_keeps", "evaluate_episodes")
        for name in (*counts, "replay_min_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"online.{name} is {getattr(self, name)}; use a whole number of at least 1.")
        if self.replay_capacity < self.replay_min_steps:
            raise UserError(
                f"online.replay_capacity is {self.replay_capacity} and replay_min_steps {self.replay_min_steps}: it "
                "would never be drawn from; raise the one or lower the other."
            )
        for name in ("limit", "execute", "updates"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"online.{name} is {getattr(self, name)}; use at least 1, or none.")
        if not self.hang_after > 0:
            raise UserError(f"online.hang_after is {self.hang_after}; give a number of seconds (120).")
        if self.evaluate_every < 0:
            raise UserError(f"online.evaluate_every is {self.evaluate_every}; give a number of iterations, or 0.")
        if not 0 <= self.demonstrations < 1:
            raise UserError(f"online.demonstrations is {self.demonstrations}; it is a share below 1 (try 0.1).")
        if not 0 < self.epochs < math.inf:
            raise UserError(f"online.epochs is {self.epochs}; use a positive number.")
        if self.patience is not None and self.patience < 1:
            raise UserError(f"online.patience is {self.patience}; give a number of evaluations, or none.")
        _check_share("online.min_gain", self.min_gain)
        if self.max_drift is not None and not 0 < self.max_drift < math.inf:
            raise UserError(f"online.max_drift is {self.max_drift}; use a positive number, or none for no bound.")
