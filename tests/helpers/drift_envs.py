"""Cheap tasks of one robot that differ in how they move and log when they are built; and variants that do not match."""

import dataclasses
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from pistar.envs.base import EnvOptions, EpisodeStatus, Scene

from helpers.point_env import PointEnv

BUILD_LOG = "ENV_BUILD_LOG"
"""Environment variable of a folder. It has a file `<pid>.<id>` for each task that is alive. A line is added to the file
`built` for each that is built: its name, and how many its process then has."""


class Drift(PointEnv):
    """A point on a line that drifts; actions push it."""

    def __init__(self, options: EnvOptions, name: str, drift: float, limit: int, **changes: Any) -> None:
        """`changes`: fields of the scene."""
        scene = Scene(
            name=name,
            robot="point",
            instruction=f"go {name}",
            fps=10,
            limit=options.limit or limit,
            action_low=(-1.0,),
            action_high=(1.0,),
            train=range(100),
            held_out=range(100, 200),
        )
        super().__init__(dataclasses.replace(scene, **changes), spread=1.0, dims=1)
        self._drift = drift
        self._alive: Path | None = None
        if folder := os.environ.get(BUILD_LOG):
            self._alive = Path(folder) / f"{os.getpid()}.{uuid.uuid4().hex}"
            self._alive.touch()
            alive = len(list(Path(folder).glob(f"{os.getpid()}.*")))
            with (Path(folder) / "built").open("a") as log:
                log.write(f"{name} {alive}\n")

    def _move(self, action: np.ndarray) -> EpisodeStatus:
        self._at = self._at + 0.3 * action + self._drift
        return "success" if self._at[0] > 3 else "running"

    def close(self) -> None:
        if self._alive is not None:
            self._alive.unlink()


def built(folder: Path) -> list[tuple[str, int]]:
    """Read the log: tasks in the order they were built, and how many their process then had."""
    lines = (folder / "built").read_text().splitlines()
    return [(name, int(alive)) for name, alive in (line.split() for line in lines)]


def left(options: EnvOptions, **changes: Any) -> Drift:
    return Drift(options, "left", -0.1, 7, **changes)


def right(options: EnvOptions) -> Drift:
    return Drift(options, "right", 0.3, 11)


def up(options: EnvOptions) -> Drift:
    return Drift(options, "up", 0.05, 9)


def down(options: EnvOptions) -> Drift:
    return Drift(options, "down", -0.02, 5)


def few(options: EnvOptions) -> Drift:
    """Has only four held-out start states."""
    return Drift(options, "few", 0.1, 3, held_out=range(100, 104))


def of_another_robot(options: EnvOptions) -> Drift:
    return left(options, robot="line")


def with_a_camera(options: EnvOptions) -> Drift:
    return left(options, cameras={"eye": (8, 8)})


def stronger(options: EnvOptions) -> Drift:
    return left(options, action_high=(2.0,))
