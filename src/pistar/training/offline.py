"""Training from logged data, top to bottom: prepare, first state, then batches through one compiled step.

Everything that decides a number derives from (seed, step) or is in the checkpoint, so a run that was killed goes on to
the bit where its last checkpoint stands.
"""

import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray
from rich.console import Console

from pistar.agents.acrlpd import AcrlpdState
from pistar.agents.flow_bc import FlowBC, FlowBCState
from pistar.config import check_writable
from pistar.data.frames import cache_home
from pistar.errors import UserError
from pistar.tables import to_table
from pistar.training.audit import Audit
from pistar.training.config import (
    DECIDES_HELD_OUT,
    HARMLESS,
    SET_FOR_GOOD,
    RLTrainConfig,
    differences,
    load_config,
    save_config,
)
from pistar.training.contract import CONTRACT_FILE, Contract, read_contract
from pistar.training.hosts import in_step, is_leader, meet, preempted, several
from pistar.training.memory import MemoryMonitor
from pistar.training.metrics import MetricsLog, Window, add_windows, as_window, trackers_of
from pistar.training.plan import abstract_state, components
from pistar.training.progress import ProgressLine, describe
from pistar.training.run import Run, first_params, first_state, prepare
from pistar.training.saving import Saver, parts_of, restore, saved_steps
from pistar.training.sharding import dtype_problems, optimizer_problems, state_problems, state_sharding, tree_report

CONFIG_FILE = "config.yaml"


def train(
    config: RLTrainConfig,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    debug: bool = False,
) -> Path | None:
    """Run it to its last step. Returns the last checkpoint, or nothing where none was made.

    `debug` prints how the state lies on the devices, what is wrong with it, and the memory taken at each stage.
    """
    use_compilation_cache()
    folder, checkpoints = config.folder, config.folder / "checkpoints"
    start_from = claim_folder(config, console, resume=resume, overwrite=overwrite)
    run = prepare(config, dry=dry_run)
    if start_from is not None:
        compare_contracts(checkpoints / str(start_from), run.contract)
    describe(run, console)
    abstract = abstract_state(config, run.agent)
    where = state_sharding(abstract, run.mesh)
    if dry_run:
        _check_shapes(run, abstract, console)
        return None
    # The state given is used up, and stays where it is.
    dispatch = in_step("the update", jax.jit(make_dispatch(run.agent), donate_argnums=0, out_shardings=(where, None)))

    audit, memory, seed = Audit.of(run), MemoryMonitor(), jax.random.key(config.seed)
    memory.mark("start")
    with StopRequest() as stop, ProgressLine(console, config) as line, jax.set_mesh(run.mesh):
        weights = "loading weights" if config.checkpoint else "making fresh weights"
        line.says(weights if start_from is None else f"restoring step {start_from}")
        window: Window = {}
        if start_from is None:
            # As one program: the compilation cache keeps it, where hundreds of small ones are made anew each time.
            begin = jax.jit(functools.partial(first_state, run.agent), donate_argnums=0, out_shardings=where)
            state = in_step("the first state", begin)(first_params(config, run.mesh), seed)
        else:
            state, window = restore(checkpoints, start_from, abstract, where, lambda s: parts_of(run.agent, s))
        step = start_from or 0
        memory.mark("loaded", **components(state))
        if debug:
            _print_tree(state, run, console)

        # Whatever could be refused has been, on every host: only now an old run goes, or its settings.
        meet("everything is loaded")
        if is_leader():
            if overwrite and folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            save_config(folder / CONFIG_FILE, config)
        meet("the folder is ready")
        run_name = str(config.exp_name or config.name)
        with (
            closing(
                MetricsLog(folder, trackers_of(config.trackers, folder, run_name, to_table(config)), after=step)
            ) as log,
            closing(Saver(checkpoints, run.norm_stats, run.contract, config.keep_last, config.keep_every)) as saver,
        ):
            batches = _dispatches(run, step)
            line.says("compiling the update")
            while step < config.steps and not stop.requested():
                with line.waits():
                    taken = next(batches)
                state, measured = dispatch(state, taken, seed, jnp.int32(step))
                window = add_windows(window, measured)
                step += len(taken)
                line.stepped(step, state)
                if step - len(taken) == (start_from or 0):
                    memory.mark("first update", **components(state), batch=taken)
                if step % config.log_every == 0 or step == config.steps:
                    log.log(step, window, line.rates(log.latest))
                    window = {}
                if audit is not None and step % config.audit_every == 0:
                    with line.aside("auditing the critic", state):
                        log.log(step, {}, found := audit.look(state))
                        audit.warn(found, console)
                        memory.mark(f"audit at {step}", **components(state))
                if step % config.save_every == 0 or step == config.steps:
                    saver.save(step, parts_of(run.agent, state), window, log.flush)
            batches.close()
            if stop.heard and step % config.save_every and step < config.steps:
                line.says(f"saving step {step}")
                saver.save(step, parts_of(run.agent, state), window, log.flush)
            saver.wait()
            memory.mark("end", **components(state))
    if debug:
        for told in memory.report():
            console.print(told, markup=False, highlight=False)
    if stop.heard:
        kept = "saved. Go on with --resume." if step else "there is nothing to save yet."
        console.print(f"Stopped on request at step {step}; {kept}", highlight=False)
    return checkpoints / str(step) if step else None


