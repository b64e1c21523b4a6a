"""A point that actions move: what the cheap environments of the tests have in common, and how they are made to fail.

A test names a folder in the environment variable INJECTED_FAULTS. A file `<start>.<kind>` in it makes the next step
from that start state fail as a real simulator may, and is removed:

    raised   the step raises              died     the process is killed        hung     the process sleeps
    nan      the episode observes NaN     refused  the step raises a UserError  stopped  the process is stopped
    broken   this environment observes NaN from now on, in later episodes, too

These stay, and work every time: `always` (raised), `deadly` (died), `never` (the episode cannot begin). A file
`build.died<anything>` kills the process that builds the next environment.
"""

import abc
import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np

from pistar.envs.base import EpisodeStatus, RawObservation, Scene, StartEnv
from pistar.errors import UserError

FAULTS = "INJECTED_FAULTS"


class PointEnv(StartEnv):
    """Starts at a uniform random position within ±`spread`, drawn from the start state's number."""

    def __init__(self, scene: Scene, spread: float, dims: int = 2) -> None:
        if (folder := _folder()) and any(_take(path) for path in sorted(folder.glob("build.died*"))):
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(scene)
        self._spread, self._at, self._number = spread, np.zeros(dims), 0
        self._nan = self._broken = False

    def _begin(self, start_id: int) -> None:
        self._number, self._nan = start_id, False
        if self._stays("never"):
            raise OSError("the scene's file is gone")
        self._at = np.random.default_rng(start_id).uniform(-self._spread, self._spread, len(self._at))

    def _act(self, action: np.ndarray) -> EpisodeStatus:
        if _folder():
            self._fail()
        return self._move(action)

    @abc.abstractmethod
    def _move(self, action: np.ndarray) -> EpisodeStatus:
        """Change `_at`."""

    @property
    def _observed(self) -> np.ndarray:
        """Where the point is, or NaN."""
        at = self._at.astype(np.float32)
        return np.full_like(at, np.nan) if self._nan or self._broken else at

    def observe(self) -> RawObservation:
        return {"state": self._observed}

    def _fail(self) -> None:
        if self._stays("deadly") or self._once("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._once("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._once("hung"):
            time.sleep(1000)
        if self._stays("always") or self._once("raised"):
            raise ArithmeticError("the solver gave up")
        if self._once("refused"):
            raise UserError(f"Camera a of {self.scene.name} renders one colour only.")
        self._nan |= self._once("nan")
        self._broken |= self._once("broken")

    def _once(self, kind: str) -> bool:
        folder = _folder()
        return folder is not None and _take(folder / f"{self._number}.{kind}")

    def _stays(self, kind: str) -> bool:
        folder = _folder()
        return folder is not None and (folder / f"{self._number}.{kind}").exists()


def _folder() -> Path | None:
    folder = os.environ.get(FAULTS)
    return Path(folder) if folder else None


def _take(path: Path) -> bool:
    """Remove the file. True if we did: if several simulators see it at once, only one fails."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        return True
    return False
