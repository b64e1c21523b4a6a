"""Training from logged data, top to bottom: prepare, initial state, then batches through one compiled update.

Everything that decides a number derives from (seed, step) or is in the checkpoint, so a run that was killed continues
to the bit from its last checkpoint.
"""

import itertools
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from pistar.agents.base import abstract_state
from pistar.checkpoints.manager import Saver, parts_of, restore
from pistar.config.train import RLTrainConfig
from pistar.distributed.compilation_cache import use_compilation_cache
from pistar.distributed.sharding import state_sharding
from pistar.distributed.stop_request import StopRequest
from pistar.telemetry.memory import MemoryMonitor
from pistar.telemetry.metrics import MetricsLog, MetricSums, add_sums, open_trackers
from pistar.telemetry.progress import ProgressLine
from pistar.training.critic_audit import Audit
from pistar.training.dispatch import make_dispatch, updates_of
from pistar.training.run_folder import compare_contracts, find_start, take_over
from pistar.training.setup import Run, describe, initial_state, prepare, print_lines, print_state
from pistar.types import PolicyBatch


def train(
    config: RLTrainConfig,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    debug: bool = False,
) -> Path | None:
    """Train to the last step. Returns the last checkpoint, or None if none was made.

    `debug` prints how the state is split over the devices, what is wrong with it, and the memory at each stage.
    """
    use_compilation_cache()
    checkpoints = config.folder / "checkpoints"
    config, start_from = find_start(config, console, resume=resume, overwrite=overwrite)
    run = prepare(config, dry=dry_run)
    if start_from is not None:
        compare_contracts(checkpoints / str(start_from), run.context.contract)
    describe(run, console, start_from)
    abstract = abstract_state(run.agent)
    if dry_run:
        _check_shapes(run, abstract, console)
        return None
    where = state_sharding(abstract, run.mesh)
    dispatch, audit, memory = make_dispatch(run.agent, where), Audit.of(run), MemoryMonitor()
    seed, agent = jax.random.key(config.seed), run.agent
    memory.mark("start")
    with StopRequest() as stop, ProgressLine(console, config.steps, config.batch_size) as line, jax.set_mesh(run.mesh):
        sums: MetricSums = {}
        if start_from is None:
            line.show("loading weights" if config.checkpoint else "making fresh weights")
            state = initial_state(run, where)
        else:
            line.show(f"restoring step {start_from}")
            state, sums = restore(checkpoints, start_from, abstract, where, lambda s: parts_of(agent, s))
        step = start_from or 0
        memory.mark("loaded", agent.components(state))
        if debug:
            print_state(run, state, console)
        take_over(config, overwrite=overwrite)
        with closing(_open_log(config, step)) as log, closing(_open_saver(run)) as saver:
            batches = _dispatches(run, step)
            line.show("compiling the update")
            while step < config.steps and not stop.requested():
                with line.waiting_for_data():
                    taken = next(batches)
                state, measured = dispatch(state, taken, seed, jnp.int32(step))
                sums = add_sums(sums, measured)
                step += len(taken)
                line.stepped(step, state)
                if step - len(taken) == (start_from or 0):
                    memory.mark("first update", {**agent.components(state), "batch": taken})
                if step % config.log_every == 0 or step == config.steps:
                    log.log(step, sums, line.rates(log.latest))
                    sums = {}
                if audit is not None and audit.due(step):
                    with line.outside_updates("auditing the critic", state):
                        log.log(step, {}, found := audit.run(state))
                        audit.warn(found, console)
                        memory.mark(f"audit at {step}", agent.components(state))
                if step % config.save_every == 0 or step == config.steps:
                    saver.save(step, parts_of(agent, state), sums, log.flush)
            batches.close()
            if stop.received and step % config.save_every and step < config.steps:
                line.show(f"saving step {step}")
                saver.save(step, parts_of(agent, state), sums, log.flush)
            saver.wait()
            memory.mark("end", agent.components(state))
    if debug:
        print_lines(memory.report(), console)
    if stop.received:
        saved = "saved. Continue with --resume." if step else "there is nothing to save yet."
        console.print(f"Stopped on request at step {step}; {saved}", highlight=False)
    return checkpoints / str(step) if step else None


def _open_log(config: RLTrainConfig, step: int) -> MetricsLog:
    return MetricsLog(config.folder, open_trackers(config), after=step)


def _open_saver(run: Run) -> Saver:
    config, context = run.config, run.context
    folder = config.folder / "checkpoints"
    return Saver(folder, context.norm_stats, context.contract, config.keep_last, config.keep_every)


def _dispatches(run: Run, step: int) -> Generator[tuple[Any, ...]]:
    """Batches from that step on, as many at a time as one call takes."""
    stream = run.loader.policy_batches if _imitates(run) else run.loader.batches
    batches = stream(step, run.config.steps)
    while group := tuple(itertools.islice(batches, run.config.updates_per_dispatch)):
        yield group


def _imitates(run: Run) -> bool:
    """Whether the agent learns from batches without next observations, which are half of a loader's work."""
    return isinstance(run.agent.abstract_batch(1), PolicyBatch)


def _check_shapes(run: Run, abstract: object, console: Console) -> None:
    """Trace the update with real batches, without computing anything. With several hosts each has some of the rows."""
    sample = run.loader.sample_policy_batch if _imitates(run) else run.loader.sample_batch
    batches = tuple(sample(step) for step in range(run.config.updates_per_dispatch))
    whole = jax.tree.map(
        lambda rows: jax.ShapeDtypeStruct((rows.shape[0] * jax.process_count(), *rows.shape[1:]), rows.dtype),  # type: ignore[no-untyped-call]
        batches,
    )
    jax.eval_shape(updates_of(run.agent), abstract, whole, jax.random.key(0), jnp.int32(0), jnp.float32(1.0))
    console.print("Dry run: data, weights and shapes fit together. Nothing was trained or written.", highlight=False)
