"""Meta-World in its real simulator, compared with the original where ours is faster."""

import importlib.util
import pickle
import sys

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from pistar.envs import rendering
from pistar.envs.base import EnvOptions, find_tasks, make_env
from pistar.envs.scripted import mixed
from pistar.envs.suites.metaworld import INSTRUCTIONS, MetaWorld, QuickRotation, touching
from pistar.errors import UserError

pytestmark = pytest.mark.usefixtures("models_compiled_once")
TASKS = ("pick-place-v3", "door-open-v3", "stick-push-v3")


@pytest.fixture(scope="module")
def arm() -> MetaWorld:
    made = make_env("metaworld/pick-place-v3", EnvOptions(limit=200))
    assert isinstance(made, MetaWorld)
    return made


def run_expert(env: MetaWorld, start_id: int, steps: int = 500) -> tuple[np.ndarray, str]:
    """Return the observations and the last status."""
    env.begin(start_id)
    seen, ending = [env.observe()["environment_state"]], "running"
    for _ in range(steps):
        _, ending, truncated = env.act(env.expert_action())
        seen.append(env.observe()["environment_state"])
        if ending != "running" or truncated:
            break
    return np.array(seen), ending


def test_each_of_the_fifty_tasks_has_its_own_instruction() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    assert set(INSTRUCTIONS) == set(ALL_V3_ENVIRONMENTS)
    assert len(set(INSTRUCTIONS.values())) == 50
    assert find_tasks("metaworld/sweep-v3") == ["metaworld/sweep-v3"]


@pytest.mark.parametrize("task", TASKS)
def test_an_episode_comes_again_to_the_bit_after_others_and_elsewhere(task: str) -> None:
    env, other = (make_env(f"metaworld/{task}") for _ in range(2))
    assert isinstance(env, MetaWorld)
    assert isinstance(other, MetaWorld)
    first, _ = run_expert(env, 7, 40)
    run_expert(env, 1_000_003, 25)
    again, _ = run_expert(env, 7, 40)
    elsewhere, _ = run_expert(other, 7, 40)
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(elsewhere, first)


def test_start_states_differ_and_are_meta_worlds_own(arm: MetaWorld) -> None:
    firsts = []
    for start_id in (0, 1, 1_000_000, 1_000_001):
        arm.begin(start_id)
        firsts.append(arm.observe()["environment_state"])
    assert len({first.tobytes() for first in firsts}) == 4
    for first in firsts:  # the puck's and the goal's boxes in pick-place-v3's source, and how near they may be
        puck, goal = first[4:7], first[36:39]
        assert (np.abs(puck[0]) <= 0.1001) & (0.599 <= puck[1] <= 0.701)
        assert (np.abs(goal[0]) <= 0.1001) & (0.799 <= goal[1] <= 0.901) & (0.049 <= goal[2] <= 0.301)
        assert np.linalg.norm(puck[:2] - goal[:2]) >= 0.14


def test_the_expert_succeeds_and_success_ends_the_episode(arm: MetaWorld) -> None:
    endings = [run_expert(arm, start_id)[1] for start_id in range(1_000_000, 1_000_008)]
    assert endings.count("success") >= 7


