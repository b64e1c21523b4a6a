"""RIPT's loop: it learns, an iteration without a rate changes nothing, and what was stopped goes on to the bit."""

import dataclasses
import io
import itertools
import json
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from metaworld_policy import PROMPT, fresh_checkpoint, noise_dataset
from pistar.agents.flow_bc import velocity_between
from pistar.agents.ript import Label, RiptBatch, labelled
from pistar.config import RiptConfig, Weighting
from pistar.data.loader import to_devices
from pistar.data.transforms import stack_observations
from pistar.errors import UserError
from pistar.models.pi0 import bind
from pistar.models.tokenizer import load_tokenizer
from pistar.presets import get_config
from pistar.training.checkpoints import open_checkpoint
from pistar.training.config import DataConfig, RLTrainConfig
from pistar.training.contract import CONTRACT_FILE, read_contract, write_contract
from pistar.training.experience import Starts
from pistar.training.exploring import Plan, _sample
from pistar.training.health import has_ended, has_learnt_nothing
from pistar.training.learner import Kept, Learner
from pistar.training.metrics import read_metrics
from pistar.training.online import train
from pistar.training.online_config import ExplorationConfig, HealthConfig, StartsConfig
from pistar.training.practice import Group
from pistar.training.run import prepare_online
from pistar.training.saving import saved_steps
from small_practice import small_practice


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_checkpoint(tmp_path_factory.mktemp("fresh"))


def run(config: RLTrainConfig, **how: bool) -> tuple[Path, list[dict[str, Any]], str]:
    said = io.StringIO()
    saved = train(config, Console(file=said, width=400), **how)
    assert saved is not None
    return saved, list(read_metrics(config.folder / "metrics.jsonl")), said.getvalue()


def events_of(config: RLTrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.folder / "events.jsonl").read_text().splitlines()]


def params(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as checkpoint:
        return {leaf.name: np.asarray(leaf.read()) for leaf in checkpoint.leaves()}


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """But for times."""
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


Whole = tuple[Path, list[dict[str, Any]], str]


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return run(small_practice(checkpoint, tmp_path_factory.mktemp("whole")))


def test_the_policy_succeeds_more_often(whole: Whole) -> None:
    _, lines, said = whole
    before, after = lines[0], lines[-1]
    assert before["evaluation/sampled"] < 20, "of 40"
    assert after["evaluation/sampled"] > before["evaluation/sampled"] + 10
    assert f"{int(after['evaluation/sampled'])}/40 sampled" in said
    assert "groups informative" in said
    assert "nothing learnt" not in said


def test_a_stopped_run_goes_on_to_the_bit(whole: Whole, checkpoint: Path, tmp_path: Path) -> None:
    """With start states that are remembered, successes that are kept, exploration, and the optimiser's moments."""
    config = small_practice(checkpoint, tmp_path)
    run(dataclasses.replace(config, steps=2))
    saved, lines, _ = run(dataclasses.replace(config, steps=3), resume=True)
    # Starts are chosen by how much of the run is over only in a curriculum, so a shorter first part changes nothing.
    assert numbers(lines) == numbers(whole[1])
    for name, param in params(whole[0]).items():
        np.testing.assert_array_equal(params(saved)[name], param, err_msg=name)


def test_a_learner_that_was_killed_goes_on_to_the_bit(whole: Whole, checkpoint: Path, tmp_path: Path) -> None:
    """By SIGKILL, in its second iteration. Its simulators, in processes of their own, do not outlive it for long."""
    config = small_practice(checkpoint, tmp_path)
    program, changes = str(Path(__file__).parent.parent / "small_practice.py"), json.dumps({"workers": 2})
    with subprocess.Popen(
        [sys.executable, program, str(checkpoint), str(tmp_path), changes], stderr=subprocess.PIPE, text=True
    ) as process:
        while not (config.folder / "checkpoints" / "1").exists() and process.poll() is None:
            time.sleep(0.005)
        simulators = _children(process.pid)
        process.kill()
        process.communicate()
    assert [path.name for path in (config.folder / "checkpoints").iterdir() if path.name.isdecimal()] == ["1"]
    assert len(simulators) == 2
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in simulators) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in simulators if Path(f"/proc/{pid}").exists()]
    saved, lines, _ = run(config, resume=True)
    assert numbers(lines) == numbers(whole[1])
    for name, param in params(whole[0]).items():
        np.testing.assert_array_equal(params(saved)[name], param, err_msg=name)


