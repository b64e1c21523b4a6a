"""ALOHA in simulation: two arms hand a cube over or put a peg into a socket. Model, tasks and rewards are gym-aloha's.

Its own environment renders three cameras of 640×480 at every step, wanted or not, and calls actions beyond ±1 invalid
though the arms begin beyond; so only what is under it is used here: the same numbers, and pictures when asked for.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, UInt8

from pistar.envs import rendering
from pistar.envs.env import Ending, EnvOptions, Scene, Seen, StartEnv, missing, nearest
from pistar.errors import UserError


@dataclasses.dataclass(frozen=True)
class Task:
    """One of gym-aloha's."""

    instruction: str
    model: str
    """File of the arms and what lies before them."""
    rules: str
    """Class in `gym_aloha.tasks.sim` that sets up and rewards."""
    layout: str
    """Function in `gym_aloha.utils` that draws where things lie."""


TASKS = {
    # The words OpenPI's client and checkpoint use.
    "transfer-cube": Task("Transfer cube", "bimanual_viperx_transfer_cube.xml", "TransferCubeTask", "sample_box_pose"),
    "insertion": Task(
        "Insert the peg into the socket", "bimanual_viperx_insertion.xml", "InsertionTask", "sample_insertion_pose"
    ),
}

CAMERAS = {
    "images/cam_high": "top",
    "images/cam_left_wrist": "left_wrist",
    "images/cam_right_wrist": "right_wrist",
    "images/angle": "angle",
    "images/vis": "front_close",
    "images/left_pillar": "left_pillar",
    "images/right_pillar": "right_pillar",
}
"""From the observation's names to the simulator's."""

_DONE = 4
"""The reward of success. Those below are for stages, which nobody here is paid for."""


def tasks() -> Mapping[str, Sequence[str]]:
    """Its two tasks, each for itself."""
    return {name: [name] for name in TASKS}


def make(task: str, options: EnvOptions) -> "Aloha":
    """One of the two."""
    return Aloha(task, options)


_MOTORS = (
    (-3.14158, -1.85005, -1.76278, -3.14158, -1.8675, -3.14158),
    (3.14158, 1.25664, 1.6057, 3.14158, 2.23402, 3.14158),
)
"""An arm's joints at the utmost: what gym-aloha's model lets its motors do, whatever they are told."""


