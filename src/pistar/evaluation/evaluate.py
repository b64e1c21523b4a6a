"""Count how often a policy succeeds: episodes of every task, from chosen start states, with a seed."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import jax

from pistar.data.lerobot.writer import DatasetWriter
from pistar.data.robots import ROBOTS, Robot
from pistar.data.transforms import flatten
from pistar.envs.base import EnvOptions, Scene, default_environment_count, find_scene, find_tasks, format_range
from pistar.envs.rollout import Act, Rollout, roll_out
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import Script
from pistar.errors import UserError
from pistar.evaluation.results import Evaluation, TaskResult, Trial, versions
from pistar.text import counted

StartSplit = Literal["held-out", "train", "all"]


def choose_starts(scene: Scene, starts: StartSplit, episodes: int | None) -> list[int]:
    """The first `episodes` start states of a split; None uses the first 100."""
    choice = {
        "held-out": list(scene.held_out),
        "train": list(scene.train),
        "all": [*scene.train, *scene.held_out],
    }[starts]
    if not choice:
        raise UserError(f"{scene.name} has no {starts} start states; choose others with --starts.")
    if episodes is None:
        return choice[:100]
    if not 1 <= episodes <= len(choice):
        raise UserError(
            f"--episodes is {episodes}; {scene.name} has {len(choice)} {starts} start states "
            f"(train {format_range(scene.train)}, held-out {format_range(scene.held_out)})."
        )
    return choice[:episodes]


@dataclasses.dataclass(frozen=True)
class EpisodeSettings:
    """Where and how episodes are run."""

    env: str
    """An environment or a suite: metaworld/pick-place-v3, aloha/transfer-cube, libero/spatial, libero/spatial/3,
    gymnasium/ID, or your own as module:function."""
    episodes: int | None = None
    """Episodes of each task, from the first start states. None uses 100, or all if there are fewer."""
    starts: StartSplit = "held-out"
    """Which start states: those held out from learning, those to learn from, or all."""
    execute: int | None = None
    """Actions of a chunk that are executed before the policy is queried again. None uses the benchmark's default."""
    environments: int | None = None
    """Number of environments that run in parallel; each call of the policy takes half of them. None uses 16, and for
    LIBERO at most 2 per worker. Another number changes the last bits of the actions."""
    workers: int | None = None
    """Number of worker processes for the environments. None uses one per core; 0 runs them in this process."""
    options: EnvOptions = dataclasses.field(default_factory=EnvOptions)
    seed: int = 0
    """Seed of the policy's noise, which derives from it, the start state and the step."""
    films: int = 0
    """Episodes of each task to film."""
    hang_after: float = 120.0
    """Seconds without an answer after which a worker is replaced and its episodes run again."""

    def __post_init__(self) -> None:
        if self.environments is not None and self.environments < 1:
            raise UserError(f"--environments is {self.environments}; at least 1 environment is needed.")
        if self.workers is not None and self.workers < 0:
            raise UserError(f"--workers is {self.workers}; give the number of processes, or 0 to use none.")
        if not self.hang_after > 0:
            raise UserError(f"--hang-after is {self.hang_after:g}; give a number of seconds (120).")

    @property
    def side_by_side(self) -> int:
        """Number of environments side by side."""
        return default_environment_count(self.env, self.workers) if self.environments is None else self.environments


@dataclasses.dataclass(frozen=True)
class ActingPolicy:
    """A policy or a script that acts in environments."""

    act: Callable[[int], Act] | Script
    """Given the number of environments, what answers their requests."""
    robot: Robot | None
    """The robot whose actions these are; None for the environment's own script."""
    horizon: int
    """Actions in a chunk."""
    check_prompt: Callable[[str], None] = lambda _: None
    """Refuses instructions it cannot follow."""


def prepare_task(name: str, settings: EpisodeSettings, policy: ActingPolicy) -> tuple[EnvOptions, Scene, list[int]]:
    """The environment's options with the cameras to render, the scene, and the start states of a task.

    No simulator is built yet. Refuses what cannot be run.
    """
    robot = policy.robot
    if settings.execute is not None and not 1 <= settings.execute <= policy.horizon:
        raise UserError(f"--execute is {settings.execute}; the policy's chunks have 1 to {policy.horizon} actions.")
    options, scene = with_cameras(robot, name, settings.options)
    policy.check_prompt(scene.instruction)
    return options, scene, choose_starts(scene, settings.starts, settings.episodes)


def run_task(
    name: str, settings: EpisodeSettings, policy: ActingPolicy, *, record: bool
) -> Iterator[tuple[Scene, int, Rollout]]:
    """Run a task's episodes in the order of their start states; yields the scene, their number and each episode."""
    options, scene, starts = prepare_task(name, settings, policy)
    act = policy.act if isinstance(policy.act, Script) else policy.act(settings.side_by_side)
    count = min(settings.side_by_side, len(starts))  # an unused simulator costs memory and time
    execute = executed_actions(settings, scene, policy)
    with Environments(
        name, options, count=count, workers=settings.workers, chunk=max(64, execute), patience=settings.hang_after
    ) as envs:
        for rollout in roll_out(
            envs, starts, act, execute=execute, record=record, films=settings.films, seed=settings.seed
        ):
            yield envs.scene, len(starts), rollout


