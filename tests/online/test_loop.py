"""RIPT's online loop: the policy improves, faults change nothing, and a resumed run is the same to the bit."""

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
from collections.abc import Container
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from pistar.agents.config import Weighting
from pistar.agents.flow_bc import velocity_between
from pistar.agents.prompt_labels import Label, labelled
from pistar.agents.ript import RiptBatch
from pistar.checkpoints.contract import CONTRACT_FILE, read_contract, write_contract
from pistar.checkpoints.manager import saved_steps
from pistar.checkpoints.reader import open_checkpoint
from pistar.config.online import ExplorationConfig, HealthConfig, StartStatesConfig
from pistar.config.presets import get_config
from pistar.config.train import DataConfig, RLTrainConfig
from pistar.data.loader import to_devices
from pistar.data.transforms import stack_observations
from pistar.errors import UserError
from pistar.models.pi0 import bind
from pistar.models.tokenizer import load_tokenizer
from pistar.online.collector import Group
from pistar.online.exploration import Decision
from pistar.online.history import has_ended, has_learnt_nothing
from pistar.online.loop import train
from pistar.online.ript_learner import GroupChunks, RiptLearner
from pistar.online.start_states import START_STATES_FILE, StartStateSampler
from pistar.policy.act import _act, rollout_noise
from pistar.telemetry.metric_names import ONLINE_METRICS
from pistar.telemetry.metrics import read_metrics
from pistar.training.setup import prepare_online

from helpers.metaworld_policy import PROMPT, fresh_checkpoint, noise_dataset
from helpers.paths import program
from helpers.small_online_run import online_settings, small_online_run


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
    """All metrics but times."""
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


Whole = tuple[Path, list[dict[str, Any]], str]


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return run(small_online_run(checkpoint, tmp_path_factory.mktemp("whole")), debug=True)


def test_the_policy_succeeds_more_often(whole: Whole) -> None:
    _, lines, said = whole
    before, after = lines[0], lines[-1]
    assert before["eval/sampled_successes"] < 20, "of 40"
    assert after["eval/sampled_successes"] > before["eval/sampled_successes"] + 10
    assert f"{int(after['eval/sampled_successes'])}/40 sampled" in said
    assert "groups informative" in said
    assert "nothing learnt" not in said


def test_debug_prints_the_state_and_the_memory_at_each_stage(whole: Whole) -> None:
    said = whole[2]
    assert "debug: nothing is wrong with the state" in said
    stages = re.findall(r"memory in MB, ([a-z ]+): host [\d.]+", said)
    assert stages == ["start", "loaded", "first rollouts", "first updates", "end"]
    assert "trained weights" in said


def test_names_of_metrics_are_known_before_a_run(whole: Whole) -> None:
    """Of all but the updates, whose names the agent tells."""
    names = {name for line in whole[1] for name in line if "/" in name}
    assert {"rollout/success_rate", "eval/sampled_successes"} <= names <= set(ONLINE_METRICS)


def test_a_finished_run_continues_to_the_bit_with_more_steps(whole: Whole, checkpoint: Path, tmp_path: Path) -> None:
    """The checkpoint holds records of start states, kept successes, exploration and the optimiser's moments. With
    `overlap`, where every iteration is evaluated and saved, no rollouts are made ahead."""
    config = small_online_run(checkpoint, tmp_path)
    first = dataclasses.replace(small_online_run(checkpoint, tmp_path, overlap=True), steps=2, log_every=7)
    _, lines, said = run(first)
    assert "log_every is 7 and changes nothing: an online run logs every iteration" in said
    assert "online.overlap is on, and nothing can overlap: every iteration is evaluated or saved" in said
    assert numbers(lines) == numbers(whole[1])[:3]
    saved, lines, said = run(config, resume=True)
    assert f"from step 2 of {config.folder}; " in said
    # Only a curriculum chooses start states by how much of the run is over, so a shorter first part changes nothing.
    assert numbers(lines) == numbers(whole[1])
    for name, param in params(whole[0]).items():
        np.testing.assert_array_equal(params(saved)[name], param, err_msg=name)


