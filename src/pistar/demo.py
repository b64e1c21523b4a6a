"""`pistar demo`: the whole road on one's own machine, in minutes.

`--algo acrlpd`: a simulated arm, demonstrations three quarters of which are spoilt, a small π₀ that imitates them, and
ACRLPD, which finds out what of them was good. `--algo ript`: a few good demonstrations, a small π₀ that imitates them,
and RIPT, which practises. Every step is what the commands do; a stopped demo goes on where it was.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from pistar.config import AcrlpdConfig, check_writable
from pistar.data.frames import progress_bar
from pistar.data.robots import find_robot
from pistar.data.words import counted
from pistar.envs.env import EnvOptions
from pistar.envs.rollout import batch_size, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import Script
from pistar.errors import UserError
from pistar.presets import get_config
from pistar.report.charts import success_chart
from pistar.report.video import write_video
from pistar.training import offline, online
from pistar.training.acting import Actor
from pistar.training.config import RLTrainConfig
from pistar.training.evaluation import Player, Setting, dataset_writer, evaluate, prepare, run_task
from pistar.training.metrics import read_metrics
from pistar.training.optimizers import CosineSchedule
from pistar.training.policy import Policy, load_policy
from pistar.training.progress import episodes_shown
from pistar.training.results import Evaluation, compare, load_evaluation
from pistar.training.saving import saved_steps
from pistar.training.verify import verify
from pistar.training.weighing import weigh

Algo = Literal["acrlpd", "ript"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is played, and by whom."""

    env: str
    limit: int
    script: Script
    """Who demonstrates; its seed is set later."""
    names: Mapping[str, str]
    """Of everybody that is trained."""
    judged: tuple[str, ...]
    """In the order of the table. The first is filmed beside the last, and the last compared with the one before it."""