def _children(pid: int) -> list[int]:
    """Processes it has started that are still there."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


@pytest.mark.parametrize(("replay", "ema_decay"), [("none", 0.99), ("best", None)])
def test_an_iteration_at_next_to_no_rate_changes_nothing(
    checkpoint: Path, tmp_path: Path, replay: str, ema_decay: float | None
) -> None:
    """Acting and training are the same policy: nothing to make up for, no drift, and the same episodes again."""
    config = small_practice(checkpoint, tmp_path, rate=1e-30, replay=replay)
    algorithm = RiptConfig(anchor=0.0, ema_decay=ema_decay, augmentation=False)
    saved, lines, _ = run(dataclasses.replace(config, algorithm=algorithm, steps=1))
    assert lines[1]["learning/updates"] == 20
    assert lines[1]["learning/drift"] == 0
    for name in ("zero_noise", "sampled"):
        assert lines[0][f"evaluation/{name}"] == lines[1][f"evaluation/{name}"]
    for name, param in params(checkpoint).items():
        np.testing.assert_allclose(params(saved)[name], param, rtol=0, atol=1e-28, err_msg=name)


def test_what_is_learnt_from_is_what_the_trained_model_makes_of_the_noise_it_acted_by(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acting by other weights, prompts or precision than are trained would show here, and nowhere else."""
    plans: list[Plan] = []
    keep = Learner._keep

    def kept(self: Learner, group: Group, asked: Label) -> Kept:
        plans.extend(plan for episode in group.plans for plan in episode)
        return keep(self, group, asked)

    monkeypatch.setattr(Learner, "_keep", kept)
    config = small_practice(checkpoint, tmp_path, updates=1, exploration=ExplorationConfig(held_noise=0.5))
    run(dataclasses.replace(config, steps=1))
    assert len(plans) >= 32
    model = bind(config.model, {name: jnp.asarray(param) for name, param in params(checkpoint).items()})
    seen = stack_observations([plan.seen for plan in plans])

    @jax.jit
    def euler(x: jax.Array) -> jax.Array:
        for step in range(10):
            time = jnp.full(len(x), 1 - step / 10)
            x = x - velocity_between(model, seen, x, x, time) / 10  # between x and x there is only x
        return x

    expected = euler(jnp.stack([plan.noise for plan in plans]))
    chunks = np.stack([plan.chunk for plan in plans])
    np.testing.assert_allclose(chunks[..., :4], expected[..., :4], atol=1e-4)
    assert (chunks[..., 4:] == 0).all(), "padding, which the model has learnt to be 0"
    assert np.abs(expected[..., 4:]).max() > 0.1


