"""Finished episodes, ready to be cut into batches: their numbers in memory, their pictures within reach.

A source answers for windows by their first step. What it gives is what `robots.input_transform` would make of the same
frames, one by one; it only does so for a whole batch at once, and what never changes it does once.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from pistar.data.chunks import WindowFields, WindowOptions, Windows, build_windows
from pistar.data.frame_pool import FramePool
from pistar.data.frames import Frames
from pistar.data.lerobot import Dataset
from pistar.data.norm_stats import Norm, NormStats
from pistar.data.rewards import (
    REWARD,
    Labels,
    Recording,
    RewardScheme,
    Unsuccessful,
    label,
    read_outcomes,
)
from pistar.data.rewards import Source as SuccessSource
from pistar.data.robots import Robot, RobotInputs
from pistar.data.transforms import DeltaActions, Normalize, PadStatesAndActions, Tokenizer, flatten
from pistar.errors import UserError


@runtime_checkable
class Pictures(Protocol):
    """Where the pictures of a set of episodes are, at the model's size."""

    def gather(
        self,
        camera: str,
        rows: Int[np.ndarray, " r"],
        out: UInt8[np.ndarray, "b size size 3"],
        places: Int[np.ndarray, " r"],
    ) -> object:
        """Copy the pictures at `rows` into `out[places]`."""
        ...


@runtime_checkable
class PictureStore(Protocol):
    """Gives out pictures, perhaps of only so many episodes at a time."""

    def view(self, episodes: Int[np.ndarray, " e"], upcoming: Int[np.ndarray, " f"], claimant: object) -> Pictures:
        """The pictures of `episodes`, ready; and begin with those of `upcoming`, which will be asked for next.

        What a `claimant` asked for before it gives up.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ModelInputs:
    """How one model reads one robot: all that `input_transform` depends on."""

    robot: Robot
    stats: Mapping[str, NormStats]
    norm: Norm
    tokenizer: Tokenizer
    action_dim: int
    """The model's, padding included."""
    image_size: int
    discrete_state: bool
    """Write the state into the prompt, as π₀.₅ does."""

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise UserError(f"norm is {self.norm!r}; it is one of {', '.join(get_args(Norm))}.")

    @property
    def normalize(self) -> Normalize:
        return Normalize(self.stats, self.norm)

    @property
    def pad(self) -> PadStatesAndActions:
        return PadStatesAndActions(self.action_dim)


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeNumbers:
    """All but the pictures, episodes end to end, in the robot's units under the model's names."""

    state: Float[np.ndarray, "o s"]
    """By observation row: an episode of t steps has t of them, or t + 1."""
    actions: Float[np.ndarray, "n a"]
    prompts: Sequence[str]
    prompt_ids: Int[np.ndarray, " o"]
    """By observation row: which of the prompts."""


