"""RIPT, top to bottom: practise, learn from what was done, see how it goes, again.

Everything that decides a number derives from (seed, iteration) or is in the checkpoint, so a run that was killed goes
on where its last checkpoint stands, to the bit.
"""

import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from rich.console import Console

from pistar.agents.estimators import informative
from pistar.agents.ript import RiptBatch, RiptState, chunk_weights, group_advantages
from pistar.config import RiptConfig
from pistar.data.robots import input_transform, output_transform
from pistar.envs.env import EnvOptions, find_tasks
from pistar.envs.rollout import Clock, Rollout, batch_size, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import Fault
from pistar.errors import UserError
from pistar.tables import to_table
from pistar.training.config import RLTrainConfig, save_config
from pistar.training.counting import wilson
from pistar.training.evaluation import check_robot, needed_cameras
from pistar.training.exploring import (
    ZERO_NOISE,
    Chunks,
    Explorer,
    Mood,
    Plan,
    draw_mood,
    executed_chunks,
    join,
)
from pistar.training.hosts import several
from pistar.training.metrics import MetricsLog, Window, add_windows, as_window, trackers_of
from pistar.training.offline import CONFIG_FILE, StopRequest, claim_folder, compare_contracts, use_compilation_cache
from pistar.training.plan import abstract_state
from pistar.training.practice import BestOf, Starts, load_practice, save_practice
from pistar.training.run import OnlineRun, first_params, prepare_online
from pistar.training.saving import Saver, parts_of, restore
from pistar.training.sharding import state_sharding
from pistar.types import AnyArray, Episode, Observation

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


@dataclasses.dataclass(frozen=True)
class Lesson:
    """Chunks of one rollout, and how much they count: its advantage, or what `best` says."""

    chunks: Chunks
    advantage: float


@dataclasses.dataclass(frozen=True)
class Group:
    """Rollouts of one start state, which judge each other."""

    start: int
    rollouts: Sequence[Rollout]
    plans: Sequence[Sequence[Plan]]
    moods: Sequence[Mood]

    @property
    def whole(self) -> bool:
        """Whether all could be finished. One that could not takes its group with it: not counted, nor learnt from."""
        return all(rollout.episode is not None for rollout in self.rollouts)

    @property
    def episodes(self) -> list[Episode]:
        """Of a whole one, all."""
        return [rollout.episode for rollout in self.rollouts if rollout.episode is not None]

    @property
    def rewards(self) -> Float[np.ndarray, " k"]:
        """0 or 1 each."""
        return np.array([float(episode.success) for episode in self.episodes])


@dataclasses.dataclass
class Tally:
    """What is counted while practising."""

    tried: list[int] = dataclasses.field(default_factory=list)
    teaching: int = 0
    by_kind: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Of exploration: successes, of how many episodes."""
    faults: list[tuple[int, Fault, bool]] = dataclasses.field(default_factory=list)
    clock: Clock = dataclasses.field(default_factory=Clock)

    def count(self, group: Group) -> bool:
        """Whether it counts."""
        self.tried.append(group.start)
        self.faults += [(group.start, fault, not group.whole) for one in group.rollouts for fault in one.faults]
        if not group.whole:
            return False
        self.teaching += bool(informative(group.rewards[None])[0])
        for mood, episode in zip(group.moods, group.episodes, strict=True):
            won, of = self.by_kind.get(mood.kind, (0, 0))
            self.by_kind[mood.kind] = (won + episode.success, of + 1)
        return True

    def measured(self, seconds: float, workers: int) -> dict[str, float]:
        """As metrics."""
        won, of = (sum(counts) for counts in zip(*self.by_kind.values(), strict=True)) if self.by_kind else (0, 0)
        return {
            "practice/success": won / max(of, 1),
            "practice/episodes": float(of),
            "practice/informative": float(self.teaching),
            "practice/start_states": float(len(self.tried)),
            "practice/environment_steps": float(self.clock.steps),
            "practice/faults": float(len(self.faults)),
            "time/practice_seconds": seconds,
            "time/steps_per_second": self.clock.steps / seconds,
            "time/simulators_share": self.clock.simulators / seconds / workers,
            "time/policy_share": self.clock.policy / seconds,
            **{f"practice/success_{kind}": won / of for kind, (won, of) in self.by_kind.items()},
        }


@dataclasses.dataclass(frozen=True)
class Practised:
    """What an iteration's rollouts brought."""

    lessons: Sequence[Lesson]
    measured: dict[str, float]
    faults: Sequence[tuple[int, Fault, bool]]
    """Of which start state, what, and whether its group had to be dropped."""


