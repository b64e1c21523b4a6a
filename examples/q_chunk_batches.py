"""From a LeRobot dataset to Q-chunk batches on the device.

    python examples/q_chunk_batches.py path/to/lerobot/dataset aloha

For the small dataset of the tests: tests/fixtures/lerobot/lerobot_v30
"""

import argparse

import numpy as np

from pistar.data.chunk_source import ModelInputs, dataset_cameras, dataset_source, label_dataset, split_episodes
from pistar.data.dataset_stats import compute_norm_stats
from pistar.data.frame_cache import open_frames
from pistar.data.lerobot.reader import open_dataset
from pistar.data.loader import Loader, Part
from pistar.data.robots import find_robot
from pistar.data.success_sources import FromColumn
from pistar.data.windows import WindowOptions
from pistar.errors import UserError
from pistar.models.tokenizer import load_tokenizer
from pistar.telemetry.progress import progress_bar
from pistar.types import RewardScheme


def main() -> None:
    """Parse the arguments and print some batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("robot")
    parser.add_argument("--cache", help="folder for decoded frames; the user's cache if left out")
    args = parser.parse_args()
    try:
        show(args.dataset, args.robot, args.cache)
    except UserError as error:
        parser.error(str(error))


def show(path: str, robot_name: str, cache: str | None) -> None:
    """Open a dataset, label its steps, cut windows, and print some batches."""
    dataset, robot = open_dataset(path), find_robot(robot_name)

    # How the model reads this robot's data: statistics, prompt, sizes.
    inputs = ModelInputs(
        robot=robot,
        stats=compute_norm_stats(dataset, robot, horizon=50),
        norm="zscore",
        tokenizer=load_tokenizer("tiny", 48),  # None: PaliGemma's, from OpenPI's cache
        action_dim=32,
        image_size=224,
        discrete_state=False,
    )
    # The reward of each step, and how each episode ended.
    labels = label_dataset(dataset, FromColumn("next.success"), RewardScheme("success"), without_success="timeout")
    # Every image is decoded once into a cache, which is then mapped into memory.
    cameras = [name for name in dataset_cameras(dataset, robot, robot.repack).values() if name is not None]
    with progress_bar() as bar:
        frames = open_frames(dataset, cameras, inputs.image_size, cache, progress=bar)

    # Windows of 50 steps, of which the critic values the first 10.
    source = dataset_source(dataset, inputs, WindowOptions(horizon=50, critic_horizon=10), labels, frames)
    train, held_out = split_episodes(labels.success, held_out=0.1, seed=0)
    loader = Loader([Part(source.select(train))], batch_size=8, seed=0)
    print(f"{len(train)} episodes to train on, {len(held_out)} held out; {len(source.starts)} windows")
    for note in source.notes:
        print("note:", note)
    for step, batch in enumerate(loader.batches(0, 3)):
        ended = int(np.sum(np.asarray(batch.masks)[:, 9] == 0))
        print(f"step {step}: actions {batch.actions.shape}, in {ended} of 8 windows the task ends")


if __name__ == "__main__":
    main()
