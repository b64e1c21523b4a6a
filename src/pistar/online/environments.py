"""The environments of an online run: their tasks found and checked, their simulators built."""

from collections.abc import Sequence

from pistar.config.online import StartStatesConfig
from pistar.config.train import RLTrainConfig
from pistar.distributed.multihost import several
from pistar.envs.base import EnvOptions, find_tasks
from pistar.envs.vector.vector import Environments
from pistar.errors import UserError
from pistar.evaluation.evaluate import check_robot, needed_cameras, with_cameras
from pistar.text import counted
from pistar.training.setup import OnlineRun


def find_run_tasks(config: RLTrainConfig) -> list[str]:
    """Names of the run's tasks, before anything is loaded. Refuses settings that cannot work there."""
    online = config.online
    assert online is not None
    if online.exploration.state_noise and config.model.pi05:
        raise UserError(
            f"online.exploration.state_noise is {online.exploration.state_noise}: it shifts the state among the "
            "model's inputs, and π₀.₅ reads it in its prompt, if at all; set it to 0."
        )
    if several() and online.engine == "ray" and online.workers is None:
        raise UserError(
            "online.engine is ray and online.workers none, one per core of Ray: one host would leave the others "
            "nothing; give --online.workers, each host's part."
        )
    return [task for name in online.environment.split(",") for task in find_tasks(name.strip())]


def build_environments(run: OnlineRun, tasks: Sequence[str]) -> Environments:
    """Build the simulators, and check them against the policy and the settings."""
    online, robot = run.online, run.context.inputs.robot
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
        if online.engine == "processes":  # with Ray, the simulator may be installed elsewhere only
            for name in tasks:
                with_cameras(robot, name, options)  # cameras of another robot may have been refused: say so
        raise
    try:
        _check(run, envs)
    except BaseException:
        envs.close()
        raise
    return envs


def pool_notes(run: OnlineRun, envs: Environments) -> list[str]:
    """Note a pool that is larger than the tasks have start states."""
    pool = run.online.start_states.pool
    small = {name: len(scene.train) for name, scene in envs.scenes.items() if len(scene.train) < pool}
    if not small or pool == StartStatesConfig.pool:  # nobody chose the default
        return []
    name, count = min(small.items(), key=lambda item: item[1])
    others = f" ({counted(len(small) - 1, 'other task')} also fewer than {pool})" if len(small) > 1 else ""
    return [
        f"online.start_states.pool is {pool} and {name} has {counted(count, 'start state')} to train on{others}; all "
        "of them are used"
    ]


def _check(run: OnlineRun, envs: Environments) -> None:
    online, horizon = run.online, run.config.model.action_horizon
    check_robot(run.context.inputs.robot, envs.scene)
    for name, scene in envs.scenes.items():
        if online.evaluate_episodes > len(scene.held_out):
            raise UserError(
                f"online.evaluate_episodes is {online.evaluate_episodes} and {name} has "
                f"{counted(len(scene.held_out), 'held-out start state')}; use fewer."
            )
    if (online.execute or 1) > horizon:
        raise UserError(f"online.execute is {online.execute}; the policy's chunks have {counted(horizon, 'action')}.")
