"""Learning by practice, top to bottom: practise, learn from what was done, see how it goes, again.

Everything that decides a number derives from (seed, iteration) or is in the checkpoint, so a run that was killed goes
on where its last checkpoint stands, to the bit.
"""

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from pistar.config import AcrlpdConfig, RiptConfig
from pistar.data.words import counted
from pistar.envs.env import EnvOptions, find_tasks
from pistar.envs.vector import Environments
from pistar.errors import UserError
from pistar.tables import to_table
from pistar.training.config import RLTrainConfig, save_config
from pistar.training.contract import Contract, together, unheard
from pistar.training.counting import wilson
from pistar.training.evaluation import check_robot, needed_cameras, seen_by
from pistar.training.experience import Context, Start, load_starts, save_starts
from pistar.training.health import (
    Course,
    Events,
    back_to_good,
    has_stopped_improving,
    stopped_by_surroundings,
    take_note,
    tell_if_nothing_was_learnt,
    tell_of_skipped,
    troubles,
    tune,
)
from pistar.training.hosts import exchange, in_step, is_leader, meet, several
from pistar.training.learner import Stride
from pistar.training.learners import make_learner
from pistar.training.memory import resident_bytes
from pistar.training.metrics import MetricsLog, means, trackers_of
from pistar.training.offline import CONFIG_FILE, StopRequest, claim_folder, compare_contracts, use_compilation_cache
from pistar.training.plan import abstract_state
from pistar.training.practice import Practice, Practised, ToldFault
from pistar.training.run import OnlineRun, first_params, first_state, prepare_online
from pistar.training.saving import Saver, parts_of, restore
from pistar.training.sharding import state_sharding


