"""Draw an episode as one image: camera frames, outcome, and actions and states over time."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Num, Shaped, UInt8
from PIL import Image, ImageDraw, ImageFont

from pistar.report.charts import COLOURS, padded_range

Box = tuple[int, int, int, int]
"""Left, top, right, bottom."""

WIDTH, MARGIN, GAP = 1600, 32, 8
_TALLEST = 260
"""Largest height of an image."""
_PLOT, _STRIP, _LEGEND, _AXIS = 150, 64, 22, 56
"""Heights of a plot, of the outcome's plot and of a legend's line; width of the scale on the left of a plot."""
_FINE = 3
"""Lines are drawn this many times larger and then shrunk, because Pillow does not smooth them."""
_INK, _FAINT, _RULE, _SUCCESS, _FAILURE = "#222222", "#777777", "#dddddd", "#009e73", "#d55e00"
_GREY = "#b0b0b0"
_FONTS = ("NotoSansCJK-Regular.ttc", "NotoSans-Regular.ttf", "DejaVuSans.ttf", "Arial Unicode.ttf")
"""Fonts for letters that Pillow's own font lacks, if the system has one of them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Signal:
    """A vector over time."""

    values: Num[np.ndarray, "t d"]
    names: Sequence[str] = ()
    """Names of the dimensions; empty shows their numbers."""


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeOutcome:
    """Rewards and end of an episode, by step. None if not recorded."""

    rewards: Num[np.ndarray, " t"] | None = None
    done: Shaped[np.ndarray, " t"] | None = None
    success: Shaped[np.ndarray, " t"] | None = None


def contact_sheet(
    *,
    title: str,
    subtitle: str,
    fps: float,
    frames: Sequence[int],
    images: Mapping[str, Sequence[UInt8[np.ndarray, "h w 3"] | None]],
    signals: Mapping[str, Signal],
    outcome: EpisodeOutcome,
    notes: Sequence[str] = (),
) -> Image.Image:
    """Draw a row of images for each camera, the outcome, and plots of signals with a few dimensions each.

    `images` are those of `frames`. All plots share one time axis, with a mark at each image. An image that is None
    becomes a grey tile. `notes` say what is wrong with the episode and are drawn at the top.
    """
    length = max([max(frames, default=0) + 1, *(len(signal.values) for signal in signals.values())])
    seconds = [frame / fps for frame in frames]
    sheet = Image.new("RGB", (WIDTH, 20_000), "white")
    draw = ImageDraw.Draw(sheet)
    y = MARGIN
    for line in _wrapped(draw, title, 26):
        _text(draw, (MARGIN, y), line, 26)
        y += 34
    _text(draw, (MARGIN, y), subtitle, 16, _FAINT)
    y += 24
    for line in (line for note in notes for line in _wrapped(draw, note, 16)):
        _text(draw, (MARGIN, y), line, 16, _FAILURE)
        y += 22
    y += 12
    y = _images(sheet, draw, y, seconds, images)
    span = (length - 1) / fps
    y = _outcome(sheet, draw, y, span, seconds, outcome)
    y = _signals(sheet, draw, y, span, seconds, signals)
    return sheet.crop((0, 0, WIDTH, y + MARGIN - GAP))


