"""Preparing a run: columns, episodes, notes."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pistar.agents.config import AcrlpdConfig, BcConfig
from pistar.config.model_presets import MODELS
from pistar.config.train import RLTrainConfig
from pistar.data.success_sources import FromColumn
from pistar.errors import UserError
from pistar.training.setup import prepare

from helpers.small_run import small_run

LEFT, RIGHT = "images/cam_left_wrist", "images/cam_right_wrist"


def with_data(config: RLTrainConfig, **changes: object) -> RLTrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))  # type: ignore[arg-type]


@pytest.fixture
def config(tmp_path: Path) -> RLTrainConfig:
    return small_run(tmp_path / "runs", tmp_path / "cache", batch_size=8)


def test_columns_with_other_names_are_read_as_configured(config: RLTrainConfig) -> None:
    usual = prepare(config, dry=True).loader.sample_batch(0).observations
    renamed = with_data(config, columns={LEFT: "observation.images.cam_right_wrist", RIGHT: "none"})
    seen = prepare(renamed, dry=True).loader.sample_batch(0).observations
    np.testing.assert_array_equal(seen.images["left_wrist_0_rgb"], usual.images["right_wrist_0_rgb"])
    np.testing.assert_array_equal(seen.images["base_0_rgb"], usual.images["base_0_rgb"])
    assert not np.any(seen.image_masks["right_wrist_0_rgb"])
    assert np.all(usual.image_masks["right_wrist_0_rgb"])


def test_a_column_for_actions_decides_the_statistics_too(config: RLTrainConfig) -> None:
    stats = prepare(with_data(config, columns={"actions": "observation.state"}), dry=True).context.norm_stats
    usual = prepare(config, dry=True).context.norm_stats
    assert not np.allclose(stats["actions"].std, usual["actions"].std)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"images/cam_hihg": "x"}, "names 'images/cam_hihg', which aloha does not have; try images/cam_high"),
        (
            {"images/cam_high": "observation.images.top"},
            "no camera .observation.images.top.; it has observation.images.cam_high, .*columns images/cam_high NAME, "
            "or choose another robot",
        ),
        ({LEFT: "elsewhere"}, "--data.columns images/cam_left_wrist NAME, or none if it has no such camera"),
        ({"images/cam_high": "none"}, "repack has no column for 'images/cam_high'"),
    ],
)
def test_columns_the_dataset_does_not_have_are_refused(
    config: RLTrainConfig, columns: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        prepare(with_data(config, columns=columns), dry=True)


def test_imitation_holds_out_the_episodes_a_critic_is_audited_on(config: RLTrainConfig) -> None:
    imitating = dataclasses.replace(config, algorithm=BcConfig())
    assert isinstance(config.algorithm, AcrlpdConfig)
    (ours,), (theirs,) = (prepare(c, dry=True).held_out for c in (imitating, config))
    np.testing.assert_array_equal(ours.episodes, theirs.episodes)


def test_imitation_needs_no_labels(config: RLTrainConfig) -> None:
    imitating = dataclasses.replace(config, algorithm=BcConfig())
    run = prepare(with_data(imitating, success=FromColumn("no.such.column")), dry=True)
    assert run.episodes[1] > 0


@pytest.mark.parametrize(("horizon", "noted"), [(10, ()), (6, ("model.action_horizon is 6",))])
def test_a_horizon_other_than_the_checkpoints_is_noted(
    config: RLTrainConfig, pytorch_goldens: Path, horizon: int, noted: tuple[str, ...]
) -> None:
    checkpoint = str(pytorch_goldens / "lerobot_pi0_tiny")
    model = dataclasses.replace(MODELS["pi0_tiny"], action_horizon=horizon)
    notes = prepare(dataclasses.replace(config, checkpoint=checkpoint, model=model), dry=True).context.notes
    found = [note for note in notes if f"{checkpoint} was trained with 10" in note]
    assert tuple(note.split(" and ")[0] for note in found) == noted


def test_a_checkpoint_of_another_kind_of_model_is_refused(config: RLTrainConfig, pytorch_goldens: Path) -> None:
    checkpoint = str(pytorch_goldens / "lerobot061_pi05_tiny")
    says = r"is a π₀\.₅ and this run's model is not .* --model\.pi05 --model\.max-token-len"
    with pytest.raises(UserError, match=says):
        prepare(dataclasses.replace(config, checkpoint=checkpoint, model=MODELS["pi0_tiny"]), dry=True)
