"""Pictures from processes in which nothing else is drawn, to hold others against."""

import numpy as np

from pistar.envs.env import EnvOptions
from pistar.envs.vector import Environments
from pistar.envs.worker import Begin, Went


def drawn_alone(name: str, options: EnvOptions, start_id: int) -> dict[str, np.ndarray]:
    """What the cameras see where an episode begins, and as `people` what people are shown."""
    with Environments(name, options, count=1, workers=1) as envs:
        went = envs.do({0: Begin(start_id, film=True)})[0]
    assert isinstance(went, Went)
    return {**{camera: went.seen[camera][0] for camera in envs.scene.cameras}, "people": went.film[0]}
