"""Chunk sources: finished episodes from which batches of windows are drawn, with their numbers in memory.

A window is named by its first step. A source gives what `robots.input_transform` gives for the same frames, but for a
whole batch at once, and it computes only once what never changes.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from pistar.data.frame_cache import Frames
from pistar.data.frame_pool import FramePool
from pistar.data.lerobot.dataset import Dataset
from pistar.data.norm_stats import Norm, NormStats
from pistar.data.rewards import REWARD, Labels, label
from pistar.data.robots import Robot, RobotInputs
from pistar.data.success_sources import Recording, SuccessSource, read_outcomes
from pistar.data.transforms import DeltaActions, Normalize, PadStatesAndActions, Tokenizer, flatten
from pistar.data.windows import WindowFields, WindowOptions, Windows, build_windows
from pistar.errors import UserError, check_choice
from pistar.types import RewardScheme, Unsuccessful


@runtime_checkable
class FrameReader(Protocol):
    """Reads the camera frames of some episodes, at the model's image size."""

    def gather(
        self,
        camera: str,
        rows: Int[np.ndarray, " r"],
        out: UInt8[np.ndarray, "b size size 3"],
        places: Int[np.ndarray, " r"],
    ) -> object:
        """Copy the frames at `rows` into `out[places]`."""
        ...


@runtime_checkable
class FrameStore(Protocol):
    """Holds the camera frames of a set of episodes, of all of them or of a few at a time."""

    def view(self, episodes: Int[np.ndarray, " e"], upcoming: Int[np.ndarray, " f"], claimant: object) -> FrameReader:
        """Make the frames of `episodes` ready, and start on those of `upcoming`, which will be needed next.

        A claimant's call replaces its earlier one: the store may drop frames that no claimant's last call named.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ModelInputs:
    """How a model reads a robot's data: all that `input_transform` depends on."""

    robot: Robot
    stats: Mapping[str, NormStats]
    norm: Norm
    tokenizer: Tokenizer
    action_dim: int
    """The model's action dimension, padding included."""
    image_size: int
    discrete_state: bool
    """Whether the state is written into the prompt, as for π₀.₅."""

    def __post_init__(self) -> None:
        check_choice(self, "norm", Norm)

    @property
    def normalize(self) -> Normalize:
        """The transform that normalises state and actions."""
        return Normalize(self.stats, self.norm)

    @property
    def pad(self) -> PadStatesAndActions:
        """The transform that pads state and actions to the model's action dimension."""
        return PadStatesAndActions(self.action_dim)


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeNumbers:
    """States, actions and prompts of episodes end to end, in the robot's units under the model's names."""

    state: Float[np.ndarray, "o s"]
    """By observation row. An episode of t steps has t observations, or t + 1."""
    actions: Float[np.ndarray, "n a"]
    prompts: Sequence[str]
    prompt_ids: Int[np.ndarray, " o"]
    """By observation row: an index into `prompts`."""


