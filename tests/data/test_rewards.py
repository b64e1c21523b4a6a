import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pistar.agents.estimators import h_step_return
from pistar.data.chunks import WindowOptions, build_windows
from pistar.data.rewards import (
    FromColumn,
    FromCsv,
    FromEpisodes,
    FromFunction,
    FromScores,
    Labels,
    Outcomes,
    Recording,
    RewardKind,
    RewardScheme,
    Source,
    Unsuccessful,
    label,
    load_function,
    read_outcomes,
    score,
)
from pistar.errors import UserError

SUCCESS = RewardScheme("success")


def recording(lengths: list[int], folders: tuple[str, ...] = (), **columns: list[Any]) -> Recording:
    """Columns by their names with dots written as underscores: next_success."""
    arrays = {name.replace("next_", "next."): np.array(values) for name, values in columns.items()}
    return Recording(np.array(lengths, np.int64), arrays, folders)


def labels(
    source: Source,
    data: Recording,
    scheme: RewardScheme = SUCCESS,
    without_success: Unsuccessful = "timeout",
) -> Labels:
    return label(read_outcomes(source, data, without_success), scheme)


def outcome(reached: list[int], failed: bool = False) -> Outcomes:
    return Outcomes(np.array([len(reached)]), np.array(reached, bool), np.array([failed]))


# The truth table of docs/q-chunks.md, for an episode of three steps


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


# Columns


def test_next_success_ends_the_episode_that_has_it_and_the_other_ran_out_of_time() -> None:
    result = labels(FromColumn("next.success"), recording([2, 3], next_success=[False, True, False, False, False]))
    assert result.rewards.tolist() == [0, 1, 0, 0, 0]
    assert result.terminated.tolist() == [True, False]
    assert result.truncated.tolist() == [False, True]


def test_a_timeout_is_not_a_failure_unless_the_user_says_so() -> None:
    data = recording([2, 2], next_success=[False, True, False, False])
    scheme = RewardScheme("success", failure_penalty=1.0)
    assert labels(FromColumn(), data, scheme).rewards.tolist() == [0, 1, 0, 0]
    failed = labels(FromColumn(), data, scheme, without_success="failure")
    assert failed.rewards.tolist() == [0, 1, 0, -1]
    assert failed.terminated.tolist() == [True, True]


def test_next_truncated_keeps_a_timeout_a_timeout_even_among_failures() -> None:
    data = recording(
        [2, 2, 2],
        next_success=[False, True, False, False, False, False],
        next_truncated=[False, False, False, True, False, False],
    )
    assert labels(FromColumn(), data, without_success="failure").terminated.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("rewards", "at_least"), [([0.0, 0.0, 1.0, 0.0, 0.0], 1.0), ([-1.0, -1.0, 0.0, -1.0, -1.0], 0.0)]
)
def test_next_reward_is_a_success_from_the_given_number_up(rewards: list[float], at_least: float) -> None:
    result = labels(FromColumn("next.reward", at_least), recording([3, 2], next_reward=rewards))
    assert result.rewards.tolist() == [0, 0, 1, 0, 0]
    assert result.success.tolist() == [True, False]


@pytest.mark.parametrize("key", ["next.success", "next.reward"])
def test_an_episode_label_copied_on_every_frame_counts_on_the_last_one_only(key: str) -> None:
    data = Recording(np.array([3, 2]), {key: np.array([1, 1, 1, 0, 0], np.float32)})
    result = labels(FromColumn(key), data)
    assert result.rewards.tolist() == [0, 0, 1, 0, 0]
    assert result.ended.tolist() == [False, False, True, False, False]
    assert any("1 of 2 episodes are marked a success on every frame" in note for note in result.notes)


def test_an_episode_of_one_frame_may_succeed_on_it() -> None:
    result = labels(FromColumn(), recording([1, 2], next_success=[True, False, False]))
    assert result.rewards.tolist() == [1, 0, 0]
    assert not any("every frame" in note for note in result.notes)


def test_a_column_of_one_number_a_row_may_have_an_axis_for_it() -> None:
    assert labels(FromColumn(), recording([2], next_success=[[False], [True]])).rewards.tolist() == [0, 1]


def test_next_done_does_not_tell_success_where_every_last_row_has_it() -> None:
    data = recording([2, 2], next_done=[False, True, False, True])
    with pytest.raises(UserError, match=r"last row of all 2 episodes.*whatever ended them"):
        labels(FromColumn("next.done"), data)


def test_next_done_tells_success_where_timeouts_lack_it() -> None:
    data = recording([2, 2], next_done=[False, True, False, False])
    assert labels(FromColumn("next.done"), data).terminated.tolist() == [True, False]