def train(
    config: RLTrainConfig, console: Console, *, resume: bool = False, overwrite: bool = False, dry_run: bool = False
) -> Path | None:
    """Run it to its last iteration. Returns the last checkpoint, or nothing where none was made."""
    use_compilation_cache()
    tasks, online = _tasks(config), config.online
    folder, checkpoints = config.folder, config.folder / "checkpoints"
    start_from = claim_folder(config, console, resume=resume, overwrite=overwrite)
    run = prepare_online(config)
    if start_from is not None:
        compare_contracts(checkpoints / str(start_from), run.ground.contract)
    for note in run.ground.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    with console.status("building the simulators …"):
        envs = _build(run, tasks)
    with envs, StopRequest() as stop, jax.set_mesh(run.mesh):
        abstract = abstract_state(config, run.agent)
        where = state_sharding(abstract, run.mesh)
        practice = Practice(config, run.ground, envs)
        learner = make_learner(run, practice, where)
        instructions = [scene.instruction for scene in envs.scenes.values()]
        if unlikely := unheard(run.ground.taught, instructions):
            console.print(f"warning: {unlikely}.", markup=False, highlight=False)
        for scene in envs.scenes.values():
            for note in learner.check(scene.instruction):
                console.print(f"note: {note}", markup=False, highlight=False)
        _describe(run, envs, console)
        if dry_run:
            agree = "can work together, but see the warning above" if unlikely else "agree"
            console.print(f"Dry run: weights, data and environment {agree}. Nothing was trained or written.")
            return None

        def state_of(step: int | None) -> Any:  # noqa: ANN401  # the agent's own
            """As it was saved, or as it begins."""
            if step is not None:
                return restore(checkpoints, step, abstract, where, lambda s: parts_of(run.agent, s))[0]
            return begin(first_params(config, run.mesh), jax.random.key(config.seed))

        first = jax.jit(functools.partial(first_state, run.agent), donate_argnums=0, out_shardings=where)
        begin = in_step("the first state", first)
        state, course, iteration = state_of(start_from), Course(), start_from or 0
        if start_from is not None:
            course = dataclasses.replace(Course.load(checkpoints / str(start_from)), finished=False)
            load_starts(checkpoints / str(start_from), practice.starts)
            learner.recall(checkpoints / str(start_from))
        # Whatever could be refused has been, on every host: only now an old run goes, or its settings.
        meet("everything is loaded")
        if is_leader():
            if overwrite and folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            save_config(folder / CONFIG_FILE, config)
        meet("the folder is ready")
        events = Events(folder, console, after=iteration)
        contract = _also_taught(run, instructions)
        began, first_resident, learnt_from = time.monotonic(), 0, 0
        sinks = trackers_of(config.trackers, folder, str(config.exp_name or config.name), to_table(config))
        with (
            closing(MetricsLog(folder, sinks, after=iteration if start_from is not None else -1)) as log,
            closing(Saver(checkpoints, run.ground.norm_stats, contract, config.keep_last, config.keep_every)) as saver,
            # With the mesh, which is each thread's own: without, what acts would be compiled a second time for it.
            ThreadPoolExecutor(1, "practice", initializer=jax.set_mesh, initargs=(run.mesh,)) as beside,
            events.telling_what_ends(lambda: iteration),
        ):
            if start_from is None:
                with console.status("judging the policy it begins with …"):
                    found, faults = practice.judge(learner.behaviour(state, 0))
                _tell_of_faults(events, 0, faults, "episode")
                take_note(course, 0, found, online.min_gain)
                log.log(0, {}, found)
                console.print(f"before: {_told_evaluation(found)}", markup=False, highlight=False)
            ahead: Future[Practised[Any]] | None = None
            while iteration < config.steps and not course.finished and not stop.requested():
                with console.status(f"iteration {iteration + 1} of {config.steps}: practising …"):
                    done = ahead.result() if ahead else learner.practise(learner.behaviour(state, iteration), iteration)
                _tell_of_faults(events, iteration, done.faults, "group")
                done.measured["practice/policy_age"] = float(iteration - done.version)
                lessons = learner.lessons(done.kept)
                done = dataclasses.replace(done, kept=())  # theirs now, to keep or to forget
                known = practice.starts.copy_of_known()  # as learnt from so far, whoever practises meanwhile
                ahead = None
                if online.overlap and not _rests(config, iteration + 1):
                    behaviour = learner.behaviour(state, iteration, own_copy=True)
                    ahead = beside.submit(learner.practise, behaviour, iteration + 1)
                with console.status(f"iteration {iteration + 1} of {config.steps}: learning …"):
                    state, window, learnt = learner.learn(state, lessons, iteration, Stride(course.rate, course.epochs))
                iteration += 1
                found = {}
                if _judges(config, iteration):
                    with console.status(f"iteration {iteration} of {config.steps}: judging …"):
                        found, faults = practice.judge(learner.behaviour(state, iteration))
                    _tell_of_faults(events, iteration - 1, faults, "episode")
                learnt |= {"tuning/rate": course.rate, "tuning/epochs": course.epochs}
                log.log(iteration, window, done.measured | learnt | found)
                each = (time.monotonic() - began) / (iteration - (start_from or 0))
                left = timedelta(seconds=int(each * (config.steps - iteration)))
                console.print(
                    f"iteration {iteration}/{config.steps} · {_told_practice(done.measured)} · {_told_learning(learnt)}"
                    f"{' · ' + _told_evaluation(found) if found else ''} · {left} left",
                    markup=False,
                    highlight=False,
                )
                measured = exchange("measured", done.measured | learnt | means(window) | found)[0]
                resident = resident_bytes()[0] - int(learnt.get("replay/bytes", 0))  # which is meant to grow
                learnt_from += learnt["learning/updates"] > 0
                if learnt_from <= 2:  # before, programs are still to be compiled, and that takes memory
                    first_resident = resident
                grown = max(exchange("memory", (first_resident, resident)), key=lambda each: each[1] / max(each[0], 1))
                wrong = list(troubles(online.health, course, measured, (grown[0], grown[1])))
                tell_of_skipped(online.health, measured, iteration, events)
                in_trouble = any(whose == "policy" for whose, _, _ in wrong)
                if in_trouble and back_to_good(online.health, course, iteration, wrong, events):
                    if ahead is not None:
                        ahead.result()  # by a policy nobody wants; its simulators must be free
                        ahead, practice.starts.known = None, known  # as if it had not been
                        known = practice.starts.copy_of_known()
                    saver.wait()
                    state = state_of(course.good)
                else:
                    if found or not online.evaluate_every:  # a collapse is not seen before it is judged
                        course.rollbacks = 0
                    course.weight_norm = course.weight_norm or measured.get("learning/weight_norm")
                    if found:
                        take_note(course, iteration, found, online.min_gain)
                    if online.auto_tune:
                        for name, reason in tune(online.tuning, course, measured):
                            events.note(iteration - 1, f"auto-tune, {name}", reason, "from the next iteration on")
                course.updates = learner.updates(state)
                course.finished = iteration == config.steps or has_stopped_improving(online, course, iteration, events)
                leave = stopped_by_surroundings(wrong, iteration, events)
                saves = iteration % config.save_every == 0 or course.finished or leave or stop.requested()
                if saves or (found and course.best == iteration):
                    if not wrong and (found or not online.evaluate_every):
                        course.good = iteration
                    saver.spared = frozenset(step for step in (course.good, course.best) if step)
                    parts, more = parts_of(run.agent, state), _writer(course, known, learner.remembered())
                    saver.save(iteration, parts, {}, log.flush, more)
                if leave:
                    break
            saver.wait()
            tell_if_nothing_was_learnt(course, iteration, folder, events)
    _told_end(console, config, course, iteration)
    return checkpoints / str(iteration) if iteration else None


