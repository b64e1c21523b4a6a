"""How often a policy succeeds: counted, on which start states, with which seed, and how sure that is."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import jax

from pistar.data.lerobot_writer import DatasetWriter
from pistar.data.robots import ROBOTS, Robot
from pistar.data.transforms import flatten
from pistar.data.words import counted
from pistar.envs.env import EnvOptions, Scene, find_scene, find_tasks, told, usual_environments
from pistar.envs.rollout import Act, Rollout, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import Script
from pistar.errors import UserError
from pistar.training.results import Evaluation, TaskResult, Trial, versions

Starts = Literal["held-out", "train", "all"]


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
    environments: int | None = None
    """Side by side, half of them in each call of the policy; as usual for the environment if None. Another number
    changes the last bits of its actions."""
    workers: int | None = None
    """Processes; as many as cores if None, 0 for this one alone."""
    options: EnvOptions = dataclasses.field(default_factory=EnvOptions)
    seed: int = 0
    films: int = 0
    """Of how many episodes a task is filmed."""
    hang_after: float = 120.0
    """Seconds without a word after which a worker hangs, and is replaced."""

    def __post_init__(self) -> None:
        if self.environments is not None and self.environments < 1:
            raise UserError(f"--environments is {self.environments}; at least 1 environment is needed.")
        if self.workers is not None and self.workers < 0:
            raise UserError(f"--workers is {self.workers}; give the number of processes, or 0 to use none.")
        if not self.hang_after > 0:
            raise UserError(f"--hang-after is {self.hang_after:g}; give a number of seconds (120).")

    @property
    def side_by_side(self) -> int:
        """Environments, whoever chose the number."""
        return usual_environments(self.env, self.workers) if self.environments is None else self.environments


@dataclasses.dataclass(frozen=True)
class Player:
    """Who acts."""

    act: Callable[[int], Act] | Script
    """For so many environments at once."""
    robot: Robot | None
    """Whose actions these are; None for the environment's own script."""
    horizon: int
    """Actions in a chunk."""
    check_prompt: Callable[[str], None] = lambda _: None
    """Refuses instructions it cannot be asked with."""


def look_ahead(name: str, setting: Setting, player: Player) -> tuple[EnvOptions, Scene, list[int]]:
    """Of a task, before its simulators are built: the options with the cameras to render, the scene, and the start
    states to begin from. Refuses what cannot be run."""
    robot = player.robot
    if setting.execute is not None and not 1 <= setting.execute <= player.horizon:
        raise UserError(f"--execute is {setting.execute}; the policy's chunks have 1 to {player.horizon} actions.")
    options, scene = seen_by(robot, name, setting.options)
    player.check_prompt(scene.instruction)
    return options, scene, choose_starts(scene, setting.starts, setting.episodes)


def run_task(name: str, setting: Setting, player: Player, *, record: bool) -> Iterator[tuple[Scene, int, Rollout]]:
    """One task's episodes, in the order of their start states, with how many there will be."""
    options, scene, starts = look_ahead(name, setting, player)
    act = player.act if isinstance(player.act, Script) else player.act(setting.side_by_side)
    count = min(setting.side_by_side, len(starts))  # a simulator nobody begins in is memory and time
    execute = executed(setting, scene, player)
    with Environments(
        name, options, count=count, workers=setting.workers, chunk=max(64, execute), patience=setting.hang_after
    ) as envs:
        for rollout in roll_out(
            envs, starts, act, execute=execute, record=record, films=setting.films, seed=setting.seed
        ):
            yield envs.scene, len(starts), rollout


def seen_by(robot: Robot | None, name: str, options: EnvOptions) -> tuple[EnvOptions, Scene]:
    """A task's options with the cameras a robot's policies are shown, and its scene with them. Refuses the task of
    another robot. None: whoever needs nothing."""
    if robot is None:
        return options, find_scene(name, options)
    if options.cameras is None:
        options = dataclasses.replace(options, cameras=needed_cameras(robot))
    try:
        scene = find_scene(name, options)
    except UserError:  # its cameras may be what was refused, and another robot the reason
        check_robot(robot, find_scene(name, dataclasses.replace(options, cameras=())))
        raise
    check_robot(robot, scene)
    return options, scene


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
    theirs = ROBOTS.get(scene.robot)  # one's own environment may have a robot nobody else knows
    if theirs is not None and theirs.state_keys != robot.state_keys:
        raise UserError(
            f"The policy is told its state as {_told_state(robot)} ({robot.name}) and {scene.name} has "
            f"{_told_state(theirs)} ({scene.robot}); run it in an environment of its own robot."
        )


