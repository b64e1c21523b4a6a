"""Meta-World's 50 tasks of a Sawyer arm, with their scripted experts and an instruction for each task."""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import pickle
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, UInt8

from pistar.envs.base import (
    EnvOptions,
    EpisodeStatus,
    RawObservation,
    Scene,
    StartEnv,
    missing_package,
    select_cameras,
)
from pistar.envs.rendering import Cameras, headless

INSTRUCTIONS = {
    "assembly-v3": "pick up the wrench and put its ring on the peg",
    "basketball-v3": "put the ball into the basket",
    "bin-picking-v3": "move the block from one bin to the other",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from above",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "reach over the wall and press the button",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "take the ring of the wrench off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "turn the faucet off",
    "faucet-open-v3": "turn the faucet on",
    "hammer-v3": "hammer the nail into the wall",
    "hand-insert-v3": "put the gripper into the hole",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "put the peg into the hole in the side of the box",
    "peg-unplug-side-v3": "pull the peg out of the hole",
    "pick-out-of-hole-v3": "take the puck out of the hole",
    "pick-place-v3": "pick up the puck and bring it to the goal",
    "pick-place-wall-v3": "lift the puck over the wall and bring it to the goal",
    "plate-slide-back-side-v3": "slide the plate out of the goal to the side",
    "plate-slide-back-v3": "slide the plate back out of the goal",
    "plate-slide-side-v3": "slide the plate into the goal at the side",
    "plate-slide-v3": "slide the plate into the goal",
    "push-back-v3": "push the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck round the wall to the goal",
    "reach-v3": "move the gripper to the goal",
    "reach-wall-v3": "move the gripper over the wall to the goal",
    "shelf-place-v3": "put the block on the shelf",
    "soccer-v3": "kick the ball into the goal",
    "stick-pull-v3": "hook the box with the stick and pull it to the goal",
    "stick-push-v3": "push the box to the goal with the stick",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-close-v3": "slide the window shut",
    "window-open-v3": "slide the window open",
}

CAMERAS = ("corner", "corner2", "corner3", "corner4", "topview", "behindGripper", "gripperPOV")
UPSIDE_DOWN = ("corner", "corner2", "corner3")
"""Cameras that are mounted upside down in Meta-World's model."""

STATE = np.r_[0:7, 18:25, 36:39]
"""Indices of the 39 numbers that are the state: hand, gripper and object, now and a step ago, and the goal.

These are few enough for π₀'s 32. The rest, rotations and a second object, is only in `environment_state`.
"""
STATE_NOISE_GROUPS = (((0, 7), (1, 8), (2, 9)), ((4, 11), (5, 12), (6, 13)), ((14,), (15,), (16,)))
"""Indices of these 17: x, y, z of the hand and of the object, each now and a step ago, and of the goal."""
MAX_STEPS = 500
"""Meta-World's own limit."""


def tasks() -> Mapping[str, Sequence[str]]:
    """List all tasks."""
    return {name: [name] for name in INSTRUCTIONS}


def scene(task: str, options: EnvOptions) -> Scene:
    """Describe a task."""
    _import_metaworld(options)  # so that a missing package is reported first
    cameras = select_cameras("Meta-World", options, [f"images/{name}" for name in CAMERAS], ())
    return Scene(
        name=f"metaworld/{task}",
        robot="metaworld",
        instruction=INSTRUCTIONS[task],
        fps=80,
        limit=options.limit or MAX_STEPS,
        action_low=(-1.0,) * 4,
        action_high=(1.0,) * 4,
        train=range(10_000),
        held_out=range(1_000_000, 1_010_000),
        cameras=dict.fromkeys(cameras, (options.image_size, options.image_size)),
        state_noise_groups=STATE_NOISE_GROUPS,
    )


def make(task: str, options: EnvOptions) -> "MetaWorld":
    """Build an environment of a task."""
    return MetaWorld(task, options)


class MetaWorld(StartEnv):
    """A task of Meta-World's. The start state's number is the seed with which it places its object and goal."""

    def __init__(self, task: str, options: EnvOptions) -> None:
        super().__init__(scene(task, options))
        self._size, self._task = options.image_size, task
        kinds, experts = _import_metaworld(options)
        self._sim = kinds[task]()
        self._sim.max_path_length = self.scene.limit
        _speed_up(self._sim)
        self._cameras = Cameras(self._sim.model, self.scene.name, options.shadows)
        self._expert = experts[task]()
        self._start_vector = functools.lru_cache(maxsize=1000)(self._draw_start)
        self._now = np.zeros(39)

    def _begin(self, start_id: int) -> None:
        from metaworld.types import Task

        start = {"env_cls": type(self._sim), "rand_vec": self._start_vector(start_id), "partially_observable": False}
        self._sim.set_task(Task(self._task, pickle.dumps(start)))
        self._now = _reset(self._sim)

    def _draw_start(self, start_id: int) -> Float[np.ndarray, " v"]:
        """Return the places that Meta-World draws with this seed, under its own constraints."""
        sim = self._sim
        sim._freeze_rand_vec, sim.seeded_rand_vec = False, True
        sim.seed(start_id)
        with _hand_at_rest(sim):
            sim.reset()
        drawn: np.ndarray = sim._last_rand_vec.copy()
        return drawn

    def _act(self, action: np.ndarray) -> EpisodeStatus:
        self._now, _, _, _, info = self._sim.step(action)
        return "success" if info["success"] else "running"

    def observe(self) -> RawObservation:
        """Return the state, and the requested cameras under `images/`."""
        return {
            "state": self._now[STATE].astype(np.float32),
            "environment_state": self._now.astype(np.float32),
            **{name: self._render(name.removeprefix("images/")) for name in self.scene.cameras},
        }

    def render(self) -> UInt8[np.ndarray, "h w 3"]:
        """Render the view from the corner that sees most."""
        return self._render("corner2")

    def _render(self, camera: str) -> UInt8[np.ndarray, "h w 3"]:
        image = self._cameras.render(self._sim.data, camera, self._size, self._size)
        return image[::-1, ::-1] if camera in UPSIDE_DOWN else image

    def expert_action(self) -> Float[np.ndarray, " 4"]:
        """Return the action of Meta-World's script."""
        return self.shifted_expert_action()

    def shifted_expert_action(
        self, object_shift: npt.ArrayLike = (0.0, 0.0), goal_shift: npt.ArrayLike = (0.0, 0.0)
    ) -> Float[np.ndarray, " 4"]:
        """Return the script's action as if object and goal were shifted by these metres along x and y."""
        shifted = self._now.copy()
        shifted[4:6] += np.asarray(object_shift)
        shifted[36:38] += np.asarray(goal_shift)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that its action is clipped, which is intended
            action: np.ndarray = np.clip(self._expert.get_action(shifted), -1, 1)
        return action

    def close(self) -> None:
        """Free graphics memory."""
        self._cameras.close()


