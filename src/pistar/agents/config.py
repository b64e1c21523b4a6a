"""Settings of each algorithm: frozen, checked when they are made."""

import dataclasses
import math
from typing import ClassVar, Literal

from pistar.agents.algorithm import Algorithm, RunSettings
from pistar.agents.estimators import reachable_returns
from pistar.errors import UserError, check_choice, check_sizes
from pistar.models.config import CriticConfig, DType
from pistar.optim import AdamWConfig
from pistar.types import RewardScheme, Tails, Unsuccessful

ActorKind = Literal["awr", "best_of_n", "bc", "none"]
AwrBy = Literal["weight", "resample"]
Weighting = Literal["positive", "exp", "signed", "cfg"]
SuccessReplay = Literal["none", "best"]
ChunkStarts = Literal["looked", "every_step"]


def _check_ema(config: "BcConfig | AcrlpdConfig | RiptConfig") -> None:
    check_choice(config, "ema_dtype", DType)
    if config.ema_decay is not None and not 0 <= config.ema_decay < 1:
        raise UserError(f"ema_decay is {config.ema_decay}; use 0 to below 1 (0.99), or none for no average.")


def _check_temperature(config: "AcrlpdConfig | RiptConfig") -> None:
    if not 0 < config.beta < math.inf:
        raise UserError(f"beta is {config.beta}; a temperature is positive and finite (try 0.5).")
    if not 1 <= config.weight_clip < math.inf:
        raise UserError(f"weight_clip is {config.weight_clip}; an average chunk weighs 1, clip above that (20).")


# --- Behaviour cloning ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BcConfig(Algorithm):
    """Behaviour cloning: flow matching on all chunks with weight 1, as OpenPI does. The baseline."""

    name: ClassVar[str] = "bc"

    ema_decay: float | None = 0.99
    """Decay of the averaged weights, which act and are saved. None keeps no average."""
    ema_dtype: DType = "float32"
    """Number format of the averaged weights. bfloat16 halves their memory and rounds stochastically."""
    augmentation: bool = True
    """Augment images at random: crop, rotate, recolour."""

    def __post_init__(self) -> None:
        _check_ema(self)

    def check(self, run: RunSettings) -> None:
        """Refuse rollouts: behaviour cloning learns from data alone."""
        if run.online is not None:
            raise UserError(
                f"{run.name} has online settings, but behaviour cloning makes no rollouts; leave them out, or choose "
                " a ript_… or acrlpd_online_… preset."
            )


