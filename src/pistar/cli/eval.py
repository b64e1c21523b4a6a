"""`pistar eval`: count how often a policy succeeds in a simulator."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Column, Table

from pistar.cli.printing import note, print_faults
from pistar.cli.printing import out as standard_output
from pistar.cli.rollout_options import RolloutOptions
from pistar.errors import UserError, check_writable
from pistar.policy.options import PolicyOptions

if TYPE_CHECKING:
    from pistar.envs.base import Scene
    from pistar.envs.rollout import Rollout
    from pistar.evaluation.evaluate import ActingPolicy, EpisodeSettings
    from pistar.evaluation.results import Counts, Evaluation
    from pistar.policy.load_policy import Policy

CheckpointPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """Files an evaluation writes."""

    out: Path = Path("evaluation.json")
    """JSON file for counts, intervals, the comparison and every episode. It is written after every task."""
    overwrite: bool = False
    """Replace the evaluation that --out already contains. Without this option an existing file is refused."""
    save_dataset: Path | None = None
    """New folder for the episodes as a LeRobot v3.0 dataset."""
    video: int = 0
    """Number of episodes per task to film. Films are written next to --out."""

    def __post_init__(self) -> None:
        if self.video < 0:
            raise UserError(f"--video is {self.video}; give a whole number from 0 up.")

    @property
    def against_out(self) -> Path:
        """JSON file of the checkpoint to compare with."""
        return self.out.with_name(f"{self.out.stem}_against.json")

    def check(self, against: Path | None) -> None:
        """Refuse places that cannot be written, before the work."""
        if self.out.suffix != ".json" or self.out.is_dir():
            raise UserError(f"--out is {self.out}; an evaluation is a JSON file: name FILE.json.")
        check_writable("--out", self.out)
        if against is not None and against.resolve() == self.out.resolve():
            raise UserError(f"--against and --out are both {self.out}; it would be overwritten before it is read.")
        files = [self.out] if against is None or against.suffix == ".json" else [self.out, self.against_out]
        if (taken := [path for path in files if path.exists()]) and not self.overwrite:
            raise UserError(f"{taken[0]} exists already; name another --out, or replace that evaluation: --overwrite.")
        if self.save_dataset is not None:
            if self.save_dataset.exists():
                raise UserError(f"--save-dataset {self.save_dataset} exists already; datasets are never overwritten.")
            check_writable("--save-dataset", self.save_dataset)
        if against is not None and not against.exists():
            raise UserError(f"--against {against} does not exist; name a checkpoint or a JSON file of pistar eval.")


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A policy in an evaluation, and its results so far."""

    name: str
    policy: "ActingPolicy | None"
    """None if the results were read from a file."""
    results: "Evaluation"
    instructions: tuple[str, ...] | None = None
    """Instructions it was trained on, if known."""


def evaluate(
    checkpoint: CheckpointPath,
    /,
    env: str,
    rollouts: Annotated[RolloutOptions, tyro.conf.OmitArgPrefixes],
    output: Annotated[OutputOptions, tyro.conf.OmitArgPrefixes],
    policy: Annotated[PolicyOptions, tyro.conf.OmitArgPrefixes],
    episodes: int | None = None,
    starts: Literal["held-out", "train", "all"] = "held-out",
    against: Path | None = None,
    best_of: int = 1,
    execute: int | None = None,
) -> None:
    """Count how often a policy succeeds in a simulator, with 95 % intervals.

    Args:
        checkpoint: A step folder of pistar's or OpenPI's, or a .tar.gz of one.
        env: An environment or a suite: metaworld/pick-place-v3, aloha/transfer-cube, libero/spatial, libero/spatial/3,
            gymnasium/ID, or your own as module:function.
        rollouts: How episodes are run.
        output: Files to write.
        policy: How the checkpoint is used.
        episodes: Number of episodes per task, from the first start states. The default is 100, or all if there are
            fewer.
        starts: Start states to use: those held out from training, those to train on, or all.
        against: Another checkpoint, or a JSON file of an evaluation, to compare with start state by start state. A
            checkpoint is evaluated as OpenPI serves it, without --best-of, --advantage and --guidance.
        best_of: Number of chunks from which the run's critic chooses. 1 is what OpenPI serves.
        execute: Actions of a chunk that are executed before the policy is queried again. The default is the
            benchmark's.
    """
    from pistar.distributed.compilation_cache import use_compilation_cache
    from pistar.envs.base import EnvOptions, find_tasks
    from pistar.evaluation.evaluate import EpisodeSettings

    find_tasks(env)  # before anything is loaded
    output.check(against)
    settings = EpisodeSettings(
        env,
        episodes,
        starts,
        execute,
        options=EnvOptions(limit=rollouts.limit, shadows=rollouts.shadows),
        films=output.video,
        **rollouts.shared(),
    )
    use_compilation_cache()
    # Everything is prepared before the first episode: what is wrong with either, or with the pair, is said at once.
    first = _prepare(checkpoint, settings, policy, best_of)
    second = None if against is None else _opponent(against, settings, policy, first.name)
    _print_differences(first, second, note)
    for each in (first, second):
        _warn_of_instructions(each)
    _note_labels(checkpoint, first.name, policy)
    _run_and_print(first, second, settings, output)


