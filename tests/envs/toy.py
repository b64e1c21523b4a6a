"""A cheap environment for tests of what is around environments; told by files to fail as real ones do."""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np

from pistar.envs.env import Ending, EnvOptions, Scene, Seen, StartEnv
from pistar.errors import UserError


class Toy(StartEnv):
    """A point on a plane, to come near the origin. In `TOY_TROUBLE`, `<start>.<kind>` files work once, or always."""

    def __init__(self, options: EnvOptions) -> None:
        size = options.image_size
        cameras = dict.fromkeys(options.cameras or (), (size, size))
        super().__init__(
            Scene(
                name="toy",
                robot="toy",
                instruction="come home",
                fps=10,
                limit=options.limit or 20,
                action_low=(-0.2, -0.2),
                action_high=(0.2, 0.2),
                train=range(100),
                held_out=range(100, 200),
                cameras=cameras,
            )
        )
        self._at = np.zeros(2)
        self._broken = self._spoilt = False

    def _begin(self, start_id: int) -> None:
        folder = os.environ.get("TOY_TROUBLE")
        if folder and (Path(folder) / f"{start_id}.never").exists():
            raise OSError("the scene's file is gone")
        self._at = np.random.default_rng(start_id).uniform(-1, 1, 2)
        self._number = start_id
        self._broken = False

    def _act(self, action: np.ndarray) -> Ending:
        self._trouble()
        self._at = self._at + action + 0.01 * np.sin(7 * self._at[::-1])
        return "success" if np.linalg.norm(self._at) < 0.1 else "goes on"

    def _trouble(self) -> None:
        folder = os.environ.get("TOY_TROUBLE")
        for path in Path(folder).glob(f"{self._number}.*") if folder else ():
            if path.suffix not in (".always", ".deadly") and not taken(path):
                continue
            if path.suffix in (".kill", ".deadly"):
                os.kill(os.getpid(), signal.SIGKILL)
            if path.suffix == ".hang":
                time.sleep(1000)
            if path.suffix in (".raise", ".always"):
                raise ArithmeticError("the solver gave up")
            if path.suffix == ".refuse":
                raise UserError("Camera a of toy renders one colour only.")
            if path.suffix == ".nan":
                self._broken = True
            if path.suffix == ".spoil":  # for good: no new beginning mends it
                self._spoilt = True

    def observe(self) -> Seen:
        at = self._at.astype(np.float32)
        pictures = {name: self.render() for name in self.scene.cameras}
        return {"state": np.full_like(at, np.nan) if self._broken or self._spoilt else at, **pictures}

    def render(self) -> np.ndarray:
        size = next(iter(self.scene.cameras.values()), (8, 8))[0]
        picture = np.zeros((size, size, 3), np.uint8)
        picture[:, :, 0], picture[:, :, 1] = (np.uint8(100 + 50 * np.clip(x, -2, 2)) for x in self._at)
        return picture

    def expert_action(self) -> np.ndarray:
        return -self._at


def taken(path: Path) -> bool:
    """Whether the file was there and is now gone by our doing: of simulators that look at once, one has the trouble."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        return True
    return False


def make(options: EnvOptions) -> Toy:
    folder = os.environ.get("TOY_TROUBLE")
    if folder and any(taken(path) for path in sorted(Path(folder).glob("make.kill*"))):
        os.kill(os.getpid(), signal.SIGKILL)
    return Toy(options)


def no_environment(options: EnvOptions) -> EnvOptions:
    return options