# --- ACRLPD -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AcrlpdConfig(Algorithm):
    """ACRLPD: Q-chunking on π₀. A critic of chunks, and a policy that moves towards what the critic prefers."""

    name: ClassVar[str] = "acrlpd"
    needs_rewards: ClassVar[bool] = True
    main_metric: ClassVar[str] = "critic/loss"

    horizon: int
    """Actions of a chunk that are executed before the policy is queried again. The critic values exactly these."""
    rewards: RewardScheme = dataclasses.field(default_factory=RewardScheme)
    without_success: Unsuccessful = "timeout"
    """Outcome of an episode without success, if the data does not record it. timeout bootstraps from the observation
    after the last step, if it was recorded; failure ends with value 0."""
    tails: Tails = "absorb"
    """How windows that pass an episode's end train the critic. absorb: use the steps up to the end. drop: ignore the
    window (QC)."""
    gamma: float = 0.99
    """Discount per control step, not per chunk. Use about 1 − 1/T for episodes of T steps."""
    tau: float = 0.005
    """Step size of the target critic: target ← (1 − tau)·target + tau·critic."""
    candidates: int = 4
    """Number of policy samples per observation: the critic chooses among them for targets and for acting, and their
    values are the advantage's baseline. More samples exploit more of the critic's errors; 4 to 8 work well."""
    flow_steps: int = 10
    """Number of Euler steps per policy sample."""
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    critic_optimizer: AdamWConfig = dataclasses.field(default_factory=AdamWConfig)
    critic_updates: int = 1
    """Critic updates per batch; the batch is split evenly among them."""
    critic_warmup: int = 0
    """Number of updates at the start of the run that train only the critic."""
    return_range: tuple[float, float] | None = None
    """Minimum and maximum discounted return. Targets are clipped to this range. None computes it from rewards and
    gamma, which is not possible for recorded rewards."""
    actor: ActorKind = "awr"
    """How the policy uses the critic. awr: imitate each chunk with a weight that grows with its advantage. best_of_n:
    imitate the best of the policy's own samples and the data. bc: imitate every chunk with weight 1 and improve only by
    best-of-N when acting (QC). none: train only the critic, for best-of-N or `pistar data weigh`."""
    actor_delay: int = 1
    """Update the policy once every N updates."""
    beta: float = 0.5
    """Temperature of AWR, in standard deviations of the advantage. If algorithm.target_ess is set, this is the
    initial value."""
    target_ess: float | None = None
    """Target effective sample size as a fraction of the batch; beta is adapted to reach it. None keeps beta fixed."""
    weight_clip: float = 20.0
    """Largest AWR weight, before weights are divided by their mean."""
    awr_by: AwrBy = "weight"
    """How AWR's weights are applied. weight multiplies each chunk's loss by its weight; resample draws chunks in
    proportion to their weights, each with its own noise and time."""
    bc_scale: float = 0.05
    """Weight of the plain imitation loss, which is added to the actor's loss. With actor bc it is the only loss."""
    ema_decay: float | None = 0.99
    """Decay of the averaged policy, which acts, proposes next actions and is saved. None keeps no average."""
    ema_dtype: DType = "float32"
    """Number format of the averaged weights. bfloat16 halves their memory and rounds stochastically."""
    augmentation: bool = True
    """Augment the images of s at random (crop, rotate, recolour). Images of s' are not augmented."""
    audit_every: int = 1_000
    """Number of updates between audits of the critic on held-out episodes. 0 switches audits off."""
    audit_frames: int = 256
    """Number of frames on which an audit evaluates the critic."""

    def __post_init__(self) -> None:
        counts = ("candidates", "flow_steps", "critic_updates", "actor_delay", "audit_frames")
        check_sizes(self, "horizon", *counts)
        check_choice(self, "actor", ActorKind)
        check_choice(self, "awr_by", AwrBy)
        check_choice(self, "tails", Tails)
        check_choice(self, "without_success", Unsuccessful)
        _check_ema(self)
        _check_temperature(self)
        if not 0 < self.gamma <= 1:
            raise UserError(f"gamma is {self.gamma}; a discount is above 0 and at most 1 (1 − 1/T for T steps).")
        if not 0 < self.tau <= 1:
            raise UserError(f"tau is {self.tau}; the target moves by a fraction, above 0 and at most 1 (0.005).")
        bounds = self.return_range
        if bounds is not None and not -math.inf < bounds[0] < bounds[1] < math.inf:
            raise UserError(f"return_range is {bounds}; give the minimum and maximum discounted return, both finite.")
        if self.target_ess is not None and not 0 < self.target_ess < 1:
            raise UserError(f"target_ess is {self.target_ess}; it is a fraction, between 0 and 1 (try 0.3).")
        if self.target_ess is not None and self.actor != "awr":
            raise UserError(f"target_ess is {self.target_ess} but the actor {self.actor!r} has no weights; use awr.")
        if not 0 <= self.bc_scale < math.inf:
            raise UserError(f"bc_scale is {self.bc_scale}; it weighs a loss, use 0 or more.")
        if self.bc_scale == 0 and self.actor == "bc":
            raise UserError("bc_scale is 0 and nothing else trains the policy; set it above 0 (1 for the actor bc).")
        for name in ("critic_warmup", "audit_every"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; it counts updates, use 0 for none.")

    def critic_windows(self, action_horizon: int) -> tuple[int, Tails]:
        """Return the executed length of a chunk, and how windows that pass an episode's end are used."""
        del action_horizon
        return self.horizon, self.tails

    def labelling(self) -> tuple[RewardScheme, Unsuccessful]:
        """Return the reward scheme and the outcome of episodes without success."""
        return self.rewards, self.without_success

    @property
    def discount(self) -> float:
        """Discount of a control step."""
        return self.gamma

    @property
    def updates_between_audits(self) -> int:
        """Updates between audits of the critic."""
        return self.audit_every

    def executed(self, configured: int | None) -> int | None:
        """Return the horizon: exactly the actions that the critic values are executed."""
        if configured not in (None, self.horizon):
            raise UserError(
                f"online.execute is {configured} and algorithm.horizon {self.horizon}; the critic values exactly what "
                "is executed: leave online.execute out."
            )
        return self.horizon

    def return_bounds(self) -> tuple[float, float] | None:
        """Return the configured range of returns, or compute it from rewards and gamma."""
        if self.return_range is not None:
            return self.return_range
        paid = self.rewards.paid
        if paid is None:
            raise UserError(
                "algorithm.rewards.kind is recorded and algorithm.return_range is none; give the minimum "
                "and maximum discounted return, so that values are bounded."
            )
        if self.gamma == 1 and paid[0] != (0.0, 0.0):
            raise UserError("gamma is 1 and every step has a reward, so returns are unbounded; set gamma below 1.")
        return reachable_returns(*paid, self.gamma)

    def optimizers(self, policy: AdamWConfig, updates: float) -> dict[str, tuple[AdamWConfig, float]]:
        """Return the critic's optimiser, and the policy's if it is trained."""
        found = {"algorithm.critic_optimizer": (self.critic_optimizer, updates * self.critic_updates)}
        if self.actor != "none":
            found["policy_optimizer"] = (policy, (updates - self.critic_warmup) / self.actor_delay)
        return found

    def check(self, run: RunSettings) -> None:
        """Refuse horizons, batches and rewards that do not fit."""
        if self.horizon > run.model.action_horizon:
            raise UserError(
                f"algorithm.horizon is {self.horizon} and model.action_horizon {run.model.action_horizon}; a chunk "
                "has no more actions to execute: lower algorithm.horizon or raise model.action_horizon."
            )
        if run.weighted_data:
            raise UserError(
                "data.window_weights is for imitation: a critic that sees good windows more often than they occur "
                "would value everything too high; train a bc_… preset with it."
            )
        if self.actor != "none" and run.updates is not None and run.updates <= self.critic_warmup:
            raise UserError(
                f"The run makes {run.updates} updates and algorithm.critic_warmup is {self.critic_warmup}: the policy "
                "would never be trained; raise steps or lower the warm-up."
            )
        if run.batch_size % self.critic_updates:
            raise UserError(
                f"batch_size {run.batch_size} is not divisible by critic_updates {self.critic_updates}; use a multiple."
            )
        if run.online is not None:
            self.executed(run.online.execute)
            if self.rewards.kind == "recorded":
                raise UserError(
                    "algorithm.rewards.kind is recorded and rollouts record no rewards, only how an episode ended; use "
                    "success or time."
                )

    def describe(self) -> str:
        """For example: ACRLPD, actor awr, best of 4, γ 0.99."""
        return f"ACRLPD, actor {self.actor}, best of {self.candidates}, γ {self.gamma:g}"


# --- RIPT -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RiptConfig(Algorithm):
    """RIPT: online post-training from 0/1 success. K rollouts of a start state are compared with each other."""

    name: ClassVar[str] = "ript"

    group_size: int = 8
    """Number of rollouts per start state in an iteration. Their successes are compared with each other."""
    attempts: int = 1
    """Limit on start states per iteration, as a multiple of online.start_states_per_iteration, when start states whose
    rollouts all succeeded or all failed are replaced by others. 1 replaces none."""
    weighting: Weighting = "positive"
    """Weight of a chunk whose rollout has advantage A. positive: max(A, 0). exp: exp(A / beta), clipped. signed: A,
    which has no lower bound and needs the anchor. cfg: 1, and the prompt says whether A was positive."""
    standardise: bool = False
    """Divide advantages by their standard deviation within the group (GRPO)."""
    advantage_clip: float | None = None
    """Clip advantages to plus or minus this. None does not clip."""
    beta: float = 0.5
    """Temperature of the weighting exp; other weightings ignore it."""
    weight_clip: float = 20.0
    """Largest weight with the weighting exp; other weightings ignore it."""
    label_dropout: float = 0.1
    """Fraction of chunks that get no label with the weighting cfg, so that the unlabelled policy is trained too."""
    guidance: float = 1.5
    """Guidance scale of rollouts with the weighting cfg: v = v_plain + guidance · (v_positive − v_plain). 1 is what
    OpenPI serves for a prompt that ends in "Advantage: positive"."""
    anchor: float = 0.1
    """Weight of the squared distance between the velocities of the policy and of the policy the run started with. Raise
    it if the policy drifts."""
    replay: SuccessReplay = "none"
    """Rollouts to learn from. none: those of the iteration, weighted by their advantages. best: the shortest successes
    of every start state so far, with more weight for rarely solved start states."""
    replay_keeps: int = 2
    """Number of successes kept per start state with replay best."""
    windows: ChunkStarts = "looked"
    """Steps at which training chunks begin. looked: those at which the policy was queried. every_step: every executed
    step, which gives several times as many chunks, but the cameras must be rendered at every step."""
    restart: bool = False
    """Start each iteration from the averaged weights with a new optimiser. Its schedule then covers one iteration."""
    auto_tune: bool = False
    """Adapt the learning rate to the drift, and the updates per iteration to the number of informative groups."""
    ema_decay: float | None = 0.99
    """Decay of the averaged weights, which act and are saved. None keeps no average."""
    ema_dtype: DType = "float32"
    """Number format of the averaged weights. bfloat16 halves their memory and rounds stochastically."""
    augmentation: bool = True
    """Augment images at random: crop, rotate, recolour."""

    def __post_init__(self) -> None:
        check_sizes(self, "attempts", "replay_keeps")
        check_choice(self, "weighting", Weighting)
        check_choice(self, "replay", SuccessReplay)
        check_choice(self, "windows", ChunkStarts)
        _check_ema(self)
        _check_temperature(self)
        if self.group_size < 2:
            raise UserError(
                f"group_size is {self.group_size}; leave-one-out needs at least 2 rollouts per start state (try 8)."
            )
        if self.advantage_clip is not None and not 0 < self.advantage_clip < math.inf:
            raise UserError(f"advantage_clip is {self.advantage_clip}; use a positive number, or none for no limit.")
        if not 0 <= self.label_dropout < 1:
            raise UserError(f"label_dropout is {self.label_dropout}; it is a fraction, from 0 to below 1 (0.1).")
        if not 0 <= self.guidance < math.inf:
            raise UserError(f"guidance is {self.guidance}; use 0 (no label) or more, 1 for the label alone (1.5).")
        if not 0 <= self.anchor < math.inf:
            raise UserError(f"anchor is {self.anchor}; it weighs a distance, use 0 or more (0.1).")
        if self.replay == "best" and self.weighting != "positive":
            raise UserError(
                "algorithm.replay best works only with weighting positive "
                f"(weighting is {self.weighting}); change one of them."
            )

    @property
    def rollouts(self) -> int:
        """Return the number of rollouts per start state: one group."""
        return self.group_size

    @property
    def restarts_optimizer(self) -> bool:
        """Whether each iteration starts with a fresh optimiser and learning-rate schedule."""
        return self.restart

    @property
    def tunes_itself(self) -> bool:
        """Whether learning rate and epochs are adapted after each iteration."""
        return self.auto_tune

    @property
    def labels_prompts(self) -> bool:
        """Whether prompts carry an advantage label: with the weighting cfg."""
        return self.weighting == "cfg"

    def check(self, run: RunSettings) -> None:
        """Refuse a run without rollouts, or whose batches would hold none of them."""
        if run.online is None:
            raise UserError(f"{run.name} needs a simulator: set online.environment.")
        if run.batch_size <= round(run.online.demonstrations * run.batch_size):
            raise UserError(
                f"batch_size is {run.batch_size}, all of which would be demonstrations; lower online.demonstrations."
            )

    def notes(self) -> list[str]:
        """Warn if signed weights are used without the anchor."""
        if self.weighting == "signed" and not self.anchor:
            return ["signed weights without an anchor have an unbounded loss and diverge; set algorithm.anchor"]
        return []

    def describe(self) -> str:
        """For example: RIPT, weighting positive, replay none."""
        return f"RIPT, weighting {self.weighting}, replay {self.replay}"
