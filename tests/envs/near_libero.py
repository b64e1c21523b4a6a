"""LIBERO's "close the top drawer of the cabinet", begun with the drawer nearly closed and the fingers at its handle."""

from typing import Any

import numpy as np

from pistar.envs import libero
from pistar.envs.env import Ending, EnvOptions, Seen, StartEnv

LEFT = 0.02
"""Metres by which the drawer is still open when an episode begins."""


class NearlyClosed(StartEnv):
    """Begins as LIBERO does, and goes on by a script: to before the handle, and push. The rest is the policy's."""

    def __init__(self, options: EnvOptions) -> None:
        self._inside = libero.make("90/0", options)
        super().__init__(self._inside.scene)

    def _begin(self, start_id: int) -> None:
        self._inside.begin(start_id)
        before = self._data.get_body_xpos("wooden_cabinet_1_cabinet_top") + np.array([0, 0.18, 0.19])
        there = False
        for _ in range(100):
            if self.opened < LEFT + 0.001:
                return
            way = before - self._hand
            there = there or bool(np.linalg.norm(way) < 0.03)
            if there:
                way[1] = LEFT - self.opened  # slower and slower, lest the drawer runs on
            self._reach(way)
        raise RuntimeError(f"start state {start_id}: the script left the drawer {self.opened:.3f} m open")

    def _reach(self, way: np.ndarray) -> None:
        """One action that way, with the fingers closed and turned side by side, lest the palm strikes the cabinet."""
        across = self._data.get_site_xmat("gripper0_grip_site")[:, 1]
        turn = np.arctan2(across[0], across[1])
        self._inside.act(np.clip([*(20 * way), 0, 0, 5 * turn, 1], -1, 1))

    @property
    def opened(self) -> float:
        """How far the drawer is, in metres."""
        return -float(self._data.get_joint_qpos("wooden_cabinet_1_top_level"))

    @property
    def _hand(self) -> np.ndarray:
        at: np.ndarray = self._data.get_site_xpos("gripper0_grip_site")
        return at

    @property
    def _data(self) -> Any:  # MuJoCo's, of a world that is new in every episode
        return self._inside.simulator.sim.data

    def _act(self, action: np.ndarray) -> Ending:
        return self._inside.act(action)[1]

    def observe(self) -> Seen:
        return self._inside.observe()

    def close(self) -> None:
        self._inside.close()


def make(options: EnvOptions) -> NearlyClosed:
    return NearlyClosed(options)
