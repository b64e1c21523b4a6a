"""Counting successes, in the toy environment where possible; and a learned policy in real simulators."""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from pistar.data.lerobot.reader import open_dataset
from pistar.data.robots import Robot, find_robot
from pistar.envs.base import FAMILIES, EnvOptions, Scene, StartEnv, make_env
from pistar.envs.rollout import Act, Request, Rollout, batch_size, roll_out
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import Script
from pistar.errors import UserError
from pistar.evaluation.evaluate import (
    ActingPolicy,
    EpisodeSettings,
    PolicyRecord,
    StartSplit,
    choose_starts,
    dataset_writer,
    evaluate,
    prepare_evaluation,
    run_task,
    with_cameras,
)
from pistar.evaluation.results import Evaluation, faults_of
from pistar.policy.actor import Actor
from pistar.policy.load_policy import load_policy
from pistar.types import Episode

from helpers.drift_envs import built
from helpers.metaworld_policy import fresh_checkpoint

TOY = "helpers.toy_env:make"
ROBOT = Robot(
    name="toy",
    action_dim=2,
    state_keys={"state": 2},
    cameras={"base_0_rgb": None},
    repack={"state": "observation.state", "actions": "action", "prompt": "prompt"},
)
CHUNK = 4


def homeward(starts: Sequence[int]) -> Act:
    """Go home from these start states; stay in place from all others."""

    def act(requests: Sequence[Request]) -> np.ndarray:
        chunks = np.zeros((len(requests), CHUNK, 2))
        for chunk, request in zip(chunks, requests, strict=True):
            if request.start_id in starts:
                chunk[0] = -request.observation["state"]  # clipped to 0.2 a step; at most 1.5 away
        return chunks

    return act


def acting(act: Act, robot: Robot | None = ROBOT) -> ActingPolicy:
    return ActingPolicy(lambda _: act, robot, CHUNK)


def settings(**changes: object) -> EpisodeSettings:
    return dataclasses.replace(
        EpisodeSettings(TOY, episodes=6, execute=1, environments=3, workers=0, options=EnvOptions(limit=15)),
        **changes,  # type: ignore[arg-type]
    )


NO_CHECKPOINT = PolicyRecord(checkpoint="", weights="serving")


def evaluated(
    how: EpisodeSettings, policy: ActingPolicy, each: Callable[[Scene, int, Rollout], object] = lambda *_: None
) -> Evaluation:
    return evaluate(prepare_evaluation(how, policy, NO_CHECKPOINT), how, policy, each=each)


def test_successes_are_counted_start_state_by_start_state() -> None:
    episodes: list[tuple[str, int, int]] = []
    how, policy = settings(seed=3), acting(homeward([100, 102, 105]))
    record = PolicyRecord("mine", "raw", 2, True, "positive", 1.5, {"robot": "toy"}, "0" * 64)
    prepared = prepare_evaluation(how, policy, record)
    assert [trial.success for trial in prepared.results[0].trials] == [None] * 6, "nothing has been run"
    found = evaluate(
        prepared, how, policy, each=lambda scene, total, rollout: episodes.append((scene.name, total, rollout.start_id))
    )
    (task,) = found.results
    assert [(trial.start_id, trial.success) for trial in task.trials] == [
        (start, start in (100, 102, 105)) for start in range(100, 106)
    ]
    assert (task.env, task.instruction, task.limit) == (TOY, "come home", 15)
    assert (task.counts.succeeded, task.counts.of, task.counts.not_run, task.counts.rate) == (3, 6, 0, 0.5)
    assert all(trial.steps == 15 for trial in task.trials if not trial.success)
    assert all(1 <= trial.steps < 15 for trial in task.trials if trial.success)
    assert {name: getattr(found, name) for name in vars(record)} == vars(record)
    assert (found.execute, found.starts, found.seed) == (1, "held-out", 3)
    assert episodes == [("toy", 6, start) for start in range(100, 106)]
    assert (prepared.complete, found.complete, found.device, found.drawn_by) == (False, True, "cpu", None)
    assert "pistar-rl" in found.versions
    assert "metaworld" in found.versions