# --- The step ---------------------------------------------------------------------------------------------------------


Dispatch = Callable[[Any, tuple[Any, ...], PRNGKeyArray, Int[Array, ""]], tuple[Any, Window]]


def make_dispatch(agent: Any) -> Dispatch:  # noqa: ANN401  # any that learns from such batches
    """The whole of one update, or of several in a row, to be one program; the same one for every seed."""

    def dispatch(
        state: object, batches: tuple[Any, ...], seed: PRNGKeyArray, step: Int[Array, ""]
    ) -> tuple[Any, Window]:
        def update(state: object, given: tuple[Any, Int[Array, ""]]) -> tuple[Any, Window]:
            batch, step = given
            state, metrics = agent.update(state, batch, jax.random.fold_in(seed, step))
            return state, as_window(metrics)

        if len(batches) == 1:
            return update(state, (batches[0], step))
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
        state, windows = jax.lax.scan(update, state, (stacked, step + jnp.arange(len(batches))))
        return state, jax.tree.map(jnp.sum, windows)

    return dispatch


def _dispatches(run: Run, step: int) -> Generator[tuple[Any, ...]]:
    """Batches from that step on, as many at a time as one call takes."""
    config = run.config
    stream = run.loader.policy_batches if isinstance(run.agent, FlowBC) else run.loader.batches
    batches = stream(step, config.steps)
    while group := tuple(batch for _, batch in zip(range(config.updates_per_dispatch), batches, strict=False)):
        yield group


# --- The state --------------------------------------------------------------------------------------------------------


def _check_shapes(run: Run, abstract: object, console: Console) -> None:
    """A real batch through the real update, but only its shapes. Of several hosts each has some of the rows."""
    batches = tuple(
        run.loader.sample_policy_batch(step) if isinstance(run.agent, FlowBC) else run.loader.sample_batch(step)
        for step in range(run.config.updates_per_dispatch)
    )
    whole = jax.tree.map(
        lambda rows: jax.ShapeDtypeStruct((rows.shape[0] * jax.process_count(), *rows.shape[1:]), rows.dtype),  # type: ignore[no-untyped-call]
        batches,
    )
    jax.eval_shape(make_dispatch(run.agent), abstract, whole, jax.random.key(0), jnp.int32(0))
    console.print("Dry run: data, weights and shapes agree. Nothing was trained or written.", highlight=False)


def _print_tree(state: object, run: Run, console: Console) -> None:
    reports = tree_report(state)
    whole = sum(report.bytes_on_device for report in reports)
    large = [report for report in reports if report.bytes_on_device >= whole / 500]
    for report in large:
        console.print(str(report), markup=False, highlight=False)
    rest = whole - sum(report.bytes_on_device for report in large)
    told = f"debug: {len(reports) - len(large)} smaller arrays, {rest / 1e6:.3f} MB; all {len(reports)} together "
    told += f"{whole / 1e6:.3f} MB on each device"
    console.print(told, markup=False, highlight=False)
    policy = state.policy if isinstance(state, AcrlpdState) else state
    assert isinstance(policy, FlowBCState)
    problems = state_problems(state, run.mesh)
    problems += dtype_problems(policy.trained, "float32") + dtype_problems(policy.frozen, "bfloat16")
    problems += optimizer_problems(policy.trained, policy.optimizer)
    if isinstance(state, AcrlpdState):
        problems += optimizer_problems(state.critic, state.critic_optimizer)
    for problem in problems or ["nothing is wrong with the state"]:
        console.print(f"debug: {problem}", markup=False, highlight=False)


