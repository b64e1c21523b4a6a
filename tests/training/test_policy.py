"""A checkpoint that acts, against OpenPI's own served policy."""

import dataclasses
import json
import re
import shutil
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from metaworld_policy import PROMPT, fresh_checkpoint, trained_checkpoint
from pistar.agents.ript import Label
from pistar.data.norm_stats import Norm, load_norm_stats, norm_stats_hash
from pistar.data.robots import aloha_state_to_model, find_robot, input_transform, output_transform
from pistar.data.transforms import Data
from pistar.errors import UserError
from pistar.models.tokenizer import load_tokenizer
from pistar.training.checkpoint_writer import write_checkpoint
from pistar.training.checkpoints import open_checkpoint, read_params
from pistar.training.contract import Contract, read_contract
from pistar.training.policy import Policy, agree_contract, load_policy
from pistar.training.verify import verify

import goldens


class StoredTokens:
    """The golden's stand-in for PaliGemma's tokenizer: always the same tokens."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens.astype(np.int32)

    def tokenize(self, prompt: str, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens, self.tokens != 0


def archive(case: str) -> Path:
    return goldens.OPENPI / f"openpi_ckpt_{case}_tiny.tar.gz"


def robot_observation(case: str) -> Data:
    golden = goldens.arrays(f"policy_infer_{case}")
    cameras = {name: golden[name] for name in ("cam_high", "cam_left_wrist")}
    return {"state": golden["state"], "images": cameras, "prompt": "fold the towel"}


def unpacked(case: str, folder: Path) -> Path:
    with tarfile.open(archive(case)) as tar:
        tar.extractall(folder, filter="data")
    return next(path.parent for path in folder.rglob("params") if path.is_dir())


def test_a_policy_is_known_by_its_weights_and_by_how_it_is_used() -> None:
    told = {"tokenizer": "tiny", "robot": "aloha"}
    policy, longer = (load_policy(archive("pi0"), action_horizon=horizon, **told) for horizon in (10, 20))  # type: ignore[arg-type]
    mine, other = policy.identity(), longer.identity()
    assert mine["weights_sha256"] == other["weights_sha256"], "no weight shows the horizon"
    assert {name for name, value in mine["contract"].items() if value != other["contract"][name]} == {"action_horizon"}
    name = sorted(policy.params)[-1]
    moved = dict(policy.params) | {name: policy.params[name].at[(0,) * policy.params[name].ndim].add(1)}
    assert dataclasses.replace(policy, params=moved).identity()["weights_sha256"] != mine["weights_sha256"]


@pytest.mark.parametrize("case", ["pi0", "pi05"])
def test_the_golden_checkpoint_acts_as_openpis_own_policy(case: str, tmp_path: Path) -> None:
    golden = goldens.arrays(f"policy_infer_{case}")
    stats = load_norm_stats(next(unpacked(case, tmp_path).rglob("norm_stats.json")))
    robot = find_robot("aloha")
    norm: Norm = "quantile" if case == "pi05" else "zscore"
    config = dataclasses.replace(goldens.config(f"{case}_tiny"), dtype="bfloat16")
    tokens = StoredTokens(golden["fake_tokens"])
    policy = Policy(
        config,
        {name: jnp.asarray(p) for name, p in read_params(archive(case), dtype=jnp.bfloat16).items()},
        # OpenPI fixes 224 here, whatever its model takes, and its model shrinks the picture again.
        input_transform(robot, stats, norm, tokens, action_dim=32, image_size=224, discrete_state=False),
        output_transform(robot, stats, norm),
        robot,
    )
    (actions,) = policy.act([robot_observation(case)], golden["noise"][None])
    assert actions.shape == golden["actions"].shape
    # In units of each joint's spread, the model's own. OpenPI's bfloat16 is 1.3e-2 to 4.6e-2 away from its float32.
    error = np.abs(actions - golden["actions"]) / stats["actions"].std
    assert error.max() < 2e-2


def test_openpis_checkpoint_loads_with_what_the_user_adds() -> None:
    policy = load_policy(archive("pi0"), tokenizer="tiny", robot="aloha", action_horizon=10)
    actions = policy.act([robot_observation("pi0")] * 2, policy.draw_noise(0, 2))
    assert actions.shape == (2, 10, 14)
    assert np.isfinite(actions).all()


def test_candidates_share_the_observation_and_start_from_its_state() -> None:
    policy = load_policy(archive("pi05"), tokenizer="tiny", robot="aloha", action_horizon=10)
    noise = policy.draw_noise(0, 1, 3)
    together = policy.act([robot_observation("pi05")], noise)
    apart = [policy.act([robot_observation("pi05")], noise[:, i])[0] for i in range(3)]
    assert together.shape == (1, 3, 10, 14)
    np.testing.assert_allclose(together[0], apart, atol=5e-2)  # bfloat16, compiled for two shapes


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OpenPI's π₀ checkpoint written again by us, with a contract."""
    folder = tmp_path_factory.mktemp("ours")
    stats = load_norm_stats(next(unpacked("pi0", folder / "theirs").rglob("norm_stats.json")))
    contract = Contract(
        model=goldens.config("pi0_tiny"),
        robot="aloha",
        asset_id="trossen",
        state_dim=14,
        action_dim=14,
        delta_mask=find_robot("aloha").delta_mask,
        prompt_format="pi0",
        tokenizer_sha256=load_tokenizer("tiny", 48).sha256,
        norm_kind="zscore",
        norm_stats_sha256=norm_stats_hash(stats),
    )
    return write_checkpoint(folder / "run", 7, read_params(archive("pi0")), {"trossen": stats}, contract)


