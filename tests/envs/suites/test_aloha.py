"""gym-aloha's two tasks in their real simulator, compared with gym-aloha's own environment."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pistar.data.robots import RobotInputs, find_robot
from pistar.envs.base import EnvOptions, find_tasks, make_env
from pistar.envs.rollout import Rollout, roll_out
from pistar.envs.suites.aloha import Aloha, arm_joints
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import Script
from pistar.errors import UserError

from helpers.rollouts import assert_same_episodes, run_killing

pytestmark = pytest.mark.usefixtures("models_compiled_once")
BLIND = EnvOptions(cameras=())
HIGH = "images/cam_high"


def made(task: str = "transfer-cube", options: EnvOptions = BLIND) -> Aloha:
    env = make_env(f"aloha/{task}", options)
    assert isinstance(env, Aloha)
    return env


@pytest.fixture(scope="module")
def blind() -> Iterator[Aloha]:
    env = made()
    yield env
    env.close()


@pytest.fixture(scope="module")
def seeing() -> Iterator[Aloha]:
    env = made(options=EnvOptions(image_size=64))
    yield env
    env.close()


SHORT = dataclasses.replace(BLIND, limit=25)
SCRIPT = Script("pistar.envs.scripted:expert", {"noise": 0.02}, seed=4)
STARTS = range(6)


@pytest.fixture(scope="module")
def in_this_process() -> list[Rollout]:
    with Environments("aloha/transfer-cube", SHORT, count=1, workers=0, chunk=10) as envs:
        return list(roll_out(envs, STARTS, SCRIPT, execute=1, record=True))


def bodies(env: Aloha) -> tuple[bytes, bytes]:
    """Return all positions and speeds as bytes."""
    return env._physics.data.qpos.tobytes(), env._physics.data.qvel.tobytes()


def moved(env: Aloha, start_id: int, steps: int = 60) -> tuple[bytes, bytes]:
    """Return where everything is after some steps. Anything that `begin` did not reset would show here."""
    env.begin(start_id)
    for _ in range(steps):
        env.act(env.expert_action() if "transfer" in env.scene.name else np.full(14, 0.1))
    return bodies(env)


def expert_steps(env: Aloha, start_id: int, noise: float = 0.0) -> int | None:
    """Return the steps to success, or None."""
    env.begin(start_id)
    rng = np.random.default_rng(start_id)
    for step in range(env.scene.limit):
        _, ending, _ = env.act(env.expert_action() + noise * rng.normal(size=14))
        if ending == "success":
            return step + 1
    return None


def red(image: np.ndarray) -> np.ndarray:
    """Return rows and columns of red pixels."""
    r, g, b = np.moveaxis(image.astype(int), -1, 0)
    return np.argwhere((r > 120) & (g < r / 2) & (b < r / 2))


def test_importing_the_module_does_not_import_the_simulator() -> None:
    program = (
        "import sys, pistar.envs.suites.aloha; "
        "sys.exit(bool({'gym_aloha', 'dm_control', 'mujoco', 'jax'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_tasks_are_the_cube_and_the_peg() -> None:
    assert find_tasks("aloha/transfer-cube") == ["aloha/transfer-cube"]
    assert find_tasks("aloha/insertion") == ["aloha/insertion"]
    with pytest.raises(UserError, match="did you mean transfer-cube"):
        find_tasks("aloha/transfercube")


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gym_aloha", "gym_aloha.constants"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"gym-aloha is not installed.*pip install 'pistar-rl\[aloha\]'"):
        made()


@pytest.mark.parametrize("task", ["transfer-cube", "insertion"])
def test_a_start_is_the_same_to_the_bit_whatever_came_before(task: str) -> None:
    env, fresh = made(task), made(task)
    first = moved(env, 7)
    assert moved(env, 1_000_003) != first
    assert moved(env, 7) == first
    assert moved(fresh, 7) == first
    fresh.begin(8)  # another environment's start must not leak into this one
    env.begin(7)
    fresh.begin(7)
    assert bodies(env) == bodies(fresh)


def test_saved_midway_it_goes_on_elsewhere_to_the_bit(blind: Aloha) -> None:
    blind.begin(11)
    for _ in range(40):
        blind.act(blind.expert_action())
    saved, there, command = blind.save(), bodies(blind), blind.expert_action()
    blind.act(command)
    after = bodies(blind)
    other = made()
    other.restore(saved)
    assert bodies(other) == there
    np.testing.assert_array_equal(other.expert_action(), command)
    other.act(command)
    assert bodies(other) == after


def test_held_out_start_states_differ_from_those_to_train_on(blind: Aloha) -> None:
    scene = blind.scene
    assert (scene.train, scene.held_out) == (range(10_000), range(1_000_000, 1_001_000))
    layouts = set()
    for start_id in (0, 1, 9_999, 1_000_000, 1_000_001, 1_000_999):
        blind.begin(start_id)
        layouts.add(bodies(blind))
    assert len(layouts) == 6
    with pytest.raises(UserError, match="no start state 10000"):
        blind.begin(10_000)


def test_state_and_reward_are_those_of_gym_aloha(blind: Aloha, monkeypatch: pytest.MonkeyPatch) -> None:
    from gym_aloha.env import AlohaEnv

    theirs: Any = AlohaEnv("transfer_cube", obs_type="pixels_agent_pos")
    monkeypatch.setattr(
        theirs._env.physics, "render", lambda **_: np.zeros((480, 640, 3), np.uint8)
    )  # costs three images a step
    seen, _ = theirs.reset(seed=21)
    blind.begin(21)
    np.testing.assert_array_equal(blind.observe()["state"], seen["agent_pos"])
    for _ in range(blind.scene.limit):
        command, ending, _ = blind.act(blind.expert_action())
        seen, reward, _, _, _ = theirs.step(command)
        np.testing.assert_array_equal(blind.observe()["state"], seen["agent_pos"])
        assert (ending == "success") == (reward == 4)
        if reward == 4:
            break
    else:
        pytest.fail("the expert never got there, so success went untested")


def test_images_equal_openpis_clients_with_shadows_and_nearly_without() -> None:
    from gym_aloha.env import AlohaEnv

    theirs, _ = AlohaEnv("transfer_cube", obs_type="pixels_agent_pos").reset(seed=21)
    shrunk = np.asarray(Image.fromarray(theirs["pixels"]["top"]).resize((224, 168), Image.Resampling.BILINEAR))
    lean, _ = made(options=EnvOptions()).reset(options={"start_id": 21})
    assert 0 < np.abs(lean[HIGH].astype(int) - shrunk.astype(int)).mean() < 3
    env = made(options=EnvOptions(shadows=True))
    ours, _ = env.reset(options={"start_id": 21})
    np.testing.assert_array_equal(ours[HIGH], shrunk)
    read = RobotInputs(find_robot(env.scene.robot))(dict(ours))
    np.testing.assert_array_equal(read["image"]["base_0_rgb"], ours[HIGH])
    assert [bool(there) for there in read["image_mask"].values()] == [True, False, False]


@pytest.mark.parametrize("start_id", [2, 1_000_004])
def test_picture_shows_the_cube_where_it_lies(seeing: Aloha, start_id: int) -> None:
    seeing.begin(start_id)
    for _ in range(10):  # it is dropped from a little above the table
        seeing.act(seeing.observe()["state"])
    image = seeing.observe()[HIGH]
    assert image.shape == (48, 64, 3)
    assert image.dtype == np.uint8
    x, y = seeing._physics.named.data.xpos["box"][:2]
    # The camera hangs 0.76 m above the cube's top, over (0, 0.6), and sees 78° from top to bottom.
    pixels_per_metre = 24 / np.tan(np.radians(39)) / 0.76
    there = (23.5 + pixels_per_metre * (0.6 - y), 31.5 + pixels_per_metre * x)
    np.testing.assert_allclose(red(image).mean(axis=0), there, atol=1)


def test_only_cameras_asked_for_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    env = made(options=EnvOptions(cameras=("images/angle", HIGH), image_size=32))
    rendered: list[str] = []
    picture = env._cameras.render

    def noted(data: Any, camera: str, height: int, width: int) -> Any:
        rendered.append(camera)
        return picture(data, camera, height, width)

    monkeypatch.setattr(env._cameras, "render", noted)
    env.begin(0)
    env.act(env.expert_action())
    assert rendered == []
    seen = env.observe()
    assert rendered == ["angle", "top"]
    assert {name: value.shape for name, value in seen.items()} == {
        "state": (14,),
        "images/angle": (24, 32, 3),
        HIGH: (24, 32, 3),
    }
    assert not np.array_equal(seen["images/angle"], seen[HIGH])


def test_without_cameras_there_are_joints_only_and_still_a_picture_for_people(blind: Aloha) -> None:
    blind.begin(0)
    assert list(blind.observe()) == ["state"]
    picture = blind.render()
    assert picture.shape == (240, 320, 3)
    assert len(red(picture)) > 20


def test_environments_of_one_process_do_not_disturb_each_others_images(seeing: Aloha) -> None:
    other = made("insertion", EnvOptions(image_size=96))
    for env in (seeing, other):
        env.begin(3)
    alone = seeing.observe()[HIGH]
    theirs = other.observe()[HIGH]
    np.testing.assert_array_equal(seeing.observe()[HIGH], alone)
    other.render()
    np.testing.assert_array_equal(other.observe()[HIGH], theirs)
    other.close()
    np.testing.assert_array_equal(seeing.observe()[HIGH], alone)


def test_images_may_be_larger_than_the_simulators_buffer() -> None:
    env = made(options=EnvOptions(image_size=960))
    assert env.reset(options={"start_id": 0})[0][HIGH].shape == (720, 960, 3)


def test_unknown_camera_is_told_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no camera 'images/cam_hihg'; did you mean images/cam_high"):
        made(options=EnvOptions(cameras=("images/cam_hihg",)))


def test_actions_are_clipped_to_the_models_limits(blind: Aloha) -> None:
    low, high = blind._physics.model.actuator_ctrlrange[:6].T
    np.testing.assert_allclose(blind.scene.action_low, [*low, 0, *low, 0], rtol=1e-6)
    np.testing.assert_allclose(blind.scene.action_high, [*high, 1, *high, 1], rtol=1e-6)
    ends = []
    for command in (np.full(14, 9.0), np.array(blind.scene.action_high)):
        blind.begin(0)
        np.testing.assert_allclose(blind.act(command)[0], blind.scene.action_high)
        ends.append(bodies(blind))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_episodes_are_the_same_to_the_bit_over_any_number_of_workers_and_after_one_was_killed(
    in_this_process: list[Rollout], workers: int
) -> None:
    with Environments("aloha/transfer-cube", SHORT, count=4, workers=workers, chunk=10) as envs:
        rollouts = roll_out(envs, STARTS, SCRIPT, execute=1, record=True)
        found = run_killing(envs, 1, rollouts) if workers == 2 else list(rollouts)
    assert any(rollout.faults for rollout in found) == (workers == 2)
    assert_same_episodes(found, in_this_process)
    lasts = {rollout.episode.actions[-1].tobytes() for rollout in found if rollout.episode is not None}
    assert len(lasts) == len(STARTS)


def test_images_are_the_same_to_the_bit_here_in_two_workers_and_after_one_was_killed() -> None:
    seeing, found = EnvOptions(cameras=(HIGH,), image_size=64, limit=4), []
    for workers in (0, 2):
        with Environments("aloha/transfer-cube", seeing, count=2, workers=workers, chunk=10) as envs:
            rollouts = roll_out(envs, STARTS[:3], SCRIPT, execute=1, record=True)
            found.append(run_killing(envs, 1, rollouts) if workers else list(rollouts))
    assert_same_episodes(*found)
    images = [rollout.episode.observations[HIGH] for rollout in found[0] if rollout.episode is not None]
    assert [each.shape[1:] for each in images] == [(48, 64, 3)] * 3
    assert not np.array_equal(images[0], images[1]), "another start state looks different"


def test_running_out_of_time_is_no_failure() -> None:
    env = made(options=EnvOptions(cameras=(), limit=3))
    seen, _ = env.reset(options={"start_id": 0})
    endings = [env.step(seen["state"])[1:] for _ in range(3)]
    assert [(reward, over, cut) for reward, over, cut, _ in endings] == [
        (0.0, False, False),
        (0.0, False, False),
        (0.0, False, True),
    ]
    assert not endings[-1][-1]["success"]


def test_limit_is_gym_alohas(blind: Aloha) -> None:
    assert (blind.scene.limit, blind.scene.fps, blind.scene.instruction) == (300, 50, "Transfer cube")


def test_expert_hands_over_nine_cubes_of_ten(blind: Aloha) -> None:
    steps = [expert_steps(blind, start_id) for start_id in range(1_000_500, 1_000_510)]
    assert sum(each is not None for each in steps) >= 9


def test_the_expert_corrects_disturbed_actions(blind: Aloha) -> None:
    assert sum(expert_steps(blind, start_id, noise=0.01) is not None for start_id in range(4)) >= 3


@pytest.mark.parametrize("side", ["left", "right"])
def test_arm_joints_bring_the_fingertips_there(blind: Aloha, side: Any) -> None:
    blind.begin(0)
    tips = np.array([-0.1 if side == "left" else 0.1, 0.56, 0.21])
    joints = arm_joints(side, tips, pitch=0.7, roll=0.3)
    with blind._physics.reset_context():
        blind._physics.data.qpos[(0 if side == "left" else 8) :][:6] = joints
    np.testing.assert_allclose(blind._fingertips(side), tips, atol=1e-5)
    assert np.isfinite(arm_joints(side, 10 * tips, pitch=0.0, roll=0.0)).all()  # out of reach


def test_insertion_is_done_when_the_peg_meets_the_pin() -> None:
    env = made("insertion")
    env.begin(0)
    assert env.act(env.observe()["state"])[1] == "running"
    socket = np.array([0.0, 0.5, 0.05, 1, 0, 0, 0])
    # Peg and pin reach 0.06 and 0.04 m from their centres, so they touch when 0.1 m apart.
    for apart, ending in ((0.15, "running"), (0.099, "success")):
        peg = socket + np.array([apart, 0, 0, 0, 0, 0, 0])
        env._draw_layout = lambda seed, peg=peg: (peg, socket)
        env.begin(0)
        assert env.act(env.observe()["state"])[1] == ending


def test_insertion_has_no_expert() -> None:
    env = made("insertion")
    env.begin(0)
    with pytest.raises(UserError, match="aloha/insertion has no scripted expert"):
        env.expert_action()