# --- Speed -----------------------------------------------------------------------------------------------------------
# MuJoCo takes a tenth of the time of Meta-World's step. The functions below shorten or skip the rest. Observations and
# successes stay the same: a test compares all fifty tasks with the originals.


def _speed_up(sim: Any) -> None:  # noqa: ANN401  # Meta-World has no types
    sim.touching_object = functools.partial(touching, sim)
    sim._gripper_caging_reward = lambda *_, **__: 0.0  # part of a reward that is not used
    original = type(sim)._get_quat_objects
    names = {**original.__globals__, "Rotation": QuickRotation}  # for this object only; the class stays as it is
    sim._get_quat_objects = types.FunctionType(original.__code__, names, closure=original.__closure__).__get__(sim)


def _reset(sim: Any) -> Float[np.ndarray, " 39"]:  # noqa: ANN401
    """Do what its `reset` does, and return the same. That sets everything up twice, because the first time the hand
    meets the furniture of the last episode; but the first time the hand need not move."""
    from gymnasium.envs.mujoco import MujocoEnv

    sim.curr_path_length = 0
    with _hand_at_rest(sim):
        sim.reset_model()
    observation: np.ndarray = MujocoEnv.reset(sim)[0].astype(np.float64)
    if type(sim).__name__ in ("SawyerPushEnvV3", "SawyerPushBackEnvV3"):
        sim.data.site("goal").xpos = sim.model.site("goal").pos  # at the height of the puck, which the hand has touched
    sim._prev_obs = observation[:18].copy()
    observation[18:36] = sim._prev_obs
    return observation


@contextlib.contextmanager
def _hand_at_rest(sim: Any) -> Iterator[None]:  # noqa: ANN401
    sim._reset_hand = lambda *_, **__: setattr(sim, "init_tcp", sim.tcp_center)  # all it does besides moving the hand
    try:
        yield
    finally:
        del sim._reset_hand


def touching(sim: Any, geom: int) -> bool:  # noqa: ANN401
    """Say whether both fingers press on a geom. Meta-World asks this after every step, with loops over all contacts."""
    contacts = sim.data.contact
    pressed = (contacts.geom == geom).any(axis=1)
    pads = [(contacts.geom == sim.data.geom(pad).id).any(axis=1) for pad in ("leftpad_geom", "rightpad_geom")]
    return all(sim.data.efc_force[contacts.efc_address[pad & pressed]].sum() > 0 for pad in pads)


@dataclasses.dataclass(frozen=True)
class QuickRotation:
    """Replaces SciPy's `Rotation` in Meta-World's tasks, where one conversion takes longer than a step of MuJoCo."""

    matrix: Float[np.ndarray, "3 3"]

    @classmethod
    def from_matrix(cls, matrix: Float[np.ndarray, "3 3"]) -> "QuickRotation":
        """Take a matrix that is a proper rotation, as MuJoCo's are."""
        return cls(matrix)

    def as_quat(self) -> Float[np.ndarray, " 4"]:
        """Convert to x, y, z, w. Of the two signs, SciPy's: the largest number is positive."""
        (a, b, c), (d, e, f), (g, h, i) = self.matrix.tolist()
        trace = a + e + i
        largest = max(a, e, i, trace)
        if largest == a:
            numbers = (1 - trace + 2 * a, d + b, g + c, h - f)
        elif largest == e:
            numbers = (d + b, 1 - trace + 2 * e, h + f, c - g)
        elif largest == i:
            numbers = (g + c, h + f, 1 - trace + 2 * i, d - b)
        else:
            numbers = (h - f, c - g, d - b, 1 + trace)
        return np.array(numbers) / math.hypot(*numbers)


def _import_metaworld(options: EnvOptions) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Import Meta-World's environments and experts, by task."""
    try:
        if importlib.util.find_spec("mujoco") is None:
            raise ImportError("No module named 'mujoco'")
        headless(required=bool(options.cameras))
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP
    except ImportError as error:
        raise missing_package("metaworld", "metaworld", error) from error
    return ALL_V3_ENVIRONMENTS, ENV_POLICY_MAP