def _prepare(path: Path, settings: "EpisodeSettings", options: PolicyOptions, best_of: int) -> Contestant:
    """A checkpoint ready to be evaluated."""
    from pistar.checkpoints.reader import opened_step
    from pistar.envs.rollout import batch_size
    from pistar.evaluation.evaluate import ActingPolicy, PolicyRecord, prepare_evaluation
    from pistar.policy.actor import Actor
    from pistar.policy.critic_selector import load_critic_selector
    from pistar.policy.load_policy import load_policy

    if (step := opened_step(path)) != path:
        note(f"{path} holds one checkpoint; using {step}.")
        path = step
    policy: Policy = load_policy(path, options)
    selector = load_critic_selector(path) if best_of > 1 else None

    def act(count: int) -> Actor:
        return Actor(policy, batch_size(count), settings.seed, best_of, selector)

    acting = ActingPolicy(act, policy.robot, policy.config.action_horizon, policy.check_prompt)
    record = PolicyRecord(
        checkpoint=str(path),
        weights=options.weights,
        best_of=best_of,
        advantage=None if options.advantage == "none" else options.advantage,
        guidance=options.guidance,
        **policy.identity(),
    )
    prepared = prepare_evaluation(settings, acting, record)
    return Contestant(_label(path), acting, prepared, policy.instructions)


def _opponent(path: Path, settings: "EpisodeSettings", options: PolicyOptions, name: str) -> Contestant:
    """What to compare with: a checkpoint as OpenPI serves it, or an evaluation's file."""
    from pistar.evaluation.results import load_evaluation

    if path.suffix == ".json":
        results = load_evaluation(path)
        found = Contestant(_label(results.checkpoint), None, results)
    else:
        plain = dataclasses.replace(options, advantage="none", guidance=1.0)
        found = _prepare(path, settings, plain, best_of=1)
    return dataclasses.replace(found, name=f"{found.name} (against)") if found.name == name else found


def _print_differences(first: Contestant, second: Contestant | None, say: Callable[[str], object]) -> None:
    """Print what else differs between the two, if anything does; refuses what cannot be compared."""
    from pistar.evaluation.results import differences

    different = [] if second is None else differences(first.results, second.results)
    if second is not None and different:
        say(f"besides the policies, these differ ({first.name} / {second.name}): {'; '.join(different)}.")


def _warn_of_instructions(contestant: Contestant | None) -> None:
    from pistar.checkpoints.contract import unknown_instructions_warning

    if contestant is None:
        return
    asked = (task.instruction for task in contestant.results.results)
    if warning := unknown_instructions_warning(contestant.instructions, asked):
        note(f"{contestant.name}: {warning}.", "warning")


def _note_labels(checkpoint: Path, name: str, options: PolicyOptions) -> None:
    from pistar.policy.critic_selector import labels_prompts

    labels = labels_prompts(checkpoint)
    if labels and options.advantage == "none":
        note(f"{name} was trained with labels in its prompts; --advantage positive selects good actions.")
    if labels is False and options.advantage != "none":
        note(f"{name} was trained without labels; --advantage has no learnt meaning for it.")


