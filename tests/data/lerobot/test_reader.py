"""Our reader gives what LeRobot itself read from the same files, and refuses files that are broken."""

import json
import shutil
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.parquet_and_video import decode_video
from pistar.data.lerobot.reader import lerobot_home, open_dataset
from pistar.errors import UserError

from helpers.paths import FIXTURES

LEROBOT = FIXTURES / "lerobot"
GENERATIONS = ("v21", "v30")
CAMERAS = tuple(f"observation.images.cam_{where}" for where in ("high", "left_wrist", "right_wrist"))
Golden = tuple[Dataset, Mapping[str, np.ndarray]]


@pytest.fixture(scope="module", params=GENERATIONS)
def golden(request: pytest.FixtureRequest) -> Golden:
    """A dataset LeRobot wrote, and what LeRobot read from it."""
    with np.load(LEROBOT / f"lerobot_{request.param}_manifest.npz") as archive:
        return open_dataset(LEROBOT / f"lerobot_{request.param}"), dict(archive)


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """Make copies of the goldens, to break."""

    def make(generation: str) -> Path:
        return Path(shutil.copytree(LEROBOT / f"lerobot_{generation}", tmp_path / generation))

    return make


def frame(dataset: Dataset, row: int, camera: str) -> np.ndarray:
    """Decode the frame at a row of the whole dataset, channels first as LeRobot has them."""
    episode = next(e for e in dataset.episodes if e.rows.start <= row < e.rows.stop)
    number = int(row) - episode.from_row
    (picture,) = dataset.decode(episode.index, camera, number, number + 1)
    return picture.transpose(2, 0, 1)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_jsonl(path: Path, line: int, **changes: Any) -> None:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[line] |= changes
    path.write_text("\n".join(json.dumps(entry) for entry in lines))


def edit_column(path: Path, name: str, column: Any) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)


# The same as LeRobot read


def test_whole_columns_equal_lerobots(golden: Golden) -> None:
    dataset, expected = golden
    names = [key.removeprefix("all/") for key in expected if key.startswith("all/")]
    assert len(names) == 10
    columns = dataset.columns(names)
    for name in names:
        assert columns[name].dtype == expected[f"all/{name}"].dtype
        np.testing.assert_array_equal(columns[name], expected[f"all/{name}"], strict=True)


def test_episodes_and_tasks_equal_lerobots(golden: Golden) -> None:
    dataset, expected = golden
    assert [e.from_row for e in dataset.episodes] == expected["episode_from"].tolist()
    assert [e.rows.stop for e in dataset.episodes] == expected["episode_to"].tolist()
    assert [dataset.tasks[i] for i in range(2)] == expected["tasks"].tolist()
    assert dataset.frame_tasks()[expected["indices"]].tolist() == expected["item/task"].tolist()
    assert dataset.frame_tasks()[expected["delta/indices"]].tolist() == expected["delta/task"].tolist()
    assert all(set(dataset.frame_tasks()[e.rows]) == set(e.tasks) for e in dataset.episodes)


def test_description_of_the_dataset(golden: Golden) -> None:
    dataset, expected = golden
    assert dataset.version == str(expected["codebase_version"])
    assert dataset.fps == int(expected["fps"])
    assert (dataset.robot_type, dataset.cameras, dataset.total_frames) == ("aloha", CAMERAS, 850)
    assert dataset.features["action"].shape == (14,)
    assert dataset.features["action"].names[6] == "left_gripper"


@pytest.mark.parametrize("camera", CAMERAS)
def test_frames_equal_lerobots_pixel_for_pixel(golden: Golden, camera: str) -> None:
    dataset, expected = golden
    for row, picture in zip(expected["indices"], expected[f"item/{camera}"], strict=True):
        np.testing.assert_array_equal(frame(dataset, row, camera), picture, strict=True)


