"""From a LeRobot dataset to Q-chunk batches on the device.

    python examples/q_chunk_batches.py path/to/lerobot/dataset aloha

For the small dataset of the tests: tests/fixtures/lerobot/lerobot_v30
"""

import argparse

import numpy as np

from pistar.data.chunks import WindowOptions
from pistar.data.dataset_stats import compute_norm_stats
from pistar.data.frames import open_frames, progress_bar
from pistar.data.lerobot import open_dataset
from pistar.data.loader import Loader, Part
from pistar.data.rewards import FromColumn, RewardScheme
from pistar.data.robots import find_robot
from pistar.data.source import ModelInputs, dataset_cameras, dataset_source, label_dataset, split_episodes
from pistar.errors import UserError
from pistar.models.tokenizer import load_tokenizer


def main() -> None:
    """Open, label, cut, draw."""
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
    """Print what is in some batches."""
    dataset, robot = open_dataset(path), find_robot(robot_name)

    # How the model reads this robot: statistics, prompt, sizes.
    inputs = ModelInputs(
        robot=robot,
        stats=compute_norm_stats(dataset, robot, horizon=50),
        norm="zscore",
        tokenizer=load_tokenizer("tiny", 48),  # None: PaliGemma's, from OpenPI's cache
        action_dim=32,
        image_size=224,
        discrete_state=False,
    )
    # What each step was paid, and how each episode ended.
    labels = label_dataset(dataset, FromColumn("next.success"), RewardScheme("success"), without_success="timeout")
    # Every picture decoded once; from then on the cache is mapped into memory.
    cameras = [name for name in dataset_cameras(dataset, robot, robot.repack).values() if name is not None]
    with progress_bar() as bar:
        frames = open_frames(dataset, cameras, inputs.image_size, cache, progress=bar)

    # Windows of 50 steps, the first 10 of which the critic judges.
    source = dataset_source(dataset, inputs, WindowOptions(horizon=50, critic_horizon=10), labels, frames)
    train, held_out = split_episodes(labels.success, held_out=0.1, seed=0)
    loader = Loader([Part(source.select(train))], batch_size=8, seed=0)
    print(f"{len(train)} episodes to train on, {len(held_out)} held out; {len(source.starts)} windows")
    for note in source.notes:
        print("note:", note)
    for step, batch in enumerate(loader.batches(0, 3)):
        ended = int(np.sum(np.asarray(batch.masks)[:, 9] == 0))
        print(f"step {step}: actions {batch.actions.shape}, {ended} of 8 windows see the task end")


if __name__ == "__main__":
    main()