@pytest.mark.parametrize("task", INSTRUCTIONS)
def test_faster_steps_and_resets_equal_meta_worlds(task: str) -> None:
    """Run both side by side, with the expert and with random actions: observations, positions and successes are equal,
    also from a start state that comes a second time, when its places are not drawn again."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.types import Task

    ours = MetaWorld(task, EnvOptions())
    kind = ALL_V3_ENVIRONMENTS[task]
    theirs = kind()
    rng = np.random.default_rng(0)
    began: dict[int, np.ndarray] = {}
    won = False
    for start_id, by_expert in ((3, 20), (1_000_001, 0), (3, 500)):
        ours.begin(start_id)
        sim = ours._sim
        theirs.seed(start_id)
        theirs._freeze_rand_vec, theirs.seeded_rand_vec = False, True
        theirs.reset()
        np.testing.assert_array_equal(ours._start_vector(start_id), theirs._last_rand_vec)
        start = {"env_cls": kind, "rand_vec": theirs._last_rand_vec, "partially_observable": False}
        theirs.set_task(Task(task, pickle.dumps(start)))
        np.testing.assert_allclose(ours._now, theirs.reset()[0], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(sim.data.qpos, theirs.data.qpos)
        np.testing.assert_array_equal(sim.data.qvel, theirs.data.qvel)
        for places in ("xpos", "geom_xpos", "site_xpos"):  # what images show
            ours_are, theirs_are = (getattr(each.data, places) for each in (sim, theirs))
            np.testing.assert_allclose(ours_are, theirs_are, rtol=0, atol=1e-5, err_msg=places)
        shown = np.concatenate([sim.data.xpos.ravel(), sim.data.site_xpos.ravel(), sim.data.geom_xmat.ravel()])
        np.testing.assert_array_equal(began.setdefault(start_id, shown), shown)
        for step in range(by_expert + 10):
            action = (ours.expert_action() if step < by_expert else rng.uniform(-1, 1, 4)).astype(np.float32)
            seen, _, _, _, told = theirs.step(action)
            ours._now, _, _, _, told_ours = sim.step(action)
            np.testing.assert_allclose(ours._now, seen, rtol=0, atol=1e-12)
            assert told_ours["success"] == told["success"]
            won |= bool(told["success"])
            if won and step >= 100:
                break
    assert won, "else equal successes would prove nothing"


def test_quick_rotations_are_scipys() -> None:
    turns = [*Rotation.create_group("O").as_matrix(), *Rotation.random(500, random_state=0).as_matrix()]
    for matrix in turns:
        theirs = Rotation.from_matrix(matrix).as_quat()
        np.testing.assert_allclose(QuickRotation.from_matrix(matrix).as_quat(), theirs, rtol=0, atol=1e-15)


def test_touching_equals_meta_worlds(arm: MetaWorld) -> None:
    sim = arm._sim
    arm.begin(1_000_000)
    seen = set()
    for _ in range(80):
        arm.act(arm.expert_action())
        for geom in {sim._get_id_main_object(), *sim.data.contact.geom.ravel().tolist()}:
            theirs = type(sim).touching_object(sim, geom)
            assert touching(sim, geom) == sim.touching_object(geom) == theirs
            seen.add(bool(theirs))
    assert seen == {True, False}


def test_an_episode_is_taken_up_again_to_the_bit(arm: MetaWorld) -> None:
    arm.begin(3)
    for _ in range(20):
        arm.act(arm.expert_action())
    saved = arm.save()
    actions = [np.array([0.3, 0.2, -0.5, 1.0])] * 10
    seen = []
    for _ in range(2):
        for action in actions:
            arm.act(action)
        seen.append(arm.observe()["environment_state"])
        arm.restore(saved)
    np.testing.assert_array_equal(seen[0], seen[1])


def test_the_state_is_hand_and_object_now_and_a_step_ago_and_the_goal(arm: MetaWorld) -> None:
    arm.begin(0)
    before = arm.observe()["environment_state"]
    arm.act(np.array([1.0, 0, 0, 0]))
    seen = arm.observe()
    state, everything = seen["state"], seen["environment_state"]
    assert state.shape == (17,)
    assert state.dtype == np.float32
    np.testing.assert_array_equal(state[:7], everything[:7])
    np.testing.assert_array_equal(state[7:14], before[:7])
    np.testing.assert_array_equal(state[14:], everything[36:])
    assert everything[0] > before[0]


def test_cameras_that_are_asked_for_show_the_scene() -> None:
    env = make_env("metaworld/pick-place-v3", EnvOptions(cameras=("images/corner2", "images/topview"), image_size=48))
    other = make_env("metaworld/pick-place-v3", EnvOptions(cameras=("images/corner2", "images/topview"), image_size=48))
    env.begin(0)
    other.begin(1)
    first, second = env.observe(), other.observe()  # two in one process must not disturb each other
    assert first["images/corner2"].shape == (48, 48, 3)
    assert not np.array_equal(first["images/corner2"], second["images/corner2"])
    np.testing.assert_array_equal(env.observe()["images/topview"], first["images/topview"])
    red = first["images/topview"].astype(int)
    assert ((red[..., 0] > 100) & (red[..., 1] < 60)).mean() > 0.05, "the Sawyer is red and in the middle"
    top, bottom = first["images/corner2"][:10].std(), first["images/corner2"][-20:].std()
    assert bottom > top, "there is more to see on the table than above it"
    assert env.scene.cameras == {"images/corner2": (48, 48), "images/topview": (48, 48)}


def test_an_unknown_camera_is_refused() -> None:
    with pytest.raises(UserError, match=r"Meta-World has no camera 'images/corner5'; did you mean images/corner"):
        make_env("metaworld/pick-place-v3", EnvOptions(cameras=("images/corner5",)))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "metaworld.env_dict", None)
    with pytest.raises(UserError, match=r"metaworld is not installed .*; pip install 'pistar-rl\[metaworld\]'"):
        make_env("metaworld/reach-v3")


def test_a_missing_mujoco_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not graphics libraries, which are useless without it."""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *args: None if name == "mujoco" else find(name, *args))
    with pytest.raises(UserError, match=r"metaworld is not installed \(No module named 'mujoco'\); pip install"):
        make_env("metaworld/reach-v3")


def test_numbers_alone_need_no_graphics(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MUJOCO_GL", "PYOPENGL_PLATFORM"):
        monkeypatch.setenv(variable, "")  # restored after the test
    monkeypatch.setattr(rendering, "_PROBE", "raise SystemExit('no display')")
    rendering.headless.cache_clear()
    env = make_env("metaworld/reach-v3")
    env.begin(3)
    env.act(np.zeros(4))
    with pytest.raises(UserError, match="MuJoCo cannot render here"):
        env.render()
    rendering.headless.cache_clear()


def test_the_mixed_expert_is_the_expert_in_a_quarter_of_its_segments(arm: MetaWorld) -> None:
    arm.begin(0)
    act = mixed(arm, np.random.default_rng(0), noise=0.0)
    alike = [np.array_equal(act(), arm.expert_action()) for _ in range(3000)]
    # 1/4 + 3/4 · 1/4: a shifted goal does not matter as long as the gripper is empty.
    assert abs(np.mean(alike) - 0.4375) < 0.05
    runs = np.diff(np.flatnonzero(np.diff([0, *map(int, alike), 0])))[::2]
    assert runs.max() > 6