class ChunkSource:
    """Windows over finished episodes, and all it takes to fill a batch with them."""

    def __init__(
        self,
        inputs: ModelInputs,
        windows: Windows,
        numbers: EpisodeNumbers,
        cameras: Mapping[str, str | None],
        pictures: PictureStore,
        *,
        success: Bool[np.ndarray, " e"],
        fps: float,
        notes: Sequence[str] = (),
    ) -> None:
        """`cameras`: from the model's to those of `pictures`; None where there is none. `success`: by episode."""
        self.inputs, self.windows, self.cameras, self.pictures = inputs, windows, cameras, pictures
        self.success = success
        self.fps, self.notes = fps, tuple(notes)
        self._weights: Float[np.ndarray, " n"] | None = None
        self._draw_from(windows.starts)
        normal = inputs.normalize({"state": numbers.state})["state"]
        self._normal_state = normal
        self._state = inputs.pad({"state": normal})["state"]
        self._prompts, self._prompt_ids = numbers.prompts, numbers.prompt_ids
        # With the state in it a prompt is another at every row: too many to keep.
        self._tokens = None if inputs.discrete_state else self._tokenize(range(len(numbers.prompts)), None)

        self._offsets = _relative_offsets(inputs, numbers)
        actions = inputs.normalize({"actions": numbers.actions})
        if self._offsets is None:  # an action is the same in every window
            actions = inputs.pad(actions)
        self._actions = _every_window(actions["actions"], windows.options.horizon)

    def _draw_from(self, starts: Int[np.ndarray, " s"]) -> None:
        self.starts = starts
        """The windows that may be drawn."""
        self._edges = None if self._weights is None else np.cumsum(self._weights[starts], dtype=np.float64)
        self.episodes = np.unique(self.windows.episodes[starts])
        """Those they are from."""

    def select(self, episodes: Int[np.ndarray, " e"]) -> "ChunkSource":
        """The same, drawing from these episodes only. Shares everything else."""
        count = len(self.windows.ends)
        if len(episodes) and not 0 <= min(episodes) <= max(episodes) < count:
            raise UserError(f"Episodes {min(episodes)} to {max(episodes)} were chosen; there are 0 to {count - 1}.")
        wanted = np.zeros(count, bool)
        wanted[episodes] = True
        chosen = copy.copy(self)
        chosen._draw_from(self.starts[wanted[self.windows.episodes[self.starts]]])
        return chosen

    def weighed(self, weights: Float[np.ndarray, " n"]) -> "ChunkSource":
        """The same, drawing windows in proportion to the weight of their first row."""
        if not weights[self.starts].sum() > 0:
            raise UserError("All windows that may be drawn weigh 0; weigh the episodes that are trained on.")
        chosen = copy.copy(self)
        chosen._weights = weights
        chosen._draw_from(self.starts)
        return chosen

    @property
    def mass(self) -> float:
        """What all windows that may be drawn weigh together, each 1 if nobody said otherwise."""
        return float(len(self.starts) if self._edges is None else self._edges[-1])

    def draw(self, rng: np.random.Generator, count: int) -> Int[np.ndarray, " c"]:
        """So many windows, by the row they start at."""
        if self._edges is None:
            which = rng.integers(len(self.starts), size=count)
        else:
            which = np.searchsorted(self._edges, rng.random(count) * self._edges[-1], side="right")
        drawn: np.ndarray = self.starts[which]
        return drawn

    def actions(self, starts: Int[np.ndarray, " b"], fields: WindowFields) -> Float[np.ndarray, "b h d"]:
        """The windows' actions as the model puts them out; past an episode's end its last one again."""
        chunks: np.ndarray = self._actions[starts]
        over = ~fields.valid[:, -1]
        # A window is a slice, which costs a third of a gather by rows. It runs on into the next episode.
        chunks[over] = self._actions[fields.action_rows[over], 0]
        if self._offsets is None:
            return chunks
        padded = np.zeros((*chunks.shape[:2], self.inputs.action_dim), np.float32)
        offsets = self._offsets[fields.observation_rows, None]
        np.subtract(chunks, offsets, out=padded[..., : chunks.shape[-1]], casting="same_kind")
        return padded

    def state(self, rows: Int[np.ndarray, " b"]) -> Float[np.ndarray, "b d"]:
        """Normalised and padded."""
        states: np.ndarray = self._state[rows]
        return states

    def prompts(self, rows: Int[np.ndarray, " b"]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their masks."""
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
    """A view, in which `[i]` is the window that starts at row i. Past the last row there are zeros."""
    padded = np.concatenate([actions, np.zeros((horizon - 1, actions.shape[1]), actions.dtype)])
    return np.moveaxis(np.lib.stride_tricks.sliding_window_view(padded, horizon, axis=0), -1, 1)


def _relative_offsets(inputs: ModelInputs, numbers: EpisodeNumbers) -> Float[np.ndarray, "o a"] | None:
    """By observation row: what to take from normalised actions to make them relative to that row's state.

    Normalising is affine, so n(a − s) = n(a) − (n(s) − n(0)): two subtractions a batch less.
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
    pictures: Frames | FramePool,
    *,
    prompt: str | None = None,
    tell: Callable[[str], str] = str,
    repack: Mapping[str, Any] | None = None,
) -> ChunkSource:
    """A dataset's windows. `prompt` replaces the dataset's tasks, `tell` makes of either what the policy is told,
    `repack` replaces the robot's usual column names."""
    for what, theirs, ours in (
        ("the pictures are of", pictures.root, dataset.root),
        ("the pictures have size", pictures.size, inputs.image_size),
        ("the labels have this many steps:", len(labels.rewards), dataset.total_frames),
    ):
        if theirs != ours:
            raise UserError(f"{dataset.root}: {what} {theirs} where {ours} is wanted; make them for this dataset.")
    repack = inputs.robot.repack if repack is None else repack
    state, actions = robot_numbers(dataset, inputs.robot, repack)
    if prompt is None:
        prompts, ids = np.unique(dataset.frame_tasks().astype(str), return_inverse=True)
    else:
        prompts, ids = np.array([prompt]), np.zeros(dataset.total_frames, np.int64)
    lengths = np.array([episode.length for episode in dataset.episodes])
    # LeRobot keeps no observation after the last action.
    windows = build_windows(lengths, labels.rewards, labels.ended, np.zeros(len(lengths), bool), options)
    return ChunkSource(
        inputs,
        windows,
        EpisodeNumbers(state, actions, [tell(str(text)) for text in prompts], ids),
        dataset_cameras(dataset, inputs.robot, repack),
        pictures,
        success=labels.success,
        fps=dataset.fps,
        notes=labels.notes,
    )


