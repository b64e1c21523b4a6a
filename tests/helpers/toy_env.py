"""A cheap environment of a robot called toy: a point on a plane has to come near the origin."""

import numpy as np

from pistar.envs.base import EnvOptions, EpisodeStatus, RawObservation, Scene

from helpers.point_env import PointEnv


class Toy(PointEnv):
    """Actions move the point; its cameras show its position as a colour."""

    def __init__(self, options: EnvOptions) -> None:
        scene = Scene(
            name="toy",
            robot="toy",
            instruction="come home",
            fps=10,
            limit=options.limit or 20,
            action_low=(-0.2, -0.2),
            action_high=(0.2, 0.2),
            train=range(100),
            held_out=range(100, 200),
            cameras=dict.fromkeys(options.cameras or (), (options.image_size, options.image_size)),
        )
        super().__init__(scene, spread=1.0)

    def _move(self, action: np.ndarray) -> EpisodeStatus:
        self._at = self._at + action + 0.01 * np.sin(7 * self._at[::-1])
        return "success" if np.linalg.norm(self._at) < 0.1 else "running"

    def observe(self) -> RawObservation:
        return {**super().observe(), **{name: self.render() for name in self.scene.cameras}}

    def render(self) -> np.ndarray:
        size = next(iter(self.scene.cameras.values()), (8, 8))[0]
        image = np.zeros((size, size, 3), np.uint8)
        image[:, :, 0], image[:, :, 1] = (np.uint8(100 + 50 * np.clip(x, -2, 2)) for x in self._at)
        return image

    def expert_action(self) -> np.ndarray:
        return -self._at


def make(options: EnvOptions) -> Toy:
    return Toy(options)


def no_environment(options: EnvOptions) -> EnvOptions:
    return options
