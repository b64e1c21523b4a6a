"""Read datasets with the lerobot package; the half of test_lerobot_reads_ours.py that needs it.

    python tests/programs/read_with_lerobot.py OUT ROOT…

Run it with an interpreter that has lerobot 0.4 or later, which needs other versions of our dependencies. For each
dataset it writes OUT/<name>.npz with every item, and appends an episode to a copy of the dataset, OUT/<name>.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset, LeRobotDatasetMetadata

WINDOW = {"action": (0, 1, 2, 3, 4), "next.reward": (0, 1, 2, 3, 4), "camera": (-2, 0, 3)}
"""Steps relative to the current one, by column; "camera" for all cameras."""
APPENDED = 7
"""Number of steps of the episode that lerobot appends."""
FILLED_IN = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns that lerobot fills in itself."""


def to_numpy(values: list[Any], *, is_camera: bool) -> np.ndarray:
    """Stack the items of one key; images become uint8 again."""
    if isinstance(values[0], str):
        return np.array(values)
    stacked: np.ndarray = torch.stack(values).numpy()
    return np.round(stacked * 255).astype(np.uint8) if is_camera else stacked


def gather(items: list[dict[str, Any]], cameras: list[str]) -> dict[str, np.ndarray]:
    """Stack all items, key by key."""
    return {key: to_numpy([item[key] for item in items], is_camera=key in cameras) for key in items[0]}


def read(root: Path) -> dict[str, Any]:
    """Read everything, in each way that lerobot offers."""
    meta = LeRobotDatasetMetadata("pistar/test", root=root)
    dataset = LeRobotDataset("pistar/test", root=root)
    cameras = list(meta.camera_keys)
    found: dict[str, Any] = {f"item/{key}": values for key, values in gather(list(items(dataset)), cameras).items()}

    steps = {key: WINDOW["camera" if key in cameras else key] for key in ("action", "next.reward", *cameras)}
    seconds = {key: [step / meta.fps for step in offsets] for key, offsets in steps.items()}
    windows = LeRobotDataset("pistar/test", root=root, delta_timestamps=seconds)
    found |= {f"window/{key}": values for key, values in gather(list(items(windows)), cameras).items()}

    order = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(windows, batch_size=4, shuffle=True, generator=order)
    batches = list(loader)
    for key in ("index", "action", *cameras):
        found[f"batch/{key}"] = to_numpy([row for batch in batches for row in batch[key]], is_camera=key in cameras)
    found["batch/task"] = np.array([task for batch in batches for task in batch["task"]])

    # One by one: an episode must be readable from its own files alone.
    parts = [LeRobotDataset("pistar/test", root=root, episodes=[i]) for i in range(meta.total_episodes)]
    found["episode/lengths"] = [len(part) for part in parts]
    found["episode/first_action"] = np.stack([part[0]["action"].numpy() for part in parts])

    episodes = [meta.episodes[i] for i in range(meta.total_episodes)]
    stats = {name: {key: np.asarray(v).tolist() for key, v in of.items()} for name, of in (meta.stats or {}).items()}
    facts = {
        "fps": meta.fps,
        "robot_type": meta.robot_type,
        "cameras": cameras,
        "totals": [meta.total_episodes, meta.total_frames, meta.total_tasks],
        "tasks": {str(task): int(row["task_index"]) for task, row in meta.tasks.iterrows()},
        "bounds": [[int(episode["dataset_from_index"]), int(episode["dataset_to_index"])] for episode in episodes],
        "episode_tasks": [list(episode["tasks"]) for episode in episodes],
        "stats": stats,
        "shapes": {key: list(shape) for key, shape in meta.shapes.items()},
        "window": steps,
    }
    return found | {"facts": json.dumps(facts)}


def items(dataset: Any) -> Any:
    """Give all items by index: iterating over a dataset without __iter__ ends only at an IndexError."""
    return (dataset[i] for i in range(len(dataset)))


def append(root: Path) -> None:
    """Append one episode with a new task, as `lerobot-record --resume` does."""
    make = getattr(LeRobotDataset, "resume", LeRobotDataset)  # a separate method from 0.5 on
    dataset = make("pistar/test", root=root)
    for step in range(APPENDED):
        frame: dict[str, Any] = {"task": "lerobot's own"}
        for name, feature in dataset.features.items():
            shape = tuple(feature["shape"])
            if feature["dtype"] in ("video", "image"):
                frame[name] = np.full(shape, 30 * step, np.uint8)
            elif feature["dtype"] == "string":
                frame[name] = f"step {step}"
            elif name not in FILLED_IN:
                frame[name] = np.full(shape, step, feature["dtype"])
        dataset.add_frame(frame)
    dataset.save_episode()
    dataset.finalize()


def main() -> None:
    """Read all datasets named on the command line."""
    out, *roots = (Path(argument) for argument in sys.argv[1:])
    for root in roots:
        np.savez(out / f"{root.name}.npz", **read(root))
        shutil.copytree(root, out / root.name)
        append(out / root.name)


if __name__ == "__main__":
    main()
