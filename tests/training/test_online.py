"""RIPT's loop: it learns, an iteration without a rate changes nothing, and what was stopped goes on to the bit."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from metaworld_policy import fresh_checkpoint
from pistar.config import RiptConfig
from pistar.errors import UserError
from pistar.presets import get_config
from pistar.training.checkpoints import open_checkpoint
from pistar.training.config import RLTrainConfig
from pistar.training.experience import Starts
from pistar.training.metrics import read_metrics
from pistar.training.online import train
from pistar.training.online_config import ExplorationConfig, HealthConfig, StartsConfig
from pistar.training.optimizers import AdamWConfig, CosineSchedule

pytestmark = pytest.mark.xdist_group("online")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_checkpoint(tmp_path_factory.mktemp("fresh"))


def constant(rate: float) -> AdamWConfig:
    return AdamWConfig(CosineSchedule(warmup_steps=0, peak_lr=rate, decay_steps=1, decay_lr=rate))


def settings(checkpoint: Path, runs: Path, *, rate: float = 2e-3, **changes: Any) -> RLTrainConfig:
    config = get_config("ript_metaworld")
    online = dataclasses.replace(
        config.online,
        environment="envs.walk:make",
        limit=12,
        environments=8,
        workers=0,
        contexts=8,
        rollouts=4,
        starts=StartsConfig("uniform", pool=30),
        updates=20,
        evaluate_every=1,
        evaluate_episodes=40,
        **changes,
    )
    return dataclasses.replace(
        config,
        checkpoint=str(checkpoint),
        online=online,
        algorithm=RiptConfig(anchor=0.0, ema_decay=None, augmentation=False),
        policy_optimizer=constant(rate),
        steps=3,
        batch_size=64,
        runs=runs,
        exp_name="run",
    )


def run(config: RLTrainConfig, **how: bool) -> tuple[Path, list[dict[str, Any]], str]:
    said = io.StringIO()
    saved = train(config, Console(file=said, width=400), **how)
    assert saved is not None
    return saved, list(read_metrics(config.folder / "metrics.jsonl")), said.getvalue()


def params(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as checkpoint:
        return {leaf.name: np.asarray(leaf.read()) for leaf in checkpoint.leaves()}


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """But for times."""
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    return run(settings(checkpoint, tmp_path_factory.mktemp("whole")))


def test_the_policy_succeeds_more_often(whole: tuple[Path, list[dict[str, Any]], str]) -> None:
    _, lines, said = whole
    before, after = lines[0], lines[-1]
    assert before["evaluation/sampled"] < 20, "of 40"
    assert after["evaluation/sampled"] > before["evaluation/sampled"] + 10
    assert f"{int(after['evaluation/sampled'])}/40 sampled" in said
    assert "groups informative" in said


def test_a_stopped_run_goes_on_to_the_bit(
    whole: tuple[Path, list[dict[str, Any]], str], checkpoint: Path, tmp_path: Path
) -> None:
    """With start states that are remembered, successes that are kept, exploration, and the optimiser's moments."""
    config = settings(checkpoint, tmp_path)
    run(dataclasses.replace(config, steps=2))
    saved, lines, _ = run(dataclasses.replace(config, steps=3), resume=True)
    # Starts are chosen by how much of the run is over only in a curriculum, so a shorter first part changes nothing.
    assert numbers(lines) == numbers(whole[1])
    for name, param in params(whole[0]).items():
        np.testing.assert_array_equal(params(saved)[name], param, err_msg=name)


@pytest.mark.parametrize("replay", ["none", "best"])
def test_an_iteration_at_next_to_no_rate_changes_nothing(checkpoint: Path, tmp_path: Path, replay: str) -> None:
    """Acting and training are the same policy: nothing to make up for, no drift, and the same episodes again."""
    config = settings(checkpoint, tmp_path, rate=1e-30, replay=replay)
    saved, lines, _ = run(dataclasses.replace(config, steps=1))
    assert lines[1]["learning/updates"] == 20
    assert lines[1]["learning/drift"] == 0
    for name in ("zero_noise", "sampled"):
        assert lines[0][f"evaluation/{name}"] == lines[1][f"evaluation/{name}"]
    for name, param in params(checkpoint).items():
        np.testing.assert_allclose(params(saved)[name], param, rtol=0, atol=1e-28, err_msg=name)