def test_next_done_tells_success_where_truncation_is_recorded() -> None:
    data = recording([2, 2], next_done=[False, True, False, True], next_truncated=[False, False, False, True])
    assert labels(FromColumn("next.done"), data).success.tolist() == [True, False]


# Other sources


def test_episode_list() -> None:
    result = labels(FromEpisodes((2, 0)), recording([1, 2, 2]))
    assert result.success.tolist() == [True, False, True]
    assert result.rewards.tolist() == [1, 0, 0, 0, 1]


def test_csv_of_outcomes_tells_failures_from_timeouts(tmp_path: Path) -> None:
    table = tmp_path / "outcomes.csv"
    table.write_text("episode_index,outcome,operator\n1,Failure,a\n0, success ,b\n2,timeout,a\n")
    result = labels(FromCsv(table), recording([2, 2, 2]), RewardScheme("success", 3.0), without_success="failure")
    assert result.rewards.tolist() == [0, 1, 0, -3, 0, 0]
    assert result.terminated.tolist() == [True, True, False]


def test_csv_of_successes_leaves_the_rest_to_without_success(tmp_path: Path) -> None:
    table = tmp_path / "success.csv"
    table.write_text("episode_index,success\n0,1\n1,0\n")
    assert labels(FromCsv(table), recording([2, 2])).terminated.tolist() == [True, False]
    assert labels(FromCsv(table), recording([2, 2]), without_success="failure").terminated.all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("episode,success\n0,1\n", "has the columns episode, success; it needs episode_index"),
        ("", r"has the columns \(none\)"),
        ("episode_index,success\n0,1\n0,1\n", ":3 names episode 0 a second time"),
        ("episode_index,success\n0,1\n7,1\n", ":3 names episode 7; the dataset has 0 to 1"),
        ("episode_index,success\n0,1\n", "says nothing about episode 1"),
        ("episode_index,success\n0,maybe\n1,1\n", ":2 says success 'maybe'"),
        ("episode_index,success\nfirst,1\n1,1\n", ":2 says episode_index 'first'"),
    ],
)
def test_a_broken_csv_is_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    table = tmp_path / "outcomes.csv"
    table.write_text(content)
    with pytest.raises(UserError, match=message):
        labels(FromCsv(table), recording([2, 2]))


def test_a_missing_csv_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.csv cannot be read"):
        labels(FromCsv(tmp_path / "none.csv"), recording([2]))


def test_folder_scores() -> None:
    data = recording([1, 1, 1], folders=("a/score_5/ep0", "a/score_1/ep1", "score_1/score_5/ep2"))
    assert labels(FromScores(), data).success.tolist() == [True, False, True]
    assert labels(FromScores(at_least=1), data).success.all()


def test_folders_without_scores_are_refused() -> None:
    with pytest.raises(UserError, match="a/ep0 has no score"):
        score("a/ep0")
    with pytest.raises(UserError, match="1 episodes came with 0 folder names"):
        labels(FromScores(), recording([1]))


@pytest.mark.parametrize(
    ("said", "rewards", "terminated"),
    [
        (True, [0, 0, 1], True),
        (np.True_, [0, 0, 1], True),
        (False, [0, 0, 0], False),
        ("success", [0, 0, 1], True),
        ("failure", [0, 0, -4], True),
        ("timeout", [0, 0, 0], False),
        (np.array([False, True, False]), [0, 1, 0], False),
    ],
)
def test_a_function_may_answer_for_the_episode_or_for_every_step(
    said: object, rewards: list[float], terminated: bool
) -> None:
    result = labels(FromFunction(lambda _: said), recording([3]), RewardScheme("success", 4.0))
    assert result.rewards.tolist() == rewards
    assert result.terminated.tolist() == [terminated]


def test_a_function_sees_one_episode_at_a_time() -> None:
    def lifted(episode: Mapping[str, np.ndarray]) -> bool:
        return bool(episode["height"][-1] > 0.5)

    data = recording([2, 3], height=[0.0, 0.9, 0.9, 0.9, 0.1])
    assert labels(FromFunction(lifted), data).success.tolist() == [True, False]


@pytest.mark.parametrize("said", [None, 1, "won", np.array([True])])
def test_a_function_that_answers_something_else_is_refused(said: object) -> None:
    with pytest.raises(UserError, match="of episode 0; it returns True"):
        labels(FromFunction(lambda _: said), recording([3]))


def test_a_function_is_found_by_name() -> None:
    found: object = load_function("json:loads")
    assert found is json.loads


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("judge", "package.module:function"),
        ("no_such_module:judge", "cannot be imported"),
        ("json:judge", "cannot be imported"),
        ("json:__name__", "is a str"),
    ],
)
def test_a_function_that_cannot_be_found_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_function(name)


# Refused, and noted


