"""ALOHA in simulation: two arms hand over a cube, or put a peg into a socket. Model, tasks and rewards are gym-aloha's.

gym-aloha's own environment renders three cameras of 640×480 at every step, needed or not, and its action space ends at
±1, although the arms begin beyond that. So only its tasks and physics are used: the numbers are the same, and cameras
are rendered when asked for.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, UInt8

from pistar.envs import rendering
from pistar.envs.base import (
    EnvOptions,
    EpisodeStatus,
    RawObservation,
    Scene,
    StartEnv,
    missing_package,
    select_cameras,
)


@dataclasses.dataclass(frozen=True)
class AlohaTask:
    """A task of gym-aloha's."""

    instruction: str
    model: str
    """File of the arms and the objects."""
    rules: str
    """Class in `gym_aloha.tasks.sim` that sets up the task and rewards it."""
    layout: str
    """Function in `gym_aloha.utils` that draws where the objects are."""


TASKS = {
    # The instruction that OpenPI's client and checkpoint use.
    "transfer-cube": AlohaTask(
        "Transfer cube", "bimanual_viperx_transfer_cube.xml", "TransferCubeTask", "sample_box_pose"
    ),
    "insertion": AlohaTask(
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
"""The simulator's names of the cameras, by their names in the observation."""

_SUCCESS_REWARD = 4
"""gym-aloha's reward for success. Its smaller rewards are for stages of the task and are not used."""


def tasks() -> Mapping[str, Sequence[str]]:
    """List the two tasks."""
    return {name: [name] for name in TASKS}


def make(task: str, options: EnvOptions) -> "Aloha":
    """Build an environment of a task."""
    return Aloha(task, options)


_JOINT_LIMITS = (
    (-3.14158, -1.85005, -1.76278, -3.14158, -1.8675, -3.14158),
    (3.14158, 1.25664, 1.6057, 3.14158, 2.23402, 3.14158),
)
"""Lowest and highest joint angles of an arm, in radians, to which gym-aloha's model clips commands."""


def scene(task: str, options: EnvOptions) -> Scene:
    """Describe a task."""
    name = f"aloha/{task}"
    cameras = select_cameras(name, options, CAMERAS, ["images/cam_high"])
    size = (options.image_size * 3 // 4, options.image_size)  # the model pads it to a square
    low, high = _JOINT_LIMITS
    return Scene(
        name=name,
        robot="aloha_sim",
        instruction=TASKS[task].instruction,
        fps=50,
        limit=options.limit or 300,
        action_low=(*low, 0.0) * 2,
        action_high=(*high, 1.0) * 2,
        train=range(10_000),
        held_out=range(1_000_000, 1_001_000),
        cameras=dict.fromkeys(cameras, size),
        execute=10,  # as OpenPI's client
    )


class Aloha(StartEnv):
    """A task of gym-aloha's.

    Actions and state are the left arm, then the right arm: each six joint angles and a gripper (0 closed, 1 open).
    """

    def __init__(self, task: str, options: EnvOptions) -> None:
        super().__init__(scene(task, options))
        try:
            import gym_aloha.constants  # does not import MuJoCo yet, which must come after `headless`

            rendering.headless()
            import gym_aloha.utils
            from dm_control import mujoco
            from dm_control.rl import control
            from gym_aloha.tasks import sim
        except ImportError as error:
            raise missing_package("gym-aloha", "aloha", error) from error
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
        # gym-aloha's `reset` reads the objects' poses from a global. Peg and socket come as a pair.
        self._layout[0] = np.ravel(self._draw_layout(seed=start_id))
        self._simulation.reset()

    def _act(self, action: Float[np.ndarray, "14"]) -> EpisodeStatus:
        return "success" if self._simulation.step(action).reward == _SUCCESS_REWARD else "running"

    def observe(self) -> RawObservation:
        """Return the joints, as gym-aloha's `agent_pos`, and the requested cameras."""
        images = {name: self._observe_camera(CAMERAS[name], *size) for name, size in self.scene.cameras.items()}
        return {"state": self._rules.get_qpos(self._physics), **images}

    def _observe_camera(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
        """Render for the policy.

        With shadows, 640×480 pixels are rendered and shrunk, as OpenPI's client does. Without, the final size is
        rendered directly: the same view, cheaper, with slightly harder edges.
        """
        if not self._shadows:
            return self._render(camera, height, width)
        return rendering.resize(self._render(camera, 480, 640), height, width)

    def render(self) -> UInt8[np.ndarray, "h w 3"]:
        """Render the view from in front of the table, at an angle."""
        return self._render("angle", 240, 320)

    def _render(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
        return self._cameras.render(self._physics.data.ptr, camera, height, width)

    def expert_action(self) -> Float[np.ndarray, "14"]:
        """Return the action of the cube's expert; the peg has none.

        It decides anew at every step, so it can take over at any moment and correct disturbances.
        """
        if self._task != "transfer-cube":
            return super().expert_action()
        state = self._rules.get_qpos(self._physics)
        return hand_over(
            state,
            last=self._executed[-1] if self._executed else state,
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
        """Free graphics memory."""
        self._cameras.close()
        self._simulation.close()


# The expert for the cube: the right arm picks it up and holds it out, and the left arm takes it.

Side = Literal["left", "right"]
Point = Float[np.ndarray, "3"]
"""Metres: x from the left arm to the right arm, y away from the viewer, z up from the table."""

_BASES = {"left": (-0.469, 1), "right": (0.469, -1)}
"""Where each arm stands along x, both at y = 0.5, and which way along x it faces."""
_SHOULDER_HEIGHT = 0.12705
_UPPER_ARM, _UPPER_ARM_TILT = math.hypot(0.05955, 0.3), math.atan2(0.3, 0.05955)
"""Length from shoulder to elbow in metres, and its angle with the shoulder at 0."""
_FOREARM = 0.3
_WRIST_TO_GRIPPER, _GRIPPER_TO_TIPS = 0.069744, 0.14

_MEETING = np.array([0.0, 0.5, 0.25])
_ABOVE = np.array([0.0, 0.0, 0.08])
_APART = np.array([-0.12, 0.0, 0.0])
"""Where the left hand waits, relative to the meeting point."""
_RIGHT_PITCH = 1.0
"""Radians downwards: steep enough to clear the table, and out of the left hand's way."""
_LEFT_ROLL = math.pi / 2
"""The left fingers come from above and below, because the right ones are at the sides."""
_LEAD = 0.06
"""Radians a commanded joint is ahead of the measured one. More is faster; below 0.04 friction holds the joints."""
_SQUEEZE = 0.1
"""Share of the gripper's opening by which it closes in one step."""
_AT_CUBE, _HOLDING = 0.012, 0.04
"""Most metres from fingertips to cube to start closing, and to keep closing while the cube is pushed about."""


def hand_over(
    state: Float[np.ndarray, "14"], last: Float[np.ndarray, "14"], left: Point, right: Point, cube: Point
) -> Float[np.ndarray, "14"]:
    """Return the next command, from the joints, the last command, both hands' fingertips and the cube."""
    right_closing, right_goal, right_grip = last[13] < 0.5, cube, 1.0
    left_closing, left_goal, left_grip = last[6] < 0.5, _MEETING + _APART, 1.0
    distance = np.linalg.norm(right - cube)
    if distance < (_HOLDING if right_closing else _AT_CUBE):
        right_grip = 0.0
        if last[13] <= _SQUEEZE:  # closed as far as the cube allows
            right_goal = _MEETING
            if np.linalg.norm(right - _MEETING) < 0.02:
                left_goal = cube
                left_grip = float(np.linalg.norm(left - cube) > (_HOLDING if left_closing else _AT_CUBE))
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
    """Move towards the goal from the measured joints. From the last command, disturbances would add up."""
    ahead = joints - state[:6]
    ahead *= min(1.0, _LEAD / max(np.abs(ahead).max(), _LEAD))
    return np.append(state[:6] + ahead, last[6] + np.clip(grip - last[6], -_SQUEEZE, _SQUEEZE))


def arm_joints(side: Side, tips: Point, pitch: float, roll: float) -> Float[np.ndarray, "6"]:
    """Return joint angles that bring an arm's fingertips to a point, pitched down and rolled. If the point is out of
    reach, the arm is stretched towards it.

    The forearm is not rolled, so the arm lies in a vertical plane, and shoulder, elbow and wrist form a triangle.
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
