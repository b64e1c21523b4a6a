"""Our reader reads back what our writer writes, and every field of the files is as LeRobot writes it.

In test_lerobot_reads_ours.py LeRobot itself reads it.
"""

import dataclasses
import io
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.encoding import encode_frames
from pistar.data.lerobot.reader import open_dataset
from pistar.data.lerobot.stats import image_stats, number_stats
from pistar.data.lerobot.writer import DatasetWriter, Layout, write_dataset
from pistar.errors import UserError
from pistar.types import Episode

from helpers.datasets import origins
from helpers.paths import FIXTURES

GOLDEN = FIXTURES / "lerobot" / "lerobot_v30"
CAMERAS = tuple(f"observation.images.cam_{where}" for where in ("high", "left_wrist", "right_wrist"))
EXTRA = "next.truncated"
"""A column the golden does not have."""


def episode(length: int, seed: int = 0, *, size: int = 64, **changes: Any) -> Episode:
    """Make an episode whose camera shows slow waves of colour."""
    rng = np.random.default_rng(seed)
    wave = np.sin(np.linspace(0, 3, size)[None, :, None] + np.arange(length + 1)[:, None, None] / 20 + seed)
    pictures = np.broadcast_to(((wave + 1) * 100)[..., None], (length + 1, size, 1, 1)).repeat(size, 2).repeat(3, 3)
    values: dict[str, Any] = {
        "observations": {
            "observation.state": rng.normal(size=(length + 1, 14)).astype(np.float32),
            "observation.images.top": np.asarray(pictures, np.uint8),
        },
        "actions": rng.normal(size=(length, 14)).astype(np.float32),
        "rewards": rng.normal(size=length).astype(np.float32),
        "terminated": True,
        "truncated": False,
        "success": True,
        "task": "stack the cubes",
    }
    return Episode(**(values | changes))


def write(path: Path, *episodes: Episode, **options: Any) -> Dataset:
    settings: dict[str, Any] = {"fps": 50, "robot_type": "aloha"} | options
    return open_dataset(write_dataset(path, episodes, **settings))


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The golden's first four episodes, read by our reader and written by our writer."""
    golden = open_dataset(GOLDEN)
    names = [name for name, feature in golden.features.items() if not feature.is_camera]
    columns = golden.columns(names)

    def episodes() -> Iterator[Episode]:
        for info in golden.episodes[:4]:
            pictures = {camera: np.stack(list(golden.decode(info.index, camera))) for camera in CAMERAS}
            yield Episode(
                observations={"observation.state": columns["observation.state"][info.rows], **pictures},
                actions=columns["action"][info.rows],
                rewards=columns["next.reward"][info.rows],
                terminated=bool(columns["next.done"][info.rows][-1]),
                truncated=False,
                success=bool(columns["next.success"][info.rows].any()),
                task=info.tasks[0],
            )

    joints = golden.features["action"].names
    path = tmp_path_factory.mktemp("rewritten") / "dataset"
    write_dataset(path, episodes(), fps=50, robot_type="aloha", names={"observation.state": joints, "action": joints})
    return open_dataset(path)


# The same recording as LeRobot wrote it


def test_values_come_back_equal(rewritten: Dataset) -> None:
    golden = open_dataset(GOLDEN)
    names = [name for name, feature in golden.features.items() if not feature.is_camera]
    ours, theirs = rewritten.columns(names), golden.columns(names)
    for name in names:
        np.testing.assert_array_equal(ours[name], theirs[name][: rewritten.total_frames], strict=True)
    assert not rewritten.columns([EXTRA])[EXTRA].any()
    assert rewritten.tasks == golden.tasks
    assert rewritten.frame_tasks().tolist() == golden.frame_tasks()[: rewritten.total_frames].tolist()


def test_pictures_come_back_close(rewritten: Dataset) -> None:
    golden = open_dataset(GOLDEN)
    for info in rewritten.episodes:
        ours = np.stack(list(rewritten.decode(info.index, CAMERAS[0]))).astype(int)
        theirs = np.stack(list(golden.decode(info.index, CAMERAS[0]))).astype(int)
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).mean() < 4  # of 255; noise is what video keeps worst


