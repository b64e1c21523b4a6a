"""A run's folder: which settings it may be resumed with."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from pistar.config.train import save_config
from pistar.errors import UserError
from pistar.training.run_folder import find_start, settings_of_run

from helpers.small_online_run import small_online_run


def test_an_online_run_is_not_resumed_in_another_environment(tmp_path: Path) -> None:
    config = small_online_run(tmp_path / "checkpoint", tmp_path)
    config.folder.mkdir()
    save_config(config.folder / "config.yaml", config)
    other = small_online_run(tmp_path / "checkpoint", tmp_path, environment="metaworld/push-v3")
    refused = r"online.environment was helpers.walk_env:make and is now metaworld/push-v3; the run's start states"
    with pytest.raises(UserError, match=refused):
        find_start(other, Console(file=io.StringIO()), resume=True, overwrite=False)


def test_a_run_that_was_moved_is_found_where_it_is(tmp_path: Path) -> None:
    config = small_online_run(tmp_path / "checkpoint", tmp_path / "before")
    moved = tmp_path / "archive" / "best"
    moved.mkdir(parents=True)
    save_config(moved / "config.yaml", config)
    assert settings_of_run(moved, say=pytest.fail).folder == moved