def test_the_results_of_a_suite_are_reported_after_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toys", "helpers.toy_suite")
    how, policy = settings(env="toys/both", episodes=2), acting(homeward([]))
    reports: list[Evaluation] = []
    found = evaluate(prepare_evaluation(how, policy, NO_CHECKPOINT), how, policy, each_task=reports.append)
    assert [[task.env for task in each.results] for each in reports] == [["toys/home"], ["toys/home", "toys/far"]]
    assert [each.complete for each in reports] == [False, True]
    assert (reports[0].counts.of, reports[0].counts.not_run) == (2, 0), "without the task that has not begun"
    assert reports[1] == found


@pytest.mark.parametrize(
    ("env", "workers", "count"),
    [("libero/spatial/3", 3, 6), ("libero/spatial", 64, 16), ("libero/10", 0, 2), (TOY, 2, 16), (TOY, 0, 16)],
)
def test_large_simulators_have_two_environments_per_worker_by_default(env: str, workers: int, count: int) -> None:
    assert EpisodeSettings(env, workers=workers).side_by_side == count
    assert EpisodeSettings(env, workers=workers, environments=5).side_by_side == 5


def test_an_evaluation_records_its_number_of_environments() -> None:
    how, policy = settings(environments=None, episodes=1), acting(homeward([]))
    assert prepare_evaluation(how, policy, NO_CHECKPOINT).environments == 16


@pytest.mark.parametrize(
    ("cameras", "films", "drawn_by"), [((), 0, None), (("images/a",), 0, "by hand"), ((), 1, "by hand")]
)
def test_the_renderer_is_recorded_where_it_rendered(
    cameras: tuple[str, ...], films: int, drawn_by: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", sys)
    monkeypatch.setenv("MUJOCO_GL", "by hand")
    how = settings(episodes=1, films=films, options=EnvOptions(limit=2, cameras=cameras))
    assert evaluated(how, acting(homeward([]))).drawn_by == drawn_by


@pytest.mark.parametrize(("execute", "executed"), [(None, CHUNK), (1, 1), (3, 3)])
def test_that_many_actions_of_a_chunk_are_executed(execute: int | None, executed: int) -> None:
    steps: set[int] = set()

    def act(requests: Sequence[Request]) -> np.ndarray:
        steps.update(request.step for request in requests)
        return np.zeros((len(requests), CHUNK, 2))

    found = evaluated(settings(execute=execute, episodes=2), acting(act))
    assert found.execute == executed
    assert steps == set(range(0, 15, executed))


@pytest.mark.parametrize("workers", [0, 1])
def test_long_chunks_are_executed_completely(workers: int) -> None:
    stay = ActingPolicy(lambda _: lambda requests: np.zeros((len(requests), 100, 2)), ROBOT, 100)
    found = evaluated(settings(execute=None, episodes=2, workers=workers, options=EnvOptions(limit=120)), stay)
    assert found.execute == 100
    assert [trial.steps for trial in found.results[0].trials] == [120, 120]


@pytest.mark.parametrize(("kind", "counted"), [("always", False), ("deadly", None), ("never", None)])
def test_failures_of_the_simulator_count_as_the_policys_unless_its_worker_died_or_never_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, counted: bool | None
) -> None:
    monkeypatch.setenv("INJECTED_FAULTS", str(tmp_path))
    (tmp_path / f"101.{kind}").touch()
    everywhere = acting(homeward(range(100, 106)))
    found = evaluated(settings(workers=1), everywhere)
    (task,) = found.results
    assert [trial.success for trial in task.trials] == [True, counted, True, True, True, True]
    of = 6 if counted is False else 5
    assert (task.counts.succeeded, task.counts.of, task.counts.not_run) == (5, of, 6 - of)
    assert len(task.trials[1].faults) == 3


