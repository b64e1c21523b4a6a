"""Preparing a run: columns, episodes, notes."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from pistar.agents.config import AcrlpdConfig, BcConfig
from pistar.config.model_presets import MODELS, with_adapters
from pistar.config.train import RLTrainConfig
from pistar.data.success_sources import FromColumn
from pistar.errors import UserError
from pistar.training.setup import prepare

from helpers.small_run import LEROBOT, small_run, with_data

LEFT, RIGHT = "images/cam_left_wrist", "images/cam_right_wrist"


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


def test_a_checkpoint_that_does_not_exist_is_refused_before_datasets_are_read(config: RLTrainConfig) -> None:
    nowhere = with_data(dataclasses.replace(config, checkpoint="/nowhere/1000"), datasets=("/no/dataset",))
    with pytest.raises(UserError, match=r"^/nowhere/1000 does not exist; name a checkpoint folder"):
        prepare(nowhere, dry=True)


def test_errors_name_the_dataset_where_there_are_several(config: RLTrainConfig) -> None:
    without = FromColumn("no.such.column")
    first, second = (str(LEROBOT / name) for name in ("lerobot_v21", "lerobot_v30"))
    with pytest.raises(UserError, match=f"^{re.escape(first)}: The dataset has no column 'no.such.column'"):
        prepare(with_data(config, success=without, datasets=(first, second)), dry=True)
    with pytest.raises(UserError, match=r"^The dataset has no column"):
        prepare(with_data(config, success=without), dry=True)
    with pytest.raises(UserError, match=r"^/nowhere does not exist"):
        prepare(with_data(config, datasets=(first, "/nowhere")), dry=True)


def test_adapters_on_fresh_weights_are_noted(config: RLTrainConfig) -> None:
    adapted = dataclasses.replace(config, model=with_adapters(config.model))
    words = "the model has LoRA adapters and starts from fresh weights"
    assert [words in " ".join(prepare(each, dry=True).context.notes) for each in (adapted, config)] == [True, False]


def test_a_horizon_beyond_the_episodes_is_noted(config: RLTrainConfig) -> None:
    long = dataclasses.replace(config, model=dataclasses.replace(config.model, action_horizon=500))
    said = [" ".join(prepare(each, dry=True).context.notes) for each in (long, config)]
    assert re.search(
        r"action_horizon is 500 and episodes of .* have \d+ frames on average, so 9\d% of a chunk", said[0]
    )
    assert "of a chunk is padding" not in said[1]
