"""The command line. Each command imports what it needs when it runs, so that `pistar --help` is instant."""

import difflib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pistar.cli_checkpoints import export_checkpoint, import_checkpoint
from pistar.cli_envs import Checkpoint, collect, evaluate
from pistar.cli_runs import plan, sweep, train, weigh
from pistar.config import check_seed
from pistar.data.words import counted, numbered, ranges
from pistar.errors import UserError

Dataset = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATASET")]


def verify(
    checkpoint: Checkpoint,
    /,
    model_type: Literal["pi0", "pi05"] | None = None,
    action_dim: int | None = None,
    tokenizer: str | None = None,
    vision_heads: int | None = None,
) -> None:
    """Tell what a checkpoint is, from its weights and assets, and check all of it.

    Args:
        checkpoint: A step folder, its params folder (what lies beside it is checked too), or a .tar.gz of either; or a
            PyTorch model.safetensors, or the folder it is in, of OpenPI's or LeRobot's.
        model_type: Fail unless it is this model.
        action_dim: Fail unless its padded actions have this many numbers.
        tokenizer: Fail unless this SentencePiece file ("tiny": pistar's own) is what it was trained with.
        vision_heads: Of a PyTorch checkpoint whose vision tower is not So400m.
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
            vision_heads=vision_heads,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    facts = _table("", "", title=Text(str(checkpoint)), show_header=False)
    checks = _table("", "", "", show_header=False)
    for name, value in report.facts.items():
        facts.add_row(name, Text(value))
    for check in report.checks:
        mark = Text("✗", "red") if check.problems else Text("·") if check.absent else Text("✓", "green")
        checks.add_row(mark, check.name, Text("\n".join(check.problems) or check.detail))
    Console().print(facts, checks)
    if report.problems:
        raise UserError(f"{checkpoint}: {_and_more(report.problems[0], len(report.problems) - 1)}.")
    Console().print("Whole and sound.")


def demo(
    algo: Literal["acrlpd", "ript"] = "acrlpd", out: Path | None = None, seed: int = 0, quick: bool = False
) -> None:
    """See RL beat imitation in a simulator, end to end, in 7 to 9 minutes on two free cores.

    Collects demonstrations of a Meta-World task as a LeRobot dataset, trains a small π₀ by imitation and by RL, judges
    them on the same start states, and leaves a picture, a film and an OpenPI checkpoint.

    Args:
        algo: acrlpd learns from 200 spoilt demonstrations of pick-place; ript from 5 of push, and by practice.
        out: Folder for all of it; demo, quick_demo, ript_demo or quick_ript_demo if left out. A demo that was stopped
            goes on there.
        seed: Of everything.
        quick: A minute of everything, to see that it runs; the policies learn nothing in it.
    """
    from pistar import demo as demonstration

    check_seed(seed, "--seed")
    budget = (demonstration.QUICK if quick else demonstration.BUDGETS)[algo]
    folder = out or Path(f"{'quick_' if quick else ''}{'ript_' if algo == 'ript' else ''}demo")
    console = Console(highlight=False)
    demonstration.run(folder, seed, budget, console)
    if quick:
        console.print("Everything runs. In so few updates nothing is learnt: for that, leave --quick out.")


def presets() -> None:
    """List the named models and training runs."""
    from pistar.config import AcrlpdConfig
    from pistar.presets import MODELS, PRESETS

    table = _table("name", "model", "vlm", "action expert", "vision", "pixels", "actions")
    for name, config in MODELS.items():
        experts = [
            f"{gemma.width} × {gemma.depth}" + (f", LoRA {gemma.lora.rank}" if gemma.lora else "")
            for gemma in (config.vlm, config.expert)
        ]
        vision = f"{config.vision.width} × {config.vision.depth}"
        chunk = f"{config.action_horizon} × {config.action_dim}"
        table.add_row(name, config.model_type, *experts, vision, str(config.image_size), chunk)
    heads = ("train", "robot", "model", "chunk", "critics", "N", "γ", "batch", "steps")
    # Narrow enough for 80 columns: a number that is cut off is another number.
    runs = Table(*(Column(head, overflow="fold") for head in heads), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, run in PRESETS.items():
        rl = run.algorithm if isinstance(run.algorithm, AcrlpdConfig) else None
        critics = "" if rl is None else f"{rl.critic.ensemble} × {len(rl.critic.hidden)}·{rl.critic.hidden[0]}"
        numbers = ("", "") if rl is None else (str(rl.candidates), f"{rl.gamma:g}")
        chunk = str(run.model.action_horizon)
        runs.add_row(
            name, run.robot, run.model.model_type, chunk, critics, *numbers, str(run.batch_size), str(run.steps)
        )
    Console().print(table, runs)


def data_stats(
    dataset: Dataset,
    /,
    robot: str,
    out: Path,
    horizon: int = 50,
) -> None:
    """Compute OpenPI's norm_stats.json of a LeRobot dataset, without opening a video.

    Args:
        dataset: A LeRobot folder, or a repo id in LeRobot's cache.
        robot: Whose data it is: aloha, aloha_sim, libero, libero_delta, droid, droid_position, metaworld,
            metaworld_camera.
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
    title = f"{dataset}: {counted(len(opened.episodes), 'episode')}"
    table = _table("", "dim", "mean", "std", "q01", "q99", title=Text(title))
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
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    task: str,
    fps: int = 50,
    without_scores: Literal["success", "failure", "timeout"] | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
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
    told = f"{counted(done.episodes, 'episode')}, {counted(done.frames, 'frame')}, "
    told += "1 success" if done.successes == 1 else f"{done.successes} successes"
    Console(soft_wrap=True, highlight=False).print(f"Wrote {done.path}: {told}.", markup=False)


