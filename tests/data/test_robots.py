import copy
import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pistar.data.norm_stats import Norm, NormStats
from pistar.data.robots import (
    ROBOTS,
    Robot,
    RobotInputs,
    aloha,
    aloha_actions_from_model,
    aloha_actions_to_model,
    aloha_state_to_model,
    example_observation,
    find_robot,
    input_transform,
    output_transform,
    to_uint8,
)
from pistar.data.transforms import Data, Repack, compose
from pistar.errors import UserError
from pistar.types import CAMERAS

PLAIN_ALOHA = aloha(adapt_to_pi=False, delta=False, cameras={"cam_high": "observation.images.top"})


@pytest.fixture(scope="module")
def golden(openpi_goldens: Path) -> dict[str, np.ndarray]:
    with np.load(openpi_goldens / "misc.npz") as file:
        return {key.removeprefix("aloha/"): file[key] for key in file if key.startswith("aloha/")}


@pytest.fixture
def aloha_data(golden: dict[str, np.ndarray]) -> Data:
    names = ("cam_high", "cam_left_wrist")
    return {
        "images": {name: golden[f"in/images/{name}"] for name in names},
        "state": golden["in/state"],
        "actions": golden["in/actions"],
        "prompt": "fold the towel",
    }


def picture(value: int, *, height: int = 6, width: int = 4) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def libero_data() -> Data:
    return {
        "observation/image": picture(10),
        "observation/wrist_image": picture(20),
        "observation/state": np.arange(8.0),
        "actions": np.ones((3, 7)),
        "prompt": "open the drawer",
    }


def droid_data() -> Data:
    return {
        "observation/exterior_image_1_left": picture(10),
        "observation/wrist_image_left": picture(20),
        "observation/joint_position": np.arange(7, dtype=np.float32),
        "observation/gripper_position": np.array([0.5], np.float32),
        "actions": np.ones((3, 8)),
        "prompt": "open the drawer",
    }


def aloha_example() -> Data:
    cameras = ("cam_high", "cam_left_wrist", "cam_right_wrist")
    return {"images": {name: picture(5) for name in cameras}, "state": np.zeros(14), "actions": np.zeros((2, 14))}


def metaworld_data() -> Data:
    return {"images": {"corner2": picture(5)}, "state": np.zeros(17), "actions": np.zeros((2, 4))}


EXAMPLES = {
    "aloha": aloha_example,
    "aloha_sim": aloha_example,
    "libero": libero_data,
    "libero_delta": libero_data,
    "droid": droid_data,
    "droid_position": droid_data,
    "metaworld": metaworld_data,
    "metaworld_camera": metaworld_data,
}


def enter(robot: Robot, data: Data) -> Data:
    return compose(*robot.inputs)(data)


def leave(robot: Robot, data: Data) -> np.ndarray:
    actions: np.ndarray = compose(*robot.outputs)(data)["actions"]
    return actions


def stats_for(robot: Robot) -> dict[str, NormStats]:
    def entry(dims: int) -> NormStats:
        spread = np.linspace(0.5, 2.0, dims)
        return NormStats(mean=spread - 1, std=spread, q01=-spread, q99=2 * spread)

    return {"state": entry(robot.state_dim), "actions": entry(robot.action_dim)}


