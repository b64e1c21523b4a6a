"""Success sources: what each of them reads from a recording, and what it refuses."""

from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest

from pistar.data.rewards import Labels, label
from pistar.data.success_sources import (
    FromColumn,
    FromCsv,
    FromEpisodes,
    FromScores,
    Recording,
    SuccessSource,
    folder_score,
    read_outcomes,
)
from pistar.errors import UserError
from pistar.types import RewardScheme, Unsuccessful

SUCCESS = RewardScheme("success")


def recording(lengths: list[int], folders: tuple[str, ...] = (), **columns: list[Any]) -> Recording:
    """Columns by their names with dots written as underscores: next_success."""
    arrays = {name.replace("next_", "next."): np.array(values) for name, values in columns.items()}
    return Recording(np.array(lengths, np.int64), arrays, folders)


def labels(
    source: SuccessSource,
    data: Recording,
    scheme: RewardScheme = SUCCESS,
    without_success: Unsuccessful = "timeout",
) -> Labels:
    return label(read_outcomes(source, data, without_success), scheme)


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


def test_a_column_of_shape_n_by_1_is_one_number_per_row() -> None:
    assert labels(FromColumn(), recording([2], next_success=[[False], [True]])).rewards.tolist() == [0, 1]


def test_next_done_is_refused_where_every_last_row_has_it() -> None:
    data = recording([2, 2], next_done=[False, True, False, True])
    with pytest.raises(UserError, match=r"last row of all 2 episodes.*whatever ended them"):
        labels(FromColumn("next.done"), data)


def test_next_done_is_success_where_timeouts_lack_it() -> None:
    data = recording([2, 2], next_done=[False, True, False, False])
    assert labels(FromColumn("next.done"), data).terminated.tolist() == [True, False]


def test_next_done_is_success_where_truncation_is_recorded() -> None:
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
        ("episode_index,success\n0,1\n", "has no line for episode 1"),
        ("episode_index,success\n0,maybe\n1,1\n", ":2 has success 'maybe'"),
        ("episode_index,success\nfirst,1\n1,1\n", ":2 has episode_index 'first'"),
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


def test_scores_are_read_from_the_column_a_conversion_writes() -> None:
    recording = Recording(np.array([2, 2]), {"score": np.array([5, 5, 1, 1])}, ["chunk-000"] * 2)
    assert read_outcomes(FromScores(), recording).reached.tolist() == [False, True, False, False]


def test_folders_without_scores_are_refused() -> None:
    with pytest.raises(UserError, match="a/ep0 has no score"):
        folder_score("a/ep0")
    with pytest.raises(UserError, match="1 episodes came with 0 folder names"):
        labels(FromScores(), recording([1]))


# Refused, and noted


def test_an_absent_column_is_named_with_those_that_exist() -> None:
    with pytest.raises(UserError, match=r"no column 'next.reward'; it has next.done:"):
        labels(FromColumn("next.reward"), recording([1], next_done=[True]))
    with pytest.raises(UserError, match="it has none:"):
        labels(FromColumn("next.reward"), recording([1]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.0, float("nan")], "is nan in row 1"),
        ([[0, 1], [0, 1]], "one number per row"),
        (["a", "b"], "one number per row"),
    ],
)
def test_a_column_that_is_not_one_number_per_row_is_refused(values: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        labels(FromColumn(), recording([2], next_success=values))


def test_a_listed_episode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="names episode 3; the dataset has 0 to 1"):
        labels(FromEpisodes((0, 3)), recording([1, 1]))


def test_an_unknown_value_of_without_success_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without it
    recording = Recording(np.array([2]), {"next.success": np.zeros(2)})
    with pytest.raises(UserError, match="without_success is 'fail'; it is one of failure, timeout"):
        read_outcomes(FromColumn(), recording, "fail")  # type: ignore[arg-type]


def test_episodes_that_count_as_timeouts_by_default_are_noted() -> None:
    data = recording([2, 2], next_success=[False, True, False, False])
    assert [note for note in labels(FromColumn(), data).notes if "1 of 2 episodes have no success" in note]
    assert labels(FromColumn(), data, without_success="failure").notes == ()
