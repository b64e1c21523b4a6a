"""`pistar demo`: train and compare imitation and RL in a simulator.

`--algo acrlpd`: a simulated arm, demonstrations with three of four segments corrupted, a small π₀ that imitates them,
and ACRLPD, which finds out which segments were good. `--algo ript`: a few good demonstrations, a small π₀ that imitates
them, and RIPT, which improves it by its own rollouts. Every step is what the commands do; a stopped demo continues.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from pistar.agents.config import AcrlpdConfig
from pistar.checkpoints.manager import saved_steps
from pistar.checkpoints.verify import verify
from pistar.config.presets import get_config
from pistar.config.train import RLTrainConfig
from pistar.data.robots import find_robot
from pistar.envs.base import EnvOptions
from pistar.envs.rollout import batch_size
from pistar.envs.vector.worker import Script
from pistar.errors import UserError, check_writable
from pistar.evaluation.evaluate import (
    ActingPolicy,
    EpisodeSettings,
    PolicyRecord,
    dataset_writer,
    evaluate,
    prepare_evaluation,
    run_task,
)
from pistar.evaluation.results import Evaluation, compare, load_evaluation
from pistar.online import loop as online_loop
from pistar.optim import AdamWConfig, CosineSchedule
from pistar.policy.actor import Actor
from pistar.policy.load_policy import Policy, load_policy
from pistar.report.charts import success_chart
from pistar.report.side_by_side import Side, film_difference
from pistar.telemetry.metrics import read_metrics
from pistar.telemetry.progress import progress_bar, show_episodes
from pistar.text import counted
from pistar.training import offline
from pistar.training.weigh_dataset import weigh_dataset

Algo = Literal["acrlpd", "ript"]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The task, the demonstrations, and the policies that are compared."""

    env: str
    limit: int
    script: Script
    """What demonstrates; its seed is set later."""
    names: Mapping[str, str]
    """Names of all that is trained."""
    evaluated: tuple[str, ...]
    """In the order of the table. The first is filmed beside the last, and the last compared with the one before it."""
    curves: tuple[tuple[str, str, str], ...]
    """Learning curves: run, metric, caption."""