def _told_state(robot: Robot) -> str:
    return ", ".join(f"{counted(dim, 'number')} of {name}" for name, dim in robot.state_keys.items())


def executed(setting: Setting, scene: Scene, player: Player) -> int:
    """Actions of a chunk before the policy is asked again."""
    return min(setting.execute or scene.execute or player.horizon, player.horizon)


def prepare(
    setting: Setting,
    player: Player,
    *,
    checkpoint: str,
    weights: str,
    best_of: int = 1,
    served_average: bool | None = None,
    advantage: str | None = None,
    guidance: float = 1.0,
    contract: dict[str, str] | None = None,
    weights_sha256: str | None = None,
) -> Evaluation:
    """An evaluation before its first episode: every start state of every task, without an outcome. Refuses what cannot
    be run; and `results.differences` knows from it whether another can be compared with it."""
    results, execute = [], 0
    for name in find_tasks(setting.env):
        _, scene, starts = look_ahead(name, setting, player)
        execute = executed(setting, scene, player)
        trials = tuple(Trial(start_id, None, 0) for start_id in starts)
        results.append(TaskResult(name, scene.instruction, scene.limit, trials))
    return Evaluation(
        checkpoint=checkpoint,
        weights=weights,
        best_of=best_of,
        execute=execute,
        starts=setting.starts,
        seed=setting.seed,
        environments=setting.side_by_side,
        image_size=setting.options.image_size,
        shadows=setting.options.shadows,
        results=tuple(results),
        seconds=0.0,
        versions=versions(),
        served_average=served_average,
        advantage=advantage,
        guidance=guidance,
        contract=contract or {},
        weights_sha256=weights_sha256,
        device=_device(),
        complete=False,
    )


def evaluate(
    prepared: Evaluation,
    setting: Setting,
    player: Player,
    *,
    each: Callable[[Scene, int, Rollout], object] = lambda *_: None,
    each_task: Callable[[Evaluation], object] = lambda _: None,
    record: bool = False,
) -> Evaluation:
    """What was prepared with the same setting and player, with what came of it. `each` is told every episode as it
    ends, and of how many; `each_task`, after every task, what there is so far."""
    since, found = time.monotonic(), dataclasses.replace(prepared, results=())
    for task in prepared.results:
        trials: list[Trial] = []
        for scene, total, rollout in run_task(task.env, setting, player, record=record):
            trials.append(as_trial(rollout))
            each(scene, total, rollout)
        results = (*found.results, dataclasses.replace(task, trials=tuple(trials)))
        found = dataclasses.replace(
            found,
            results=results,
            seconds=round(time.monotonic() - since, 1),
            drawn_by=scene.drawn_by if scene.cameras or setting.films else None,
            complete=len(results) == len(prepared.results),
        )
        each_task(found)
    return found


def _device() -> str:
    device = jax.devices()[0]
    return " ".join(dict.fromkeys((device.platform, device.device_kind)))


def as_trial(rollout: Rollout) -> Trial:
    """What is counted of it."""
    faults = tuple(f"{fault.kind}: {fault.detail}" for fault in rollout.faults)
    if rollout.episode is None:
        # Left out of the count, a policy that tears its simulator apart would do better than one that merely fails.
        # But one that never began has nothing to do with it.
        by_policy = rollout.acted and {fault.kind for fault in rollout.faults} <= {"raised", "not finite", "lost"}
        return Trial(rollout.start_id, False if by_policy else None, 0, faults)
    return Trial(rollout.start_id, rollout.episode.success, len(rollout.episode.actions), faults)


def dataset_writer(path: Path, scene: Scene, robot: Robot) -> DatasetWriter:
    """For episodes of an environment, under the column names the robot's datasets usually have."""
    columns = {name: column for name, column in flatten(robot.repack).items() if name != "prompt"}
    columns.setdefault("environment_state", "observation.environment_state")
    for camera in scene.cameras:
        columns.setdefault(camera, f"observation.images.{camera.rpartition('/')[2]}")
    return DatasetWriter(path, fps=scene.fps, robot_type=robot.name, columns=columns)
