"""Images rendered in a process where nothing else is rendered, to compare others with."""

import numpy as np

from pistar.envs.base import EnvOptions
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import ChunkResult, Reset


def render_alone(name: str, options: EnvOptions, start_id: int) -> dict[str, np.ndarray]:
    """Render a start state by all cameras, and for people as `people`."""
    with Environments(name, options, count=1, workers=1) as envs:
        result = envs.do({0: Reset(start_id, film=True)})[0]
    assert isinstance(result, ChunkResult)
    return {**{camera: result.observations[camera][0] for camera in envs.scene.cameras}, "people": result.film[0]}
