"""Broken copies of the goldens: each defect is found, in its episode, and nothing else. What a cleaned copy keeps."""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pistar.data.check import check_dataset, clean_copy
from pistar.data.check_numbers import Rows, Usual, check_numbers, check_timestamps, motion, still_runs
from pistar.data.findings import Finding, Report
from pistar.data.lerobot import Dataset, EpisodeInfo, Feature, open_dataset
from pistar.data.lerobot_writer import Layout, write_dataset
from pistar.errors import UserError
from pistar.types import Episode

LEROBOT = Path(__file__).parent.parent / "fixtures" / "lerobot"
HIGH = "observation.images.cam_high"
FEW = (3, 8)
"""Episodes to break: in v3.0, in different data files; 59 and 43 frames."""
Copy = Callable[[str], Path]
both = pytest.mark.parametrize("generation", ["v21", "v30"])


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Copies of the goldens, to break. Videos are links to the goldens': take the link away before writing."""

    def make(generation: str) -> Path:
        source, target = LEROBOT / f"lerobot_{generation}", tmp_path / generation
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.mp4"))
        for video in source.rglob("*.mp4"):
            link = target / video.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(video)
        return target

    return make


@pytest.fixture
def numbers(tmp_path: Path) -> Copy:
    """Copies of the goldens without cameras, quicker to check."""

    def make(generation: str) -> Path:
        source, target = LEROBOT / f"lerobot_{generation}", tmp_path / generation
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("videos"))
        info = json.loads((target / "meta" / "info.json").read_text())
        info["features"] = {name: f for name, f in info["features"].items() if f["dtype"] != "video"}
        (target / "meta" / "info.json").write_text(json.dumps(info))
        return target

    return make


def told(report: Report, kind: str, severity: str = "error") -> dict[int | None, str]:
    """By episode, what was found of a kind."""
    return {f.episode: f.what for f in report.findings if f.kind == kind and f.severity == severity}


def only(report: Report, kind: str, severity: str = "error") -> dict[int | None, str]:
    """The same, when nothing else was found but statistics that no longer fit the broken numbers."""
    assert {(f.kind, f.severity) for f in report.findings} - {("stats", "error")} == {(kind, severity)}
    return told(report, kind, severity)


@functools.cache
def golden(generation: str) -> Dataset:
    return open_dataset(LEROBOT / f"lerobot_{generation}")


def data_file(root: Path, episode: int) -> Path:
    source = golden(root.name)
    return root / source.episodes[episode].data_file.relative_to(source.root)


def edit(root: Path, episode: int, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Put other values into an episode's rows of a column."""
    path = data_file(root, episode)
    table = pq.read_table(path)
    rows = np.flatnonzero(table["episode_index"].to_numpy() == episode)
    at = table.column_names.index(name)
    values = np.array(table[name].to_pylist())
    values[rows] = change(values[rows].copy())
    column = pa.array(list(values) if values.ndim > 1 else values).cast(table.schema.field(name).type)
    pq.write_table(table.set_column(at, table.schema.field(name), column), path)


def put(row: int, value: float, dim: int = 4) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[row, dim] = value
        return values

    return change


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_jsonl(path: Path, index: int, change: Callable[[dict[str, Any]], None]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("episode_index", line.get("task_index")) == index:
            change(line)
    path.write_text("\n".join(json.dumps(line) for line in lines))


def edit_episodes_table(root: Path, episode: int, name: str, value: Any) -> None:
    for path in (root / "meta" / "episodes").rglob("*.parquet"):
        table = pq.read_table(path)
        values = table[name].to_pylist()
        values = [value if i == episode else v for i, v in zip(table["episode_index"].to_pylist(), values, strict=True)]
        field = table.schema.field(name)
        pq.write_table(table.set_column(table.column_names.index(name), field, pa.array(values, field.type)), path)


def video(root: Path, episode: int, camera: str = HIGH) -> Path:
    source = golden(root.name)
    return root / source.episodes[episode].videos[camera].path.relative_to(source.root)


def replace_video(path: Path, frames: list[np.ndarray], *, rate: int = 50, codec: str = "libx264") -> None:
    """Another video in the place of one."""
    path.unlink(missing_ok=True)
    os.environ.setdefault("SVT_LOG", "1")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options={"crf": "18"})
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def scenery(length: int, size: int = 128, seed: int = 0) -> list[np.ndarray]:
    """Pictures in which something moves."""
    small = np.random.default_rng(seed).integers(60, 200, (length, 8, 8, 3), np.uint8)
    return [np.asarray(Image.fromarray(frame).resize((size, size))) for frame in small]


def digest(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()
    }


# Sound datasets


@both
def test_a_sound_dataset_gives_no_alarm(generation: str) -> None:
    report = check_dataset(LEROBOT / f"lerobot_{generation}", frames=True)
    assert report.findings == ()
    assert report.sound == report.kept == list(range(12))


@pytest.mark.parametrize("videos", [True, False])
def test_what_we_write_gives_no_alarm(tmp_path: Path, videos: bool) -> None:
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            observations={"state": rng.normal(size=(n, 3)), "cam": np.stack(scenery(n, 32, seed=n))},
            actions=rng.normal(size=(n, 2)).astype(np.float32),
            rewards=np.zeros(n, np.float32), terminated=True, truncated=False, success=True, task="wave",
        )
        for n in (6, 9)
    ]  # fmt: skip
    write_dataset(tmp_path / "d", episodes, fps=5, robot_type="arm", layout=Layout(videos=videos))
    assert check_dataset(tmp_path / "d", frames=True).findings == ()


