"""A run's datasets: labelled with outcomes, split into training and held-out episodes, and made into batches."""

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from pistar.agents.prompt_labels import PromptLabeller, labelled
from pistar.config.train import DataConfig, RLTrainConfig
from pistar.data.chunk_source import (
    ChunkSource,
    ModelInputs,
    dataset_cameras,
    dataset_source,
    label_dataset,
    split_episodes,
)
from pistar.data.frame_cache import Frames, open_frames
from pistar.data.frame_pool import FramePool
from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.reader import open_dataset
from pistar.data.loader import Loader, Part, PoolOptions
from pistar.data.rewards import Labels
from pistar.data.robots import Robot
from pistar.data.success_sources import FromEpisodes
from pistar.data.transforms import flatten
from pistar.data.window_weights import read_weights
from pistar.distributed.sharding import batch_sharding
from pistar.errors import UserError
from pistar.models.tokenizer import PromptTokenizer
from pistar.telemetry.progress import progress_bar
from pistar.types import RewardScheme


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledDataset:
    """A dataset, the outcomes of its episodes, and which of them are trained on."""

    name: str
    """The dataset as the settings name it."""
    dataset: Dataset
    labels: Labels
    train: np.ndarray
    held_out: np.ndarray


def require_datasets(config: RLTrainConfig) -> Sequence[str]:
    """The run's datasets, of which there must be one."""
    if not config.data.datasets:
        raise UserError(
            f"{config.name} names no dataset; add --data.datasets PATH: a LeRobot folder, or a repo id in its cache."
        )
    return config.data.datasets


@contextlib.contextmanager
def _naming(config: RLTrainConfig, name: str) -> Iterator[None]:
    """Put a dataset's name before errors about it, if there are several and the error does not say which."""
    try:
        yield
    except UserError as error:
        if len(config.data.datasets) < 2 or name in str(error):
            raise
        raise UserError(f"{name}: {error}") from error


def open_labelled(config: RLTrainConfig, name: str) -> LabelledDataset:
    """Open a dataset, read its outcomes and split its episodes."""
    with _naming(config, name):
        return _open_labelled(config, name)


def _open_labelled(config: RLTrainConfig, name: str) -> LabelledDataset:
    data = config.data
    dataset = open_dataset(name)
    if config.algorithm.needs_rewards or data.only_successes:
        labels = label_dataset(dataset, data.success, *config.algorithm.labelling())
    else:
        labels = _labels_for_imitation(dataset, data)
    _check_returns(config, name, labels, dataset)
    train, held_out = split_episodes(labels.success, data.held_out, config.seed)
    if data.only_successes:
        train = train[labels.success[train]]
        if not len(train):
            raise UserError(f"{name} has no successful episode, and data.only_successes leaves no other; turn it off.")
    return LabelledDataset(name, dataset, labels, train, held_out)


def _check_returns(config: RLTrainConfig, name: str, labels: Labels, dataset: Dataset) -> None:
    """Refuse recorded rewards whose discounted returns leave the range that values are bounded to."""
    bounds = config.algorithm.return_bounds()
    if bounds is None or config.algorithm.labelling()[0].paid is not None:
        return
    least, greatest, start = np.inf, -np.inf, 0
    for episode in dataset.episodes:
        end = start + episode.length
        finished = np.flatnonzero(labels.ended[start:end])
        value = 0.0
        for reward in labels.rewards[start : start + finished[0] + 1][::-1] if len(finished) else ():
            value = float(reward) + config.algorithm.discount * value
            least, greatest = min(least, value), max(greatest, value)
        start = end
    margin = 1e-6 * (bounds[1] - bounds[0])
    if least < bounds[0] - margin or greatest > bounds[1] + margin:
        raise UserError(
            f"algorithm.return_range is ({bounds[0]:g}, {bounds[1]:g}) but returns in {name} are {least:.6g} to "
            f"{greatest:.6g}; widen it, so that values are bounded by what can be reached."
        )