def test_a_killed_run_resumes_to_the_bit(whole: Whole, checkpoint: Path, tmp_path: Path) -> None:
    """Killed by SIGKILL, in its second iteration. The processes of its simulators end soon after it."""
    config = small_online_run(checkpoint, tmp_path)
    script, changes = program("train_small_online_run"), json.dumps({"workers": 2})
    with subprocess.Popen(
        [sys.executable, script, str(checkpoint), str(tmp_path), changes], stderr=subprocess.PIPE, text=True
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
    """Child processes that are still running."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def test_a_learning_rate_of_almost_zero_changes_nothing_and_the_run_stops_early(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The policy that acts is the one that is trained: no drift, and the same episodes again in an evaluation."""
    config = small_online_run(checkpoint, tmp_path, rate=1e-30, patience=1)
    saved, lines, said = run(config)
    check_unchanged(checkpoint, saved, lines)
    assert saved.name == "1"
    assert has_ended(saved)
    assert [event["event"] for event in events_of(config)] == ["early stop"]
    assert "Continue with --resume" not in said


def test_a_failed_check_that_is_only_reported_does_not_prevent_an_early_stop(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an average of the weights, and without replay, almost no learning rate changes nothing either."""
    monkeypatch.setattr("pistar.online.health.MAX_GRAD_NORM", 1e-12)
    config = small_online_run(
        checkpoint,
        tmp_path,
        rate=1e-30,
        patience=1,
        replay="none",
        ema_decay=0.99,
        health=HealthConfig(on_failure="report"),
    )
    saved, lines, _ = run(config)
    check_unchanged(checkpoint, saved, lines)
    assert saved.name == "1"
    assert [event["event"] for event in events_of(config)] == ["grad_norm", "early stop"]


def check_unchanged(checkpoint: Path, saved: Path, lines: list[dict[str, Any]]) -> None:
    """One iteration of 20 updates has left the policy as it was."""
    assert lines[1]["train/updates"] == 20
    assert lines[1]["train/drift"] == 0
    for name in ("zero_noise", "sampled"):
        assert lines[0][f"eval/{name}_successes"] == lines[1][f"eval/{name}_successes"]
    for name, param in params(checkpoint).items():
        np.testing.assert_allclose(params(saved)[name], param, rtol=0, atol=1e-28, err_msg=name)


def test_chunks_to_learn_from_are_what_the_trained_model_samples_from_their_noise(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights, prompts or precision in rollouts than in training would show here, and nowhere else."""
    decisions: list[Decision] = []
    keep = RiptLearner._keep

    def kept(self: RiptLearner, group: Group, asked: Label) -> GroupChunks:
        decisions.extend(decision for episode in group.decisions for decision in episode)
        return keep(self, group, asked)

    monkeypatch.setattr(RiptLearner, "_keep", kept)
    exploration = ExplorationConfig(held_noise=0.5)
    config = small_online_run(checkpoint, tmp_path, updates=1, exploration=exploration, evaluate_episodes=2)
    run(dataclasses.replace(config, steps=1))
    assert len(decisions) >= 32
    model = bind(config.model, {name: jnp.asarray(param) for name, param in params(checkpoint).items()})
    observations = stack_observations([decision.observation for decision in decisions])

    @jax.jit
    def euler(x: jax.Array) -> jax.Array:
        for step in range(10):
            time = jnp.full(len(x), 1 - step / 10)
            x = x - velocity_between(model, observations, x, x, time) / 10  # between x and x there is only x
        return x

    expected = euler(jnp.stack([decision.noise for decision in decisions]))
    chunks = np.stack([decision.chunk for decision in decisions])
    np.testing.assert_allclose(chunks[..., :4], expected[..., :4], atol=1e-4)
    assert (chunks[..., 4:] == 0).all(), "padding, which the model has learnt to be 0"
    assert np.abs(expected[..., 4:]).max() > 0.1


def test_start_states_that_cannot_be_finished_are_neither_counted_nor_learnt_from(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rollouts and in evaluations."""
    monkeypatch.setenv("INJECTED_FAULTS", str(tmp_path))
    for fault in ("1.always", "4.always", "100.raised", "101.always"):
        (tmp_path / fault).touch()
    config = small_online_run(
        checkpoint,
        tmp_path / "runs",
        replay="none",
        start_states_per_iteration=6,
        start_states=StartStatesConfig("uniform", pool=6),
        evaluate_episodes=3,
        health=HealthConfig(max_drift=None, max_fault_rate=None),
    )
    saved, lines, said = run(dataclasses.replace(config, steps=1))
    assert lines[1]["rollout/episodes"] == 4 * 4, "of six start states two are broken"
    known = json.loads((saved / START_STATES_FILE).read_text())
    assert sorted(one["start"] for one in known) == [0, 2, 3, 5]
    assert lines[0]["eval/sampled_episodes"] == lines[0]["eval/zero_noise_episodes"] == 2
    assert lines[0]["eval/faults"] == 1 + 2 * 3, "in vain three times in each of two trials"
    assert "7 simulator failures" in said
    reported = {(event["start_id"], event["done"]) for event in events_of(config)}
    in_rollouts, in_evaluations = {(1, "group dropped"), (4, "group dropped")}, {(101, "episode dropped")}
    assert reported == in_rollouts | in_evaluations | {(100, "episode run again")}
    for start in (100, 102):
        (tmp_path / f"{start}.always").touch()
    with pytest.raises(UserError, match=r"None of 3 held-out episodes could be finished: raised, .*gave up"):
        run(config, overwrite=True)


def test_faults_of_simulators_are_reported_and_change_nothing(
    whole: Whole, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a run in one process without faults: the same groups, the same policy."""
    monkeypatch.setenv("INJECTED_FAULTS", str(tmp_path))
    config = small_online_run(checkpoint, tmp_path / "runs", workers=2, hang_after=3.0)
    starts = StartStateSampler(online_settings(config).start_states, {"walk": range(50)})
    chosen = starts.choose(8, np.random.default_rng([config.seed, 0, 0]), 0.0)
    injected = {"raised": chosen[0][1], "nan": chosen[2][1], "died": chosen[4][1], "hung": chosen[6][1]}
    for kind, start in injected.items():
        (tmp_path / f"{start}.{kind}").touch()
    _, lines, _ = run(dataclasses.replace(config, steps=1))
    events = events_of(config)
    for kind, start in injected.items():
        noticed = [event["start_id"] for event in events if event["event"] == kind.replace("nan", "not finite")]
        assert noticed == [start], kind
    assert {event["done"] for event in events} == {"episode run again"}
    faults = [line.pop("rollout/faults", None) for line in lines]
    assert faults == [None, 4], "an episode that was lost with another's simulator is not a fault"
    before, after = numbers(whole[1])[:2]
    assert after.pop("rollout/faults") == 0
    assert lines[1].pop("rollout/env_steps") >= after.pop("rollout/env_steps"), "steps that were lost count, too"
    assert numbers(lines) == [before, after]


# --- Health of the policy ---------------------------------------------------------------------------------------------


def poisoned(monkeypatch: pytest.MonkeyPatch, updates: Container[int]) -> None:
    """Give these updates, counted over the run, actions of NaN."""
    sound = RiptLearner._batch
    seen = itertools.count()

    def batch(self: RiptLearner, *given: Any, **acted: Any) -> RiptBatch:
        made = sound(self, *given, **acted)
        if acted or next(seen) not in updates:  # with `acted` it measures the drift, and nothing is learnt from it
            return made
        return dataclasses.replace(made, actions=made.actions * np.nan)

    monkeypatch.setattr(RiptLearner, "_batch", batch)


def test_updates_without_a_finite_gradient_are_skipped_and_too_many_roll_the_policy_back(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates of the first iteration, then all 20 of the second."""
    poisoned(monkeypatch, {3, 4, *range(20, 40)})
    config = dataclasses.replace(small_online_run(checkpoint, tmp_path, replay="none"), steps=2, keep_last=2)
    saved, lines, said = run(config)
    skipped, back = events_of(config)
    assert lines[1]["skipped"] == pytest.approx(2 / 20)
    assert (skipped["iteration"], skipped["event"], skipped["done"]) == (0, "not finite", "these were skipped")
    assert "not finite: 10% of the updates" in said
    assert np.isfinite(lines[1]["loss"])
    good = params(saved.parent / "1")
    assert all(np.isfinite(param).all() for param in good.values())
    assert any((param != params(checkpoint)[name]).any() for name, param in good.items())
    assert lines[2]["skipped"] == 1
    assert (back["iteration"], back["event"]) == (1, "not finite")
    assert back["done"] == "back to iteration 1, with 0.5 times the learning rate"
    assert back["detail"] in said
    for name, param in good.items():
        np.testing.assert_array_equal(params(saved)[name], param, err_msg=name)


def test_rollouts_made_ahead_by_a_policy_that_is_rolled_back_are_dropped(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch, range(20, 40))
    config = small_online_run(checkpoint, tmp_path, replay="none", overlap=True, evaluate_every=0, evaluate_episodes=2)
    saved, lines, _ = run(dataclasses.replace(config, save_every=3))
    assert [event["done"] for event in events_of(config)] == ["back to the start, with 0.5 times the learning rate"]
    assert [line["rollout/policy_age"] for line in lines[1:]] == [0, 1, 0]
    known = json.loads((saved / START_STATES_FILE).read_text())
    assert sum(one["tries"] for one in known) == sum(line["rollout/episodes"] for line in lines[1:])


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_a_run_that_is_rolled_back_to_its_start_reports_that_nothing_was_learnt(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ema_decay: float | None
) -> None:
    poisoned(monkeypatch, range(40))
    config = small_online_run(checkpoint, tmp_path, replay="none", ema_decay=ema_decay, evaluate_episodes=2)
    saved, _, said = run(dataclasses.replace(config, steps=2))
    assert has_learnt_nothing(saved)
    reported = "nothing learnt: every iteration was rolled back; checkpoint 2 is the policy the run started with"
    assert f"{reported}; {config.folder}/events.jsonl says why" in said
    assert [event["event"] for event in events_of(config)] == ["not finite", "not finite", "nothing learnt"]
    for name, param in params(checkpoint).items():
        np.testing.assert_array_equal(params(saved)[name], param, err_msg=name)


def test_a_run_whose_rollouts_all_end_alike_reports_that_nothing_was_learnt(checkpoint: Path, tmp_path: Path) -> None:
    start = trained_on(checkpoint, tmp_path, "go left")
    config = small_online_run(start, tmp_path, replay="none", limit=1, evaluate_episodes=2)  # too short to succeed
    saved, _, said = run(dataclasses.replace(config, steps=1))
    assert read_contract(saved / CONTRACT_FILE).instructions == ("go left", "go right"), "its own task is added"
    assert has_learnt_nothing(saved)
    assert "nothing learnt: no iteration had anything to learn from" in said
    assert "; 1 iteration of 8 start states × 4 rollouts" in said


def test_a_full_disk_ends_the_run_and_damages_nothing_that_was_saved(
    whole: Whole, checkpoint: Path, tmp_path: Path
) -> None:
    """In a process that from some moment on can write no large file, which stands for a full disk."""
    config = small_online_run(checkpoint, tmp_path)
    checkpoints = config.folder / "checkpoints"
    script = program("train_small_online_run")
    with subprocess.Popen(
        [sys.executable, script, str(checkpoint), str(tmp_path), "{}"], stderr=subprocess.PIPE, text=True
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


def test_state_noise_is_refused_for_a_policy_that_reads_no_state() -> None:
    config = get_config("ript_libero_goal")
    online = dataclasses.replace(online_settings(config), exploration=ExplorationConfig(state_noise=0.2))
    with pytest.raises(UserError, match=r"state_noise is 0\.2: .* set it to 0"):
        train(dataclasses.replace(config, online=online), Console(file=io.StringIO()))


# --- Ways to roll out and to learn ------------------------------------------------------------------------------------


def test_rollouts_made_ahead_use_the_policy_before_and_are_the_same_every_time(
    checkpoint: Path, tmp_path: Path
) -> None:
    programs: tuple[Any, ...] = _act, rollout_noise
    for each in programs:
        each.clear_cache()

    def lines_of(name: str) -> list[dict[str, Any]]:
        config = small_online_run(checkpoint, tmp_path / name, overlap=True, evaluate_every=0, evaluate_episodes=2)
        return numbers(run(dataclasses.replace(config, save_every=3))[1])

    once, again = lines_of("one"), lines_of("two")
    assert [line["rollout/policy_age"] for line in once[1:]] == [0, 1, 1]
    assert once == again
    assert [each._cache_size() for each in programs] == [1, 1], "compiled once more for the thread beside"


def test_a_policy_learns_labels_and_acts_with_guidance(checkpoint: Path, tmp_path: Path) -> None:
    """cfg, end to end: failures are learnt from too, and it acts with guidance once it knows what the labels mean."""
    config = small_online_run(
        checkpoint, tmp_path, replay="none", windows="every_step", auto_tune=True, weighting="cfg", guidance=1.5
    )
    _, lines, _ = run(dataclasses.replace(config, steps=2))
    assert lines[1]["weight_mean"] == 1
    assert lines[1]["rollout/episodes"] == 32
    assert lines[1]["train/label_distance"] > 1e-4, "guidance has something to go by"
    assert lines[-1]["eval/sampled_successes"] > lines[0]["eval/sampled_successes"]
    assert any(event["event"].startswith("auto-tune") for event in events_of(config))


def test_labels_are_dropped_anew_in_every_update_and_left_out_where_they_mean_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor's reference is asked without labels. The drift is measured with the prompts of the rollouts: plain
    ones at first, then those that ask for good actions; with a label it has yet to learn any policy drifts far."""
    learnt_from, of_drift = list[RiptBatch](), list[np.ndarray]()
    batch = RiptLearner._batch

    def noticed(self: RiptLearner, *given: Any, **acted: Any) -> RiptBatch:
        made = batch(self, *given, **acted)
        if made.unlabelled is not None:
            learnt_from.append(made)
        return made

    def to_device(batch: RiptBatch, where: Any) -> RiptBatch:
        if batch.unlabelled is None:  # neither to learn from, with an anchor, nor to measure the labels' effect
            of_drift.append(np.unique(batch.observations.tokenized_prompt, axis=0))
        return to_devices(batch, where)

    monkeypatch.setattr(RiptLearner, "_batch", noticed)
    monkeypatch.setattr("pistar.online.ript_learner.to_devices", to_device)
    config = small_online_run(
        checkpoint,
        tmp_path,
        replay="none",
        updates=30,
        weighting="cfg",
        anchor=0.1,
        label_dropout=0.3,
        evaluate_episodes=2,
    )
    run(dataclasses.replace(config, steps=2))
    tokenizer = load_tokenizer("tiny", config.model.max_token_len)
    labels: tuple[Label, ...] = "none", "positive", "negative"
    plain, good, bad = (tokenizer.tokenize(labelled("go right", label), None)[0] for label in labels)
    for prompts, expected in zip(of_drift, (plain, good), strict=True):
        np.testing.assert_array_equal(prompts, [expected])
    assert len(learnt_from) == 60
    ways: dict[bytes, set[bool]] = {}
    for one in learnt_from:
        assert one.unlabelled is not None
        np.testing.assert_array_equal(one.unlabelled[0], np.broadcast_to(plain, one.unlabelled[0].shape))
        prompts = np.asarray(one.observations.tokenized_prompt)
        for tokens, action, advantage in zip(prompts, one.actions, np.asarray(one.advantages), strict=True):
            dropped = np.array_equal(tokens, plain)
            assert dropped or np.array_equal(tokens, good if advantage > 0 else bad)
            ways.setdefault(np.asarray(action).tobytes(), set()).add(dropped)
    assert sum(len(each) == 2 for each in ways.values()) > 0.8 * len(ways), "with a label and without"


def test_demonstrations_have_the_positive_label_where_labels_are_learnt(checkpoint: Path, tmp_path: Path) -> None:
    """Otherwise guidance, which leads away from the plain prompt, would lead away from them."""
    data = DataConfig(datasets=(str(noise_dataset(tmp_path / "demos")),), held_out=0.0)
    tokenizer = load_tokenizer("tiny", get_config("ript_metaworld").model.max_token_len)
    labels: dict[Weighting, Label] = {"positive": "none", "cfg": "positive"}
    for weighting, label in labels.items():
        config = small_online_run(checkpoint, tmp_path, replay="none", weighting=weighting)
        loader = prepare_online(dataclasses.replace(config, data=data)).demonstrations
        assert loader is not None
        shown = loader.sample_policy_batch(0).observations.tokenized_prompt
        expected = tokenizer.tokenize(labelled(PROMPT, label), None)[0]
        np.testing.assert_array_equal(np.unique(shown, axis=0), [expected])


def test_groups_that_are_not_informative_are_replaced_up_to_a_cap(
    whole: Whole, checkpoint: Path, tmp_path: Path
) -> None:
    """Compared with a run that replaces none."""
    config = small_online_run(checkpoint, tmp_path, attempts=3, evaluate_episodes=2)
    _, lines, _ = run(dataclasses.replace(config, steps=1))
    assert whole[1][1]["rollout/groups"] == 8
    informative = whole[1][1]["rollout/informative_groups"]
    assert informative < 8, "or nothing would have to be replaced"
    assert 8 < lines[1]["rollout/groups"] <= 24
    assert lines[1]["rollout/informative_groups"] > informative


@pytest.mark.parametrize("weighting", ["positive", "exp", "signed", "cfg"])
def test_groups_that_end_alike_are_not_learnt_from(checkpoint: Path, tmp_path: Path, weighting: Weighting) -> None:
    """One step is too short to succeed. With the weighting exp each failure would have weight 1."""
    config = small_online_run(checkpoint, tmp_path, replay="none", limit=1, evaluate_episodes=2, weighting=weighting)
    _, lines, said = run(dataclasses.replace(config, steps=1))
    assert lines[1]["rollout/episodes"] == 32
    assert lines[1]["rollout/informative_groups"] == lines[1]["train/chunks"] == lines[1]["train/updates"] == 0
    assert "nothing to learn from" in said


def test_rollouts_and_updates_can_be_computed_in_bfloat16(whole: Whole, checkpoint: Path, tmp_path: Path) -> None:
    """With the same policy: at a rate of almost zero it does not drift. Weights keep their precision."""
    config = small_online_run(checkpoint, tmp_path, rate=1e-30, evaluate_episodes=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"), steps=1)
    saved, lines, _ = run(config)
    assert lines[1]["train/drift"] == 0
    assert np.isfinite(lines[1]["loss"])
    assert lines[1]["loss"] != whole[1][1]["loss"]
    for name, param in params(checkpoint).items():
        np.testing.assert_allclose(params(saved)[name], param, rtol=0, atol=1e-28, err_msg=name)


def test_an_iterations_updates_end_when_the_policy_has_drifted_too_far(checkpoint: Path, tmp_path: Path) -> None:
    config = small_online_run(checkpoint, tmp_path, max_drift=1e-4, updates=200, evaluate_episodes=2)
    _, lines, _ = run(dataclasses.replace(config, steps=1))
    assert lines[1]["train/updates"] < 200
    assert lines[1]["train/drift"] > 1e-4


def test_bad_settings_are_refused_before_anything_is_built(checkpoint: Path, tmp_path: Path) -> None:
    config = small_online_run(checkpoint, tmp_path)

    def refused(message: str, config: RLTrainConfig) -> None:
        with pytest.raises(UserError, match=message):
            train(config, Console(file=io.StringIO()))
        assert not config.folder.exists()

    def changed(**changes: Any) -> RLTrainConfig:
        return small_online_run(checkpoint, tmp_path, **changes)

    refused("There is no environment", changed(environment="metawrld/push-v3"))
    refused("starts from a policy", dataclasses.replace(config, checkpoint=None))
    refused("held-out start states; use fewer", changed(evaluate_episodes=101))
    refused("chunks have 5 actions", changed(execute=6))
    shown = dataclasses.replace(config.data, datasets=("demos",))
    refused(r"demonstrations is 0.1, none of the 4 rows", dataclasses.replace(config, data=shown, batch_size=4))
    with pytest.raises(UserError, match=r"algorithm\.replay best works only with weighting positive"):
        changed(weighting="exp")
    with pytest.raises(UserError, match=r"needs a simulator: set online\.environment"):
        dataclasses.replace(config, online=None, updates_per_dispatch=1)


def trained_on(checkpoint: Path, folder: Path, *instructions: str) -> Path:
    """The same checkpoint, whose contract names these tasks."""
    copy = Path(shutil.copytree(checkpoint, folder / "trained" / "1"))
    contract = dataclasses.replace(read_contract(copy / CONTRACT_FILE), instructions=instructions)
    write_contract(copy / CONTRACT_FILE, contract)
    return copy


def test_a_policy_of_another_task_gets_a_warning_before_any_rollout(checkpoint: Path, tmp_path: Path) -> None:
    said = {}
    for task in ("go right", "fold the towel"):
        console = Console(file=io.StringIO(), width=400)
        config = small_online_run(trained_on(checkpoint, tmp_path / task, task), tmp_path / "runs")
        train(config, console, dry_run=True)
        said[task] = console.file.getvalue()  # type: ignore[attr-defined]
    assert "warning" not in said["go right"]
    warning = "warning: the policy was trained on 'fold the towel' and gets 'go right': it is not likely to"
    assert warning in said["fold the towel"]
    assert "environment can work together, but see the warning above" in said["fold the towel"]


def test_a_checkpoint_of_another_robot_is_refused_before_a_tokenizer_is_needed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    config = dataclasses.replace(get_config("ript_aloha_sim"), checkpoint=str(checkpoint))
    with pytest.raises(UserError, match="was trained with robot metaworld and this run has aloha_sim"):
        train(config, Console(file=io.StringIO()), dry_run=True)


def test_an_environment_of_another_robot_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = small_online_run(checkpoint, tmp_path, environment="helpers.toy_env:make")
    with pytest.raises(UserError, match=r"acts with 4 numbers \(metaworld\) and toy takes 2 \(toy\); run it in an env"):
        train(config, Console(file=io.StringIO()), dry_run=True)


def test_a_dry_run_builds_everything_and_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    config = small_online_run(
        checkpoint, tmp_path / "runs", replay="none", weighting="signed", start_states=StartStatesConfig(pool=60)
    )
    said = io.StringIO()
    assert train(config, Console(file=said, width=400), dry_run=True) is None
    assert (
        "online.start_states.pool is 60 and helpers.walk_env:make has 50 start states to train on; all of them"
        in said.getvalue()
    )
    assert "Dry run: weights, data and environment fit together" in said.getvalue()
    assert "signed weights without an anchor have an unbounded loss and diverge" in said.getvalue()
    assert not (tmp_path / "runs").exists()
