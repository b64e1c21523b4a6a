"""ALOHA files in every variant are converted, and our LeRobot reader reads back what they held."""

import fcntl
import io
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from pistar.data.hdf5 import resume
from pistar.data.hdf5.convert import ConvertedDataset, convert_hdf5
from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.encoding import EncodedFrames, encode_frames
from pistar.data.lerobot.reader import open_dataset
from pistar.data.lerobot.writer import Layout
from pistar.data.success_sources import FromColumn, FromScores, Recording, read_outcomes
from pistar.errors import UserError

CAMERAS = ("cam_high", "cam_left_wrist")
EXACT = Layout(videos=False)
LENGTH = 6
Contents = dict[str, Any]


def waves(length: int, seed: int = 0) -> np.ndarray:
    """Pictures smooth enough for JPEG and video to keep, with three different colours; 24 high, 32 wide."""
    time, row, column = np.meshgrid(np.arange(length), np.arange(24), np.arange(32), indexing="ij")
    colours = [np.sin(k + seed + time / 3 + row / 8) * 60 + 2 * column + 20 * k + 60 for k in range(3)]
    return np.clip(np.stack(colours, -1), 0, 255).astype(np.uint8)


def jpeg(picture: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=95, subsampling=0)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def episode(length: int = LENGTH, seed: int = 0, pictures: int | None = None) -> Contents:
    """What a raw file holds."""
    rng = np.random.default_rng(seed)
    shown = length if pictures is None else pictures
    return {
        "action": rng.normal(size=(length, 14)),  # float64, as ALOHA records
        "observations/qpos": rng.normal(size=(length, 14)),
        **{f"observations/images/{camera}": waves(shown, seed + i) for i, camera in enumerate(CAMERAS)},
    }


def sparse(**changes: Any) -> Contents:
    """Chunks of 4 and 3 of 8 steps, the first after one step without a picture."""
    return episode(8, pictures=2) | {"image_indices": np.array([1, 5]), "chunk_starts": np.array([1, 5])} | changes