def _images(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, y: int, seconds: Sequence[float],
    images: Mapping[str, Sequence[np.ndarray | None]],
) -> int:  # fmt: skip
    if not images or not seconds:
        return y
    cell = min((WIDTH - 2 * MARGIN - (len(seconds) - 1) * GAP) / len(seconds), 320)
    lefts = [round(MARGIN + i * (cell + GAP)) for i in range(len(seconds))]
    for left, second in zip(lefts, seconds, strict=True):
        _text(draw, (left, y), f"{second:.2f} s", 14, _FAINT)
    y += 22
    for camera, row in images.items():
        _text(draw, (MARGIN, y), camera, 14)
        y += 22
        usual = next((image.shape[:2] for image in row if image is not None), (3, 4))
        bottom = y
        for left, image in zip(lefts, row, strict=True):
            height, width = usual if image is None else image.shape[:2]
            scale = min(cell / width, _TALLEST / height)
            size = (max(1, round(scale * width)), max(1, round(scale * height)))
            if image is None:
                draw.rectangle((left, y, left + size[0] - 1, y + size[1] - 1), _GREY)
                _text(draw, (left + GAP, y + size[1] // 2 - GAP), "no frame", 14)
            else:
                sheet.paste(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS), (left, y))
            bottom = max(bottom, y + size[1])
        y = bottom + 2 * GAP
    return y + GAP


def _outcome(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, y: int, span: float, seconds: Sequence[float],
    outcome: EpisodeOutcome,
) -> int:  # fmt: skip
    marks = {"success": (outcome.success, _SUCCESS), "done": (outcome.done, _INK)}
    marked = {name: np.flatnonzero(v) for name, (v, _) in marks.items() if v is not None}
    if outcome.rewards is None and not marked:
        return y
    x = MARGIN
    if outcome.rewards is not None:
        _text(draw, (x, y), f"reward  (sum {np.nansum(outcome.rewards):.4g})", 14)
        x += 200
    for name, steps in marked.items():
        colour = marks[name][1] if len(steps) else _FAINT
        filled = len(steps) and name == "success"
        draw.ellipse((x, y + 4, x + 9, y + 13), outline=colour, fill=colour if filled else None, width=2)
        _text(draw, (x + 16, y), name if len(steps) else f"no {name}", 14, colour)
        x += 130
    y += _LEGEND
    box = (MARGIN + _AXIS, y, WIDTH - MARGIN, y + _STRIP)
    rewards = outcome.rewards
    if rewards is None:
        rewards = np.zeros(max(len(values) for values, _ in marks.values() if values is not None))
    low, high = _plot(sheet, draw, box, rewards[:, None], span, seconds)
    for name, steps in marked.items():
        for step in steps:
            across = box[0] + step / max(len(rewards) - 1, 1) * (box[2] - box[0])
            value = rewards[step] if math.isfinite(rewards[step]) else low
            down = box[1] + (high - value) / (high - low) * _STRIP
            radius = 7 if name == "done" else 5  # done is a ring around a success at the same step
            at = (across - radius, down - radius, across + radius, down + radius)
            draw.ellipse(at, outline=marks[name][1], fill=marks[name][1] if name == "success" else None, width=2)
    return box[3] + 36


def _signals(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, y: int, span: float, seconds: Sequence[float],
    signals: Mapping[str, Signal],
) -> int:  # fmt: skip
    """Draw a column for each signal, with groups of dimensions below each other."""
    if not signals:
        return y
    width = (WIDTH - 2 * MARGIN - (len(signals) - 1) * 3 * GAP) // len(signals)
    bottom = y
    for column, (name, signal) in enumerate(signals.items()):
        left, top = MARGIN + column * (width + 3 * GAP), y
        dims = signal.values.shape[1]
        groups = np.array_split(np.arange(dims), max(1, math.ceil(dims / len(COLOURS))))
        for group in groups:
            label = f"{name}[{group[0]}…{group[-1]}]" if len(group) > 1 else f"{name}[{group[0]}]"
            _text(draw, (left, top), label if dims > 1 else name, 14)
            top += _LEGEND
            box = (left + _AXIS, top, left + width, top + _PLOT)
            _plot(sheet, draw, box, signal.values[:, group], span, seconds)
            top = box[3] + 24
            top = _legend(draw, box, top, [signal.names[d] if signal.names else str(d) for d in group])
        bottom = max(bottom, top)
    return bottom


def _legend(draw: ImageDraw.ImageDraw, box: Box, y: int, names: Sequence[str]) -> int:
    x = box[0]
    for name, colour in zip(names, COLOURS, strict=False):
        wide = 26 + round(draw.textlength(name, _font(13, name))) + 2 * GAP
        if x + wide > box[2] and x > box[0]:
            x, y = box[0], y + _LEGEND
        draw.line((x, y + 9, x + 18, y + 9), colour, 3)
        _text(draw, (x + 24, y), name, 13, _INK)
        x += wide
    return y + _LEGEND + 2 * GAP


def _plot(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, box: Box, values: Num[np.ndarray, "t d"], span: float,
    seconds: Sequence[float],
) -> tuple[float, float]:  # fmt: skip
    """Draw lines over time in a box with a scale; return the range of values it shows."""
    left, top, right, bottom = box
    wide, tall = right - left, bottom - top
    lines = values.astype(np.float64).T
    low, high = padded_range(lines)
    fine = Image.new("RGB", (wide * _FINE, tall * _FINE), "white")
    pen = ImageDraw.Draw(fine)
    for second in seconds:
        x = second / span * wide * _FINE if span else 0
        pen.line((x, 0, x, tall * _FINE), "#eeeeee", _FINE)
    if low < 0 < high:
        zero = high / (high - low) * tall * _FINE
        pen.line((0, zero, wide * _FINE, zero), _RULE, _FINE)
    xs = np.linspace(0, wide * _FINE - 1, lines.shape[1]) if lines.shape[1] > 1 else np.array([0.0])
    for colour, line in zip(COLOURS, lines, strict=False):
        ys = (high - line) / (high - low) * tall * _FINE
        for piece in np.split(np.arange(len(line)), np.flatnonzero(~np.isfinite(line))):  # NaN leaves a gap
            points = [(float(xs[i]), float(ys[i])) for i in piece if np.isfinite(line[i])]
            if len(points) > 1:
                pen.line(points, colour, round(1.6 * _FINE), joint="curve")
            elif points:
                x, y = points[0]
                pen.ellipse((x - 5, y - 5, x + 5, y + 5), colour)
    sheet.paste(fine.resize((wide, tall), Image.Resampling.LANCZOS), (left, top))
    draw.rectangle((left - 1, top - 1, right, bottom), outline="#bbbbbb")
    for value, y in ((high, top - 2), (low, bottom - 14)):
        label = f"{value:.3g}"
        _text(draw, (round(left - 8 - draw.textlength(label, _font(12, label))), y), label, 12, _FAINT)
    _text(draw, (left, bottom + 4), "0 s", 12, _FAINT)
    end = f"{span:.2f} s"
    _text(draw, (round(right - draw.textlength(end, _font(12, end))), bottom + 4), end, 12, _FAINT)
    return low, high


def _wrapped(draw: ImageDraw.ImageDraw, text: str, size: int) -> list[str]:
    """Break text into lines that fit the sheet."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if draw.textlength(longer, _font(size, text)) <= WIDTH - 2 * MARGIN or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _text(draw: ImageDraw.ImageDraw, at: tuple[int, int], text: str, size: int, colour: str = _INK) -> None:
    draw.text(at, text, colour, _font(size, text))


def _font(size: int, text: str) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    if any(ord(letter) > 0x2FF and letter not in "…–—’“”" for letter in text):
        for name in _FONTS:
            try:
                return ImageFont.truetype(name, size)
            except OSError:
                continue
    return ImageFont.load_default(size)
