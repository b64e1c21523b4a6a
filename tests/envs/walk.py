"""A cheap environment of Meta-World's robot for tests of practice: walk far enough to the right, and not too high."""

import os
import signal
from pathlib import Path

import numpy as np

from envs.toy import taken
from pistar.envs.env import Ending, EnvOptions, Scene, Seen, StartEnv


class Walk(StartEnv):
    """Of the 17 numbers the first two are where it is. In the folder `WALK_TROUBLE`, `<start>.always` makes a start
    raise; and once each, `.raised` makes it raise, `.died` its process die, `.hung` stand still, `.nan` see NaN."""

    def __init__(self, options: EnvOptions, *, pit: bool = False) -> None:
        """`pit`: who goes too low falls, which is a failure."""
        self._pit = pit
        super().__init__(
            Scene(
                name="walk",
                robot="metaworld",
                instruction="go right",
                fps=10,
                limit=options.limit or 12,
                action_low=(-1.0,) * 4,
                action_high=(1.0,) * 4,
                train=range(50),
                held_out=range(100, 200),
                things=(((0,), (1,)),),
            )
        )
        self._at = np.zeros(2)
        self._blind = False

    def _begin(self, start_id: int) -> None:
        self._at = np.random.default_rng(start_id).uniform(-0.2, 0.2, 2)
        self._number, self._blind = start_id, False

    def _act(self, action: np.ndarray) -> Ending:
        if self._troubled("always", once=False) or self._troubled("raised"):
            raise ArithmeticError("the floor gave way")
        if self._troubled("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._troubled("hung"):
            os.kill(os.getpid(), signal.SIGSTOP)
        self._blind |= self._troubled("nan")
        self._at = self._at + 0.25 * action[:2]
        if self._pit and self._at[1] < -0.2:
            return "failure"
        return "success" if self._at[0] > 0.6 and abs(self._at[1]) < 0.4 else "goes on"

    def _troubled(self, how: str, *, once: bool = True) -> bool:
        folder = os.environ.get("WALK_TROUBLE")
        path = Path(folder, f"{self._number}.{how}") if folder else None
        return path is not None and (taken(path) if once else path.exists())

    def observe(self) -> Seen:
        state = np.zeros(17, np.float32)
        state[:2] = np.nan if self._blind else self._at
        return {"state": state}


def make(options: EnvOptions) -> Walk:
    return Walk(options)


def make_with_pit(options: EnvOptions) -> Walk:
    return Walk(options, pit=True)