# --- The folder -------------------------------------------------------------------------------------------------------


def claim_folder(config: RLTrainConfig, console: Console, *, resume: bool, overwrite: bool) -> int | None:
    """The step to go on from; nothing for a new run."""
    folder = config.folder
    check_writable("The run's folder", folder)
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite deletes it; give one of them.")
    steps = saved_steps(folder / "checkpoints")
    if resume:
        if not (folder / CONFIG_FILE).exists():
            raise UserError(f"{folder} holds no run to resume; check --exp-name, or leave --resume out to start one.")
        _compare_configs(load_config(folder / CONFIG_FILE), config, console)
        if steps and steps[-1] >= config.steps:
            raise UserError(
                f"{folder} is at step {steps[-1]} of {config.steps} already; raise --steps to train it further."
            )
        if steps and steps[-1] % config.updates_per_dispatch and not config.practises:
            raise UserError(
                f"{folder} is at step {steps[-1]}, no multiple of updates_per_dispatch {config.updates_per_dispatch}; "
                "go on with 1, or with a divisor."
            )
        if not steps:
            console.print("note: the run has saved nothing yet; it begins again.", markup=False, highlight=False)
            return None
        return steps[-1]
    held = folder.exists() and any(folder.iterdir())
    if overwrite and held and not (folder / CONFIG_FILE).exists():
        raise UserError(f"{folder} holds no run, so --overwrite will not delete it; choose another --exp-name.")
    if held and not overwrite:
        raise UserError(
            f"{folder} holds a run{f' at step {steps[-1]}' if steps else ''}; go on with it by --resume, delete it by "
            "--overwrite, or choose another --exp-name."
        )
    return None


def _compare_configs(old: RLTrainConfig, new: RLTrainConfig, console: Console) -> None:
    if old.practises != new.practises:
        was, now = ("practised", "would not") if old.practises else ("learnt from data alone", "would practise")
        where = new.online.environment or "left out"
        raise UserError(
            f"{new.folder} {was} and now {now} (online.environment is {where}); start a new run from its checkpoint."
        )
    for name, (before, after) in differences(old, new).items():
        if name.startswith(SET_FOR_GOOD) or name.endswith(".type"):
            raise UserError(
                f"{name} was {before} and is now {after}; weights and optimiser were made for the old one: "
                f"keep it (--config {new.folder / CONFIG_FILE} has them all), or start a new run from the checkpoint."
            )
        if name not in HARMLESS:
            unseen = ", and episodes held out so far may be trained on" if name in DECIDES_HELD_OUT else ""
            console.print(
                f"note: {name} was {before} and is {after} from here on: not the run an uninterrupted one would be"
                f"{unseen}.",
                markup=False,
                highlight=False,
            )


def compare_contracts(checkpoint: Path, new: Contract) -> None:
    """The config names the data; this sees what became of it, of the tokenizer and of norm stats since."""
    old = read_contract(checkpoint / CONTRACT_FILE)
    if old.norm_stats_sha256 != new.norm_stats_sha256:
        raise UserError(
            f"{checkpoint} was trained with norm stats {old.norm_stats_sha256[:12]} and the data now gives "
            f"{new.norm_stats_sha256[:12]}: it has changed since; put it back, or keep the old ones by "
            f"--data.norm-stats {checkpoint / 'assets' / old.asset_id / 'norm_stats.json'}."
        )
    for name in ("robot", "tokenizer_sha256", "norm_kind"):
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            raise UserError(f"{checkpoint} was trained with {name} {was} and this run has {now}; use the old one.")


# --- The surroundings -------------------------------------------------------------------------------------------------


def use_compilation_cache() -> None:
    """Compiled programs are kept on disk, unless the user has said where or that they are not."""
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        settings.update("jax_compilation_cache_dir", str(cache_home() / "compiled"))
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.5)


class StopRequest:
    """SIGTERM, and the first Ctrl-C, as a wish to stop at the next step; of several hosts, SIGTERM to any of them."""

    def __init__(self) -> None:
        self.heard = False
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether to stop before the next step."""
        self.heard = preempted() or self.heard
        return self.heard

    def __enter__(self) -> "StopRequest":
        # Python lets no other thread set handlers; and for several hosts the runtime has its own.
        if threading.current_thread() is threading.main_thread() and not several():
            self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.heard = True
        signal.signal(number, self._before[number])  # a second one means it
