"""Weights of a dataset's windows on disk. A critic computes them once; imitation then draws windows by them."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from pistar.errors import UserError


def write_weights(path: Path, datasets: Sequence[str], weights: Sequence[Float[np.ndarray, " _"]]) -> None:
    """Write one weight for every frame, that of the window that starts there. Write all of the file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("wb") as file:
        arrays: dict[str, Any] = {str(i): each for i, each in enumerate(weights)}
        np.savez_compressed(file, datasets=np.array(list(datasets)), **arrays)
    aside.replace(path)


def read_weights(path: Path, datasets: Sequence[str], frames: Sequence[int]) -> list[Float[np.ndarray, " _"]]:
    """Read the weights that `write_weights` wrote for these datasets, which have `frames` frames each."""
    try:
        with np.load(path) as file:
            names = [str(name) for name in file["datasets"]]
            weights = [file[str(i)] for i in range(len(names))]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} holds no window weights ({error}); name a file that `pistar data weigh` wrote."
        ) from error
    if [Path(name).name for name in names] != [Path(name).name for name in datasets]:
        raise UserError(
            f"{path} is for {', '.join(names)} and this run has {', '.join(datasets)}; "
            "run `pistar data weigh` for these, in this order."
        )
    for name, each, count in zip(names, weights, frames, strict=True):
        if len(each) != count:
            raise UserError(
                f"{path} has {len(each)} frames of {name}, which now has {count}; run `pistar data weigh` again."
            )
    return weights
