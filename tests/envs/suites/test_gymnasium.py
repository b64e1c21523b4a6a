"""Gymnasium's own environments, and a small one that says when it succeeds."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from pistar.envs.base import EnvOptions, find_tasks, make_env
from pistar.envs.rollout import roll_out
from pistar.envs.suites.gymnasium import GymnasiumEnv
from pistar.envs.vector.vector import Environments
from pistar.errors import UserError


class Rail(gymnasium.Env[dict[str, Any], np.ndarray]):
    """A cart on a rail has to reach 1 and fails below −1. Its action is a column of two numbers, which are added."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's own
    dt = 0.04
    action_space = spaces.Box(-0.25, 0.25, (2, 1), np.float64)
    observation_space = spaces.Dict(
        {
            "cart": spaces.Dict({"at": spaces.Box(-9, 9, (1, 1)), "side": spaces.Discrete(2)}),
            "eye": spaces.Box(0, 255, (4, 6, 3), np.uint8),
        }
    )

    def __init__(self, flag: str = "is_success", patience: int = 100, render_mode: str | None = None) -> None:
        self.render_mode, self._flag, self._patience = render_mode, flag, patience

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self._left = self.np_random.uniform(-0.1, 0.1), self._patience
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.at, self._left = self.at + action.sum(), self._left - 1
        told = {self._flag: np.float64(self.at > 1)} if self._flag else {}
        return self._seen(), 0.0, self.at < -1, self._left == 0, told

    def _seen(self) -> dict[str, Any]:
        return {"cart": {"at": np.array([[self.at]]), "side": np.int64(self.at > 0)}, "eye": self.render()}

    def render(self) -> np.ndarray:
        return np.full((4, 6, 3), 100 + 50 * self.at, np.uint8)


@pytest.fixture(autouse=True)
def rails() -> Iterator[None]:
    rail: Any = Rail  # mypy would ask for any keyword
    names = {"Rail-v0": {}, "SayingSuccess-v0": {"flag": "success"}, "Silent-v0": {"flag": ""}}
    for name, kwargs in names.items():
        gymnasium.register(name, rail, max_episode_steps=20, kwargs=kwargs)
    gymnasium.register("Impatient-v0", rail, max_episode_steps=20, kwargs={"patience": 3})
    gymnasium.register("Endless-v0", rail)
    yield
    for name in (*names, "Impatient-v0", "Endless-v0"):
        del gymnasium.registry[name]


def drive(env: GymnasiumEnv | Any, action: float, start_id: int = 0) -> tuple[str, bool, int]:
    """Repeat an action of equal numbers. Returns the last status, whether it was truncated, and the steps."""
    env.begin(start_id)
    for step in range(1, 2000):
        _, ending, cut_off = env.act(np.full(env.scene.action_dim, action))
        if ending != "running" or cut_off:
            return ending, cut_off, step
    raise AssertionError("it never ended")


def states(env: GymnasiumEnv | Any, start_id: int, steps: int = 50) -> np.ndarray:
    rng = np.random.default_rng(start_id)
    env.begin(start_id)
    seen = [env.observe()["state"]]
    for _ in range(steps):
        env.act(rng.normal(size=env.scene.action_dim))
        seen.append(env.observe()["state"])
    return np.array(seen)


def test_whatever_is_registered_is_a_task() -> None:
    assert find_tasks("gymnasium/Pendulum-v1") == ["gymnasium/Pendulum-v1"]
    assert find_tasks("gymnasium/phys2d/Pendulum-v0") == ["gymnasium/phys2d/Pendulum-v0"]
    assert find_tasks("gymnasium/Rail-v0") == ["gymnasium/Rail-v0"]