def test_info_equals_lerobots(rewritten: Dataset) -> None:
    ours, theirs = (json.loads((root / "meta" / "info.json").read_text()) for root in (rewritten.root, GOLDEN))
    del ours["features"][EXTRA]
    assert list(ours) == list(theirs)
    assert list(ours["features"]) == list(theirs["features"])
    assert ours["features"] == theirs["features"]
    limits = {"chunks_size": 1000, "data_files_size_in_mb": 100, "video_files_size_in_mb": 200}  # LeRobot's defaults
    totals = {"total_episodes": 4, "total_frames": 264, "total_tasks": 2, "splits": {"train": "0:4"}}
    assert ours == theirs | limits | totals


def test_data_files_have_lerobots_schema_and_a_row_group_an_episode(rewritten: Dataset) -> None:
    name = "data/chunk-000/file-000.parquet"
    ours, theirs = (pq.ParquetFile(root / name) for root in (rewritten.root, GOLDEN))
    schema = ours.schema_arrow.remove(ours.schema_arrow.names.index(EXTRA))
    assert schema.equals(theirs.schema_arrow, check_metadata=False)
    assert set(schema.metadata) == set(theirs.schema_arrow.metadata) == {b"huggingface"}
    kinds, expected = (
        json.loads(file.schema_arrow.metadata[b"huggingface"])["info"]["features"] for file in (ours, theirs)
    )
    assert kinds.pop(EXTRA) == {"dtype": "bool", "_type": "Value"}
    assert kinds == expected
    assert list(kinds) == list(expected)
    groups = [ours.metadata.row_group(i) for i in range(ours.num_row_groups)]
    assert [group.num_rows for group in groups] == [e.length for e in rewritten.episodes]
    assert groups[0].column(0).compression == theirs.metadata.row_group(0).column(0).compression == "SNAPPY"


def test_episode_table_has_lerobots_columns_and_numbers(rewritten: Dataset) -> None:
    ours, theirs = (pq.read_table(root / "meta" / "episodes") for root in (rewritten.root, GOLDEN))
    ours = ours.drop_columns([name for name in ours.column_names if name.startswith(f"stats/{EXTRA}/")])
    assert ours.schema.equals(theirs.schema)
    for name in theirs.column_names:
        if name.startswith("stats/"):
            continue
        expected = theirs[name].to_pylist()[:4]
        assert ours[name].to_pylist() == (pytest.approx(expected) if "timestamp" in name else expected), name
    for feature in ("observation.state", "action", "next.reward", "next.done", "timestamp", "index"):
        for key in ("min", "max", "mean", "std", "count"):
            name = f"stats/{feature}/{key}"
            for mine, expected in zip(ours[name].to_pylist(), theirs[name].to_pylist(), strict=False):
                np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_picture_statistics_agree_with_lerobots(rewritten: Dataset) -> None:
    ours, theirs = (pq.read_table(root / "meta" / "episodes") for root in (rewritten.root, GOLDEN))
    # Not std: LeRobot 0.4.4 squares uint8, which overflows, and writes 0.
    for key, tolerance in (("mean", 0.02), ("q10", 0.05), ("q50", 0.05), ("q90", 0.05), ("count", 0)):
        name = f"stats/{CAMERAS[0]}/{key}"
        for mine, expected in zip(ours[name].to_pylist(), theirs[name].to_pylist(), strict=False):
            np.testing.assert_allclose(mine, expected, atol=tolerance)


def test_task_table_restores_the_index_in_pandas(rewritten: Dataset) -> None:
    ours, theirs = (pq.read_table(root / "meta" / "tasks.parquet") for root in (rewritten.root, GOLDEN))
    assert ours.column_names == theirs.column_names
    assert ours.to_pylist() == theirs.to_pylist()
    mine, expected = (json.loads(table.schema.metadata[b"pandas"]) for table in (ours, theirs))
    assert mine.keys() == expected.keys()
    assert mine["index_columns"] == expected["index_columns"]
    assert [c["field_name"] for c in mine["columns"]] == [c["field_name"] for c in expected["columns"]]
    assert [c["name"] for c in mine["columns"]] == [c["name"] for c in expected["columns"]]