def _labels_for_imitation(dataset: Dataset, data: DataConfig) -> Labels:
    """Labels where there are any, so that the same episodes are held out as in a critic's training.

    Imitation does not need them, so what is missing is a note and not an error.
    """
    try:
        labels = label_dataset(dataset, data.success, RewardScheme("success"))
        return dataclasses.replace(labels, notes=())
    except UserError as error:
        labels = label_dataset(dataset, FromEpisodes(()), RewardScheme("success"))
        return dataclasses.replace(labels, notes=(f"episodes are held out regardless of their outcome: {error}",))


def columns_of(config: RLTrainConfig, robot: Robot) -> dict[str, str]:
    """The dataset's column of each slash path of the robot's observation."""
    usual = flatten(robot.repack)
    for path in config.data.columns:
        if path not in usual:
            near = difflib.get_close_matches(path, usual, n=1) or list(usual)
            raise UserError(f"data.columns names {path!r}, which {robot.name} does not have; try {', '.join(near)}.")
    return {path: name for path, name in (usual | config.data.columns).items() if name != "none"}


def make_sources(
    config: RLTrainConfig, data: Sequence[LabelledDataset], inputs: ModelInputs, *, dry: bool
) -> list[ChunkSource]:
    """Each dataset as a source of windows. `dry` decodes frames only when they are drawn."""
    sources = []
    for part in data:
        with _naming(config, part.name):
            source = dataset_source(
                part.dataset,
                inputs,
                config.windows(),
                part.labels,
                _frames(config, part.dataset, inputs.robot, dry=dry),
                prompt=config.data.prompt,
                format_prompt=_prompt_of_demonstrations(config, inputs),
                repack=columns_of(config, inputs.robot),
            )
        sources.append(source)
    return sources


def weigh_windows(
    config: RLTrainConfig, data: Sequence[LabelledDataset], sources: Sequence[ChunkSource]
) -> list[ChunkSource]:
    """The same sources, drawn from by the weights of `pistar data weigh` where the run names them."""
    if config.data.window_weights is None:
        return list(sources)
    frames = [part.dataset.total_frames for part in data]
    weights = read_weights(config.data.window_weights, config.data.datasets, frames)
    return [source.with_weights(each) for source, each in zip(sources, weights, strict=True)]


def make_loader(
    config: RLTrainConfig, sources: Sequence[ChunkSource], rows: int, mesh: jax.sharding.Mesh, *, dry: bool
) -> Loader:
    """Batches of `rows` rows from the sources, mixed as the run says."""
    shares = config.data.weights or [source.total_weight for source in sources]
    return Loader(
        [Part(source, weight) for source, weight in zip(sources, shares, strict=True)],
        rows,
        config.seed,
        pool=PoolOptions(1) if dry else config.data.pool,
        host=jax.process_index(),
        hosts=jax.process_count(),
        sharding=batch_sharding(mesh),
    )


def _prompt_of_demonstrations(config: RLTrainConfig, inputs: ModelInputs) -> Callable[[str], str]:
    """Where prompts carry labels, demonstrations are labelled as good.

    Without a label they would be what guidance leads away from.
    """
    if not config.algorithm.labels_prompts:
        return str
    assert isinstance(inputs.tokenizer, PromptTokenizer)
    labeller = PromptLabeller(inputs.tokenizer, inputs.robot.state_dim if inputs.discrete_state else None)

    def as_good(prompt: str) -> str:
        labeller.check(prompt)
        return labelled(prompt, "positive")

    return as_good


def _frames(config: RLTrainConfig, dataset: Dataset, robot: Robot, *, dry: bool) -> Frames | FramePool:
    cameras = [name for name in dataset_cameras(dataset, robot, columns_of(config, robot)).values() if name is not None]
    if dry or config.data.frames == "memory":
        return FramePool(dataset, cameras, config.model.image_size)
    with progress_bar() as bar:
        return open_frames(dataset, cameras, config.model.image_size, config.data.cache_dir, progress=bar)
