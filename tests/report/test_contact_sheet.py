"""The sheet shows what it was given, in the right places. How it looks has to be judged by eye."""

import numpy as np
import pytest
from PIL import Image

from pistar.report.charts import COLOURS
from pistar.report.contact_sheet import MARGIN, WIDTH, EpisodeOutcome, Signal, contact_sheet

RED, BLUE = (250, 10, 10), (10, 10, 250)
SUCCESS = (0, 158, 115)


def plain(colour: tuple[int, int, int], height: int = 48, width: int = 64) -> np.ndarray:
    return np.broadcast_to(np.array(colour, np.uint8), (height, width, 3)).copy()


def sheet(**changes: object) -> np.ndarray:
    settings: dict[str, object] = {
        "title": "fold the towel",
        "subtitle": "episode 0",
        "fps": 10.0,
        "frames": [0, 5],
        "images": {},
        "signals": {},
        "outcome": EpisodeOutcome(),
    }
    return np.asarray(contact_sheet(**(settings | changes)))  # type: ignore[arg-type]


def where(image: np.ndarray, colour: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of all pixels of a colour, shades of smoothing aside."""
    rows, columns = np.nonzero((np.abs(image.astype(int) - colour) <= 12).all(axis=-1))
    return rows, columns


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def test_cameras_are_rows_and_frames_are_columns() -> None:
    drawn = sheet(images={"high": [plain(RED), plain(BLUE)], "wrist": [plain(BLUE), plain(RED)]})
    red_rows, red_columns = where(drawn, RED)
    blue_rows, blue_columns = where(drawn, BLUE)
    middle = np.median(red_rows)
    above, below = red_rows < middle, red_rows > middle
    assert red_columns[above].max() < blue_columns[blue_rows < middle].min()
    assert red_columns[below].min() > blue_columns[blue_rows > middle].max()
    assert red_columns.min() == MARGIN


def test_images_keep_their_proportions() -> None:
    rows, columns = where(sheet(frames=[0], images={"high": [plain(RED, 40, 80)]}), RED)
    assert np.ptp(columns) == pytest.approx(2 * np.ptp(rows), rel=0.02)


def test_a_tall_image_does_not_fill_the_sheet() -> None:
    rows, _ = where(sheet(frames=[0], images={"high": [plain(RED, 900, 100)]}), RED)
    assert np.ptp(rows) < 300


def test_a_missing_image_is_a_grey_tile_of_the_same_size() -> None:
    drawn = sheet(images={"high": [plain(RED), None]})
    red = where(drawn, RED)
    grey = where(drawn[red[0].min() :, red[1].max() + 1 :], (176, 176, 176))  # without smoothed text
    assert [np.ptp(axis) for axis in grey] == [np.ptp(axis) for axis in red]
    assert len(where(sheet(images={"high": [None, None]}), (176, 176, 176))[0]) > 1000


def test_notes_are_drawn_above_the_images() -> None:
    drawn = sheet(notes=["There are no actions."], images={"high": [plain(RED), plain(RED)]})
    note = where(drawn, (213, 94, 0))[0]
    assert len(note)
    assert note.max() < where(drawn, RED)[0].min()


def test_every_dimension_has_a_line_and_a_name() -> None:
    values = np.linspace(0, 1, 20)[:, None] + np.arange(3)
    drawn = sheet(signals={"action": Signal(values, ["waist", "elbow", "gripper"])})
    for colour in COLOURS[:3]:
        _, columns = where(drawn, rgb(colour))
        assert np.ptp(columns) > 0.9 * (WIDTH - 2 * MARGIN) * 0.9
    assert len(where(drawn, rgb(COLOURS[3]))[0]) == 0


def test_many_dimensions_are_spread_over_plots() -> None:
    few = sheet(signals={"action": Signal(np.zeros((5, 8)))})
    many = sheet(signals={"action": Signal(np.zeros((5, 9)))})
    assert many.shape[0] > few.shape[0] + 100


def test_a_signal_goes_up_where_its_numbers_do() -> None:
    drawn = sheet(signals={"action": Signal(np.linspace(0, 1, 50)[:, None])})
    rows, columns = where(drawn, rgb(COLOURS[0]))
    plot = rows < rows.max() - 30  # without the legend
    assert np.corrcoef(rows[plot], columns[plot])[0, 1] < -0.99


def test_nan_leaves_a_gap() -> None:
    values = np.zeros((100, 1))
    values[40:60] = np.nan
    rows, columns = where(sheet(signals={"action": Signal(values)}), rgb(COLOURS[0]))
    line = columns[rows < rows.max() - 30]
    assert np.diff(np.unique(line)).max() > 0.15 * WIDTH


def test_success_is_marked_at_its_frame() -> None:
    rewards, success = np.zeros(51), np.zeros(51, bool)
    rewards[25], success[25] = 1, True
    rows, columns = where(sheet(outcome=EpisodeOutcome(rewards=rewards, success=success)), SUCCESS)
    mark = columns[columns > WIDTH // 3]  # without the legend
    assert abs(mark.mean() - WIDTH / 2) < 40
    assert len(where(sheet(outcome=EpisodeOutcome(rewards=rewards, success=~success & False)), SUCCESS)[0]) == 0
    assert len(rows)


def test_an_end_without_rewards_is_drawn_too() -> None:
    assert sheet(outcome=EpisodeOutcome(done=np.arange(5) == 4)).shape[0] > sheet().shape[0]


@pytest.mark.parametrize("text", ["把毛巾叠好", "fold " * 200, "x" * 500, ""])
def test_any_title_is_drawn(text: str) -> None:
    assert sheet(title=text).shape[1] == WIDTH


def test_one_frame_of_only_nan_is_drawn() -> None:
    drawn = sheet(
        frames=[0], signals={"action": Signal(np.full((1, 2), np.nan))}, outcome=EpisodeOutcome(rewards=np.zeros(1))
    )
    assert isinstance(Image.fromarray(drawn), Image.Image)
