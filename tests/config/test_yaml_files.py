"""The YAML files that come with the project: each is a run of the preset it is named after."""

import dataclasses
from pathlib import Path

import pytest

from pistar.agents.config import RiptConfig
from pistar.cli import main as cli
from pistar.config.presets import get_config
from pistar.config.train import RLTrainConfig, load_config
from pistar.online import loop

from helpers.paths import ROOT
from helpers.small_online_run import online_settings

FILES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_a_run_of_its_preset(path: Path) -> None:
    preset = get_config(path.stem)
    config = load_config(path, preset)
    assert isinstance(config.algorithm, RiptConfig)
    assert online_settings(config).environment == online_settings(preset).environment
    assert config.model == preset.model


@pytest.mark.parametrize("name", ["ript_metaworld", "ript_quick_test"])
def test_a_file_with_the_presets_own_values_is_the_preset(name: str) -> None:
    (path,) = (path for path in FILES if path.stem == name)
    assert load_config(path, get_config(name)) == get_config(name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_read_without_notes(path: Path) -> None:
    notes: list[str] = []
    load_config(path, get_config(path.stem), say=notes.append)
    assert notes == []


def test_the_settings_of_a_file_are_those_of_the_run() -> None:
    preset = get_config("ript_libero_goal")
    config = load_config(next(path for path in FILES if path.stem == "ript_libero_goal"), preset)
    online = online_settings(config)
    assert isinstance(config.algorithm, RiptConfig)
    assert (online.start_states_per_iteration, config.algorithm.group_size, config.algorithm.attempts) == (24, 8, 6)
    assert (online.patience, config.trackers) == (5, ("tensorboard",))
    assert config.policy_optimizer.schedule.peak_lr == 1e-5
    assert online.exploration == online_settings(preset).exploration


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_options_win_over_a_file_and_the_rest_of_it_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[RLTrainConfig] = []

    def train(config: RLTrainConfig, _: object, **__: bool) -> Path:
        asked.append(config)
        return Path(str(config.steps))

    monkeypatch.setattr(loop, "train", train)
    cli.main(
        [
            "train",
            path.stem,
            "--config",
            str(path),
            "--online.start-states-per-iteration",
            "3",
            "--algorithm.guidance",
            "1.25",
        ]
    )
    capsys.readouterr()
    file = load_config(path, get_config(path.stem))
    assert isinstance(file.algorithm, RiptConfig)
    assert asked[0].online == dataclasses.replace(online_settings(file), start_states_per_iteration=3)
    assert asked[0].algorithm == dataclasses.replace(file.algorithm, guidance=1.25)
    assert (asked[0].policy_optimizer, asked[0].model) == (file.policy_optimizer, file.model)