def _run_and_print(
    first: Contestant, second: Contestant | None, settings: "EpisodeSettings", output: OutputOptions
) -> None:
    """Run all episodes, save and print the results."""
    from pistar.evaluation.results import compare

    console, written = standard_output(), [output.out]
    first = dataclasses.replace(first, results=_evaluate(first, settings, output, written))
    if second is not None and second.policy is not None:
        beside = [output.against_out]
        options = dataclasses.replace(output, save_dataset=None, out=beside[0])
        second = dataclasses.replace(second, results=_evaluate(second, settings, options, beside))
        written += beside
    heads = ("policy", "task", "succeeded", "of", "rate", "95 %", "steps to success")
    table = Table(*(Column(head, overflow="fold") for head in heads))  # a name that is cut off may be another's too
    contestants = [each for each in (first, second) if each is not None]
    for each in contestants:
        _add_rows(table, each)
    if second is not None:
        first.results.save(output.out, second.results)
    console.print(table)
    for each in contestants:
        _print_summary(each, console)
    if second is not None:
        pairs = compare(first.results, second.results)
        _print_differences(first, second, lambda text: console.print(text, markup=False))  # the renderer, too, by now
        console.print(
            f"On the same start states: both {pairs.both}, only {first.name} {pairs.only_first}, "
            f"only {second.name} {pairs.only_second}, neither {pairs.neither}; "
            f"p = {pairs.p:.2g} by McNemar's exact test.",
            markup=False,
        )
    console.print(f"Wrote {', '.join(map(str, written))}", markup=False)


def _evaluate(
    contestant: Contestant, settings: "EpisodeSettings", output: OutputOptions, written: list[Path]
) -> "Evaluation":
    """Run a policy's episodes with progress. Appends the films and the dataset to `written`."""
    from pistar.evaluation.evaluate import dataset_writer, evaluate
    from pistar.report.video import write_video
    from pistar.telemetry.progress import show_episodes

    policy = contestant.policy
    assert policy is not None
    with contextlib.ExitStack() as stack:
        writer = None
        show = stack.enter_context(show_episodes(contestant.name, Console(stderr=True)))

        def each(scene: "Scene", total: int, rollout: "Rollout") -> None:
            nonlocal writer
            show(scene, total, rollout)
            if output.save_dataset is not None and rollout.episode is not None:
                if writer is None:
                    assert policy.robot is not None
                    writer = stack.enter_context(dataset_writer(output.save_dataset, scene, policy.robot))
                    written.append(output.save_dataset)
                writer.add(rollout.episode)
            if rollout.film:
                end = "success" if rollout.episode is not None and rollout.episode.success else "no_success"
                name = f"{output.out.stem}_{scene.name.replace('/', '_')}_{rollout.start_id}_{end}.mp4"
                write_video(film := output.out.with_name(name), rollout.film, scene.fps)
                written.append(film)

        def each_task(found: "Evaluation") -> None:
            found.save(output.out)

        record = output.save_dataset is not None
        return evaluate(contestant.results, settings, policy, each=each, each_task=each_task, record=record)


def _label(path: str | Path) -> str:
    """A checkpoint by its run and step, or by its name."""
    run, *step = [part for part in Path(path).parts if part != "checkpoints"][-2:]
    return "/".join([run, *step])


def _add_rows(table: Table, contestant: Contestant) -> None:
    def row(task: str, counts: "Counts") -> None:
        low, high = counts.wilson_95
        rate = "–" if counts.rate is None else f"{100 * counts.rate:.0f} %"
        mean = "–" if counts.mean_steps_to_success is None else f"{counts.mean_steps_to_success:.0f}"
        interval = f"{100 * low:.0f}–{100 * high:.0f} %"
        table.add_row(contestant.name, task, str(counts.succeeded), str(counts.of), rate, interval, mean)

    for task in contestant.results.results:
        row(task.env, task.counts)
    if len(contestant.results.results) > 1:
        row("all", contestant.results.counts)


def _print_summary(contestant: Contestant, console: Console) -> None:
    found = contestant.results
    choice = f", best of {found.best_of} by its critic" if found.best_of > 1 else ""
    if found.advantage is not None:
        guided = "" if found.guidance == 1 else f" with guidance {found.guidance:g}"
        choice += f", with the label “Advantage: {found.advantage}”{guided}"
    console.print(
        f"{contestant.name}: by {found.weights_in_words}{choice}; {found.starts} start states, "
        f"seed {found.seed}, {found.execute} actions a chunk, {found.seconds:.0f} s; "
        "95 % intervals by Wilson.",
        markup=False,
    )
    lost, failed = (sum(t.success is kind and t.steps == 0 for t in found.trials) for kind in (None, False))
    given_up = {
        "could not be run at all and are not counted": lost,
        "failed so every time and count as failures": failed,
    }
    print_faults(found.trials, given_up, console)