class ChunkSource:
    """Windows over finished episodes, and all the data that batches of them need."""

    def __init__(
        self,
        inputs: ModelInputs,
        windows: Windows,
        numbers: EpisodeNumbers,
        cameras: Mapping[str, str | None],
        frames: FrameStore,
        *,
        success: Bool[np.ndarray, " e"],
        fps: float,
        notes: Sequence[str] = (),
    ) -> None:
        """Normalise the numbers, and tokenise prompts that do not hold the state.

        `cameras`: from the model's names to those of `frames`; None for a camera the robot lacks. `success`: by
        episode. `notes`: one-line notes for the user.
        """
        self.inputs, self.windows, self.cameras, self.frames = inputs, windows, cameras, frames
        self.success = success
        self.fps, self.notes = fps, tuple(notes)
        self._weights: Float[np.ndarray, " n"] | None = None
        self._draw_from(windows.starts)
        normal = inputs.normalize({"state": numbers.state})["state"]
        self._normal_state = normal
        self._state = inputs.pad({"state": normal})["state"]
        self._prompts, self._prompt_ids = numbers.prompts, numbers.prompt_ids
        # A prompt that holds the state differs in every row: too many to keep.
        self._tokens = None if inputs.discrete_state else self._tokenize(range(len(numbers.prompts)), None)

        self._offsets = _relative_offsets(inputs, numbers)
        actions = inputs.normalize({"actions": numbers.actions})
        if self._offsets is None:  # an action has the same numbers in every window
            actions = inputs.pad(actions)
        self._actions = _every_window(actions["actions"], windows.options.horizon)

    def _draw_from(self, starts: Int[np.ndarray, " s"]) -> None:
        self.starts = starts
        """First rows of the windows that may be drawn."""
        self._edges = None if self._weights is None else np.cumsum(self._weights[starts], dtype=np.float64)
        self.episodes = np.unique(self.windows.episodes[starts])
        """The episodes of these windows."""

    def select(self, episodes: Int[np.ndarray, " e"]) -> "ChunkSource":
        """Return a source that draws from these episodes only and shares everything else."""
        count = len(self.windows.ends)
        if len(episodes) and not 0 <= min(episodes) <= max(episodes) < count:
            raise UserError(f"Episodes {min(episodes)} to {max(episodes)} were selected; choose from 0 to {count - 1}.")
        wanted = np.zeros(count, bool)
        wanted[episodes] = True
        chosen = copy.copy(self)
        chosen._draw_from(self.starts[wanted[self.windows.episodes[self.starts]]])
        return chosen

    def with_weights(self, weights: Float[np.ndarray, " n"]) -> "ChunkSource":
        """Return a source that draws windows in proportion to the weight of their first row."""
        if not weights[self.starts].sum() > 0:
            raise UserError("All windows to draw from have weight 0; compute weights of the episodes trained on.")
        chosen = copy.copy(self)
        chosen._weights = weights
        chosen._draw_from(self.starts)
        return chosen

    @property
    def total_weight(self) -> float:
        """Sum of the weights of all windows that may be drawn; without weights, their number."""
        return float(len(self.starts) if self._edges is None else self._edges[-1])

    def draw(self, rng: np.random.Generator, count: int) -> Int[np.ndarray, " c"]:
        """Draw `count` windows, with replacement; return their first rows."""
        if self._edges is None:
            which = rng.integers(len(self.starts), size=count)
        else:
            which = np.searchsorted(self._edges, rng.random(count) * self._edges[-1], side="right")
        drawn: np.ndarray = self.starts[which]
        return drawn

    def actions(self, starts: Int[np.ndarray, " b"], fields: WindowFields) -> Float[np.ndarray, "b h d"]:
        """Return the windows' actions, normalised and padded. Past an episode's end its last action is repeated."""
        chunks: np.ndarray = self._actions[starts]
        over = ~fields.valid[:, -1]
        # Slices cost a third of a gather by rows, but run on into the next episode: only those windows are gathered.
        chunks[over] = self._actions[fields.action_rows[over], 0]
        if self._offsets is None:
            return chunks
        padded = np.zeros((*chunks.shape[:2], self.inputs.action_dim), np.float32)
        offsets = self._offsets[fields.observation_rows, None]
        np.subtract(chunks, offsets, out=padded[..., : chunks.shape[-1]], casting="same_kind")
        return padded

    def state(self, rows: Int[np.ndarray, " b"]) -> Float[np.ndarray, "b d"]:
        """Return the states of these observation rows, normalised and padded."""
        states: np.ndarray = self._state[rows]
        return states

    def prompts(self, rows: Int[np.ndarray, " b"]) -> tuple[np.ndarray, np.ndarray]:
        """Return the prompt tokens of these observation rows, and their masks."""
        ids = self._prompt_ids[rows]
        if self._tokens is None:
            return self._tokenize(ids.tolist(), self._normal_state[rows])
        tokens, masks = self._tokens
        return tokens[ids], masks[ids]

    def _tokenize(self, ids: Sequence[int], states: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        texts = [self._prompts[i] for i in ids]
        tokenize = self.inputs.tokenizer.tokenize
        pairs = [tokenize(text, None if states is None else states[i]) for i, text in enumerate(texts)]
        tokens, masks = zip(*pairs, strict=True)
        return np.stack(tokens), np.stack(masks)


def _every_window(actions: Float[np.ndarray, "n a"], horizon: int) -> Float[np.ndarray, "n h a"]:
    """Return a view in which `[i]` is the window that starts at row i. Past the last row there are zeros."""
    padded = np.concatenate([actions, np.zeros((horizon - 1, actions.shape[1]), actions.dtype)])
    return np.moveaxis(np.lib.stride_tricks.sliding_window_view(padded, horizon, axis=0), -1, 1)


def _relative_offsets(inputs: ModelInputs, numbers: EpisodeNumbers) -> Float[np.ndarray, "o a"] | None:
    """Compute, by observation row, what to subtract from normalised actions to make them relative to the state.

    Normalising is affine, so n(a − s) = n(a) − (n(s) − n(0)). This saves two subtractions per batch.
    """
    mask = inputs.robot.delta_mask
    if mask is None:
        return None
    zero = np.zeros((len(numbers.state), 1, numbers.actions.shape[1]))
    shifted = DeltaActions(mask)({"state": numbers.state, "actions": zero})["actions"]
    offsets: np.ndarray = (
        inputs.normalize({"actions": zero})["actions"] - inputs.normalize({"actions": shifted})["actions"]
    )
    return offsets[:, 0]


# From a LeRobot dataset


def dataset_source(
    dataset: Dataset,
    inputs: ModelInputs,
    options: WindowOptions,
    labels: Labels,
    frames: Frames | FramePool,
    *,
    prompt: str | None = None,
    format_prompt: Callable[[str], str] = str,
    repack: Mapping[str, Any] | None = None,
) -> ChunkSource:
    """Make a source of a dataset's windows.

    `prompt` replaces the dataset's tasks. `format_prompt` turns a task or `prompt` into the text the policy is given.
    `repack` replaces the robot's usual column names.
    """
    for what, given, needed in (
        ("the dataset of the frames", frames.root, dataset.root),
        ("the image size of the frames", frames.size, inputs.image_size),
        ("the number of labelled steps", len(labels.rewards), dataset.total_frames),
    ):
        if given != needed:
            raise UserError(f"{dataset.root}: {what} is {given}, not {needed}; make them for this dataset and model.")
    repack = inputs.robot.repack if repack is None else repack
    state, actions = robot_numbers(dataset, inputs.robot, repack)
    if prompt is None:
        prompts, ids = np.unique(dataset.frame_tasks().astype(str), return_inverse=True)
    else:
        prompts, ids = np.array([prompt]), np.zeros(dataset.total_frames, np.int64)
    lengths = np.array([episode.length for episode in dataset.episodes])
    # LeRobot stores no observation after the last action.
    windows = build_windows(lengths, labels.rewards, labels.ended, np.zeros(len(lengths), bool), options)
    return ChunkSource(
        inputs,
        windows,
        EpisodeNumbers(state, actions, [format_prompt(str(text)) for text in prompts], ids),
        dataset_cameras(dataset, inputs.robot, repack),
        frames,
        success=labels.success,
        fps=dataset.fps,
        notes=labels.notes,
    )


def robot_numbers(dataset: Dataset, robot: Robot, repack: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Read every state and action of a dataset, mapped to the model's joints. No video is opened."""
    names = flatten(repack)
    columns = {path: _column(path, robot, names) for path in (*robot.state_keys, "actions")}
    data = dataset.columns(list(columns.values()))
    flat = {path: data[column].reshape(dataset.total_frames, -1) for path, column in columns.items()}
    for path, values in flat.items():
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values).all(axis=-1))[0])
            episode = next(e.index for e in dataset.episodes if e.from_row <= row < e.from_row + e.length)
            raise UserError(
                f"{columns[path]} in row {row} (episode {episode}) of {dataset.root} has NaN or Inf; "
                "drop or repair that episode (pistar data check --fix)."
            )
    state, actions = RobotInputs(robot).joints(flat)
    assert actions is not None
    return state, actions


