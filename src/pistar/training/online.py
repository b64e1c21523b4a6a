"""RIPT, top to bottom: practise, learn from what was done, see how it goes, again.

Everything that decides a number derives from (seed, iteration) or is in the checkpoint, so a run that was killed goes
on where its last checkpoint stands, to the bit.
"""

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import jax
from rich.console import Console

from pistar.agents.ript import RiptState
from pistar.config import RiptConfig
from pistar.envs.env import EnvOptions, find_tasks
from pistar.envs.vector import Environments
from pistar.envs.worker import Fault
from pistar.errors import UserError
from pistar.tables import to_table
from pistar.training.config import RLTrainConfig, save_config
from pistar.training.counting import wilson
from pistar.training.evaluation import check_robot, needed_cameras
from pistar.training.experience import load_practice
from pistar.training.hosts import several
from pistar.training.learner import Learner
from pistar.training.metrics import MetricsLog, trackers_of
from pistar.training.offline import CONFIG_FILE, StopRequest, claim_folder, compare_contracts, use_compilation_cache
from pistar.training.plan import abstract_state
from pistar.training.practice import Practice
from pistar.training.run import OnlineRun, first_params, prepare_online
from pistar.training.saving import Saver, parts_of, restore
from pistar.training.sharding import state_sharding

EVENTS_FILE = "events.jsonl"


def train(
    config: RLTrainConfig, console: Console, *, resume: bool = False, overwrite: bool = False, dry_run: bool = False
) -> Path | None:
    """Run it to its last iteration. Returns the last checkpoint, or nothing where none was made."""
    if several():
        raise UserError("RIPT runs on one host so far; leave the options for several out.")
    use_compilation_cache()
    environment = _environment(config)
    folder, checkpoints = config.folder, config.folder / "checkpoints"
    start_from = claim_folder(config, console, resume=resume, overwrite=overwrite)
    run = prepare_online(config)
    if start_from is not None:
        compare_contracts(checkpoints / str(start_from), run.ground.contract)
    for note in run.ground.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    with console.status("building the simulators …"):
        envs = _build(run, environment)
    with envs, StopRequest() as stop, jax.set_mesh(run.mesh):
        practice = Practice(run, envs)
        _describe(run, envs, console)
        if dry_run:
            console.print("Dry run: weights, data and environment agree. Nothing was trained or written.")
            return None
        abstract = abstract_state(config, run.agent)
        where = state_sharding(abstract, run.mesh)
        if start_from is None:
            begin = jax.jit(run.agent.init_from, donate_argnums=0, out_shardings=where)
            state: RiptState = begin(first_params(config, run.mesh))
        else:
            state, _ = restore(checkpoints, start_from, abstract, where, lambda s: parts_of(run.agent, s))
            load_practice(checkpoints / str(start_from), practice.starts, practice.best, config.model.cameras)
        iteration = start_from or 0
        learner = Learner(run, where)
        if overwrite and folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_config(folder / CONFIG_FILE, config)
        _forget_events(folder, iteration)
        began = time.monotonic()
        sinks = trackers_of(config.trackers, folder, str(config.exp_name or config.name), to_table(config))
        with (
            closing(MetricsLog(folder, sinks, after=iteration if start_from is not None else -1)) as log,
            closing(
                Saver(checkpoints, run.ground.norm_stats, run.ground.contract, config.keep_last, config.keep_every)
            ) as saver,
        ):
            if start_from is None:
                with console.status("judging the policy it begins with …"):
                    found = practice.judge(run.agent.policy_params(state))
                log.log(0, {}, found)
                console.print(f"before: {_told_evaluation(found)}", markup=False, highlight=False)
            while iteration < config.steps and not stop.requested():
                with console.status(f"iteration {iteration + 1} of {config.steps}: practising …"):
                    done = practice.practise(run.agent.policy_params(state), iteration)
                _note_events(folder, iteration, done.faults)
                with console.status(f"iteration {iteration + 1} of {config.steps}: learning …"):
                    state, window, learnt = learner.learn(state, done.lessons, iteration)
                iteration += 1
                last = iteration == config.steps
                found = {}
                if last or (config.online.evaluate_every and iteration % config.online.evaluate_every == 0):
                    with console.status(f"iteration {iteration} of {config.steps}: judging …"):
                        found = practice.judge(run.agent.policy_params(state))
                log.log(iteration, window, done.measured | learnt | found)
                each = (time.monotonic() - began) / (iteration - (start_from or 0))
                left = timedelta(seconds=int(each * (config.steps - iteration)))
                console.print(
                    f"iteration {iteration}/{config.steps} · {_told_practice(done.measured)} · {_told_learning(learnt)}"
                    f"{' · ' + _told_evaluation(found) if found else ''} · {left} left",
                    markup=False,
                    highlight=False,
                )
                if iteration % config.save_every == 0 or last or stop.requested():
                    saver.save(iteration, parts_of(run.agent, state), {}, log.flush, practice.remembered())
            saver.wait()
    if stop.heard and iteration < config.steps:
        console.print(f"Stopped on request after iteration {iteration}. Go on with --resume.", highlight=False)
    return checkpoints / str(iteration) if iteration else None