class FakeTokenizer:
    """Returns the length of the prompt and that of the state it was given."""

    def tokenize(self, prompt: str, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        return np.array([len(prompt), 0 if state is None else len(state)], np.int32), np.array([True, True])


def model_input(robot: Robot, norm: Norm, data: Data) -> Data:
    transform = input_transform(
        robot, stats_for(robot), norm, FakeTokenizer(), action_dim=32, image_size=8, discrete_state=False
    )
    return transform(data)


# The registry


def test_every_robot_is_registered_under_its_name() -> None:
    assert {name: robot.name for name, robot in ROBOTS.items()} == {name: name for name in EXAMPLES}


@pytest.mark.parametrize(
    ("name", "near"), [("alhoa", "aloha"), ("LIBERO_delta", "libero_delta"), ("xx", ", ".join(ROBOTS))]
)
def test_an_unknown_robot_answers_with_the_nearest_or_with_all(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f"^There is no robot '{name}'; try {near}.$"):
        find_robot(name)


def test_a_robot_without_cameras_gets_black_masked_images() -> None:
    blind = Robot(name="blind", action_dim=2, state_keys={"state": 2}, cameras={"base_0_rgb": None})
    seen = RobotInputs(blind)({"state": np.zeros((3, 2))})
    assert seen["image"]["base_0_rgb"].shape[0] == 3
    assert not seen["image"]["base_0_rgb"].any()
    assert not seen["image_mask"]["base_0_rgb"].any()


def test_a_known_robot_is_found() -> None:
    assert find_robot("droid") is ROBOTS["droid"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_robots_use_the_models_camera_names_and_pickle(name: str) -> None:
    robot = pickle.loads(pickle.dumps(ROBOTS[name]))
    out = enter(robot, EXAMPLES[name]())
    # A robot without cameras needs a single masked image.
    assert tuple(out["image"]) == tuple(out["image_mask"]) == (CAMERAS[:1] if name == "metaworld" else CAMERAS)
    assert out["state"].shape == (robot.state_dim,)
    assert out["actions"].shape[-1] == robot.action_dim


# ALOHA


def test_aloha_inputs_equal_openpis(golden: dict[str, np.ndarray], aloha_data: Data) -> None:
    out = enter(dataclasses.replace(ROBOTS["aloha"], delta_mask=None), aloha_data)
    for camera in CAMERAS:
        np.testing.assert_array_equal(out["image"][camera], golden[f"out/image/{camera}"])
        np.testing.assert_array_equal(out["image_mask"][camera], golden[f"out/image_mask/{camera}"])
        assert out["image"][camera].dtype == np.uint8
    np.testing.assert_allclose(out["state"], golden["out/state"], rtol=1e-14)
    np.testing.assert_allclose(out["actions"], golden["out/actions"], rtol=1e-14)
    assert out["prompt"] == "fold the towel"


def test_aloha_outputs_equal_openpis(golden: dict[str, np.ndarray]) -> None:
    robot = dataclasses.replace(ROBOTS["aloha"], delta_mask=None)
    ours = leave(robot, {"actions": golden["outputs_transform/in_actions"]})
    np.testing.assert_allclose(ours, golden["outputs_transform/out_actions"], rtol=1e-14)


@pytest.mark.parametrize(
    ("adapt", "name"),
    [
        (aloha_state_to_model, "to_angular"),
        (aloha_actions_from_model, "from_angular"),
        (aloha_actions_to_model, "from_angular_inv"),
    ],
)
def test_the_three_gripper_maps_and_the_flips_equal_openpis(
    golden: dict[str, np.ndarray], adapt: Any, name: str
) -> None:
    positions = golden["gripper/in"]
    joints = np.ones((len(positions), 14))
    joints[:, [6, 13]] = positions[:, None]
    adapted = adapt(joints)
    arms = [i for i in range(14) if i not in (6, 13)]
    np.testing.assert_array_equal(adapted[:, arms], np.tile(golden["joint_flip_mask"][arms], (len(positions), 1)))
    for gripper in (6, 13):
        np.testing.assert_allclose(adapted[:, gripper], golden[f"gripper/{name}"], rtol=1e-13, atol=1e-15)


def test_the_aloha_gripper_follows_the_crank() -> None:
    # Closed fingers stand at 18.44 mm: asin((0.022² + 0.01844² − 0.036²) / (2·0.022·0.01844)) radians, then scaled.
    radians = math.asin((0.022**2 + 0.01844**2 - 0.036**2) / (2 * 0.022 * 0.01844))
    np.testing.assert_allclose(aloha_state_to_model(np.zeros(14))[6], (radians - 0.5476) / (1.6296 - 0.5476))


@given(hnp.arrays(np.float64, (3, 14), elements=st.floats(-4, 4)))
def test_aloha_actions_mapped_to_the_model_and_back_are_the_same(actions: np.ndarray) -> None:
    np.testing.assert_allclose(aloha_actions_from_model(aloha_actions_to_model(actions)), actions, atol=1e-12)


def test_aloha_gives_the_arms_relative_to_the_adapted_state_and_the_grippers_absolute(
    golden: dict[str, np.ndarray], aloha_data: Data
) -> None:
    out = enter(ROBOTS["aloha"], aloha_data)
    expected = golden["out/actions"] - np.where(np.arange(14) % 7 == 6, 0, golden["out/state"])
    np.testing.assert_allclose(out["actions"], expected, rtol=1e-12, atol=1e-14)


def test_the_simulated_aloha_acts_in_absolute_angles(golden: dict[str, np.ndarray], aloha_data: Data) -> None:
    np.testing.assert_allclose(enter(ROBOTS["aloha_sim"], aloha_data)["actions"], golden["out/actions"], rtol=1e-14)


def test_aloha_without_adaptation_leaves_the_joints_alone(aloha_data: Data) -> None:
    out = enter(PLAIN_ALOHA, aloha_data)
    np.testing.assert_array_equal(out["state"], aloha_data["state"])
    np.testing.assert_array_equal(out["actions"], aloha_data["actions"])
    np.testing.assert_array_equal(leave(PLAIN_ALOHA, out), aloha_data["actions"])


def test_aloha_ignores_its_low_camera(aloha_data: Data) -> None:
    aloha_data["images"] = aloha_data["images"] | {"cam_low": picture(99)}
    assert not (enter(PLAIN_ALOHA, aloha_data)["image"]["base_0_rgb"] == 99).all()


def test_a_misspelt_camera_does_not_pass_for_a_missing_one(aloha_data: Data) -> None:
    aloha_data["images"] = aloha_data["images"] | {"cam_rigth_wrist": picture(1)}
    with pytest.raises(UserError, match=r"aloha needs 'images/cam_right_wrist' and the data has .*cam_rigth_wrist"):
        enter(PLAIN_ALOHA, aloha_data)


# LIBERO and DROID


def test_libero_has_two_cameras_and_a_masked_black_third(openpi_goldens: Path) -> None:
    info = json.loads((openpi_goldens / "misc_info.json").read_text())["libero_inputs"]
    data = libero_data() | {"observation/image": picture(10, width=6), "observation/wrist_image": picture(20, width=6)}
    out = enter(ROBOTS["libero"], data)
    assert {name: list(image.shape) for name, image in out["image"].items()} == info["image_shapes"]
    assert {name: bool(mask) for name, mask in out["image_mask"].items()} == info["image_mask"]
    assert {name: int(image.max()) for name, image in out["image"].items()} == dict(
        zip(CAMERAS, (10, 20, 0), strict=True)
    )
    np.testing.assert_array_equal(out["state"], np.arange(8))
    np.testing.assert_array_equal(out["actions"], np.ones((3, 7)))


def test_libero_returns_the_first_seven_actions() -> None:
    actions = np.arange(64.0).reshape(2, 32)
    np.testing.assert_array_equal(leave(ROBOTS["libero"], {"actions": actions}), actions[:, :7])


def test_libero_delta_subtracts_the_state_from_all_but_the_gripper() -> None:
    out = enter(ROBOTS["libero_delta"], libero_data())
    np.testing.assert_array_equal(out["actions"][1], [1, 0, -1, -2, -3, -4, 1])
    np.testing.assert_array_equal(leave(ROBOTS["libero_delta"], out), np.ones((3, 7)))


def test_droid_joins_arm_and_gripper_into_one_state() -> None:
    out = enter(ROBOTS["droid"], droid_data())
    np.testing.assert_array_equal(out["state"], [0, 1, 2, 3, 4, 5, 6, 0.5])
    assert [int(out["image"][camera].max()) for camera in CAMERAS] == [10, 20, 0]
    assert [bool(out["image_mask"][camera]) for camera in CAMERAS] == [True, True, False]
    np.testing.assert_array_equal(out["actions"], np.ones((3, 8)))
    np.testing.assert_array_equal(leave(ROBOTS["droid"], {"actions": np.ones((3, 32))}), np.ones((3, 8)))


def test_droid_by_position_is_relative_but_for_the_gripper() -> None:
    out = enter(ROBOTS["droid_position"], droid_data())
    np.testing.assert_array_equal(out["actions"][0], [1, 0, -1, -2, -3, -4, -5, 1])
    np.testing.assert_array_equal(leave(ROBOTS["droid_position"], out), np.ones((3, 8)))


def test_nested_observations_are_read_like_flat_ones() -> None:
    flat = libero_data()
    nested = {"observation": {key.removeprefix("observation/"): flat[key] for key in list(flat)[:3]}}
    np.testing.assert_equal(enter(ROBOTS["libero"], nested)["image"], enter(ROBOTS["libero"], flat)["image"])


def test_whole_numbers_become_floats() -> None:
    out = enter(ROBOTS["libero"], libero_data() | {"observation/state": list(range(8))})
    assert out["state"].dtype == np.float64


# What a robot refuses


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_missing_key_is_named_with_what_there_is(name: str) -> None:
    robot = ROBOTS[name]
    needed = {*robot.state_keys, *robot.cameras.values()} - {None, *robot.optional_cameras}
    for path in needed:
        assert path is not None
        data = copy.deepcopy(EXAMPLES[name]())
        folder = data
        *parents, leaf = path.split("/") if path.startswith("images/") else [path]
        for parent in parents:
            folder = folder[parent]
        del folder[leaf]
        with pytest.raises(UserError, match=rf"{name} needs '{path}' and the data has \[.*'actions'.*\]; rename it"):
            enter(robot, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation/state": np.zeros(7)}, "observation/state has 7 dimensions but libero has 8"),
        ({"actions": np.zeros((2, 8))}, "actions has 8 dimensions but libero has 7"),
        ({"observation/state": np.full(8, np.nan)}, "observation/state has NaN or Inf"),
        ({"observation/image": np.zeros((4, 4, 4), np.uint8)}, r"observation/image has shape \(4, 4, 4\)"),
        ({"observation/image": np.zeros((3, 4), np.uint8)}, r"observation/image has shape \(3, 4\)"),
        ({"observation/image": np.full((4, 4, 3), -1.0)}, "values from -1 to -1; floats must lie in"),
        ({"observation/image": np.full((4, 4, 3), 255.0)}, "values from 255 to 255"),
        ({"observation/image": np.full((4, 4, 3), np.nan)}, "values from nan to nan"),
        ({"observation/image": np.zeros((4, 4, 3), np.int64)}, "an image of int64; send uint8"),
    ],
)
def test_data_of_another_kind_is_refused(change: Data, message: str) -> None:
    with pytest.raises(UserError, match=message):
        enter(ROBOTS["libero"], libero_data() | change)


# Images


def test_float_images_of_lerobot_become_the_uint8_they_were() -> None:
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    floats = np.moveaxis(pixels, -1, 0).astype(np.float32) / 255
    np.testing.assert_array_equal(to_uint8(floats), pixels)


def test_batches_of_images_keep_their_axes() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3), dtype=np.uint8)
    np.testing.assert_array_equal(to_uint8(np.moveaxis(pixels, -1, -3)), pixels)


