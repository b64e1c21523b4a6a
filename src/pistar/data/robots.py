"""Robots: the names in their observations, the maps from their joints to the model's, and the transforms of both.

A robot is data: to add one, add an entry to `ROBOTS`. The model's names are OpenPI's.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from pistar.data.norm_stats import Norm, NormStats
from pistar.data.transforms import (
    AbsoluteActions,
    Data,
    DeltaActions,
    InjectDefaultPrompt,
    Normalize,
    PadStatesAndActions,
    Repack,
    ResizeImages,
    TokenizePrompt,
    Tokenizer,
    Transform,
    Unnormalize,
    bool_mask,
    compose,
    flatten,
)
from pistar.errors import UserError
from pistar.types import CAMERAS

Joints = Float[np.ndarray, "*b d"]


def _unchanged(x: Joints) -> Joints:
    return x


@dataclasses.dataclass(frozen=True)
class Robot:
    """The data format of one kind of robot."""

    name: str
    action_dim: int
    state_keys: Mapping[str, int]
    """Slash paths in its observation and their dimensions; concatenated, they are its state."""
    cameras: Mapping[str, str | None]
    """From the model's cameras to slash paths in its observation; None for a camera it lacks."""
    optional_cameras: tuple[str, ...] = ()
    """Paths that may be missing: the model then gets a black, masked image. All others are required."""
    unused_cameras: tuple[str, ...] = ()
    """Paths that may be present and are ignored."""
    repack: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The columns of its usual LeRobot datasets as its observation, see `Repack`."""
    delta_mask: tuple[bool, ...] | None = None
    """Action dimensions that are relative to the state for the model. None means that all are absolute."""
    state_to_model: Callable[[Joints], Joints] = _unchanged
    actions_to_model: Callable[[Joints], Joints] = _unchanged
    actions_from_model: Callable[[Joints], Joints] = _unchanged

    @property
    def state_dim(self) -> int:
        """Dimension of its state."""
        return sum(self.state_keys.values())

    @property
    def lerobot_cameras(self) -> dict[str, str]:
        """From the model's cameras to their names in its usual LeRobot datasets, without cameras these lack."""
        columns = flatten(self.repack)
        return {
            slot: str(columns[path]).removeprefix("observation.images.")
            for slot, path in self.cameras.items()
            if path in columns
        }

    @property
    def changes_joints(self) -> bool:
        """Whether its joints have other numbers for the model than in its own data."""
        maps = (self.state_to_model, self.actions_to_model, self.actions_from_model)
        return any(each is not _unchanged for each in maps)

    @property
    def inputs(self) -> tuple[Transform, ...]:
        """Transforms from its observation (and actions) to the model's names, before normalisation."""
        delta = () if self.delta_mask is None else (DeltaActions(self.delta_mask),)
        return (RobotInputs(self), *delta)

    @property
    def outputs(self) -> tuple[Transform, ...]:
        """Transforms from the model's unnormalised actions to its own."""
        absolute = () if self.delta_mask is None else (AbsoluteActions(self.delta_mask),)
        return (*absolute, RobotOutputs(self))


