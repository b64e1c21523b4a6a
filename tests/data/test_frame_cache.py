"""The frame cache: the pixels that decoding gives, decoded once, in files that are complete or absent."""

import errno
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pistar.data import frame_cache_file
from pistar.data.frame_cache import Frames, default_cache_dir, open_frames
from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.reader import open_dataset
from pistar.data.transforms import resize_with_pad
from pistar.errors import UserError
from pistar.telemetry.progress import progress_bar

from helpers.paths import FIXTURES

LEROBOT = FIXTURES / "lerobot"
CAMERAS = tuple(f"observation.images.cam_{where}" for where in ("high", "left_wrist", "right_wrist"))
HIGH = CAMERAS[0]
SOURCE = Path(frame_cache_file.__file__).parents[2]
Golden = tuple[Dataset, Mapping[str, np.ndarray]]

OPEN = (
    "import sys; from pistar.data.lerobot.reader import open_dataset; from pistar.data.frame_cache import open_frames; "
)
"""The start of a program that runs in its own process."""

STUCK = """
import os, pathlib, signal, time
from pistar.data.lerobot.dataset import Dataset
decode = Dataset.decode
def stuck(dataset, episode, camera):
    if episode == 6:
        time.sleep(600)
    return decode(dataset, episode, camera)
Dataset.decode = stuck
def six_are_done(folder):
    return any(path.read_bytes() == bytes([1] * 6) for path in pathlib.Path(folder).glob("*.done"))
"""
"""For programs that decode six episodes and then hang."""


@pytest.fixture(scope="module", params=("v21", "v30"))
def golden(request: pytest.FixtureRequest) -> Golden:
    """A dataset LeRobot wrote, and what LeRobot read from it."""
    with np.load(LEROBOT / f"lerobot_{request.param}_manifest.npz") as archive:
        return open_dataset(LEROBOT / f"lerobot_{request.param}"), dict(archive)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return open_dataset(LEROBOT / "lerobot_v30")


@pytest.fixture(scope="module")
def decoded(dataset: Dataset) -> np.ndarray:
    """All frames of one camera, in order."""
    return np.stack([frame for e in dataset.episodes for frame in dataset.decode(e.index, HIGH)])


def rows_of(dataset: Dataset) -> np.ndarray:
    return np.arange(dataset.total_frames)


def names(folder: Path) -> list[str]:
    """List the suffixes of the folder's files."""
    return sorted(path.suffix for path in folder.iterdir())


def start(program: str, *args: Any, **options: Any) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", OPEN + program, *map(str, args)]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **options)


