"""Cheap tasks that differ in how they move, and say when they are built and closed; and some that do not fit."""

import dataclasses
import os
import uuid
from pathlib import Path

import numpy as np

from pistar.envs.env import Ending, EnvOptions, Scene, Seen, StartEnv


class Drift(StartEnv):
    """A point that drifts. In `MANY_LOG`, a file `<pid>.<something>` for each that is alive, and `built` with all."""

    def __init__(self, options: EnvOptions, name: str, drift: float, limit: int) -> None:
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
        super().__init__(scene)
        self._drift, self._at = drift, np.zeros(1)
        self._alive: Path | None = None
        if folder := os.environ.get("MANY_LOG"):
            self._alive = Path(folder) / f"{os.getpid()}.{uuid.uuid4().hex}"
            self._alive.touch()
            with (Path(folder) / "built").open("a") as log:
                alive = len(list(Path(folder).glob(f"{os.getpid()}.*")))
                log.write(f"{name} {alive}\n")

    def _begin(self, start_id: int) -> None:
        self._at = np.random.default_rng(start_id).uniform(-1, 1, 1)

    def _act(self, action: np.ndarray) -> Ending:
        self._at = self._at + 0.3 * action + self._drift
        return "success" if self._at[0] > 3 else "goes on"

    def observe(self) -> Seen:
        return {"state": self._at.astype(np.float32)}

    def close(self) -> None:
        if self._alive is not None:
            self._alive.unlink()


def left(options: EnvOptions) -> Drift:
    return Drift(options, "left", -0.1, 7)


def right(options: EnvOptions) -> Drift:
    return Drift(options, "right", 0.3, 11)


def up(options: EnvOptions) -> Drift:
    return Drift(options, "up", 0.05, 9)


def down(options: EnvOptions) -> Drift:
    return Drift(options, "down", -0.02, 5)


def few(options: EnvOptions) -> Drift:
    """Start states to be judged by."""
    made = Drift(options, "few", 0.1, 3)
    made.scene = dataclasses.replace(made.scene, held_out=range(100, 104))
    return made


def of_another_robot(options: EnvOptions) -> Drift:
    made = left(options)
    made.scene = dataclasses.replace(made.scene, robot="line")
    return made


def with_a_camera(options: EnvOptions) -> Drift:
    made = left(options)
    made.scene = dataclasses.replace(made.scene, cameras={"eye": (8, 8)})
    return made


def stronger(options: EnvOptions) -> Drift:
    made = left(options)
    made.scene = dataclasses.replace(made.scene, action_high=(2.0,))
    return made