@pytest.mark.parametrize("camera", CAMERAS)
def test_frame_pairs_equal_lerobots_up_to_its_padding(golden: Golden, camera: str) -> None:
    dataset, expected = golden
    step = int(expected["H"])  # LeRobot was asked for t and t + H, and repeats the last frame past the end
    compared = 0
    for row, pair, pad in zip(
        expected["delta/indices"], expected[f"delta/{camera}"], expected[f"delta/{camera}_is_pad"], strict=True
    ):
        np.testing.assert_array_equal(frame(dataset, row, camera), pair[0], strict=True)
        if not pad[1]:
            np.testing.assert_array_equal(frame(dataset, row + step, camera), pair[1], strict=True)
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize("name", ["action", "next.reward", "next.done"])
def test_chunks_equal_lerobots_up_to_its_padding(golden: Golden, name: str) -> None:
    dataset, expected = golden
    column = dataset.columns([name])[name]
    pads = expected[f"delta/{name}_is_pad"]
    assert pads.any()
    for row, chunk, pad in zip(expected["delta/indices"], expected[f"delta/{name}"], pads, strict=True):
        real = int((~pad).sum())
        np.testing.assert_array_equal(column[row : row + real], chunk[:real])


def test_reading_in_pieces_gives_the_frames_of_the_whole_episode(golden: Golden) -> None:
    dataset, _ = golden
    whole = list(dataset.decode(8, CAMERAS[1]))
    assert len(whole) == dataset.episodes[8].length == 43
    pieces = [
        *dataset.decode(8, CAMERAS[1], 0, 20),
        *dataset.decode(8, CAMERAS[1], 20, 21),
        *dataset.decode(8, CAMERAS[1], 21),
    ]
    np.testing.assert_array_equal(np.stack(pieces), np.stack(whole))
    assert list(dataset.decode(8, CAMERAS[1], 5, 5)) == []


def test_both_generations_hold_the_same_recording() -> None:
    old, new = (open_dataset(LEROBOT / f"lerobot_{generation}") for generation in GENERATIONS)
    names = [name for name, feature in new.features.items() if not feature.is_camera]
    for name in names:
        np.testing.assert_array_equal(old.columns([name])[name], new.columns([name])[name])


def test_video_offsets_are_rounded_not_floored(copy: Callable[..., Path]) -> None:
    root = copy("v30")
    for path in (root / "meta" / "episodes").rglob("*.parquet"):
        table = pq.read_table(path)
        for name in table.column_names:
            if name.endswith("from_timestamp"):
                hair_below = pa.array(np.nextafter(table[name].to_numpy(), -1))
                table = table.set_column(table.column_names.index(name), name, hair_below)
        pq.write_table(table, path)
    expected = open_dataset(LEROBOT / "lerobot_v30").episodes
    for ours, theirs in zip(open_dataset(root).episodes, expected, strict=True):
        assert [s.first_frame for s in ours.videos.values()] == [s.first_frame for s in theirs.videos.values()]


def test_lists_of_lists_and_variable_lists_become_axes(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"]["action"]["shape"] = [7, 2]
    (root / "meta" / "info.json").write_text(json.dumps(info))
    for path in (root / "data").rglob("*.parquet"):
        actions = pq.read_table(path)["action"].combine_chunks().flatten().to_numpy().reshape(-1, 7, 2)
        edit_column(path, "action", pa.array(actions.tolist(), pa.list_(pa.list_(pa.float32()))))
    expected = open_dataset(LEROBOT / "lerobot_v21").columns(["action"])["action"]
    np.testing.assert_array_equal(open_dataset(root).columns(["action"])["action"], expected.reshape(-1, 7, 2))


# Finding datasets


def test_repository_ids_are_found_in_the_lerobot_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    shutil.copytree(LEROBOT / "lerobot_v21", tmp_path / "someone" / "cubes")
    assert open_dataset("someone/cubes").root == tmp_path / "someone" / "cubes"
    monkeypatch.delenv("HF_LEROBOT_HOME")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    assert lerobot_home() == Path("/somewhere/lerobot")
    monkeypatch.delenv("HF_HOME")
    assert lerobot_home() == Path.home() / ".cache" / "huggingface" / "lerobot"


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any]) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_download_fills_the_lerobot_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    asked: list[Any] = []

    def download(repo_id: str, *, repo_type: str, revision: str | None, local_dir: Path) -> None:
        asked.extend((repo_id, repo_type, revision))
        shutil.copytree(LEROBOT / "lerobot_v30", local_dir)

    fake_hub(monkeypatch, download)
    assert len(open_dataset("someone/cubes", download=True, revision="v3.0").episodes) == 12
    assert asked == ["someone/cubes", "dataset", "v3.0"]


