"""A cheap environment of Meta-World's robot, for tests of practice: walk far enough to the right, and not too high."""

import numpy as np

from pistar.envs.base import EnvOptions, EpisodeStatus, RawObservation, Scene

from helpers.point_env import PointEnv


class Walk(PointEnv):
    """The first two of the state's 17 numbers are the position; the others are 0."""

    def __init__(self, options: EnvOptions, *, pit: bool = False) -> None:
        """`pit`: going too low is a failure."""
        self._pit = pit
        scene = Scene(
            name="walk",
            robot="metaworld",
            instruction="go right",
            fps=10,
            limit=options.limit or 12,
            action_low=(-1.0,) * 4,
            action_high=(1.0,) * 4,
            train=range(50),
            held_out=range(100, 200),
            state_noise_groups=(((0,), (1,)),),
        )
        super().__init__(scene, spread=0.2)

    def _move(self, action: np.ndarray) -> EpisodeStatus:
        self._at = self._at + 0.25 * action[:2]
        if self._pit and self._at[1] < -0.2:
            return "failure"
        return "success" if self._at[0] > 0.6 and abs(self._at[1]) < 0.4 else "running"

    def observe(self) -> RawObservation:
        state = np.zeros(17, np.float32)
        state[:2] = self._observed
        return {"state": state}


def make(options: EnvOptions) -> Walk:
    return Walk(options)


def make_with_pit(options: EnvOptions) -> Walk:
    return Walk(options, pit=True)
