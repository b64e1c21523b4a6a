"""The commands about runs: `pistar train`, `plan` and `sweep`, whose options are a preset's; `pistar data weigh`."""

import argparse
import difflib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pistar.data.words import counted
from pistar.errors import UserError

if TYPE_CHECKING:
    from pistar.training.config import RLTrainConfig
    from pistar.training.sweep import Row


STOPPED = 75
"""Exit code of a run that was asked to stop before its end, for scripts that start it again. Unix's "try again"."""


def _run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Of a command that takes a training preset."""
    from pistar.presets import list_configs

    parser = argparse.ArgumentParser(
        prog=f"pistar {command}",
        description=f"{description} Every field of the preset is an option: see PRESET --help.",
        epilog=f"Presets: {', '.join(list_configs())}.",
        add_help=False,
        allow_abbrev=False,  # --seed is a field, and no short form of --seeds
    )
    parser.add_argument("preset")
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings that replace the preset's")
    parser.add_argument("--lora", action="store_true", help="train adapters of OpenPI's sizes, and keep no average")
    return parser


def _read_run(parser: argparse.ArgumentParser, args: Sequence[str]) -> "tuple[argparse.Namespace, RLTrainConfig]":
    """The command's own options, and the run that preset, file and fields make."""
    from pistar.presets import get_config, list_configs, with_lora
    from pistar.training.config import RLTrainConfig, load_config
    from pistar.training.migrating import flags_as_ours

    args, notes = flags_as_ours(args, list_configs())
    asked = "--help" in args or "-h" in args
    if not args or (asked and args[0].startswith("-")):
        parser.print_help()
        sys.exit(0 if asked else 2)
    if args[0].startswith("-"):
        raise UserError(_without_preset(parser.prog, args, list_configs()))
    options, rest = parser.parse_known_args(args)
    config = get_config(options.preset)
    if options.config is not None:
        config = load_config(options.config, config, say=notes.append)
    for note in notes:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"note: {note}", markup=False)
    if options.lora:
        config = with_lora(config)
    if asked:
        parser.print_help()
    config = tyro.cli(
        RLTrainConfig,
        prog=f"{parser.prog} {options.preset}",
        default=config,
        args=_none_as_tyro_has_it(rest, config),
        config=(tyro.conf.AvoidSubcommands,),
    )
    return options, config


def _none_as_tyro_has_it(args: Sequence[str], config: "RLTrainConfig") -> list[str]:
    """Python's None for `none` as YAML, a sweep and our errors have it, where a field may be nothing."""
    from pistar.training.config import may_be_nothing

    read, option = [], ""
    for arg in args:
        name, equals, value = arg.partition("=") if arg.startswith("--") else (option, "", arg)
        field = name.removeprefix("--").replace("-", "_")
        if value == "none" and may_be_nothing(config, field):
            arg = f"{name}=None" if equals else "None"
        read.append(arg)
        option = name if arg.startswith("--") and not equals else ""
    return read


def _without_preset(prog: str, args: Sequence[str], presets: Sequence[str]) -> str:
    """What to say to options that come first: which preset is meant, if one is named further on or by a file."""
    named = [arg for arg in args if arg in presets] + [stem for arg in args if (stem := Path(arg).stem) in presets]
    remedy = f"put it first: {prog} {named[0]} {args[0]} …" if named else "`pistar presets` lists them."
    return f"The first word after `{prog}` is {args[0]}, where a preset's name belongs; {remedy}"