class Practice:
    """The policy among its environments, and what it remembers of them."""

    def __init__(self, run: OnlineRun, envs: Environments) -> None:
        self._run, self._envs = run, envs
        online, inputs = run.config.online, run.ground.inputs
        self.starts = Starts(online.starts, envs.scene.train)
        self.best = BestOf(online.replay_keeps)
        horizon = run.config.model.action_horizon
        self.execute = min(online.execute or envs.scene.execute or horizon, horizon)
        self._inputs = input_transform(
            inputs.robot,
            inputs.stats,
            inputs.norm,
            inputs.tokenizer,
            action_dim=inputs.action_dim,
            image_size=inputs.image_size,
            discrete_state=inputs.discrete_state,
            default_prompt=None,
        )
        self._outputs = output_transform(inputs.robot, inputs.stats, inputs.norm)

    def _explorer(self, params: Any, version: int, key: Any, moods: Sequence[Mood], *, keep: bool) -> Explorer:  # noqa: ANN401
        return Explorer(
            model=self._run.config.model,
            inputs=self._inputs,
            outputs=self._outputs,
            action_dim=self._run.ground.inputs.robot.action_dim,
            scene=self._envs.scene,
            batch=batch_size(self._envs.count),
            params=params,
            version=version,
            key=key,
            moods=moods,
            keep=keep,
        )

    def practise(self, params: Any, iteration: int) -> Practised:  # noqa: ANN401
        """K rollouts from each of some start states, others in place of those that teach nothing, up to a cap."""
        config, online = self._run.config, self._run.config.online
        since, tally, lessons = time.monotonic(), Tally(), list[Lesson]()
        for round_ in itertools.count():
            room = online.attempts * online.contexts - len(tally.tried)
            wanted = min(online.contexts - tally.teaching, room)
            rng = np.random.default_rng([config.seed, iteration, round_])
            starts = self.starts.choose(wanted, rng, iteration / config.steps, tally.tried) if wanted > 0 else []
            if not starts:
                break
            key = jax.random.fold_in(jax.random.fold_in(_key(config, 2), iteration), round_)
            for group in self._groups(params, iteration, starts, rng, key, tally.clock):
                if tally.count(group):
                    lessons += self._lessons(group)
        if online.replay == "best":
            lessons = [Lesson(chunks, weight) for chunks, weight in self.best.weighed(self.starts)]
        measured = tally.measured(time.monotonic() - since, max(len(self._envs._workers), 1))
        measured["practice/solved_start_states"] = float(self.starts.solved)
        return Practised(lessons, measured, tally.faults)

    def _groups(
        self,
        params: Any,  # noqa: ANN401
        version: int,
        starts: Sequence[int],
        rng: np.random.Generator,
        key: jax.Array,
        clock: Clock,
    ) -> Iterator["Group"]:
        """Each start state's rollouts as soon as they are done: what a group does not teach is not kept."""
        online, state_dim = self._run.config.online, self._run.ground.inputs.robot.state_dim
        episodes = [start for start in starts for _ in range(online.rollouts)]
        moods = [draw_mood(online.exploration, rng, self._envs.scene, state_dim) for _ in episodes]
        explorer = self._explorer(params, version, key, moods, keep=True)
        rollouts = roll_out(self._envs, episodes, explorer, execute=self.execute, clock=clock)
        for at, start in enumerate(starts):
            numbers = range(at * online.rollouts, (at + 1) * online.rollouts)
            done = list(itertools.islice(rollouts, online.rollouts))
            plans = [explorer.plans.pop(number, []) for number in numbers]
            yield Group(start, done, plans, [moods[number] for number in numbers])

    def _lessons(self, group: "Group") -> list[Lesson]:
        """What is learnt from it now. Successes worth remembering are remembered."""
        algorithm, replay = self._run.config.algorithm, self._run.config.online.replay
        assert isinstance(algorithm, RiptConfig)
        rewards = group.rewards
        self.starts.learn(group.start, int(rewards.sum()), len(rewards))
        advantages = group_advantages(algorithm, rewards[None])[0]
        weights = chunk_weights(algorithm, jnp.asarray(advantages))
        lessons = []
        for episode, plans, advantage, weight in zip(group.episodes, group.plans, advantages, weights, strict=True):
            if replay == "best" and episode.success:
                self.best.add(group.start, executed_chunks(plans, episode, self.execute))
            if replay == "none" and weight != 0:
                lessons.append(Lesson(executed_chunks(plans, episode, self.execute), float(advantage)))
        return lessons

    def judge(self, params: Any) -> dict[str, float]:  # noqa: ANN401
        """Successes on held-out start states: without noise, and with the flow's own. The same noise every time."""
        config = self._run.config
        starts = self._envs.scene.held_out[: config.online.evaluate_episodes]
        found: dict[str, float] = {}
        for name, mood in (("zero_noise", ZERO_NOISE), ("sampled", Mood())):
            explorer = self._explorer(params, 0, _key(config, 3), [mood] * len(starts), keep=False)
            rollouts = roll_out(self._envs, starts, explorer, execute=self.execute)
            ended = [rollout.episode for rollout in rollouts if rollout.episode is not None]
            found[f"evaluation/{name}"] = float(sum(episode.success for episode in ended))
            found[f"evaluation/{name}_of"] = float(len(ended))
        return found

    def remembered(self) -> Any:  # noqa: ANN401
        """What writes it, as it is now."""
        known = {start: dataclasses.replace(one) for start, one in self.starts.known.items()}
        kept = {start: list(all_) for start, all_ in self.best.kept.items()}
        return lambda folder: save_practice(folder, known, kept)


