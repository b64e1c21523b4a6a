"""Your own simulator: what pistar needs from it, and a few episodes.

python examples/your_own_simulator.py
PYTHONPATH=examples pistar eval CHECKPOINT --env your_own_simulator:make    # evaluate a policy for its robot in it
"""

from collections.abc import Sequence

import numpy as np

from pistar.envs.base import EnvOptions, EpisodeStatus, RawObservation, Scene, StartEnv


class Table(StartEnv):
    """A hand on a table of one square metre has to reach a cup. An action moves the hand along x and y."""

    def _begin(self, start_id: int) -> None:
        # All randomness comes from the number, so the same number gives the same start to the bit.
        self._hand, self._cup = np.random.default_rng(start_id).uniform(0, 1, (2, 2))

    def _act(self, action: np.ndarray) -> EpisodeStatus:
        self._hand = np.clip(self._hand + action, 0, 1)
        return "success" if np.linalg.norm(self._hand - self._cup) < 0.03 else "running"  # "failure" ends it, too

    def observe(self) -> RawObservation:
        """Return arrays under the robot's names, as in `pistar.data.robots`. Images are uint8, [height, width, 3]."""
        return {"state": np.concatenate([self._hand, self._cup]).astype(np.float32)}


def make(options: EnvOptions) -> Table:
    """Build the environment that `--env` names."""
    scene = Scene(
        name="table",
        robot="table",
        instruction="reach the cup",
        fps=10,
        limit=options.limit or 50,
        action_low=(-0.05, -0.05),
        action_high=(0.05, 0.05),
        train=range(1000),
        held_out=range(1000, 1100),
    )
    return Table(scene)


if __name__ == "__main__":
    from pistar.envs.rollout import Request, roll_out  # not at the top: it imports JAX, and workers should not
    from pistar.envs.vector.vector import Environments

    def act(requests: Sequence[Request]) -> np.ndarray:
        """Return a chunk of five actions for each request: straight to the cup."""
        states = np.array([request.observation["state"] for request in requests])
        return np.repeat((states[:, None, 2:] - states[:, None, :2]) / 5, 5, axis=1)

    with Environments("your_own_simulator:make", count=4, workers=0) as environments:
        rollouts = list(roll_out(environments, environments.scene.held_out[:8], act, execute=5))
    successes = [rollout.episode is not None and rollout.episode.success for rollout in rollouts]
    print(f"{sum(successes)} of {len(successes)} episodes succeeded")