def train(args: Sequence[str]) -> None:
    """pistar train PRESET [options] [--any.field value]"""
    parser = _run_parser(
        "train", "Train a policy: from logged data, or (ript_…, acrlpd_online_…) by practising in a simulator."
    )
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
    from pistar.training import hosts, offline, online
    from pistar.training.health import has_ended, has_learnt_nothing

    if options.distributed or any(given is not None for given in (options.coordinator, options.hosts, options.host)):
        say = Console(stderr=True, soft_wrap=True, highlight=False).print
        hosts.join_hosts(options.coordinator, options.hosts, options.host, say=say)
    leader = hosts.is_leader()
    console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not leader)
    how = {"resume": options.resume, "overwrite": options.overwrite, "dry_run": options.dry_run}
    with hosts.lost_hosts_named():
        if config.practises:
            saved = online.train(config, console, **how)
        else:
            saved = offline.train(config, console, **how, debug=options.debug)
    hosts.part()
    if saved is not None and leader:
        what = ", of the policy it began with" if has_learnt_nothing(saved) else ""
        Console(soft_wrap=True, highlight=False).print(f"Saved {saved}: an OpenPI checkpoint{what}.", markup=False)
    if not options.dry_run and (saved is None or (int(saved.name) < config.steps and not has_ended(saved))):
        sys.exit(STOPPED)


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
    from pistar.presets import with_lora
    from pistar.report.charts import stacked_bars
    from pistar.training.offline import use_compilation_cache
    from pistar.training.plan import HEADROOM, find_remedy, make_plan, pretend
    from pistar.training.run import check_batch
    from pistar.training.sharding import make_mesh

    pretend(options.devices)
    check_batch(config)
    use_compilation_cache()
    memory = options.device_memory * 1e9
    waiting = Console(stderr=True, soft_wrap=True, highlight=False)
    with waiting.status(compiling := "compiling the update: a minute or two at full size …") as status:

        def say(words: str) -> None:
            status.update(words)
            if not waiting.is_terminal:
                waiting.print(words, markup=False)

        say(compiling)
        first = make_plan(config, make_mesh(config.fsdp_devices))
        remedy = None
        if not first.fits(memory):
            remedy = find_remedy(
                config,
                memory,
                lambda c: make_mesh(c.fsdp_devices),
                with_lora,
                say=lambda words: say(f"it does not fit; {words} …"),
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
        instead = [option.split()[0] for option in remedy.options if " " in option]
        console.print(
            f"  pistar train {shlex.join(_without(args, '--devices', '--device-memory', '--out', *instead))} "
            f"{' '.join(remedy.options)}",
            markup=False,
        )
    else:
        raise UserError(
            f"{options.preset} does not fit into {devices} of {options.device_memory:g} GB, not even with adapters and "
            "a row at a time; take more devices, or larger ones."
        )


def sweep(args: Sequence[str]) -> None:
    """pistar sweep PRESET --param a.b=1,2,3 [--param …] [--seeds N] [--any.field value]"""
    parser = _run_parser("sweep", "Compare settings: a run of each combination and seed, and a table of them all.")
    parser.add_argument("--param", action="append", default=[], metavar="FIELD=V,V", help="a field and its values")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each combination, from --seed on")
    parser.add_argument("--metric", help="what to compare; evaluation/sampled of ript_… presets, else loss")
    options, config = _read_run(parser, args)
    from pistar.training.sweep import Sweep, SweepRun, default_metric, measured, parse_param, rows

    comparison = Sweep(options.preset, config, [parse_param(text) for text in options.param], options.seeds)
    metric = options.metric or default_metric(config)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    done = sum(run.state == "finished" for run in comparison.runs)
    told = f"{counted(len(comparison.combinations), 'combination')} × {counted(len(comparison.seeds), 'seed')}"
    console.print(f"{told} in {comparison.folder}{f'; {done} finished before' if done else ''}", markup=False)

    def before(run: SweepRun, number: int) -> None:
        console.print(f"{number} of {len(comparison.runs)}: {run.told}; follow it in {run.log}", markup=False)

    def after(run: SweepRun) -> None:
        comparison.save(rows(comparison, metric), metric)
        if run.state != "finished":
            console.print(f"{run.told} {run.state}{f': {run.why}' if run.why else ''}", markup=False)

    whole = comparison.go(before, after)
    found = rows(comparison, metric)
    Console().print(_sweep_table(found, metric, comparison.seeds))
    Console(soft_wrap=True, highlight=False).print(f"Wrote {comparison.save(found, metric)}", markup=False)
    if not whole:
        console.print("Stopped on request; the same command goes on.")
        sys.exit(STOPPED)
    if bad := [run for run in comparison.runs if run.state != "finished"]:
        raise UserError(
            f"{len(bad)} of {counted(len(comparison.runs), 'run')} did not finish, the first {bad[0].told} (see "
            f"{bad[0].log}); the same command tries again."
        )
    if all(row.mean is None for row in found):
        names = measured(comparison)
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


def weigh(
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT.npz")],
    /,
    beta: float | None = None,
    clip: float | None = None,
) -> None:
    """Weigh every window of a critic's data by its advantage, to imitate by: train bc_… --data.weighed OUT.npz.

    Args:
        checkpoint: Of a run with a critic, in its folder: runs/NAME/checkpoints/STEP.
        out: The file to write.
        beta: Temperature, in deviations of the advantage; the run's own if left out.
        clip: The largest weight before all are divided by their mean; the run's own if left out.
    """
    from pistar.data.frames import progress_bar
    from pistar.training.offline import use_compilation_cache
    from pistar.training.weighing import weigh as weigh_windows

    if out.suffix != ".npz" or out.is_dir():
        raise UserError(f"{out} is no name for weights, which are an npz file; name FILE.npz.")
    if beta is not None and not 0 < beta < float("inf"):
        raise UserError(f"--beta is {beta}; a temperature is positive and finite (try 0.5).")
    if clip is not None and not 1 <= clip < float("inf"):
        raise UserError(f"--clip is {clip}; an average window weighs 1, clip above that (20).")
    use_compilation_cache()
    with progress_bar("Weighing windows") as bar:
        weighed = weigh_windows(checkpoint, out, beta=beta, clip=clip, progress=bar)
    console = Console(soft_wrap=True, highlight=False)
    console.print(weighed.told(), markup=False)
    console.print(f"Wrote {out}", markup=False)


def _without(args: Sequence[str], *options: str) -> list[str]:
    """Arguments less these options and their values."""
    kept, skip = [], False
    for arg in args:
        name, equals, _ = arg.partition("=")
        if not skip and name not in options:
            kept.append(arg)
        skip = not skip and name in options and not equals
    return kept