def test_statistics_of_the_dataset_are_those_of_its_rows(rewritten: Dataset) -> None:
    ours, theirs = (json.loads((root / "meta" / "stats.json").read_text()) for root in (rewritten.root, GOLDEN))
    assert ours.pop(EXTRA)["max"] == [False]
    assert ours.keys() == theirs.keys()
    for name, stats in theirs.items():
        assert {key: np.shape(v) for key, v in ours[name].items()} == {key: np.shape(v) for key, v in stats.items()}
    index = ours["index"]  # 0 … 263
    assert (index["min"], index["max"], index["mean"], index["count"]) == ([0], [263], [131.5], [264])
    assert index["q01"] == pytest.approx([2.63])
    assert index["q99"] == pytest.approx([260.37])


def test_videos_are_encoded_as_lerobot_encodes_them(rewritten: Dataset) -> None:
    name = f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4"
    facts = []
    for root in (rewritten.root, GOLDEN):
        with av.open(str(root / name)) as container:
            stream = container.streams.video[0]
            context = stream.codec_context
            keys = [packet.is_keyframe for packet in container.demux(stream) if packet.size]
            facts.append(
                (stream.average_rate, stream.time_base, stream.start_time, context.pix_fmt, context.name, keys)
            )
    assert facts[0] == facts[1]
    assert len(facts[0][-1]) == 264


# Files


@pytest.mark.parametrize("videos", [True, False])
def test_files_roll_by_size_and_folders_by_number(tmp_path: Path, videos: bool) -> None:
    data_size = 0.01 if videos else 0.02
    layout = Layout(videos=videos, chunks_size=2, data_files_size_in_mb=data_size, video_files_size_in_mb=0.004)
    episodes = [episode(20 + i, i, task=f"task {i % 2}") for i in range(7)]
    dataset = write(tmp_path / "d", *episodes, layout=layout)
    assert (tmp_path / "d" / "data" / "chunk-001").is_dir()
    assert len({e.data_file for e in dataset.episodes}) > 2
    if videos:
        assert (tmp_path / "d" / "videos" / "observation.images.top" / "chunk-001").is_dir()
        assert any(span.first_frame for e in dataset.episodes for span in e.videos.values())
    columns = dataset.columns(["action", "observation.state", "index", "timestamp", "frame_index"])
    for info, source in zip(dataset.episodes, episodes, strict=True):
        np.testing.assert_array_equal(columns["action"][info.rows], source.actions)
        state = source.observations["observation.state"]
        np.testing.assert_array_equal(columns["observation.state"][info.rows], state[:-1])
        frames = np.stack(list(dataset.decode(info.index, "observation.images.top"))).astype(int)
        expected = source.observations["observation.images.top"][:-1]
        assert frames.shape == expected.shape
        assert np.abs(frames - expected).max() <= (12 if videos else 0)
        assert info.tasks == (source.task,)
    np.testing.assert_array_equal(columns["index"], np.arange(dataset.total_frames))


def test_pictures_in_parquet_can_be_read_in_pieces(tmp_path: Path) -> None:
    sources = [episode(5, 1), episode(6, 2)]
    dataset = write(tmp_path / "d", *sources, layout=Layout(videos=False))
    camera = "observation.images.top"
    assert dataset.features[camera].dtype == "image"
    (row,) = dataset.decode(1, camera, 3, 4)
    np.testing.assert_array_equal(row, sources[1].observations[camera][3])
    dataset.require_videos([camera])
    # Other tools may rewrite the file without one row group per episode.
    path = dataset.episodes[0].data_file
    pq.write_table(pq.read_table(path), path, row_group_size=4)
    np.testing.assert_array_equal(np.stack(list(dataset.decode(1, camera))), sources[1].observations[camera][:6])


