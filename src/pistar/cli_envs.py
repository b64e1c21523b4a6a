"""The commands that act in simulators: `pistar eval` and `pistar data collect`."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Column, Table

from pistar.config import check_seed, check_writable
from pistar.data.words import counted
from pistar.errors import UserError

if TYPE_CHECKING:
    from pistar.envs.env import Scene
    from pistar.envs.rollout import Act, Rollout
    from pistar.training.evaluation import Player, Setting
    from pistar.training.results import Counts, Evaluation, Trial

Checkpoint = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]


def evaluate(
    checkpoint: Checkpoint,
    /,
    env: str,
    episodes: int | None = None,
    starts: Literal["held-out", "train", "all"] = "held-out",
    against: Path | None = None,
    best_of: int = 1,
    weights: Literal["serving", "raw"] = "serving",
    advantage: Literal["positive", "negative"] | None = None,
    guidance: float = 1.0,
    execute: int | None = None,
    seed: int = 0,
    limit: int | None = None,
    shadows: bool = False,
    environments: int | None = None,
    workers: int | None = None,
    hang_after: float = 120.0,
    out: Path = Path("evaluation.json"),
    save_dataset: Path | None = None,
    video: int = 0,
    robot: str | None = None,
    tokenizer: str | None = None,
    asset_id: str | None = None,
    action_horizon: int | None = None,
    prompt_format: Literal["pi0", "pi05"] | None = None,
) -> None:
    """Count how often a policy succeeds in a simulator, and say how sure that is.

    Args:
        checkpoint: A step folder of pistar's or OpenPI's, or a .tar.gz of one.
        env: An environment or a suite: metaworld/pick-place-v3, aloha/transfer-cube, libero/spatial, libero/spatial/3,
            gymnasium/ID, or your own as module:function.
        episodes: For each task; the first so many start states, 100 (or all there are) if left out.
        starts: Which start states: held out from learning, those to learn from, or all.
        against: Another checkpoint, or what an evaluation wrote: compared start state by start state. A checkpoint is
            judged as OpenPI would serve it, whatever --best-of, --advantage and --guidance.
        best_of: Chunks to choose from by the run's critic; 1 is what OpenPI serves.
        weights: What the checkpoint serves, the average (EMA) if its run kept one; or raw, the optimiser's own.
        advantage: For policies that practised by cfg: "Advantage: positive" after every prompt asks for good actions.
        guidance: With --advantage, so many times as far from what it would do unasked; 1 is what OpenPI can serve.
        execute: Actions of a chunk before the policy looks again; as the benchmark's clients do if left out.
        seed: Of the policy's noise, which is made of it, the start state and the step.
        limit: Steps of an episode; the benchmark's own if left out.
        shadows: Render them, which takes several times as long; OpenPI's own clients do for ALOHA.
        environments: Side by side; one call of the policy serves half of them while the others act. 16 if left out, for
            LIBERO no more than 2 a worker.
        workers: Processes they are spread over; as many as cores if left out, 0 for none but this one.
        hang_after: Seconds without a word after which a worker is replaced and its episodes run again.
        out: JSON of everything: counts, intervals, the comparison, and every episode. Written after every task.
        save_dataset: A new folder for the episodes as a LeRobot v3.0 dataset.
        video: Film so many episodes of each task, next to --out.
        robot: Whose data it was trained on, for checkpoints of OpenPI's.
        tokenizer: PaliGemma's SentencePiece file, or "tiny" for pistar's own; found in OpenPI's cache if left out.
        asset_id: Which norm stats to use, where the checkpoint has several.
        action_horizon: Actions in a chunk, for checkpoints of OpenPI's.
        prompt_format: pi05 writes the state into the prompt; the model's own if left out.
    """
    from pistar.envs.env import EnvOptions, find_tasks
    from pistar.envs.rollout import batch_size
    from pistar.training.acting import Actor, learnt_labels, load_judge
    from pistar.training.contract import unheard
    from pistar.training.evaluation import Player, Setting, prepare
    from pistar.training.offline import use_compilation_cache
    from pistar.training.policy import Policy, load_policy
    from pistar.training.results import compare, differences, load_evaluation

    console, errors = Console(soft_wrap=True, highlight=False), Console(stderr=True)
    find_tasks(env)  # before anything is loaded
    if out.suffix != ".json" or out.is_dir():
        raise UserError(f"--out is {out}; an evaluation is a JSON file: name FILE.json.")
    check_writable("--out", out)
    if against is not None and against.resolve() == out.resolve():
        raise UserError(f"--against and --out are both {out}; it would be written over before it is compared with.")
    _check_numbers(seed, video)
    if save_dataset is not None and save_dataset.exists():
        raise UserError(f"--save-dataset {save_dataset} exists already; datasets are never written over.")
    if save_dataset is not None:
        check_writable("--save-dataset", save_dataset)
    if against is not None and not against.exists():
        raise UserError(f"--against {against} does not exist; name a checkpoint or a JSON file of pistar eval.")
    second = load_evaluation(against) if against is not None and against.suffix == ".json" else None
    options = EnvOptions(limit=limit, shadows=shadows)
    setting = Setting(env, episodes, starts, execute, environments, workers, options, seed, video, hang_after)
    use_compilation_cache()

    def load(path: Path, asked: Literal["positive", "negative", "none"], guided: float) -> Policy:
        return load_policy(
            path,
            robot=robot,
            tokenizer=tokenizer,
            asset_id=asset_id,
            action_horizon=action_horizon,
            prompt_format=prompt_format,
            weights=weights,
            advantage=asked,
            guidance=guided,
        )

    def player(path: Path, policy: Policy, best: int) -> Player:
        judge = load_judge(path) if best > 1 else None

        def act(count: int) -> Actor:
            return Actor(policy, batch_size(count), seed, best, judge)

        return Player(act, policy.robot, policy.config.action_horizon, policy.check_prompt)

    # Everything before the first episode: what is wrong with either, or with the pair, is told at once.
    policy = load(checkpoint, advantage or "none", guidance)
    mine = player(checkpoint, policy, best_of)
    first = prepare(
        setting,
        mine,
        checkpoint=str(checkpoint),
        weights=weights,
        best_of=best_of,
        advantage=advantage,
        guidance=guidance,
        **policy.identity(),
    )
    theirs, judged = None, [(checkpoint, policy)]
    if against is not None and second is None:
        policy = load(against, "none", 1.0)
        theirs, judged = player(against, policy, 1), [*judged, (against, policy)]
        second = prepare(setting, theirs, checkpoint=str(against), weights=weights, **policy.identity())
    name, other = _label(checkpoint), "" if second is None else _label(second.checkpoint)
    if name == other:
        other += " (against)"

    def differing() -> str:
        """What else differs, in words; empty if nothing does."""
        different = [] if second is None else differences(first, second)
        return f"besides the policies, these differ ({name} / {other}): {'; '.join(different)}." if different else ""

    if told := differing():
        _note(errors, told)
    for path, each in judged:
        if unlikely := unheard(each.taught, (task.instruction for task in first.results)):
            errors.print(f"warning: {_label(path)}: {unlikely}.", markup=False, highlight=False, soft_wrap=True)
    labels = learnt_labels(checkpoint)
    if labels and advantage is None:
        _note(errors, f"{name} practised by cfg; --advantage positive asks it for good actions.")
    if labels is False and advantage is not None:
        _note(errors, f"{name} was never told of advantages; to it, the label is a few more words.")

    written = [out]
    first = _evaluate(first, mine, name, setting, errors, save_dataset, written)
    heads = ("policy", "task", "succeeded", "of", "rate", "95 %", "steps to success")
    table = Table(*(Column(head, overflow="fold") for head in heads))  # a name that is cut off may be another's too
    _rows(table, name, first)
    if theirs is not None and second is not None:
        beside = [out.with_name(f"{out.stem}_against.json")]
        second = _evaluate(second, theirs, other, setting, errors, None, beside)
        written += beside
    if second is not None:
        first.save(out, second)
        _rows(table, other, second)
    console.print(table)
    _tell(name, first, console)
    if second is not None:
        _tell(other, second, console)
        pairs = compare(first, second)
        if told := differing():  # by now it is known what drew the pictures, too
            console.print(told, markup=False)
        console.print(
            f"On the same start states: both {pairs.both}, only {name} {pairs.only_first}, "
            f"only {other} {pairs.only_second}, neither {pairs.neither}; "
            f"p = {pairs.p:.2g} by McNemar's exact test.",
            markup=False,
        )
    console.print(f"Wrote {', '.join(map(str, written))}", markup=False)


def collect(
    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    episodes: int,
    expert: bool = False,
    mixed: float | None = None,
    policy: Path | None = None,
    noise: float = 0.0,
    starts: Literal["train", "held-out", "all"] = "train",
    seed: int = 0,
    limit: int | None = None,
    cameras: tuple[str, ...] | None = None,
    image_size: int = 224,
    shadows: bool = False,
    environments: int | None = None,
    workers: int | None = None,
    hang_after: float = 120.0,
    robot: str | None = None,
    tokenizer: str | None = None,
    asset_id: str | None = None,
    action_horizon: int | None = None,
    prompt_format: Literal["pi0", "pi05"] | None = None,
) -> None:
    """Collect episodes in a simulator as a LeRobot v3.0 dataset, with how each went.

    Args:
        env: metaworld/pick-place-v3, aloha/transfer-cube, or your own as module:function.
        out: The new dataset's folder.
        episodes: How many, each from a start state of its own.
        expert: By the environment's scripted expert.
        mixed: By Meta-World's expert with so large a share of spoilt segments, from 0 to 1.
        policy: By a checkpoint.
        noise: Deviation of what is added to every action, in the action's units.
        starts: Which start states.
        seed: Of all noise.
        limit: Steps of an episode; the benchmark's own if left out.
        cameras: What to record besides numbers, as images/corner2; what the robot's policies need if left out.
        image_size: Of what they see.
        shadows: Render them, which takes several times as long.
        environments: Side by side; 16 if left out, for LIBERO no more than 2 a worker.
        workers: Processes they are spread over; as many as cores if left out, 0 for none but this one.
        hang_after: Seconds without a word after which a worker is replaced and its episodes run again.
        robot: Whose data the policy was trained on, for checkpoints of OpenPI's.
        tokenizer: PaliGemma's SentencePiece file, or "tiny"; found in OpenPI's cache if left out.
        asset_id: Which norm stats to use, where the checkpoint has several.
        action_horizon: Actions in a chunk, for checkpoints of OpenPI's.
        prompt_format: pi05 writes the state into the prompt; the model's own if left out.
    """
    from pistar.data.robots import find_robot
    from pistar.envs.env import EnvOptions, check_expert, find_tasks
    from pistar.envs.rollout import batch_size
    from pistar.envs.worker import Script
    from pistar.training.acting import Actor, Noisy
    from pistar.training.evaluation import Player, Setting, as_trial, dataset_writer, run_task
    from pistar.training.offline import use_compilation_cache
    from pistar.training.policy import load_policy
    from pistar.training.progress import episodes_shown

    console, errors = Console(soft_wrap=True, highlight=False), Console(stderr=True)
    if sum((expert, mixed is not None, policy is not None)) != 1:
        raise UserError("Say who acts: one of --expert, --mixed 0.75 and --policy CHECKPOINT.")
    if mixed is not None and not 0 <= mixed <= 1:
        raise UserError(f"--mixed is {mixed}; it is a share from 0 to 1 (try 0.75).")
    if not 0 <= noise < float("inf"):
        raise UserError(f"--noise is {noise}; a deviation is a number of at least 0.")
    _check_numbers(seed)
    tasks = find_tasks(env)
    if expert:
        check_expert(env)
    if out.exists():
        raise UserError(f"{out} exists already; datasets are never written over: choose another name.")
    check_writable("OUT", out)
    options = EnvOptions(cameras=cameras, image_size=image_size, shadows=shadows, limit=limit)
    setting = Setting(env, episodes, starts, None, environments, workers, options, seed, hang_after=hang_after)
    if policy is not None:
        use_compilation_cache()
        loaded = load_policy(
            policy,
            robot=robot,
            tokenizer=tokenizer,
            asset_id=asset_id,
            action_horizon=action_horizon,
            prompt_format=prompt_format,
        )

        def noisy(count: int) -> "Act":
            act = Actor(loaded, batch_size(count), seed)
            return act if noise == 0 else Noisy(act, noise, seed)

        player = Player(noisy, loaded.robot, loaded.config.action_horizon)
    elif mixed is not None:
        player = Player(Script("pistar.envs.behaviours:mixed", {"noise": noise, "spoilt": mixed}, seed), None, 1)
    else:
        player = Player(Script("pistar.envs.behaviours:expert", {"noise": noise}, seed), None, 1)
    trials: list[Trial] = []
    with contextlib.ExitStack() as stack:
        writer = None
        show = stack.enter_context(episodes_shown("collecting", errors))
        for task in tasks:
            for scene, total, rollout in run_task(task, setting, player, record=True):
                if writer is None:
                    writer = stack.enter_context(dataset_writer(out, scene, player.robot or find_robot(scene.robot)))
                if rollout.episode is not None:
                    writer.add(rollout.episode)
                trials.append(as_trial(rollout))
                show(scene, total, rollout)
    kept, won = sum(trial.steps > 0 for trial in trials), sum(trial.success is True for trial in trials)
    _tell_faults(trials, {"failed so every time and are left out": len(trials) - kept}, console)
    console.print(f"Wrote {out}: {counted(kept, 'episode')}, {won} succeeded.", markup=False)


def _evaluate(
    prepared: "Evaluation",
    player: "Player",
    name: str,
    setting: "Setting",
    errors: Console,
    save_dataset: Path | None,
    written: list[Path],
) -> "Evaluation":
    """Saved after every task as the first that is written. With progress; films and the dataset, where they are wanted,
    are beside it, and noted."""
    from pistar.report.video import write_video
    from pistar.training.evaluation import dataset_writer, evaluate
    from pistar.training.progress import episodes_shown

    with contextlib.ExitStack() as stack:
        writer = None
        show = stack.enter_context(episodes_shown(name, errors))
        out = written[0]

        def each(scene: "Scene", total: int, rollout: "Rollout") -> None:
            nonlocal writer
            show(scene, total, rollout)
            if save_dataset is not None and rollout.episode is not None:
                if writer is None:
                    assert player.robot is not None
                    writer = stack.enter_context(dataset_writer(save_dataset, scene, player.robot))
                    written.append(save_dataset)
                writer.add(rollout.episode)
            if rollout.film:
                end = "success" if rollout.episode is not None and rollout.episode.success else "no_success"
                film = out.with_name(f"{out.stem}_{scene.name.replace('/', '_')}_{rollout.start_id}_{end}.mp4")
                write_video(film, rollout.film, scene.fps)
                written.append(film)

        def each_task(found: "Evaluation") -> None:
            found.save(out)

        return evaluate(prepared, setting, player, each=each, each_task=each_task, record=save_dataset is not None)


def _check_numbers(seed: int, video: int = 0) -> None:
    check_seed(seed, "--seed")
    if video < 0:
        raise UserError(f"--video is {video}; give a whole number from 0 up.")


def _label(path: str | Path) -> str:
    """A checkpoint by its run and step, or whatever it is called."""
    run, *step = [part for part in Path(path).parts if part != "checkpoints"][-2:]
    return "/".join([run, *step])


def _note(errors: Console, text: str) -> None:
    errors.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


def _rows(table: Table, name: str, evaluation: "Evaluation") -> None:
    def row(task: str, counts: "Counts") -> None:
        low, high = counts.wilson_95
        rate = "–" if counts.rate is None else f"{100 * counts.rate:.0f} %"
        mean = "–" if counts.mean_steps_to_success is None else f"{counts.mean_steps_to_success:.0f}"
        sure = f"{100 * low:.0f}–{100 * high:.0f} %"
        table.add_row(name, task, str(counts.succeeded), str(counts.of), rate, sure, mean)

    for task in evaluation.results:
        row(task.env, task.counts)
    if len(evaluation.results) > 1:
        row("all", evaluation.counts)


def _tell(name: str, evaluation: "Evaluation", console: Console) -> None:
    choice = f", best of {evaluation.best_of} by its critic" if evaluation.best_of > 1 else ""
    if evaluation.advantage is not None:
        guided = "" if evaluation.guidance == 1 else f" with guidance {evaluation.guidance:g}"
        choice += f", asked for “Advantage: {evaluation.advantage}”{guided}"
    console.print(
        f"{name}: by {evaluation.whose}{choice}; {evaluation.starts} start states, "
        f"seed {evaluation.seed}, {evaluation.execute} actions a chunk, {evaluation.seconds:.0f} s; "
        "95 % intervals by Wilson.",
        markup=False,
    )
    lost, gave_up = (sum(t.success is kind and t.steps == 0 for t in evaluation.trials) for kind in (None, False))
    given_up = {
        "could not be run at all and are not counted": lost,
        "failed so every time and count as failures": gave_up,
    }
    _tell_faults(evaluation.trials, given_up, console)


def _tell_faults(trials: Sequence["Trial"], given_up: Mapping[str, int], console: Console) -> None:
    """What simulators did, if anything, and what became of the episodes it hit: run again, but for so many."""
    from pistar.training.results import faults_of

    if not (faults := faults_of(trials)):
        return
    hit = sum(bool(trial.faults) for trial in trials)
    again = hit - sum(given_up.values())
    became = {"was run again" if again == 1 else "were run again": again, **given_up}
    parts = [f"{number} {what}" for what, number in became.items() if number]
    told = "all were run again" if again == hit else ", ".join(parts)
    counts = ", ".join(f"{kind} {count} ×" for kind, count in faults.items())
    console.print(f"note: the simulator failed ({counts}); of the episodes it hit, {told}.", markup=False)
