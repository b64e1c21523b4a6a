"""All algorithms: from settings to an agent. The only place that knows every one of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.algorithm import Algorithm
from pistar.agents.base import Agent
from pistar.agents.config import AcrlpdConfig, BcConfig, RiptConfig
from pistar.agents.flow_bc import FlowBC
from pistar.agents.ript import Ript
from pistar.models.config import Pi0Config
from pistar.optim import AdamWConfig, CosineSchedule, make_optimizer

_CONSTANT = CosineSchedule(warmup_steps=0, peak_lr=1e-2, decay_steps=1, decay_lr=1e-2)
"""Learning rate of an adaptive temperature."""


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """What every agent is built from besides its own settings."""

    model: Pi0Config
    policy_optimizer: AdamWConfig
    action_dims: int
    """Numbers of an action that are the robot's, not padding."""
    return_bounds: tuple[float, float] | None = None
    """Minimum and maximum discounted return. None if the algorithm does not use rewards."""
    accumulation: int = 1
    """Number of micro-batches."""
    skip_nonfinite: bool = False
    """Skip updates whose gradient is not finite."""


def _flow_bc(config: BcConfig, options: AgentOptions) -> FlowBC:
    return FlowBC(
        options.model,
        make_optimizer(options.policy_optimizer),
        config.ema_decay,
        config.augmentation,
        options.accumulation,
        config.ema_dtype,
        options.skip_nonfinite,
    )


def _acrlpd(config: AcrlpdConfig, options: AgentOptions) -> Acrlpd:
    assert options.return_bounds is not None
    return Acrlpd(
        options.model,
        config,
        options.action_dims,
        options.return_bounds,
        make_optimizer(options.policy_optimizer),
        make_optimizer(config.critic_optimizer),
        make_optimizer(AdamWConfig(_CONSTANT)),
        accumulation=options.accumulation,
        skip_nonfinite=options.skip_nonfinite,
    )


def _ript(config: RiptConfig, options: AgentOptions) -> Ript:
    optimizer = make_optimizer(options.policy_optimizer)
    return Ript(options.model, config, optimizer, options.accumulation, options.skip_nonfinite)


AGENTS: dict[type[Algorithm], Callable[[Any, AgentOptions], Agent[Any, Any]]] = {
    BcConfig: _flow_bc,
    AcrlpdConfig: _acrlpd,
    RiptConfig: _ript,
}


def make_agent(config: Algorithm, options: AgentOptions) -> Agent[Any, Any]:
    """The agent of these settings."""
    return AGENTS[type(config)](config, options)