def test_broken_pictures_in_parquet_are_named(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", episode(3), layout=Layout(videos=False))
    path, camera = dataset.episodes[0].data_file, "observation.images.top"
    table = pq.read_table(path)
    cells = table[camera].to_pylist()
    depth = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(depth, format="PNG")
    cases = {
        "an image's name but no image": cells[1] | {"bytes": None},
        "cannot be decoded": cells[1] | {"bytes": b"no png"},
        "mode I;16 is not a colour image": cells[1] | {"bytes": depth.getvalue()},
    }
    for match, cell in cases.items():
        broken = pa.array([cells[0], cell, cells[2]], table[camera].type)
        pq.write_table(table.set_column(table.column_names.index(camera), camera, broken), path)
        with pytest.raises(UserError, match=rf"frame 1 of episode 0, {camera}: .*{match}"):
            list(dataset.decode(0, camera))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"cannot be read .*cut off"):
        list(dataset.decode(0, camera))
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        list(dataset.decode(0, camera))


def test_without_an_av1_encoder_videos_are_h264(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "codecs_available", {"libx264"})
    dataset = write(tmp_path / "d", episode(9, 1), episode(8, 2))
    assert dataset.features["observation.images.top"].info["video.codec"] == "h264"
    frames = np.stack(list(dataset.decode(1, "observation.images.top"))).astype(int)
    assert np.abs(frames - episode(8, 2).observations["observation.images.top"][:-1]).max() <= 12


# Values


@pytest.mark.parametrize(
    ("terminated", "truncated", "success"), [(True, False, True), (True, False, False), (False, True, False)]
)
def test_outcome_is_in_the_last_row_only(tmp_path: Path, terminated: bool, truncated: bool, success: bool) -> None:
    source = episode(4, terminated=terminated, truncated=truncated, success=success)
    columns = write(tmp_path / "d", source).columns(["next.done", "next.truncated", "next.success", "next.reward"])
    assert columns["next.done"].tolist() == [False, False, False, True]
    assert columns["next.truncated"].tolist() == [False, False, False, truncated]
    assert columns["next.success"].tolist() == [False, False, False, success]
    np.testing.assert_array_equal(columns["next.reward"], source.rewards, strict=True)


def test_start_state_and_seed_are_in_every_row_of_simulated_episodes_only(tmp_path: Path) -> None:
    simulated = [dataclasses.replace(episode(4), start_id=1_000_000 + i, seed=40) for i in range(2)]
    assert origins(write(tmp_path / "simulated", *simulated)) == [(1_000_000, 40), (1_000_001, 40)]
    assert not {"start_id", "seed"} & write(tmp_path / "robot", episode(4)).features.keys()


def test_columns_are_renamed_and_keep_their_types(tmp_path: Path) -> None:
    observations = {
        "observation/state": np.arange(8.0).reshape(4, 2),
        "gripper": np.arange(4),
        "on": np.ones((4, 1), bool),
        "said": np.array(["go", "", "left", "été"]),
    }
    source = dataclasses.replace(episode(4), observations=observations)
    dataset = write(tmp_path / "d", source, columns={"observation/state": "state", "actions": "actions"})
    columns = dataset.columns(["state", "gripper", "on", "actions", "said"])
    np.testing.assert_array_equal(columns["state"], observations["observation/state"], strict=True)
    np.testing.assert_array_equal(columns["gripper"], observations["gripper"], strict=True)
    np.testing.assert_array_equal(columns["on"], [True] * 4)
    assert columns["said"].tolist() == ["go", "", "left", "été"]
    assert dataset.features["said"].dtype == "string"
    assert dataset.cameras == ()
    assert json.loads((dataset.root / "meta" / "info.json").read_text())["video_path"] is None


def test_statistics_worked_out_by_hand() -> None:
    stats = number_stats(np.array([[0], [1], [2], [5]]))
    assert (stats["min"], stats["max"], stats["mean"], stats["count"], stats["q50"]) == ([0], [5], [2.0], [4], [1.5])
    assert stats["std"] == pytest.approx([np.sqrt(3.5)])
    frames = np.zeros((2, 2, 2, 3), np.uint8)
    frames[1, ..., 0] = 255
    encoded = encode_frames(frames, 2, fps=50, video=False)
    colours = image_stats(encoded.pixels, encoded.sample)
    assert colours["count"] == [2]
    assert colours["max"] == [[[1.0]], [[0.0]], [[0.0]]]
    assert colours["mean"] == [[[0.5]], [[0.0]], [[0.0]]]
    assert colours["std"] == [[[0.5]], [[0.0]], [[0.0]]]
    assert colours["q99"] == [[[1.0]], [[0.0]], [[0.0]]]