def dataset_cameras(dataset: Dataset, robot: Robot, repack: Mapping[str, Any]) -> dict[str, str | None]:
    """Map the model's cameras to the dataset's; None for a camera the robot lacks."""
    names = flatten(repack)
    cameras: dict[str, str | None] = {}
    for slot, path in robot.cameras.items():
        if path is None or (path not in names and path in robot.optional_cameras):
            cameras[slot] = None
        else:
            cameras[slot] = _column(path, robot, names)
            _require_camera(dataset, str(cameras[slot]), path, robot)
    dataset.require_videos([camera for camera in cameras.values() if camera is not None])
    return cameras


def _require_camera(dataset: Dataset, column: str, path: str, robot: Robot) -> None:
    if column not in dataset.cameras:
        otherwise = "none if it has no such camera" if path in robot.optional_cameras else "choose another robot"
        raise UserError(
            f"{dataset.root} has no camera {column!r}; it has {', '.join(dataset.cameras) or 'none'}: name the one "
            f"that is {robot.name}'s {path} by --data.columns {path} NAME, or {otherwise}."
        )


def _column(path: str, robot: Robot, names: Mapping[str, Any]) -> str:
    if path not in names:
        raise UserError(
            f"repack has no column for {path!r} of {robot.name}, only for {sorted(names)}; "
            "name the dataset's column for it."
        )
    return str(names[path])


def label_dataset(
    dataset: Dataset, success: SuccessSource, scheme: RewardScheme, without_success: Unsuccessful = "timeout"
) -> Labels:
    """Compute rewards and ends of every step of a dataset."""
    lengths = np.array([episode.length for episode in dataset.episodes])
    recording = Recording(lengths, _NumberColumns(dataset), [str(e.data_file.parent) for e in dataset.episodes])
    recorded = recording.column(REWARD) if scheme.kind == "recorded" and REWARD in recording.columns else None
    return label(read_outcomes(success, recording, without_success), scheme, recorded)


class _NumberColumns(Mapping[str, np.ndarray]):
    """A dataset's columns of numbers, each read when it is used."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._names = [name for name, feature in dataset.features.items() if not feature.is_camera]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._dataset.columns([name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def split_episodes(
    success: Bool[np.ndarray, " e"], held_out: float, seed: int
) -> tuple[Int[np.ndarray, " t"], Int[np.ndarray, " v"]]:
    """Split episodes into those to train on and those held out, each in order.

    The same fraction of successes and of failures is held out. Whole episodes are, because neighbouring frames are
    nearly the same. Of two or more successes (or failures) at least one is trained on, and at least one held out unless
    `held_out` is 0.
    """
    if not 0 <= held_out < 1:
        raise UserError(f"held_out is {held_out}; give a fraction of the episodes, at least 0 and below 1 (try 0.1).")
    rng = np.random.Generator(np.random.Philox(key=seed))
    chosen = np.zeros(len(success), bool)
    for kind in (True, False):
        episodes = np.flatnonzero(success == kind)
        count = round(held_out * len(episodes))
        if held_out and len(episodes) > 1:
            count = min(max(count, 1), len(episodes) - 1)
        chosen[rng.permutation(episodes)[:count]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
