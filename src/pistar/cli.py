"""The command line. Each command imports what it needs when it runs, so that `pistar --help` is instant."""

import argparse
import difflib
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pistar.data.words import counted, numbered, ranges
from pistar.errors import UserError

if TYPE_CHECKING:
    from pistar.training.config import RLTrainConfig

VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"

Checkpoint = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
Dataset = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATASET")]


def verify(
    checkpoint: Checkpoint,
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
    checkpoint: Checkpoint,
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
    runs = Table(Column("train", no_wrap=True), "robot", "model", "chunk", "critics", "N", "γ", "batch", "steps")
    for name, run in PRESETS.items():
        rl = run.algorithm if isinstance(run.algorithm, AcrlpdConfig) else None
        critics = "" if rl is None else f"{rl.critic.ensemble} × {len(rl.critic.hidden)}·{rl.critic.hidden[0]}"
        numbers = ("", "") if rl is None else (str(rl.candidates), f"{rl.gamma:g}")
        chunk = str(run.model.action_horizon)
        runs.add_row(
            name, run.robot, run.model.model_type, chunk, critics, *numbers, str(run.batch_size), str(run.steps)
        )
    Console().print(table, runs)


def _run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Of a command that takes a training preset."""
    from pistar.presets import list_configs

    parser = argparse.ArgumentParser(
        prog=f"pistar {command}",
        description=f"{description} Every field of the preset is an option: see PRESET --help.",
        epilog=f"Presets: {', '.join(list_configs())}.",
        add_help=False,
    )
    parser.add_argument("preset")
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings that replace the preset's")
    parser.add_argument("--lora", action="store_true", help="train adapters of OpenPI's sizes, and keep no average")
    return parser


def _read_run(parser: argparse.ArgumentParser, args: Sequence[str]) -> "tuple[argparse.Namespace, RLTrainConfig]":
    """The command's own options, and the run that preset, file and fields make."""
    from pistar.presets import get_config, with_lora
    from pistar.training.config import RLTrainConfig, load_config

    if not args or args[0].startswith("-"):
        parser.print_help()
        sys.exit(0 if "--help" in args or "-h" in args else 2)
    options, rest = parser.parse_known_args(args)
    config = get_config(options.preset)
    if options.config is not None:
        config = load_config(options.config, config)
    if options.lora:
        config = with_lora(config)
    if "--help" in rest or "-h" in rest:
        parser.print_help()
    config = tyro.cli(
        RLTrainConfig,
        prog=f"{parser.prog} {options.preset}",
        default=config,
        args=rest,
        config=(tyro.conf.AvoidSubcommands,),
    )
    return options, config


def train(args: Sequence[str]) -> None:
    """pistar train PRESET [options] [--any.field value]"""
    parser = _run_parser("train", "Train a policy from logged data.")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="delete the run that is there")
    parser.add_argument("--dry-run", action="store_true", help="check everything, train nothing")
    parser.add_argument("--debug", action="store_true", help="stop at the first NaN; show state and memory")
    parser.add_argument("--distributed", action="store_true", help="one of several hosts, as the launcher says")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="one of several hosts: where host 0 waits")
    parser.add_argument("--hosts", type=int, metavar="N", help="how many there are")
    parser.add_argument("--host", type=int, metavar="I", help="which of them this is, from 0")
    options, config = _read_run(parser, args)
    if options.debug:
        import jax

        jax.config.update("jax_debug_nans", True)  # type: ignore[no-untyped-call]
    from pistar.training import hosts, offline

    if options.distributed or any(given is not None for given in (options.coordinator, options.hosts, options.host)):
        Console(stderr=True).print("waiting for the other hosts …", highlight=False)
        hosts.join_hosts(options.coordinator, options.hosts, options.host)
    leader = hosts.is_leader()
    console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not leader)
    with hosts.lost_hosts_named():
        saved = offline.train(
            config,
            console,
            resume=options.resume,
            overwrite=options.overwrite,
            dry_run=options.dry_run,
            debug=options.debug,
        )
    hosts.part()
    if saved is not None and leader:
        Console(soft_wrap=True, highlight=False).print(f"Saved {saved}: an OpenPI checkpoint.", markup=False)


