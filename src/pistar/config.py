"""Frozen configuration, validated at birth: a bad value dies here, with its reason and remedy."""

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Literal, get_args

from pistar.errors import UserError

Remat = Literal["none", "dots", "full"]
DType = Literal["float32", "bfloat16"]
Aggregation = Literal["mean", "min", "mean_minus_std"]
Head = Literal["bounded", "linear"]
CriticEncoder = Literal["prefix", "own"]
CriticLoss = Literal["huber", "squared"]
Actor = Literal["awr", "best_of_n", "bc", "none"]
AwrBy = Literal["weight", "resample"]
Weighting = Literal["positive", "exp", "signed", "cfg"]
Freezable = Literal["vision", "vlm"]

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""The cameras π₀ was pre-trained with, in the order of its prefix tokens."""


def _check_sizes(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value!r}; a size is a whole number of at least 1.")


def _check_choice(config: object, name: str, choices: object) -> None:
    value, known = getattr(config, name), get_args(choices)
    if value not in known:
        raise UserError(f"{name} is {value!r}; it is one of {', '.join(known)}.")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on one expert's attention and feed-forward weights."""

    rank: int
    alpha: float
    """OpenPI scales the attention adapters by alpha / rank and leaves the feed-forward ones unscaled."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"lora.rank is {self.rank}; an adapter needs at least rank 1 (OpenPI uses 16 and 32).")
        if not 0 < self.alpha < math.inf:
            raise UserError(
                f"lora.alpha is {self.alpha}; it scales the adapter, use a positive number (OpenPI: the rank)."
            )


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """The size of one expert."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lora: LoraConfig | None = None
    """None trains the weights themselves."""

    def __post_init__(self) -> None:
        _check_sizes(self, "width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads is {self.num_heads}, which {self.num_kv_heads} key/value heads cannot share evenly; "
                "use a multiple of num_kv_heads."
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}; rotary embeddings turn pairs, use an even number.")