def test_a_batch_of_observations_enters_like_its_frames() -> None:
    frames = [libero_data(), libero_data() | {"observation/state": np.ones(8)}]
    batch = {key: np.stack([frame[key] for frame in frames]) for key in frames[0] if key != "prompt"}
    out, single = enter(ROBOTS["libero_delta"], batch), enter(ROBOTS["libero_delta"], frames[1])
    np.testing.assert_array_equal(out["actions"][1], single["actions"])
    assert out["image_mask"]["right_wrist_0_rgb"].tolist() == [False, False]


# From data to the model and back


def test_from_a_dataset_row_to_the_models_input() -> None:
    robot = ROBOTS["droid"]
    row = {
        "exterior_image_1_left": np.full((3, 6, 4), 0.5, np.float32),
        "exterior_image_2_left": np.zeros((3, 6, 4), np.float32),
        "wrist_image_left": np.full((3, 6, 4), 1.0, np.float32),
        "joint_position": np.arange(7, dtype=np.float32),
        "gripper_position": np.array([0.5], np.float32),
        "actions": np.ones((10, 8), np.float32),
    }
    transform = input_transform(
        robot,
        stats_for(robot),
        "quantile",
        FakeTokenizer(),
        action_dim=32,
        image_size=8,
        discrete_state=True,
        default_prompt="pick up",
        repack=robot.repack,
    )
    before = copy.deepcopy(row)
    out = pickle.loads(pickle.dumps(transform))(row)
    np.testing.assert_equal(row, before)
    assert sorted(out) == ["actions", "image", "image_mask", "state", "tokenized_prompt", "tokenized_prompt_mask"]
    assert {name: image.shape for name, image in out["image"].items()} == dict.fromkeys(CAMERAS, (8, 8, 3))
    # The state is written out unpadded: 8 numbers.
    np.testing.assert_array_equal(out["tokenized_prompt"], [len("pick up"), 8])
    assert out["state"].shape == (32,)
    assert out["state"].dtype == out["actions"].dtype == np.float32
    spread = np.linspace(0.5, 2.0, 8)
    state = (np.array([0, 1, 2, 3, 4, 5, 6, 0.5]) + spread) / (3 * spread + 1e-6) * 2 - 1
    np.testing.assert_allclose(out["state"][:8], state, rtol=1e-6)