def test_a_start_state_that_cannot_be_finished_is_neither_counted_nor_learnt_from(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALK_TROUBLE", str(tmp_path))
    for start in (1, 4):
        (tmp_path / f"{start}.always").touch()
    config = settings(checkpoint, tmp_path / "runs", replay="none")
    online = dataclasses.replace(
        config.online, contexts=6, starts=StartsConfig("uniform", pool=6), health=HealthConfig(max_fault_rate=None)
    )
    saved, lines, _ = run(dataclasses.replace(config, online=online, steps=1))
    assert lines[1]["practice/episodes"] == 4 * 4, "of six start states two are broken"
    events = [json.loads(line) for line in (config.folder / "events.jsonl").read_text().splitlines()]
    assert {event["start_id"] for event in events} == {1, 4}
    assert {event["done"] for event in events} == {"group dropped"}
    known = json.loads((saved / "starts.json").read_text())
    assert sorted(one["start"] for one in known) == [0, 2, 3, 5]


def test_a_worker_that_dies_while_practising_changes_nothing_and_is_told(
    whole: tuple[Path, list[dict[str, Any]], str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a run in one process without a fault."""
    monkeypatch.setenv("WALK_TROUBLE", str(tmp_path))
    config = settings(checkpoint, tmp_path / "runs")
    config = dataclasses.replace(config, online=dataclasses.replace(config.online, workers=2), steps=1)
    starts = Starts(config.online.starts, {"walk": range(50)})
    _, first = starts.choose(8, np.random.default_rng([config.seed, 0, 0]), 0.0)[0]
    (tmp_path / f"{first}.kill").touch()
    _, lines, _ = run(config)
    events = [json.loads(line) for line in (config.folder / "events.jsonl").read_text().splitlines()]
    assert [event["start_id"] for event in events if event["event"] == "died"] == [first]
    assert {event["done"] for event in events} == {"episode run again"}
    faults = [line.pop("practice/faults", None) for line in lines]
    assert faults == [None, len(events)]
    unhurt = [{k: v for k, v in line.items() if k != "practice/faults"} for line in numbers(whole[1])[:2]]
    assert numbers(lines) == unhurt


def test_groups_that_teach_nothing_are_replaced_up_to_a_cap(checkpoint: Path, tmp_path: Path) -> None:
    few = settings(checkpoint, tmp_path / "one", replay="none", attempts=1, exploration=ExplorationConfig())
    more = settings(checkpoint, tmp_path / "three", replay="none", attempts=3, exploration=ExplorationConfig())
    _, once, _ = run(dataclasses.replace(few, steps=1))
    _, again, _ = run(dataclasses.replace(more, steps=1))
    assert once[1]["practice/start_states"] == 8
    informative = once[1]["practice/informative"]
    assert informative < 8, "or nothing would have to be replaced"
    assert 8 < again[1]["practice/start_states"] <= 24
    assert again[1]["practice/informative"] > informative


def test_updates_end_when_the_policy_has_moved_too_far(checkpoint: Path, tmp_path: Path) -> None:
    config = settings(checkpoint, tmp_path, max_drift=1e-4)
    config = dataclasses.replace(config, steps=1, online=dataclasses.replace(config.online, updates=200))
    _, lines, _ = run(config)
    assert lines[1]["learning/updates"] < 200
    assert lines[1]["learning/drift"] > 1e-4


def test_bad_settings_are_one_error_before_anything_is_built(checkpoint: Path, tmp_path: Path) -> None:
    config = settings(checkpoint, tmp_path)

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
    with pytest.raises(UserError, match="replay is best, whose successes have weights"):
        dataclasses.replace(config, algorithm=RiptConfig(weighting="exp"))


def test_a_dry_run_builds_everything_and_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    config = settings(checkpoint, tmp_path / "runs")
    said = io.StringIO()
    assert train(config, Console(file=said), dry_run=True) is None
    assert "Dry run: weights, data and environment agree" in said.getvalue()
    assert not (tmp_path / "runs").exists()