def test_an_absent_column_is_named_with_those_that_exist() -> None:
    with pytest.raises(UserError, match=r"no column 'next.reward'; it has next.done"):
        labels(FromColumn("next.reward"), recording([1], next_done=[True]))
    with pytest.raises(UserError, match="it has none"):
        labels(FromColumn("next.reward"), recording([1]))


def test_recorded_rewards_must_be_recorded() -> None:
    with pytest.raises(UserError, match=r"no column 'next.reward'"):
        label(outcome([0, 1]), RewardScheme("recorded"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.0, float("nan")], "is nan in row 1"),
        ([[0, 1], [0, 1]], "one number a row"),
        (["a", "b"], "one number a row"),
    ],
)
def test_a_column_that_is_not_one_number_a_row_is_refused(values: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        labels(FromColumn(), recording([2], next_success=values))


def test_a_listed_episode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="names episode 3; the dataset has 0 to 1"):
        labels(FromEpisodes((0, 3)), recording([1, 1]))


@pytest.mark.parametrize("penalty", [-1.0, float("nan"), float("inf")])
def test_a_penalty_that_pays_is_refused(penalty: float) -> None:
    with pytest.raises(UserError, match="failure_penalty is"):
        RewardScheme("time", penalty)


def test_an_unknown_kind_of_reward_is_refused() -> None:
    scheme = RewardScheme()
    object.__setattr__(scheme, "kind", "sparse")  # the tests' own type checker would refuse it earlier
    with pytest.raises(UserError, match="kind is 'sparse'; it is one of time, success, recorded"):
        scheme.__post_init__()


def test_failing_may_not_be_cheaper_than_trying_on() -> None:
    with pytest.raises(UserError, match=r"1 episodes failed and rewards.failure_penalty is not set"):
        label(outcome([0, 0], failed=True), RewardScheme("time"))


def test_only_successes_are_noted_because_q_can_only_learn_time_to_go() -> None:
    result = labels(FromEpisodes((0, 1)), recording([2, 2]))
    assert [note for note in result.notes if "All 2 episodes are successes" in note]
    assert not [note for note in labels(FromEpisodes((0,)), recording([2, 2])).notes if "All" in note]


def test_no_success_at_all_is_noted() -> None:
    result = labels(FromColumn("next.reward"), recording([2], next_reward=[-1.0, 0.0]))
    assert [note for note in result.notes if "None of 1 episodes is a success" in note]


def test_episodes_that_count_as_timeouts_by_default_are_noted() -> None:
    data = recording([2, 2], next_success=[False, True, False, False])
    assert [note for note in labels(FromColumn(), data).notes if "1 of 2 episodes have no success" in note]
    assert labels(FromColumn(), data, without_success="failure").notes == ()


def test_a_recorded_reward_that_is_the_episodes_label_is_noted() -> None:
    copied = label(outcome([0, 0, 1]), RewardScheme("recorded"), recorded=np.ones(3, np.float32))
    assert [note for note in copied.notes if "on every frame of 1 of 1 episodes" in note]
    costs = label(outcome([0, 0, 0]), RewardScheme("recorded"), recorded=-np.ones(3, np.float32))
    assert not [note for note in costs.notes if "on every frame" in note]


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


def test_done_without_time_out_or_success_is_a_failure_where_both_are_recorded() -> None:
    lengths = np.array([2, 2, 2])
    last = np.array([0, 1, 0, 1, 0, 1], bool)
    recording = Recording(
        lengths,
        {
            "next.success": last & (np.arange(6) == 1),
            "next.done": last,
            "next.truncated": last & (np.arange(6) == 5),
        },
    )
    outcomes = read_outcomes(FromColumn(), recording)
    assert outcomes.failed.tolist() == [False, True, False]
    labels = label(outcomes, RewardScheme("success"))
    assert labels.terminated.tolist() == [True, True, False]


def test_scores_are_read_from_the_column_a_conversion_writes() -> None:
    recording = Recording(np.array([2, 2]), {"score": np.array([5, 5, 1, 1])}, ["chunk-000"] * 2)
    assert read_outcomes(FromScores(), recording).reached.tolist() == [False, True, False, False]


def test_an_unknown_word_for_what_has_no_success_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without it
    recording = Recording(np.array([2]), {"next.success": np.zeros(2)})
    with pytest.raises(UserError, match="without_success is 'fail'; it is one of failure, timeout"):
        read_outcomes(FromColumn(), recording, "fail")  # type: ignore[arg-type]


def test_a_success_function_that_fails_names_the_episode() -> None:
    recording = Recording(np.array([2, 2]), {"x": np.zeros(4)})
    with pytest.raises(UserError, match=r"failed on episode 0 .KeyError: 'nope'"):
        read_outcomes(FromFunction(lambda columns: columns["nope"]), recording)