class Calls:
    """Replaces Dataset.decode; records the calls, and may wait or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.episodes: list[int] = []
        self.fail_at: int | None = None
        self.wait_at: int | None = None
        self.go_on = threading.Event()
        decode = Dataset.decode

        def counted(dataset: Dataset, episode: int, camera: str) -> Iterator[np.ndarray]:
            self.episodes.append(episode)
            if episode == self.wait_at:
                self.go_on.wait(60)
            for number, frame in enumerate(decode(dataset, episode, camera)):
                if episode == self.fail_at and number == 5:
                    raise UserError("the video is short")
                yield frame

        monkeypatch.setattr(Dataset, "decode", counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


# The pixels


@pytest.mark.parametrize("size", [128, 224])
def test_frames_equal_lerobots_after_the_models_resize(golden: Golden, size: int, tmp_path: Path) -> None:
    dataset, expected = golden
    frames = open_frames(dataset, CAMERAS, size, tmp_path)
    assert (frames.cameras, len(frames)) == (CAMERAS, 850)
    step = int(expected["H"])
    for camera in CAMERAS:
        pictures = [expected[f"item/{camera}"], expected[f"delta/{camera}"][:, 0]]
        rows = [expected["indices"], expected["delta/indices"]]
        inside = ~expected[f"delta/{camera}_is_pad"][:, 1]
        pictures.append(expected[f"delta/{camera}"][inside, 1])
        rows.append(expected["delta/indices"][inside] + step)
        wanted = np.concatenate(pictures).transpose(0, 2, 3, 1)
        assert wanted.shape[1:] == (128, 128, 3)
        got = frames.gather(camera, np.concatenate(rows))
        np.testing.assert_array_equal(got, resize_with_pad(wanted, size, size), strict=True)


def test_every_frame_of_every_episode_is_at_its_row(dataset: Dataset, decoded: np.ndarray, tmp_path: Path) -> None:
    frames = open_frames(dataset, [HIGH], 128, tmp_path)
    np.testing.assert_array_equal(frames.gather(HIGH, rows_of(dataset)), decoded, strict=True)


def test_images_in_the_data_files_are_cached_too(tmp_path: Path) -> None:
    root = shutil.copytree(LEROBOT / "lerobot_v21", tmp_path / "data")
    pictures: list[np.ndarray] = []
    for number, path in enumerate(sorted(root.glob("data/*/*.parquet"))):
        table = pq.read_table(path)
        episode = np.random.default_rng(number).integers(0, 256, (len(table), 6, 9, 3), dtype=np.uint8)
        pictures.extend(episode)
        table = table.append_column("front", pa.array([{"bytes": png(picture)} for picture in episode]))
        pq.write_table(table, path)
    info = root / "meta" / "info.json"
    info.write_text(
        info.read_text().replace('"features": {', '"features": {"front": {"dtype": "image", "shape": [6, 9, 3]},', 1)
    )
    frames = open_frames(open_dataset(root), ["front"], 12, tmp_path / "cache")
    expected = resize_with_pad(np.stack(pictures), 12, 12)
    np.testing.assert_array_equal(frames.gather("front", np.arange(850)), expected, strict=True)
    dataset = open_dataset(root)
    path = dataset.episodes[3].data_file
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name} is missing"):
        open_frames(dataset, ["front"], 12, tmp_path / "cache")
    path.mkdir()
    with pytest.raises(UserError, match=rf"{path.name} cannot be read"):
        open_frames(dataset, ["front"], 12, tmp_path / "cache")


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png")
    return file.getvalue()


# Gathering


def test_gather_repeats_and_reorders_rows_into_an_array_of_the_callers(
    dataset: Dataset, decoded: np.ndarray, tmp_path: Path
) -> None:
    frames = open_frames(dataset, [HIGH], 128, tmp_path)
    out = np.zeros((4, 128, 128, 3), np.uint8)
    rows = np.array([849, 0, 0, 300])
    assert frames.gather(HIGH, rows, out) is out
    np.testing.assert_array_equal(out, decoded[rows])
    assert frames.gather(HIGH, rows[:0]).shape == (0, 128, 128, 3)


def test_rows_outside_and_unknown_cameras_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    frames = open_frames(dataset, [HIGH], 16, tmp_path)
    for row in (-1, 850):
        with pytest.raises(IndexError, match=rf"rows {row} to {row} of 850"):
            frames.gather(HIGH, np.array([row]))
    with pytest.raises(UserError, match="'wrist' is not among the cached cameras"):
        frames.gather("wrist", np.array([0]))


def test_frames_pickle_as_file_names(dataset: Dataset, tmp_path: Path) -> None:
    frames = open_frames(dataset, [HIGH], 16, tmp_path)
    pickled = pickle.dumps(frames)
    assert len(pickled) < 1000
    again: Frames = pickle.loads(pickled)
    rows = rows_of(dataset)
    np.testing.assert_array_equal(again.gather(HIGH, rows), frames.gather(HIGH, rows))


# Decoding once


def test_second_opening_decodes_nothing(dataset: Dataset, tmp_path: Path, calls: Calls) -> None:
    reports: list[tuple[int, int]] = []
    open_frames(dataset, CAMERAS[:2], 16, tmp_path, progress=lambda *report: reports.append(report))
    assert sorted(calls.episodes) == sorted([*range(12), *range(12)])
    assert reports[-1] == (1700, 1700)
    assert reports == sorted(reports)
    calls.episodes.clear()
    reports.clear()
    open_frames(dataset, CAMERAS[:2], 16, tmp_path, progress=lambda *report: reports.append(report))
    assert (calls.episodes, reports) == ([], [])
    open_frames(dataset, CAMERAS, 16, tmp_path)
    assert sorted(calls.episodes) == [*range(12)]


def test_a_copy_elsewhere_finds_its_frames(dataset: Dataset, tmp_path: Path, calls: Calls) -> None:
    open_frames(dataset, [HIGH], 16, tmp_path / "cache")
    copy = Path(shutil.copytree(dataset.root, tmp_path / "renamed", copy_function=shutil.copyfile))
    calls.episodes.clear()
    open_frames(open_dataset(copy), [HIGH], 16, tmp_path / "cache")
    assert calls.episodes == []


def test_another_size_camera_or_version_of_the_pixels_is_another_cache(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_frames(dataset, [HIGH], 16, tmp_path)
    open_frames(dataset, [HIGH], 17, tmp_path)
    open_frames(dataset, [CAMERAS[1]], 16, tmp_path)
    monkeypatch.setattr(frame_cache_file, "PIXELS_VERSION", 2)
    open_frames(dataset, [HIGH], 16, tmp_path)
    assert names(tmp_path).count(".npy") == 4


@pytest.mark.parametrize("generation", ["v21", "v30"])
def test_another_video_in_the_dataset_is_another_cache(generation: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(LEROBOT / f"lerobot_{generation}", tmp_path / "data"))
    before = open_frames(open_dataset(root), [HIGH], 16, tmp_path / "cache").gather(HIGH, np.arange(850))
    videos = {camera: sorted(root.glob(f"videos/**/{camera}/**/*.mp4")) for camera in CAMERAS}
    for mine, other in zip(videos[HIGH][:1], videos[CAMERAS[1]][:1], strict=True):
        shutil.copyfile(other, mine)
    after = open_frames(open_dataset(root), [HIGH], 16, tmp_path / "cache").gather(HIGH, np.arange(850))
    assert (before != after).any()


def test_fingerprint_sees_every_byte_of_small_files_and_the_ends_of_large_ones(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for length in (1, 40, 41, 60, 64 * 3):
        content = bytearray(length)
        seen = set()
        for at in [None, *range(length)]:
            if at is not None:
                content[at] = 1
            path.write_bytes(content)
            seen.add(frame_cache_file._fingerprint(path, 64))
            if at is not None:
                content[at] = 0
        assert len(seen) == length + 1
    path.write_bytes(bytes(1000))
    large = frame_cache_file._fingerprint(path, 64)
    for at in (0, 500, 999):
        path.write_bytes(bytes(at) + b"x" + bytes(999 - at))
        assert frame_cache_file._fingerprint(path, 64) != large
    path.write_bytes(bytes(1001))
    assert frame_cache_file._fingerprint(path, 64) != large


# Interrupted


def test_a_killed_process_leaves_work_that_the_next_one_continues(
    dataset: Dataset, decoded: np.ndarray, tmp_path: Path, calls: Calls
) -> None:
    program = """