# --- Where it practises -----------------------------------------------------------------------------------------------


def _environment(config: RLTrainConfig) -> str:
    """Its name, before anything is loaded."""
    assert isinstance(config.algorithm, RiptConfig)
    name = config.online.environment
    if name is None:
        raise UserError(f"{config.name} names no environment; add --online.environment NAME, as metaworld/push-v3.")
    tasks = find_tasks(name)
    if len(tasks) != 1:
        raise UserError(f"{name} has {len(tasks)} tasks; RIPT practises one so far: name it, as {tasks[0]}.")
    if config.online.exploration.misled and (config.prompt_format or config.model.model_type) == "pi05":
        raise UserError(
            "online.exploration.misled shifts the state among the model's inputs, and π₀.₅ reads it in its prompt; "
            "set it to 0."
        )
    return str(tasks[0])


def _build(run: OnlineRun, name: str) -> Environments:
    online, robot = run.config.online, run.ground.inputs.robot
    options = EnvOptions(cameras=needed_cameras(robot), limit=online.limit)
    envs = Environments(name, options, count=online.environments, workers=online.workers)
    try:
        check_robot(robot, envs.scene)
        held_out = len(envs.scene.held_out)
        if online.evaluate_episodes > held_out:
            raise UserError(
                f"online.evaluate_episodes is {online.evaluate_episodes} and {name} has {held_out} held-out start "
                "states; take fewer."
            )
        horizon = run.config.model.action_horizon
        if (online.execute or 1) > horizon:
            raise UserError(f"online.execute is {online.execute}; the policy's chunks have {horizon} actions.")
    except BaseException:
        envs.close()
        raise
    return envs


# --- What it says -----------------------------------------------------------------------------------------------------


def _describe(run: OnlineRun, envs: Environments, console: Console) -> None:
    config, online, scene = run.config, run.config.online, envs.scene
    assert isinstance(config.algorithm, RiptConfig)
    explores = f"{online.exploration.total:.0%} of rollouts explore" if online.exploration.total else "no exploration"
    console.print(
        f"{config.name}: {scene.name} ({scene.limit} steps), from {config.checkpoint}; {config.steps} iterations of "
        f"{online.contexts} start states × {online.rollouts} rollouts ({config.algorithm.weighting}, replay "
        f"{online.replay}, {explores}); norm stats from {run.ground.norm_stats_from}; run in {config.folder}",
        markup=False,
        highlight=False,
    )
    if config.algorithm.weighting == "signed" and not config.algorithm.anchor:
        console.print("note: signed weights without an anchor have no least loss and diverge; set algorithm.anchor.")


def _told_practice(measured: dict[str, float]) -> str:
    return (
        f"practised {measured['practice/episodes']:.0f} episodes, {measured['practice/success']:.0%} succeeded, "
        f"{measured['practice/informative']:.0f} of {measured['practice/start_states']:.0f} groups informative, "
        f"{measured['time/steps_per_second']:.0f} steps/s"
    )


def _told_learning(learnt: dict[str, float]) -> str:
    if not learnt["learning/chunks"]:
        return "nothing to learn from"
    return (
        f"{learnt['learning/updates']:.0f} updates from {learnt['learning/chunks']:.0f} chunks, "
        f"drift {learnt['learning/drift']:.3g}"
    )


def _told_evaluation(found: dict[str, float]) -> str:
    parts = []
    for name, words in (("zero_noise", "without noise"), ("sampled", "sampled")):
        won, of = int(found[f"evaluation/{name}"]), int(found[f"evaluation/{name}_of"])
        low, high = wilson(won, of)
        parts.append(f"{won}/{of} {words} ({low:.0%} to {high:.0%})")
    return f"held out {', '.join(parts)}"


def _note_events(folder: Path, iteration: int, faults: Sequence[tuple[int, Fault, bool]]) -> None:
    with (folder / EVENTS_FILE).open("a", encoding="utf-8") as file:
        for start, fault, dropped in faults:
            what = "group dropped" if dropped else "episode run again"
            event = {
                "iteration": iteration,
                "event": fault.kind,
                "start_id": start,
                "detail": fault.detail,
                "done": what,
            }
            file.write(json.dumps(event) + "\n")


def _forget_events(folder: Path, iteration: int) -> None:
    """Of iterations that will be made again."""
    path = folder / EVENTS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["iteration"] < iteration]
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    aside.replace(path)
