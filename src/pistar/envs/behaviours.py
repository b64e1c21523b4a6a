"""Those who act without a policy, to collect data: `Script`s name them, and workers make one for every episode."""

import numpy as np

from pistar.envs.env import StartEnv
from pistar.envs.metaworld import MetaWorld
from pistar.envs.worker import Behaviour
from pistar.errors import UserError

GRIPPER_OPEN = -1.0


def expert(env: StartEnv, rng: np.random.Generator, noise: float = 0.0) -> Behaviour:
    """The environment's own script; each action with noise of this deviation, in the action's units."""
    return lambda: env.expert_action() + noise * rng.normal(size=env.scene.action_dim)


def mixed(env: StartEnv, rng: np.random.Generator, noise: float = 0.1, spoilt: float = 0.75) -> Behaviour:
    """Meta-World's script in segments of 6 to 14 steps, so many of them spoilt, and nobody is told which.

    A spoilt segment is a constant random action, a gripper that stays open, or an object or a goal believed to be 6 to
    12 cm from where it is. So failures hold good segments and successes bad ones: data that imitation cannot sort out.
    """
    if not isinstance(env, MetaWorld):
        raise UserError(f"{env.scene.name} has no mixed expert, which is for Meta-World; collect with --expert.")
    left, kind, shift, constant = 0, 0, np.zeros(2), np.zeros(4)

    def act() -> np.ndarray:
        nonlocal left, kind, shift, constant
        if left == 0:
            left = int(rng.integers(6, 15))
            kind = int(rng.integers(1, 5)) if rng.random() < spoilt else 0
            angle, distance = rng.uniform(0, 2 * np.pi), rng.uniform(0.06, 0.12)
            shift = distance * np.array([np.cos(angle), np.sin(angle)])
            constant = rng.uniform(-1, 1, 4)
        left -= 1
        nowhere = np.zeros(2)
        action = env.misled_expert_action(shift if kind == 3 else nowhere, shift if kind == 4 else nowhere)
        if kind == 1:
            action = constant
        if kind == 2:
            action = np.append(action[:3], GRIPPER_OPEN)
        return action + noise * rng.normal(size=4)

    return act
