"""The replay buffer: the newest episodes of a policy, drawn from like a dataset.

Episodes are added and removed whole, so no window can cross a write pointer.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Float, Int, UInt8

from pistar.data.chunk_source import ChunkSource, EpisodeNumbers, ModelInputs
from pistar.data.frame_pool import EpisodeFrames
from pistar.data.rewards import label
from pistar.data.robots import RobotInputs
from pistar.data.success_sources import Outcomes
from pistar.data.transforms import flatten, resize_with_pad
from pistar.data.windows import WindowOptions, at_last_step, build_windows
from pistar.errors import UserError
from pistar.types import Episode, RewardScheme


@dataclasses.dataclass(frozen=True, eq=False)
class StoredEpisode:
    """An episode of the replay buffer: joints mapped to the model's, and rewards by the scheme."""

    number: int
    """How many episodes were added before this one."""
    state: Float[np.ndarray, "o s"]
    actions: Float[np.ndarray, "t a"]
    rewards: Float[np.ndarray, " t"]
    terminated: bool
    success: bool
    prompt: str
    images: Mapping[str, UInt8[np.ndarray, "o size size 3"]]
    """By the model's cameras, without those the robot lacks."""

    @property
    def has_next(self) -> bool:
        """Whether the observation after the last action was kept."""
        return len(self.state) > len(self.actions)


class ReplayBuffer:
    """Holds up to `capacity` steps; the oldest episodes are removed to make room for new ones."""

    def __init__(
        self,
        capacity: int,
        inputs: ModelInputs,
        options: WindowOptions,
        scheme: RewardScheme,
        *,
        fps: float,
        min_steps: int = 1,
    ) -> None:
        """Make an empty buffer. `scheme`: the reward scheme of the dataset that it is mixed with.

        Nothing is drawn below `min_steps`, because half of every batch would come from one short episode.
        """
        if capacity < 1 or not 0 < min_steps <= capacity:
            raise UserError(
                f"The replay buffer holds {capacity} steps and is drawn from when it has {min_steps}; "
                "give a capacity of at least 1, and a minimum from 1 to the capacity."
            )
        self._capacity, self._inputs, self._options, self._scheme = capacity, inputs, options, scheme
        self._fps, self._min_steps = fps, min_steps
        self._stored: collections.deque[StoredEpisode] = collections.deque()
        self._added = 0
        self._source: ChunkSource | None = None

    def __len__(self) -> int:
        return sum(len(episode.actions) for episode in self._stored)

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return len(self._stored)

    def add(self, episode: Episode) -> None:
        """Add a finished episode, and remove the oldest ones until there is room for it."""
        steps = len(episode.actions)
        if episode.terminated == episode.truncated:
            how = "both terminated and truncated" if episode.terminated else "neither terminated nor truncated"
            raise UserError(f"The episode is {how}; give finished episodes, which are exactly one of the two.")
        if not 0 < steps <= self._capacity:
            raise UserError(
                f"The episode has {steps} steps and the replay buffer holds {self._capacity}; "
                "give it a capacity of several of the longest episodes."
            )
        stored = self._prepare(episode)
        while len(self) + steps > self._capacity:
            self._stored.popleft()
        self._stored.append(stored)
        self._added += 1
        self._source = None

    @property
    def bytes(self) -> int:
        """Bytes of memory that the episodes take."""
        arrays = (array for e in self._stored for array in (e.state, e.actions, e.rewards, *e.images.values()))
        return sum(array.nbytes for array in arrays)

    def contents(self) -> tuple[StoredEpisode, ...]:
        """Return the present episodes, the oldest first."""
        return tuple(self._stored)

    def refill(self, episodes: Iterable[StoredEpisode]) -> None:
        """Replace the episodes by these, which `contents` returned earlier."""
        self._stored = collections.deque(episodes)
        self._added = self._stored[-1].number + 1 if self._stored else 0
        self._source = None

    def source(self) -> ChunkSource | None:
        """Return a source of the present windows, without episodes added later; None below `min_steps`."""
        if len(self) < self._min_steps:
            return None
        if self._source is None:
            self._source = self._build()
        return self._source

    def _prepare(self, episode: Episode) -> StoredEpisode:
        size = self._inputs.image_size
        flat = flatten(episode.observations)
        frames = {len(values) for values in flat.values()}
        steps = len(episode.actions)
        if frames not in ({steps}, {steps + 1}):
            raise UserError(
                f"The episode has {steps} actions and {sorted(frames)} observations; "
                "give one before each action, and if you like one after the last."
            )
        inputs = RobotInputs(self._inputs.robot)
        state, actions = inputs.joints({**flat, "actions": episode.actions})
        assert actions is not None
        # Copies: the collector may use its arrays again.
        images = {
            slot: np.array(resize_with_pad(raw, size, size))
            for slot, raw in inputs.images(flat).items()
            if raw is not None
        }
        lengths = np.array([steps])
        outcomes = Outcomes(
            lengths,
            at_last_step(np.array([episode.success]), lengths),
            np.array([episode.terminated and not episode.success]),
        )
        if len(episode.rewards) != steps or not np.isfinite(episode.rewards).all():
            raise UserError(
                f"The episode has {steps} actions and {len(episode.rewards)} rewards, of which "
                f"{int(np.isfinite(episode.rewards).sum())} are finite; give each action a finite reward."
            )
        if self._stored and images.keys() != self._stored[0].images.keys():
            raise UserError(
                f"The episode has the cameras {sorted(images)} and earlier ones {sorted(self._stored[0].images)}; "
                "give all episodes of a replay buffer the same cameras."
            )
        labels = label(outcomes, self._scheme, episode.rewards.astype(np.float32))
        return StoredEpisode(
            self._added,
            state,
            actions,
            labels.rewards,
            bool(labels.terminated[0]),
            episode.success,
            episode.task,
            images,
        )

    def _build(self) -> ChunkSource:
        stored = self._stored
        lengths = np.array([len(e.actions) for e in stored])
        has_next = np.array([e.has_next for e in stored])
        terminated = np.array([e.terminated for e in stored])
        windows = build_windows(
            lengths,
            np.concatenate([e.rewards for e in stored]),
            at_last_step(terminated, lengths),
            has_next,
            self._options,
        )
        prompts, ids = np.unique([e.prompt for e in stored], return_inverse=True)
        observations = lengths + has_next
        numbers = EpisodeNumbers(
            np.concatenate([e.state for e in stored]),
            np.concatenate([e.actions for e in stored]),
            [str(prompt) for prompt in prompts],
            np.repeat(ids, observations),
        )
        cameras = {slot: slot if slot in stored[0].images else None for slot in self._inputs.robot.cameras}
        frames = _StoredFrames(
            np.cumsum(observations) - observations,
            {slot: [e.images[slot] for e in stored] for slot, camera in cameras.items() if camera is not None},
        )
        success = np.array([e.success for e in stored])
        return ChunkSource(self._inputs, windows, numbers, cameras, frames, success=success, fps=self._fps)


class _StoredFrames(EpisodeFrames):
    """The frames of the replay buffer, which are all in memory."""

    def view(self, episodes: Int[np.ndarray, " e"], upcoming: Int[np.ndarray, " f"], claimant: object) -> EpisodeFrames:
        """Return itself: all frames are always ready."""
        del episodes, upcoming, claimant
        return self