@pytest.mark.parametrize(("options", "most"), [({}, 4), ({"episodes": 2}, 2), ({"environments": 3}, 3)])
def test_at_most_one_simulator_per_episode_is_built(
    options: dict[str, int], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LIBERO has ten held-out start states per task; each simulator beyond them would waste 0.8 GB."""
    monkeypatch.setenv("ENV_BUILD_LOG", str(tmp_path))
    environments, episodes = options.get("environments", 16), options.get("episodes")
    how = EpisodeSettings("helpers.drift_envs:few", environments=environments, episodes=episodes, workers=0)
    still = dataclasses.replace(ROBOT, action_dim=1)
    found = evaluated(how, ActingPolicy(lambda _: lambda asked: np.zeros((len(asked), CHUNK, 1)), still, CHUNK))
    assert max(alive for _, alive in built(tmp_path)) == most
    assert found.counts.of == options.get("episodes", 4)


@pytest.mark.parametrize(
    ("starts", "episodes", "expected"),
    [
        ("held-out", 2, [50, 51]),
        ("train", 3, [0, 1, 2]),
        ("all", 7, [0, 1, 2, 3, 4, 50, 51]),
        ("train", None, [0, 1, 2, 3, 4]),
        ("held-out", None, list(range(50, 150))),
    ],
)
def test_the_first_start_states_are_used(starts: StartSplit, episodes: int | None, expected: list[int]) -> None:
    scene = Scene("here", "toy", "go", 10, 5, (0.0,), (1.0,), train=range(5), held_out=range(50, 250))
    assert choose_starts(scene, starts, episodes) == expected


def test_more_episodes_than_start_states_are_refused() -> None:
    scene = Scene("here", "toy", "go", 10, 5, (0.0,), (1.0,), train=range(5), held_out=range(0))
    for episodes in (0, -1, 6):
        with pytest.raises(UserError, match=rf"--episodes is {episodes}; here has 5 train .*0 to 4, held-out none"):
            choose_starts(scene, "train", episodes)
    with pytest.raises(UserError, match="here has no held-out start states; choose others with --starts"):
        choose_starts(scene, "held-out", None)


def never(requests: Sequence[Request]) -> np.ndarray:
    raise AssertionError(f"the policy was called with {requests}")


@pytest.mark.parametrize(
    ("changes", "robot", "says"),
    [
        ({}, {"action_dim": 7, "name": "libero"}, r"acts with 7 numbers \(libero\) and toy takes 2 \(toy\)"),
        ({"execute": 5}, {}, "--execute is 5; the policy's chunks have 1 to 4 actions"),
        ({"execute": 0}, {}, "--execute is 0; the policy's chunks have 1 to 4 actions"),
        ({"episodes": 101}, {}, "--episodes is 101; toy has 100 held-out start states"),
        ({"environments": 0}, {}, "--environments is 0; at least 1 environment is needed"),
        ({"workers": -1}, {}, "--workers is -1"),
        ({"hang_after": 0.0}, {}, "--hang-after is 0; give a number of seconds"),
        ({"env": "helpers.toy_env:makes"}, {}, "Environment helpers.toy_env:makes cannot be loaded"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_before_the_first_step(
    changes: dict[str, object], robot: dict[str, object], says: str
) -> None:
    other = dataclasses.replace(ROBOT, **robot)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=says):
        evaluated(settings(**changes), acting(never, other))


def test_another_robot_is_reported_before_its_missing_cameras() -> None:
    arms = Robot("arms", 14, {"state": 14}, {"base_0_rgb": "images/cam_high"})
    how = EpisodeSettings("metaworld/reach-v3", episodes=1, workers=0)
    with pytest.raises(UserError, match=r"acts with 14 numbers \(arms\) and metaworld/reach-v3 takes 4 \(metaworld\)"):
        evaluated(how, acting(never, arms))
    seeing = Robot("seeing", 4, {"state": 17}, {"base_0_rgb": "images/cam_high"})
    with pytest.raises(UserError, match="Meta-World has no camera 'images/cam_high'"):
        evaluated(how, acting(never, seeing))


def test_only_the_cameras_a_policy_needs_are_rendered() -> None:
    shown: set[str] = set()

    def act(requests: Sequence[Request]) -> np.ndarray:
        shown.update(name for request in requests for name in request.observation)
        return np.zeros((len(requests), CHUNK, 2))

    seeing = dataclasses.replace(
        ROBOT,
        cameras={"base_0_rgb": "images/a", "left_wrist_0_rgb": "images/b", "right_wrist_0_rgb": None},
        optional_cameras=("images/b",),
    )
    evaluated(settings(episodes=1), acting(act, seeing))
    assert shown == {"state", "prompt", "images/a"}


def test_episodes_hit_by_faults_are_run_again_and_faults_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INJECTED_FAULTS", str(tmp_path))
    (tmp_path / "101.always").touch()
    (tmp_path / "103.raised").touch()
    (tmp_path / "104.nan").touch()
    found = evaluated(settings(), acting(homeward(range(100, 106))))
    (task,) = found.results
    by_start = {trial.start_id: trial for trial in task.trials}
    assert (by_start[101].success, by_start[101].steps, len(by_start[101].faults)) == (False, 0, 3)
    assert by_start[103].success
    assert by_start[103].faults[0].startswith("raised: ArithmeticError: the solver gave up")
    assert by_start[104].faults == ("not finite: observation state has NaN or Inf",)
    assert not by_start[100].faults
    assert (task.counts.succeeded, task.counts.of) == (5, 6)
    assert faults_of(found.trials) == {"raised": 4, "not finite": 1}


def test_a_policy_with_another_robots_state_is_refused() -> None:
    blind = dataclasses.replace(find_robot("metaworld"), name="blind", state_keys={"state": 5})
    with pytest.raises(
        UserError, match=r"is 5 numbers of state \(blind\) and that of metaworld/.* is 17 numbers of state"
    ):
        with_cameras(blind, "metaworld/push-v3", EnvOptions())
    options, scene = with_cameras(find_robot("metaworld_camera"), "metaworld/push-v3", EnvOptions())
    assert options.cameras == ("images/corner2",)
    assert list(scene.cameras) == ["images/corner2"]


def test_the_first_episodes_are_filmed() -> None:
    films: list[int] = []
    evaluated(
        settings(films=2, episodes=3, options=EnvOptions(limit=5)),
        acting(homeward([])),
        each=lambda scene, total, rollout: films.append(len(rollout.film)),
    )
    assert films == [6, 6, 0], "the first frame, and one per step"


def test_episodes_become_a_dataset_that_reads_back(tmp_path: Path) -> None:
    kept: list[Episode] = []
    with dataset_writer(tmp_path / "episodes", _toy_scene(), ROBOT) as writer:
        for _, _, rollout in run_task(TOY, settings(seed=5), acting(homeward([101, 102])), record=True):
            assert rollout.episode is not None
            kept.append(rollout.episode)
            writer.add(rollout.episode)
    dataset = open_dataset(tmp_path / "episodes")
    assert (dataset.version, dataset.fps, dataset.robot_type) == ("v3.0", 10, "toy")
    assert list(dataset.tasks.values()) == ["come home"]
    assert [info.length for info in dataset.episodes] == [len(episode.actions) for episode in kept]
    columns = dataset.columns(["action", "observation.state", "next.success", "next.truncated", "next.reward"])
    for info, episode in zip(dataset.episodes, kept, strict=True):
        stored = {name: values[info.rows] for name, values in columns.items()}
        np.testing.assert_array_equal(stored["action"], episode.actions)
        np.testing.assert_array_equal(stored["observation.state"], episode.observations["state"][:-1])
        np.testing.assert_array_equal(stored["next.reward"], episode.rewards)
        assert stored["next.success"][-1] == episode.success == (episode.start_id in (101, 102))
        assert stored["next.truncated"][-1] == episode.truncated == (not episode.success)


def test_a_script_is_evaluated_without_a_policy() -> None:
    script = ActingPolicy(Script("pistar.envs.scripted:expert", {"noise": 0.0}), None, 1)
    found = evaluated(settings(execute=None, episodes=4), script)
    assert (found.counts.succeeded, found.counts.of) == (4, 4)


def _toy_scene() -> Scene:
    with Environments(TOY, count=1, workers=0) as envs:
        return envs.scene


# --- A learned policy in Meta-World and ALOHA. (LIBERO, whose worlds take seconds: envs/suites/test_libero.py.) ---


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of a simulator, and the robot of its policy."""

    name: str
    robot: str
    options: EnvOptions

    @property
    def starts(self) -> range:
        """Six start states, for four environments."""
        return range(1_000_000, 1_000_006)


TASKS = {
    "state": Task("metaworld/reach-v3", "metaworld", EnvOptions(limit=20)),
    "camera": Task("aloha/transfer-cube", "aloha_sim", EnvOptions(limit=11, image_size=16)),
}
PLACES = 4


@pytest.fixture(scope="module", params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]


@pytest.fixture(scope="module")
def actor(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Actor:
    policy = load_policy(fresh_checkpoint(tmp_path_factory.mktemp("fresh"), robot=task.robot))
    return Actor(policy, batch_size(PLACES), seed=2)


def episodes_over(task: Task, actor: Actor, workers: int) -> list[Rollout]:
    """Six episodes in four environments."""
    with Environments(task.name, task.options, count=PLACES, workers=workers) as envs:
        return list(roll_out(envs, task.starts, actor, execute=3, record=True, seed=2))


@pytest.fixture(scope="module")
def in_one_process(task: Task, actor: Actor) -> list[Rollout]:
    return episodes_over(task, actor, workers=0)


def assert_same(found: list[Rollout], expected: list[Rollout]) -> None:
    """To the bit. An episode that is run again is in another row of the batch, and so are those after it: rows are
    computed alike on this backend, so no tolerance is needed."""
    for one, other in zip(found, expected, strict=True):
        assert one.episode is not None
        assert other.episode is not None
        assert (one.start_id, one.episode.success) == (other.start_id, other.episode.success)
        np.testing.assert_array_equal(one.episode.actions, other.episode.actions)
        assert one.episode.observations.keys() == other.episode.observations.keys()
        for name, seen in one.episode.observations.items():
            np.testing.assert_array_equal(seen, other.episode.observations[name], err_msg=name)


@pytest.mark.parametrize("workers", [1, 4])  # and 2 where one of them is killed, below
def test_a_learned_policys_episodes_are_the_same_over_any_number_of_processes(
    task: Task, actor: Actor, in_one_process: list[Rollout], workers: int
) -> None:
    assert_same(episodes_over(task, actor, workers), in_one_process)
    episodes = [rollout.episode for rollout in in_one_process if rollout.episode is not None]
    moved = [np.ptp(episode.observations["state"][:, :3], axis=0).max() for episode in episodes]
    assert min(moved) > 0.03, "the arm moves by more than 3 cm or 2°"


def test_actions_depend_on_the_state_and_every_camera(task: Task, actor: Actor) -> None:
    env = make_env(task.name, task.options)
    env.begin(task.starts[0])
    shown = {**env.observe(), "prompt": np.asarray(env.scene.instruction)}
    env.close()
    before = actor([Request(shown, 0, 0, 0, 0)])
    for name in ("state", *env.scene.cameras):
        other = {**shown, name: shown[name] // 2}
        assert not np.array_equal(actor([Request(other, 0, 0, 0, 0)]), before), name


def test_a_learned_policys_episodes_are_the_same_after_a_worker_was_killed(
    task: Task, actor: Actor, in_one_process: list[Rollout]
) -> None:
    calls = 0
    with Environments(task.name, task.options, count=PLACES, workers=2) as envs:

        def act(requests: Sequence[Request]) -> np.ndarray:
            nonlocal calls
            calls += 1
            if calls == 7:  # after nine steps of the first four
                os.kill(envs._workers[1].pid, signal.SIGKILL)
            return actor(requests)

        found = list(roll_out(envs, task.starts, act, execute=3, record=True, seed=2))
    hit = [rollout.start_id - task.starts[0] for rollout in found if rollout.faults]
    assert hit == [1, 3], "those of the second worker"
    assert {fault.kind for rollout in found for fault in rollout.faults} == {"died", "lost"}
    assert_same(found, in_one_process)


def act_on(env: StartEnv, actor: Actor, start_id: int, steps: range) -> list[np.ndarray]:
    """As in `episodes_over`, by hand: three actions of a chunk, then the next."""
    done: list[np.ndarray] = []
    for step in steps[::3]:
        seen = {**env.observe(), "prompt": np.asarray(env.scene.instruction)}
        (chunk,) = actor([Request(seen, start_id, step, 0, 0)])
        done += [env.act(action)[0] for action in chunk[: min(3, steps.stop - step)]]
    return done


def test_a_learned_policys_episode_is_the_same_after_its_state_was_saved_and_restored_elsewhere(
    task: Task, actor: Actor, in_one_process: list[Rollout]
) -> None:
    start_id, other = task.starts[:2]
    here, there = (make_env(task.name, task.options) for _ in range(2))
    here.begin(start_id)
    done = act_on(here, actor, start_id, range(9))
    there.begin(other)
    there.restore(here.save())
    done += act_on(there, actor, start_id, range(9, there.scene.limit))
    episode = in_one_process[0].episode
    assert episode is not None
    np.testing.assert_array_equal(np.stack(done).astype(np.float32), episode.actions)
