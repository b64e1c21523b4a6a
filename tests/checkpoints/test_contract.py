import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pistar.checkpoints.contract import (
    MAX_INSTRUCTIONS,
    Contract,
    merge_instructions,
    read_contract,
    unknown_instructions_warning,
    write_contract,
)
from pistar.config.model_presets import MODELS
from pistar.data.norm_stats import NormStats, norm_stats_hash
from pistar.errors import UserError
from pistar.models.config import LoraConfig

STATS = {key: NormStats(mean=np.zeros(14), std=np.ones(14)) for key in ("state", "actions")}

CONTRACT = Contract(
    model=MODELS["pi0_tiny"],
    robot="aloha",
    asset_id="trossen",
    state_dim=14,
    action_dim=14,
    delta_mask=(True,) * 6 + (False,) + (True,) * 6 + (False,),
    prompt_format="pi0",
    tokenizer_sha256="ab" * 32,
    norm_kind="zscore",
    norm_stats_sha256=norm_stats_hash(STATS),
)


def test_a_contract_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    model = dataclasses.replace(
        CONTRACT.model, vlm=dataclasses.replace(CONTRACT.model.vlm, lora=LoraConfig(4, 8.0)), cameras=("a", "b")
    )
    contract = dataclasses.replace(CONTRACT, model=model, delta_mask=None)
    write_contract(tmp_path / "contract.json", contract)
    assert read_contract(tmp_path / "contract.json") == contract


def test_a_contract_from_before_instructions_were_written_down_is_read(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda data: (data.update(version=1), data.pop("instructions")))
    assert read_contract(path) == CONTRACT
    assert CONTRACT.instructions is None


def test_instructions_the_policy_was_not_trained_on_give_a_warning() -> None:
    taught = ["fold the towel", "open_the box"]
    assert unknown_instructions_warning(taught, ["open the box", "fold the towel\n"]) is None
    warning = unknown_instructions_warning(taught, ["fold the towel", "push the puck", "push the puck"])
    assert warning is not None
    assert "trained on 'fold the towel', 'open_the box' and gets 'push the puck': it is" in warning


def test_unknown_training_instructions_give_no_warning() -> None:
    assert unknown_instructions_warning(None, ["push the puck"]) is None
    assert merge_instructions(["a", "b"], ["b", "c"]) == ("a", "b", "c")
    assert merge_instructions(map(str, range(MAX_INSTRUCTIONS + 1))) is None


def test_a_whole_number_may_stand_for_alpha(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda data: data["model"]["vlm"].update(lora={"rank": 4, "alpha": 8}))
    assert read_contract(path).model.vlm.lora == LoraConfig(4, 8.0)


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    path = folder / "contract.json"
    write_contract(path, CONTRACT)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(version=3), "contract version 3, this pistar knows 2; use the pistar that wrote"),
        (lambda data: data.pop("version"), "contract version None"),
        (lambda data: data.pop("robot"), r"contract\.robot is missing; add it"),
        (lambda data: data["model"].pop("action_horizon"), r"contract\.model\.action_horizon is missing"),
        (lambda data: data.update(tokeniser_sha256=""), "did you mean tokenizer_sha256"),
        (lambda data: data.update(zzz=1), "zzz does not exist; the fields are model, robot"),
        (lambda data: data.update(norm_kind="minmax"), "norm_kind is 'minmax'; use one of zscore, quantile"),
        (lambda data: data.update(state_dim=True), "state_dim is True; its type is int"),
        (lambda data: data.update(delta_mask="all"), "delta_mask is 'all'"),
        (lambda data: data.update(delta_mask=[True, 1]), r"delta_mask\[1\] is 1; its type is bool"),
        (lambda data: data.update(model=None), "model is None; a table of fields belongs there"),
        (lambda data: data.update(state_dim=33), "state_dim is 33; it must be from 1 to the model's action_dim, 32"),
        (lambda data: data.update(action_dim=0), "action_dim is 0"),
        (lambda data: data.update(action_dim=3), "delta_mask has 14 entries for 3"),
        (lambda data: data.update(asset_id="../elsewhere"), "asset_id is '../elsewhere'; it names a folder under"),
        (lambda data: data.update(asset_id="/elsewhere"), "asset_id"),
        (lambda data: data.update(asset_id=""), "asset_id"),
        (lambda data: data["model"].update(cameras=[]), "cameras is empty"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = edited(tmp_path, edit)
    with pytest.raises(UserError, match=message) as error:
        read_contract(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_file_that_is_not_a_contract_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "contract.json").write_text(content)
    with pytest.raises(UserError, match=r"contract.json"):
        read_contract(tmp_path / "contract.json")


def test_matching_weights_and_norm_stats_have_no_problems() -> None:
    unseen = dataclasses.replace(CONTRACT.model, action_horizon=50, dtype="bfloat16")
    assert CONTRACT.problems(unseen, STATS) == []


def test_weights_of_another_model_are_a_problem() -> None:
    weights = dataclasses.replace(CONTRACT.model, action_dim=16, vocab_size=9)
    first, second = CONTRACT.problems(weights, STATS)
    assert "says action_dim is 32 but the weights have 16" in first
    assert "says vocab_size is 512 but the weights have 9" in second


def test_missing_norm_stats_are_a_problem() -> None:
    (problem,) = CONTRACT.problems(CONTRACT.model, None)
    assert "norm stats for trossen, which are missing; put assets/trossen/norm_stats.json" in problem


def test_other_norm_stats_are_a_problem() -> None:
    other = {"state": STATS["state"], "actions": NormStats(mean=np.ones(14), std=np.ones(14))}
    (problem,) = CONTRACT.problems(CONTRACT.model, other)
    assert "but the policy was trained with" in problem


def test_norm_stats_of_another_robot_are_a_problem() -> None:
    other = {"actions": NormStats(mean=np.zeros(7), std=np.ones(7))}
    first, _ = CONTRACT.problems(CONTRACT.model, other)
    assert "14 numbers in its actions but norm stats of trossen have 7" in first