def _also_taught(run: OnlineRun, instructions: Sequence[str]) -> Contract:
    """The contract of a policy that has practised these, too. Of one nobody knows the lessons of, nobody does after."""
    contract, known = run.ground.contract, run.ground.taught is not None
    taught = together(contract.instructions or (), instructions) if known else None
    return dataclasses.replace(contract, instructions=taught)


def _judges(config: RLTrainConfig, iteration: int) -> bool:
    every = config.online.evaluate_every
    return iteration == config.steps or bool(every and iteration % every == 0)


def _rests(config: RLTrainConfig, iteration: int) -> bool:
    """Whether nothing may be under way when so many iterations are over: it is saved, or the simulators are needed."""
    return _judges(config, iteration) or iteration % config.save_every == 0


def _writer(course: Course, known: dict[Context, Start], best: Callable[[Path], None]) -> Callable[[Path], None]:
    """Writes what is remembered beside the weights, as it is now."""
    course = dataclasses.replace(course)

    def write(folder: Path) -> None:
        if is_leader():
            course.save(folder)
            save_starts(folder, known)
        best(folder)  # every host's own

    return write


# --- Where it practises -----------------------------------------------------------------------------------------------


def _tasks(config: RLTrainConfig) -> list[str]:
    """Their names, before anything is loaded."""
    assert config.practises
    name = config.online.environment
    if name is None:
        raise UserError(f"{config.name} names no environment; add --online.environment NAME, as metaworld/push-v3.")
    if config.online.exploration.misled and config.model.pi05:
        raise UserError(
            f"online.exploration.misled is {config.online.exploration.misled}: it shifts the state among the model's "
            "inputs, and π₀.₅ reads it in its prompt, if at all; set it to 0."
        )
    if several() and config.online.engine == "ray" and config.online.workers is None:
        raise UserError(
            "online.engine is ray and online.workers none, as many as Ray has cores: one host would leave the others "
            "nothing; give --online.workers, each host's part."
        )
    return [task for one in name.split(",") for task in find_tasks(one.strip())]


def _build(run: OnlineRun, tasks: Sequence[str]) -> Environments:
    online, robot = run.config.online, run.ground.inputs.robot
    options = EnvOptions(cameras=needed_cameras(robot), limit=online.limit)
    try:
        envs = Environments(
            tasks,
            options,
            count=online.environments,
            workers=online.workers,
            chunk=max(64, run.config.model.action_horizon),
            patience=online.hang_after,
            engine=online.engine,
        )
    except UserError:
        if online.engine == "processes":  # with Ray, the simulator may be elsewhere alone
            for name in tasks:
                seen_by(robot, name, options)  # whose cameras may be what was refused
        raise
    try:
        check_robot(robot, envs.scene)
        for name, scene in envs.scenes.items():
            if online.evaluate_episodes > len(scene.held_out):
                raise UserError(
                    f"online.evaluate_episodes is {online.evaluate_episodes} and {name} has "
                    f"{counted(len(scene.held_out), 'held-out start state')}; take fewer."
                )
        horizon = run.config.model.action_horizon
        if (online.execute or 1) > horizon:
            raise UserError(
                f"online.execute is {online.execute}; the policy's chunks have {counted(horizon, 'action')}."
            )
    except BaseException:
        envs.close()
        raise
    return envs


# --- What it says -----------------------------------------------------------------------------------------------------