STAGES: dict[Algo, Stage] = {
    "acrlpd": Stage(
        "metaworld/pick-place-v3",
        200,
        Script("pistar.envs.behaviours:mixed", {"noise": 0.1, "spoilt": 0.75}),
        {
            "bc": "BC, where the others begin",
            "successes": "BC on successes",
            "critic": "ACRLPD's critic",
            "acrlpd": "ACRLPD",
        },
        ("bc", "successes", "acrlpd"),
    ),
    "ript": Stage(
        "metaworld/push-v3",
        100,
        Script("pistar.envs.behaviours:expert", {"noise": 0.1}),
        {"bc": "BC, where RIPT begins", "ript": "RIPT"},
        ("bc", "ript"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much of everything. Chosen on seed 0."""

    algo: Algo = "acrlpd"
    demonstrations: int = 200
    tasks: int = 100
    """Start states the policies are judged by, and none of them has seen."""
    imitated: int = 3_000
    """Updates of BC, from which the others go on."""
    critic: int = 2_000
    """Updates of the critic."""
    improved: int = 5_000
    """Updates of the policy by what the critic says; of RIPT, iterations of practice."""
    contexts: int = 100
    """Start states in an iteration of practice …"""
    updates: int = 500
    """… and updates after it."""
    batch: int = 128


BUDGETS: dict[Algo, Budget] = {
    "acrlpd": Budget(),
    "ript": Budget("ript", demonstrations=5, imitated=1_500, critic=0, improved=12),
}
QUICK: dict[Algo, Budget] = {
    "acrlpd": Budget(demonstrations=6, tasks=4, imitated=20, critic=10, improved=10, batch=16),
    "ript": Budget(
        "ript", demonstrations=2, tasks=4, imitated=20, critic=0, improved=1, contexts=4, updates=10, batch=16
    ),
}
"""Shows that everything runs, and nothing else."""


def run(out: Path, seed: int, budget: Budget, console: Console) -> None:
    """All of it."""
    began, stage = time.monotonic(), STAGES[budget.algo]
    _claim(out, seed, budget)
    data = out / "dataset"
    with _stage("collecting demonstrations", console):
        won = _collect(data, seed, budget, console)
    console.print(f"{counted(budget.demonstrations, 'demonstration')} in {data}, LeRobot v3.0{won}.")

    checkpoints: dict[str, Path] = {}
    weights = out / "weights.npz"
    runs = _acrlpd_runs if budget.algo == "acrlpd" else _ript_runs
    for name, config in runs(out, data, seed, budget).items():
        if name != "bc":
            config = dataclasses.replace(config, checkpoint=str(checkpoints["bc"]))
        if name == "acrlpd":
            with _stage("weighing the demonstrations, window by window", console):
                _weigh(checkpoints["critic"], weights, console)
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, weighed=weights))
        with _stage(f"training {stage.names[name]}", console):
            checkpoints[name] = _train(config, console)

    evaluations = {}
    for name in stage.judged:
        states = counted(budget.tasks, "start state")
        with _stage(f"judging {stage.names[name]} on {states} nobody has seen", console):
            evaluations[name] = _judge(checkpoints[name], out / f"{name}.json", seed, budget, console)

    console.print(_table(stage, evaluations))
    rival, best = stage.judged[-2:]
    pairs = compare(evaluations[best], evaluations[rival])
    console.print(
        f"{_short(stage, best)} against {_short(stage, rival)}, start state by start state: {pairs.only_first} only by "
        f"{_short(stage, best)}, {pairs.only_second} only by the other; p = {pairs.p:.2g} (McNemar, exact)."
    )
    picture = out / "result.svg"
    counts = {stage.names[name]: each.counts for name, each in evaluations.items()}
    picture.write_text(
        success_chart(
            {name: (each.succeeded, each.of, *each.wilson_95) for name, each in counts.items()},
            _curves(out, budget),
            title=f"{stage.env}: successes of {budget.tasks}, and how {_short(stage, best)} learnt",
        ),
        encoding="utf-8",
    )
    console.print(f"Drew {picture}")
    try:
        console.print(_film(stage, checkpoints, evaluations, out, seed))
    except UserError as error:  # where nothing can be drawn, everything else is there all the same
        console.print(f"No film: {error}", markup=False)
    if problems := verify(checkpoints[best]).problems:
        raise AssertionError(f"the demo's own checkpoint is not sound: {problems}")
    console.print(f"{checkpoints[best]} is an OpenPI checkpoint (pistar verify finds it whole and sound).")
    console.print(f"Took {(time.monotonic() - began) / 60:.1f} minutes.")


def _short(stage: Stage, name: str) -> str:
    return stage.names[name].partition(",")[0]


def _curves(out: Path, budget: Budget) -> dict[str, dict[int, float]]:
    """How it learnt."""
    told = {
        "acrlpd": (
            ("critic", "critic_loss", "ACRLPD's critic: loss"),
            ("critic", "q_mean", "ACRLPD's critic: value of the data"),
            ("acrlpd", "loss", "ACRLPD: loss, by weight"),
        ),
        "ript": (
            ("ript", "evaluation/sampled", "held-out successes, by iteration"),
            ("ript", "practice/success", "success in practice, exploring"),
        ),
    }[budget.algo]
    return {what: _curve(read_metrics(out / "runs" / run / "metrics.jsonl"), metric) for run, metric, what in told}


def _claim(out: Path, seed: int, budget: Budget) -> None:
    """Lest what another seed or budget left there be taken for this one's."""
    settings = out / "demo.json"
    ours = {"seed": seed, **dataclasses.asdict(budget)}
    if not settings.exists() and out.exists() and any(out.iterdir()):
        raise UserError(f"{out} holds something else; choose another --out.")
    if settings.exists() and (theirs := json.loads(settings.read_text(encoding="utf-8"))) != ours:
        different = ", ".join(f"{name} {theirs.get(name)}" for name in ours if theirs.get(name) != ours[name])
        raise UserError(f"{out} holds a demo with {different}; choose another --out, or delete it.")
    check_writable("--out", out)
    out.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(ours) + "\n", encoding="utf-8")


@contextmanager
def _stage(what: str, console: Console) -> Iterator[None]:
    since = time.monotonic()
    console.rule(f"[bold]{what}", align="left")
    yield
    console.print(f"({time.monotonic() - since:.0f} s)")


def _shaped(
    config: RLTrainConfig, out: Path, data: Path, seed: int, budget: Budget, name: str, steps: int
) -> RLTrainConfig:
    """A preset as a part of the demo: on its data, in its folder, and so long that rates come down by the end."""

    def over(updates: int, peak: float) -> CosineSchedule:
        return CosineSchedule(min(100, updates // 10), peak, updates, peak / 10)

    critic_updates = config.algorithm.critic_updates if isinstance(config.algorithm, AcrlpdConfig) else 1
    return dataclasses.replace(
        config,
        exp_name=name,
        data=dataclasses.replace(config.data, datasets=(str(data),), held_out=0.05 if budget.critic else 0.0),
        runs=out / "runs",
        steps=steps,
        batch_size=budget.batch,
        policy_optimizer=dataclasses.replace(
            config.policy_optimizer, schedule=over(steps, config.policy_optimizer.schedule.peak_lr)
        ),
        critic_optimizer=dataclasses.replace(
            config.critic_optimizer, schedule=over(steps * critic_updates, config.critic_optimizer.schedule.peak_lr)
        ),
        save_every=steps,
        audit_every=0,
        log_every=max(10, steps // 30 // 10 * 10),
        seed=seed,
    )


def _acrlpd_runs(out: Path, data: Path, seed: int, budget: Budget) -> dict[str, RLTrainConfig]:
    """What is trained: imitation of everything; and on from there, imitation of successes, a critic, and ACRLPD."""
    bc, rl = get_config("bc_metaworld"), get_config("rl_metaworld")
    assert isinstance(rl.algorithm, AcrlpdConfig)
    # The policy rests while its critic learns, so that the data can be weighed once and for all.
    judging = dataclasses.replace(rl.algorithm, actor="none", critic_warmup=0)
    shaped = functools.partial(_shaped, out=out, data=data, seed=seed, budget=budget)
    filtered = dataclasses.replace(bc, data=dataclasses.replace(bc.data, only_successes=True))
    return {
        "bc": shaped(bc, name="bc", steps=budget.imitated),
        "successes": shaped(filtered, name="successes", steps=budget.improved),  # from there too, as long as ACRLPD
        "critic": shaped(dataclasses.replace(rl, algorithm=judging), name="critic", steps=budget.critic),
        "acrlpd": shaped(bc, name="acrlpd", steps=budget.improved),
    }


def _ript_runs(out: Path, data: Path, seed: int, budget: Budget) -> dict[str, RLTrainConfig]:
    """What is trained: imitation of the demonstrations, and practice on from there."""
    stage, ript = STAGES["ript"], get_config("ript_metaworld")
    online = dataclasses.replace(
        ript.online,
        environment=stage.env,
        limit=stage.limit,
        contexts=budget.contexts,
        updates=budget.updates,
        evaluate_every=2,
        evaluate_episodes=budget.tasks,
        # What it is judged by in the end must not steer it.
        health=dataclasses.replace(ript.online.health, max_success_drop=None),
    )
    demonstrations = dataclasses.replace(ript.data, datasets=(str(data),), held_out=0.0)
    return {
        "bc": _shaped(get_config("bc_metaworld"), out, data, seed, budget, "bc", budget.imitated),
        "ript": dataclasses.replace(
            ript,
            exp_name="ript",
            data=demonstrations,
            online=online,
            runs=out / "runs",
            steps=budget.improved,
            batch_size=budget.batch,
            seed=seed,
        ),
    }


def _collect(data: Path, seed: int, budget: Budget, console: Console) -> str:
    """Through a script. How many succeeded, in words."""
    if data.exists():
        return ", from before"
    stage = STAGES[budget.algo]
    script = dataclasses.replace(stage.script, seed=seed)
    setting = Setting(stage.env, budget.demonstrations, "train", options=EnvOptions(limit=stage.limit), seed=seed)
    won = 0
    with episodes_shown("demonstrations", console) as show:
        rollouts = run_task(stage.env, setting, Player(script, None, 1), record=True)
        scene, total, first = next(rollouts)
        with dataset_writer(data, scene, find_robot(scene.robot)) as writer:
            for rollout in (first, *(each for _, _, each in rollouts)):
                if rollout.episode is None:
                    raise UserError(f"The simulator failed: {rollout.faults[-1].detail}; try again.")
                writer.add(rollout.episode)
                won += rollout.episode.success
                show(scene, total, rollout)
    return f", {won} of them successful"


def _train(config: RLTrainConfig, console: Console) -> Path:
    """Or what an earlier demo trained."""
    done = saved_steps(config.folder / "checkpoints")
    if done and done[-1] == config.steps:
        console.print("done before")
        return config.folder / "checkpoints" / str(config.steps)
    train = online.train if config.practises else offline.train
    checkpoint = train(config, console, resume=bool(done), overwrite=not done)
    if checkpoint is None or int(checkpoint.name) < config.steps:
        raise UserError("Stopped; the same command goes on.")
    return checkpoint


def _weigh(critic: Path, weights: Path, console: Console) -> None:
    """Or what an earlier demo weighed."""
    if weights.exists():
        console.print("done before")
        return
    with progress_bar("Weighing windows") as bar:
        console.print(weigh(critic, weights, progress=bar).told(), highlight=False)


def _player(policy: Policy, seed: int) -> Player:
    return Player(lambda count: Actor(policy, batch_size(count), seed), policy.robot, policy.config.action_horizon)


def _judge(checkpoint: Path, path: Path, seed: int, budget: Budget, console: Console) -> Evaluation:
    if path.exists():
        console.print("done before")
        return load_evaluation(path)
    stage, policy = STAGES[budget.algo], load_policy(checkpoint)
    setting = Setting(stage.env, budget.tasks, "held-out", options=EnvOptions(limit=stage.limit), seed=seed)
    player = _player(policy, seed)
    prepared = prepare(setting, player, checkpoint=str(checkpoint), weights="serving", **policy.identity())
    with episodes_shown("episodes", console) as show:
        found = evaluate(prepared, setting, player, each=show)
    found.save(path)
    console.print(f"by {found.whose}")
    return found


def _table(stage: Stage, evaluations: dict[str, Evaluation]) -> Table:
    table = Table("", "succeeded", "rate", "95 %", title=f"{stage.env}, held-out start states")
    for name, evaluation in evaluations.items():
        counts = evaluation.counts
        low, high = counts.wilson_95
        rate = "–" if counts.rate is None else f"{counts.rate:.0%}"
        table.add_row(stage.names[name], f"{counts.succeeded}/{counts.of}", rate, f"{low:.0%} to {high:.0%}")
    return table


def _curve(metrics: list[dict[str, Any]], name: str) -> dict[int, float]:
    """By step, where the run measured it."""
    return {line["step"]: line[name] for line in metrics if name in line}


FILM_TRIES = 5
"""Start states to run again for a film."""


def _film(
    stage: Stage, checkpoints: Mapping[str, Path], evaluations: Mapping[str, Evaluation], out: Path, seed: int
) -> str:
    """Both policies from one start state where imitation fails and π* succeeds, side by side; what to say of it.

    They are run again for it, alone, which may change their last bits: what does not come out as it was judged is not
    shown, and another start state is taken.
    """
    shown = (stage.judged[0], stage.judged[-1])
    before, after = (_short(stage, name) for name in shown)
    (lost,), (gained,) = (evaluations[name].results for name in shown)
    starts = [
        one.start_id
        for one, other in zip(lost.trials, gained.trials, strict=True)
        if one.success is False and other.success
    ]
    if not starts:
        return f"No start state where {before} fails and {after} succeeds, so no film."
    players = {name: _player(load_policy(checkpoints[name]), seed) for name in shown}
    with Environments(stage.env, EnvOptions(limit=stage.limit), count=1, workers=1) as envs:
        for start_id in starts[:FILM_TRIES]:
            again = {}
            for name, player in players.items():
                assert not isinstance(player.act, Script)
                # In a batch of the shape it was judged in, which decides the last bits.
                act = player.act(evaluations[name].environments)
                (again[name],) = roll_out(envs, [start_id], act, execute=evaluations[name].execute, films=1)
            if [rollout.episode is not None and rollout.episode.success for rollout in again.values()] == [False, True]:
                break
        else:
            tried = counted(len(starts[:FILM_TRIES]), "start state")
            return f"No film: {tried} where {before} fails and {after} succeeds came out otherwise when run again."
    films = [[_captioned(frame, _short(stage, name)) for frame in rollout.film] for name, rollout in again.items()]
    length = max(map(len, films))
    frames = [np.concatenate([film[min(i, len(film) - 1)] for film in films], axis=1) for i in range(length)]
    path = out / f"{'_and_'.join(shown)}.mp4"
    write_video(path, frames, envs.scene.fps)
    return f"Filmed {path}: start state {start_id}, where {before} fails and {after} succeeds."


def _captioned(frame: UInt8[np.ndarray, "h w 3"], text: str) -> UInt8[np.ndarray, "h w 3"]:
    picture = Image.fromarray(frame)
    ImageDraw.Draw(picture).text((6, 4), text, fill=(20, 20, 20), font_size=16)
    return np.asarray(picture)