# Refused episodes and places


def refuse(path: Path, match: str, *episodes: Episode, **options: Any) -> None:
    """Check that writing fails with one line that matches, and leaves nothing behind."""
    with pytest.raises(UserError, match=match) as caught:
        write(path, *episodes, **options)
    assert "\n" not in str(caught.value)
    assert list(path.parent.iterdir()) == []


def test_bad_episodes_leave_nothing_behind(tmp_path: Path) -> None:
    path, good = tmp_path / "d", episode(4)
    state = {"observation.state": good.observations["observation.state"]}

    def seeing(**observations: np.ndarray) -> Episode:
        return dataclasses.replace(good, observations=observations)

    nan = good.actions.copy()
    nan[2, 3] = np.nan
    unrewarded = episode(4)
    object.__setattr__(unrewarded, "rewards", good.rewards[:3])  # avoids the type check of tests
    refuse(path, "would have no episodes")
    refuse(path, "Episode 1 has no steps", good, episode(0))
    refuse(path, "Episode 1 has NaN or Inf in action", good, dataclasses.replace(good, actions=nan))
    refuse(path, "Episode 0 has no task", dataclasses.replace(good, task=" "))
    narrow = dataclasses.replace(good, actions=good.actions[:, :7])
    refuse(path, r"Episode 1 has float32\[7\] for action, the episodes before it float32\[14\]", good, narrow)
    refuse(path, "Episode 1 has nothing for observation.images.top", good, seeing(**state))
    refuse(path, "Episode 0 has 2 of depth for 4 actions", seeing(depth=np.zeros((2, 3))))
    refuse(path, "Episode 0 has 3 of next.reward for 4 actions", unrewarded)
    refuse(path, "'a/b' cannot be a column", seeing(**{"a/b": np.zeros((4, 3))}))
    refuse(path, "'index' cannot be a column", seeing(index=np.zeros((4, 3))))
    refuse(path, "actions would be a second column 'action'", seeing(action=np.zeros((4, 3))))
    refuse(path, r"depth is float32\[4, 8, 8\]; columns are vectors", seeing(depth=np.zeros((4, 8, 8), np.float32)))
    refuse(path, r"said is <U2\[4, 2\]; columns are", seeing(said=np.full((4, 2), "go")))
    refuse(path, "is 64×63; video needs even sizes", seeing(top=np.zeros((4, 63, 64, 3), np.uint8)))
    refuse(path, "action has 14 dimensions but 2 names", good, names={"action": ["x", "y"]})
    refuse(path, "fps is 0", good, fps=0)
    refuse(path, r"nothing has shape \(0,\) per step", seeing(nothing=np.zeros((4, 0), np.float32)))


def test_layout_of_size_zero_is_refused() -> None:
    with pytest.raises(UserError, match="chunks_size is 0"):
        Layout(chunks_size=0)


def test_existing_folders_are_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already exists; datasets are never overwritten"):
        DatasetWriter(tmp_path, fps=50, robot_type="aloha")


def test_bad_episode_can_be_left_out(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "d", fps=50, robot_type="aloha") as writer:
        with pytest.raises(UserError, match="no steps"):
            writer.add(episode(0, task="never done"))
        writer.add(episode(3))
    assert dict(open_dataset(tmp_path / "d").tasks) == {0: "stack the cubes"}


def test_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Episode]:
        yield episode(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path / "d", interrupted(), fps=50, robot_type="aloha")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("videos", [True, False])
def test_full_disk_leaves_nothing_behind(tmp_path: Path, videos: bool) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 128, 128, 3)).astype(np.uint8)
    source = dataclasses.replace(episode(30), observations={"observation.images.top": noise})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))  # no file can grow beyond this, as on a full disk
    try:
        with pytest.raises(UserError, match=r"cannot be written .*; nothing of it was kept"):
            write_dataset(tmp_path / "d", [source] * 2, fps=50, robot_type="aloha", layout=Layout(videos=videos))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