def data_check(
    dataset: Dataset,
    /,
    fix: Annotated[Path | None, tyro.conf.arg(metavar="OUT")] = None,
    frames: bool = False,
) -> None:
    """List a LeRobot dataset's broken episodes; exit code 1 if there are any.

    Args:
        dataset: A LeRobot folder, or a repo id in LeRobot's cache. It is never written to.
        fix: A new folder, for a cleaned v3.0 copy without the episodes that cannot be mended.
        frames: Decode every picture too: broken, black and frozen ones. Takes as long as decoding takes.
    """
    from rich.progress import Progress

    from pistar.data.check import check_dataset, clean_copy
    from pistar.data.findings import grouped
    from pistar.data.lerobot import find_dataset
    from pistar.data.lerobot_copy import require_new

    if fix is not None:
        require_new(fix, find_dataset(dataset))  # before the work, not after
    console, errors = Console(soft_wrap=True, highlight=False), Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("checking", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        report = check_dataset(dataset, frames=frames, progress=progress)
        groups = grouped(report.findings)
        if groups:
            table = _table("", "episode", "kind", "what is wrong", "--fix", title=Text(str(report.dataset.root)))
            for finding, episodes in groups:
                mark = Text("✗", "red") if finding.severity == "error" else Text("!", "yellow")
                done = "mends" if finding.mend is not None else "leaves out" if finding.severity == "error" else ""
                if finding.mend is None and finding.severity == "error" and not episodes:
                    done = "cannot"
                table.add_row(mark, ranges(episodes) or "all", finding.kind, Text(finding.what), done)
            Console().print(table)
        states = f"{len(report.sound)} sound, {len(report.mendable)} mendable, {len(report.dropped)} lost"
        counts = f"{counted(len(report.errors), 'error')}, {counted(len(report.warnings), 'warning')}"
        console.print(f"{counted(len(report.dataset.episodes), 'episode')}: {states}; {counts}.", markup=False)
        if fix is not None:
            clean_copy(report, fix, progress=progress)
    if fix is not None:
        left_out = numbered(report.dropped, "episode") if report.dropped else "nothing"
        mended = "; ".join(what if count == 1 else f"{what} ({count} times)" for what, count in report.mended.items())
        kept = counted(len(report.kept), "episode")
        console.print(f"Wrote {fix}: {kept}; videos copied byte for byte.", markup=False)
        console.print(f"Left out: {left_out}.", markup=False)
        console.print(f"Mended: {mended or 'nothing'}.", markup=False)
    elif report.errors:
        errors_only = grouped(report.errors)
        first, episodes = errors_only[0]
        where = f"{numbered(episodes, 'episode')}: " if episodes else ""
        remedy = "no episode can be kept: record or copy the dataset again."
        if report.can_be_copied:
            remedy = "write a copy of what can be kept with --fix OUT."
        elif report.kept:
            remedy = "--fix cannot mend that."
        raise UserError(f"{dataset}: {where}{_and_more(first.what, len(errors_only) - 1)}; {remedy}")


def _and_more(problem: str, more: int) -> str:
    """The first of several problems, to go on writing after."""
    return problem.rstrip(".") + (f" (and {more} more above)" if more else "")


def _table(*names: str, title: Text | None = None, show_header: bool = True) -> Table:
    """Of columns that break long words rather than cut them off."""
    table = Table(title=title, show_header=show_header)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def data_show(
    dataset: Dataset,
    episode: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="EPISODE")],
    /,
    out: Path = Path("episode.png"),
    columns: int = 8,
) -> None:
    """Draw an episode as one picture: what the cameras saw, actions, states, rewards and the end.

    Args:
        dataset: A LeRobot folder, or a repo id in LeRobot's cache.
        episode: Its number.
        out: The PNG to write.
        columns: Pictures of each camera, evenly spaced in time.
    """
    from pistar.data.episode_view import view_episode
    from pistar.report.contact_sheet import Outcome, Signal, contact_sheet

    if columns < 1:
        raise UserError(f"--columns is {columns}; show at least 1 picture (try 8).")
    if out.suffix.lower() != ".png":
        raise UserError(f"--out is {out}; it is a PNG: give it a name that ends in .png.")
    view = view_episode(dataset, episode, columns)
    length, fps = view.info.length, view.dataset.fps
    outcome = {
        key: view.numbers[name][:, 0]
        for key, name in (("rewards", "next.reward"), ("done", "next.done"), ("success", "next.success"))
        if name in view.numbers
    }
    sheet = contact_sheet(
        title=", ".join(view.info.tasks) or "(no task)",
        subtitle=f"episode {episode} of {view.dataset.root.name}: {counted(length, 'frame')} at {fps:g} fps, "
        f"{length / fps:.2f} s",
        fps=fps,
        frames=view.frames,
        pictures=view.pictures,
        signals={name: Signal(view.numbers[name], names) for name, names in view.signals.items()},
        outcome=Outcome(**outcome),
        notes=view.notes,
    )
    for note in view.notes:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"note: {note}", markup=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(out)
    Console(soft_wrap=True, highlight=False).print(f"Wrote {out}", markup=False)