def test_download_without_network_or_package_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host\nand more lines")

    fake_hub(monkeypatch, offline)
    with pytest.raises(UserError, match=r"someone/cubes cannot be downloaded \(no route to host\); check the name"):
        open_dataset("someone/cubes", download=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'pistar-rl\[hub\]'"):
        open_dataset("someone/cubes", download=True)


# Broken datasets


def refuse(root: str | Path, match: str) -> None:
    """Check that opening fails with one line that matches."""
    with pytest.raises(UserError, match=match) as caught:
        open_dataset(root)
    assert "\n" not in str(caught.value)


def test_wrong_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    refuse(tmp_path / "nowhere", "nowhere does not exist; name a folder")
    refuse("someone/cubes", rf"neither someone/cubes nor {tmp_path}/someone/cubes in LeRobot's cache is a folder; ")
    refuse("someone/cubes", r"hf download --repo-type dataset someone/cubes .*download=True")
    refuse(LEROBOT / "lerobot_v30_manifest.npz", "is a file; name a folder")
    refuse(tmp_path, "has no meta/info.json, so it is not a LeRobot dataset; name the folder")
    refuse(LEROBOT, "not a LeRobot dataset; did you mean .*lerobot_v")


def test_other_versions_are_refused(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    edit_json(root / "meta" / "info.json", codebase_version="v2.0")
    refuse(root, "is a LeRobot v2.0 dataset.*convert_dataset_v20_to_v21")
    edit_json(root / "meta" / "info.json", codebase_version="v4.2")
    refuse(root, "codebase_version 'v4.2'; pistar reads v2.1 and v3.0")
    edit_json(root / "meta" / "info.json", codebase_version=None)
    refuse(root, "meta/info.json has no codebase_version; pistar reads")


@pytest.mark.parametrize(
    ("generation", "name"),
    [
        ("v21", "meta/tasks.jsonl"),
        ("v21", "meta/episodes.jsonl"),
        ("v21", "data/chunk-000/episode_000003.parquet"),
        ("v30", "meta/tasks.parquet"),
        ("v30", "data/chunk-001/file-000.parquet"),
    ],
)
def test_missing_and_cut_off_files_are_named(copy: Callable[..., Path], generation: str, name: str) -> None:
    root = copy(generation)
    path = root / name
    path.write_bytes(path.read_bytes()[:-20])
    refuse(root, f"{name} cannot be read .*cut off")
    path.unlink()
    refuse(root, f"{name} is missing; the dataset is incomplete")


def test_files_without_permission_are_not_called_broken(
    copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    root = copy("v30")
    with monkeypatch.context() as patch:
        patch.setattr("pistar.data.lerobot.parquet_and_video.pq.ParquetFile", forbidden)
        refuse(root, "parquet cannot be read: permission denied; ")
    monkeypatch.setattr(Path, "read_text", forbidden)
    refuse(root, "info.json cannot be read: permission denied; ")


def test_missing_episode_list_is_named(copy: Callable[..., Path]) -> None:
    root = copy("v30")
    shutil.rmtree(root / "meta" / "episodes")
    refuse(root, "meta/episodes/chunk-000/file-000.parquet is missing")


def test_malformed_info_is_refused(copy: Callable[..., Path]) -> None:
    root = copy("v30")
    info = root / "meta" / "info.json"
    whole = json.loads(info.read_text())
    del whole["fps"]
    info.write_text(json.dumps(whole))
    refuse(root, "meta does not have LeRobot's v3.0 format .*KeyError: 'fps'")
    info.write_text("[]")
    refuse(root, "holds a list, not an object")
    info.write_text("{")
    refuse(root, "info.json cannot be read")


def test_lists_that_disagree_are_refused(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    info, episodes = root / "meta" / "info.json", root / "meta" / "episodes.jsonl"
    edit_json(info, total_frames=851)
    refuse(root, "says total_frames 851 but meta/ lists 850")
    edit_json(info, total_frames=850, total_episodes=13)
    refuse(root, "says total_episodes 13 but meta/ lists 12")
    edit_json(info, total_episodes=12, fps=0)
    refuse(root, "has fps 0; the frame rate must be positive")
    edit_json(info, fps=50)
    edit_jsonl(episodes, 4, episode_index=40)
    refuse(root, "lists episode 5 where episode 4 should be")
    episodes.write_text("")
    refuse(root, "has no episodes")


def test_episodes_that_overlap_are_refused(copy: Callable[..., Path]) -> None:
    root = copy("v30")
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    rows = pq.read_table(path)["dataset_from_index"].to_pylist()
    edit_column(path, "dataset_from_index", pa.array([rows[0], rows[1] - 1, *rows[2:]]))
    refuse(root, "Episode 1 of .* starts at row 104, not at 105")


def test_empty_episode_is_refused(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    edit_jsonl(root / "meta" / "episodes.jsonl", 2, length=0)
    refuse(root, "Episode 2 of .* has 0 frames; drop it")


def test_rows_that_contradict_meta_are_refused(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    path = root / "data" / "chunk-000" / "episode_000001.parquet"
    whole = pq.read_table(path)
    pq.write_table(whole.slice(0, 40), path)
    refuse(root, "episode_000001.parquet has 40 rows but meta/ lists 46")
    pq.write_table(whole, path)
    edit_column(path, "episode_index", pa.array([1] * 45 + [7]))
    refuse(root, "Row 150 of .* is of episode 7, but meta/ says 1")
    pq.write_table(whole.drop_columns(["timestamp"]), path)
    refuse(root, "lacks column 'timestamp'")


def test_broken_rows_can_be_opened_for_inspection(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    (root / "data" / "chunk-000" / "episode_000001.parquet").unlink()
    assert len(open_dataset(root, check_rows=False).episodes) == 12


def test_mixed_rates_are_refused(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    path = root / "data" / "chunk-000" / "episode_000002.parquet"
    edit_column(path, "timestamp", pa.array(np.arange(54, dtype=np.float32) / 30))
    refuse(root, "Episode 2 of .* runs at 30 fps by its timestamps, the dataset at 50")
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"][CAMERAS[0]]["info"]["video.fps"] = 30
    (root / "meta" / "info.json").write_text(json.dumps(info))
    refuse(root, "cam_high was recorded at 30 fps but the dataset at 50")


def test_video_of_another_rate_is_refused(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    info = json.loads((root / "meta" / "info.json").read_text())
    for camera in CAMERAS:
        del info["features"][camera]["info"]
    (root / "meta" / "info.json").write_text(json.dumps(info | {"fps": 25}))
    with pytest.raises(UserError, match=r"episode_000000.mp4 runs at 50 fps but the dataset at 25"):
        next(open_dataset(root, check_rows=False).decode(0, CAMERAS[0]))


def test_video_shorter_than_its_rows_is_refused_after_its_last_frame(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    videos = root / "videos" / "chunk-000" / CAMERAS[0]
    shutil.copy(videos / "episode_000008.mp4", videos / "episode_000000.mp4")  # 43 frames for 105 rows
    frames = open_dataset(root).decode(0, CAMERAS[0])
    for _ in range(43):
        next(frames)
    with pytest.raises(UserError, match=r"episode_000000.mp4 has no frame 43, but the data has a row for it"):
        next(frames)


def test_episode_past_the_end_of_its_video_is_refused(copy: Callable[..., Path]) -> None:
    root = copy("v30")
    videos = root / "videos" / CAMERAS[0] / "chunk-001"
    shutil.copy(videos / "file-001.mp4", videos / "file-000.mp4")  # 75 frames for 243 rows
    with pytest.raises(UserError, match=r"file-000.mp4 has no frame 177, but the data has a row for it"):
        next(open_dataset(root).decode(10, CAMERAS[0]))


def test_missing_and_broken_videos_are_named(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    path = root / "videos" / "chunk-000" / CAMERAS[1] / "episode_000002.mp4"
    path.write_bytes(path.read_bytes()[:1000])
    dataset = open_dataset(root)
    dataset.require_videos(CAMERAS)
    with pytest.raises(UserError, match=r"episode_000002.mp4 cannot be decoded"):
        next(dataset.decode(2, CAMERAS[1]))
    path.unlink()
    with pytest.raises(UserError, match=r"episode_000002.mp4 is missing"):
        next(dataset.decode(2, CAMERAS[1]))
    dataset.require_videos(CAMERAS[:1])
    with pytest.raises(UserError, match=r"episode_000002.mp4 is missing"):
        dataset.require_videos(CAMERAS)


def test_unknown_names_suggest_the_nearest(golden: Golden) -> None:
    dataset, _ = golden
    with pytest.raises(UserError, match=r"no camera 'cam_hihg'; did you mean 'observation.images.cam_high'\?"):
        dataset.decode(0, "cam_hihg")
    with pytest.raises(UserError, match=r"no camera 'xyz'; there are observation.images.cam_high, "):
        dataset.require_videos(["xyz"])
    with pytest.raises(UserError, match=r"no camera 'action'; it is a column of numbers"):
        dataset.decode(0, "action")
    with pytest.raises(UserError, match=r"no column 'actions'; did you mean 'action'\?"):
        dataset.columns(["actions"])
    with pytest.raises(UserError, match=r"no column .*cam_high'; it is a camera: read its frames with decode"):
        dataset.columns([CAMERAS[0]])
    with pytest.raises(UserError, match=r"Episode 12 does not exist; .* has 0 to 11"):
        dataset.decode(12, CAMERAS[0])
    assert dataset.columns([]) == {}


def test_depth_maps_are_refused(copy: Callable[..., Path]) -> None:
    root = copy("v30")
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"][CAMERAS[0]]["info"]["video.is_depth_map"] = True
    (root / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="cam_high is a depth map"):
        open_dataset(root).decode(0, CAMERAS[0])


def test_uneven_columns_are_refused(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    path = root / "data" / "chunk-000" / "episode_000001.parquet"
    edit_column(path, "action", pa.array([[0.0] * (13 + i % 2) for i in range(46)], pa.list_(pa.float32())))
    with pytest.raises(UserError, match=r"action has vectors of different lengths in .*episode_000001"):
        open_dataset(root).columns(["action"])
    edit_column(path, "action", pa.array([[0.0] * 7] * 46, pa.list_(pa.float32(), 7)))
    with pytest.raises(UserError, match=r"action has shape \(7,\) in .*episode_000001.parquet but \(14,\) before"):
        open_dataset(root).columns(["action"])
    edit_column(path, "action", pa.array([None] + [[0.0] * 14] * 45, pa.list_(pa.float32(), 14)))
    with pytest.raises(UserError, match="action has 1 empty cells"):
        open_dataset(root).columns(["action"])


def test_task_without_text_is_refused(copy: Callable[..., Path]) -> None:
    root = copy("v21")
    tasks = root / "meta" / "tasks.jsonl"
    tasks.write_text(tasks.read_text().splitlines()[0])
    with pytest.raises(UserError, match=r"uses task_index 1 but its task list has only \[0\]"):
        open_dataset(root).frame_tasks()


# Videos of other encoders


def make_video(path: Path, frames: int, **options: str) -> Path:
    """H.264 of grey frames, each a little lighter than the one before."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for i in range(frames):
            grey = np.full((32, 32, 3), 2 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("options", [{"g": "250"}, {"g": "12", "bf": "3"}, {"g": "12", "bf": "3", "flags": "-cgop"}])
def test_any_start_gives_the_same_frames_whatever_the_order_of_decoding(
    tmp_path: Path, options: dict[str, str]
) -> None:
    path = make_video(tmp_path / "v.mp4", 60, **options)
    whole = np.stack(list(decode_video(path, 30.0, 0, 60)))
    assert np.abs(whole.mean(axis=(1, 2, 3)) - 2 * np.arange(60)).max() < 2
    for start in range(60):
        np.testing.assert_array_equal(next(decode_video(path, 30.0, start, 60)), whole[start])


def test_file_without_a_video_stream_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    with pytest.raises(UserError, match=r"sound.mp4 holds no video"):
        next(decode_video(path, 30.0, 0, 1))