@pytest.mark.parametrize("norm", ["zscore", "quantile"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_actions_come_back_to_the_robot_as_they_went_in(name: str, norm: Norm) -> None:
    robot = ROBOTS[name]
    data = EXAMPLES[name]() | {"prompt": "go"}
    data["actions"] = np.random.default_rng(0).uniform(0, 1, data["actions"].shape)
    out = model_input(robot, norm, data)
    back = output_transform(robot, stats_for(robot), norm)({"state": out["state"], "actions": out["actions"]})
    assert list(back) == ["actions"]
    np.testing.assert_allclose(back["actions"], data["actions"], atol=1e-5)


def test_acting_needs_no_actions(aloha_data: Data) -> None:
    del aloha_data["actions"]
    assert "actions" not in model_input(ROBOTS["aloha"], "zscore", aloha_data)


@pytest.mark.parametrize("name", ROBOTS)
def test_the_example_observation_is_one_the_robot_understands(name: str) -> None:
    robot = ROBOTS[name]
    out = enter(robot, example_observation(robot, "wave", image_size=8))
    assert out["state"].shape == (robot.state_dim,)
    size = 8 if any(robot.cameras.values()) else 1
    assert all(image.shape == (size, size, 3) for image in out["image"].values())
    assert [bool(mask) for mask in out["image_mask"].values()] == [path is not None for path in robot.cameras.values()]


def test_a_gripper_may_come_as_a_bare_number() -> None:
    data = droid_data() | {"observation/gripper_position": np.float32(0.5)}
    np.testing.assert_array_equal(enter(ROBOTS["droid"], data)["state"], enter(ROBOTS["droid"], droid_data())["state"])


def row(cameras: dict[str, int], **columns: np.ndarray) -> Data:
    """A LeRobot row: an image of one brightness per camera column, and its other columns."""
    return {name: picture(brightness) for name, brightness in cameras.items()} | columns | {"prompt": "go"}


ALOHA_COLUMNS = {"observation.state": np.zeros(14), "action": np.ones((2, 14))}
ALOHA_CAMERAS = [f"observation.images.{name}" for name in ("cam_high", "cam_left_wrist", "cam_right_wrist")]
LEROBOT_ROWS = {
    "aloha": row({name: i for i, name in enumerate(ALOHA_CAMERAS, 1)}, **ALOHA_COLUMNS),
    "aloha_sim": row({"observation.images.top": 1}, **ALOHA_COLUMNS),
    "libero": row({"image": 1, "wrist_image": 2}, state=np.zeros(8), actions=np.ones((2, 7))),
    "droid": row(
        {"exterior_image_1_left": 1, "wrist_image_left": 2},
        joint_position=np.zeros(7),
        gripper_position=np.zeros(1),
        actions=np.ones((2, 8)),
    ),
}


@pytest.mark.parametrize(("name", "views"), [("aloha", 3), ("aloha_sim", 1), ("libero", 2), ("droid", 2)])
def test_columns_of_the_usual_datasets_reach_their_place(name: str, views: int) -> None:
    robot = ROBOTS[name]
    out = compose(Repack(robot.repack), *robot.inputs)(LEROBOT_ROWS[name])
    for i, camera in enumerate(CAMERAS):
        assert bool(out["image_mask"][camera]) is (i < views)
        np.testing.assert_array_equal(out["image"][camera], picture(i + 1) if i < views else 0)
    assert out["actions"].shape == (2, robot.action_dim)


def test_the_prompts_state_is_normalised_and_not_padded() -> None:
    seen: list[np.ndarray | None] = []

    class Listener:
        def tokenize(self, prompt: str, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
            seen.append(state)
            return np.zeros(4, np.int32), np.ones(4, bool)

    robot = ROBOTS["libero"]
    stats = {
        "state": NormStats(mean=np.full(8, 2.0), std=np.full(8, 4.0)),
        "actions": NormStats(np.zeros(7), np.ones(7)),
    }
    data = libero_data() | {"observation/state": np.full(8, 6.0)}
    input_transform(robot, stats, "zscore", Listener(), action_dim=32, image_size=8, discrete_state=True)(data)
    (state,) = seen
    assert state is not None
    np.testing.assert_allclose(state, np.ones(8), rtol=1e-5)  # (6 − 2) / 4
