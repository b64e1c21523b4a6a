"""A family of two toys: one that begins at home, and one that begins far away."""

from collections.abc import Mapping, Sequence

import numpy as np

from envs.toy import Toy
from pistar.envs.env import EnvOptions, Scene


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
