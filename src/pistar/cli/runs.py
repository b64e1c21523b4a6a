"""`pistar train`, `plan` and `sweep`: commands whose options are a preset's settings."""

import argparse
import contextlib
import difflib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pistar.cli.printing import joined_docstrings, note
from pistar.cli.printing import out as standard_output
from pistar.errors import UserError
from pistar.text import counted

if TYPE_CHECKING:
    from pistar.config.train import RLTrainConfig
    from pistar.planning.plan import Plan
    from pistar.sweep import Row


STOPPED = 75
"""Exit code of a run that was stopped before its end (EX_TEMPFAIL), for scripts that start it again."""


def _run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command that takes a training preset."""
    from pistar.config.presets import list_configs

    parser = argparse.ArgumentParser(
        prog=f"pistar {command}",
        description=f"{description} Settings of the preset are options: see PRESET --help. Sizes of the model and "
        "a few others can be set in YAML files only.",
        epilog=f"Presets: {', '.join(list_configs())}.",
        add_help=False,
        allow_abbrev=False,  # --seed is a setting, and not short for --seeds
    )
    parser.add_argument("preset", help="Name of the preset. `pistar presets` lists all of them.")
    parser.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="YAML file with settings that replace the preset's."
    )
    parser.add_argument(
        "--lora",
        action="store_true",
        help="Train LoRA adapters of OpenPI's sizes instead of all weights, and keep no average (EMA).",
    )
    return parser


def _read_run(parser: argparse.ArgumentParser, args: Sequence[str]) -> "tuple[argparse.Namespace, RLTrainConfig]":
    """The command's own options, and the run's settings from preset, file and options."""
    from pistar.config.migrate import flags_as_ours
    from pistar.config.presets import get_config, list_configs, with_lora
    from pistar.config.train import RLTrainConfig, load_config

    args, notes = flags_as_ours(args, list_configs())
    asked = "--help" in args or "-h" in args
    if not args or (asked and args[0].startswith("-")):
        parser.print_help()
        sys.exit(0 if asked else 2)
    resumed = None
    if args[0].startswith("-"):
        folder = _folder_to_resume(args)
        if folder is None or (str(folder) in list_configs() and not folder.exists()):
            raise UserError(_without_preset(parser.prog, args, list_configs()))
        from pistar.training.run_folder import settings_of_run

        resumed = settings_of_run(folder, say=notes.append)
        args = [resumed.name, *args]
    options, rest = parser.parse_known_args(args)
    config = get_config(options.preset) if resumed is None else resumed
    if options.config is not None:
        config = load_config(options.config, config, say=notes.append)
    for text in notes:
        note(text)
    if options.lora:
        config = with_lora(config)
    if asked:
        parser.print_help()
    _refuse_yaml_only(rest, config)
    log_every = config.log_every
    with joined_docstrings():
        config = tyro.cli(
            RLTrainConfig,
            prog=f"{parser.prog} {options.preset}",
            default=config,
            args=_none_for_tyro(rest, config),
            # An option for each setting and no --no-…: a flag is shown as what changes the default.
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
        )
    if config.online is not None and config.log_every != log_every:
        raise UserError(
            f"--log-every is {config.log_every}, and {options.preset} makes rollouts: it logs every iteration; leave "
            "--log-every out."
        )
    return options, config


def _folder_to_resume(args: Sequence[str]) -> Path | None:
    """The folder after --resume, if there is one."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--resume", nargs="?", type=Path)
    folder: Path | None = finder.parse_known_args(args)[0].resume
    return folder