def _train_help(args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Train a policy from logged data: pistar train PRESET [options]."""
    train(args)


def _plan_help(args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Tell what a run takes of each device, and what would make it fit: pistar plan PRESET --devices 8."""
    plan(args)


def _sweep_help(args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Compare settings over seeds, with a table: pistar sweep PRESET --param online.rollouts=4,8 --seeds 2."""
    sweep(args)


PRESETS_OPTIONS: dict[str, Callable[[Sequence[str]], None]] = {"train": train, "plan": plan, "sweep": sweep}
"""Commands whose options are a preset's: `main` calls them itself."""

COMMANDS: dict[str, Callable[..., None]] = {
    "train": _train_help,  # these three are for the list of commands
    "plan": _plan_help,
    "sweep": _sweep_help,
    "eval": evaluate,
    "demo": demo,
    "verify": verify,
    "export": export_checkpoint,
    "import": import_checkpoint,
    "presets": presets,
    "data stats": data_stats,
    "data convert": data_convert,
    "data check": data_check,
    "data show": data_show,
    "data collect": collect,
    "data weigh": weigh,
}


def _data_help() -> None:
    table = Table(box=None, show_header=False)
    for name, command in COMMANDS.items():
        if name.startswith("data "):
            table.add_row(f"  {name}", (command.__doc__ or "").splitlines()[0])
    Console(highlight=False).print("usage: pistar data COMMAND …; each has a --help.\n", table)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command. A mistake of the user's is one line on stderr and exit code 1."""
    args = sys.argv[1:] if args is None else args
    if list(args[:1]) == ["data"]:
        if len(args) == 1 or args[1] in ("-h", "--help"):
            _data_help()
            sys.exit(0 if len(args) > 1 else 2)
        args = [" ".join(args[:2]), *args[2:]]  # one command in two words
    if list(args) == ["--version"]:
        Console().print(f"pistar {importlib.metadata.version('pistar-rl')}", highlight=False)
        return
    try:
        if args and args[0] in PRESETS_OPTIONS:
            PRESETS_OPTIONS[args[0]](args[1:])
            return
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1) or list(COMMANDS)
            raise UserError(f"there is no command {args[0]!r}; try {', '.join(near)}.")
        if args and args[0] == "import" and any(arg.split("=")[0] == "--format" for arg in args):
            raise UserError(  # or tyro would suggest the options of other commands
                "import has no --format: it tells the source's dialect itself, and writes openpi; leave it out, or use "
                "`pistar export` to write another."
            )
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="pistar", description="RL post-training for π₀-family robot policies.", args=args
        )
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted.")
        sys.exit(130)
    except (UserError, PermissionError, FileExistsError, NotADirectoryError) as error:
        if isinstance(error, OSError):
            error = UserError(f"{error.filename}: {error.strerror}; check the path and its permissions.")
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        sys.exit(1)