def plan(args: Sequence[str]) -> None:
    """pistar plan PRESET --devices N --device-memory GB [--any.field value]"""
    parser = _run_parser("plan", "What a run takes of each device, and what would make it fit; allocates nothing.")
    parser.add_argument("--devices", type=int, default=1, help="how many there are, on all hosts together")
    parser.add_argument("--device-memory", type=float, default=80.0, metavar="GB", help="of each, in 10⁹ bytes")
    parser.add_argument("--out", type=Path, default=Path("plan.svg"), help="the picture to draw")
    options, config = _read_run(parser, args)
    if options.devices < 1 or not options.device_memory > 0:
        raise UserError(
            f"--devices is {options.devices} and --device-memory {options.device_memory:g}; give numbers above 0."
        )
    # Before JAX wakes up: as many devices as are asked for, of the one kind that every machine has.
    # Processors multiply in float32, and XLA would keep a copy of all bfloat16 weights for it, where a GPU needs none.
    flags = (f"{VIRTUAL_DEVICES}={options.devices}", "--xla_disable_hlo_passes=while-loop-invariant-code-motion")
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags))
    import jax

    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    if jax.device_count() != options.devices:
        raise UserError(
            f"--devices is {options.devices}, but JAX made {jax.device_count()}; unset XLA_FLAGS, and try again."
        )
    from pistar.presets import with_lora
    from pistar.report.charts import stacked_bars
    from pistar.training.offline import use_compilation_cache
    from pistar.training.plan import HEADROOM, find_remedy, make_plan
    from pistar.training.run import check_batch
    from pistar.training.sharding import make_mesh

    check_batch(config)
    use_compilation_cache()
    memory = options.device_memory * 1e9
    waiting = Console(stderr=True, soft_wrap=True, highlight=False)
    with waiting.status("compiling the update: a minute or two at full size …") as status:
        first = make_plan(config, make_mesh(config.fsdp_devices))
        remedy = None
        if not first.fits(memory):
            remedy = find_remedy(
                config,
                first,
                memory,
                lambda c: make_mesh(c.fsdp_devices),
                with_lora,
                say=lambda words: status.update(f"it does not fit; {words} …"),
            )
    plans = {"as it is": first} | ({} if remedy is None else {" ".join(remedy.options): remedy.plan})

    console = Console(soft_wrap=True, highlight=False)
    devices = counted(options.devices, "device")
    table = Table(Column("GB on each device", overflow="fold"), title=Text(f"{options.preset} on {devices}"))
    flops = Table(Column("TFLOPs of an update", overflow="fold"))
    for name in plans:
        table.add_column(name, justify="right")
        flops.add_column(name, justify="right")
    for part in dict.fromkeys(part for p in plans.values() for part in p.parts):
        table.add_row(part, *(f"{p.parts[part] / 1e9:.3g}" if part in p.parts else "" for p in plans.values()))
    table.add_section()
    table.add_row("together", *(f"{p.total / 1e9:.4g}" for p in plans.values()))
    table.add_row("a checkpoint, on disk", *(f"{p.checkpoint / 1e9:.4g}" for p in plans.values()))
    for part in dict.fromkeys(part for p in plans.values() for part in p.flops):
        flops.add_row(part, *(f"{p.flops[part] / 1e12:.3g}" if part in p.flops else "" for p in plans.values()))
    flops.add_section()
    flops.add_row("together", *(f"{sum(p.flops.values()) / 1e12:.4g}" for p in plans.values()))
    console.print(table, flops)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    bars = {name: {part: size / 1e9 for part, size in p.parts.items()} for name, p in plans.items()}
    title = f"{options.preset} on {devices} of {options.device_memory:g} GB, {1 - HEADROOM:.0%} of it left free"
    limit = HEADROOM * options.device_memory
    options.out.write_text(stacked_bars(bars, title=title, unit="GB", limit=limit), encoding="utf-8")
    console.print(f"Wrote {options.out}", markup=False)
    if first.fits(memory):
        console.print(f"It fits into {options.device_memory:g} GB.")
    elif remedy is not None:
        console.print(f"It does not fit into {options.device_memory:g} GB. This does:", highlight=False)
        console.print(
            f"  pistar train {shlex.join(_without(args, '--devices', '--device-memory', '--out'))} "
            f"{' '.join(remedy.options)}",
            markup=False,
        )
    else:
        raise UserError(
            f"{options.preset} does not fit into {devices} of {options.device_memory:g} GB, not even with adapters and "
            "a row at a time; take more devices, or larger ones."
        )


def _without(args: Sequence[str], *options: str) -> list[str]:
    """Arguments less these options and their values."""
    kept, skip = [], False
    for arg in args:
        name, equals, _ = arg.partition("=")
        if not skip and name not in options:
            kept.append(arg)
        skip = not skip and name in options and not equals
    return kept


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


COMMANDS: dict[str, Callable[..., None]] = {
    "train": _train_help,  # these two are for the list of commands; `main` calls `train` and `plan` themselves
    "plan": _plan_help,
    "demo": demo,
    "verify": verify,
    "presets": presets,
    "data stats": data_stats,
    "data convert": data_convert,
    "data check": data_check,
    "data show": data_show,
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
        if args and args[0] in ("train", "plan"):  # their options are the preset's
            (train if args[0] == "train" else plan)(args[1:])
            return
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1) or list(COMMANDS)
            raise UserError(f"there is no command {args[0]!r}; try {', '.join(near)}.")
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="pistar", description="RL post-training for π₀-family robot policies.", args=args
        )
    except (UserError, PermissionError, FileExistsError, NotADirectoryError) as error:
        if isinstance(error, OSError):
            error = UserError(f"{error.filename}: {error.strerror}; check the path and its permissions.")
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        sys.exit(1)
