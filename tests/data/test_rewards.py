"""Rewards and ends: the truth table, a loop over episodes, and critic targets worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.test_success_sources import labels, recording
from pistar.agents.estimators import h_step_return
from pistar.data.rewards import label
from pistar.data.success_sources import FromColumn, FromEpisodes, Outcomes
from pistar.data.windows import WindowOptions, build_windows
from pistar.errors import UserError
from pistar.types import RewardKind, RewardScheme


def outcome(reached: list[int], failed: bool = False) -> Outcomes:
    return Outcomes(np.array([len(reached)]), np.array(reached, bool), np.array([failed]))


# The truth table of docs/explanation/q-chunks.md, for an episode of three steps


@pytest.mark.parametrize(
    ("reached", "failed", "kind", "penalty", "rewards", "terminated"),
    [
        ([0, 0, 1], False, "time", None, [-1, -1, 0], True),
        ([0, 0, 0], True, "time", 50.0, [-1, -1, -50], True),
        ([0, 0, 0], False, "time", 50.0, [-1, -1, -1], False),
        ([0, 0, 1], False, "success", 2.0, [0, 0, 1], True),
        ([0, 0, 0], True, "success", None, [0, 0, 0], True),
        ([0, 0, 0], True, "success", 2.0, [0, 0, -2], True),
        ([0, 0, 0], False, "success", 2.0, [0, 0, 0], False),
        ([0, 0, 1], False, "recorded", 2.0, [5, 6, 7], True),
        ([0, 0, 0], True, "recorded", None, [5, 6, 7], True),
        ([0, 0, 0], True, "recorded", 2.0, [5, 6, -2], True),
        ([0, 0, 0], False, "recorded", 2.0, [5, 6, 7], False),
        # Play data that goes on, and a goal that stays reached.
        ([0, 1, 0], False, "time", None, [-1, 0, -1], False),
        ([0, 1, 1], False, "time", None, [-1, 0, 0], True),
    ],
)
def test_truth_table(
    reached: list[int], failed: bool, kind: RewardKind, penalty: float | None, rewards: list[float], terminated: bool
) -> None:
    result = label(outcome(reached, failed), RewardScheme(kind, penalty), recorded=np.array([5, 6, 7], np.float32))
    assert result.rewards.tolist() == rewards
    assert result.rewards.dtype == np.float32
    assert result.terminated.tolist() == [terminated]
    assert result.truncated.tolist() == [not terminated]
    assert result.success.tolist() == [any(reached)]
    assert result.ended.tolist() == [bool(r) or (failed and k == 2) for k, r in enumerate(reached)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.booleans(), min_size=1, max_size=6), st.booleans()), min_size=1, max_size=5),
    st.sampled_from(["time", "success"]),
)
def test_labels_equal_a_loop_over_episodes(episodes: list[tuple[list[bool], bool]], kind: RewardKind) -> None:
    result = label(
        Outcomes(
            np.array([len(reached) for reached, _ in episodes]),
            np.array([r for reached, _ in episodes for r in reached]),
            np.array([failed for _, failed in episodes]),
        ),
        RewardScheme(kind, failure_penalty=9.0),
    )
    row = 0
    for i, (reached, failed) in enumerate(episodes):
        for k, hit in enumerate(reached):
            fails = failed and k == len(reached) - 1 and not hit
            usual = 0.0 if kind == "success" else -1.0
            assert result.rewards[row] == (usual + 1 if hit else -9.0 if fails else usual)
            assert result.ended[row] == (hit or fails)
            row += 1
        assert result.terminated[i] == (reached[-1] or failed)
        assert result.truncated[i] != result.terminated[i]
        assert result.success[i] == any(reached)


# Refused, and noted


def test_recorded_rewards_must_be_recorded() -> None:
    with pytest.raises(UserError, match=r"no column 'next.reward'"):
        label(outcome([0, 1]), RewardScheme("recorded"))


@pytest.mark.parametrize("penalty", [-1.0, float("nan"), float("inf")])
def test_a_negative_or_infinite_penalty_is_refused(penalty: float) -> None:
    with pytest.raises(UserError, match="failure_penalty is"):
        RewardScheme("time", penalty)


def test_an_unknown_kind_of_reward_is_refused() -> None:
    scheme = RewardScheme()
    object.__setattr__(scheme, "kind", "sparse")  # the tests' own type checker would refuse it earlier
    with pytest.raises(UserError, match="kind is 'sparse'; it is one of time, success, recorded"):
        scheme.__post_init__()


def test_time_rewards_refuse_failures_without_a_penalty() -> None:
    with pytest.raises(UserError, match=r"1 episodes failed and rewards.failure_penalty is not set"):
        label(outcome([0, 0], failed=True), RewardScheme("time"))


def test_a_recorded_reward_that_is_the_episodes_label_is_noted() -> None:
    copied = label(outcome([0, 0, 1]), RewardScheme("recorded"), recorded=np.ones(3, np.float32))
    assert [note for note in copied.notes if "on every frame of 1 of 1 episodes" in note]
    costs = label(outcome([0, 0, 0]), RewardScheme("recorded"), recorded=-np.ones(3, np.float32))
    assert not [note for note in costs.notes if "on every frame" in note]


def test_only_successes_are_noted_because_q_can_only_learn_time_to_go() -> None:
    result = labels(FromEpisodes((0, 1)), recording([2, 2]))
    assert [note for note in result.notes if "All 2 episodes are successes" in note]
    assert not [note for note in labels(FromEpisodes((0,)), recording([2, 2])).notes if "All" in note]


def test_no_success_at_all_is_noted() -> None:
    result = labels(FromColumn("next.reward"), recording([2], next_reward=[-1.0, 0.0]))
    assert [note for note in result.notes if "None of 1 episodes is a success" in note]


def test_an_empty_dataset_has_no_labels() -> None:
    result = labels(FromColumn(), recording([], next_success=np.zeros(0, bool).tolist()))
    assert result.rewards.shape == (0,)
    assert result.notes == ()


# With windows


def test_from_a_success_column_to_critic_targets() -> None:
    # An episode that succeeds in its third step, one that failed in its second. No observation after the last action.
    data = recording([3, 2], next_success=[False, False, True, False, False])
    paid = labels(FromColumn(), data, RewardScheme("time", 8.0), without_success="failure")
    windows = build_windows(data.lengths, paid.rewards, paid.ended, np.zeros(2, bool), WindowOptions(2, 2))
    fields = windows.gather(windows.starts)
    returns, factors = h_step_return(fields.rewards, fields.masks, fields.valid, gamma=0.5, h=2)
    assert np.asarray(returns).tolist() == [-1.5, -1.0, 0.0, -5.0, -8.0]
    assert np.asarray(factors).tolist() == [0.25, 0.0, 0.0, 0.0, 0.0]
    assert fields.sequence_mask.all()
