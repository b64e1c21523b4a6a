"""`pistar data …`: convert, check, show, collect and weigh datasets."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.text import Text

from pistar.cli.printing import and_more, make_table, note, print_faults
from pistar.cli.printing import out as standard_output
from pistar.cli.rollout_options import RolloutOptions
from pistar.errors import UserError, check_writable
from pistar.policy.options import PolicyOptions
from pistar.text import counted, numbered, ranges

if TYPE_CHECKING:
    from pistar.data.checks.findings import CheckReport
    from pistar.envs.rollout import Act
    from pistar.evaluation.evaluate import ActingPolicy
    from pistar.evaluation.results import Trial

Dataset = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATASET")]


def stats(
    dataset: Dataset,
    /,
    robot: str,
    out: Path,
    horizon: int = 50,
) -> None:
    """Compute OpenPI's norm_stats.json of a LeRobot dataset, without opening a video.

    Args:
        dataset: A LeRobot folder, or a repo id in LeRobot's cache.
        robot: Robot of the data: aloha, aloha_sim, libero, libero_delta, droid, droid_position, metaworld,
            metaworld_camera.
        out: Folder for norm_stats.json, for example assets/my_task.
        horizon: Number of actions in a chunk. It matters for relative actions, whose range grows along the chunk.
    """
    from pistar.data.dataset_stats import compute_norm_stats
    from pistar.data.lerobot.reader import open_dataset
    from pistar.data.norm_stats import check_norm_stats, save_norm_stats
    from pistar.data.robots import find_robot

    opened = open_dataset(dataset)
    with Console(stderr=True).status("reading number columns"):
        computed = compute_norm_stats(opened, find_robot(robot), horizon)
    title = f"{dataset}: {counted(len(opened.episodes), 'episode')}"
    table = make_table("", "dim", "mean", "std", "q01", "q99", title=Text(title))
    for name, entry in computed.items():
        columns = [entry.mean, entry.std, entry.q01, entry.q99]
        for dim in range(len(entry.mean)):
            values = ["" if column is None else f"{column[dim]:.4g}" for column in columns]
            table.add_row(name, str(dim), *values)
    console = standard_output()
    console.print(table)
    for text in check_norm_stats(computed, "quantile"):
        console.print(f"note: {text}", markup=False)
    out.mkdir(parents=True, exist_ok=True)
    save_norm_stats(out / "norm_stats.json", computed)
    console.print(f"Wrote {out / 'norm_stats.json'}", markup=False)


def convert(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    task: str,
    fps: int = 50,
    without_scores: Literal["success", "failure", "timeout"] | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
) -> None:
    """Convert a folder of ALOHA HDF5 episodes to a LeRobot v3.0 dataset. If interrupted, the same command continues.

    Args:
        folder: Folder with the episodes; subfolders score_5, score_1 … contain their outcomes.
        out: The new dataset's folder.
        task: The instruction, for example "fold the towel".
        fps: Control rate of the robot in steps per second.
        without_scores: Outcome of all episodes, if no folder gives it.
        workers: Number of cameras that are compressed in parallel. The default is the number of cores.
    """
    from rich.progress import Progress

    from pistar.data.hdf5.convert import convert_hdf5
    from pistar.data.success_sources import FromScores

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        converting = bar.add_task("converting", total=None)

        def show_progress(ready: int, total: int) -> None:
            if ready and bar.tasks[0].total is None:
                console.print(f"continuing: {ready} of {total} episodes were already converted", markup=False)
            bar.update(converting, completed=ready, total=total)

        scores = without_scores or FromScores()
        done = convert_hdf5(folder, out, fps=fps, task=task, scores=scores, workers=workers, progress=show_progress)
    for text in done.notes:
        note(text)
    successes = "1 success" if done.successes == 1 else f"{done.successes} successes"
    counts = f"{counted(done.episodes, 'episode')}, {counted(done.frames, 'frame')}, {successes}"
    standard_output().print(f"Wrote {done.path}: {counts}.", markup=False)


def check(
    dataset: Dataset,
    /,
    fix: Annotated[Path | None, tyro.conf.arg(metavar="OUT")] = None,
    frames: bool = False,
) -> None:
    """List a LeRobot dataset's broken episodes; exit code 1 if there are any.

    Args:
        dataset: A LeRobot folder, or a repo id in LeRobot's cache. It is never written to.
        fix: New folder for a cleaned v3.0 copy without the episodes that cannot be fixed.
        frames: Also decode every frame, to find broken, black and frozen ones. This takes as long as decoding all
            videos.
    """
    from rich.progress import Progress

    from pistar.data.checks.check import check_dataset, clean_copy
    from pistar.data.lerobot.destination import require_new
    from pistar.data.lerobot.reader import find_dataset

    if fix is not None:
        require_new(fix, find_dataset(dataset))  # before the work, not after
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("checking", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        report = check_dataset(dataset, frames=frames, progress=progress)
        _print_findings(report)
        if fix is not None:
            clean_copy(report, fix, progress=progress)
    if fix is not None:
        _print_copy(report, fix)
    elif report.errors:
        raise _findings_error(dataset, report)


def _print_findings(report: "CheckReport") -> None:
    from pistar.data.checks.findings import grouped

    if groups := grouped(report.findings):
        table = make_table("", "episode", "kind", "problem", "--fix", title=Text(str(report.dataset.root)))
        for finding, episodes in groups:
            mark = Text("✗", "red") if finding.severity == "error" else Text("!", "yellow")
            done = "fixes" if finding.fix is not None else "leaves out" if finding.severity == "error" else ""
            if finding.fix is None and finding.severity == "error" and not episodes:
                done = "cannot"
            table.add_row(mark, ranges(episodes) or "all", finding.kind, Text(finding.message), done)
        standard_output().print(table)
    states = f"{len(report.intact)} intact, {len(report.fixable)} fixable, {len(report.dropped)} lost"
    counts = f"{counted(len(report.errors), 'error')}, {counted(len(report.warnings), 'warning')}"
    total = counted(len(report.dataset.episodes), "episode")
    standard_output().print(f"{total}: {states}; {counts}.", markup=False)


def _print_copy(report: "CheckReport", fix: Path) -> None:
    left_out = numbered(report.dropped, "episode") if report.dropped else "nothing"
    fixed = "; ".join(what if count == 1 else f"{what} ({count} times)" for what, count in report.fixes.items())
    console = standard_output()
    console.print(f"Wrote {fix}: {counted(len(report.kept), 'episode')}; videos copied byte for byte.", markup=False)
    console.print(f"Left out: {left_out}.", markup=False)
    console.print(f"Fixed: {fixed or 'nothing'}.", markup=False)


def _findings_error(dataset: str, report: "CheckReport") -> UserError:
    from pistar.data.checks.findings import grouped

    errors = grouped(report.errors)
    first, episodes = errors[0]
    where = f"{numbered(episodes, 'episode')}: " if episodes else ""
    remedy = "no episode can be kept: record or copy the dataset again."
    if report.can_be_copied:
        remedy = "write a copy of what can be kept with --fix OUT."
    elif report.kept:
        remedy = "--fix cannot fix that."
    return UserError(f"{dataset}: {where}{and_more(first.message, len(errors) - 1)}; {remedy}")


def show(
    dataset: Dataset,
    episode: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="EPISODE")],
    /,
    out: Path = Path("episode.png"),
    columns: int = 8,
) -> None:
    """Draw an episode as one image: camera frames, actions, states, rewards and the end.

    Args:
        dataset: A LeRobot folder, or a repo id in LeRobot's cache.
        episode: Number of the episode.
        out: The PNG to write.
        columns: Number of frames per camera, evenly spaced in time.
    """
    from pistar.data.checks.episode_view import view_episode
    from pistar.report.contact_sheet import EpisodeOutcome, Signal, contact_sheet

    if columns < 1:
        raise UserError(f"--columns is {columns}; show at least 1 frame (try 8).")
    if out.suffix.lower() != ".png":
        raise UserError(f"--out is {out}; it is a PNG: give it a name that ends in .png.")
    if not out.parent.is_dir():
        raise UserError(f"--out is {out} and there is no folder {out.parent}; create it, or name another place.")
    check_writable("--out", out)
    view = view_episode(dataset, episode, columns)
    length, fps = view.info.length, view.dataset.fps
    outcome = {
        key: view.numbers[name][:, 0]
        for key, name in (("rewards", "next.reward"), ("done", "next.done"), ("success", "next.success"))
        if name in view.numbers
    }
    sheet = contact_sheet(
        title=", ".join(view.info.tasks) or "(no task)",
        subtitle=f"episode {episode} of {view.dataset.root.name}: {counted(length, 'frame')} at {fps:g} fps, "
        f"{length / fps:.2f} s",
        fps=fps,
        frames=view.frames,
        images=view.images,
        signals={name: Signal(view.numbers[name], names) for name, names in view.signals.items()},
        outcome=EpisodeOutcome(**outcome),
        notes=view.notes,
    )
    for text in view.notes:
        note(text)
    sheet.save(out)
    standard_output().print(f"Wrote {out}", markup=False)


def collect(
    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    episodes: int,
    rollouts: Annotated[RolloutOptions, tyro.conf.OmitArgPrefixes],
    checkpoint: Annotated[PolicyOptions, tyro.conf.OmitArgPrefixes],
    expert: bool = False,
    mixed: float | None = None,
    policy: Path | None = None,
    noise: float = 0.0,
    starts: Literal["train", "held-out", "all"] = "train",
    cameras: tuple[str, ...] | None = None,
    image_size: int = 224,
) -> None:
    """Collect episodes in a simulator as a LeRobot v3.0 dataset, with their outcomes.

    Args:
        env: Environment: metaworld/pick-place-v3, aloha/transfer-cube, or your own as module:function.
        out: The new dataset's folder.
        episodes: Number of episodes, each from its own start state.
        rollouts: How episodes are run.
        checkpoint: How the checkpoint of --policy is used.
        expert: Use the environment's scripted expert.
        mixed: Use Meta-World's expert with this fraction of its segments corrupted, from 0 to 1.
        policy: Use the policy of this checkpoint.
        noise: Standard deviation of the noise added to every action, in the action's units.
        starts: Start states to use: those to train on, those held out from training, or all.
        cameras: Cameras to record, for example images/corner2. The default is those that the robot's policies need.
        image_size: Side of the recorded images in pixels.
    """
    from pistar.data.robots import find_robot
    from pistar.envs.base import EnvOptions, check_expert, find_tasks
    from pistar.evaluation.evaluate import EpisodeSettings, as_trial, dataset_writer, run_task
    from pistar.telemetry.progress import show_episodes

    if sum((expert, mixed is not None, policy is not None)) != 1:
        raise UserError("Choose one of --expert, --mixed 0.75 and --policy CHECKPOINT.")
    if mixed is not None and not 0 <= mixed <= 1:
        raise UserError(f"--mixed is {mixed}; it is a fraction from 0 to 1 (try 0.75).")
    if not 0 <= noise < float("inf"):
        raise UserError(f"--noise is {noise}; a standard deviation is a number of at least 0.")
    tasks = find_tasks(env)
    if expert:
        check_expert(env)
    if out.exists():
        raise UserError(f"{out} exists already; datasets are never overwritten: choose another name.")
    check_writable("OUT", out)
    env_options = EnvOptions(cameras=cameras, image_size=image_size, shadows=rollouts.shadows, limit=rollouts.limit)
    settings = EpisodeSettings(env, episodes, starts, options=env_options, **rollouts.shared())
    if policy is not None:
        acting = _acting_checkpoint(policy, checkpoint, noise, rollouts.seed)
    else:
        acting = _acting_script(mixed, noise, rollouts.seed)
    trials: list[Trial] = []
    with contextlib.ExitStack() as stack:
        writer = None
        show_progress = stack.enter_context(show_episodes("collecting", Console(stderr=True)))
        for task in tasks:
            for scene, total, rollout in run_task(task, settings, acting, record=True):
                if writer is None:
                    robot = acting.robot or find_robot(scene.robot)
                    writer = stack.enter_context(dataset_writer(out, scene, robot))
                if rollout.episode is not None:
                    writer.add(rollout.episode)
                trials.append(as_trial(rollout))
                show_progress(scene, total, rollout)
    kept, succeeded = sum(trial.steps > 0 for trial in trials), sum(trial.success is True for trial in trials)
    console = standard_output()
    print_faults(trials, {"failed so every time and are left out": len(trials) - kept}, console)
    console.print(f"Wrote {out}: {counted(kept, 'episode')}, {succeeded} succeeded.", markup=False)


def _acting_checkpoint(path: Path, options: PolicyOptions, noise: float, seed: int) -> "ActingPolicy":
    from pistar.distributed.compilation_cache import use_compilation_cache
    from pistar.envs.rollout import batch_size
    from pistar.evaluation.evaluate import ActingPolicy
    from pistar.policy.actor import Actor, NoisyActor
    from pistar.policy.load_policy import load_policy

    use_compilation_cache()
    loaded = load_policy(path, options)

    def act(count: int) -> "Act":
        actor = Actor(loaded, batch_size(count), seed)
        return actor if noise == 0 else NoisyActor(actor, noise, seed)

    return ActingPolicy(act, loaded.robot, loaded.config.action_horizon, loaded.check_prompt)


def _acting_script(mixed: float | None, noise: float, seed: int) -> "ActingPolicy":
    from pistar.envs.vector.worker import Script
    from pistar.evaluation.evaluate import ActingPolicy

    if mixed is not None:
        script = Script("pistar.envs.scripted:mixed", {"noise": noise, "spoilt": mixed}, seed)
    else:
        script = Script("pistar.envs.scripted:expert", {"noise": noise}, seed)
    return ActingPolicy(script, None, 1)


def weigh(
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT.npz")],
    /,
    beta: float | None = None,
    clip: float | None = None,
) -> None:
    """Compute AWR weights of all windows of a critic's run, for `pistar train bc_… --data.window-weights OUT.npz`.

    Args:
        checkpoint: A checkpoint of a run with a critic, in its folder: runs/NAME/checkpoints/STEP.
        out: The file to write.
        beta: Temperature in standard deviations of the advantage. The default is the run's own.
        clip: Largest weight, before weights are divided by their mean. The default is the run's own.
    """
    from pistar.distributed.compilation_cache import use_compilation_cache
    from pistar.telemetry.progress import progress_bar
    from pistar.training.weigh_dataset import weigh_dataset

    if out.suffix != ".npz" or out.is_dir():
        raise UserError(f"{out} is not an .npz file name; weights are saved as FILE.npz.")
    if beta is not None and not 0 < beta < float("inf"):
        raise UserError(f"--beta is {beta}; a temperature is positive and finite (try 0.5).")
    if clip is not None and not 1 <= clip < float("inf"):
        raise UserError(f"--clip is {clip}; an average window weighs 1, clip above that (20).")
    use_compilation_cache()
    with progress_bar("Weighing windows") as bar:
        weighed = weigh_dataset(checkpoint, out, beta=beta, clip=clip, progress=bar)
    console = standard_output()
    console.print(weighed.summary(), markup=False)
    console.print(f"Wrote {out}", markup=False)