def _describe(run: OnlineRun, envs: Environments, console: Console) -> None:
    config, online, scene = run.config, run.config.online, envs.scene
    told = scene.name if len(envs.scenes) == 1 else f"{len(envs.scenes)} tasks of {online.environment}"
    starts, rollouts = counted(online.contexts, "start state"), counted(online.rollouts, "rollout")
    explores = f"{online.exploration.total:.0%} of rollouts explore" if online.exploration.total else "no exploration"
    console.print(
        f"{config.name}: {told} ({counted(scene.limit, 'step')}), from {config.checkpoint}; "
        f"{counted(config.steps, 'iteration')} of {starts} × {rollouts} ({_told_algorithm(run)}, {explores}); "
        f"norm stats from {run.ground.norm_stats_from}; run in {config.folder}",
        markup=False,
        highlight=False,
    )
    if online.overlap and all(_rests(config, iteration) for iteration in range(1, config.steps)):
        console.print(
            "note: online.overlap is on, and nothing can overlap: every iteration is judged or saved. Raise "
            "online.evaluate_every and save_every."
        )
    if isinstance(a := config.algorithm, RiptConfig) and a.weighting == "signed" and not a.anchor:
        console.print("note: signed weights without an anchor have no least loss and diverge; set algorithm.anchor.")


def _told_algorithm(run: OnlineRun) -> str:
    algorithm, online = run.config.algorithm, run.config.online
    if isinstance(algorithm, RiptConfig):
        return f"{algorithm.weighting}, replay {online.replay}"
    assert isinstance(algorithm, AcrlpdConfig)
    shown = run.demonstrated / run.config.batch_size
    return f"{algorithm.actor}, best of {algorithm.candidates}, {shown:.0%} of each batch from data"


def _told_practice(measured: dict[str, float]) -> str:
    groups = _counted(measured["practice/start_states"], "group")
    informative = f"{measured['practice/informative']:.0f} of {groups} informative, "
    faults = _told_faults(measured["practice/faults"])
    compared = measured["practice/episodes"] > measured["practice/start_states"]
    return (
        f"practised {_counted(measured['practice/episodes'], 'episode')}, "
        f"{measured['practice/success']:.0%} succeeded, "
        f"{informative if compared else ''}{f'{faults}, ' if faults else ''}"
        f"{measured['time/steps_per_second']:.0f} steps/s"
    )


def _told_learning(learnt: dict[str, float]) -> str:
    if not learnt["learning/chunks"]:
        return "nothing to learn from"
    return (
        f"{_counted(learnt['learning/updates'], 'update')} from {_counted(learnt['learning/chunks'], 'chunk')}, "
        f"drift {learnt['learning/drift']:.3g}"
    )


def _counted(measured: float, noun: str) -> str:
    return counted(round(measured), noun)


def _told_faults(faults: float) -> str:
    return f"{_counted(faults, 'failure')} of simulators" if faults else ""


def _tell_of_faults(events: Events, iteration: int, faults: Sequence[ToldFault], whole: str) -> None:
    for (task, start), fault, dropped in faults:
        done = f"{whole} dropped" if dropped else "episode run again"
        events.note(iteration, fault.kind, fault.detail, done, show=False, task=task, start_id=start)


def _told_evaluation(found: dict[str, float]) -> str:
    parts = []
    for name, words in (("zero_noise", "without noise"), ("sampled", "sampled"), ("best_of_n", "best of N")):
        if f"evaluation/{name}" not in found:
            continue
        won, of = int(found[f"evaluation/{name}"]), int(found[f"evaluation/{name}_of"])
        low, high = wilson(won, of)
        parts.append(f"{won}/{of} {words} ({low:.0%} to {high:.0%})")
    faults = _told_faults(found.get("evaluation/faults", 0.0))
    return f"held out {', '.join(parts)}{f', {faults}' if faults else ''}"


def _told_end(console: Console, config: RLTrainConfig, course: Course, iteration: int) -> None:
    if not course.finished:
        console.print(f"Stopped after iteration {iteration} of {config.steps}. Go on with --resume.", highlight=False)
    if course.best and course.best != iteration:
        where = config.folder / "checkpoints" / str(course.best)
        console.print(
            f"The best on held-out start states was iteration {course.best} ({course.best_success:.0%}): {where}",
            markup=False,
            highlight=False,
        )
    if course.best == 0 and course.updates:
        console.print(
            f"No evaluation was better than that of the policy it began with ({course.best_success:.0%}): "
            f"{config.checkpoint}",
            markup=False,
            highlight=False,
        )