def test_a_module_that_registers_environments_is_imported_as_gymnasium_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = "'Late-v0', 'gymnasium.envs.classic_control:PendulumEnv', max_episode_steps=7"
    (tmp_path / "registers_late.py").write_text(f"import gymnasium\ngymnasium.register({late})\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "gymnasium/registers_late:Late-v0"
    assert find_tasks(name) == [name]
    with Environments(name, count=1, workers=1) as envs:  # a process that has not imported it
        assert (envs.scene.instruction, envs.scene.limit) == ("Late-v0", 7)
    del gymnasium.registry["Late-v0"]
    with pytest.raises(UserError, match="gymnasium has no task 'Pendlum-v1'; did you mean Pendulum-v1"):
        find_tasks("gymnasium/registers_late:Pendlum-v1")
    with pytest.raises(
        UserError, match=r"cannot be loaded \(No module named 'no_such'\); no_such must be an importable mod"
    ):
        find_tasks("gymnasium/no_such:Late-v0")


def test_the_pendulum_equals_gymnasiums() -> None:
    env, own = make_env("gymnasium/Pendulum-v1"), gymnasium.make("Pendulum-v1")
    scene = env.scene
    assert (scene.name, scene.robot, scene.instruction) == ("gymnasium/Pendulum-v1", "gymnasium", "Pendulum-v1")
    assert (scene.fps, scene.limit, scene.action_low, scene.action_high) == (30, 200, (-2.0,), (2.0,))
    env.begin(1_000_007)
    seen, _ = own.reset(seed=1_000_007)
    for _ in range(30):
        assert list(env.observe()) == ["state"]
        assert env.observe()["state"].dtype == np.float32
        np.testing.assert_array_equal(env.observe()["state"], seen)
        executed, ending, cut_off = env.act(np.array([2.5]))
        assert (executed.tolist(), ending, cut_off) == ([2.0], "running", False)
        seen = own.step(np.array([2.0], np.float32))[0]


@pytest.mark.parametrize("task", ["Pendulum-v1", "MountainCarContinuous-v0", "HalfCheetah-v5"])
def test_an_episode_comes_again_to_the_bit_after_others_and_elsewhere(task: str) -> None:
    env, other = (make_env(f"gymnasium/{task}") for _ in range(2))
    first = states(env, 7)
    assert not np.array_equal(states(env, 1_000_003)[0], first[0])
    np.testing.assert_array_equal(states(env, 7), first)
    np.testing.assert_array_equal(states(other, 7), first)
    env.close()
    other.close()


def test_an_episode_is_taken_up_again_to_the_bit() -> None:
    env = make_env("gymnasium/Pendulum-v1")
    states(env, 3, 20)
    saved, there = env.save(), env.observe()["state"]
    states(env, 4, 5)
    env.restore(saved)
    np.testing.assert_array_equal(env.observe()["state"], there)


def test_a_dictionary_is_flattened_with_slashes_and_its_images_stay() -> None:
    env = make_env("gymnasium/Rail-v0")
    env.begin(5)
    env.act(np.array([0.25, 0.25]))
    seen = env.observe()
    at = np.random.Generator(np.random.PCG64(np.random.SeedSequence(5))).uniform(-0.1, 0.1) + 0.5
    np.testing.assert_array_equal(seen["cart/at"], np.array([at], np.float32))
    np.testing.assert_array_equal(seen["cart/side"], np.array([1.0], np.float32))
    np.testing.assert_array_equal(seen["eye"], np.full((4, 6, 3), int(100 + 50 * at), np.uint8))
    assert {name: part.dtype.name for name, part in seen.items()} == {
        "cart/at": "float32",
        "cart/side": "float32",
        "eye": "uint8",
    }
    assert env.scene.cameras == {"eye": (4, 6)}
    assert env.scene.action_high == (0.25, 0.25), "a column of two is a vector of two here"
    assert env.scene.fps == 25, "1 / dt where nothing else is said"


def test_an_image_alone_is_called_image() -> None:
    class Seeing(Rail):
        observation_space = spaces.Box(0, 255, (4, 6, 3), np.uint8)  # type: ignore[assignment]

        def _seen(self) -> Any:
            return self.render()

    env = GymnasiumEnv("seeing", Seeing(), EnvOptions(limit=5), robot="toy", instruction="look")
    env.begin(0)
    assert {name: part.shape for name, part in env.observe().items()} == {"image": (4, 6, 3)}
    assert (env.scene.robot, env.scene.instruction, env.scene.limit) == ("toy", "look", 5)


def test_cameras_not_asked_for_are_left_out_and_unknown_ones_refused() -> None:
    env = make_env("gymnasium/Rail-v0", EnvOptions(cameras=()))
    env.begin(0)
    assert list(env.observe()) == ["cart/at", "cart/side"]
    assert env.scene.cameras == {}
    with pytest.raises(UserError, match=r"gymnasium/Rail-v0 has no camera 'eyes'; did you mean eye\?"):
        make_env("gymnasium/Rail-v0", EnvOptions(cameras=("eyes",)))
    with pytest.raises(UserError, match=r"gymnasium/Pendulum-v1 has no camera 'eye'; it has none"):
        make_env("gymnasium/Pendulum-v1", EnvOptions(cameras=("eye",)))


@pytest.mark.parametrize("task", ["Rail-v0", "SayingSuccess-v0"])
def test_success_is_what_info_says_and_ends_the_episode(task: str) -> None:
    env = make_env(f"gymnasium/{task}")
    assert drive(env, 0.25)[:2] == ("success", False)
    assert 1 < env.observe()["cart/at"][0] <= 1.5, "at the first step beyond the goal, not later"
    assert drive(env, -0.25)[:2] == ("failure", False)
    assert drive(env, 0.0) == ("running", True, 20)


def test_termination_without_success_in_info_is_a_failure() -> None:
    silent = make_env("gymnasium/Silent-v0")
    assert drive(silent, -0.25)[:2] == ("failure", False)
    assert drive(silent, 0.25) == ("running", True, 20), "past its goal, and nobody said so"
    car = make_env("gymnasium/MountainCarContinuous-v0")
    car.begin(0)
    ending = "running"
    while ending == "running":  # push along the velocity; it terminates at the flag without saying success
        _, ending, cut_off = car.act(np.sign(car.observe()["state"][1:]) + 0.0)
        assert not cut_off
    assert ending == "failure"
    assert car.observe()["state"][0] >= 0.45


def test_an_environments_own_truncation_is_no_failure() -> None:
    assert drive(make_env("gymnasium/Impatient-v0"), 0.0) == ("running", True, 3)


def test_the_limit_is_the_users_then_the_environments_own() -> None:
    assert drive(make_env("gymnasium/Rail-v0"), 0.0)[2] == 20
    assert drive(make_env("gymnasium/Rail-v0", EnvOptions(limit=5)), 0.0)[2] == 5
    assert drive(make_env("gymnasium/Rail-v0", EnvOptions(limit=30)), 0.0)[2] == 30
    assert drive(make_env("gymnasium/Endless-v0", EnvOptions(limit=40)), 0.0)[2] == 40
    with pytest.raises(UserError, match=r"gymnasium/Endless-v0 has no limit on its episodes; set one \(--limit 500\)"):
        make_env("gymnasium/Endless-v0")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("Pendlum-v1", "gymnasium has no task 'Pendlum-v1'; did you mean Pendulum-v1"),
        ("CartPole-v1", r"gymnasium/CartPole-v1 takes actions of Discrete\(2\), but policies return vectors"),
        (
            "GymV26Environment-v0",
            r"gymnasium/GymV26Environment-v0 cannot be built \(.*shimmy.*\); install what it needs",
        ),
    ],
)
def test_what_cannot_be_built_says_why(task: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_env(f"gymnasium/{task}")


def test_an_observation_that_is_no_array_is_refused() -> None:
    class Talking(Rail):
        observation_space = spaces.Dict({"said": spaces.Text(5)})

    with pytest.raises(UserError, match=r"talking observes Text.* \(said\), which is not an array; wrap it"):
        GymnasiumEnv("talking", Talking(), EnvOptions(limit=5))


def test_it_has_no_expert_and_says_so() -> None:
    with pytest.raises(UserError, match=r"gymnasium/Rail-v0 has no scripted expert; collect with --policy"):
        make_env("gymnasium/Rail-v0").expert_action()


def test_it_renders_its_own_view_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env("gymnasium/Rail-v0")
    env.begin(0)
    np.testing.assert_array_equal(env.render(), env.observe()["eye"])
    with pytest.raises(UserError, match="blind cannot be rendered; leave the video out"):
        GymnasiumEnv("blind", Rail(), EnvOptions(limit=5)).render()
    monkeypatch.setitem(sys.modules, "pygame", None)
    pendulum = make_env("gymnasium/Pendulum-v1")
    pendulum.begin(0)
    with pytest.raises(UserError, match=r"Pendulum-v1 cannot be rendered \(.*pygame.*\); leave the video out"):
        pendulum.render()


def test_mujoco_renders_without_a_screen() -> None:
    env = make_env("gymnasium/Reacher-v5")
    env.begin(0)
    first = env.render()
    assert first.shape == (480, 480, 3)
    assert first.std() > 10
    env.close()


def test_episodes_do_not_depend_on_the_process_they_are_run_in() -> None:
    def endings(workers: int) -> list[np.ndarray]:
        with Environments("gymnasium/Pendulum-v1", EnvOptions(limit=12), count=2, workers=workers) as envs:
            starts = [0, 1, 1_000_000]
            rollouts = roll_out(envs, starts, lambda asked: np.ones((len(asked), 4, 1)), execute=4, record=True)
            return [each.episode.observations["state"] for each in rollouts if each.episode is not None]

    here, elsewhere = endings(0), endings(1)
    assert [each.shape for each in here] == [(13, 3)] * 3
    for one, other in zip(here, elsewhere, strict=True):
        np.testing.assert_array_equal(one, other)