def progress(done, total):
    if six_are_done(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
open_frames(open_dataset(sys.argv[1]), [sys.argv[2]], 128, sys.argv[3], progress=progress, workers=1)
"""
    killed = start(STUCK + program, dataset.root, HIGH, tmp_path)
    assert killed.wait(120) == -signal.SIGKILL, killed.communicate()
    killed.communicate()
    assert ".npy" not in names(tmp_path)
    assert ".partial" in names(tmp_path)
    frames = open_frames(dataset, [HIGH], 128, tmp_path)
    assert sorted(calls.episodes) == [*range(6, 12)]
    np.testing.assert_array_equal(frames.gather(HIGH, rows_of(dataset)), decoded, strict=True)
    assert names(tmp_path) == [".lock", ".npy"]


def test_a_keyboard_interrupt_keeps_finished_episodes(dataset: Dataset, tmp_path: Path, calls: Calls) -> None:
    calls.wait_at = 6

    def press(done: int, total: int) -> None:
        if any(path.read_bytes() == b"\1" * 6 for path in tmp_path.glob("*.done")):
            calls.go_on.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_frames(dataset, [HIGH], 128, tmp_path, progress=press, workers=1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("frames")]
    assert names(tmp_path) == [".done", ".lock", ".partial"]
    calls.episodes.clear()
    open_frames(dataset, [HIGH], 128, tmp_path)
    assert sorted(calls.episodes) == [*range(6, 12)]


def test_markers_of_an_earlier_file_do_not_count_for_a_new_one(dataset: Dataset, tmp_path: Path, calls: Calls) -> None:
    open_frames(dataset, [HIGH], 16, tmp_path)
    (whole,) = tmp_path.glob("*.npy")
    whole.with_suffix(".done").write_bytes(b"\1" * 12)
    whole.unlink()
    calls.episodes.clear()
    open_frames(dataset, [HIGH], 16, tmp_path)
    assert len(calls.episodes) == 12


def test_a_cut_off_cache_is_made_again(dataset: Dataset, tmp_path: Path) -> None:
    expected = open_frames(dataset, [HIGH], 16, tmp_path).gather(HIGH, rows_of(dataset))
    (whole,) = tmp_path.glob("*.npy")
    for content in (b"", whole.read_bytes()[:-1]):
        whole.unlink()
        whole.write_bytes(content)
        np.testing.assert_array_equal(
            open_frames(dataset, [HIGH], 16, tmp_path).gather(HIGH, rows_of(dataset)), expected
        )


# Several processes


def test_two_processes_at_once_make_one_cache(dataset: Dataset, decoded: np.ndarray, tmp_path: Path) -> None:
    program = """
from pistar.data.lerobot.dataset import Dataset
decode = Dataset.decode
def logged(dataset, episode, camera):
    with open(sys.argv[4], "a") as log:
        print(camera, episode, file=log)
    return decode(dataset, episode, camera)
Dataset.decode = logged
input()
open_frames(open_dataset(sys.argv[1]), [sys.argv[2]], 128, sys.argv[3])
"""
    log = tmp_path / "log"
    both = [start(program, dataset.root, HIGH, tmp_path / "cache", log, stdin=subprocess.PIPE) for _ in range(2)]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert sorted(log.read_text().splitlines()) == sorted(f"{HIGH} {i}" for i in range(12))
    assert names(tmp_path / "cache") == [".lock", ".npy"]
    frames = open_frames(dataset, [HIGH], 128, tmp_path / "cache")
    np.testing.assert_array_equal(frames.gather(HIGH, rows_of(dataset)), decoded, strict=True)


def test_a_waiting_process_reports_the_progress_and_takes_over_if_the_other_dies(
    dataset: Dataset, tmp_path: Path, calls: Calls
) -> None:
    program = """
def progress(done, total):
    if six_are_done(sys.argv[3]):
        print(flush=True)
        time.sleep(600)
open_frames(open_dataset(sys.argv[1]), [sys.argv[2]], 64, sys.argv[3], progress=progress, workers=1)
"""
    other = start(STUCK + program, dataset.root, HIGH, tmp_path, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 2:
            other.kill()

    open_frames(dataset, [HIGH], 64, tmp_path, progress=progress)
    other.communicate()
    finished = sum(episode.length for episode in dataset.episodes[:6])
    assert (seen[0], seen[1], seen[-1]) == (finished, finished, 850)
    assert sorted(calls.episodes) == [*range(6, 12)]
    assert names(tmp_path) == [".lock", ".npy"]


# Disk and video errors


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    pwritev, written = os.pwritev, []

    def full(file: int, content: Any, place: int) -> int:
        written.append(len(content))
        if len(written) > 100:
            raise OSError(code, os.strerror(code))
        return pwritev(file, content, place)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(UserError, match=r"^The frame cache \S+ is full: \S+cam_high needs 0.0 GB there .*; free some"):
        open_frames(dataset, [HIGH], 64, tmp_path)
    assert names(tmp_path) == [".lock"]
    monkeypatch.undo()
    assert len(open_frames(dataset, [HIGH], 64, tmp_path)) == 850


def test_a_quota_on_file_length_is_one_clear_error_and_leaves_nothing(dataset: Dataset, tmp_path: Path) -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
open_frames(open_dataset(sys.argv[1]), [sys.argv[2]], 64, sys.argv[3])
"""
    process = start(program, dataset.root, HIGH, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert errors.splitlines()[-1].startswith(f"pistar.errors.UserError: The frame cache {tmp_path} is full")
    assert names(tmp_path) == [".lock"]


@pytest.mark.parametrize(("code", "works"), [(errno.EOPNOTSUPP, True), (errno.ENOSPC, False)])
def test_file_systems_that_cannot_reserve_space_work_but_full_ones_do_not(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, works: bool
) -> None:
    def refuse(file: int, place: int, count: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    if works:
        assert len(open_frames(dataset, [HIGH], 16, tmp_path)) == 850
    else:
        with pytest.raises(UserError, match="is full"):
            open_frames(dataset, [HIGH], 16, tmp_path)
        assert names(tmp_path) == [".lock"]


def test_a_cache_without_read_permission_is_one_clear_error(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mmap_mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    open_frames(dataset, [HIGH], 16, tmp_path)
    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(UserError, match=r"cannot be used \(Permission denied\); choose another folder"):
        open_frames(dataset, [HIGH], 16, tmp_path)


def test_short_writes_are_completed(
    dataset: Dataset, decoded: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev

    def short(file: int, content: Any, place: int) -> int:
        """Write a part of what was asked for."""
        return pwritev(
            file, [content[0][:40_000], *(more[:50_000] for more in content[1:2] if len(content[0]) < 40_000)], place
        )

    monkeypatch.setattr(os, "pwritev", short)
    frames = open_frames(dataset, [HIGH], 128, tmp_path)
    np.testing.assert_array_equal(frames.gather(HIGH, rows_of(dataset)), decoded)


def test_too_little_space_is_refused_before_decoding(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    usage = shutil.disk_usage(tmp_path)
    needed = 2 * 850 * 128 * 128 * 3
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"need 0\.1 GB but \S+ has 0\.1 GB free; .*\$PISTAR_CACHE"):
        open_frames(dataset, CAMERAS[:2], 128, tmp_path / "not" / "there")
    assert (calls.episodes, list(tmp_path.iterdir())) == ([], [])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    open_frames(dataset, CAMERAS[:2], 128, tmp_path / "not" / "there")


def test_space_of_unfinished_work_is_not_counted_twice(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_frames(dataset, [HIGH], 128, tmp_path, progress=press)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert len(open_frames(dataset, [HIGH], 128, tmp_path)) == 850


def test_a_short_video_is_its_own_error_and_leaves_nothing(tmp_path: Path) -> None:
    root = Path(shutil.copytree(LEROBOT / "lerobot_v21", tmp_path / "data"))
    videos = sorted(root.glob(f"videos/*/{HIGH}/*.mp4"))
    shutil.copyfile(videos[1], videos[0])  # 46 frames in the place of 105
    with pytest.raises(UserError, match=r"episode_000000.mp4 has no frame 46, but the data has a row for it"):
        open_frames(open_dataset(root), CAMERAS, 128, tmp_path / "cache")
    assert names(tmp_path / "cache") == [".lock"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("frames")]


def test_cameras_before_a_broken_one_stay(dataset: Dataset, tmp_path: Path, calls: Calls) -> None:
    open_frames(dataset, [HIGH], 16, tmp_path)
    calls.fail_at = 7
    with pytest.raises(UserError, match="the video is short"):
        open_frames(dataset, CAMERAS, 16, tmp_path)
    assert names(tmp_path) == [".lock", ".lock", ".npy"]


def test_fewer_frames_than_rows_are_refused(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Dataset.decode
    monkeypatch.setattr(Dataset, "decode", lambda self, episode, camera: decode(self, episode, camera, stop=40))
    with pytest.raises(UserError, match=r"Episode \d+ of \S+ has 40 frames of \S+cam_high for \d+ rows; copy"):
        open_frames(dataset, [HIGH], 16, tmp_path)
    assert names(tmp_path) == [".lock"]


def test_missing_video_unknown_camera_and_impossible_numbers_are_refused_at_once(tmp_path: Path) -> None:
    root = Path(shutil.copytree(LEROBOT / "lerobot_v30", tmp_path / "data"))
    dataset = open_dataset(root)
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match=r"no camera 'cam_hi'"):
        open_frames(dataset, ["cam_hi"], 16, cache)
    with pytest.raises(UserError, match=r"The image size is 0"):
        open_frames(dataset, [HIGH], 0, cache)
    with pytest.raises(UserError, match=r"workers is 0"):
        open_frames(dataset, [HIGH], 16, cache, workers=0)
    video = next(root.glob(f"videos/{HIGH}/*/*.mp4"))
    video.unlink()
    with pytest.raises(UserError, match=rf"{video.name} is missing"):
        open_frames(dataset, [HIGH], 16, cache)
    assert not cache.exists()


def test_a_folder_that_cannot_be_made_is_one_clear_error(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^The frame cache \S+ cannot be used \(\w.*\); choose another folder"):
        open_frames(dataset, [HIGH], 16, tmp_path / "file" / "cache")


# Memory, folder and progress bar


def test_memory_stays_bounded(dataset: Dataset, tmp_path: Path) -> None:
    program = """
import resource
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dataset = open_dataset(sys.argv[1])
open_frames(dataset, [sys.argv[2]], 16, sys.argv[3])
before = peak()
open_frames(dataset, [sys.argv[2]], 448, sys.argv[3])  # 512 MB
assert peak() - before < 100_000, peak() - before
"""
    process = start(program, dataset.root, HIGH, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def test_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PISTAR_CACHE", "/big")
    assert default_cache_dir() == Path("/big/frames")
    monkeypatch.delenv("PISTAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/pistar/frames")


def test_bar_appears_only_when_there_is_something_to_decode(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar() as bar:
        open_frames(dataset, [HIGH], 16, tmp_path, progress=bar)
    assert "850/850" in capsys.readouterr().out
    with progress_bar() as bar:
        open_frames(dataset, [HIGH], 16, tmp_path, progress=bar)
    assert capsys.readouterr().out == ""
