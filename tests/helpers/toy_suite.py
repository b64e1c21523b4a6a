"""A suite of two toys: one starts at its goal, the other far away."""

from collections.abc import Mapping, Sequence

import numpy as np

from pistar.envs.base import EnvOptions, Scene

from helpers.toy_env import Toy


class AtHome(Toy):
    def _begin(self, start_id: int) -> None:
        super()._begin(start_id)
        self._at = np.full(2, 0.01)


def tasks() -> Mapping[str, Sequence[str]]:
    return {"both": ["home", "far"], "home": ["home"], "far": ["far"]}


def scene(task: str, options: EnvOptions) -> Scene:
    return make(task, options).scene


def make(task: str, options: EnvOptions) -> Toy:
    return AtHome(options) if task == "home" else Toy(options)
