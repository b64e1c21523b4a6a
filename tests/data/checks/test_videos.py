"""Every defect of a video, and with decoding of a frame, is found in its episode, and nothing else."""

from pathlib import Path

import av
import numpy as np
import pytest

from pistar.data.checks.check import check_dataset
from pistar.data.lerobot.reader import open_dataset
from pistar.data.lerobot.writer import Layout, write_dataset
from pistar.types import Episode

from helpers.broken_datasets import (
    HIGH,
    Copy,
    both,
    edit,
    edit_episodes_table,
    edit_json,
    messages,
    only,
    replace_video,
    scenery,
    video,
)

# Video files


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
    # LeRobot 0.3.3 wrote the index last, so that the whole file is lost; 0.4.4 wrote it first, and half is left.
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
def test_a_video_of_another_rate_is_found(copy: Copy, generation: str) -> None:
    root = copy(generation)
    replace_video(video(root, 3), scenery(300), rate=30)
    assert "runs at 30 fps but the dataset at 50" in only(check_dataset(root), "video")[3]


def test_a_file_without_video_is_found(copy: Copy) -> None:
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


def test_two_episodes_that_claim_the_same_frames_are_found(copy: Copy) -> None:
    root = copy("v30")
    edit_episodes_table(root, 1, f"videos/{HIGH}/from_timestamp", 90 / 50)
    assert only(check_dataset(root), "video").keys() == {0, 1}


@both
def test_an_image_size_unlike_the_others_breaks_the_episode(copy: Copy, generation: str) -> None:
    root = copy(generation)
    replace_video(video(root, 3), scenery(300, size=64))
    found = messages(check_dataset(root), "dimensions")
    assert found[3] == f"{HIGH} is 64×64, in most episodes 128×128"


def test_a_size_that_only_info_json_has_wrong_is_a_warning(copy: Copy) -> None:
    root = copy("v30")
    edit_json(root / "meta" / "info.json", lambda info: info["features"][HIGH].update(shape=[3, 480, 640]))
    assert only(check_dataset(root), "dimensions", "warning").keys() == {None}


@pytest.mark.parametrize("shape", [[128, 128, 3], [3, 128, 128]])
def test_either_order_of_image_axes_is_accepted(copy: Copy, shape: list[int]) -> None:
    root = copy("v21")
    edit_json(root / "meta" / "info.json", lambda info: info["features"][HIGH].update(shape=shape))
    assert check_dataset(root).findings == ()


# Frames


@both
def test_frames_that_cannot_be_decoded_are_found_by_decoding(copy: Copy, generation: str) -> None:
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


def test_a_frozen_camera_while_the_robot_moves_is_found_by_decoding(copy: Copy) -> None:
    root = copy("v21")
    frozen(root, 0, 20, 90)
    assert check_dataset(root).findings == ()
    found = only(check_dataset(root, frames=True), "duplicate")
    assert found == {0: f"{HIGH} shows one image in frames 20 to 89 while the robot moves"}


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


def test_black_frames_are_found_by_decoding(copy: Copy) -> None:
    root = copy("v21")
    black = np.zeros((128, 128, 3), np.uint8)
    replace_video(video(root, 3), [black] * 59)
    replace_video(video(root, 8), [*scenery(42), black])
    report = check_dataset(root, frames=True)
    assert messages(report, "pictures") == {3: f"{HIGH} is black in all 59 frames"}
    assert messages(report, "pictures", "warning") == {8: f"{HIGH} is black in 1 of 43 frames"}
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
