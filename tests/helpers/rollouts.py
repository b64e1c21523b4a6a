"""A policy for toys, and how tests compare episodes and kill the workers they run in."""

import dataclasses
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from pistar.envs.rollout import Request, Rollout
from pistar.envs.vector.vector import Environments
from pistar.types import Episode

CHUNK = 5


def towards_origin(requests: Sequence[Request]) -> np.ndarray:
    """Move a toy towards the origin, with noise that depends only on start state and step."""
    chunks = []
    for request in requests:
        rng = np.random.default_rng([request.start_id, request.step])
        at = request.observation["state"].astype(np.float64)
        chunks.append(-0.3 * at / CHUNK + rng.normal(0, 0.02, (CHUNK, 2)))
    return np.array(chunks)


def assert_same_episode(left: Episode | None, right: Episode | None) -> None:
    """Compare two episodes to the bit."""
    assert left is not None
    assert right is not None
    for field in dataclasses.fields(Episode):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if field.name == "observations":
            assert list(one) == list(other)
            for name in one:
                _assert_same_array(name, one[name], other[name])
        elif isinstance(one, np.ndarray):
            _assert_same_array(field.name, one, other)
        else:
            assert one == other, field.name


def _assert_same_array(name: str, left: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_array_equal(left, right, err_msg=name, strict=True)
    assert left.tobytes() == right.tobytes(), name


def assert_same_episodes(rollouts: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    """Compare their tasks, start states and episodes to the bit."""
    for one, other in zip(rollouts, expected, strict=True):
        assert (one.task, one.start_id) == (other.task, other.start_id)
        assert_same_episode(one.episode, other.episode)


def kill_worker(envs: Environments, number: int) -> None:
    os.kill(envs._workers[number].pid, signal.SIGKILL)


def run_killing(envs: Environments, number: int, rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Run these rollouts, and kill a worker after the first."""
    done: list[Rollout] = []
    for rollout in rollouts:
        if not done:
            kill_worker(envs, number)
        done.append(rollout)
    return done


def assert_without_models(envs: Environments) -> None:
    """Check that the first worker has loaded NumPy, but not JAX."""
    maps = Path(f"/proc/{envs._workers[0].pid}/maps").read_text()
    assert "jaxlib" not in maps
    assert "numpy" in maps
