"""Everything a run needs before its first step: data, norm statistics, weights and their agreement, the agent."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import PRNGKeyArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pistar.agents.base import CRITIC, CRITIC_OPTIMIZER, FROZEN, OPTIMIZER, TRAINED, Agent, initial_key
from pistar.checkpoints.load import load_into
from pistar.checkpoints.reader import check_exists, open_checkpoint
from pistar.config.online import OnlineConfig
from pistar.config.train import RLTrainConfig
from pistar.data.chunk_source import ChunkSource
from pistar.data.loader import Loader
from pistar.distributed.multihost import compile_in_lockstep
from pistar.distributed.sharding import (
    dtype_problems,
    make_mesh,
    optimizer_problems,
    place,
    state_problems,
    state_sharding,
    tree_report,
)
from pistar.errors import UserError
from pistar.models.pi0 import Params, cast_frozen, init_params, param_shapes
from pistar.telemetry.metrics import check_trackers
from pistar.text import counted
from pistar.training.compatibility import RunContext, agree
from pistar.training.datasets import make_loader, make_sources, open_labelled, require_datasets, weigh_windows


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """An offline run, ready to start."""

    config: RLTrainConfig
    agent: Agent[Any, Any]
    mesh: jax.sharding.Mesh
    context: RunContext
    loader: Loader
    held_out: tuple[ChunkSource, ...]
    """What the critic is audited on: one source per dataset with held-out episodes."""
    episodes: tuple[int, int]
    """Number of training and of held-out episodes."""
    windows: int
    """Number of windows that can be drawn."""


@dataclasses.dataclass(frozen=True, eq=False)
class OnlineRun:
    """A run that makes its own data, ready to start."""

    config: RLTrainConfig
    online: OnlineConfig
    agent: Agent[Any, Any]
    mesh: jax.sharding.Mesh
    context: RunContext
    demonstrations: Loader | None

    @property
    def demonstration_rows(self) -> int:
        """Rows of a batch that are demonstrations."""
        return 0 if self.demonstrations is None else demonstration_rows(self.config, self.online)


def prepare(config: RLTrainConfig, *, dry: bool = False) -> Run:
    """Open and check everything of an offline run, what is cheap first. `dry` decodes only a few episodes."""
    mesh = _prepare_devices(config)
    data = [open_labelled(config, name) for name in require_datasets(config)]
    context = agree(config, data)
    sources = make_sources(config, data, context.inputs, dry=dry)
    train = [source.select(part.train) for source, part in zip(sources, data, strict=True)]
    train = weigh_windows(config, data, train)
    held_out = [source.select(part.held_out) for source, part in zip(sources, data, strict=True)]
    return Run(
        config=config,
        agent=config.make_agent(),
        mesh=mesh,
        context=_with_notes(context, sources),
        loader=make_loader(config, train, config.batch_size, mesh, dry=dry),
        held_out=tuple(source for source in held_out if len(source.starts)),
        episodes=(sum(len(part.train) for part in data), sum(len(part.held_out) for part in data)),
        windows=sum(len(source.starts) for source in train),
    )


def prepare_online(config: RLTrainConfig) -> OnlineRun:
    """Open and check everything of an online run but the simulator."""
    online = config.online
    assert online is not None
    mesh = _prepare_devices(config)
    if config.checkpoint is None:
        raise UserError(
            f"{config.name} starts from a policy that succeeds now and then; name it: --checkpoint PATH. "
            "`pistar train bc_…` makes one from demonstrations."
        )
    _check_demonstrations(config, online)
    rows = demonstration_rows(config, online)
    data = [open_labelled(config, name) for name in config.data.datasets] if rows else []
    context = agree(config, data)
    sources = make_sources(config, data, context.inputs, dry=False)
    train = [source.select(part.train) for source, part in zip(sources, data, strict=True)]
    loader = make_loader(config, train, rows, mesh, dry=False) if train else None
    return OnlineRun(config, online, config.make_agent(), mesh, _with_notes(context, sources), loader)


def demonstration_rows(config: RLTrainConfig, online: OnlineConfig) -> int:
    """Rows of a batch that would be demonstrations, equally many on every host."""
    hosts: int = jax.process_count()
    return hosts * round(online.demonstrations * config.batch_size / hosts)


def _check_demonstrations(config: RLTrainConfig, online: OnlineConfig) -> None:
    """Refuse a fraction that is nothing, or everything, of a host's few rows."""
    rows = demonstration_rows(config, online)
    if online.demonstrations and config.data.datasets and not 0 < rows < config.batch_size:
        raise UserError(
            f"online.demonstrations is {online.demonstrations}, {'all' if rows else 'none'} of the "
            f"{config.batch_size // jax.process_count()} rows a host has of a batch; raise batch_size, or change it."
        )


def _prepare_devices(config: RLTrainConfig) -> jax.sharding.Mesh:
    check_batch(config)
    if config.checkpoint is not None:
        check_exists(config.checkpoint)
    mesh = make_mesh(config.fsdp_devices)
    check_trackers(config.trackers)
    return mesh


def check_batch(config: RLTrainConfig) -> None:
    """Refuse a batch that cannot be split evenly over the devices and micro-batches."""
    if config.batch_size % (parts := jax.device_count() * config.gradient_accumulation):
        times = f" × gradient_accumulation {config.gradient_accumulation}" if config.gradient_accumulation > 1 else ""
        raise UserError(
            f"batch_size {config.batch_size} is not divisible by {counted(jax.device_count(), 'device')}{times}; "
            f"use a multiple of {parts}."
        )