def test_a_folder_named_like_a_letter_leaves_sentences_whole(
    copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy("v30").rename(tmp_path / "d")
    edit_json(tmp_path / "d" / "meta" / "info.json", lambda info: info.update(total_frames=1))
    monkeypatch.chdir(tmp_path)
    what = "meta/info.json says total_frames 1 but meta/ lists 850; copy or download the dataset again."
    assert only(check_dataset("d"), "meta") == {None: what}


def test_progress_is_told_to_the_end() -> None:
    calls: list[tuple[str, int, int]] = []
    check_dataset(LEROBOT / "lerobot_v30", progress=lambda *call: calls.append(call))
    last = {what: (done, total) for what, done, total in calls}
    assert last == {"reading numbers": (3, 3), "opening videos": (12, 12)}


# Videos


@both
def test_a_missing_video_breaks_the_episodes_in_it(copy: Copy, generation: str) -> None:
    root = copy(generation)
    path = video(root, 3)
    path.unlink()
    expected = {e.index for e in open_dataset(root, check_rows=False).episodes if e.videos[HIGH].path == path}
    found = only(check_dataset(root), "video")
    assert found.keys() == expected
    assert 3 in expected
    assert "is missing" in found[3]


@both
def test_a_video_that_ends_too_soon_breaks_the_episodes_past_its_end(copy: Copy, generation: str) -> None:
    root = copy(generation)
    span = open_dataset(root).episodes[3].videos[HIGH]
    replace_video(video(root, 3), scenery(span.first_frame + 40))
    found = only(check_dataset(root), "video")
    assert found == {3: f"{HIGH}: the video has 40 of its 59 frames"}


@pytest.mark.parametrize(
    ("generation", "broken", "expected"),
    # LeRobot 0.3.3 wrote the index last, so that all is lost with it; 0.4.4 wrote it first, and half is still there.
    [("v21", {3}, "cannot be opened"), ("v30", {1, 2, 3}, "the video has 0 of its 59 frames")],
)
def test_half_a_video_file_breaks_what_was_in_the_other_half(
    copy: Copy, generation: str, broken: set[int], expected: str
) -> None:
    root = copy(generation)
    content = video(root, 3).read_bytes()
    video(root, 3).unlink()
    video(root, 3).write_bytes(content[: len(content) // 2])
    found = only(check_dataset(root), "video")
    assert found.keys() == broken
    assert expected in found[3]


def test_a_video_longer_than_its_episode_is_a_warning(copy: Copy) -> None:
    root = copy("v21")
    replace_video(video(root, 3), scenery(62))
    assert only(check_dataset(root), "video", "warning") == {3: f"{HIGH}: the video has 62 frames, the data 59"}


def test_reordered_frames_are_counted_by_when_they_are_shown(copy: Copy) -> None:
    root = copy("v21")
    path = video(root, 3)
    replace_video(path, scenery(59))
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.has_b_frames
    assert check_dataset(root, frames=True).findings == ()


@both
def test_a_video_of_another_rate_is_told(copy: Copy, generation: str) -> None:
    root = copy(generation)
    replace_video(video(root, 3), scenery(300), rate=30)
    assert "runs at 30 fps, the dataset at 50" in only(check_dataset(root), "video")[3]


def test_a_file_without_video_is_told(copy: Copy) -> None:
    root = copy("v21")
    path = video(root, 3)
    path.unlink()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        assert isinstance(stream, av.AudioStream)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 44100
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    assert "holds no video" in only(check_dataset(root), "video")[3]


def test_two_episodes_that_claim_the_same_frames_are_told(copy: Copy) -> None:
    root = copy("v30")
    edit_episodes_table(root, 1, f"videos/{HIGH}/from_timestamp", 90 / 50)
    assert only(check_dataset(root), "video").keys() == {0, 1}


@both
def test_a_picture_size_unlike_the_others_breaks_the_episode(copy: Copy, generation: str) -> None:
    root = copy(generation)
    replace_video(video(root, 3), scenery(300, size=64))
    found = told(check_dataset(root), "dimensions")
    assert found[3] == f"{HIGH} is 64×64, in most episodes 128×128"


def test_a_size_that_only_info_json_has_wrong_is_a_warning(copy: Copy) -> None:
    root = copy("v30")
    edit_json(root / "meta" / "info.json", lambda info: info["features"][HIGH].update(shape=[3, 480, 640]))
    assert only(check_dataset(root), "dimensions", "warning").keys() == {None}


@pytest.mark.parametrize("shape", [[128, 128, 3], [3, 128, 128]])
def test_either_order_of_a_pictures_axes_will_do(copy: Copy, shape: list[int]) -> None:
    root = copy("v21")
    edit_json(root / "meta" / "info.json", lambda info: info["features"][HIGH].update(shape=shape))
    assert check_dataset(root).findings == ()


# Pictures


@both
def test_frames_that_cannot_be_decoded_are_found_by_looking(copy: Copy, generation: str) -> None:
    root = copy(generation)
    path = video(root, 3)
    content = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        first = open_dataset(root, check_rows=False).episodes[3].videos[HIGH].first_frame
        for packet in container.demux(stream):
            if packet.pts is not None and round(packet.pts * float(stream.time_base or 0) * 50) == first + 20:
                assert packet.pos is not None
                content[packet.pos : packet.pos + packet.size] = b"\xff" * packet.size
    path.unlink()
    path.write_bytes(content)
    assert check_dataset(root).findings == ()
    assert only(check_dataset(root, frames=True), "pictures").keys() == {3}


def frozen(root: Path, episode: int, start: int, end: int) -> None:
    frames = list(open_dataset(root).decode(episode, HIGH))
    frames[start:end] = [frames[start]] * (end - start)
    replace_video(video(root, episode), frames, codec="libsvtav1")


def test_a_frozen_camera_while_the_robot_moves_is_found_by_looking(copy: Copy) -> None:
    root = copy("v21")
    frozen(root, 0, 20, 90)
    assert check_dataset(root).findings == ()
    found = only(check_dataset(root, frames=True), "duplicate")
    assert found == {0: f"{HIGH} shows one picture in frames 20 to 89 while the robot moves"}


def test_a_short_standstill_or_a_robot_that_waits_is_normal(copy: Copy) -> None:
    root = copy("v21")
    frozen(root, 0, 20, 60)  # 0.8 s
    frozen(root, 5, 20, 90)

    def wait(values: np.ndarray) -> np.ndarray:
        values[20:90] = values[20]
        return values

    for name in ("observation.state", "action"):
        edit(root, 5, name, wait)
    report = check_dataset(root, frames=True)
    assert [f for f in report.findings if f.kind != "stats"] == []


def test_black_pictures_are_found_by_looking(copy: Copy) -> None:
    root = copy("v21")
    black = np.zeros((128, 128, 3), np.uint8)
    replace_video(video(root, 3), [black] * 59)
    replace_video(video(root, 8), [*scenery(42), black])
    report = check_dataset(root, frames=True)
    assert told(report, "pictures") == {3: f"{HIGH} is black in all 59 frames"}
    assert told(report, "pictures", "warning") == {8: f"{HIGH} is black in 1 of 43 frames"}
    assert report.kept == [i for i in range(12) if i != 3]
    assert len(report.findings) == 2


def test_a_camera_that_is_black_everywhere_is_one_warning(tmp_path: Path) -> None:
    episode = Episode(
        observations={"state": np.arange(12.0)[:, None], "cam": np.zeros((12, 16, 16, 3), np.uint8)},
        actions=np.arange(12, dtype=np.float32)[:, None],
        rewards=np.zeros(12, np.float32), terminated=True, truncated=False, success=True, task="wave",
    )  # fmt: skip
    write_dataset(tmp_path / "d", [episode], fps=5, robot_type="arm", layout=Layout(videos=False))
    found = only(check_dataset(tmp_path / "d", frames=True), "pictures", "warning")
    assert found == {None: "cam is black in every episode"}


# Timestamps


@both
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: np.r_[t[:20], t[19], t[21:]], "time goes from 0.3800 s to 0.3800 s at frame 20"),
        (lambda t: np.r_[t[:20], t[20:][::-1]], "time goes from"),
        (lambda t: np.r_[t[:20], t[20:] + 0.1], "5 frames missing before frame 20 (0.120 s gap)"),
        (lambda t: t * 50 / 30, "runs at 30 fps by its timestamps, the dataset at 50"),
        (lambda t: t * 1.05, "runs at 47.62 fps by its timestamps, the dataset at 50"),
    ],
    ids=["repeat", "backwards", "gap", "rate", "drift"],
)
def test_a_clock_that_stumbles_breaks_the_episode(
    numbers: Copy, generation: str, change: Callable[[np.ndarray], np.ndarray], expected: str
) -> None:
    root = numbers(generation)
    for episode in FEW:
        edit(root, episode, "timestamp", change)
    report = check_dataset(root)
    found = only(report, "timestamps")
    assert found.keys() == set(FEW)
    assert all(expected in what for what in found.values())
    assert not set(FEW) & set(report.kept)


