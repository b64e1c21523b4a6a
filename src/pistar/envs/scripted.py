"""Scripts that act without a policy, to collect data. `Script` names one, and workers start it for every episode."""

import numpy as np

from pistar.envs.base import StartEnv
from pistar.envs.suites.metaworld import MetaWorld
from pistar.envs.vector.worker import ScriptedAct
from pistar.errors import UserError

GRIPPER_OPEN = -1.0


def expert(env: StartEnv, rng: np.random.Generator, noise: float = 0.0) -> ScriptedAct:
    """Follow the environment's scripted expert, with Gaussian noise of this deviation, in the action's units."""
    return lambda: env.expert_action() + noise * rng.normal(size=env.scene.action_dim)


def mixed(env: StartEnv, rng: np.random.Generator, noise: float = 0.1, spoilt: float = 0.75) -> ScriptedAct:
    """Follow Meta-World's expert in segments of 6 to 14 steps, and corrupt this fraction of them without marking which.

    A corrupted segment is a constant random action, a gripper that stays open, or the expert's action for an object or
    a goal that is 6 to 12 cm away from where it is. So failures contain good segments and successes bad ones: data that
    imitation cannot sort out.
    """
    if not isinstance(env, MetaWorld):
        raise UserError(f"{env.scene.name} has no mixed expert, only Meta-World has one; collect with --expert.")
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
        none = np.zeros(2)
        action = env.shifted_expert_action(shift if kind == 3 else none, shift if kind == 4 else none)
        if kind == 1:
            action = constant
        if kind == 2:
            action = np.append(action[:3], GRIPPER_OPEN)
        return action + noise * rng.normal(size=4)

    return act