def _refuse_yaml_only(args: Sequence[str], config: "RLTrainConfig") -> None:
    """Say of a setting that is not an option how it can be set."""
    from pistar.config.train import is_yaml_only

    names = {arg: arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")}
    how = "{} is not an option; write {} into a YAML file and give it as --config FILE."
    if refused := [how.format(arg, name) for arg, name in names.items() if is_yaml_only(config, name)]:
        raise UserError(" ".join(refused))


def _none_for_tyro(args: Sequence[str], config: "RLTrainConfig") -> list[str]:
    """Write None for `none`, as YAML and our errors have it, if a field may be None."""
    from pistar.config.train import may_be_none

    read, option = [], ""
    for arg in args:
        name, equals, value = arg.partition("=") if arg.startswith("--") else (option, "", arg)
        field = name.removeprefix("--").replace("-", "_")
        if value == "none" and may_be_none(config, field):
            arg = f"{name}=None" if equals else "None"
        read.append(arg)
        option = name if arg.startswith("--") and not equals else ""
    return read


def _without_preset(prog: str, args: Sequence[str], presets: Sequence[str]) -> str:
    """The error if options come first: which preset is meant, if one is named further on or by a file."""
    named = [arg for arg in args if arg in presets] + [stem for arg in args if (stem := Path(arg).stem) in presets]
    remedy = f"put it first: {prog} {named[0]} {args[0]} …" if named else "`pistar presets` lists them."
    return f"The first word after `{prog}` is {args[0]}, where a preset's name belongs; {remedy}"


def train(args: Sequence[str]) -> None:
    """pistar train PRESET [options] [--any.setting value]"""
    parser = _run_parser(
        "train", "Train a policy: from logged data, or (ript_…, acrlpd_online_…) from its own rollouts in a simulator."
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="Continue from the run's last checkpoint. With the run's folder (runs/NAME), no preset is needed.",
    )
    parser.add_argument("--overwrite", action="store_true", help="Delete an existing run of the same name first.")
    parser.add_argument("--dry-run", action="store_true", help="Check settings, data and checkpoint without training.")
    parser.add_argument("--debug", action="store_true", help="Stop at the first NaN, and print state and memory.")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="Join the other hosts found by Slurm, Open MPI or Kubernetes.",
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="Address of host 0 in a run on several hosts.")
    parser.add_argument("--hosts", type=int, metavar="N", help="Number of hosts in a run on several hosts.")
    parser.add_argument("--host", type=int, metavar="I", help="Number of this host, counted from 0.")
    options, config = _read_run(parser, args)
    if options.resume and Path(options.resume).resolve() != config.folder.resolve():
        raise UserError(
            f"--resume names {options.resume} and the other options {config.folder}; resume a run by its folder alone "
            f"(pistar train --resume {options.resume}), or by its preset and --exp-name."
        )
    options.resume = options.resume is not None
    if options.debug:
        import jax

        jax.config.update("jax_debug_nans", True)  # type: ignore[no-untyped-call]
    from pistar.distributed import multihost
    from pistar.online import loop as online
    from pistar.online.history import has_ended, has_learnt_nothing
    from pistar.training import offline

    if options.distributed or any(given is not None for given in (options.coordinator, options.hosts, options.host)):
        say = Console(stderr=True, soft_wrap=True, highlight=False).print
        multihost.join_hosts(options.coordinator, options.hosts, options.host, say=say)
    leader = multihost.is_leader()
    console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not leader)
    how = {name: getattr(options, name) for name in ("resume", "overwrite", "dry_run", "debug")}
    with multihost.explain_lost_hosts():
        if config.online is not None:
            saved = online.train(config, console, **how)
        else:
            saved = offline.train(config, console, **how)
    multihost.leave_hosts()
    if saved is not None and leader:
        what = ", of the policy the run started with" if has_learnt_nothing(saved) else ""
        standard_output().print(f"Saved {saved}: an OpenPI checkpoint{what}.", markup=False)
    if not options.dry_run and (saved is None or (int(saved.name) < config.steps and not has_ended(saved))):
        sys.exit(STOPPED)


def plan(args: Sequence[str]) -> None:
    """pistar plan PRESET --devices N --device-memory GB [--any.setting value]"""
    parser = _run_parser("plan", "Compute a run's memory on each device, and what makes it fit; allocates nothing.")
    parser.add_argument(
        "--devices", type=int, default=1, help="Number of devices, summed over all hosts. The default is 1."
    )
    parser.add_argument(
        "--device-memory",
        type=float,
        default=80.0,
        metavar="GB",
        help="Memory of each device in GB (10⁹ bytes). The default is 80.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("plan.svg"), help="SVG file for the chart. The default is plan.svg."
    )
    options, config = _read_run(parser, args)
    if options.devices < 1 or not options.device_memory > 0:
        raise UserError(
            f"--devices is {options.devices} and --device-memory {options.device_memory:g}; give numbers above 0."
        )
    from pistar.config.presets import with_lora
    from pistar.distributed.compilation_cache import use_compilation_cache
    from pistar.distributed.sharding import make_mesh
    from pistar.planning.plan import make_plan, pretend_devices
    from pistar.planning.remedy import find_remedy
    from pistar.training.setup import check_batch

    pretend_devices(options.devices)
    check_batch(config)
    use_compilation_cache()
    memory = options.device_memory * 1e9
    with _status() as say:
        say("compiling the update: a minute or two at full size …")
        first = make_plan(config, make_mesh(config.fsdp_devices))
        remedy = None
        if not first.fits(memory):
            remedy = find_remedy(
                config,
                memory,
                lambda c: make_mesh(c.fsdp_devices),
                with_lora,
                say=lambda words: say(f"looking for options that fit: {words} …"),
            )
    plans = {"as it is": first} | ({} if remedy is None else {" ".join(remedy.options): remedy.plan})
    _print_plans(options, plans)
    console = standard_output()
    if first.fits(memory):
        console.print(f"It fits into {options.device_memory:g} GB.")
    elif remedy is not None:
        console.print(f"It does not fit into {options.device_memory:g} GB. This does:")
        instead = [option.split()[0] for option in remedy.options if " " in option]
        console.print(
            f"  pistar train {shlex.join(_without(args, '--devices', '--device-memory', '--out', *instead))} "
            f"{' '.join(remedy.options)}",
            markup=False,
        )
    else:
        raise UserError(
            f"{options.preset} does not fit into {counted(options.devices, 'device')} of {options.device_memory:g} GB, "
            "not even with adapters and one row at a time; use more devices, or larger ones."
        )


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done; not on a terminal, it prints lines."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with console.status("") as status:

        def say(words: str) -> None:
            status.update(words)
            if not console.is_terminal:
                console.print(words, markup=False)

        yield say