def _with_notes(context: RunContext, sources: list[ChunkSource]) -> RunContext:
    """The context with the data's notes, each once."""
    notes = (*context.notes, *(note for source in sources for note in source.notes))
    return dataclasses.replace(context, notes=(*dict.fromkeys(notes),))


# --- The initial state ------------------------------------------------------------------------------------------------


def initial_params(config: RLTrainConfig, mesh: jax.sharding.Mesh) -> Params:
    """The checkpoint's weights, or fresh ones, split over the mesh. Adapters the checkpoint lacks are fresh."""
    model, key = config.model, jax.random.key(config.seed)
    shapes: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(lambda p: cast_frozen(model, p), param_shapes(model))
    where = state_sharding(shapes, mesh)

    def fresh(names: tuple[str, ...]) -> Params:
        where_these = {name: where[name] for name in names}
        make = jax.jit(lambda key: cast_frozen(model, init_params(model, key, names)), out_shardings=where_these)
        params: Params = compile_in_lockstep("fresh weights", make)(key)
        return params

    if config.checkpoint is None:
        return fresh(tuple(shapes))
    with open_checkpoint(config.checkpoint) as checkpoint:
        leaves = {leaf.name: leaf for leaf in checkpoint.leaves()}
        params: Params = load_into(
            shapes, leaves, fill=fresh, place=lambda name: place(leaves[name].read, shapes[name], where[name])
        )[0]
    return params


def initial_state(run: Run | OnlineRun, where: Any) -> Any:  # noqa: ANN401  # the agent's own, and its shardings
    """The state a run starts with, laid out as `where` says.

    Made by one program: the compilation cache keeps it, where hundreds of small ones would be compiled every time.
    """

    def start(params: Params, seed: PRNGKeyArray) -> Any:  # noqa: ANN401  # the agent's own
        return run.agent.init_from(params, initial_key(seed))

    program = jax.jit(start, donate_argnums=0, out_shardings=where)
    params = initial_params(run.config, run.mesh)
    return compile_in_lockstep("the initial state", program)(params, jax.random.key(run.config.seed))


# --- What it says of itself -------------------------------------------------------------------------------------------


def starts_from(config: RLTrainConfig, step: int | None) -> str:
    """Where the weights come from, in words. `step`: the step that is resumed from, if any."""
    return f"step {step} of {config.folder}" if step is not None else config.checkpoint or "fresh weights"


def describe(run: Run, console: Console, start_from: int | None = None) -> None:
    """Print a table of what will be trained on what, and the notes."""
    config, (train, held_out) = run.config, run.episodes
    table = Table(show_header=False, title=Text(config.name))
    contract = run.context.contract
    rows = {
        "model": f"{config.model.model_type}, chunks of {config.model.action_horizon} × {contract.action_dim}",
        "starts from": starts_from(config, start_from),
        "algorithm": _algorithm(config),
        "data": ", ".join(config.data.datasets),
        "episodes": f"{train} to train on, {held_out} held out; {counted(run.windows, 'window')}",
        "norm stats": f"{config.norm_kind}, from {run.context.norm_stats_from}",
        "batches": f"{config.steps} of {config.batch_size}",
        "devices": f"{jax.device_count()} {jax.devices()[0].platform}",
        "run": str(config.folder),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    console.print(table)
    print_notes(run.context.notes, console)


def print_notes(notes: tuple[str, ...], console: Console) -> None:
    """Print each on a line of its own."""
    print_lines((f"note: {note}" for note in notes), console)


def print_lines(lines: Iterable[str], console: Console) -> None:
    """Print these as they are."""
    for line in lines:
        console.print(line, markup=False, highlight=False)


def print_state(run: Run | OnlineRun, state: object, console: Console) -> None:
    """Print how the state is split over the devices, and what is wrong with it."""
    reports = tree_report(state)
    whole = sum(report.bytes_on_device for report in reports)
    large = [report for report in reports if report.bytes_on_device >= whole / 500]
    rest = whole - sum(report.bytes_on_device for report in large)
    lines = [str(report) for report in large]
    lines.append(
        f"debug: {len(reports) - len(large)} smaller arrays, {rest / 1e6:.3f} MB; all {len(reports)} together "
        f"{whole / 1e6:.3f} MB on each device"
    )
    parts = run.agent.components(state)
    problems = state_problems(state, run.mesh)
    for name, dtype in ((TRAINED, "float32"), (FROZEN, "bfloat16")):
        problems += dtype_problems(parts.get(name, {}), dtype)
    for name, optimizer in ((TRAINED, OPTIMIZER), (CRITIC, CRITIC_OPTIMIZER)):
        if name in parts:
            problems += optimizer_problems(parts[name], parts[optimizer])
    print_lines(
        [*lines, *(f"debug: {problem}" for problem in problems or ["nothing is wrong with the state"])], console
    )


def _algorithm(config: RLTrainConfig) -> str:
    described = config.algorithm.describe()
    if config.data.window_weights is not None:
        return f"{described}, windows drawn by {config.data.window_weights}"
    return f"{described}, on successful episodes" if config.data.only_successes else described