def scene(task: str, options: EnvOptions) -> Scene:
    """Of one of the two."""
    names = ("images/cam_high",) if options.cameras is None else options.cameras
    for name in names:
        if name not in CAMERAS:
            raise UserError(f"aloha/{task} has no camera {name!r}; {nearest(name, CAMERAS)}")
    # The model pads it.
    size = (options.image_size * 3 // 4, options.image_size)
    return Scene(
        name=f"aloha/{task}",
        robot="aloha_sim",
        instruction=TASKS[task].instruction,
        fps=50,
        limit=options.limit or 300,
        action_low=(*_MOTORS[0], 0.0) * 2,
        action_high=(*_MOTORS[1], 1.0) * 2,
        train=range(10_000),
        held_out=range(1_000_000, 1_001_000),
        cameras=dict.fromkeys(names, size),
        execute=10,  # as OpenPI's client
    )


class Aloha(StartEnv):
    """Actions and state: left arm, right arm; of each six joint angles and a gripper, 0 shut and 1 open."""

    def __init__(self, task: str, options: EnvOptions) -> None:
        super().__init__(scene(task, options))
        try:
            import gym_aloha.constants  # as yet without MuJoCo, which must not come before `headless`

            rendering.headless()
            import gym_aloha.utils
            from dm_control import mujoco
            from dm_control.rl import control
            from gym_aloha.tasks import sim
        except ImportError as error:
            raise missing("gym-aloha", "aloha", error) from error
        self._task = task
        self._rules: Any = getattr(sim, TASKS[task].rules)()
        self._rules.get_observation = lambda physics: {}
        self._physics: Any = mujoco.Physics.from_xml_path(str(gym_aloha.constants.ASSETS_DIR / TASKS[task].model))
        self._simulation: Any = control.Environment(self._physics, self._rules, control_timestep=1 / self.scene.fps)
        self._draw_layout = getattr(gym_aloha.utils, TASKS[task].layout)
        self._layout = sim.BOX_POSE
        self._shadows = options.shadows
        self._cameras = rendering.Cameras(self._physics.model.ptr, self.scene.name, options.shadows)

    def _begin(self, start_id: int) -> None:
        # gym-aloha is told where things lie by a global, which `reset` reads. Peg and socket come as a pair.
        self._layout[0] = np.ravel(self._draw_layout(seed=start_id))
        self._simulation.reset()

    def _act(self, action: Float[np.ndarray, "14"]) -> Ending:
        return "success" if self._simulation.step(action).reward == _DONE else "goes on"

    def observe(self) -> Seen:
        """Joints, as gym-aloha's `agent_pos`, and the cameras that were asked for."""
        pictures = {name: self._seen_by(CAMERAS[name], *size) for name, size in self.scene.cameras.items()}
        return {"state": self._rules.get_qpos(self._physics), **pictures}

    def _seen_by(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
        """With shadows as OpenPI's client has it, which renders 640×480 and shrinks that. Else at that width in the
        first place: the same view, cheaper, with edges that are slightly harder."""
        if not self._shadows:
            return self._picture(camera, height, width)
        return rendering.resize(self._picture(camera, 480, 640), height, width)

    def render(self) -> UInt8[np.ndarray, "h w 3"]:
        """From in front of the table, at an angle."""
        return self._picture("angle", 240, 320)

    def _picture(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
        return self._cameras.picture(self._physics.data.ptr, camera, height, width)

    def expert_action(self) -> Float[np.ndarray, "14"]:
        """Of the cube only. Decides anew at every step, so it can take over midway and make up for disturbances."""
        if self._task != "transfer-cube":
            return super().expert_action()
        state = self._rules.get_qpos(self._physics)
        return hand_over(
            state,
            last=self._done[-1] if self._done else state,
            left=self._fingertips("left"),
            right=self._fingertips("right"),
            cube=self._physics.named.data.xpos["box"].copy(),
        )

    def _fingertips(self, side: "Side") -> "Point":
        gripper = f"vx300s_{side}/gripper_link"
        data = self._physics.named.data
        tips: np.ndarray = data.xpos[gripper] + _GRIPPER_TO_TIPS * data.xmat[gripper].reshape(3, 3)[:, 0]
        return tips

    def close(self) -> None:
        """Give graphics memory back."""
        self._cameras.close()
        self._simulation.close()


# The expert for the cube: the right arm picks it up and holds it out, the left arm takes it.

Side = Literal["left", "right"]
Point = Float[np.ndarray, "3"]
"""Metres: x from the left arm to the right one, y away from the onlooker, z up from the table."""

_BASES = {"left": (-0.469, 1), "right": (0.469, -1)}
"""Where the arms stand along x, both at y = 0.5, and which way along x they look."""
_SHOULDER_HEIGHT = 0.12705
_UPPER_ARM, _UPPER_ARM_TILT = math.hypot(0.05955, 0.3), math.atan2(0.3, 0.05955)
"""From shoulder to elbow: how far, and how steep with the shoulder at 0."""
_FOREARM = 0.3
_WRIST_TO_GRIPPER, _GRIPPER_TO_TIPS = 0.069744, 0.14

_MEETING = np.array([0.0, 0.5, 0.25])
_ABOVE = np.array([0.0, 0.0, 0.08])
_APART = np.array([-0.12, 0.0, 0.0])
"""Where the left hand waits, from the meeting point."""
_RIGHT_PITCH = 1.0
"""Downwards, radians: steep enough to clear the table, and out of the left hand's way."""
_LEFT_ROLL = math.pi / 2
"""The left fingers come from above and below, for the right ones are at the sides."""
_LEAD = 0.06
"""Radians a commanded joint is ahead of the measured one: the more, the faster. Below 0.04 friction holds them."""
_SQUEEZE = 0.1
"""Of the gripper's opening, in one step."""
_THERE, _IN_HAND = 0.012, 0.04
"""Metres from fingertips to cube: to begin closing, and to go on while the cube is pushed about a little."""


def hand_over(
    state: Float[np.ndarray, "14"], last: Float[np.ndarray, "14"], left: Point, right: Point, cube: Point
) -> Float[np.ndarray, "14"]:
    """The next command, from joints and last command, both hands' fingertips and the cube."""
    right_shut, right_goal, right_grip = last[13] < 0.5, cube, 1.0
    left_shut, left_goal, left_grip = last[6] < 0.5, _MEETING + _APART, 1.0
    away = np.linalg.norm(right - cube)
    if away < (_IN_HAND if right_shut else _THERE):
        right_grip = 0.0
        if last[13] <= _SQUEEZE:  # shut as far as the cube lets it
            right_goal = _MEETING
            if np.linalg.norm(right - _MEETING) < 0.02:
                left_goal = cube
                left_grip = float(np.linalg.norm(left - cube) > (_IN_HAND if left_shut else _THERE))
    elif np.linalg.norm((right - cube)[:2]) > 0.02:
        right_goal = cube + _ABOVE
    return np.concatenate(
        [
            _towards(arm_joints("left", left_goal, 0.0, _LEFT_ROLL), left_grip, state[:7], last[:7]),
            _towards(arm_joints("right", right_goal, _RIGHT_PITCH, 0.0), right_grip, state[7:], last[7:]),
        ]
    )


def _towards(
    joints: Float[np.ndarray, "6"], grip: float, state: Float[np.ndarray, "7"], last: Float[np.ndarray, "7"]
) -> Float[np.ndarray, "7"]:
    """From the joints as they are, not as last commanded: disturbed commands would wander off."""
    ahead = joints - state[:6]
    ahead *= min(1.0, _LEAD / max(np.abs(ahead).max(), _LEAD))
    return np.append(state[:6] + ahead, last[6] + np.clip(grip - last[6], -_SQUEEZE, _SQUEEZE))


def arm_joints(side: Side, tips: Point, pitch: float, roll: float) -> Float[np.ndarray, "6"]:
    """Angles that bring an arm's fingertips there, pitched down and rolled. Out of reach: stretched towards it.

    With the forearm not rolled, waist to tips lie in one upright plane, and the elbow is the corner of a triangle.
    """
    base, facing = _BASES[side]
    x, y = facing * (tips[0] - base), facing * (tips[1] - 0.5)
    hand = _WRIST_TO_GRIPPER + _GRIPPER_TO_TIPS
    out = math.hypot(x, y) - hand * math.cos(pitch)
    up = tips[2] + hand * math.sin(pitch) - _SHOULDER_HEIGHT
    reach = math.hypot(out, up)
    corner = (_UPPER_ARM**2 + reach**2 - _FOREARM**2) / (2 * _UPPER_ARM * reach)
    upper = math.atan2(up, out) + math.acos(min(max(corner, -1.0), 1.0))
    fore = math.atan2(up - _UPPER_ARM * math.sin(upper), out - _UPPER_ARM * math.cos(upper))
    shoulder = _UPPER_ARM_TILT - upper
    return np.array([math.atan2(y, x), shoulder, -fore - shoulder, 0.0, fore + pitch, roll])
