"""Videos show the frames they were made of when they are decoded again."""

from pathlib import Path

import av
import numpy as np
import pytest

from pistar.report.video import write_video


def frames_of(path: Path) -> tuple[list[np.ndarray], float]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate is not None
        assert stream.codec_context.pix_fmt == "yuv420p", "or browsers do not play it"
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)], float(stream.average_rate)


def film(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Make frames of one grey each over a slow ramp, each lighter than the one before."""
    ramp = np.linspace(0, 40, width)[None, :, None]
    greys = np.linspace(20, 200, count)
    return [np.broadcast_to(ramp + grey, (height, width, 3)).astype(np.uint8) for grey in greys]


def test_frames_come_back_except_for_the_codecs_loss(tmp_path: Path) -> None:
    shown = film(12)
    write_video(tmp_path / "deep" / "film.mp4", shown, fps=10)
    found, rate = frames_of(tmp_path / "deep" / "film.mp4")
    assert rate == 10
    assert len(found) == 12
    for one, other in zip(found, shown, strict=True):
        assert np.abs(one.astype(int) - other).mean() < 3
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["film.mp4"], "nothing is left beside it"


def test_colours_are_not_swapped(tmp_path: Path) -> None:
    red = np.zeros((32, 32, 3), np.uint8)
    red[..., 0] = 200
    write_video(tmp_path / "red.mp4", [red] * 3, fps=30)
    found = frames_of(tmp_path / "red.mp4")[0][1].mean(axis=(0, 1))
    np.testing.assert_allclose(found, [200, 0, 0], atol=8)


@pytest.mark.parametrize(("height", "width"), [(33, 65), (32, 65), (33, 64)])
def test_odd_sizes_lose_a_row_or_a_column(tmp_path: Path, height: int, width: int) -> None:
    shown = film(3, height, width)
    write_video(tmp_path / "odd.mp4", shown, fps=30)
    found, _ = frames_of(tmp_path / "odd.mp4")
    assert found[0].shape == (32, 64, 3)
    assert np.abs(found[1].astype(int) - shown[1][:32, :64]).mean() < 3


@pytest.mark.parametrize(
    ("fps", "count", "kept", "rate"),
    [
        (80, 9, [0, 3, 6, 8], 27),  # every third, and the last
        (80, 10, [0, 3, 6, 9], 27),
        (50, 5, [0, 2, 4], 25),
        (30, 4, [0, 1, 2, 3], 30),
        (10, 1, [0], 10),
    ],
)
def test_fast_videos_are_thinned_and_keep_their_last_frame(
    tmp_path: Path, fps: int, count: int, kept: list[int], rate: int
) -> None:
    shown = film(count)
    write_video(tmp_path / "fast.mp4", shown, fps)
    found, measured = frames_of(tmp_path / "fast.mp4")
    assert measured == pytest.approx(rate)
    assert len(found) == len(kept)
    for one, index in zip(found, kept, strict=True):
        assert abs(one.mean() - shown[index].mean()) < 4


def test_a_video_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    write_video(tmp_path / "film.mp4", film(2), fps=10)
    before = (tmp_path / "film.mp4").read_bytes()
    with pytest.raises((ValueError, TypeError)):
        write_video(tmp_path / "film.mp4", [film(1)[0], np.zeros((48, 64), np.uint8)], fps=10)
    assert (tmp_path / "film.mp4").read_bytes() == before