GEMMA_VARIANTS = {
    "gemma_2b": GemmaConfig(width=2048, depth=18, mlp_dim=16_384, num_heads=8, num_kv_heads=1, head_dim=256),
    "gemma_300m": GemmaConfig(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
}
"""The sizes OpenPI has names for …"""
LORA_VARIANTS = {"gemma_2b": LoraConfig(rank=16, alpha=16.0), "gemma_300m": LoraConfig(rank=32, alpha=32.0)}
"""… and the adapters of their _lora variants."""


def gemma_variant(gemma: GemmaConfig) -> str | None:
    """OpenPI's name of this size, adapters aside."""
    size = dataclasses.replace(gemma, lora=None)
    return next((name for name, variant in GEMMA_VARIANTS.items() if variant == size), None)


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """The size of the vision tower."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: int

    def __post_init__(self) -> None:
        _check_sizes(self, "width", "depth", "mlp_dim", "num_heads", "patch_size")
        if self.width % self.num_heads:
            raise UserError(
                f"vision.width is {self.width}, not divisible by vision.num_heads {self.num_heads}; "
                "each head takes an equal part of the width."
            )


@dataclasses.dataclass(frozen=True)
class Pi0Config:
    """π₀ or π₀.₅. Every size is a number here: a tiny π₀ is an ordinary config."""

    pi05: bool
    """π₀.₅ writes the state into the prompt and steers the action expert by adaRMS; π₀ has a state token."""
    vlm: GemmaConfig
    """PaliGemma's language model."""
    expert: GemmaConfig
    """The action expert. Shares depth and head sizes with the VLM, because the two attend together."""
    vision: SiglipConfig
    action_dim: int = 32
    """Width of the padded state and action vectors."""
    action_horizon: int = 50
    max_token_len: int = 48
    """Prompt tokens, padding included. OpenPI: 48 for π₀, 200 for π₀.₅."""
    vocab_size: int = 257_152
    image_size: int = 224
    cameras: tuple[str, ...] = CAMERAS
    dtype: DType = "bfloat16"
    """What the transformers compute in. Parameters stay float32 unless they are frozen."""
    remat: Remat = "full"
    """What a transformer block recomputes in the backward pass: nothing, all but its matrix products, everything."""
    freeze: tuple[Freezable, ...] = ()
    """Parts that keep their weights, beside those that adapters freeze: the vision tower, the language model."""

    def __post_init__(self) -> None:
        _check_sizes(self, "action_dim", "action_horizon", "max_token_len", "vocab_size", "image_size")
        shared = ("depth", "num_heads", "num_kv_heads", "head_dim")
        for name in shared:
            ours, theirs = getattr(self.vlm, name), getattr(self.expert, name)
            if ours != theirs:
                raise UserError(
                    f"expert.{name} is {theirs} but vlm.{name} is {ours}; "
                    "the two experts attend together layer by layer, so make them equal."
                )
        if self.image_size % self.vision.patch_size:
            raise UserError(
                f"image_size is {self.image_size}, not a multiple of vision.patch_size {self.vision.patch_size}; "
                f"use {self.image_size // self.vision.patch_size * self.vision.patch_size}."
            )
        if self.expert.width % 2:
            raise UserError(f"expert.width is {self.expert.width}; the time embedding needs an even width.")
        if unknown := set(self.freeze) - set(get_args(Freezable)):
            raise UserError(
                f"freeze names {', '.join(unknown)}; what can be frozen is {', '.join(get_args(Freezable))}."
            )
        if not self.cameras:
            raise UserError("cameras is empty; π₀ needs at least one camera name.")

    @property
    def model_type(self) -> Literal["pi0", "pi05"]:
        """The name OpenPI gives this kind of model."""
        return "pi05" if self.pi05 else "pi0"

    @property
    def image_tokens(self) -> int:
        """Prefix tokens per camera."""
        return (self.image_size // self.vision.patch_size) ** 2


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """An ensemble of networks that value action chunks. docs/acrlpd.md says when to use which."""

    ensemble: int = 10
    """K: how many networks, independent but for the data."""
    hidden: tuple[int, ...] = (512, 512, 512)
    """Widths of the hidden layers."""
    dropout: float = 0.0
    """Part of each hidden layer switched off while learning. 0.1 where data is scarce; 0 otherwise."""
    layer_norm: bool = True
    """Between a layer's weights and its ReLU. Without it values of unseen actions run away."""
    head: Head = "bounded"
    """`bounded`: a sigmoid over the reachable returns, learning by cross-entropy. `linear`: a plain number."""
    output_bias: float = 0.0
    """Of the last layer at birth, before the sigmoid: at −3, returns in [0, 1] start near 0: nothing succeeds yet."""
    aggregation: Aggregation = "mean"
    """One value from K: `mean` (QC), `min`, or `mean_minus_std`, which subtracts `std_factor` deviations."""
    std_factor: float = 1.0
    """How many standard deviations `mean_minus_std` subtracts."""
    target_subset: int | None = None
    """Targets aggregate this many networks, drawn anew each update (RLPD: `min` of 2). None: all of them."""
    encoder: CriticEncoder = "prefix"
    """How pictures are seen: `prefix`, π₀'s pooled features, prompt included; `own`, a small network, no prompt."""
    own_image_size: int = 64
    """Side of the pictures the `own` encoder reads."""
    own_width: int = 256
    """Width of the features the `own` encoder makes of them."""

    def __post_init__(self) -> None:
        _check_sizes(self, "ensemble", "own_image_size", "own_width")
        if any(width < 1 for width in self.hidden):
            raise UserError(f"critic.hidden is {self.hidden}; each width is a whole number of at least 1 (512).")
        _check_choice(self, "head", Head)
        _check_choice(self, "aggregation", Aggregation)
        _check_choice(self, "encoder", CriticEncoder)
        if not 0 <= self.dropout < 1:
            raise UserError(f"critic.dropout is {self.dropout}; it is the part switched off, from 0 to below 1 (0.1).")
        if not math.isfinite(self.output_bias):
            raise UserError(f"critic.output_bias is {self.output_bias}; use a finite number (0).")
        if not 0 <= self.std_factor < math.inf:
            raise UserError(f"critic.std_factor is {self.std_factor}; doubt lowers a value, use 0 or more (1).")
        if self.target_subset is not None and not 1 <= self.target_subset <= self.ensemble:
            raise UserError(
                f"critic.target_subset is {self.target_subset} of {self.ensemble} networks; "
                f"draw 1 to {self.ensemble}, or None for all."
            )
        if self.encoder == "own" and self.own_image_size % 16:
            raise UserError(
                f"critic.own_image_size is {self.own_image_size}; four layers halve the picture, use a multiple of 16."
            )


@dataclasses.dataclass(frozen=True)
class AcrlpdConfig:
    """Q-chunking on π₀: a critic of chunks, and a policy that moves to what the critic prefers."""

    horizon: int
    """h: how many actions of a chunk are executed before the policy looks again. The critic values exactly these."""
    action_dims: int
    """How many numbers of an action are the robot's; the rest of π₀'s 32 is padding, which no critic may see."""
    gamma: float = 0.99
    """Discount of a control step, not of a chunk. 1 − 1/T suits episodes of T steps."""
    tau: float = 0.005
    """How far the target critic follows the critic in an update."""
    candidates: int = 4
    """N: policy samples among which the critic chooses, for targets, for acting, and as the advantage's baseline. More
    find more of the critic's errors."""
    flow_steps: int = 10
    """Euler steps of a sample."""
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    critic_loss: CriticLoss = "huber"
    """Of a `linear` head; a `bounded` one has its cross-entropy."""
    step_reward: tuple[float, float] = (0.0, 0.0)
    """The least and the most that a step pays which does not end the task."""
    last_reward: tuple[float, float] = (0.0, 1.0)
    """The least and the most that the step pays which ends it: (−penalty, 1), or (−penalty, 0) at −1 a step."""
    return_range: tuple[float, float] | None = None
    """Where targets are clipped to. None: what rewards and γ can reach."""
    actor: Actor = "awr"
    """`awr`: imitate each chunk by its advantage. `best_of_n`: imitate the best of own samples and data. `bc`: imitate
    everything alike and leave the improvement to acting (QC). `none`: the policy stays as it is, the critic learns to
    judge it: to act by, or to weigh a dataset by (`pistar data weigh`)."""
    beta: float = 0.5
    """Temperature of AWR in standard deviations of the advantage; where it starts, if it adapts."""
    target_ess: float | None = None
    """Adapt the temperature until the weights leave this part of the batch effective. None: β stays."""
    weight_clip: float = 20.0
    """The largest weight AWR gives, before weights are divided by their mean."""
    awr_by: AwrBy = "weight"
    """`weight` multiplies losses; `resample` draws chunks in proportion, each with noise and time of its own."""
    actor_scale: float = 1.0
    """λ_actor: weight of the actor's loss."""
    bc_scale: float = 0.05
    """λ_bc: weight of plain imitation beside it. With the actor `bc`, the weight of the whole loss."""
    ema_decay: float | None = 0.99
    """Of the policy that acts, proposes next actions and is saved. None: the trained one does."""
    ema_dtype: DType = "float32"
    """bfloat16 halves the average; it is rounded up or down at random, so that it does not stand still."""
    augmentation: bool = True
    """Of the pictures the policy learns from and the critic judges in; never of the next ones."""
    critic_updates: int = 1
    """Update-to-data ratio: the batch is dealt out to this many critic updates, one after the other."""
    actor_delay: int = 1
    """The policy learns in every so-many-th update."""
    critic_warmup: int = 0
    """So many updates at first teach the critic alone."""

    def __post_init__(self) -> None:
        _check_sizes(self, "horizon", "action_dims", "candidates", "flow_steps", "critic_updates", "actor_delay")
        _check_choice(self, "critic_loss", CriticLoss)
        _check_choice(self, "actor", Actor)
        _check_choice(self, "awr_by", AwrBy)
        _check_choice(self, "ema_dtype", DType)
        if not 0 < self.gamma <= 1:
            raise UserError(f"gamma is {self.gamma}; a discount is above 0 and at most 1 (1 − 1/T for T steps).")
        if not 0 < self.tau <= 1:
            raise UserError(f"tau is {self.tau}; the target moves by a part of the way, above 0 and at most 1 (0.005).")
        for name in ("step_reward", "last_reward", "return_range"):
            bounds = getattr(self, name)
            if bounds is not None and not -math.inf < bounds[0] <= bounds[1] < math.inf:
                raise UserError(f"{name} is {bounds}; give the least and the most, both finite, in this order.")
        if self.return_range is not None and self.return_range[0] == self.return_range[1]:
            raise UserError(f"return_range is {self.return_range}; a critic needs room between the two.")
        if self.return_range is None and self.gamma == 1 and self.step_reward != (0.0, 0.0):
            raise UserError(
                f"gamma is 1 and step_reward {self.step_reward}, so returns have no bound; "
                "set return_range, or gamma below 1."
            )
        if self.return_range is None and self.step_reward == self.last_reward == (0.0, 0.0):
            raise UserError("step_reward and last_reward are (0, 0): nothing is ever paid; say what a success pays.")
        if not 0 < self.beta < math.inf:
            raise UserError(f"beta is {self.beta}; a temperature is positive and finite (try 0.5).")
        if not 1 <= self.weight_clip < math.inf:
            raise UserError(f"weight_clip is {self.weight_clip}; an average chunk weighs 1, clip above that (20).")
        if self.target_ess is not None and not 0 < self.target_ess < 1:
            raise UserError(f"target_ess is {self.target_ess}; it is a part of the batch, between 0 and 1 (try 0.3).")
        if self.target_ess is not None and self.actor != "awr":
            raise UserError(f"target_ess is {self.target_ess} but the actor {self.actor!r} has no weights; use awr.")
        for name in ("actor_scale", "bc_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it weighs a loss, use 0 or more.")
        if self.bc_scale == 0 and (self.actor == "bc" or (self.actor != "none" and self.actor_scale == 0)):
            raise UserError("bc_scale is 0 and nothing else trains the policy; set it above 0 (1 for the actor bc).")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UserError(f"ema_decay is {self.ema_decay}; use 0 to below 1 (0.99), or None for no average.")
        if self.critic_warmup < 0:
            raise UserError(f"critic_warmup is {self.critic_warmup}; it counts updates, use 0 for none.")


def check_seed(seed: int, name: str = "seed") -> None:
    """Refuse what is no seed everywhere: JAX, NumPy and simulators take 32 bits."""
    if not 0 <= seed < 2**32:
        raise UserError(f"{name} is {seed}; give a whole number from 0 up, below 2³².")


def check_writable(name: str, path: Path) -> None:
    """Refuse a place nothing can be written to, before the work of hours that would be lost. Leaves nothing there."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there.parent if there == path and there.is_file() else there):
            pass
    except OSError as error:
        raise UserError(f"{name} is {path}, which cannot be written ({error.strerror}); name another place.") from error


@dataclasses.dataclass(frozen=True)
class RiptConfig:
    """Online post-training from 0/1 success: K rollouts of a start state, each judged by the others. docs/ript.md."""

    weighting: Weighting = "positive"
    """What an advantage A makes of a chunk's weight. `positive`: max(A, 0). `exp`: exp(A / β), clipped. `signed`: A
    itself, which has no bound below and needs the anchor. `cfg`: 1 for all; A's sign is told in the prompt."""
    standardise: bool = False
    """Divide advantages by their deviation within the group (GRPO)."""
    advantage_clip: float | None = None
    """Advantages are cut to ± this."""
    beta: float = 0.5
    """Temperature of `exp`."""
    weight_clip: float = 20.0
    """The largest weight of `exp`."""
    label_dropout: float = 0.1
    """Share of `cfg`'s chunks that are told nothing, so that the policy without a label is learnt too."""
    guidance: float = 1.5
    """How `cfg` acts: v = v_none + this · (v_positive − v_none). 1 is what OpenPI serves for a prompt that ends in
    "Advantage: positive"."""
    anchor: float = 0.1
    """λ: weight of the squared distance between the policy's velocity and that of the policy the run began with."""
    ema_decay: float | None = 0.99
    """Of the policy that acts in evaluations and is saved. None: the trained one does."""
    ema_dtype: DType = "float32"
    augmentation: bool = True

    def __post_init__(self) -> None:
        _check_choice(self, "weighting", Weighting)
        _check_choice(self, "ema_dtype", DType)
        if self.advantage_clip is not None and not 0 < self.advantage_clip < math.inf:
            raise UserError(f"advantage_clip is {self.advantage_clip}; use a positive number, or None for no limit.")
        if not 0 < self.beta < math.inf:
            raise UserError(f"beta is {self.beta}; a temperature is positive and finite (try 0.5).")
        if not 1 <= self.weight_clip < math.inf:
            raise UserError(f"weight_clip is {self.weight_clip}; an advantage of 0 weighs 1, clip above that (20).")
        if not 0 <= self.label_dropout < 1:
            raise UserError(f"label_dropout is {self.label_dropout}; it is a share, from 0 to below 1 (0.1).")
        if not 0 <= self.guidance < math.inf:
            raise UserError(f"guidance is {self.guidance}; use 0 (no label) or more, 1 for the label alone (1.5).")
        if not 0 <= self.anchor < math.inf:
            raise UserError(f"anchor is {self.anchor}; it weighs a distance, use 0 or more (0.1).")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UserError(f"ema_decay is {self.ema_decay}; use 0 to below 1 (0.99), or None for no average.")