def robot_numbers(dataset: Dataset, robot: Robot, repack: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Every state and action of a dataset, as the robot's joints under the model's names; no picture is touched."""
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
                "drop or mend that episode (pistar data check --fix)."
            )
    state, actions = RobotInputs(robot).joints(flat)
    assert actions is not None
    return state, actions


def dataset_cameras(dataset: Dataset, robot: Robot, repack: Mapping[str, Any]) -> dict[str, str | None]:
    """From the model's cameras to the dataset's."""
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
    there = [name for name, feature in dataset.features.items() if feature.is_camera]
    if column not in there:
        absent = "none if it has no such camera" if path in robot.optional_cameras else "choose another robot"
        raise UserError(
            f"{dataset.root} has no camera {column!r} but {', '.join(there) or 'none at all'}; say which one is "
            f"{robot.name}'s {path} by --data.columns {path} NAME, or {absent}."
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
    """Rewards and ends of every step of a dataset."""
    lengths = np.array([episode.length for episode in dataset.episodes])
    recording = Recording(lengths, _NumberColumns(dataset), [str(e.data_file.parent) for e in dataset.episodes])
    recorded = recording.column(REWARD) if scheme.kind == "recorded" and REWARD in recording.columns else None
    return label(read_outcomes(success, recording, without_success), scheme, recorded)


class _NumberColumns(Mapping[str, np.ndarray]):
    """A dataset's columns, each read when it is asked for."""

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
    success: "np.ndarray", held_out: float, seed: int
) -> tuple[Int[np.ndarray, " t"], Int[np.ndarray, " v"]]:
    """Episodes to train on and episodes to judge by, in order; of successes and of failures the same share.

    By episode, because neighbouring frames are near-copies. Of a kind with two or more episodes at least one is held
    out (unless `held_out` is 0) and at least one trained on.
    """
    if not 0 <= held_out < 1:
        raise UserError(f"held_out is {held_out}; it is a share of the episodes, from 0 up to below 1 (try 0.1).")
    rng = np.random.Generator(np.random.Philox(key=seed))
    judged = np.zeros(len(success), bool)
    for kind in (True, False):
        those = np.flatnonzero(success == kind)
        count = round(held_out * len(those))
        if held_out and len(those) > 1:
            count = min(max(count, 1), len(those) - 1)
        judged[rng.permutation(those)[:count]] = True
    return np.flatnonzero(~judged), np.flatnonzero(judged)
