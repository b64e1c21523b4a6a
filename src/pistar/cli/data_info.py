"""`pistar data info`: what a dataset contains."""

import statistics
from typing import TYPE_CHECKING

from rich.text import Text

from pistar.cli.data import Dataset
from pistar.cli.printing import make_table
from pistar.cli.printing import out as standard_output
from pistar.text import counted

if TYPE_CHECKING:
    from pistar.data.checks.summary import DatasetSummary


def info(dataset: Dataset, /) -> None:
    """Show what a LeRobot dataset contains: episodes, success rate, lengths, tasks, cameras and action ranges.

    Args:
        dataset: A LeRobot folder, or a repo id in LeRobot's cache. No video is opened.
    """
    from pistar.data.checks.summary import summarize_dataset

    summary = summarize_dataset(dataset)
    facts = make_table("", "", title=Text(str(summary.dataset.root)), show_header=False)
    for name, value in _facts(summary).items():
        facts.add_row(name, Text(value))
    ranges = make_table("action", "min", "mean", "max")
    for action in summary.actions:
        ranges.add_row(Text(action.name), *(f"{value:.4g}" for value in (action.low, action.mean, action.high)))
    console = standard_output()
    console.print(facts)
    if summary.actions:
        console.print(ranges)


def _facts(summary: "DatasetSummary") -> dict[str, str]:
    from pistar.data.checks.summary import camera_size

    dataset, lengths = summary.dataset, summary.lengths
    frames = dataset.total_frames
    shortest, median, longest = min(lengths), statistics.median(lengths), max(lengths)
    cameras = [
        f"{name} {camera_size(feature)}" + (", a depth map" if feature.is_depth_map else "")
        for name, feature in dataset.features.items()
        if feature.is_camera
    ]
    return {
        "format": f"LeRobot {dataset.version}, robot {dataset.robot_type or 'unknown'}",
        "episodes": f"{len(lengths)}, {counted(frames, 'frame')} at {dataset.fps:g} fps: {frames / dataset.fps:.1f} s",
        "success": _success_rate(summary),
        "length": f"{shortest} to {longest} frames, median {median:g} "
        f"({shortest / dataset.fps:.2f} to {longest / dataset.fps:.2f} s, median {median / dataset.fps:.2f} s)",
        "tasks": "\n".join(f"{task}: {counted(count, 'episode')}" for task, count in summary.tasks.items()) or "none",
        "cameras": "\n".join(cameras) or "none",
    }


def _success_rate(summary: "DatasetSummary") -> str:
    from pistar.evaluation.stats import wilson

    if summary.successes is None:
        return "unknown: there is no column next.success"
    low, high = wilson(summary.successes, total := len(summary.lengths))
    rate = 100 * summary.successes / total
    return f"{summary.successes} of {total}: {rate:.0f} % (95 % interval by Wilson {100 * low:.0f}–{100 * high:.0f} %)"
