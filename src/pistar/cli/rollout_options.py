"""Options of commands that run episodes in simulators: `pistar eval` and `pistar data collect`."""

import dataclasses
from typing import Any

from pistar.errors import check_seed


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    """How episodes are run."""

    seed: int = 0
    """Seed of all noise. The noise of a step derives from the seed, the start state and the step."""
    limit: int | None = None
    """Maximum number of steps per episode. None uses the benchmark's own limit."""
    shadows: bool = False
    """Render shadows, which takes several times as long. OpenPI's own clients render them for ALOHA."""
    environments: int | None = None
    """Number of environments that run in parallel; each call of the policy takes half of them. None uses 16, and for
    LIBERO at most 2 per worker."""
    workers: int | None = None
    """Number of worker processes for the environments. None uses one per core; 0 runs them in this process."""
    hang_after: float = 120.0
    """Seconds after which a worker that does not answer is replaced and its episodes run again."""

    def __post_init__(self) -> None:
        check_seed(self.seed, "--seed")

    def shared(self) -> dict[str, Any]:
        """Return those that are fields of `EpisodeSettings`."""
        return {name: getattr(self, name) for name in ("seed", "environments", "workers", "hang_after")}