def with_cameras(robot: Robot | None, name: str, options: EnvOptions) -> tuple[EnvOptions, Scene]:
    """A task's options with the cameras a robot's policies see, and its scene. Refuses the task of another robot."""
    if robot is None:
        return options, find_scene(name, options)
    if options.cameras is None:
        options = dataclasses.replace(options, cameras=needed_cameras(robot))
    try:
        scene = find_scene(name, options)
    except UserError:  # cameras may have been refused because the robot is another
        check_robot(robot, find_scene(name, dataclasses.replace(options, cameras=())))
        raise
    check_robot(robot, scene)
    return options, scene


def needed_cameras(robot: Robot) -> tuple[str, ...]:
    """The cameras its policies see."""
    return tuple(path for path in robot.cameras.values() if path is not None and path not in robot.optional_cameras)


def check_robot(robot: Robot, scene: Scene) -> None:
    """Refuse a policy of another robot."""
    if robot.action_dim != scene.action_dim:
        raise UserError(
            f"The policy acts with {robot.action_dim} numbers ({robot.name}) and {scene.name} takes {scene.action_dim} "
            f"({scene.robot}); run it in an environment of its own robot."
        )
    theirs = ROBOTS.get(scene.robot)  # a user's own environment may have an unknown robot
    if theirs is not None and theirs.state_keys != robot.state_keys:
        raise UserError(
            f"The policy's state is {_describe_state(robot)} ({robot.name}) and that of {scene.name} is "
            f"{_describe_state(theirs)} ({scene.robot}); run it in an environment of its own robot."
        )


def _describe_state(robot: Robot) -> str:
    return ", ".join(f"{counted(dim, 'number')} of {name}" for name, dim in robot.state_keys.items())


def executed_actions(settings: EpisodeSettings, scene: Scene, policy: ActingPolicy) -> int:
    """Actions of a chunk that are executed before the policy is queried again."""
    return min(settings.execute or scene.execute or policy.horizon, policy.horizon)


@dataclasses.dataclass(frozen=True)
class PolicyRecord:
    """What an evaluation records of the policy it is about."""

    checkpoint: str
    weights: str
    best_of: int = 1
    served_average: bool | None = None
    advantage: str | None = None
    guidance: float = 1.0
    contract: dict[str, str] = dataclasses.field(default_factory=dict)
    weights_sha256: str | None = None


def prepare_evaluation(settings: EpisodeSettings, policy: ActingPolicy, record: PolicyRecord) -> Evaluation:
    """An evaluation before its first episode: every start state of every task, without an outcome.

    Refuses what cannot be run. `results.differences` says whether another evaluation can be compared with it.
    """
    results, execute = [], 0
    for name in find_tasks(settings.env):
        _, scene, starts = prepare_task(name, settings, policy)
        execute = executed_actions(settings, scene, policy)
        trials = tuple(Trial(start_id, None, 0) for start_id in starts)
        results.append(TaskResult(name, scene.instruction, scene.limit, trials))
    return Evaluation(
        **vars(record),
        execute=execute,
        starts=settings.starts,
        seed=settings.seed,
        environments=settings.side_by_side,
        image_size=settings.options.image_size,
        shadows=settings.options.shadows,
        results=tuple(results),
        seconds=0.0,
        versions=versions(),
        device=_device(),
        complete=False,
    )


def evaluate(
    prepared: Evaluation,
    settings: EpisodeSettings,
    policy: ActingPolicy,
    *,
    each: Callable[[Scene, int, Rollout], object] = lambda *_: None,
    each_task: Callable[[Evaluation], object] = lambda _: None,
    record: bool = False,
) -> Evaluation:
    """Run a prepared evaluation with the same settings and policy.

    `each` is called with every episode as it ends, `each_task` after every task with the results so far.
    """
    since, found = time.monotonic(), dataclasses.replace(prepared, results=())
    for task in prepared.results:
        trials: list[Trial] = []
        for scene, total, rollout in run_task(task.env, settings, policy, record=record):
            trials.append(as_trial(rollout))
            each(scene, total, rollout)
        results = (*found.results, dataclasses.replace(task, trials=tuple(trials)))
        found = dataclasses.replace(
            found,
            results=results,
            seconds=round(time.monotonic() - since, 1),
            drawn_by=scene.drawn_by if scene.cameras or settings.films else None,
            complete=len(results) == len(prepared.results),
        )
        each_task(found)
    return found


def _device() -> str:
    device = jax.devices()[0]
    return " ".join(dict.fromkeys((device.platform, device.device_kind)))


def as_trial(rollout: Rollout) -> Trial:
    """What is counted of an episode."""
    faults = tuple(f"{fault.kind}: {fault.detail}" for fault in rollout.faults)
    if rollout.episode is None:
        # Not counting it would favour a policy that breaks its simulator over one that merely fails. An episode that
        # never started says nothing of the policy.
        by_policy = rollout.acted and {fault.kind for fault in rollout.faults} <= {"raised", "not finite", "lost"}
        return Trial(rollout.start_id, False if by_policy else None, 0, faults)
    return Trial(rollout.start_id, rollout.episode.success, len(rollout.episode.actions), faults)


def dataset_writer(path: Path, scene: Scene, robot: Robot) -> DatasetWriter:
    """A writer for episodes of an environment, with the column names of the robot's datasets."""
    columns = {name: column for name, column in flatten(robot.repack).items() if name != "prompt"}
    columns.setdefault("environment_state", "observation.environment_state")
    for camera in scene.cameras:
        columns.setdefault(camera, f"observation.images.{camera.rpartition('/')[2]}")
    return DatasetWriter(path, fps=scene.fps, robot_type=robot.name, columns=columns)
