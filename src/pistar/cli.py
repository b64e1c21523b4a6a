"""The command line. Each command imports what it needs when it runs, so that `pistar --help` is instant."""

import difflib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pistar.errors import UserError


def verify(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    /,
    model_type: Literal["pi0", "pi05"] | None = None,
    action_dim: int | None = None,
    tokenizer: str | None = None,
) -> None:
    """Tell what a checkpoint is, from its weights and assets, and check all of it.

    Args:
        checkpoint: A step folder, its params folder (what lies beside it is checked too), or a .tar.gz of either.
        model_type: Fail unless it is this model.
        action_dim: Fail unless its padded actions have this many numbers.
        tokenizer: Fail unless this SentencePiece file ("tiny": pistar's own) is what it was trained with.
    """
    from rich.progress import Progress

    from pistar.training import verify as verification

    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        report = verification.verify(
            checkpoint,
            model_type=model_type,
            action_dim=action_dim,
            tokenizer=tokenizer,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    facts, checks = Table(title=Text(str(checkpoint)), show_header=False), Table(show_header=False)
    for name, value in report.facts.items():
        facts.add_row(name, Text(value))
    for check in report.checks:
        mark = Text("✗", "red") if check.problems else Text("·") if check.absent else Text("✓", "green")
        checks.add_row(mark, check.name, Text("\n".join(check.problems) or check.detail))
    Console().print(facts, checks)
    if report.problems:
        more = f" (and {len(report.problems) - 1} more above)" if len(report.problems) > 1 else ""
        raise UserError(f"{checkpoint}: {report.problems[0]}{more}")
    Console().print("Whole and sound.")


def demo(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    /,
    robot: str | None = None,
    tokenizer: str | None = None,
    asset_id: str | None = None,
    action_horizon: int | None = None,
    prompt_format: Literal["pi0", "pi05"] | None = None,
    out: Path = Path("demo"),
) -> None:
    """Load an OpenPI checkpoint, sample and draw action chunks, write it anew and compare.

    Args:
        checkpoint: A step folder of OpenPI's, or a .tar.gz of one.
        robot: Whose data it was trained on: aloha, aloha_sim, libero, libero_delta, droid, droid_position. A checkpoint
            with a contract says so itself.
        tokenizer: PaliGemma's SentencePiece file, or "tiny" for pistar's own; found in OpenPI's cache if left out.
        asset_id: Which norm stats to use, where the checkpoint has several.
        action_horizon: Actions in a chunk, which no weight shows; OpenPI's 50 if left out.
        prompt_format: pi05 writes the state into the prompt; the model's own if left out.
        out: Folder for the picture and the new checkpoint.
    """
    from pistar import demo as demonstration

    demonstration.run(
        checkpoint,
        robot=robot,
        tokenizer=tokenizer,
        asset_id=asset_id,
        action_horizon=action_horizon,
        prompt_format=prompt_format,
        out=out,
        console=Console(soft_wrap=True, highlight=False),
    )


def presets() -> None:
    """List the named model configurations."""
    from pistar.presets import MODELS

    table = Table("name", "model", "vlm", "action expert", "vision", "pixels", "actions")
    for name, config in MODELS.items():
        experts = [
            f"{gemma.width} × {gemma.depth}" + (f", LoRA {gemma.lora.rank}" if gemma.lora else "")
            for gemma in (config.vlm, config.expert)
        ]
        vision = f"{config.vision.width} × {config.vision.depth}"
        chunk = f"{config.action_horizon} × {config.action_dim}"
        table.add_row(name, config.model_type, *experts, vision, str(config.image_size), chunk)
    Console().print(table)


def data_stats(
    dataset: Annotated[str, tyro.conf.Positional],
    /,
    robot: str,
    out: Path,
    horizon: int = 50,
) -> None:
    """Compute OpenPI's norm_stats.json of a LeRobot dataset, without opening a video.

    Args:
        dataset: A LeRobot folder, or a repo id in LeRobot's cache.
        robot: Whose data it is: aloha, aloha_sim, libero, libero_delta, droid, droid_position.
        out: Folder for norm_stats.json, for example assets/my_task.
        horizon: Actions in a chunk: relative ones spread wider the further they reach.
    """
    from pistar.data.dataset_stats import compute_norm_stats
    from pistar.data.lerobot import open_dataset
    from pistar.data.norm_stats import check_norm_stats, save_norm_stats
    from pistar.data.robots import find_robot

    opened = open_dataset(dataset)
    with Console(stderr=True).status("reading number columns"):
        stats = compute_norm_stats(opened, find_robot(robot), horizon)
    table = Table("", "dim", "mean", "std", "q01", "q99", title=Text(f"{dataset}: {len(opened.episodes)} episodes"))
    for name, entry in stats.items():
        columns = [entry.mean, entry.std, entry.q01, entry.q99]
        for dim in range(len(entry.mean)):
            values = ["" if column is None else f"{column[dim]:.4g}" for column in columns]
            table.add_row(name, str(dim), *values)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for note in check_norm_stats(stats, "quantile"):
        console.print(f"note: {note}", markup=False)
    out.mkdir(parents=True, exist_ok=True)
    save_norm_stats(out / "norm_stats.json", stats)
    console.print(f"Wrote {out / 'norm_stats.json'}", markup=False)


def data_convert(
    folder: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    /,
    task: str,
    fps: int = 50,
    without_scores: Literal["success", "failure", "timeout"] | None = None,
    workers: int | None = None,
) -> None:
    """Convert a folder of ALOHA HDF5 episodes to a LeRobot v3.0 dataset. Interrupted, the same command goes on.

    Args:
        folder: Where the episodes are; subfolders score_5, score_1 … tell how each went.
        out: The new dataset's folder.
        task: The instruction, for example "fold the towel".
        fps: Steps per second the robot was controlled at.
        without_scores: How all episodes went, where no folder tells.
        workers: Cameras compressed at the same time; all cores if not given.
    """
    from rich.progress import Progress

    from pistar.data.hdf5 import convert_hdf5
    from pistar.data.rewards import FromScores

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        converting = bar.add_task("converting", total=None)

        def show(ready: int, total: int) -> None:
            if ready and bar.tasks[0].total is None:
                told = f"continuing: {ready} of {total} episodes were already converted"
                console.print(told, markup=False)
            bar.update(converting, completed=ready, total=total)

        done = convert_hdf5(
            folder,
            out,
            fps=fps,
            task=task,
            scores=without_scores or FromScores(),
            workers=workers,
            progress=show,
        )
    for note in done.notes:
        console.print(f"note: {note}", markup=False)
    told = f"{done.episodes} episodes, {done.frames} frames, {done.successes} successes"
    Console(soft_wrap=True, highlight=False).print(f"Wrote {done.path}: {told}.", markup=False)


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "verify": verify,
    "presets": presets,
    "data stats": data_stats,
    "data convert": data_convert,
}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command. A mistake of the user's is one line on stderr and exit code 1."""
    args = sys.argv[1:] if args is None else args
    if args[:1] == ["data"] and len(args) > 1:
        args = [" ".join(args[:2]), *args[2:]]  # one command in two words
    if list(args) == ["--version"]:
        Console().print(f"pistar {importlib.metadata.version('pistar-rl')}", highlight=False)
        return
    try:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1) or list(COMMANDS)
            raise UserError(f"there is no command {args[0]!r}; try {', '.join(near)}.")
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="pistar", description="Make a π₀ policy that imitates one that succeeds.", args=args
        )
    except (UserError, PermissionError, FileExistsError, NotADirectoryError) as error:
        if isinstance(error, OSError):
            error = UserError(f"{error.filename}: {error.strerror}; check the path and its permissions.")
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        sys.exit(1)