@both
@pytest.mark.parametrize("shift", [0.002, 5.0])
def test_a_clock_off_by_little_or_by_a_constant_can_be_mended(numbers: Copy, generation: str, shift: float) -> None:
    root = numbers(generation)
    edit(root, 3, "timestamp", lambda t: t + shift)
    report = check_dataset(root)
    assert f"off by up to {1000 * shift:.3g} ms" in only(report, "timestamps")[3]
    assert (len(report.sound), len(report.kept)) == (11, 12)


def rows(*columns: np.ndarray, fps: float = 50.0, **named: np.ndarray) -> Rows:
    """Episodes of one column, or of several named ones of all episodes end to end."""
    lengths = np.array([len(column) for column in columns])
    episodes = [EpisodeInfo(i, int(n), ("wave",), 0, Path("x"), {}) for i, n in enumerate(lengths)]
    named = named or {"timestamp": np.concatenate(columns)[:, None]}
    return Rows(episodes, lengths, named, fps)


@settings(max_examples=60, deadline=None)
@given(fps=st.sampled_from([5.0, 10.0, 15.0, 29.97, 30.0, 50.0, 100.0]), length=st.integers(1, 60_000))
def test_float32_timestamps_on_the_grid_are_never_an_alarm(fps: float, length: int) -> None:
    seconds = (np.arange(min(length, 60_000)) / fps).astype(np.float32)
    assert list(check_timestamps(rows(seconds, fps=fps))) == []