def save(path: Path, contents: Contents, **attributes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as root:
        root.attrs.update(attributes)
        for key, values in contents.items():
            if isinstance(values, list):
                stored = root.create_dataset(key, len(values), dtype=h5py.vlen_dtype(np.uint8))
                for i, value in enumerate(values):
                    stored[i] = value
            else:
                root[key] = values
    return path


def packed(contents: Contents, pack: Callable[[list[np.ndarray]], Any]) -> Contents:
    """The same with JPEGs for pictures."""
    return {
        key: pack([jpeg(picture) for picture in values]) if "images/" in key else values
        for key, values in contents.items()
    }


def padded(pictures: list[np.ndarray]) -> np.ndarray:
    size = max(len(picture) for picture in pictures) + 100
    return np.stack([np.pad(picture, (0, size - len(picture))) for picture in pictures])


def fixed_bytes(pictures: list[np.ndarray]) -> np.ndarray:
    return np.array([picture.tobytes() for picture in pictures])


def convert(tmp_path: Path, **options: Any) -> tuple[ConvertedDataset, Dataset]:
    settings: dict[str, Any] = {"fps": 50, "task": "fold the box", "scores": "success", "layout": EXACT}
    done = convert_hdf5(tmp_path / "raw", tmp_path / "out", **(settings | options))
    return done, open_dataset(tmp_path / "out")


def pictures_of(dataset: Dataset, camera: str = CAMERAS[0], index: int = 0) -> np.ndarray:
    return np.stack(list(dataset.decode(index, f"observation.images.{camera}")))


# What is read back


def test_a_raw_episode_comes_back_equal(tmp_path: Path) -> None:
    contents = episode() | {"observations/qvel": np.ones((LENGTH, 14)), "observations/effort": np.zeros((LENGTH, 14))}
    save(tmp_path / "raw" / "episode_0.hdf5", contents, sim=False)
    done, dataset = convert(tmp_path)
    assert done == ConvertedDataset(tmp_path / "out", episodes=1, frames=LENGTH, successes=1, notes=())
    assert (dataset.version, dataset.fps, dataset.robot_type) == ("v3.0", 50, "aloha")
    assert dataset.episodes[0].tasks == ("fold the box",)
    assert dataset.cameras == tuple(f"observation.images.{camera}" for camera in CAMERAS)
    keys = {"action": "action", "observation.state": "observations/qpos", "observation.velocity": "observations/qvel"}
    for name, key in (keys | {"observation.effort": "observations/effort"}).items():
        values = dataset.columns([name])[name]
        np.testing.assert_array_equal(values, contents[key].astype(np.float32), strict=True)
        assert dataset.features[name].names[0] == "left_waist"
        assert dataset.features[name].names[13] == "right_gripper"
    for camera in CAMERAS:
        np.testing.assert_array_equal(pictures_of(dataset, camera), contents[f"observations/images/{camera}"])


def test_video_is_the_default_and_close(tmp_path: Path) -> None:
    contents = {key: np.repeat(np.repeat(v, 4, 1), 4, 2) if v.ndim == 4 else v for key, v in episode().items()}
    save(tmp_path / "raw" / "episode_0.hdf5", contents)
    _, dataset = convert(tmp_path, layout=None)
    assert dataset.features["observation.images.cam_high"].dtype == "video"
    difference = pictures_of(dataset).astype(int) - contents["observations/images/cam_high"].astype(int)
    assert np.abs(difference).mean() < 6


@pytest.mark.parametrize("pack", [list, padded, fixed_bytes])
def test_compressed_pictures_are_decoded_in_their_colours(
    tmp_path: Path, pack: Callable[[list[np.ndarray]], Any]
) -> None:
    save(tmp_path / "raw" / "episode_0.hdf5", packed(episode(), pack), compress=True)
    _, dataset = convert(tmp_path)
    difference = pictures_of(dataset).astype(int) - waves(LENGTH).astype(int)
    assert np.abs(difference).max() <= 12  # quality 95; red and blue differ by far more


def test_jpeg_lengths_of_mobile_aloha_are_no_column_and_no_note(tmp_path: Path) -> None:
    contents = packed(episode(), padded) | {"compress_len": np.ones((2, LENGTH))}
    save(tmp_path / "raw" / "episode_0.hdf5", contents, compress=True)
    assert convert(tmp_path)[0].notes == ()


def test_a_sparse_episode_holds_the_last_picture_and_never_shows_a_later_one(tmp_path: Path) -> None:
    contents = sparse()
    save(tmp_path / "raw" / "episode_0.hdf5", contents)
    done, dataset = convert(tmp_path)
    assert done.notes == ("1 step of 1 episode came before the first image and is left out.",)
    np.testing.assert_array_equal(pictures_of(dataset), waves(2)[[0, 0, 0, 0, 1, 1, 1]])
    columns = dataset.columns(["action", "observation.state", "is_new_image", "is_chunk_start", "next.reward"])
    np.testing.assert_array_equal(columns["action"], contents["action"][1:].astype(np.float32))
    np.testing.assert_array_equal(columns["observation.state"], contents["observations/qpos"][1:].astype(np.float32))
    assert columns["is_new_image"].tolist() == [True, False, False, False, True, False, False]
    assert columns["is_chunk_start"].tolist() == [True, False, False, False, True, False, False]
    assert columns["next.reward"].tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_sparse_and_full_episodes_mix(tmp_path: Path) -> None:
    save(tmp_path / "raw" / "episode_0.hdf5", episode())
    save(tmp_path / "raw" / "episode_1.hdf5", packed(sparse(), list))
    _, dataset = convert(tmp_path)
    columns = dataset.columns(["is_new_image", "is_chunk_start"])
    assert columns["is_new_image"].tolist() == [True] * LENGTH + [True, False, False, False, True, False, False]
    assert columns["is_chunk_start"].tolist() == [False] * LENGTH + [True, False, False, False, True, False, False]


def test_scores_give_the_outcome_and_become_a_column(tmp_path: Path) -> None:
    for given, number in ((5, 0), (1, 10), (1, 9)):
        save(tmp_path / "raw" / f"score_{given}" / f"episode_{number}.hdf5", episode(seed=number))
    done, dataset = convert(tmp_path, scores=FromScores())
    assert (done.episodes, done.successes) == (3, 1)
    names = ["action", "score", "next.success", "next.done", "next.truncated", "next.reward"]
    columns = dataset.columns(names)
    # score_1 first, and episode 9 before 10
    for i, seed in enumerate((9, 10, 0)):
        np.testing.assert_array_equal(
            columns["action"][dataset.episodes[i].rows], episode(seed=seed)["action"].astype(np.float32)
        )
    last = np.arange(LENGTH) == LENGTH - 1
    never = np.zeros(LENGTH, bool)
    assert columns["score"].tolist() == [1] * 2 * LENGTH + [5] * LENGTH
    np.testing.assert_array_equal(columns["next.success"], np.concatenate([never, never, last]))
    np.testing.assert_array_equal(columns["next.reward"], np.concatenate([never, never, last]))
    np.testing.assert_array_equal(columns["next.done"], np.tile(last, 3))
    assert not columns["next.truncated"].any()
    # Low scores are failures. Read as scores, the caller says whether they are failures or timeouts.
    recording = Recording(np.array([LENGTH] * 3), columns)
    assert read_outcomes(FromColumn(), recording).failed.tolist() == [True, True, False]
    assert read_outcomes(FromScores(), recording, "failure").failed.tolist() == [True, True, False]
    assert read_outcomes(FromScores(), recording, "timeout").failed.tolist() == [False, False, False]
    at_least_one = read_outcomes(FromColumn("score", at_least=1.0), recording)
    np.testing.assert_array_equal(at_least_one.reached, np.tile(last, 3))


def test_the_folder_itself_may_be_the_score(tmp_path: Path) -> None:
    save(tmp_path / "score_9" / "score_4" / "episode_0.hdf5", episode())
    options: dict[str, Any] = {"fps": 50, "task": "fold", "layout": EXACT}
    done = convert_hdf5(tmp_path / "score_9" / "score_4", tmp_path / "out", scores=FromScores(at_least=4), **options)
    assert done.successes == 1
    assert open_dataset(done.path).columns(["score"])["score"].tolist() == [4] * LENGTH


def test_a_timeout_is_truncated(tmp_path: Path) -> None:
    save(tmp_path / "raw" / "episode_0.hdf5", episode())
    _, dataset = convert(tmp_path, scores="timeout")
    columns = dataset.columns(["next.truncated", "next.done", "next.success", "next.reward"])
    assert {name: bool(values[-1]) for name, values in columns.items()} == {
        "next.truncated": True,
        "next.done": True,
        "next.success": False,
        "next.reward": False,
    }


@pytest.mark.parametrize("workers", [1, 3, 9])
def test_order_and_progress_do_not_depend_on_which_worker_is_first(tmp_path: Path, workers: int) -> None:
    for i in range(5):
        save(tmp_path / "raw" / f"episode_{i}.hdf5", episode(2 + i, seed=i))
    heard: list[tuple[int, int]] = []
    _, dataset = convert(tmp_path, workers=workers, progress=lambda done, total: heard.append((done, total)))
    assert [info.length for info in dataset.episodes] == [2, 3, 4, 5, 6]
    assert heard == [(i, 5) for i in range(6)]


def test_cameras_are_chosen_by_name_and_depth_is_left_out(tmp_path: Path) -> None:
    contents = episode() | {"observations/images/cam_high_depth": np.zeros((LENGTH, 24, 32), np.uint16)}
    save(tmp_path / "raw" / "episode_0.h5", contents)
    done, dataset = convert(tmp_path)
    assert dataset.cameras == tuple(f"observation.images.{camera}" for camera in CAMERAS)
    assert done.notes == ("/observations/images/cam_high_depth of 1 file has no place in the dataset and is left out.",)
    (tmp_path / "out").rename(tmp_path / "before")
    _, dataset = convert(tmp_path, cameras=("cam_left_wrist",))
    assert dataset.cameras == ("observation.images.cam_left_wrist",)
    (tmp_path / "out").rename(tmp_path / "long_before")
    assert convert(tmp_path, cameras=())[1].cameras == ()


def test_what_only_some_files_have_is_left_out_with_a_note(tmp_path: Path) -> None:
    velocity = {"observations/qvel": np.ones((LENGTH, 14)), "base_action": np.ones((LENGTH, 2))}
    save(tmp_path / "raw" / "episode_0.hdf5", episode())
    save(tmp_path / "raw" / "episode_1.hdf5", episode() | velocity)
    done, dataset = convert(tmp_path)
    assert "observation.velocity" not in dataset.features
    assert done.notes == (
        "/observations/qvel is in only 1 of 2 files and is left out.",
        "/base_action of 1 file has no place in the dataset and is left out.",
    )


# Interrupted and continued

VIDEO = Layout(data_files_size_in_mb=0.01, video_files_size_in_mb=0.004)
"""Several episodes per file."""
KILLED_AFTER = """
import os, pathlib, signal, sys
from pistar.data.hdf5 import resume
from pistar.data.hdf5.convert import convert_hdf5
from pistar.data.lerobot.writer import Layout

def progress(ready, total):
    if ready == 3:
        os.kill(os.getpid(), signal.SIGKILL)

raw, out = map(pathlib.Path, sys.argv[1:])
layout = Layout(data_files_size_in_mb=0.01, video_files_size_in_mb=0.004)
convert_hdf5(raw, out, fps=50, task="fold the box", scores="success", layout=layout, progress=progress)
"""


def recording(folder: Path, episodes: int = 7) -> Path:
    """Make episodes whose image size video supports."""
    for i in range(episodes):
        contents = {key: np.tile(v, (1, 3, 2, 1)) if v.ndim == 4 else v for key, v in episode(8 + i, seed=i).items()}
        save(folder / f"episode_{i}.hdf5", contents)
    return folder


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def interrupt(tmp_path: Path, after: int = 2, **options: Any) -> None:
    """Convert the first episodes of raw/, then be interrupted."""

    def progress(ready: int, total: int) -> None:
        if ready == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path, **({"workers": 1, "progress": progress} | options))
    assert {path.name for path in tmp_path.iterdir()} == {"raw", ".out.converting"}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the lengths of all episodes encoded from now on."""
    lengths: list[int] = []

    def encode(frames: Any, length: int, **options: Any) -> EncodedFrames:
        lengths.append(length)
        return encode_frames(frames, length, **options)

    monkeypatch.setattr(resume, "encode_frames", encode)
    return lengths


def test_a_killed_run_is_continued_and_comes_out_the_same(tmp_path: Path, encoded: list[int]) -> None:
    raw, out = recording(tmp_path / "raw"), tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED_AFTER, str(raw), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    (tmp_path / ".out.converting" / "0.tmp").write_bytes(b"half a file")
    heard: list[tuple[int, int]] = []
    done, _ = convert(tmp_path, layout=VIDEO, progress=lambda *state: heard.append(state))
    assert done.continued >= 3
    assert heard == [(ready, 7) for ready in range(done.continued, 8)]
    # What had been kept was not encoded again, of 7 episodes with 2 cameras each.
    assert len(encoded) <= 2 * (7 - done.continued)
    continued = contents_of(out)
    out.rename(tmp_path / "before")
    done, _ = convert(tmp_path, layout=VIDEO, workers=1)
    assert done.continued == 0
    assert contents_of(out) == continued
    assert {path.name for path in tmp_path.iterdir()} == {"raw", "out", "before"}


@pytest.mark.parametrize(
    "changes",
    [{"fps": 25}, {"layout": EXACT}, {"task": "unfold it"}, {"scores": "timeout"}, {"cameras": CAMERAS[1:]}],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_changed_in_between_hold_for_all_episodes(tmp_path: Path, changes: dict[str, Any]) -> None:
    recording(tmp_path / "raw", 3)
    settings: dict[str, Any] = {"layout": VIDEO} | changes
    convert(tmp_path, **settings)
    expected = contents_of(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "raw" / "before")
    interrupt(tmp_path, layout=VIDEO)
    convert(tmp_path, **settings)
    assert contents_of(tmp_path / "out") == expected


def test_files_changed_in_between_are_done_again(tmp_path: Path, encoded: list[int]) -> None:
    recording(tmp_path / "raw", 4)
    interrupt(tmp_path, after=3)
    save(tmp_path / "raw" / "episode_1.hdf5", episode(5, seed=9) | {"observations/qpos": np.zeros((5, 14))})
    save(tmp_path / "raw" / "episode_0.hdf5", recorded := episode(5, seed=8))
    (tmp_path / "raw" / "episode_2.hdf5").unlink()
    (tmp_path / "raw" / "episode_3.hdf5").unlink()
    encoded.clear()
    done, dataset = convert(tmp_path)
    assert (done.continued, encoded) == (0, [5, 5, 5, 5])
    assert [info.length for info in dataset.episodes] == [5, 5]
    np.testing.assert_array_equal(pictures_of(dataset), recorded["observations/images/cam_high"])


def test_damaged_remains_are_done_again(tmp_path: Path) -> None:
    recording(tmp_path / "raw", 3)
    convert(tmp_path)
    expected = contents_of(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "raw" / "before")
    interrupt(tmp_path, after=3)
    empty, cut, flipped, *_ = sorted((tmp_path / ".out.converting").glob("*.npz"))
    empty.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:-100])
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    done, _ = convert(tmp_path)
    assert done.continued <= 1
    assert contents_of(tmp_path / "out") == expected


def test_a_bad_file_costs_no_finished_work(tmp_path: Path) -> None:
    recording(tmp_path / "raw", 3)
    bad = tmp_path / "raw" / "episode_9.hdf5"
    picture = jpeg(np.zeros((72, 64, 3), np.uint8))
    stored = [picture] * 5 + [picture[:99]]
    save(bad, episode() | {f"observations/images/{camera}": stored for camera in CAMERAS})
    assert refused(tmp_path, workers=1).startswith("Frame 5 of cam_high in raw/episode_9.hdf5: ")
    bad.unlink()
    assert convert(tmp_path)[0].continued == 3


def test_a_full_disk_is_one_line_and_costs_no_finished_work(tmp_path: Path) -> None:
    recording(tmp_path / "raw", 2)
    noise = np.random.default_rng(0).integers(0, 256, (9, 72, 64, 3)).astype(np.uint8)
    save(tmp_path / "raw" / "episode_5.hdf5", episode(9) | {f"observations/images/{c}": noise for c in CAMERAS})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # no file can grow beyond this, as on a full disk
    try:
        message = refused(tmp_path, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.startswith("out cannot be written (")
    assert message.endswith("; solve that and try again: finished episodes are kept.")
    assert convert(tmp_path)[0].continued == 2


def test_two_runs_do_not_write_one_dataset(tmp_path: Path) -> None:
    recording(tmp_path / "raw", 1)
    (tmp_path / ".out.converting").mkdir()
    with (tmp_path / ".out.converting" / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert refused(tmp_path).startswith("out is being written by another run;")
    assert convert(tmp_path)[0].episodes == 1


# What is refused: in one line, and no dataset is left


def refused(tmp_path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as raised:
        convert(tmp_path, **options)
    assert {path.name for path in tmp_path.iterdir()} <= {"raw", ".out.converting"}
    message = str(raised.value).replace(f"{tmp_path}/", "")
    assert "\n" not in message
    return message


def test_a_folder_without_episodes(tmp_path: Path) -> None:
    assert refused(tmp_path).startswith("raw is not a folder;")
    (tmp_path / "raw" / "score_5").mkdir(parents=True)
    (tmp_path / "raw" / "score_5" / "._episode_0.hdf5").touch()  # macOS's companions
    assert refused(tmp_path).startswith("raw and its subfolders hold no *.hdf5 files;")


@pytest.mark.parametrize("folder", ["unrated", "score_high", "."])
def test_a_folder_without_a_score(tmp_path: Path, folder: str) -> None:
    save(tmp_path / "raw" / "score_5" / "episode_0.hdf5", episode())
    save(tmp_path / "raw" / folder / "episode_1.hdf5", episode())
    where = "raw" if folder == "." else f"raw/{folder}"
    message = refused(tmp_path, scores=FromScores())
    assert message.startswith(f"{where} has no score in its name;")
    assert "--without-scores success" in message


FIRST = "raw/episode_0.hdf5"


def without(key: str) -> Contents:
    return {name: values for name, values in episode().items() if not name.startswith(key)}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (without("action"), f"{FIRST} has no /action; it has observations/images/cam_high, "),
        (without("observations/qpos"), f"{FIRST} has no /observations/qpos; it has action, "),
        (without("observations/images"), f"{FIRST} has no /observations/images; "),
        (episode(pictures=5), f"{FIRST} has 5 images of cam_high for 6 actions; "),
        (episode() | {"observations/qpos": np.zeros((5, 14))}, f"{FIRST} has 5 of /observations/qpos for 6 actions; "),
        (episode() | {"action": np.zeros(6)}, f"{FIRST} has float64[6] for /action; "),
        (episode(0), f"{FIRST} has no steps: "),
        (
            episode() | {"observations/qpos": np.where(np.arange(6)[:, None] == 4, np.nan, np.zeros((6, 14)))},
            f"{FIRST} has NaN or Inf in /observations/qpos at step 4; ",
        ),
        (
            episode() | {"observations/images/cam_high": np.zeros((6, 24, 32, 3))},
            f"{FIRST} has float64[6, 24, 32, 3] for cam_high; ",
        ),
        (
            episode() | {"observations/images/cam_high": np.zeros((6, 24, 32), np.uint16)},
            f"{FIRST} has uint16[6, 24, 32] for cam_high, not images; ",
        ),
        (sparse(image_indices=np.array([1, 5, 6])), f"{FIRST} has 2 images of cam_high for 3 /image_indices; "),
        (sparse(image_indices=np.array([5, 1])), f"{FIRST} has /image_indices [5, 1]; "),
        (sparse(image_indices=np.zeros(0, int)), f"{FIRST} has /image_indices []; "),
        (sparse(image_indices=np.array([0, 8])), f"{FIRST} has 8 in /image_indices; the episode's steps are 0 to 7."),
        (sparse(image_indices=np.array([0.0, 5.0])), f"{FIRST} has float64[2] for /image_indices; "),
        (sparse(chunk_starts=np.array([-1])), f"{FIRST} has -1 in /chunk_starts; the episode's steps are 0 to 7."),
    ],
)
def test_a_file_that_is_not_a_complete_episode(tmp_path: Path, contents: Contents, message: str) -> None:
    save(tmp_path / FIRST, contents)
    assert refused(tmp_path).startswith(message)


@pytest.mark.parametrize("frame", [0, 4])
@pytest.mark.parametrize("keep", [0, 300])
def test_a_picture_that_cannot_be_decoded_is_named(tmp_path: Path, frame: int, keep: int) -> None:
    def cut(pictures: list[np.ndarray]) -> list[np.ndarray]:
        return [picture[:keep] if i == frame else picture for i, picture in enumerate(pictures)]

    save(tmp_path / "raw" / "episode_0.hdf5", episode())
    save(tmp_path / "raw" / "episode_1.hdf5", packed(episode(), cut))
    message = refused(tmp_path, workers=1)
    assert message.startswith(f"Frame {frame} of cam_high in raw/episode_1.hdf5: the image cannot be decoded")


def test_pictures_of_changing_size(tmp_path: Path) -> None:
    def grow(pictures: list[np.ndarray]) -> list[np.ndarray]:
        return [*pictures[:-1], jpeg(np.zeros((48, 64, 3), np.uint8))]

    save(tmp_path / FIRST, packed(episode(), grow))
    message = refused(tmp_path, workers=1)
    assert message.startswith(f"{FIRST} has images of cam_high that are (48, 64) in frame 5 and (24, 32) ")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"observations/images/cam_low": waves(LENGTH)},
            "(24, 32, 3) for observation.images.cam_low, raw/episode_0.hdf5 has nothing",
        ),
        (
            {"observations/images/cam_high": waves(LENGTH)[:, :20]},
            "(20, 32, 3) for observation.images.cam_high, raw/episode_0.hdf5 has (24, 32, 3)",
        ),
        ({"action": np.zeros((LENGTH, 16))}, "(16,) for action, raw/episode_0.hdf5 has (14,)"),
        ({"observations/qpos": np.zeros((LENGTH, 7))}, "(7,) for observation.state, raw/episode_0.hdf5 has (14,)"),
    ],
)
def test_episodes_of_two_robots(tmp_path: Path, changes: Contents, what: str) -> None:
    save(tmp_path / FIRST, episode())
    save(tmp_path / "raw" / "episode_1.hdf5", episode() | changes)
    assert refused(tmp_path).startswith(f"raw/episode_1.hdf5 has {what}; ")


def test_a_camera_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path / FIRST, episode())
    message = refused(tmp_path, cameras=("cam_top",))
    assert message == f"{FIRST} has no camera 'cam_top'; it has cam_high, cam_left_wrist."


def test_a_file_that_is_cut_off_or_none(tmp_path: Path) -> None:
    save(tmp_path / FIRST, episode())
    whole = (tmp_path / FIRST).read_bytes()
    for content in (whole[: len(whole) // 2], b"not HDF5"):
        (tmp_path / FIRST).write_bytes(content)
        assert refused(tmp_path).startswith(f"{FIRST} cannot be read (")


def test_no_workers(tmp_path: Path) -> None:
    assert refused(tmp_path, workers=0).startswith("workers is 0;")


def test_an_empty_task_is_refused_before_any_work(tmp_path: Path, encoded: list[int]) -> None:
    save(tmp_path / FIRST, episode())
    assert refused(tmp_path, task=" ").startswith("task is empty;")
    assert encoded == []
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_a_dataset_is_never_written_among_its_recordings(tmp_path: Path) -> None:
    save(tmp_path / FIRST, episode())
    for out in (tmp_path / "raw", tmp_path / "raw" / "out"):
        with pytest.raises(UserError, match=r"is inside .*choose a place outside"):
            convert_hdf5(tmp_path / "raw", out, fps=50, task="fold", scores="success")
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["episode_0.hdf5"]


def test_an_existing_dataset_is_not_touched(tmp_path: Path) -> None:
    save(tmp_path / FIRST, episode())
    convert(tmp_path)
    with pytest.raises(UserError, match="already exists"):
        convert(tmp_path)
    open_dataset(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"raw", "out"}


def test_without_h5py_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / FIRST, episode())
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert refused(tmp_path) == f"{FIRST} cannot be read without h5py; pip install 'pistar-rl[hdf5]'."