SCENARIOS: dict[Algo, Scenario] = {
    "acrlpd": Scenario(
        "metaworld/pick-place-v3",
        200,
        Script("pistar.envs.scripted:mixed", {"noise": 0.1, "spoilt": 0.75}),
        {
            "bc": "BC, where the others start",
            "successes": "BC on successes",
            "critic": "ACRLPD's critic",
            "acrlpd": "ACRLPD",
        },
        ("bc", "successes", "acrlpd"),
        (
            ("critic", "critic/loss", "ACRLPD's critic: loss"),
            ("critic", "critic/q_mean", "ACRLPD's critic: value of the data"),
            ("acrlpd", "loss", "ACRLPD: weighted loss"),
        ),
    ),
    "ript": Scenario(
        "metaworld/push-v3",
        100,
        Script("pistar.envs.scripted:expert", {"noise": 0.1}),
        {"bc": "BC, where RIPT starts", "ript": "RIPT"},
        ("bc", "ript"),
        (
            ("ript", "eval/sampled_successes", "held-out successes, by iteration"),
            ("ript", "rollout/success_rate", "success rate of rollouts, exploring"),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much of everything. Chosen on seed 0."""

    algo: Algo = "acrlpd"
    demonstrations: int = 200
    tasks: int = 100
    """Start states of the evaluations, which no policy has seen."""
    imitated: int = 3_000
    """Updates of BC, from which the others start."""
    critic: int = 2_000
    """Updates of the critic."""
    improved: int = 5_000
    """Updates of the policy by the critic's weights; with RIPT, iterations."""
    start_states: int = 100
    """Start states of a RIPT iteration."""
    updates: int = 500
    """Updates of a RIPT iteration."""
    batch: int = 128


BUDGETS: dict[Algo, Budget] = {
    "acrlpd": Budget(),
    "ript": Budget("ript", demonstrations=5, imitated=1_500, critic=0, improved=12),
}
QUICK: dict[Algo, Budget] = {
    "acrlpd": Budget(demonstrations=6, tasks=4, imitated=20, critic=10, improved=10, batch=16),
    "ript": Budget(
        "ript", demonstrations=2, tasks=4, imitated=20, critic=0, improved=1, start_states=4, updates=10, batch=16
    ),
}
"""Enough to show that everything runs."""


def run(out: Path, seed: int, budget: Budget, console: Console) -> None:
    """Run the demo: demonstrations, training, evaluation, table, chart, film."""
    since, scenario = time.monotonic(), SCENARIOS[budget.algo]
    _claim(out, seed, budget)
    data = out / "dataset"
    with _stage("collecting demonstrations", console):
        successes = _collect(data, seed, budget, console)
    console.print(f"{counted(budget.demonstrations, 'demonstration')} in {data}, LeRobot v3.0{successes}.")
    checkpoints = _train_all(out, data, seed, budget, console)
    evaluations = {}
    for name in scenario.evaluated:
        states = counted(budget.tasks, "unseen start state")
        with _stage(f"evaluating {scenario.names[name]} on {states}", console):
            evaluations[name] = _evaluate(checkpoints[name], out / f"{name}.json", seed, budget, console)
    _print_results(out, scenario, evaluations, console)
    shown = (scenario.evaluated[0], scenario.evaluated[-1])
    try:
        sides = [
            Side(_short(scenario, name), _acting(load_policy(checkpoints[name]), seed), evaluations[name])
            for name in shown
        ]
        console.print(film_difference(sides[0], sides[1], out / f"{'_and_'.join(shown)}.mp4"))
    except UserError as error:  # without a renderer everything else is still there
        console.print(f"No film: {error}", markup=False)
    best = checkpoints[scenario.evaluated[-1]]
    if problems := verify(best).problems:
        raise AssertionError(f"the demo's own checkpoint is not sound: {problems}")
    console.print(f"{best} is an OpenPI checkpoint (pistar verify: complete and valid).")
    console.print(f"Took {(time.monotonic() - since) / 60:.1f} minutes.")


def _train_all(out: Path, data: Path, seed: int, budget: Budget, console: Console) -> dict[str, Path]:
    """Train everything; returns the last checkpoint of each run."""
    scenario, checkpoints, weights = SCENARIOS[budget.algo], dict[str, Path](), out / "weights.npz"
    runs = _acrlpd_runs if budget.algo == "acrlpd" else _ript_runs
    for name, config in runs(out, data, seed, budget).items():
        if name != "bc":
            config = dataclasses.replace(config, checkpoint=str(checkpoints["bc"]))
        if name == "acrlpd":
            with _stage("weighing the demonstrations, window by window", console):
                _weigh(checkpoints["critic"], weights, console)
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, window_weights=weights))
        with _stage(f"training {scenario.names[name]}", console):
            checkpoints[name] = _train(config, console)
    return checkpoints


def _print_results(out: Path, scenario: Scenario, evaluations: Mapping[str, Evaluation], console: Console) -> None:
    """Print the table and the comparison, and draw the chart."""
    table = Table("", "succeeded", "rate", "95 %", title=f"{scenario.env}, held-out start states")
    counts = {name: evaluation.counts for name, evaluation in evaluations.items()}
    for name, each in counts.items():
        low, high = each.wilson_95
        rate = "–" if each.rate is None else f"{each.rate:.0%}"
        table.add_row(scenario.names[name], f"{each.succeeded}/{each.of}", rate, f"{low:.0%} to {high:.0%}")
    console.print(table)
    rival, best = scenario.evaluated[-2:]
    pairs = compare(evaluations[best], evaluations[rival])
    console.print(
        f"{_short(scenario, best)} against {_short(scenario, rival)}, start state by start state: {pairs.only_first} "
        f"only by {_short(scenario, best)}, {pairs.only_second} only by the other; p = {pairs.p:.2g} (McNemar, exact)."
    )
    picture, of = out / "result.svg", counts[best].of
    curves = {
        caption: _curve(read_metrics(out / "runs" / run / "metrics.jsonl"), metric)
        for run, metric, caption in scenario.curves
    }
    bars = {scenario.names[name]: (each.succeeded, each.of, *each.wilson_95) for name, each in counts.items()}
    title = f"{scenario.env}: successes of {of}, and how {_short(scenario, best)} learnt"
    picture.write_text(success_chart(bars, curves, title=title), encoding="utf-8")
    console.print(f"Drew {picture}")


def _short(scenario: Scenario, name: str) -> str:
    return scenario.names[name].partition(",")[0]


def _curve(metrics: list[dict[str, Any]], name: str) -> dict[int, float]:
    """A metric by step."""
    return {line["step"]: line[name] for line in metrics if name in line}


def _claim(out: Path, seed: int, budget: Budget) -> None:
    """Refuse a folder with results of another seed or budget."""
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


# --- The runs ---------------------------------------------------------------------------------------------------------


def _over(optimizer: AdamWConfig, updates: int) -> AdamWConfig:
    """The same optimiser with a learning rate that falls over this many updates."""
    peak = optimizer.schedule.peak_lr
    return dataclasses.replace(optimizer, schedule=CosineSchedule(min(100, updates // 10), peak, updates, peak / 10))


def _adapted(
    config: RLTrainConfig, out: Path, data: Path, seed: int, budget: Budget, name: str, steps: int
) -> RLTrainConfig:
    """A preset as a part of the demo: on its data, in its folder, with schedules that end with the run."""
    return dataclasses.replace(
        config,
        exp_name=name,
        data=dataclasses.replace(config.data, datasets=(str(data),), held_out=0.05 if budget.critic else 0.0),
        runs=out / "runs",
        steps=steps,
        batch_size=budget.batch,
        policy_optimizer=_over(config.policy_optimizer, steps),
        save_every=steps,
        log_every=max(10, steps // 30 // 10 * 10),
        seed=seed,
    )


def _acrlpd_runs(out: Path, data: Path, seed: int, budget: Budget) -> dict[str, RLTrainConfig]:
    """BC on everything; from there, BC on successes, a critic, and ACRLPD."""
    bc, rl = get_config("bc_metaworld"), get_config("rl_metaworld")
    acrlpd = rl.algorithm
    assert isinstance(acrlpd, AcrlpdConfig)
    # The policy is kept as it is while its critic learns, so that the data can be weighed once.
    critic = dataclasses.replace(
        acrlpd,
        actor="none",
        critic_warmup=0,
        audit_every=0,
        critic_optimizer=_over(acrlpd.critic_optimizer, budget.critic * acrlpd.critic_updates),
    )
    adapted = functools.partial(_adapted, out=out, data=data, seed=seed, budget=budget)
    filtered = dataclasses.replace(bc, data=dataclasses.replace(bc.data, only_successes=True))
    return {
        "bc": adapted(bc, name="bc", steps=budget.imitated),
        "successes": adapted(filtered, name="successes", steps=budget.improved),  # as many updates as ACRLPD
        "critic": adapted(dataclasses.replace(rl, algorithm=critic), name="critic", steps=budget.critic),
        "acrlpd": adapted(bc, name="acrlpd", steps=budget.improved),
    }


def _ript_runs(out: Path, data: Path, seed: int, budget: Budget) -> dict[str, RLTrainConfig]:
    """BC on the demonstrations, and RIPT from there."""
    scenario, ript = SCENARIOS["ript"], get_config("ript_metaworld")
    assert ript.online is not None
    online = dataclasses.replace(
        ript.online,
        environment=scenario.env,
        limit=scenario.limit,
        start_states_per_iteration=budget.start_states,
        updates=budget.updates,
        evaluate_every=2,
        evaluate_episodes=budget.tasks,
        # The start states of the final evaluation must not steer the run.
        health=dataclasses.replace(ript.online.health, max_success_drop=None),
    )
    demonstrations = dataclasses.replace(ript.data, datasets=(str(data),), held_out=0.0)
    return {
        "bc": _adapted(get_config("bc_metaworld"), out, data, seed, budget, "bc", budget.imitated),
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


def _train(config: RLTrainConfig, console: Console) -> Path:
    """Train, unless an earlier demo has."""
    done = saved_steps(config.folder / "checkpoints")
    if done and done[-1] == config.steps:
        console.print("done before")
        return config.folder / "checkpoints" / str(config.steps)
    train = offline.train if config.online is None else online_loop.train
    checkpoint = train(config, console, resume=bool(done), overwrite=not done)
    if checkpoint is None or int(checkpoint.name) < config.steps:
        raise UserError("Stopped; the same command continues.")
    return checkpoint


def _weigh(critic: Path, weights: Path, console: Console) -> None:
    """Weigh the data, unless an earlier demo has."""
    if weights.exists():
        console.print("done before")
        return
    with progress_bar("Weighing windows") as bar:
        console.print(weigh_dataset(critic, weights, progress=bar).summary(), highlight=False)


# --- Episodes ---------------------------------------------------------------------------------------------------------


def _settings(scenario: Scenario, episodes: int, starts: Literal["train", "held-out"], seed: int) -> EpisodeSettings:
    return EpisodeSettings(scenario.env, episodes, starts, options=EnvOptions(limit=scenario.limit), seed=seed)


def _collect(data: Path, seed: int, budget: Budget, console: Console) -> str:
    """Collect scripted demonstrations; returns how many succeeded, in words."""
    if data.exists():
        return ", from before"
    scenario = SCENARIOS[budget.algo]
    script = dataclasses.replace(scenario.script, seed=seed)
    settings, successes = _settings(scenario, budget.demonstrations, "train", seed), 0
    with show_episodes("demonstrations", console) as show:
        rollouts = run_task(scenario.env, settings, ActingPolicy(script, None, 1), record=True)
        scene, total, first = next(rollouts)
        with dataset_writer(data, scene, find_robot(scene.robot)) as writer:
            for rollout in (first, *(each for _, _, each in rollouts)):
                if rollout.episode is None:
                    raise UserError(f"The simulator failed: {rollout.faults[-1].detail}; try again.")
                writer.add(rollout.episode)
                successes += rollout.episode.success
                show(scene, total, rollout)
    return f", {successes} of them successful"


def _acting(policy: Policy, seed: int) -> ActingPolicy:
    return ActingPolicy(
        lambda count: Actor(policy, batch_size(count), seed), policy.robot, policy.config.action_horizon
    )


def _evaluate(checkpoint: Path, path: Path, seed: int, budget: Budget, console: Console) -> Evaluation:
    if path.exists():
        console.print("done before")
        return load_evaluation(path)
    policy, settings = load_policy(checkpoint), _settings(SCENARIOS[budget.algo], budget.tasks, "held-out", seed)
    acting = _acting(policy, seed)
    record = PolicyRecord(checkpoint=str(checkpoint), weights="serving", **policy.identity())
    prepared = prepare_evaluation(settings, acting, record)
    with show_episodes("episodes", console) as show:
        found = evaluate(prepared, settings, acting, each=show)
    found.save(path)
    console.print(f"by {found.weights_in_words}")
    return found
