"""Training from own rollouts, top to bottom: collect, learn, evaluate, check, save; again.

Everything that decides a number derives from (seed, iteration) or is in the checkpoint, so a run that was killed
continues to the bit from its last checkpoint.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from pistar.agents.base import abstract_state
from pistar.checkpoints.contract import Contract, merge_instructions, unknown_instructions_warning
from pistar.checkpoints.manager import Saver, parts_of, restore
from pistar.config.train import RLTrainConfig
from pistar.distributed.compilation_cache import use_compilation_cache
from pistar.distributed.multihost import all_gather, is_leader
from pistar.distributed.sharding import state_sharding
from pistar.distributed.stop_request import StopRequest
from pistar.online.auto_tune import tune
from pistar.online.collector import Collected, RolloutCollector
from pistar.online.environments import build_environments, find_run_tasks, pool_notes
from pistar.online.health import (
    Problem,
    find_problems,
    has_stopped_improving,
    must_leave,
    report_nothing_learnt,
    report_skipped,
    roll_back,
)
from pistar.online.history import RunHistory
from pistar.online.learner import OnlineLearner, UpdateScale
from pistar.online.registry import make_learner
from pistar.online.start_states import StartState, StartStateRecord, load_start_states, save_start_states
from pistar.online.status import StatusLines
from pistar.telemetry.events import Events
from pistar.telemetry.memory import MemoryMonitor, resident_bytes
from pistar.telemetry.metrics import MetricsLog, MetricSums, means, open_trackers
from pistar.training.run_folder import compare_contracts, find_start, take_over
from pistar.training.setup import OnlineRun, initial_state, prepare_online, print_lines, print_notes, print_state


def train(
    config: RLTrainConfig,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    debug: bool = False,
) -> Path | None:
    """Train to the last iteration. Returns the last checkpoint, or None if none was made.

    `debug` prints how the state is split over the devices, what is wrong with it, and the memory at each stage.
    """
    use_compilation_cache()
    tasks = find_run_tasks(config)
    checkpoints = config.folder / "checkpoints"
    config, start_from = find_start(config, console, resume=resume, overwrite=overwrite)
    run = prepare_online(config)
    if start_from is not None:
        compare_contracts(checkpoints / str(start_from), run.context.contract)
    print_notes(run.context.notes, console)
    status = StatusLines(run, console)
    with status.doing("building the simulators"):
        envs = build_environments(run, tasks)
    with envs, StopRequest() as stop, jax.set_mesh(run.mesh):
        where = state_sharding(abstract_state(run.agent), run.mesh)
        collector = RolloutCollector(run, envs)
        learner = make_learner(run, collector, where)
        instructions = [scene.instruction for scene in envs.scenes.values()]
        unlikely = unknown_instructions_warning(run.context.checkpoint_instructions, instructions)
        notes = [note for instruction in instructions for note in learner.check(instruction)]
        notes = [*notes, *config.algorithm.notes(), *_overlap_notes(run), *_log_notes(config), *pool_notes(run, envs)]
        status.describe(envs, notes, unlikely, start_from)
        if dry_run:
            status.dry_run(unlikely)
            return None
        loop = OnlineLoop(run, collector, learner, where, status, start_from)
        if debug:
            loop.print_state()
        take_over(config, overwrite=overwrite)
        loop.run(_contract_after(run, instructions), stop)
    if debug:
        print_lines(loop.memory.report(), console)
    status.end(loop.history, loop.iteration)
    return checkpoints / str(loop.iteration) if loop.iteration else None


def _contract_after(run: OnlineRun, instructions: Sequence[str]) -> Contract:
    """Add these instructions to the contract, if the checkpoint's own are known."""
    contract, known = run.context.contract, run.context.checkpoint_instructions is not None
    merged = merge_instructions(contract.instructions or (), instructions) if known else None
    return dataclasses.replace(contract, instructions=merged)


def _evaluates_after(run: OnlineRun, iteration: int) -> bool:
    """Whether an evaluation is due after that many iterations."""
    every = run.online.evaluate_every
    return iteration == run.config.steps or bool(every and iteration % every == 0)


def _pauses_after(run: OnlineRun, iteration: int) -> bool:
    """Whether no rollouts may be under way then: a checkpoint is saved, or the simulators are needed."""
    return _evaluates_after(run, iteration) or iteration % run.config.save_every == 0


def _overlap_notes(run: OnlineRun) -> list[str]:
    if run.online.overlap and all(_pauses_after(run, iteration) for iteration in range(1, run.config.steps)):
        return [
            "online.overlap is on, and nothing can overlap: every iteration is evaluated or saved; raise "
            "online.evaluate_every and save_every"
        ]
    return []


def _log_notes(config: RLTrainConfig) -> list[str]:
    if config.log_every == RLTrainConfig.log_every:
        return []
    return [f"log_every is {config.log_every} and changes nothing: an online run logs every iteration"]


