"""Find and open LeRobot datasets, v2.1 and v3.0. `writer` writes them.

Uses pyarrow and PyAV, not the `lerobot` package: that needs PyTorch and 8 GB, does not read v2.1 from version 0.4 on,
and decodes by random access.
"""

import os
import re
from pathlib import Path

import numpy as np

from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.metadata import read_meta
from pistar.errors import UserError


def open_dataset(
    source: str | Path, *, download: bool = False, revision: str | None = None, check_rows: bool = True
) -> Dataset:
    """Open a folder, or a repository id (`owner/name`) in the LeRobot cache.

    `download` first fetches what is missing from the Hugging Face hub. `check_rows` compares meta/ with the rows of all
    data files (a fraction of a second for a million frames); without it, only meta/ is read.
    """
    dataset, problems = read_meta(find_dataset(source, download=download, revision=revision))
    if problems:
        raise UserError(problems[0].message)
    if check_rows:
        _check_rows(dataset)
    return dataset


def lerobot_home() -> Path:
    """Return the folder in which LeRobot keeps datasets."""
    if home := os.environ.get("HF_LEROBOT_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "lerobot"


def find_dataset(source: str | Path, *, download: bool = False, revision: str | None = None) -> Path:
    """Return the folder of a dataset, given its path or its repository id in the LeRobot cache."""
    path = named = Path(source).expanduser()
    is_repo_id = isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None
    if not path.exists() and is_repo_id:
        path = lerobot_home() / str(source)
        if download:
            _download(str(source), path, revision)
    if not path.is_dir():
        remedy = "name a folder that holds meta/info.json"
        if path != named:
            raise UserError(
                f"neither {named} nor {path} in LeRobot's cache is a folder; {remedy}, or download it: "
                f"`hf download --repo-type dataset {source} --local-dir {path}`, in Python "
                f"open_dataset({source!r}, download=True)."
            )
        raise UserError(f"{path} is a file; {remedy}." if path.exists() else f"{path} does not exist; {remedy}.")
    if not (path / "meta" / "info.json").is_file():
        inner = next(path.glob("*/meta/info.json"), None)
        hint = (
            f"did you mean {inner.parent.parent}?" if inner else "name the folder that holds meta/, data/ and videos/."
        )
        raise UserError(f"{path} has no meta/info.json, so it is not a LeRobot dataset; {hint}")
    return path


def _download(repo_id: str, path: Path, revision: str | None) -> None:
    try:
        import huggingface_hub  # optional: most datasets are on the disk already
    except ImportError:
        raise UserError(
            f"{repo_id} cannot be downloaded without huggingface_hub; pip install 'pistar-rl[hub]', "
            f"or copy the dataset to {path}."
        ) from None
    try:
        huggingface_hub.snapshot_download(repo_id, repo_type="dataset", revision=revision, local_dir=path)
    except Exception as error:  # its errors share no base class across versions
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(
            f"{repo_id} cannot be downloaded ({reason[0]}); check the name and the network, log in if it is private "
            f"(`hf auth login`), or copy it to {path}."
        ) from error


def _check_rows(dataset: Dataset) -> None:
    """Refuse rows that belong to other episodes than meta/ says, or that were recorded at another rate."""
    columns = dataset.columns(["episode_index", "timestamp"])
    seconds = columns["timestamp"].astype(np.float64)
    for episode in dataset.episodes:
        others = columns["episode_index"][episode.rows] != episode.index
        if others.any():
            row = episode.from_row + int(np.argmax(others))
            raise UserError(
                f"Row {row} of {dataset.root} is of episode {columns['episode_index'][row]}, but meta/ says "
                f"{episode.index}; data/ and meta/ are from different recordings: copy or download the dataset again."
            )
        span = seconds[episode.rows][-1] - seconds[episode.rows][0]
        # LeRobot finds frames by timestamp, we by number: beyond half a frame the two would show different frames.
        if not abs(span * dataset.fps - (episode.length - 1)) <= 0.5:
            rate = (episode.length - 1) / span if span > 0 else float("nan")
            raise UserError(
                f"Episode {episode.index} of {dataset.root} runs at {rate:.4g} fps by its timestamps, the dataset at "
                f"{dataset.fps:g}; a dataset has one rate: resample or drop the episode."
            )
