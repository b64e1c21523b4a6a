import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from pistar.data.norm_stats import (
    NormStats,
    RunningStats,
    check_norm_stats,
    load_norm_stats,
    norm_stats_hash,
    save_norm_stats,
)
from pistar.errors import UserError

FIELDS = ("mean", "std", "q01", "q99")


def sound(dims: int = 3) -> NormStats:
    return NormStats(mean=np.zeros(dims), std=np.ones(dims), q01=-np.ones(dims), q99=np.ones(dims))


def both(state: NormStats) -> dict[str, NormStats]:
    return {"state": state, "actions": sound()}


def with_number(field: str, index: int, value: float) -> dict[str, NormStats]:
    numbers = getattr(sound(), field).copy()
    numbers[index] = value
    return both(dataclasses.replace(sound(), **{field: numbers}))


def counted(*batches: np.ndarray) -> NormStats:
    running = RunningStats()
    for batch in batches:
        running.update(batch)
    return running.stats()


# Computing


def test_running_stats_equal_openpis_to_the_last_digit(openpi_goldens: Path) -> None:
    with np.load(openpi_goldens / "misc.npz") as misc:
        stats = counted(*(misc[f"running_stats/batch{i}"] for i in range(3)))
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(stats, field), misc[f"running_stats/{field}"])


def test_mean_and_deviation_do_not_depend_on_how_the_data_is_batched() -> None:
    data = np.random.default_rng(0).normal(3.0, 2.0, (120, 2))
    stats = counted(data[:7], data[7:50], data[50:].reshape(7, 10, 2))
    np.testing.assert_allclose(stats.mean, data.mean(0))
    np.testing.assert_allclose(stats.std, data.std(0))


def test_quantiles_lie_within_a_few_bins_of_the_true_ones() -> None:
    data = np.random.default_rng(1).uniform(-1.0, 3.0, (20_000, 1))
    stats = counted(*np.split(data, 10))
    assert stats.q01 is not None
    assert stats.q99 is not None
    np.testing.assert_allclose(stats.q01, [-0.96], atol=0.01)
    np.testing.assert_allclose(stats.q99, [2.96], atol=0.01)


def test_frames_at_the_minimum_survive_a_stretch_of_the_range() -> None:
    # A gripper that is closed (0) in most frames; then a batch reaches farther, and the histogram is rebuilt.
    closed = np.zeros((98, 1))
    stats = counted(np.concatenate([closed, [[0.5]]]), np.array([[1.0]]))
    assert stats.q01 is not None
    assert stats.q99 is not None
    np.testing.assert_allclose(stats.q01, [0.0], atol=1e-9)
    np.testing.assert_allclose(stats.q99, [0.5], atol=1e-3)


def test_a_constant_dimension_has_its_value_as_both_quantiles() -> None:
    data = np.array([[2.0, 0.0], [2.0, 1.0]])
    stats = counted(data, data + np.array([0.0, 5.0]))
    for field in ("mean", "q01", "q99"):
        np.testing.assert_allclose(getattr(stats, field)[0], 2.0, atol=1e-9)
    assert stats.std[0] == 0.0


def test_float32_data_is_counted_in_double_precision() -> None:
    data = np.array([[1000.0], [1000.001]], np.float32)
    np.testing.assert_allclose(counted(data).std, data.astype(np.float64).std(0), rtol=1e-3)


def test_an_empty_batch_changes_nothing() -> None:
    data = np.array([[0.0], [1.0]])
    np.testing.assert_array_equal(counted(np.zeros((0, 1)), data, np.zeros((0, 1))).mean, [0.5])


def test_the_batch_is_not_changed_by_counting() -> None:
    data = np.random.default_rng(0).normal(size=(5, 2))
    before = data.copy()
    counted(data, data * 2)
    np.testing.assert_array_equal(data, before)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([np.zeros((1, 2))], "There are 1 vectors"),
        ([], "There are 0 vectors"),
        ([np.zeros((2, 2)), np.zeros((2, 3))], "A vector has 3 dimensions and earlier ones had 2"),
        ([np.array([[0.0, np.nan]])], "Dimension 1 holds NaN or Inf"),
        ([np.array([[np.inf, 0.0]])], "Dimension 0 holds NaN or Inf"),
    ],
)
def test_data_that_has_no_statistics_is_refused(batches: list[np.ndarray], message: str) -> None:
    with pytest.raises(UserError, match=message):
        counted(*batches)


# The file