def test_a_checkpoint_with_a_contract_needs_nothing_else(ours: Path) -> None:
    from_contract = load_policy(ours)
    told = load_policy(archive("pi0"), tokenizer="tiny", robot="aloha", action_horizon=10)
    noise = told.draw_noise(3, 1)
    observation = [robot_observation("pi0")]
    np.testing.assert_array_equal(from_contract.act(observation, noise), told.act(observation, noise))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"robot": "libero"}, "robot is libero but the policy was trained with aloha"),
        ({"action_horizon": 50}, "action_horizon is 50 but the policy was trained with 10"),
        ({"asset_id": "droid"}, "asset_id is droid but the policy was trained with trossen"),
    ],
)
def test_what_contradicts_the_contract_is_refused(ours: Path, asked: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_policy(ours, **asked)  # type: ignore[arg-type]


def test_another_tokenizer_than_the_contracts_is_refused(ours: Path, tmp_path: Path) -> None:
    contract = (ours / "contract.json").read_text().replace(load_tokenizer("tiny", 48).sha256, "0" * 64)
    (ours / "contract.json").rename(tmp_path / "kept")
    try:
        (ours / "contract.json").write_text(contract)
        with pytest.raises(UserError, match="trained with 000000000000…"):
            load_policy(ours, tokenizer="tiny")
    finally:
        (tmp_path / "kept").rename(ours / "contract.json")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "has no contract.json to name its robot; give the robot"),
        ({"robot": "alohha"}, "There is no robot 'alohha'; try aloha"),
        ({"robot": "aloha", "asset_id": "droid"}, "has norm stats for trossen and asset_id is droid"),
        ({"robot": "libero", "tokenizer": "tiny"}, "8 numbers in its state but norm stats of trossen have 14"),
    ],
)
def test_an_openpi_checkpoint_that_lacks_something_says_what(asked: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_policy(archive("pi0"), **asked)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_missing_norm_stats_are_named_before_anything_loads(ours: Path, tmp_path: Path) -> None:
    (ours / "assets").rename(tmp_path / "assets")
    try:
        with pytest.raises(UserError, match=r"assets/trossen/norm_stats\.json"):
            load_policy(ours)
    finally:
        (tmp_path / "assets").rename(ours / "assets")


def edited(ours: Path, folder: Path, **changes: object) -> Path:
    """A copy of the checkpoint whose contract was changed by hand."""
    copy = folder / "edited"
    shutil.copytree(ours, copy)
    contract = json.loads((copy / "contract.json").read_text())
    (copy / "contract.json").write_text(json.dumps(contract | changes))
    return copy


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"robot": "nosuchrobot"}, "There is no robot 'nosuchrobot'"),
        ({"robot": "libero"}, "state_dim is 14 but libero has 8"),
        ({"tokenizer_sha256": "abc"}, "contract.tokenizer_sha256 is 'abc'; a sha256 has 64"),
    ],
)
def test_a_contract_that_contradicts_the_robot_is_refused_by_verify_and_load(
    ours: Path, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    copy = edited(ours, tmp_path, **changes)
    assert any(re.search(says, problem) for problem in verify(copy).problems)
    with pytest.raises(UserError, match=says):
        load_policy(copy)


def test_the_contracts_relative_actions_are_the_ones_that_act(ours: Path, tmp_path: Path) -> None:
    absolute = load_policy(edited(ours, tmp_path, delta_mask=None))
    relative = load_policy(ours)
    observation = robot_observation("pi0")
    noise = relative.draw_noise(0, 1)
    state = aloha_state_to_model(observation["state"])
    moved = relative.act([observation], noise) - absolute.act([observation], noise)
    # The flipped joints come out flipped, the grippers (6 and 13) are absolute in both.
    expected = np.abs(state) * np.array([1, 1, 1, 1, 1, 1, 0] * 2)
    np.testing.assert_allclose(np.abs(moved[0]), np.broadcast_to(expected, moved[0].shape), atol=1e-6)


def test_weights_with_nan_are_neither_written_nor_served(ours: Path, tmp_path: Path) -> None:
    params = read_params(ours)
    params["state_proj/bias"][0] = np.nan
    contract = read_contract(ours / "contract.json")
    stats = load_norm_stats(ours / "assets" / "trossen" / "norm_stats.json")
    with pytest.raises(UserError, match="state_proj/bias has NaN or Inf"):
        write_checkpoint(tmp_path, 1, params, {"trossen": stats}, contract)
    assert not (tmp_path / "1").exists()
    with pytest.MonkeyPatch.context() as patch:  # as another program would write it
        patch.setattr("pistar.training.checkpoint_writer._parameter_problems", lambda contract, params: [])
        broken = write_checkpoint(tmp_path, 1, params, {"trossen": stats}, contract)
    with pytest.raises(UserError, match=r"state_proj/bias has NaN or Inf; .* take an earlier checkpoint"):
        load_policy(broken)


@pytest.mark.parametrize("shape", [(1, 7, 32), (2, 10, 32), (1, 10, 14), (1, 2, 3, 10, 32)])
def test_noise_of_another_shape_is_refused(ours: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"noise has shape .* for 1 observations"):
        load_policy(ours).act([robot_observation("pi0")], np.zeros(shape, np.float32))


def test_an_assumed_horizon_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert load_policy(archive("pi0"), tokenizer="tiny", robot="aloha").config.action_horizon == 50
    assert "taking OpenPI's default of 50" in caplog.text


@pytest.mark.parametrize(("case", "norm"), [("pi0", "zscore"), ("pi05", "quantile")])
def test_openpis_rules_fill_in_for_a_missing_contract(case: str, norm: str) -> None:
    told = {"tokenizer": "tiny", "robot": "aloha", "asset_id": None, "action_horizon": 10}
    with open_checkpoint(archive(case)) as checkpoint:
        own, _ = agree_contract(checkpoint, prompt_format=None, **told)  # type: ignore[arg-type]
        other, _ = agree_contract(checkpoint, prompt_format="pi0", **told)  # type: ignore[arg-type]
    assert (own.norm_kind, own.prompt_format, own.asset_id) == (norm, case, "trossen")
    assert other.prompt_format == "pi0"


def test_policies_are_served_in_bfloat16_as_openpi_does(ours: Path) -> None:
    policy = load_policy(ours)
    assert policy.config.dtype == "bfloat16"
    assert {str(p.dtype) for p in policy.params.values()} == {"bfloat16"}


def test_pi05_reads_its_state_in_the_prompt_unless_told_otherwise() -> None:
    """With another state the tokens differ, and only then."""
    told = {"tokenizer": "tiny", "robot": "aloha", "action_horizon": 10}
    here, there = robot_observation("pi05"), robot_observation("pi05") | {"state": np.full(14, 0.3)}
    for prompt_format, equal in (("pi05", False), ("pi0", True)):
        inputs = load_policy(archive("pi05"), prompt_format=prompt_format, **told).inputs  # type: ignore[arg-type]
        first, second = (inputs(data)["tokenized_prompt"] for data in (here, there))
        assert np.array_equal(first, second) is equal


# --- Asked for good actions -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_checkpoint(tmp_path_factory.mktemp("arm"))


def arm_observation(prompt: str | None) -> Data:
    state = np.random.default_rng(0).normal(0, 0.3, 17).astype(np.float32)
    return {"state": state} if prompt is None else {"state": state, "prompt": np.asarray(prompt)}


@pytest.mark.parametrize("given", [True, False])
def test_a_policy_asked_for_an_advantage_acts_as_by_a_prompt_that_ends_so(arm: Path, given: bool) -> None:
    default = None if given else PROMPT
    seen = arm_observation(PROMPT if given else None)
    asked, plain = (load_policy(arm, advantage=label, default_prompt=default) for label in ("negative", "none"))
    noise = plain.draw_noise(0, 1)
    written = plain.act([arm_observation(f"{PROMPT} Advantage: negative")], noise)
    np.testing.assert_array_equal(asked.act([seen], noise), written)
    assert np.abs(plain.act([seen], noise) - written).max() > 1e-3, "or the label would say nothing"


def test_guidance_goes_on_from_the_plain_prompt(arm: Path) -> None:
    """v = v_none + s·(v_positive − v_none), in one Euler step of the flow: x − v."""

    def acts(label: Label, guidance: float) -> np.ndarray:
        policy = load_policy(arm, advantage=label, guidance=guidance)
        params = {name: jnp.asarray(param, jnp.float32) for name, param in policy.params.items()}
        exact = dataclasses.replace(policy.config, dtype="float32")
        policy = dataclasses.replace(policy, params=params, config=exact, num_steps=1)
        return policy.act([arm_observation(PROMPT)], policy.draw_noise(0, 1))

    plain, positive = acts("none", 1.0), acts("positive", 1.0)
    np.testing.assert_allclose(acts("positive", 2.0), plain + 2 * (positive - plain), atol=1e-5)
    np.testing.assert_allclose(acts("positive", 0.0), plain, atol=1e-6)


def test_a_prompt_too_long_for_its_label_is_refused(arm: Path) -> None:
    long = "pick up the wrench and put its ring on the peg"
    load_policy(arm).check_prompt(long)
    with pytest.raises(UserError, match=r"takes \d\d tokens and model.max_token_len is 28: the label would be cut off"):
        load_policy(arm, advantage="positive").check_prompt(long)
    with pytest.raises(UserError, match="the label would be cut off"):
        load_policy(arm, advantage="positive", default_prompt=long)
    load_policy(arm, advantage="positive").check_prompt(PROMPT)


def test_guidance_without_a_label_leads_nowhere(arm: Path) -> None:
    with pytest.raises(UserError, match="guidance is 2 and nothing is asked for"):
        load_policy(arm, guidance=2.0)


def test_whether_it_serves_an_average_is_known_where_there_is_a_train_state(arm: Path, tmp_path: Path) -> None:
    assert load_policy(arm).averaged is None
    assert load_policy(trained_checkpoint(tmp_path, "bc_metaworld")).averaged is True