@dataclasses.dataclass(frozen=True)
class RobotInputs:
    """Pick a robot's cameras, state, actions and prompt out of its observation."""

    robot: Robot

    def __call__(self, data: Data) -> Data:
        flat = flatten(data)
        state, actions = self.joints(flat)
        images = self.images(flat)
        seen = [image for image in images.values() if image is not None]
        black = np.zeros_like(seen[0]) if seen else np.zeros((*state.shape[:-1], 1, 1, 3), np.uint8)
        out: Data = {
            "image": {slot: black if image is None else image for slot, image in images.items()},
            "image_mask": {slot: np.full(state.shape[:-1], image is not None) for slot, image in images.items()},
            "state": state,
        }
        if actions is not None:
            out["actions"] = actions
        if "prompt" in flat:
            out["prompt"] = flat["prompt"]
        return out

    def images(self, flat: Data) -> dict[str, UInt8[np.ndarray, "... _ _ 3"] | None]:
        """Return images by the model's cameras; None for a camera the robot lacks."""
        return {slot: self._image(flat, path) for slot, path in self.robot.cameras.items()}

    def joints(self, flat: Data) -> tuple[Float[np.ndarray, "... s"], Float[np.ndarray, "... a"] | None]:
        """Return the state, and the actions if there are any, mapped to the model's joints."""
        robot = self.robot
        state = np.concatenate([self._joints(flat, key, dim) for key, dim in robot.state_keys.items()], axis=-1)
        actions = self._joints(flat, "actions", robot.action_dim) if "actions" in flat else None
        return robot.state_to_model(state), None if actions is None else robot.actions_to_model(actions)

    def _joints(self, flat: Data, path: str, dim: int) -> Joints:
        if path not in flat:
            raise self._missing(flat, path)
        joints = np.atleast_1d(flat[path])  # a lone gripper may come as a bare number
        if joints.shape[-1] != dim:
            raise UserError(
                f"{path} has {joints.shape[-1]} dimensions but {self.robot.name} has {dim}; "
                f"choose the right robot ({', '.join(ROBOTS)}) or fix the data."
            )
        joints = joints if np.issubdtype(joints.dtype, np.floating) else joints.astype(np.float64)
        if not np.isfinite(joints).all():
            raise UserError(f"{path} has NaN or Inf; drop or repair that episode.")
        return joints

    def _image(self, flat: Data, path: str | None) -> UInt8[np.ndarray, "*b h w 3"] | None:
        if path is None:
            return None
        if path in flat:
            return to_uint8(flat[path], path)
        known = {*self.robot.cameras.values(), *self.robot.unused_cameras}
        folder = path.rpartition("/")[0] + "/"
        # A misspelt camera must not be taken for a missing one.
        unknown = [key for key in flat if key.startswith(folder) and key not in known]
        if path in self.robot.optional_cameras and not unknown:
            return None
        raise self._missing(flat, path)

    def _missing(self, flat: Data, path: str) -> UserError:
        return UserError(
            f"{self.robot.name} needs {path!r} and the data has {sorted(flat)}; "
            "rename it (--data.columns for a dataset), or choose the robot that recorded the data."
        )


@dataclasses.dataclass(frozen=True)
class RobotOutputs:
    """Remove the padding of the model's actions and convert them to the robot's units."""

    robot: Robot

    def __call__(self, data: Data) -> Data:
        return {"actions": self.robot.actions_from_model(data["actions"][..., : self.robot.action_dim])}


def to_uint8(image: Any, name: str = "image") -> UInt8[np.ndarray, "*b h w 3"]:  # noqa: ANN401  # a client's or dataset's
    """Convert an image of a client or of LeRobot (uint8, or floats in [0, 1]; channels first or last) to HWC uint8."""
    image = np.asarray(image)
    if image.ndim < 3 or 3 not in (image.shape[-1], image.shape[-3]):
        raise UserError(f"{name} has shape {image.shape}; give an image with three colours, channels first or last.")
    if np.issubdtype(image.dtype, np.floating):
        low, high = image.min(), image.max()
        if not (low > -1e-3 and high < 1 + 1e-3):
            raise UserError(
                f"{name} is a float image with values from {low:g} to {high:g}; floats must lie in [0, 1]: "
                "rescale it, or send uint8."
            )
        image = (255 * image).astype(np.uint8)
    if image.dtype != np.uint8:
        raise UserError(f"{name} is an image of {image.dtype}; send uint8, or floats in [0, 1].")
    return image if image.shape[-1] == 3 else np.moveaxis(image, -3, -1)


# ALOHA. π₀ was pre-trained on an ALOHA whose joints 1 and 2 have the opposite sign and whose gripper is an angle.
_ALOHA_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)
_ALOHA_GRIPPERS = [6, 13]
_GRIPPER_METRES = (0.01844, 0.05800)
"""The follower's fingers, closed and open: 0 and 1 in ALOHA's state."""
_GRIPPER_RADIANS = (-0.6213, 1.4910)
"""The follower's motor, closed and open: 0 and 1 in ALOHA's actions."""
_GRIPPER_MODEL_RADIANS = (0.5476, 1.6296)
"""The encoder range that scales the model's gripper state. Its gripper actions are radians above the lower end."""
_GRIPPER_ARM, _GRIPPER_HORN = 0.036, 0.022
"""Lengths in metres of the crank between motor and fingers (Interbotix)."""