@pytest.mark.parametrize("case", ["norm_stats_json", "norm_stats_json_no_quantiles"])
def test_openpis_file_is_read_and_written_back_unchanged(openpi_goldens: Path, tmp_path: Path, case: str) -> None:
    content = json.loads((openpi_goldens / "misc_info.json").read_text())[case]
    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps(content))
    stats = load_norm_stats(theirs)
    ours = tmp_path / "assets" / "trossen" / "norm_stats.json"
    save_norm_stats(ours, stats)
    assert json.loads(ours.read_text()) == content
    assert [path.name for path in ours.parent.iterdir()] == ["norm_stats.json"]
    np.testing.assert_array_equal(stats["state"].mean, content["norm_stats"]["state"]["mean"])


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "norm_stats.json"
    save_norm_stats(path, both(sound()))
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_norm_stats(path, with_number("mean", 0, np.nan))
    assert path.read_text() == before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json does not exist; copy it again"):
        load_norm_stats(tmp_path / "nowhere.json")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_norm_stats(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"norm_stats": {"state": {"mean": [0.1, ', "cannot be read as JSON"),
        ("\x00\x01", "cannot be read as JSON"),
        ('{"state": {"mean": [0.0], "std": [1.0]}}', "KeyError: 'norm_stats'"),
        ('{"norm_stats": {"state": {"std": [1.0]}}}', "KeyError: 'mean'"),
        ('{"norm_stats": {"state": {"mean": ["a"], "std": [1.0]}}}', "could not convert string"),
        ('{"norm_stats": {"state": {"mean": [[1.0], 2.0], "std": [1.0]}}}', "inhomogeneous"),
        ('{"norm_stats": {"state": 3}}', "AttributeError"),
        ('{"norm_stats": [1, 2]}', "AttributeError"),
        ("[]", "TypeError"),
    ],
)
def test_a_broken_file_is_refused_in_one_line_with_a_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "norm_stats.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_norm_stats(path)
    assert str(path) in str(caught.value)
    assert "compute it again" in str(caught.value)
    assert "\n" not in str(caught.value)


# The hash


def test_the_hash_depends_on_the_numbers_and_not_on_the_order_or_the_file(tmp_path: Path) -> None:
    stats = {"state": sound(2), "actions": sound(3)}
    path = tmp_path / "norm_stats.json"
    save_norm_stats(path, dict(reversed(stats.items())))
    assert norm_stats_hash(load_norm_stats(path)) == norm_stats_hash(stats)
    assert len(norm_stats_hash(stats)) == 64


@pytest.mark.parametrize("field", FIELDS)
def test_the_hash_sees_the_last_digit_of_every_field(field: str) -> None:
    changed = with_number(field, 1, np.nextafter(getattr(sound(), field)[1], 9.0))
    assert norm_stats_hash(changed) != norm_stats_hash(both(sound()))


def test_the_hash_sees_whether_there_are_quantiles() -> None:
    without = dataclasses.replace(sound(), q01=None, q99=None)
    assert norm_stats_hash(both(without)) != norm_stats_hash(both(sound()))


# The check


def test_sound_statistics_pass_without_a_note() -> None:
    assert check_norm_stats(both(sound()), "zscore") == []
    assert check_norm_stats(both(sound()), "quantile") == []


def test_a_constant_dimension_is_accepted_and_reported() -> None:
    (report,) = check_norm_stats(with_number("std", 1, 0.0), "zscore")
    assert report.startswith("state[1] never moves")
    (report,) = check_norm_stats(with_number("q01", 2, 1.0), "quantile")
    assert report.startswith("state[2] never moves")


def test_statistics_that_the_other_normalisation_needs_are_not_required() -> None:
    assert check_norm_stats(both(dataclasses.replace(sound(), q01=None, q99=None)), "zscore") == []
    assert check_norm_stats(with_number("q01", 0, 5.0), "zscore") == []
    assert check_norm_stats(with_number("std", 0, -1.0), "quantile") == []


@pytest.mark.parametrize("missing", ["state", "actions"])
def test_a_missing_key_is_refused(missing: str) -> None:
    stats = {key: value for key, value in both(sound()).items() if key != missing}
    with pytest.raises(UserError, match=f"but not '{missing}'; compute them again"):
        check_norm_stats(stats, "zscore")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", FIELDS)
def test_nan_and_inf_are_refused_wherever_they_are(field: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"state\.{field}\[1\] is -?(nan|inf)"):
        check_norm_stats(with_number(field, 1, value), "zscore")


def test_a_negative_deviation_is_refused() -> None:
    with pytest.raises(UserError, match=r"state\.std\[2\] is -0.5; it cannot be negative"):
        check_norm_stats(with_number("std", 2, -0.5), "zscore")


def test_crossed_quantiles_are_refused() -> None:
    with pytest.raises(UserError, match=r"state\.q01\[0\] is 2, above q99 1"):
        check_norm_stats(with_number("q01", 0, 2.0), "quantile")


@pytest.mark.parametrize(
    "entry", [dataclasses.replace(sound(), q01=None), dataclasses.replace(sound(), q99=None)], ids=["q01", "q99"]
)
def test_asking_for_absent_quantiles_is_refused(entry: NormStats) -> None:
    with pytest.raises(UserError, match="state have no quantiles"):
        check_norm_stats(both(entry), "quantile")


def test_fields_of_different_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "norm_stats.json"
    entry = {"mean": [0.0, 0.0], "std": [1.0]}
    path.write_text(json.dumps({"norm_stats": {"state": entry, "actions": entry}}))
    with pytest.raises(UserError, match=r"state\.std has shape \(1,\) but state\.mean has \(2,\)"):
        check_norm_stats(load_norm_stats(path), "zscore")


def test_nested_statistics_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "norm_stats.json"
    entry = {"mean": [[0.0], [0.0]], "std": [[1.0], [1.0]]}
    path.write_text(json.dumps({"norm_stats": {"state": entry, "actions": entry}}))
    with pytest.raises(UserError, match=r"state\.mean has shape \(2, 1\)"):
        check_norm_stats(load_norm_stats(path), "zscore")


def test_stats_cover_their_own_dimensions_and_padding_but_no_other_vector() -> None:
    stats = NormStats(mean=np.array([1.0, 2.0, 0.0]), std=np.ones(3))
    assert stats.covers(3)
    assert stats.covers(2)
    assert not stats.covers(1)
    assert not stats.covers(4)


def test_a_git_lfs_pointer_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "norm_stats.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1447\n")
    with pytest.raises(UserError, match=r"norm_stats\.json is only a pointer .* `git lfs pull`"):
        load_norm_stats(path)