@dataclasses.dataclass(frozen=True)
class Iteration:
    """What an iteration measured."""

    sums: MetricSums
    """Of its updates."""
    metrics: dict[str, float]
    evaluated: bool
    records: dict[StartState, StartStateRecord]
    """Of start states, as learnt from so far, whatever rollouts run beside."""
    problems: list[Problem] = dataclasses.field(default_factory=list)


class OnlineLoop:
    """An online run on its way: state, history, iteration."""

    def __init__(
        self,
        run: OnlineRun,
        collector: RolloutCollector,
        learner: OnlineLearner[Any, Any, Any],
        where: Any,  # noqa: ANN401  # shardings of the state
        status: StatusLines,
        start_from: int | None,
    ) -> None:
        self._run, self._config, self._online = run, run.config, run.online
        self._collector, self._learner, self._where, self._status = collector, learner, where, status
        self._checkpoints = run.config.folder / "checkpoints"
        self._start_from = start_from
        self.history, self.iteration, self.memory = RunHistory(), start_from or 0, MemoryMonitor()
        self.memory.mark("start")
        self._state = self._state_at(start_from)
        self._mark("loaded")
        if start_from is not None:
            folder = self._checkpoints / str(start_from)
            self.history = dataclasses.replace(RunHistory.load(folder), finished=False)
            load_start_states(folder, collector.start_states)
            learner.load_memory(folder)
        self._ahead: Future[Collected[Any]] | None = None
        """Rollouts of the next iteration, running beside the updates."""
        self._learnt_iterations, self._first_resident = 0, 0

    def _state_at(self, step: int | None) -> Any:  # noqa: ANN401  # the agent's own
        """The state as it was saved, or as it starts."""
        if step is None:
            return initial_state(self._run, self._where)
        agent = self._run.agent
        return restore(self._checkpoints, step, abstract_state(agent), self._where, lambda s: parts_of(agent, s))[0]

    def _mark(self, moment: str) -> None:
        """Measure memory at this moment, the first time it comes."""
        if moment not in (earlier.name for earlier in self.memory.moments):
            self.memory.mark(moment, self._run.agent.components(self._state))

    def print_state(self) -> None:
        """Print how the state is split over the devices, and what is wrong with it."""
        print_state(self._run, self._state, self._status.console)

    def run(self, contract: Contract, stop: StopRequest) -> None:
        """Iterate until the last iteration, an early stop, a request to stop, or a problem around the run."""
        config, folder = self._config, self._config.folder
        events = Events(folder, self._status.console, after=self.iteration)
        trackers = open_trackers(config)
        saver = Saver(self._checkpoints, self._run.context.norm_stats, contract, config.keep_last, config.keep_every)
        with (
            closing(MetricsLog(folder, trackers, after=self.iteration if self._start_from is not None else -1)) as log,
            closing(saver),
            self._beside() as beside,
            events.noting_what_ends(lambda: self.iteration),
        ):
            if self._start_from is None:
                self._evaluate_start(events, log)
            leave = False
            while self.iteration < config.steps and not (self.history.finished or leave or stop.requested()):
                collected = self._collect(events)
                self._mark("first rollouts")
                measured = self._learn(collected, beside)
                self._mark("first updates")
                measured = self._evaluate(measured, events, log)
                measured = self._check(measured, saver, events)
                self.history.updates = self._learner.updates(self._state)
                self.history.finished = self.iteration == config.steps or has_stopped_improving(
                    self._online, self.history, self.iteration, events
                )
                leave = must_leave(measured.problems, self.iteration, events)
                self._save(measured, saver, log, due=leave or stop.requested())
            saver.wait()
            self._mark("end")
            report_nothing_learnt(self.history, self.iteration, folder, events)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[ThreadPoolExecutor]:
        # The mesh is each thread's own: without it the acting program would be compiled a second time.
        with ThreadPoolExecutor(1, "rollouts", initializer=jax.set_mesh, initargs=(self._run.mesh,)) as beside:
            yield beside

    def _evaluate_start(self, events: Events, log: MetricsLog) -> None:
        """Evaluate the policy the run starts with."""
        with self._status.doing("evaluating the policy the run starts with"):
            found, faults = self._collector.evaluate(self._learner.snapshot(self._state, 0))
        self._status.note_faults(events, 0, faults, "episode")
        self.history.record_evaluation(0, found, self._online.min_gain)
        log.log(0, {}, found)
        self._status.start(found)

    def _collect(self, events: Events) -> Collected[Any]:
        """This iteration's rollouts, already under way or made now."""
        with self._status.doing("collecting rollouts", self.iteration + 1):
            if self._ahead is not None:
                collected = self._ahead.result()
            else:
                policy = self._learner.snapshot(self._state, self.iteration)
                collected = self._learner.collect(policy, self.iteration)
        self._ahead = None
        self._status.note_faults(events, self.iteration, collected.faults, "group")
        collected.metrics["rollout/policy_age"] = float(self.iteration - collected.version)
        return collected

    def _learn(self, collected: Collected[Any], beside: ThreadPoolExecutor) -> Iteration:
        """This iteration's updates; the next one's rollouts start beside them, if they may overlap."""
        learnt_from = self._learner.take_in(collected.kept)
        collected = dataclasses.replace(collected, kept=())  # the learner's now, to keep or to forget
        records = self._collector.start_states.copy_records()
        if self._online.overlap and not _pauses_after(self._run, self.iteration + 1):
            policy = self._learner.snapshot(self._state, self.iteration, own_copy=True)
            self._ahead = beside.submit(self._learner.collect, policy, self.iteration + 1)
        scale = UpdateScale(self.history.lr_scale, self.history.epoch_scale)
        with self._status.doing("learning", self.iteration + 1):
            self._state, sums, learnt = self._learner.learn(self._state, learnt_from, self.iteration, scale)
        learnt |= {"tuning/lr_scale": scale.lr, "tuning/epoch_scale": scale.epochs}
        self.iteration += 1
        return Iteration(sums, collected.metrics | learnt, evaluated=False, records=records)

    def _evaluate(self, measured: Iteration, events: Events, log: MetricsLog) -> Iteration:
        """Evaluate if an evaluation is due; log and show the iteration."""
        found: dict[str, float] = {}
        if _evaluates_after(self._run, self.iteration):
            with self._status.doing("evaluating", self.iteration):
                found, faults = self._collector.evaluate(self._learner.snapshot(self._state, self.iteration))
            self._status.note_faults(events, self.iteration - 1, faults, "episode")
        metrics = measured.metrics | found
        log.log(self.iteration, measured.sums, metrics)
        self._status.iteration(self.iteration, metrics, evaluated=bool(found))
        metrics = all_gather("measured", metrics | means(measured.sums))[0]
        return dataclasses.replace(measured, metrics=metrics, evaluated=bool(found))

    def _check(self, measured: Iteration, saver: Saver, events: Events) -> Iteration:
        """Check the run's health; roll back, or record the evaluation and tune."""
        online, history, metrics = self._online, self.history, measured.metrics
        resident = self._resident(metrics)
        problems = list(find_problems(online.health, history, metrics, resident))
        report_skipped(metrics, self.iteration, events)
        by_policy = any(problem.cause == "policy" for problem in problems)
        measured = dataclasses.replace(measured, problems=problems)
        if by_policy and roll_back(online.health, history, self.iteration, problems, events):
            return self._back_to_good(measured, saver)
        if measured.evaluated or not online.evaluate_every:  # a collapse shows only in an evaluation
            history.rollbacks = 0
        history.weight_norm = history.weight_norm or metrics.get("train/weight_norm")
        if measured.evaluated:
            history.record_evaluation(self.iteration, metrics, online.min_gain)
        if self._config.algorithm.tunes_itself:
            for name, reason in tune(history, metrics):
                events.note(self.iteration - 1, f"auto-tune, {name}", reason, "from the next iteration on")
        return measured

    def _back_to_good(self, measured: Iteration, saver: Saver) -> Iteration:
        """Restore the last good state. Rollouts of the bad policy, if any are under way, count for nothing."""
        if self._ahead is not None:
            self._ahead.result()  # its simulators must be free
            self._ahead, self._collector.start_states.records = None, measured.records
            measured = dataclasses.replace(measured, records=self._collector.start_states.copy_records())
        saver.wait()
        self._state = self._state_at(self.history.good)
        return measured

    def _resident(self, metrics: dict[str, float]) -> tuple[int, int]:
        """Memory of a process when it had settled, and now: of the host that has grown most."""
        resident = resident_bytes()[0] - int(metrics.get("replay/bytes", 0))  # a replay buffer is meant to grow
        self._learnt_iterations += metrics["train/updates"] > 0
        if self._learnt_iterations <= 2:  # before, programs are still being compiled, and that takes memory
            self._first_resident = resident
        pairs = all_gather("memory", (self._first_resident, resident))
        first, now = max(pairs, key=lambda pair: pair[1] / max(pair[0], 1))
        return first, now

    def _save(self, measured: Iteration, saver: Saver, log: MetricsLog, *, due: bool) -> None:
        """Save if a checkpoint is due, or if this iteration is the best so far."""
        history, online = self.history, self._online
        due = due or self.iteration % self._config.save_every == 0 or history.finished
        if not due and not (measured.evaluated and history.best == self.iteration):
            return
        if not measured.problems and (measured.evaluated or not online.evaluate_every):
            history.good = self.iteration
        saver.spared = frozenset(step for step in (history.good, history.best) if step)
        parts = parts_of(self._run.agent, self._state)
        more = _memory_writer(history, measured.records, self._learner.memory_writer())
        saver.save(self.iteration, parts, {}, log.flush, more)


def _memory_writer(
    history: RunHistory, records: dict[StartState, StartStateRecord], learner: Callable[[Path], None]
) -> Callable[[Path], None]:
    """A function that writes what is remembered beside the weights, as it is now."""
    history = dataclasses.replace(history)

    def write(folder: Path) -> None:
        if is_leader():
            history.save(folder)
            save_start_states(folder, records)
        learner(folder)  # every host its own

    return write