def _key(config: RLTrainConfig, purpose: int) -> jax.Array:
    """Of this run's chance; updates use purpose 1, practice 2, evaluation 3."""
    return jax.random.fold_in(jax.random.key(config.seed), 2**31 + purpose)


# --- What it learns ---------------------------------------------------------------------------------------------------


class Learner:
    """Updates of the policy, from lessons and demonstrations."""

    def __init__(self, run: OnlineRun, where: Any) -> None:  # noqa: ANN401  # shardings of the state
        self._run = run
        agent = run.agent

        def dispatch(state: RiptState, batches: RiptBatch, keys: jax.Array) -> tuple[RiptState, Window]:
            def update(state: RiptState, given: tuple[RiptBatch, jax.Array]) -> tuple[RiptState, Window]:
                state, metrics = agent.update(state, *given)
                return state, as_window(metrics)

            state, windows = jax.lax.scan(update, state, (batches, keys))
            return state, jax.tree.map(jnp.sum, windows)

        self._dispatch = jax.jit(dispatch, donate_argnums=0, out_shardings=(where, None))
        self._restart = jax.jit(agent.restarted, donate_argnums=0, out_shardings=where)
        self._drift = jax.jit(agent.drift)

    def learn(
        self, state: RiptState, lessons: Sequence[Lesson], iteration: int
    ) -> tuple[RiptState, Window, dict[str, float]]:
        """As many updates as configured, or until the policy is far from the one that acted."""
        config, online, since = self._run.config, self._run.config.online, time.monotonic()
        if not lessons:
            return state, {}, {"learning/chunks": 0.0, "learning/updates": 0.0, "learning/drift": 0.0}
        chunks = join([lesson.chunks for lesson in lessons])
        advantages = np.concatenate([np.full(len(each.chunks), each.advantage, np.float32) for each in lessons])
        rows = config.batch_size - self._run.demonstrated
        updates = online.updates or math.ceil(online.epochs * len(chunks) / rows)
        calls = math.ceil(updates / config.updates_per_dispatch)
        key = jax.random.fold_in(_key(config, 1), iteration)
        behaviour = jax.tree.map(jnp.copy, self._run.agent.policy_params(state))
        if online.restart:
            state = self._restart(state)
        picks = _picks(np.random.default_rng([config.seed, iteration, 2**20]), len(chunks), rows)
        window: Window = {}
        probe: RiptBatch | None = None
        made, drift = 0, 0.0
        looks = max(1, calls // 10)
        before = int(state.policy.step)  # asked once: the device works on one call while the next is made ready
        for call in range(calls):
            first = before + made
            batches = [
                self._batch(chunks, advantages, next(picks), first + at) for at in range(config.updates_per_dispatch)
            ]
            probe = probe if probe is not None else batches[0]
            keys = jax.vmap(lambda at: jax.random.fold_in(key, at))(made + jnp.arange(len(batches)))
            stacked = jax.tree.map(lambda *each: np.stack(each), *batches)
            state, measured = self._dispatch(state, stacked, keys)
            window, made = add_windows(window, measured), made + len(batches)
            if call == calls - 1 or (online.max_drift is not None and call % looks == looks - 1):
                drift = float(self._drift(state, behaviour, probe, _key(config, 4)))
                if online.max_drift is not None and drift > online.max_drift:
                    break
        learnt = {
            "learning/chunks": float(len(chunks)),
            "learning/updates": float(made),
            "learning/drift": drift,
            "time/learning_seconds": time.monotonic() - since,
        }
        return state, window, learnt

    def _batch(self, chunks: Chunks, advantages: np.ndarray, picked: np.ndarray, update: int) -> RiptBatch:
        own = jax.tree.map(lambda rows: rows[picked], chunks.observations)
        parts = [(own, chunks.actions[picked], chunks.valid[picked], advantages[picked])]
        if self._run.demonstrations is not None:
            shown = self._run.demonstrations.sample_policy_batch(update)
            parts.append((shown.observations, shown.actions, shown.valid, np.zeros(len(shown.actions), np.float32)))
        together: tuple[Observation, AnyArray, AnyArray, AnyArray] = jax.tree.map(
            lambda *each: np.concatenate([np.asarray(rows) for rows in each]), *parts
        )
        demonstration = np.arange(len(together[1])) >= len(picked)
        return RiptBatch(*together, demonstration)


def _picks(rng: np.random.Generator, count: int, rows: int) -> Iterator[np.ndarray]:
    """Rows for batch after batch: everything once, in a new order each time round."""
    order = np.zeros(0, int)
    while True:
        while len(order) < rows:
            order = np.concatenate([order, rng.permutation(count)])
        yield order[:rows]
        order = order[rows:]


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
