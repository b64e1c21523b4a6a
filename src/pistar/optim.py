"""Learning-rate schedules and AdamW, as OpenPI trains π₀."""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax
import tyro

from pistar.errors import UserError


def _check_warmup(warmup_steps: int, peak_lr: float) -> None:
    if warmup_steps < 0:
        raise UserError(f"warmup_steps is {warmup_steps}; a warm-up cannot be negative, use 0 for none.")
    if not 0 < peak_lr < math.inf:
        raise UserError(f"peak_lr is {peak_lr}; a learning rate is a positive number (OpenPI uses 2.5e-5).")


def _check_decay(warmup_steps: int, peak_lr: float, decay_steps: int, decay_lr: float) -> None:
    if decay_steps <= warmup_steps:
        raise UserError(
            f"decay_steps is {decay_steps} but warmup_steps is {warmup_steps}; "
            "decay_steps counts the warm-up too, make it larger."
        )
    if not 0 <= decay_lr <= peak_lr:
        raise UserError(f"decay_lr is {decay_lr}; the rate falls to it from peak_lr {peak_lr}, use 0 to {peak_lr}.")


@dataclasses.dataclass(frozen=True)
class ConstantSchedule:
    """Linear warm-up to the peak, then constant."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from peak_lr / (warmup_steps + 1) to peak_lr."""
    peak_lr: float = 1e-5
    """Largest learning rate, reached at the end of the warm-up."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps, self.peak_lr)


@dataclasses.dataclass(frozen=True)
class LinearSchedule:
    """Linear warm-up to the peak, linear decay, then constant."""

    warmup_steps: int = 1_000
    """Steps over which the learning rate rises linearly from peak_lr / (warmup_steps + 1) to peak_lr."""
    peak_lr: float = 2.5e-5
    """Largest learning rate, reached at the end of the warm-up."""
    decay_steps: int = 30_000
    """Step at which the learning rate reaches decay_lr. It counts the warm-up too."""
    decay_lr: float = 0.0
    """Learning rate from decay_steps on."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps, self.peak_lr)
        _check_decay(self.warmup_steps, self.peak_lr, self.decay_steps, self.decay_lr)


@dataclasses.dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up to the peak, decay along half a cosine, then constant."""

    warmup_steps: int = 1_000
    """Steps over which the learning rate rises linearly from peak_lr / (warmup_steps + 1) to peak_lr."""
    peak_lr: float = 2.5e-5
    """Largest learning rate, reached at the end of the warm-up."""
    decay_steps: int = 30_000
    """Step at which the learning rate reaches decay_lr. It counts the warm-up too."""
    decay_lr: float = 2.5e-6
    """Learning rate from decay_steps on. Equal to peak_lr, it makes the rate constant after the warm-up."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps, self.peak_lr)
        _check_decay(self.warmup_steps, self.peak_lr, self.decay_steps, self.decay_lr)


@dataclasses.dataclass(frozen=True)
class RsqrtSchedule:
    """Linear warm-up to the peak, then decay with the inverse square root of the steps, for runs without an end."""

    warmup_steps: int = 1_000
    """Steps over which the learning rate rises linearly from peak_lr / (warmup_steps + 1) to peak_lr."""
    peak_lr: float = 5e-5
    """Largest learning rate, reached at the end of the warm-up."""
    timescale: float = 10_000.0
    """Time scale of the decay in steps. The rate is half the peak after three times this many steps."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps, self.peak_lr)
        if not 0 < self.timescale < math.inf:
            raise UserError(f"timescale is {self.timescale}; it is a number of steps, use a positive one (10000).")


Schedule = CosineSchedule | LinearSchedule | ConstantSchedule | RsqrtSchedule
Moments = Literal["float32", "bfloat16", "factored"]


@dataclasses.dataclass(frozen=True)
class AdamWConfig:
    """AdamW after clipping the gradient's global norm."""

    schedule: Schedule = dataclasses.field(default_factory=CosineSchedule)
    """Learning-rate schedule."""
    b1: tyro.conf.Suppress[float] = 0.9
    """Decay rate of the first moment. Not used with moments factored."""
    b2: tyro.conf.Suppress[float] = 0.95
    """Decay rate of the second moment. Not used with moments factored."""
    eps: tyro.conf.Suppress[float] = 1e-8
    """Added to the root of the second moment, so that the division by it stays finite. Not used with moments
    factored."""
    weight_decay: float = 1e-10
    """Decoupled weight decay of AdamW, multiplied by the learning rate."""
    clip_norm: float = 1.0
    """Largest global norm of a gradient; larger ones are scaled down to it. inf (in YAML .inf) never clips."""
    moments: Moments = "float32"
    """How the moments are stored. bfloat16 halves the memory of the first. factored is Adafactor: sums over rows and
    columns replace the second and there is no first, which takes almost no memory."""

    def __post_init__(self) -> None:
        if self.moments not in get_args(Moments):
            raise UserError(f"moments is {self.moments!r}; it is one of {', '.join(get_args(Moments))}.")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; a moving average needs 0 ≤ {name} < 1 (try 0.9).")
        if not 0 < self.eps < math.inf:
            raise UserError(f"eps is {self.eps}; it keeps a division finite and must be positive (try 1e-8).")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"weight_decay is {self.weight_decay}; weights would grow, use 0 or more.")
        if not self.clip_norm > 0:
            raise UserError(
                f"clip_norm is {self.clip_norm}; no gradient would be left, use 1.0, or infinity for no clip."
            )


def make_schedule(config: Schedule) -> optax.Schedule:
    """lr(k) = peak·(1/(w+1) + (1 − 1/(w+1))·k/w) for k < w = warmup_steps, then with j = k − w:

    cosine    end + (peak − end)·(1 + cos(π·min(1, j/(decay_steps − w))))/2
    linear    peak + (end − peak)·min(1, j/(decay_steps − w))
    constant  peak
    rsqrt     peak / √(1 + j/timescale)
    """
    first = config.peak_lr / (config.warmup_steps + 1)
    if isinstance(config, CosineSchedule):
        return optax.warmup_cosine_decay_schedule(
            first, config.peak_lr, config.warmup_steps, config.decay_steps, config.decay_lr
        )
    warmup = optax.linear_schedule(first, config.peak_lr, config.warmup_steps)

    after: optax.Schedule
    if isinstance(config, LinearSchedule):
        steps = config.decay_steps - config.warmup_steps
        after = optax.linear_schedule(config.peak_lr, config.decay_lr, steps)
    elif isinstance(config, ConstantSchedule):
        after = optax.constant_schedule(config.peak_lr)
    else:
        peak, timescale = config.peak_lr, config.timescale

        def after(step: jax.typing.ArrayLike) -> jax.Array:
            return peak / jnp.sqrt(1 + jnp.asarray(step) / timescale)

    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(config: AdamWConfig) -> optax.GradientTransformation:
    """Make the chain of clipping and AdamW, whose state has the structure of OpenPI's on disk, or Adafactor."""
    rate = make_schedule(config.schedule)
    if config.moments == "factored":
        # optax.adafactor would also multiply the rate by the scale of the weights. Here it means the same as in AdamW.
        descent = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(rate),
        )
    else:
        descent = optax.adamw(
            rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mu_dtype=jnp.bfloat16 if config.moments == "bfloat16" else None,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), descent)
