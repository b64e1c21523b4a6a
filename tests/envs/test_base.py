"""Environments by name, and what all of them guarantee."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from pistar.envs.base import EnvOptions, Scene, find_tasks, make_env
from pistar.errors import UserError


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("metawrld/push-v3", "There is no environment 'metawrld/push-v3'; did you mean metaworld"),
        ("metaworld/pick-plce-v3", "metaworld has no task 'pick-plce-v3'; did you mean pick-place-v3"),
        ("helpers.toy_env:nothing", "Environment helpers.toy_env:nothing cannot be loaded"),
        ("no_module_of_ours:make", "Environment no_module_of_ours:make cannot be loaded"),
        ("helpers.toy_env:no_environment", "returned a EnvOptions; it must return a pistar.envs.base.StartEnv"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_or_the_reason(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_env(name)


def test_every_name_stands_for_its_tasks() -> None:
    assert find_tasks("metaworld/reach-v3") == ["metaworld/reach-v3"]
    assert find_tasks("helpers.toy_env:make") == ["helpers.toy_env:make"]


def test_it_is_a_gymnasium_environment() -> None:
    env = make_env("helpers.toy_env:make")
    assert env.observation_space == gymnasium.spaces.Dict(
        {"state": gymnasium.spaces.Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (2,), np.float32)}
    )
    check_env(env, skip_render_check=True)
    seen, info = env.reset(options={"start_id": 105})
    assert info == {"start_id": 105, "success": False}
    np.testing.assert_array_equal(seen["state"], np.random.default_rng(105).uniform(-1, 1, 2).astype(np.float32))


def test_a_random_start_is_one_to_train_on() -> None:
    env = make_env("helpers.toy_env:make")
    drawn = {env.reset(seed=seed)[1]["start_id"] for seed in range(50)}
    assert drawn <= set(env.scene.train)
    assert len(drawn) > 20
    assert env.reset(seed=3)[1] == env.reset(seed=3)[1]


def test_a_start_out_of_range_is_refused_with_what_there_is() -> None:
    with pytest.raises(UserError, match="no start state 200; those to train on are 0 to 99, those held out 100 to 199"):
        make_env("helpers.toy_env:make").begin(200)


def test_start_states_cannot_be_both_trained_on_and_held_out() -> None:
    with pytest.raises(ValueError, match="has start states that are both trained on and held out"):
        Scene("x", "x", "x", 10, 10, (-1.0,), (1.0,), range(10), range(9, 20))


def test_actions_are_clipped_to_limits_and_returned() -> None:
    env = make_env("helpers.toy_env:make")
    env.begin(0)
    executed, _, _ = env.act(np.array([1.0, -0.1]))
    np.testing.assert_array_equal(executed, [0.2, -0.1])
    with pytest.raises(UserError, match="An action of toy has 2 numbers"):
        env.act(np.zeros(3))
    with pytest.raises(ValueError, match="not finite"):
        env.act(np.array([np.nan, 0]))


def test_an_episode_at_its_limit_is_truncated_and_no_failure() -> None:
    env = make_env("helpers.toy_env:make", EnvOptions(limit=3))
    env.begin(0)
    ends = [env.act(np.zeros(2))[1:] for _ in range(3)]
    assert ends == [("running", False), ("running", False), ("running", True)]


def test_a_saved_episode_can_be_restored() -> None:
    env, other = make_env("helpers.toy_env:make"), make_env("helpers.toy_env:make")
    env.begin(4)
    for _ in range(3):
        env.act(np.array([0.05, -0.1]))
    saved = env.save()
    other.restore(saved)
    for each in (env, other):
        each.act(np.array([0.1, 0.1]))
    np.testing.assert_array_equal(env.observe()["state"], other.observe()["state"])


def test_bad_options_are_refused() -> None:
    with pytest.raises(UserError, match="limit is 0"):
        EnvOptions(limit=0)
    with pytest.raises(UserError, match="image_size is 2"):
        EnvOptions(image_size=2)