def _gripper_state_to_model(position: Joints) -> Joints:
    """Map a finger opening in 0..1 → metres → motor angle, through the crank → the model's 0..1."""
    closed, opened = _GRIPPER_METRES
    metres = position * (opened - closed) + closed
    sine = (_GRIPPER_HORN**2 + metres**2 - _GRIPPER_ARM**2) / (2 * _GRIPPER_HORN * metres)
    low, high = _GRIPPER_MODEL_RADIANS
    return (np.arcsin(np.clip(sine, -1.0, 1.0)) - low) / (high - low)


def _gripper_action_to_model(position: Joints) -> Joints:
    closed, opened = _GRIPPER_RADIANS
    return position * (opened - closed) + closed - _GRIPPER_MODEL_RADIANS[0]


def _gripper_action_from_model(radians: Joints) -> Joints:
    closed, opened = _GRIPPER_RADIANS
    return (radians + _GRIPPER_MODEL_RADIANS[0] - closed) / (opened - closed)


def _adapt(joints: Joints, gripper: Callable[[Joints], Joints]) -> Joints:
    adapted: np.ndarray = _ALOHA_SIGNS * joints
    adapted[..., _ALOHA_GRIPPERS] = gripper(adapted[..., _ALOHA_GRIPPERS])
    return adapted


def aloha_state_to_model(state: Joints) -> Joints:
    """Map an ALOHA's measured joints to π₀'s. There is no inverse: the gripper is clipped."""
    return _adapt(state, _gripper_state_to_model)


def aloha_actions_to_model(actions: Joints) -> Joints:
    """Map an ALOHA's actions to π₀'s."""
    return _adapt(actions, _gripper_action_to_model)


def aloha_actions_from_model(actions: Joints) -> Joints:
    """Map π₀'s actions to an ALOHA's."""
    return _adapt(actions, _gripper_action_from_model)


def aloha(name: str = "aloha", *, adapt_to_pi: bool = True, delta: bool = True, cameras: Mapping[str, str]) -> Robot:
    """Make an ALOHA: two arms, left first, of six joints and a gripper each.

    `adapt_to_pi`: the data is in ALOHA's units, the checkpoint in π₀'s. `delta`: the checkpoint's actions are joint
    angles relative to the state, except grippers. `cameras`: from ALOHA's camera names to the dataset's columns.
    """
    adapters: dict[str, Callable[[Joints], Joints]] = {
        "state_to_model": aloha_state_to_model,
        "actions_to_model": aloha_actions_to_model,
        "actions_from_model": aloha_actions_from_model,
    }
    return Robot(
        name=name,
        action_dim=14,
        state_keys={"state": 14},
        cameras=dict(zip(CAMERAS, ("images/cam_high", "images/cam_left_wrist", "images/cam_right_wrist"), strict=True)),
        optional_cameras=("images/cam_left_wrist", "images/cam_right_wrist"),
        unused_cameras=("images/cam_low",),
        repack={"images": cameras, "state": "observation.state", "actions": "action", "prompt": "prompt"},
        delta_mask=bool_mask(6, -1, 6, -1) if delta else None,
        **(adapters if adapt_to_pi else {}),
    )


_LIBERO = Robot(
    name="libero",
    action_dim=7,
    state_keys={"observation/state": 8},
    cameras=dict(zip(CAMERAS, ("observation/image", "observation/wrist_image", None), strict=True)),
    repack={
        "observation/image": "image",
        "observation/wrist_image": "wrist_image",
        "observation/state": "state",
        "actions": "actions",
        "prompt": "prompt",
    },
)

