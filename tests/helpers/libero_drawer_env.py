"""LIBERO's "close the top drawer of the cabinet", started with the drawer nearly closed and the hand at its handle."""

from typing import Any

import numpy as np

from pistar.envs.base import EnvOptions, EpisodeStatus, RawObservation, StartEnv
from pistar.envs.suites import libero

GAP = 0.02
"""Metres the drawer is still open when an episode starts."""


class NearlyClosed(StartEnv):
    """Starts as LIBERO does, then a script moves in front of the handle and pushes. The policy does the rest."""

    def __init__(self, options: EnvOptions) -> None:
        self._libero = libero.make("90/0", options)
        super().__init__(self._libero.scene)

    def _begin(self, start_id: int) -> None:
        self._libero.begin(start_id)
        handle = self._data.get_body_xpos("wooden_cabinet_1_cabinet_top") + np.array([0, 0.18, 0.19])
        pushing = False
        for _ in range(100):
            if self.gap < GAP + 0.001:
                return
            direction = handle - self._hand
            pushing = pushing or bool(np.linalg.norm(direction) < 0.03)
            if pushing:
                direction[1] = GAP - self.gap  # ever slower, so that the drawer does not slide on
            self._move_hand(direction)
        raise RuntimeError(f"start state {start_id}: the script left the drawer {self.gap:.3f} m open")

    def _move_hand(self, direction: np.ndarray) -> None:
        """Act once, with the fingers closed and turned side by side, so that the palm does not hit the cabinet."""
        across = self._data.get_site_xmat("gripper0_grip_site")[:, 1]
        turn = np.arctan2(across[0], across[1])
        self._libero.act(np.clip([*(20 * direction), 0, 0, 5 * turn, 1], -1, 1))

    @property
    def gap(self) -> float:
        """How far the drawer is open, in metres."""
        return -float(self._data.get_joint_qpos("wooden_cabinet_1_top_level"))

    @property
    def _hand(self) -> np.ndarray:
        position: np.ndarray = self._data.get_site_xpos("gripper0_grip_site")
        return position

    @property
    def _data(self) -> Any:  # MuJoCo's, of a world that is new in every episode
        return self._libero.simulator.sim.data

    def _act(self, action: np.ndarray) -> EpisodeStatus:
        return self._libero.act(action)[1]

    def observe(self) -> RawObservation:
        return self._libero.observe()

    def close(self) -> None:
        self._libero.close()


def make(options: EnvOptions) -> NearlyClosed:
    return NearlyClosed(options)