def test_a_start_state_that_cannot_be_finished_is_neither_counted_nor_learnt_from(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALK_TROUBLE", str(tmp_path))
    for start in (1, 4):
        (tmp_path / f"{start}.always").touch()
    config = small_practice(checkpoint, tmp_path / "runs", replay="none")
    online = dataclasses.replace(
        config.online,
        contexts=6,
        starts=StartsConfig("uniform", pool=6),
        health=HealthConfig(max_drift=None, max_fault_rate=None),
    )
    saved, lines, _ = run(dataclasses.replace(config, online=online, steps=1))
    assert lines[1]["practice/episodes"] == 4 * 4, "of six start states two are broken"
    events = events_of(config)
    assert {event.get("start_id", event["detail"]) for event in events} == {1, 4}
    assert {event["done"] for event in events} == {"group dropped"}
    known = json.loads((saved / "starts.json").read_text())
    assert sorted(one["start"] for one in known) == [0, 2, 3, 5]


@pytest.mark.parametrize("trouble", ["died", "hung", "raised", "nan"])
def test_trouble_in_a_simulator_changes_nothing_and_is_told(
    whole: Whole, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Beside a run in one process without a fault: the same groups, the same policy."""
    monkeypatch.setenv("WALK_TROUBLE", str(tmp_path))
    config = small_practice(checkpoint, tmp_path / "runs", workers=2, hang_after=3.0)
    starts = Starts(config.online.starts, {"walk": range(50)})
    _, first = starts.choose(8, np.random.default_rng([config.seed, 0, 0]), 0.0)[0]
    (tmp_path / f"{first}.{trouble}").touch()
    _, lines, _ = run(dataclasses.replace(config, steps=1))
    noticed = [event for event in events_of(config) if event["event"] == trouble.replace("nan", "not finite")]
    assert [event["start_id"] for event in noticed] == [first]
    assert {event["done"] for event in events_of(config)} == {"episode run again"}
    faults = [line.pop("practice/faults", None) for line in lines]
    assert faults == [None, 1], "who was lost with it did not fail"
    unhurt = [{k: v for k, v in line.items() if k != "practice/faults"} for line in numbers(whole[1])[:2]]
    assert numbers(lines) == unhurt


# --- When it is the policy --------------------------------------------------------------------------------------------


def poisoned(monkeypatch: pytest.MonkeyPatch, updates: range) -> None:
    """These updates, counted over the run, are given actions of NaN."""
    sound = Learner._batch
    seen = itertools.count()

    def batch(self: Learner, *given: Any) -> RiptBatch:
        made = sound(self, *given)
        return dataclasses.replace(made, actions=made.actions * np.nan) if next(seen) in updates else made

    monkeypatch.setattr(Learner, "_batch", batch)


def test_an_update_without_a_finite_gradient_is_skipped(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, range(3, 5))
    config = dataclasses.replace(small_practice(checkpoint, tmp_path), steps=1)
    saved, lines, said = run(config)
    assert lines[1]["skipped"] == pytest.approx(2 / 20)
    (event,) = events_of(config)
    assert (event["iteration"], event["event"], event["done"]) == (0, "not finite", "these were skipped")
    assert "not finite: 10% of the updates" in said
    assert np.isfinite(lines[1]["loss"])
    assert all(np.isfinite(param).all() for param in params(saved).values())


def test_a_policy_in_trouble_goes_back_to_the_last_good_checkpoint_in_smaller_steps(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, range(20, 40))
    config = dataclasses.replace(small_practice(checkpoint, tmp_path, replay="none"), steps=2, keep_last=2)
    saved, lines, said = run(config)
    (event,) = events_of(config)
    assert (event["iteration"], event["event"]) == (1, "not finite")
    assert event["done"] == "back to iteration 1, with 0.5 times the learning rate"
    assert event["detail"] in said
    assert lines[2]["skipped"] == 1
    for name, param in params(saved.parent / "1").items():
        np.testing.assert_array_equal(params(saved)[name], param, err_msg=name)


def test_what_a_policy_in_trouble_has_practised_ahead_is_forgotten(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, range(20, 40))
    config = small_practice(checkpoint, tmp_path, replay="none", overlap=True, evaluate_every=0, evaluate_episodes=2)
    saved, lines, _ = run(dataclasses.replace(config, save_every=3))
    assert [event["done"] for event in events_of(config)] == ["back to the beginning, with 0.5 times the learning rate"]
    assert [line["practice/policy_age"] for line in lines[1:]] == [0, 1, 0]
    known = json.loads((saved / "starts.json").read_text())
    assert sum(one["tries"] for one in known) == sum(line["practice/episodes"] for line in lines[1:])


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_a_run_that_is_rolled_back_to_its_beginning_says_that_nothing_was_learnt(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ema_decay: float | None
) -> None:
    poisoned(monkeypatch, range(40))
    config = small_practice(checkpoint, tmp_path, replay="none")
    algorithm = dataclasses.replace(config.algorithm, ema_decay=ema_decay)
    saved, _, said = run(dataclasses.replace(config, algorithm=algorithm, steps=2))
    assert has_learnt_nothing(saved)
    told = f"nothing learnt: every iteration was rolled back; checkpoint 2 is the policy it began with; {config.folder}"
    assert f"{told}/events.jsonl says why" in said
    assert [event["event"] for event in events_of(config)] == ["not finite", "not finite", "nothing learnt"]
    for name, param in params(checkpoint).items():
        np.testing.assert_array_equal(params(saved)[name], param, err_msg=name)


def test_a_run_whose_rollouts_all_end_alike_says_that_nothing_was_learnt(checkpoint: Path, tmp_path: Path) -> None:
    config = small_practice(taught(checkpoint, tmp_path, "go left"), tmp_path, replay="none", limit=1)  # too short
    saved, _, said = run(dataclasses.replace(config, steps=1))
    assert read_contract(saved / CONTRACT_FILE).instructions == ("go left", "go right"), "it has practised that, too"
    assert has_learnt_nothing(saved)
    assert "nothing learnt: no iteration had anything to learn from" in said
    assert "; 1 iteration of 8 start states × 4 rollouts" in said


def test_a_disk_that_is_full_costs_the_run_nothing_that_was_saved(
    whole: Whole, checkpoint: Path, tmp_path: Path
) -> None:
    """In a process that from some moment on can make no large file, which is as good as a full disk."""
    config = small_practice(checkpoint, tmp_path)
    checkpoints = config.folder / "checkpoints"
    program = str(Path(__file__).parent.parent / "small_practice.py")
    with subprocess.Popen(
        [sys.executable, program, str(checkpoint), str(tmp_path), "{}"], stderr=subprocess.PIPE, text=True
    ) as process:
        while not (checkpoints / "1").exists() and process.poll() is None:
            time.sleep(0.002)
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, hard))
        said = process.communicate()[1]
    assert process.returncode == 1
    left = saved_steps(checkpoints)
    assert left in ([1], [1, 2])
    failed = re.search(r"UserError: (.*/checkpoints/(\d) cannot be written .*File too large.*)", said)
    assert failed is not None, said[-2000:]
    assert int(failed[2]) == left[-1] + 1
    _, lines, _ = run(config, resume=True)
    assert numbers(lines) == numbers(whole[1])
    (event,) = events_of(config)
    assert event["event"] == "ended"
    assert event["detail"] in failed[1]


def test_what_fails_while_it_is_judged_is_told_and_not_counted(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALK_TROUBLE", str(tmp_path))
    (tmp_path / "100.raised").touch()
    (tmp_path / "101.always").touch()
    config = small_practice(checkpoint, tmp_path, evaluate_episodes=3)
    _, lines, said = run(dataclasses.replace(config, steps=1))
    assert lines[0]["evaluation/sampled_of"] == lines[0]["evaluation/zero_noise_of"] == 2
    assert lines[0]["evaluation/faults"] == 1 + 2 * 3, "in vain three times in each of two trials"
    told = {(event["start_id"], event["done"]) for event in events_of(config)}
    assert told == {(100, "episode run again"), (101, "episode dropped")}
    assert "7 failures of simulators" in said
    for start in (100, 102):
        (tmp_path / f"{start}.always").touch()
    with pytest.raises(UserError, match=r"None of 3 held-out episodes could be finished: raised, .*gave way"):
        run(config, overwrite=True)


def test_trouble_that_is_only_told_does_not_hide_that_nothing_improves(checkpoint: Path, tmp_path: Path) -> None:
    health = HealthConfig(on_trouble="tell", max_gradient_norm=1e-12)
    saved, _, _ = run(small_practice(checkpoint, tmp_path, rate=1e-30, patience=1, health=health))
    assert saved.name == "1"
    assert [event["event"] for event in events_of(small_practice(checkpoint, tmp_path))] == [
        "gradient_norm",
        "early stop",
    ]


def test_a_policy_that_reads_no_state_cannot_be_misled(checkpoint: Path, tmp_path: Path) -> None:
    config = get_config("ript_libero_goal")
    online = dataclasses.replace(config.online, exploration=ExplorationConfig(misled=0.2))
    with pytest.raises(UserError, match=r"misled is 0\.2: .* set it to 0"):
        train(dataclasses.replace(config, online=online), Console(file=io.StringIO()))


def test_a_run_that_does_not_improve_ends_early(checkpoint: Path, tmp_path: Path) -> None:
    config = small_practice(checkpoint, tmp_path, rate=1e-30, patience=1)
    saved, _, said = run(config)
    assert saved.name == "1"
    assert has_ended(saved)
    assert [event["event"] for event in events_of(config)] == ["early stop"]
    assert "Go on with --resume" not in said


# --- Ways of going about it -------------------------------------------------------------------------------------------


def test_practising_ahead_is_by_the_policy_before_and_comes_out_the_same_every_time(
    checkpoint: Path, tmp_path: Path
) -> None:
    program: Any = _sample
    program.clear_cache()

    def lines_of(name: str) -> list[dict[str, Any]]:
        config = small_practice(checkpoint, tmp_path / name, overlap=True, evaluate_every=0)
        return numbers(run(dataclasses.replace(config, save_every=3))[1])

    once, again = lines_of("one"), lines_of("two")
    assert [line["practice/policy_age"] for line in once[1:]] == [0, 1, 1]
    assert once == again
    assert program._cache_size() == 1, "it is compiled once more for the thread beside"


def test_between_checkpoints_nothing_is_practised_ahead(whole: Whole, checkpoint: Path, tmp_path: Path) -> None:
    _, lines, said = run(dataclasses.replace(small_practice(checkpoint, tmp_path, overlap=True), steps=2))
    assert numbers(lines)[:2] == numbers(whole[1])[:2]
    assert "online.overlap is on, and nothing can overlap: every iteration is judged or saved" in said


def test_a_policy_can_be_told_how_good_to_be(checkpoint: Path, tmp_path: Path) -> None:
    """cfg, end to end: failures are learnt from too, and it acts by guidance once it knows what the labels mean."""
    config = small_practice(checkpoint, tmp_path, replay="none", windows="every_step", auto_tune=True)
    algorithm = RiptConfig("cfg", anchor=0.0, ema_decay=None, augmentation=False, guidance=1.5)
    _, lines, _ = run(dataclasses.replace(config, algorithm=algorithm, steps=2))
    assert lines[1]["weight_mean"] == 1
    assert lines[1]["practice/episodes"] == 32
    assert lines[1]["learning/label_distance"] > 1e-4, "guidance has something to go by"
    assert lines[-1]["evaluation/sampled"] > lines[0]["evaluation/sampled"]
    assert any(event["event"].startswith("auto-tune") for event in events_of(config))


def test_how_far_it_went_is_measured_by_the_prompts_it_acted_by(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain one at first, then that for good actions: by a label it has yet to learn any policy goes far."""
    seen: list[np.ndarray] = []

    def noticing(batch: RiptBatch, where: Any) -> RiptBatch:
        if batch.actions.ndim == 3 and batch.unlabelled is None:  # not to learn from, nor to tell labels apart
            seen.append(np.unique(batch.observations.tokenized_prompt, axis=0))
        return to_devices(batch, where)

    monkeypatch.setattr("pistar.training.learner.to_devices", noticing)
    config = small_practice(checkpoint, tmp_path, replay="none", updates=10)
    algorithm = RiptConfig("cfg", anchor=0.0, ema_decay=None, augmentation=False)
    run(dataclasses.replace(config, algorithm=algorithm, steps=2))
    tokenizer = load_tokenizer("tiny", config.model.max_token_len)
    labels: tuple[Label, ...] = "none", "positive"
    for prompts, label in zip(seen, labels, strict=True):
        np.testing.assert_array_equal(prompts, [tokenizer.tokenize(labelled("go right", label), None)[0]])


def test_labels_are_left_out_anew_in_every_update_and_never_told_to_the_anchor(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RiptBatch] = []
    batch = Learner._batch

    def noticed(self: Learner, *given: Any) -> RiptBatch:
        made.append(batch(self, *given))
        return made[-1]

    monkeypatch.setattr(Learner, "_batch", noticed)
    config = small_practice(checkpoint, tmp_path, replay="none", updates=60)
    algorithm = RiptConfig("cfg", anchor=0.1, ema_decay=None, augmentation=False, label_dropout=0.3)
    run(dataclasses.replace(config, algorithm=algorithm, steps=1))
    tokenizer = load_tokenizer("tiny", config.model.max_token_len)
    labels: tuple[Label, ...] = "none", "positive", "negative"
    plain, good, bad = (tokenizer.tokenize(labelled("go right", label), None)[0] for label in labels)
    told_nothing: dict[bytes, set[bool]] = {}
    for one in made:
        if one.unlabelled is None:  # to see how far it went, not to learn from
            continue
        np.testing.assert_array_equal(one.unlabelled[0], np.broadcast_to(plain, one.unlabelled[0].shape))
        prompts = np.asarray(one.observations.tokenized_prompt)
        for tokens, action, advantage in zip(prompts, one.actions, np.asarray(one.advantages), strict=True):
            untold = np.array_equal(tokens, plain)
            assert untold or np.array_equal(tokens, good if advantage > 0 else bad)
            told_nothing.setdefault(np.asarray(action).tobytes(), set()).add(untold)
    assert sum(len(ways) == 2 for ways in told_nothing.values()) > 0.8 * len(told_nothing)


def test_demonstrations_are_told_to_be_good_where_labels_are_learnt(checkpoint: Path, tmp_path: Path) -> None:
    """Else guidance, away from what is told nothing, would lead away from them."""
    data = DataConfig(datasets=(str(noise_dataset(tmp_path / "demos")),), held_out=0.0)
    config = dataclasses.replace(small_practice(checkpoint, tmp_path, replay="none"), data=data)
    tokenizer = load_tokenizer("tiny", config.model.max_token_len)
    labels: dict[Weighting, Label] = {"positive": "none", "cfg": "positive"}
    for weighting, label in labels.items():
        algorithm = RiptConfig(weighting, anchor=0.0, ema_decay=None, augmentation=False)
        loader = prepare_online(dataclasses.replace(config, algorithm=algorithm)).demonstrations
        assert loader is not None
        shown = loader.sample_policy_batch(0).observations.tokenized_prompt
        expected = tokenizer.tokenize(labelled(PROMPT, label), None)[0]
        np.testing.assert_array_equal(np.unique(shown, axis=0), [expected])


def test_groups_that_teach_nothing_are_replaced_up_to_a_cap(checkpoint: Path, tmp_path: Path) -> None:
    few = small_practice(checkpoint, tmp_path / "one", replay="none", attempts=1, exploration=ExplorationConfig())
    more = small_practice(checkpoint, tmp_path / "three", replay="none", attempts=3, exploration=ExplorationConfig())
    _, once, _ = run(dataclasses.replace(few, steps=1))
    _, again, _ = run(dataclasses.replace(more, steps=1))
    assert once[1]["practice/start_states"] == 8
    informative = once[1]["practice/informative"]
    assert informative < 8, "or nothing would have to be replaced"
    assert 8 < again[1]["practice/start_states"] <= 24
    assert again[1]["practice/informative"] > informative


@pytest.mark.parametrize("weighting", ["positive", "exp", "signed", "cfg"])
def test_groups_that_end_alike_are_not_learnt_from(checkpoint: Path, tmp_path: Path, weighting: Weighting) -> None:
    """One step is too short for anybody to succeed; by `exp` failures would weigh 1 each."""
    config = small_practice(checkpoint, tmp_path, replay="none", limit=1, evaluate_episodes=2)
    algorithm = RiptConfig(weighting, anchor=0.0, ema_decay=None, augmentation=False)
    _, lines, said = run(dataclasses.replace(config, algorithm=algorithm, steps=1))
    assert lines[1]["practice/episodes"] == 32
    assert lines[1]["practice/informative"] == lines[1]["learning/chunks"] == lines[1]["learning/updates"] == 0
    assert "nothing to learn from" in said


def test_practice_and_updates_can_be_computed_in_bfloat16(whole: Whole, checkpoint: Path, tmp_path: Path) -> None:
    """By the same policy: at next to no rate it does not drift. What is trained and saved keeps its precision."""
    config = small_practice(checkpoint, tmp_path, rate=1e-30)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"), steps=1)
    saved, lines, _ = run(config)
    assert lines[1]["learning/drift"] == 0
    assert np.isfinite(lines[1]["loss"])
    assert lines[1]["loss"] != whole[1][1]["loss"]
    for name, param in params(checkpoint).items():
        np.testing.assert_allclose(params(saved)[name], param, rtol=0, atol=1e-28, err_msg=name)


def test_updates_end_when_the_policy_has_moved_too_far(checkpoint: Path, tmp_path: Path) -> None:
    config = small_practice(checkpoint, tmp_path, max_drift=1e-4)
    config = dataclasses.replace(config, steps=1, online=dataclasses.replace(config.online, updates=200))
    _, lines, _ = run(config)
    assert lines[1]["learning/updates"] < 200
    assert lines[1]["learning/drift"] > 1e-4


def test_bad_settings_are_one_error_before_anything_is_built(checkpoint: Path, tmp_path: Path) -> None:
    config = small_practice(checkpoint, tmp_path)

    def refused(message: str, changed: RLTrainConfig) -> None:
        with pytest.raises(UserError, match=message):
            train(changed, Console(file=io.StringIO()))
        assert not config.folder.exists()

    def with_online(**changes: Any) -> RLTrainConfig:
        return dataclasses.replace(config, online=dataclasses.replace(config.online, **changes))

    refused("names no environment; add --online.environment", with_online(environment=None))
    refused("There is no environment", with_online(environment="metawrld/push-v3"))
    refused("begins from a policy", dataclasses.replace(config, checkpoint=None))
    refused("held-out start states; take fewer", with_online(evaluate_episodes=101))
    refused("chunks have 5 actions", with_online(execute=6))
    shown = dataclasses.replace(config.data, datasets=("demos",))
    refused(r"demonstrations is 0.1, none of the 4 rows", dataclasses.replace(with_online(), data=shown, batch_size=4))
    with pytest.raises(UserError, match="replay is best, whose successes have weights"):
        dataclasses.replace(config, algorithm=RiptConfig(weighting="exp"))


def taught(checkpoint: Path, folder: Path, *instructions: str) -> Path:
    """The same, of other tasks."""
    copy = Path(shutil.copytree(checkpoint, folder / "taught" / "1"))
    contract = dataclasses.replace(read_contract(copy / CONTRACT_FILE), instructions=instructions)
    write_contract(copy / CONTRACT_FILE, contract)
    return copy


def test_a_policy_of_another_task_is_warned_of_before_any_rollout(checkpoint: Path, tmp_path: Path) -> None:
    said = {}
    for task in ("go right", "fold the towel"):
        console = Console(file=io.StringIO(), width=400)
        config = small_practice(taught(checkpoint, tmp_path / task, task), tmp_path / "runs")
        train(config, console, dry_run=True)
        said[task] = console.file.getvalue()  # type: ignore[attr-defined]
    assert "warning" not in said["go right"]
    warning = "warning: the policy was taught 'fold the towel' and is asked for 'go right', which it has never heard"
    assert warning in said["fold the towel"]
    assert "environment can work together, but see the warning above" in said["fold the towel"]


def test_a_checkpoint_of_another_robot_is_refused_before_a_tokenizer_is_asked_for(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    config = dataclasses.replace(get_config("ript_aloha_sim"), checkpoint=str(checkpoint))
    with pytest.raises(UserError, match="was trained with robot metaworld and this run has aloha_sim"):
        train(config, Console(file=io.StringIO()), dry_run=True)


def test_an_environment_of_another_robot_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = small_practice(checkpoint, tmp_path, environment="envs.toy:make")
    with pytest.raises(UserError, match=r"acts with 4 numbers \(metaworld\) and toy takes 2 \(toy\); run it in an env"):
        train(config, Console(file=io.StringIO()), dry_run=True)


def test_a_dry_run_builds_everything_and_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    config = small_practice(checkpoint, tmp_path / "runs", replay="none")
    config = dataclasses.replace(config, algorithm=RiptConfig("signed", anchor=0.0))
    said = io.StringIO()
    assert train(config, Console(file=said, width=400), dry_run=True) is None
    assert "Dry run: weights, data and environment agree" in said.getvalue()
    assert "signed weights without an anchor have no least loss and diverge" in said.getvalue()
    assert not (tmp_path / "runs").exists()
