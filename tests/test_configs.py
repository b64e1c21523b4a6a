"""The YAML files that come with the project: each is a run of the preset it is named after."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from pistar import cli
from pistar.config import RiptConfig
from pistar.presets import get_config
from pistar.tables import to_table
from pistar.training import online
from pistar.training.config import RLTrainConfig, load_config

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_a_run_of_its_preset(path: Path) -> None:
    preset = get_config(path.stem)
    config = load_config(path, preset)
    assert isinstance(config.algorithm, RiptConfig)
    assert config.online.environment == preset.online.environment
    assert config.model == preset.model


def test_the_file_of_metaworld_is_its_preset_in_the_familiar_grouping() -> None:
    (path,) = (path for path in FILES if path.stem == "ript_metaworld")
    assert load_config(path, get_config(path.stem)) == get_config(path.stem)
    familiar = "model environment training optimizer loss sampling logging debug distributed"
    assert list(yaml.safe_load(path.read_text())) == familiar.split()


def test_what_a_file_says_is_what_is_run() -> None:
    preset = get_config("ript_libero_goal")
    config = load_config(next(path for path in FILES if path.stem == "ript_libero_goal"), preset)
    assert (config.online.contexts, config.online.rollouts, config.online.attempts) == (24, 8, 6)
    assert (config.online.patience, config.trackers) == (5, ("tensorboard",))
    assert config.policy_optimizer.schedule.peak_lr == 1e-5
    assert to_table(config.online.exploration) == to_table(preset.online.exploration)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_options_are_stronger_than_a_file_and_the_rest_of_it_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[RLTrainConfig] = []

    def train(config: RLTrainConfig, _: object, **__: bool) -> Path:
        asked.append(config)
        return Path(str(config.steps))

    monkeypatch.setattr(online, "train", train)
    cli.main(["train", path.stem, "--config", str(path), "--online.contexts", "3", "--algorithm.guidance", "1.25"])
    capsys.readouterr()
    file = load_config(path, get_config(path.stem))
    assert isinstance(file.algorithm, RiptConfig)
    assert asked[0].online == dataclasses.replace(file.online, contexts=3)
    assert asked[0].algorithm == dataclasses.replace(file.algorithm, guidance=1.25)
    assert (asked[0].policy_optimizer, asked[0].model) == (file.policy_optimizer, file.model)
