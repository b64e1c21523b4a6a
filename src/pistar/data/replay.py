"""Episodes a policy has just lived through, the newest of them, to be drawn from like a dataset.

Only whole episodes come in and only whole episodes go out: there is no write pointer for a window to span.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Float, Int, UInt8

from pistar.data.chunks import WindowOptions, at_last_step, build_windows
from pistar.data.frame_pool import EpisodeViews
from pistar.data.rewards import Outcomes, RewardScheme, label
from pistar.data.robots import RobotInputs
from pistar.data.source import ChunkSource, EpisodeNumbers, ModelInputs
from pistar.data.transforms import flatten, resize_with_pad
from pistar.errors import UserError
from pistar.types import Episode


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """An episode as the model will want it."""

    number: int
    """Of all that were ever added."""
    state: Float[np.ndarray, "o s"]
    actions: Float[np.ndarray, "t a"]
    rewards: Float[np.ndarray, " t"]
    terminated: bool
    success: bool
    prompt: str
    pictures: Mapping[str, UInt8[np.ndarray, "o size size 3"]]
    """By the model's cameras; without those the robot lacks."""

    @property
    def has_next(self) -> bool:
        return len(self.state) > len(self.actions)


class Replay:
    """Holds up to `capacity` steps; the oldest episodes make room for new ones."""

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
        """`scheme` pays these episodes as the dataset they are mixed with. Below `min_steps` nothing is drawn: half of
        every batch from one short episode would teach that episode alone.
        """
        if capacity < 1 or not 0 < min_steps <= capacity:
            raise UserError(
                f"The replay buffer holds {capacity} steps and is drawn from when it has {min_steps}; "
                "give a capacity of at least 1, and no more than that as the minimum."
            )
        self._capacity, self._inputs, self._options, self._scheme = capacity, inputs, options, scheme
        self._fps, self._min_steps = fps, min_steps
        self._kept: collections.deque[Kept] = collections.deque()
        self._added = 0
        self._source: ChunkSource | None = None

    def __len__(self) -> int:
        return sum(len(kept.actions) for kept in self._kept)

    @property
    def episodes(self) -> int:
        return len(self._kept)

    def add(self, episode: Episode) -> None:
        """Take a finished episode in, and let old ones go until there is room for it."""
        steps = len(episode.actions)
        if episode.terminated == episode.truncated:
            how = "both terminated and truncated" if episode.terminated else "neither terminated nor truncated"
            raise UserError(f"The episode is {how}; only finished ones can be replayed, and they end in one way.")
        if not 0 < steps <= self._capacity:
            raise UserError(
                f"The episode has {steps} steps and the replay buffer holds {self._capacity}; "
                "give it room for some of the longest episodes."
            )
        kept = self._prepare(episode)
        while len(self) + steps > self._capacity:
            self._kept.popleft()
        self._kept.append(kept)
        self._added += 1
        self._source = None

    @property
    def bytes(self) -> int:
        """Of memory."""
        arrays = (array for k in self._kept for array in (k.state, k.actions, k.rewards, *k.pictures.values()))
        return sum(array.nbytes for array in arrays)

    def contents(self) -> tuple[Kept, ...]:
        """What it holds now, the oldest first; later additions do not change it."""
        return tuple(self._kept)

    def refill(self, kept: Iterable[Kept]) -> None:
        """Hold these instead: what `contents` gave, as it was."""
        self._kept = collections.deque(kept)
        self._added = self._kept[-1].number + 1 if self._kept else 0
        self._source = None

    def source(self) -> ChunkSource | None:
        """The windows there are now. Episodes added later are not in it."""
        if len(self) < self._min_steps:
            return None
        if self._source is None:
            self._source = self._build()
        return self._source

    def _prepare(self, episode: Episode) -> Kept:
        size = self._inputs.image_size
        flat = flatten(episode.observations)
        frames = {len(values) for values in flat.values()}
        steps = len(episode.actions)
        if frames not in ({steps}, {steps + 1}):
            raise UserError(
                f"The episode has {steps} actions and {sorted(frames)} observations; "
                "there is one before each action, and perhaps one after the last."
            )
        inputs = RobotInputs(self._inputs.robot)
        state, actions = inputs.joints({**flat, "actions": episode.actions})
        assert actions is not None
        # Copies: who collected the episode may use its arrays again.
        pictures = {
            slot: np.array(resize_with_pad(images, size, size))
            for slot, images in inputs.images(flat).items()
            if images is not None
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
                f"{int(np.isfinite(episode.rewards).sum())} are finite; each action is paid a finite reward."
            )
        if self._kept and pictures.keys() != self._kept[0].pictures.keys():
            raise UserError(
                f"The episode has the cameras {sorted(pictures)} and those before it {sorted(self._kept[0].pictures)}; "
                "all episodes of a replay buffer have the same."
            )
        labels = label(outcomes, self._scheme, episode.rewards.astype(np.float32))
        return Kept(
            self._added,
            state,
            actions,
            labels.rewards,
            bool(labels.terminated[0]),
            episode.success,
            episode.task,
            pictures,
        )

    def _build(self) -> ChunkSource:
        kept = list(self._kept)
        lengths = np.array([len(k.actions) for k in kept])
        has_next = np.array([k.has_next for k in kept])
        terminated = np.array([k.terminated for k in kept])
        windows = build_windows(
            lengths,
            np.concatenate([k.rewards for k in kept]),
            at_last_step(terminated, lengths),
            has_next,
            self._options,
        )
        prompts, ids = np.unique([k.prompt for k in kept], return_inverse=True)
        observed = lengths + has_next
        numbers = EpisodeNumbers(
            np.concatenate([k.state for k in kept]),
            np.concatenate([k.actions for k in kept]),
            [str(prompt) for prompt in prompts],
            np.repeat(ids, observed),
        )
        cameras = {slot: slot if slot in kept[0].pictures else None for slot in self._inputs.robot.cameras}
        pictures = _AllThere(
            np.cumsum(observed) - observed,
            {slot: [k.pictures[slot] for k in kept] for slot, camera in cameras.items() if camera is not None},
        )
        success = np.array([k.success for k in kept])
        return ChunkSource(self._inputs, windows, numbers, cameras, pictures, success=success, fps=self._fps)


class _AllThere(EpisodeViews):
    """Pictures that are in memory anyway."""

    def view(self, episodes: Int[np.ndarray, " e"], upcoming: Int[np.ndarray, " f"], claimant: object) -> EpisodeViews:
        """All of them."""
        del episodes, upcoming, claimant
        return self