_DROID = Robot(
    name="droid",
    action_dim=8,
    state_keys={"observation/joint_position": 7, "observation/gripper_position": 1},
    cameras=dict(
        zip(CAMERAS, ("observation/exterior_image_1_left", "observation/wrist_image_left", None), strict=True)
    ),
    repack={
        "observation/exterior_image_1_left": "exterior_image_1_left",
        "observation/wrist_image_left": "wrist_image_left",
        "observation/joint_position": "joint_position",
        "observation/gripper_position": "gripper_position",
        "actions": "actions",
        "prompt": "prompt",
    },
)

_METAWORLD = Robot(
    name="metaworld",
    action_dim=4,
    state_keys={"state": 17},
    cameras={CAMERAS[0]: None},  # one masked image, because π₀ needs one; OpenPI's three would only cost time
    repack={"state": "observation.state", "actions": "action", "prompt": "prompt"},
)

ROBOTS: dict[str, Robot] = {
    robot.name: robot
    for robot in (
        aloha(
            cameras={name: f"observation.images.{name}" for name in ("cam_high", "cam_left_wrist", "cam_right_wrist")}
        ),
        # gym-aloha: one camera, absolute joint targets.
        aloha("aloha_sim", delta=False, cameras={"cam_high": "observation.images.top"}),
        # LIBERO's recorded actions are relative already. OpenPI's π₀.₅ was fine-tuned on them.
        _LIBERO,
        # For OpenPI's π₀ LIBERO checkpoints the state was subtracted once more.
        dataclasses.replace(_LIBERO, name="libero_delta", delta_mask=bool_mask(6, -1)),
        # DROID with joint velocities, and with joint positions.
        _DROID,
        dataclasses.replace(_DROID, name="droid_position", delta_mask=bool_mask(7, -1)),
        # Meta-World with its state alone, and with a camera in a corner too.
        _METAWORLD,
        dataclasses.replace(
            _METAWORLD,
            name="metaworld_camera",
            cameras=dict(zip(CAMERAS, ("images/corner2", None, None), strict=True)),
            repack={**_METAWORLD.repack, "images": {"corner2": "observation.images.corner2"}},
        ),
    )
}
"""Robots by name. Make a variant of one with `dataclasses.replace`."""


def find_robot(name: str) -> Robot:
    """Return the robot of that name; for an unknown name, the error suggests the nearest one."""
    if name not in ROBOTS:
        near = difflib.get_close_matches(name.lower(), ROBOTS, n=1) or list(ROBOTS)
        raise UserError(f"There is no robot {name!r}; try {', '.join(near)}.")
    return ROBOTS[name]


def example_observation(robot: Robot, prompt: str, *, image_size: int = 224) -> Data:
    """Make an observation as the robot could send it: joints at zero, and a colour ramp as every image."""
    ramp = np.linspace(0, 255, image_size, dtype=np.uint8)
    image = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None, :], np.uint8(128)), axis=-1)
    return {
        **{path: np.zeros(dim) for path, dim in robot.state_keys.items()},
        **{path: image for path in robot.cameras.values() if path is not None},
        "prompt": prompt,
    }


def input_transform(
    robot: Robot,
    stats: Mapping[str, NormStats],
    norm: Norm,
    tokenizer: Tokenizer,
    *,
    action_dim: int,
    image_size: int,
    discrete_state: bool,
    default_prompt: str | None = None,
    repack: Mapping[str, Any] | None = None,
) -> Transform:
    """Make the transform from data to the model's input: repack → robot → normalise → model.

    Training and acting use the same one, but `repack` (`robot.repack`, or your own) is for datasets only: when acting,
    the robot sends its observation under its own names.
    """
    return compose(
        *(() if repack is None else (Repack(repack),)),
        InjectDefaultPrompt(default_prompt),
        *robot.inputs,
        Normalize(stats, norm),
        ResizeImages(image_size),
        TokenizePrompt(tokenizer, discrete_state),
        PadStatesAndActions(action_dim),
    )


def output_transform(robot: Robot, stats: Mapping[str, NormStats], norm: Norm) -> Transform:
    """Make the transform from the model's `actions`, and the `state` it was given, to the robot's actions."""
    return compose(Unnormalize(stats, norm), *robot.outputs)
