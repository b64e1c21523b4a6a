"""The command line. Each command imports what it needs when it runs, so that `pistar --help` is instant."""

import difflib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Column, Table

import pistar
from pistar.cli.checkpoints import export_checkpoint, import_checkpoint, verify
from pistar.cli.data import check, collect, convert, show, stats, weigh
from pistar.cli.data_info import info
from pistar.cli.doctor import doctor
from pistar.cli.eval import evaluate
from pistar.cli.printing import joined_docstrings, make_table
from pistar.cli.printing import out as standard_output
from pistar.cli.runs import plan, sweep, train
from pistar.errors import UserError, check_seed


def demo(
    algo: Literal["acrlpd", "ript"] = "acrlpd", out: Path | None = None, seed: int = 0, quick: bool = False
) -> None:
    """See RL beat imitation in a simulator, end to end, in 7 to 9 minutes on two free cores.

    Collects demonstrations of a Meta-World task as a LeRobot dataset, trains a small π₀ by imitation and by RL,
    evaluates both on the same start states, and writes a chart, a film and an OpenPI checkpoint.

    Args:
        algo: acrlpd learns from 200 corrupted demonstrations of pick-place; ript from 5 of push and its own rollouts.
        out: Folder for all results. The default is demo, quick_demo, ript_demo or quick_ript_demo. A stopped demo
            continues there.
        seed: Seed of all random numbers.
        quick: Run everything in about a minute, to see that it works. The policies learn nothing.
    """
    from pistar import demo as demonstration

    check_seed(seed, "--seed")
    budget = (demonstration.QUICK if quick else demonstration.BUDGETS)[algo]
    folder = out or Path(f"{'quick_' if quick else ''}{'ript_' if algo == 'ript' else ''}demo")
    console = Console(highlight=False)
    demonstration.run(folder, seed, budget, console)
    if quick:
        console.print("Everything runs. So few updates teach nothing: for a result, leave --quick out.")


def presets() -> None:
    """List the named models and training runs."""
    from pistar.config.model_presets import MODELS, model_name
    from pistar.config.presets import PRESETS

    table = make_table("model", "kind", "vlm", "action expert", "vision", "pixels", "actions")
    for name, config in MODELS.items():
        experts = [
            f"{gemma.width} × {gemma.depth}" + (f", LoRA {gemma.lora.rank}" if gemma.lora else "")
            for gemma in (config.vlm, config.expert)
        ]
        vision = f"{config.vision.width} × {config.vision.depth}"
        chunk = f"{config.action_horizon} × {config.action_dim}"
        table.add_row(name, config.model_type, *experts, vision, str(config.image_size), chunk)
    heads = ("train", "model", "method", "learns from", "batch", "steps")
    # Narrow enough for 80 columns: a name or number that is cut off is another one.
    columns = (Column(head, overflow="fold", no_wrap=head != "learns from") for head in heads)
    runs = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name, run in PRESETS.items():
        where = f"{run.robot} data" if run.online is None else run.online.environment.replace(",", ", ")
        sizes = (str(run.batch_size), str(run.steps))
        runs.add_row(name, model_name(run.model), run.algorithm.name, where, *sizes)
    standard_output().print(table, runs)


def _train_help(args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Train a policy from logged data or from its own rollouts: pistar train PRESET [options]."""
    train(args)


def _plan_help(args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Compute a run's memory on each device, and what would make it fit: pistar plan PRESET --devices 8."""
    plan(args)


def _sweep_help(args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
    """Compare settings over seeds, with a table: pistar sweep PRESET --param algorithm.group_size=4,8 --seeds 2."""
    sweep(args)


WITH_PRESET: dict[str, Callable[[Sequence[str]], None]] = {"train": train, "plan": plan, "sweep": sweep}
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
    "doctor": doctor,
    "data info": info,
    "data stats": stats,
    "data convert": convert,
    "data check": check,
    "data show": show,
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
    """Run one command. A user's mistake is one line on stderr and exit code 1."""
    try:
        try:
            _main(sys.argv[1:] if args is None else args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(128 + signal.SIGPIPE)


def _output_is_closed() -> bool:
    """Whether nobody reads the output any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    return bool(poll.poll(0))


def _main(args: Sequence[str]) -> None:
    if list(args[:1]) == ["data"]:
        if len(args) == 1 or args[1] in ("-h", "--help"):
            _data_help()
            sys.exit(0 if len(args) > 1 else 2)
        args = [" ".join(args[:2]), *args[2:]]  # one command in two words
    if list(args) == ["--version"]:
        Console().print(f"pistar {pistar.__version__}", highlight=False)
        return
    try:
        _dispatch(args)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted.")
        sys.exit(130)
    except (UserError, PermissionError, FileExistsError, NotADirectoryError) as error:
        if isinstance(error, OSError):
            error = UserError(f"{error.filename}: {error.strerror}; check the path and its permissions.")
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        sys.exit(1)


def _dispatch(args: Sequence[str]) -> None:
    if args and args[0] in WITH_PRESET:
        WITH_PRESET[args[0]](args[1:])
        return
    if args and not args[0].startswith("-") and args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1) or list(COMMANDS)
        raise UserError(f"there is no command {args[0]!r}; try {', '.join(near)}.")
    if args and args[0] == "import" and any(arg.split("=")[0] == "--format" for arg in args):
        raise UserError(  # or tyro would suggest the options of other commands
            "import has no --format: it finds out the source's format itself and writes openpi; leave it out, or use "
            "`pistar export` to write another."
        )
    with joined_docstrings():
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="pistar", description="RL post-training for π₀-family robot policies.", args=args
        )
