"""Your own simulator: what pistar needs of it, and the first episodes in it.

python examples/your_own_simulator.py
PYTHONPATH=examples pistar eval CHECKPOINT --env your_own_simulator:make    # a policy for its robot, judged in it
"""

from collections.abc import Sequence

import numpy as np

from pistar.envs.env import Ending, EnvOptions, Scene, Seen, StartEnv


class Table(StartEnv):
    """A hand on a table of one square metre is to reach a cup; an action moves it along x and y."""

    def _begin(self, start_id: int) -> None:
        # All chance comes from the number: the same number is the same start, to the bit.
        self._hand, self._cup = np.random.default_rng(start_id).uniform(0, 1, (2, 2))

    def _act(self, action: np.ndarray) -> Ending:
        self._hand = np.clip(self._hand + action, 0, 1)
        return "success" if np.linalg.norm(self._hand - self._cup) < 0.03 else "goes on"  # or "failure": all is lost

    def observe(self) -> Seen:
        """By the robot's names, as `pistar.data.robots` has them. Pictures would be uint8, [height, width, 3]."""
        return {"state": np.concatenate([self._hand, self._cup]).astype(np.float32)}


def make(options: EnvOptions) -> Table:
    """What `--env` names."""
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
    from pistar.envs.rollout import Request, roll_out  # here, for it imports JAX, which simulators do without
    from pistar.envs.vector import Environments

    def act(requests: Sequence[Request]) -> np.ndarray:
        """A chunk of five actions for each that asks: straight to the cup."""
        states = np.array([request.observation["state"] for request in requests])
        return np.repeat((states[:, None, 2:] - states[:, None, :2]) / 5, 5, axis=1)

    with Environments("your_own_simulator:make", count=4, workers=0) as environments:
        rollouts = list(roll_out(environments, environments.scene.held_out[:8], act, execute=5))
    successes = [rollout.episode is not None and rollout.episode.success for rollout in rollouts]
    print(f"{sum(successes)} of {len(successes)} episodes succeeded")