@settings(max_examples=60, deadline=None)
@given(at=st.integers(1, 58), off=st.floats(0.0005, 3), sign=st.sampled_from([-1, 1]))
def test_one_wrong_timestamp_is_always_found_in_its_episode(at: int, off: float, sign: int) -> None:
    right = np.arange(60) / 50
    wrong = right.copy()
    wrong[at] += sign * off
    assert [f.episode for f in check_timestamps(rows(right, wrong, right))] == [1]


# Rows, indices, files


@both
def test_a_data_file_that_cannot_be_read_leaves_the_others_checked(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    path.write_bytes(path.read_bytes()[:1000])
    edit(root, 8, "action", put(5, np.nan))
    report = check_dataset(root)
    assert 3 in told(report, "data")
    assert told(report, "nan").keys() == {8}
    with_it = {e.index for e in report.dataset.episodes if e.data_file == path}
    assert told(report, "data").keys() == with_it


@both
def test_a_missing_data_file_is_told(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    data_file(root, 3).unlink()
    assert "is missing" in only(check_dataset(root), "data")[3]


@both
def test_rows_that_are_missing_are_told(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    table = pq.read_table(path)
    mine = table["episode_index"].to_numpy() == 3
    pq.write_table(table.filter(pa.array(~(mine & (table["frame_index"].to_numpy() >= 50)))), path)
    found = only(check_dataset(root), "data")
    assert found.keys() == {3}
    assert "has 50 rows of it, meta/ says 59" in found[3]


@both
def test_a_missing_column_is_told(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    pq.write_table(pq.read_table(path).drop_columns(["action"]), path)
    assert "lacks column 'action'" in only(check_dataset(root), "data")[3]


@both
def test_an_empty_cell_is_told(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    table = pq.read_table(path)
    values = table["action"].to_pylist()
    values[int(np.flatnonzero(table["episode_index"].to_numpy() == 3)[7])] = None
    column = pa.array(values, pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), path)
    found = only(check_dataset(root), "data")
    assert found.keys() == {3}
    assert "empty cells" in found[3]


@both
@pytest.mark.parametrize("name", ["frame_index", "index"])
def test_rows_numbered_wrongly_can_be_mended(numbers: Copy, generation: str, name: str) -> None:
    root = numbers(generation)
    edit(root, 3, name, lambda numbers: numbers + 2)
    report = check_dataset(root)
    assert f"{name} is" in only(report, "index")[3]
    assert 3 not in report.sound
    assert 3 in report.kept


@both
def test_rows_of_another_episode_break_it(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit(root, 3, "episode_index", lambda numbers: numbers + 90)
    report = check_dataset(root)
    assert report.kept == [i for i in range(12) if i != 3]
    if generation == "v30":
        assert "episodes that meta/ does not put there: 93" in told(report, "index")[None]


def test_rows_in_the_wrong_order_in_their_file_can_be_mended(numbers: Copy) -> None:
    root = numbers("v30")
    path = data_file(root, 1)
    table = pq.read_table(path)
    number = table["episode_index"].to_numpy()
    order = np.argsort(np.where(number == 0, 0.5, np.where(number == 1, 0, number)), kind="stable")
    pq.write_table(table.take(pa.array(order)), path)
    report = check_dataset(root)
    assert only(report, "index").keys() == {0, 1, 2}
    assert report.kept == list(range(12))


def test_rows_among_anothers_break_the_episode(numbers: Copy) -> None:
    root = numbers("v30")
    path = data_file(root, 0)
    table = pq.read_table(path)
    pq.write_table(table.take(pa.array([1, *range(2, 110), 0, *range(110, len(table))])), path)
    report = check_dataset(root)
    assert "other episodes' rows among" in told(report, "data")[0]


# Dimensions


@both
def test_vectors_of_another_length_break_the_episode(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    table = pq.read_table(path)
    short = pa.array([row[:13] for row in table["action"].to_pylist()], pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index("action"), "action", short), path)
    found = only(check_dataset(root), "dimensions")
    assert found[3] == "action is float32[13] a frame, info.json says float32[14]"
    assert found.keys() == {e.index for e in check_dataset(root).dataset.episodes if e.data_file == path}


# Values


@both
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["action", "observation.state"])
def test_nan_breaks_the_episode(numbers: Copy, generation: str, value: float, name: str) -> None:
    root = numbers(generation)
    edit(root, 8, name, put(5, value))
    report = check_dataset(root)
    assert only(report, "nan") == {8: f"{name}[4] is {value} at frame 5, 1 frame in all"}
    assert 8 not in report.kept


@both
def test_an_action_far_out_of_range_breaks_the_episode(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit(root, 3, "action", put(5, 60.0))
    edit(root, 8, "action", put(7, -1e9))
    found = only(check_dataset(root), "range")
    assert found.keys() == set(FEW)
    assert "action[4] (left_wrist_angle) is 60 at frame 5; usual is" in found[3]
    assert "-1e+09" in found[8]


@both
def test_an_action_out_of_range_is_a_warning(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit(root, 3, "action", put(5, 25.0))
    assert only(check_dataset(root), "range", "warning").keys() == {3}


def test_an_episode_in_other_units_does_not_make_itself_usual(numbers: Copy) -> None:
    root = numbers("v21")
    edit(root, 3, "action", np.rad2deg)
    assert 3 in told(check_dataset(root), "range") | told(check_dataset(root), "range", "warning")


def test_a_state_out_of_range_is_a_warning(numbers: Copy) -> None:
    root = numbers("v21")
    edit(root, 3, "observation.state", put(5, 1e9))
    assert only(check_dataset(root), "range", "warning").keys() == {3}


def test_a_joint_that_seldom_moves_is_no_outlier() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(-1, 1, (10 * 60, 3))
    values[:540, 2] *= 1e-4  # trembles, but moves in the last episode only
    found = list(check_numbers(rows(*np.split(values, 10), action=values), {"action": Feature("float32", (3,))}))
    assert found == []


def states_with_goals(broken: int) -> Rows:
    """Ten episodes: two numbers that tremble, and a goal that is elsewhere in each; far off in the last so many."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0, 1e-3, (10 * 60, 3))
    values[:, 2] = np.repeat(rng.uniform(-0.1, 0.1, 10), 60)
    values[600 - 60 * broken :, 2] += 50
    return rows(*np.split(values, 10), state=values)


@pytest.mark.parametrize("broken", [0, 1, 4])
def test_a_goal_that_stands_still_in_each_episode_may_be_elsewhere_in_the_next_but_not_anywhere(broken: int) -> None:
    found = list(check_numbers(states_with_goals(broken), {"state": Feature("float32", (3,))}))
    assert [(f.episode, f.kind, f.severity) for f in found] == [(i, "range", "warning") for i in range(10 - broken, 10)]


def test_a_number_that_is_no_command_in_any_unit_breaks_the_episode() -> None:
    values = np.random.default_rng(0).uniform(-1e4, 1e4, (600, 2))
    values[70, 1] = 1.5e5  # only 7 ranges away
    found = list(check_numbers(rows(*np.split(values, 10), action=values), {"action": Feature("float32", (2,))}))
    assert [(f.episode, f.kind, f.severity) for f in found] == [(1, "range", "error")]


def test_actions_that_never_change_anywhere_are_one_warning() -> None:
    values = np.ones((120, 2))
    found = list(check_numbers(rows(*np.split(values, 2), action=values), {"action": Feature("float32", (2,))}))
    assert [(f.episode, f.kind, f.severity) for f in found] == [(None, "constant", "warning")]


@both
def test_an_episode_of_one_action_is_broken(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit(root, 3, "action", lambda values: np.broadcast_to(values[0], values.shape))
    found = only(check_dataset(root), "constant")
    assert found == {3: "action is the same in all 59 frames; in other episodes it changes"}


@both
def test_a_dimension_that_never_moves_is_one_warning(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    for episode in range(12):
        edit(root, episode, "action", lambda values: values * (np.arange(14) != 4))
    found = only(check_dataset(root), "constant", "warning")
    assert found == {None: "never changes in any episode: action[4] (left_wrist_angle)"}


def test_a_dimension_that_rests_in_some_episodes_is_normal(numbers: Copy) -> None:
    root = numbers("v21")
    edit(root, 3, "action", lambda values: values * (np.arange(14) != 4))
    assert [f for f in check_dataset(root).findings if f.kind != "stats"] == []


def test_a_state_that_stands_still_while_actions_move_is_a_warning(numbers: Copy) -> None:
    root = numbers("v21")

    def stick(values: np.ndarray) -> np.ndarray:
        values[10:80] = values[10]
        return values

    edit(root, 0, "observation.state", stick)
    found = only(check_dataset(root), "duplicate", "warning")
    assert found == {0: "observation.state stands still in frames 10 to 79 while action moves"}


def test_an_episode_that_is_there_twice_is_a_warning(numbers: Copy) -> None:
    root = numbers("v21")
    third = pq.read_table(data_file(root, 2))
    for name in ("action", "observation.state"):
        edit(root, 4, name, lambda _, name=name: np.array(third[name].to_pylist()))  # type: ignore[misc]
    assert only(check_dataset(root), "duplicate", "warning") == {4: "is episode 2 again, number for number"}


@settings(max_examples=50, deadline=None)
@given(same=st.lists(st.booleans(), max_size=60), fps=st.sampled_from([2.0, 10.0]))
def test_still_runs_are_what_counting_by_hand_gives(same: list[bool], fps: float) -> None:
    same = [False, *same]
    expected, start = [], 0
    for i in range(1, len(same) + 1):
        if i == len(same) or not same[i]:
            if i - start >= max(5, fps):
                expected.append((start, i))
            start = i
    assert still_runs(np.array(same), fps) == expected


def test_motion_is_measured_in_usual_ranges() -> None:
    values = np.array([[0.0, 1.0], [0.2, 1.0]])
    assert motion(values, Usual(np.zeros(2), np.array([2.0, 0.0]), np.zeros(2))) == pytest.approx(0.1)
    assert motion(values, Usual(np.zeros(2), np.zeros(2), np.zeros(2))) == 0


# Tasks


def break_tasks(root: Path, text: str | None) -> None:
    """Give task 1 another text, or take it off the list."""
    if root.name == "v21":
        path = root / "meta" / "tasks.jsonl"
        if text is None:
            path.write_text(path.read_text().splitlines()[0])
        else:
            edit_jsonl(path, 1, lambda line: line.update(task=text))
        return
    path = root / "meta" / "tasks.parquet"
    table = pq.read_table(path)
    if text is None:
        table = table.slice(0, 1)
    else:
        texts = pa.array([table["__index_level_0__"][0].as_py(), text])
        table = table.set_column(table.column_names.index("__index_level_0__"), "__index_level_0__", texts)
    pq.write_table(table, path)


def second_task(root: Path) -> set[int | None]:
    return {e.index for e in golden(root.name).episodes if "Insert" in e.tasks[0]}


@both
def test_a_task_missing_from_the_list_is_taken_from_the_episode(numbers: Copy, generation: str, tmp_path: Path) -> None:
    root = numbers(generation)
    break_tasks(root, None)
    report = check_dataset(root)
    assert only(report, "task").keys() == second_task(root)
    clean_copy(report, tmp_path / "out")
    texts = [e.tasks for e in open_dataset(tmp_path / "out").episodes]
    assert texts == [e.tasks for e in golden(generation).episodes]


@both
def test_an_empty_task_breaks_its_episodes(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    break_tasks(root, " ")
    report = check_dataset(root)
    assert only(report, "task").keys() == second_task(root) == set(range(12)) - set(report.kept)


@both
def test_a_lost_task_list_is_written_anew(numbers: Copy, generation: str, tmp_path: Path) -> None:
    root = numbers(generation)
    next((root / "meta").glob("tasks.*")).unlink()
    report = check_dataset(root)
    assert "is missing" in told(report, "meta")[None]
    assert len(told(report, "task")) == 12
    clean_copy(report, tmp_path / "out")
    assert len(open_dataset(tmp_path / "out").tasks) == 2


@both
def test_an_episode_whose_list_names_another_task_is_a_warning(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    if generation == "v21":
        edit_jsonl(root / "meta" / "episodes.jsonl", 3, lambda line: line.update(tasks=["dance"]))
    else:
        edit_episodes_table(root, 3, "tasks", ["dance"])
    found = only(check_dataset(root), "task", "warning")
    assert "'dance'" in found[3]


# Statistics


@both
@pytest.mark.parametrize("key", ["min", "max", "mean", "count"])
def test_statistics_of_an_episode_that_disagree_are_told(numbers: Copy, generation: str, key: str) -> None:
    root = numbers(generation)
    lie = [99] if key == "count" else [0.5] * 14
    if generation == "v21":
        path = root / "meta" / "episodes_stats.jsonl"
        edit_jsonl(path, 3, lambda line: line["stats"]["action"].update({key: lie}))
    else:
        edit_episodes_table(root, 3, f"stats/action/{key}", lie)
    report = check_dataset(root)
    assert {(f.episode, f.kind, f.severity) for f in report.findings} == {(3, "stats", "error")}
    assert 3 in report.kept


@pytest.mark.parametrize("key", ["min", "max", "mean", "count"])
def test_statistics_of_the_dataset_that_disagree_are_told(numbers: Copy, key: str) -> None:
    root = numbers("v30")
    lie = [99] if key == "count" else [0.5] * 14
    edit_json(root / "meta" / "stats.json", lambda stats: stats["action"].update({key: lie}))
    assert only_stats(root).keys() == {None}


def only_stats(root: Path, severity: str = "error") -> dict[int | None, str]:
    report = check_dataset(root)
    assert {f.kind for f in report.findings} == {"stats"}
    return told(report, "stats", severity)


def test_statistics_of_other_dimensions_are_told(numbers: Copy) -> None:
    root = numbers("v30")
    edit_json(root / "meta" / "stats.json", lambda stats: stats["action"].update(mean=[0.0] * 7))
    assert "7 numbers for mean, the data 14" in only_stats(root)[None]


def test_averaged_quantiles_and_renumbered_indices_are_no_disagreement(numbers: Copy) -> None:
    root = numbers("v30")

    def lie(stats: dict[str, Any]) -> None:
        stats["action"]["q01"] = stats["action"]["q99"]
        stats["index"]["max"] = [10**6]

    edit_json(root / "meta" / "stats.json", lie)
    assert check_dataset(root).findings == ()


@both
def test_missing_statistics_are_a_warning(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    (root / "meta" / ("episodes_stats.jsonl" if generation == "v21" else "stats.json")).unlink()
    assert only_stats(root, "warning").keys() == {None}


def test_an_episode_without_statistics_is_a_warning(numbers: Copy) -> None:
    root = numbers("v21")
    path = root / "meta" / "episodes_stats.jsonl"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"episode_index": 3,' not in line))
    assert only_stats(root, "warning") == {3: "meta/ has no statistics of it"}


@pytest.mark.parametrize("content", ['{"action": 3}', '{"action": {"mean": "low"}}'])
def test_statistics_of_no_sense_are_told(numbers: Copy, content: str) -> None:
    root = numbers("v30")
    (root / "meta" / "stats.json").write_text(content)
    assert {f.kind for f in check_dataset(root).findings} == {"stats"}


# meta/


@both
def test_totals_that_are_wrong_can_be_mended(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit_json(root / "meta" / "info.json", lambda info: info.update(total_frames=7))
    report = check_dataset(root)
    assert only(report, "meta") == {
        None: "meta/info.json says total_frames 7 but meta/ lists 850; copy or download the dataset again."
    }
    assert len(report.sound) == 12


@both
def test_a_wrong_length_in_meta_is_told_of_its_episode(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    if generation == "v21":
        edit_jsonl(root / "meta" / "episodes.jsonl", 3, lambda line: line.update(length=50))
    else:
        edit_episodes_table(root, 3, "length", 50)
    report = check_dataset(root)
    assert "has 59 rows of it, meta/ says 50" in told(report, "data")[3]
    assert report.kept == [i for i in range(12) if i != 3]


@both
def test_an_episode_without_frames_is_told(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    if generation == "v21":
        edit_jsonl(root / "meta" / "episodes.jsonl", 3, lambda line: line.update(length=0))
    else:
        edit_episodes_table(root, 3, "length", 0)
    assert report_kept(root) == [i for i in range(12) if i != 3]


def report_kept(root: Path) -> list[int]:
    return check_dataset(root).kept


def test_an_episode_that_is_listed_twice_or_not_at_all_is_told(numbers: Copy) -> None:
    root = numbers("v21")
    path = root / "meta" / "episodes.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], *lines[6:], lines[8]]))
    report = check_dataset(root)
    assert "is listed 2 times" in told(report, "meta").values()
    assert 5 not in report.kept
    assert 8 not in report.kept


def test_a_camera_of_another_rate_in_info_json_cannot_be_mended(copy: Copy, tmp_path: Path) -> None:
    root = copy("v30")
    edit_json(root / "meta" / "info.json", lambda info: info["features"][HIGH]["info"].update({"video.fps": 25}))
    report = check_dataset(root)
    assert told(report, "meta").keys() == {None}
    with pytest.raises(UserError, match=r"cannot be mended by copying: .* recorded at 25 fps"):
        clean_copy(report, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_a_dataset_is_an_error(tmp_path: Path, numbers: Copy) -> None:
    with pytest.raises(UserError, match=r"no meta/info\.json"):
        check_dataset(tmp_path)
    root = numbers("v30")
    edit_json(root / "meta" / "info.json", lambda info: info["features"].pop("timestamp"))
    with pytest.raises(UserError, match="lacks the feature 'timestamp'"):
        check_dataset(root)
    edit_json(root / "meta" / "info.json", lambda info: info.update(codebase_version="v2.0"))
    with pytest.raises(UserError, match=r"v2\.0"):
        check_dataset(root)


# The cleaned copy


def columns(root: Path, names: list[str]) -> Mapping[str, np.ndarray]:
    return open_dataset(root).columns(names)


@both
def test_a_copy_has_the_kept_episodes_bit_for_bit(copy: Copy, generation: str, tmp_path: Path) -> None:
    root = copy(generation)
    edit(root, 3, "action", put(5, np.nan))
    edit(root, 8, "timestamp", lambda t: t + 0.002)
    edit(root, 9, "index", lambda i: i + 5)
    before = digest(root)
    report = check_dataset(root)
    after = clean_copy(report, tmp_path / "out")
    assert digest(root) == before
    assert report.dropped == [3]
    assert report.mended.keys() >= {"timestamps written anew as frame / fps", "rows and episodes numbered anew"}
    assert after.findings == ()

    source = golden(generation)
    made = open_dataset(tmp_path / "out")
    kept = [e for e in source.episodes if e.index != 3]
    assert made.version == "v3.0"
    assert [e.length for e in made.episodes] == [e.length for e in kept]
    names = ["action", "observation.state", "next.reward", "next.done", "next.success", "timestamp", "frame_index"]
    old, new = source.columns(names), made.columns(names)
    for name in names:
        expected = np.concatenate([old[name][e.rows] for e in kept])
        np.testing.assert_array_equal(new[name], expected, strict=True)
    for old_info, new_info in ((kept[3], made.episodes[3]), (kept[10], made.episodes[10])):
        for frame in (0, old_info.length - 1):
            (was,) = source.decode(old_info.index, HIGH, frame, frame + 1)
            (is_,) = made.decode(new_info.index, HIGH, frame, frame + 1)
            np.testing.assert_array_equal(is_, was)
    assert made.frame_tasks().tolist() == [t for e in kept for t in source.frame_tasks()[e.rows]]


@both
def test_a_copy_carries_the_cameras_statistics_over(generation: str, tmp_path: Path) -> None:
    root = LEROBOT / f"lerobot_{generation}"
    clean_copy(check_dataset(root), tmp_path / "out")
    stats = json.loads((tmp_path / "out" / "meta" / "stats.json").read_text())
    # LeRobot pooled the same episodes in v3.0.
    expected = json.loads((LEROBOT / "lerobot_v30" / "meta" / "stats.json").read_text())
    for key in ("mean", "std", "min", "max", "count"):
        if (generation, key) != ("v21", "std"):  # LeRobot 0.4.4 squares bytes: its deviation of pictures is nearly 0
            np.testing.assert_allclose(stats[HIGH][key], expected[HIGH][key], rtol=1e-3)
        np.testing.assert_allclose(stats["action"][key], expected["action"][key], rtol=1e-4, atol=1e-6)


def test_a_copy_without_readable_statistics_has_those_of_numbers(copy: Copy, tmp_path: Path) -> None:
    root = copy("v21")
    (root / "meta" / "episodes_stats.jsonl").unlink()
    assert clean_copy(check_dataset(root), tmp_path / "out").findings == ()
    stats = json.loads((tmp_path / "out" / "meta" / "stats.json").read_text())
    assert "action" in stats
    assert HIGH not in stats


def test_a_copy_rolls_to_new_files(copy: Copy, tmp_path: Path) -> None:
    root = copy("v21")
    edit_json(root / "meta" / "info.json", lambda info: info.update(data_files_size_in_mb=0.02))
    assert clean_copy(check_dataset(root), tmp_path / "out").findings == ()
    assert len(list((tmp_path / "out" / "data").rglob("*.parquet"))) > 2


def test_a_copy_that_is_still_broken_is_an_error(numbers: Copy, tmp_path: Path) -> None:
    root = numbers("v30")
    edit(root, 3, "action", put(5, np.nan))
    with pytest.raises(UserError, match=r"out was written but has errors \(action\[4\] is nan"):
        clean_copy(Report(check_dataset(root).dataset, ()), tmp_path / "out")


def test_a_copy_is_refused_where_something_is(tmp_path: Path, copy: Copy) -> None:
    root = copy("v30")
    report = check_dataset(root)
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        clean_copy(report, tmp_path / "there")
    with pytest.raises(UserError, match="is inside"):
        clean_copy(report, root / "clean")
    assert list((tmp_path / "there").iterdir()) == []


def test_nothing_is_left_of_a_copy_that_fails(copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_dataset(copy("v30"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match=r"No space left.*free some space"):
        clean_copy(report, tmp_path / "out")

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "copyfile", forbidden)
    with pytest.raises(UserError, match=r"Permission denied.*check the permissions"):
        clean_copy(report, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["v30"]


def test_a_dataset_with_nothing_sound_gives_no_copy(copy: Copy, tmp_path: Path) -> None:
    root = copy("v30")
    for path in (root / "data").rglob("*.parquet"):
        path.unlink()
    report = check_dataset(root)
    assert report.sound == []
    with pytest.raises(UserError, match="no episode fit to copy"):
        clean_copy(report, tmp_path / "out")


def test_pictures_and_texts_in_data_files_are_copied_with_their_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made = [
        Episode(
            observations={
                "state": rng.normal(size=(n, 3)),
                "cam": np.stack(scenery(n, 32, seed=n)),
                "said": np.array([f"étape {i}" for i in range(n)]),
            },
            actions=rng.normal(size=(n, 2)).astype(np.float32),
            rewards=np.zeros(n, np.float32), terminated=True, truncated=False, success=True, task=f"wave {n}",
        )
        for n in (6, 9, 7)
    ]  # fmt: skip
    write_dataset(tmp_path / "d", made, fps=5, robot_type="arm", layout=Layout(videos=False))
    report = check_dataset(tmp_path / "d")
    broken = Report(report.dataset, (Finding(1, "nan", "NaN"),))
    clean_copy(broken, tmp_path / "out")
    pictures = np.stack(list(open_dataset(tmp_path / "out").decode(1, "cam")))
    np.testing.assert_array_equal(pictures, made[2].observations["cam"])
    assert open_dataset(tmp_path / "out").tasks == {0: "wave 6", 1: "wave 7"}
    said = np.concatenate([made[i].observations["said"] for i in (0, 2)])
    assert open_dataset(tmp_path / "out").columns(["said"])["said"].tolist() == said.tolist()