def _print_plans(options: argparse.Namespace, plans: "Mapping[str, Plan]") -> None:
    """Print memory and FLOPs of each plan as tables, and draw the memory."""
    from pistar.planning.plan import HEADROOM
    from pistar.report.charts import stacked_bars

    console, devices = standard_output(), counted(options.devices, "device")
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


def sweep(args: Sequence[str]) -> None:
    """pistar sweep PRESET --param a.b=1,2,3 [--param …] [--seeds N] [--any.field value]"""
    parser = _run_parser(
        "sweep", "Compare settings: each combination is run with two seeds (see --seeds), and a table shows all runs."
    )
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="FIELD=V,V",
        help="A setting and the values to compare. Repeat the option for more settings. Where peak_lr varies, decay_lr "
        "keeps its ratio to it, unless it varies too.",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=2,
        metavar="N",
        help="Number of runs per combination, with seeds from --seed on. The default is 2.",
    )
    parser.add_argument(
        "--metric",
        help="Metric to compare. The default is the evaluated success of online runs, and the loss of others.",
    )
    options, config = _read_run(parser, args)
    from pistar.sweep import Sweep, SweepRun, choose_metric, measured_names, parse_param, rows

    comparison = Sweep(options.preset, config, [parse_param(text) for text in options.param], options.seeds)
    metric = choose_metric(comparison, options.metric)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    done = sum(run.state == "finished" for run in comparison.runs)
    size = f"{counted(len(comparison.combinations), 'combination')} × {counted(len(comparison.seeds), 'seed')}"
    console.print(f"{size} in {comparison.folder}{f'; {done} finished before' if done else ''}", markup=False)

    def before(run: SweepRun, number: int) -> None:
        console.print(f"{number} of {len(comparison.runs)}: {run.label}; follow it in {run.log}", markup=False)

    def after(run: SweepRun) -> None:
        comparison.save(rows(comparison, metric), metric)
        if run.state != "finished":
            console.print(f"{run.label} {run.state}{f': {run.why}' if run.why else ''}", markup=False)

    whole = comparison.run(before, after)
    found = rows(comparison, metric)
    standard_output().print(_sweep_table(found, metric, comparison.seeds))
    standard_output().print(f"Wrote {comparison.save(found, metric)}", markup=False)
    if not whole:
        console.print("Stopped on request; the same command continues.")
        sys.exit(STOPPED)
    if bad := [run for run in comparison.runs if run.state != "finished"]:
        raise UserError(
            f"{len(bad)} of {counted(len(comparison.runs), 'run')} did not finish, the first {bad[0].label} (see "
            f"{bad[0].log}); the same command tries again."
        )
    if all(row.mean is None for row in found):
        names = measured_names(comparison)
        near = difflib.get_close_matches(metric, names, n=1) or names
        raise UserError(f"No run has measured {metric!r}; try --metric {', '.join(near)}. Nothing is run again.")


def _sweep_table(found: "Sequence[Row]", metric: str, seeds: Sequence[int]) -> Table:
    table = Table(title=Text(metric))
    for name in found[0].combination.values:
        table.add_column(name, overflow="fold")
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right")
    table.add_column("mean", justify="right")
    if any(row.interval is not None for row in found):
        table.add_column("95 %", justify="right")
    for row in found:
        cells = [
            Text(run.state if last is None else f"{last.value:.4g}" if last.of is None else f"{last.value:g}/{last.of}")
            for run, last in zip(row.runs, row.found, strict=True)
        ]
        counts, interval = row.counts, row.interval
        mean = "" if row.mean is None else f"{row.mean:.4g}" if counts is None else f"{counts[0]}/{counts[1]}"
        sure = [] if interval is None else [f"{interval[0]:.0%} to {interval[1]:.0%}"]
        table.add_row(*map(Text, row.combination.values.values()), *cells, mean, *sure)
    return table


def _without(args: Sequence[str], *options: str) -> list[str]:
    """The arguments without these options and their values."""
    kept, skip = [], False
    for arg in args:
        name, equals, _ = arg.partition("=")
        if not skip and name not in options:
            kept.append(arg)
        skip = not skip and name in options and not equals
    return kept
