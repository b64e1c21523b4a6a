"""Settings and methods that a run needs of every algorithm."""

import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

from pistar.models.config import Pi0Config
from pistar.optim import AdamWConfig
from pistar.types import RewardScheme, Tails, Unsuccessful


@runtime_checkable
class OnlineSettings(Protocol):
    """What an algorithm has to know of a run's rollouts."""

    @property
    def execute(self) -> int | None: ...

    @property
    def demonstrations(self) -> float: ...


@runtime_checkable
class RunSettings(Protocol):
    """What an algorithm has to know of the run it is used in."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Pi0Config: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def updates(self) -> int | None:
        """Updates of the whole run; None if that depends on the rollouts."""
        ...

    @property
    def weighted_data(self) -> bool:
        """Whether windows are drawn by weights made beforehand."""
        ...

    @property
    def online(self) -> OnlineSettings | None: ...


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Base class of every algorithm's settings: what a run needs to know of it."""

    name: ClassVar[str]
    needs_rewards: ClassVar[bool] = False
    """Whether it learns from rewards, so that every episode needs an outcome."""
    main_metric: ClassVar[str] = "loss"
    """The metric to compare runs by if nothing is evaluated."""

    def critic_windows(self, action_horizon: int) -> tuple[int, Tails]:
        """How many steps of a window a critic values, and how it treats windows past an episode's end."""
        return action_horizon, "absorb"

    def labelling(self) -> tuple[RewardScheme, Unsuccessful]:
        """Reward scheme, and the outcome assumed for episodes without success."""
        return RewardScheme("success"), "timeout"

    def executed(self, configured: int | None) -> int | None:
        """How many actions of a chunk are executed in rollouts. None uses the environment's default."""
        return configured

    @property
    def rollouts(self) -> int:
        """Rollouts of a start state in an iteration."""
        return 1

    @property
    def discount(self) -> float:
        """Discount of a control step."""
        return 1.0

    @property
    def updates_between_audits(self) -> int:
        """Updates between audits of a critic; 0: there are none."""
        return 0

    @property
    def restarts_optimizer(self) -> bool:
        """Whether each iteration starts with a fresh optimiser and learning-rate schedule."""
        return False

    @property
    def tunes_itself(self) -> bool:
        """Whether learning rate and epochs are adapted after each iteration."""
        return False

    @property
    def labels_prompts(self) -> bool:
        """Whether prompts carry an advantage label."""
        return False

    def return_bounds(self) -> tuple[float, float] | None:
        """Minimum and maximum discounted return. None if the algorithm does not use rewards."""
        return None

    def optimizers(self, policy: AdamWConfig, updates: float) -> dict[str, tuple[AdamWConfig, float]]:
        """Each optimiser by its setting's name, and how many steps it makes in a run of so many updates."""
        return {"policy_optimizer": (policy, updates)}

    def check(self, run: RunSettings) -> None:
        """Refuse a run that the algorithm cannot be used for."""

    def notes(self) -> list[str]:
        """Notes to show when a run with these settings starts."""
        return []

    def describe(self) -> str:
        """The algorithm and its main settings in a few words."""
        return self.name
