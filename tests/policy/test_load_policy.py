"""Loading a checkpoint as a policy, and its actions against those of OpenPI's own policy."""

import dataclasses
import inspect
import json
import re
import shutil
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pistar.agents.prompt_labels import Label
from pistar.checkpoints.contract import Contract, read_contract
from pistar.checkpoints.reader import open_checkpoint, read_params
from pistar.checkpoints.verify import verify
from pistar.checkpoints.writer import write_checkpoint
from pistar.data.norm_stats import Norm, load_norm_stats, norm_stats_hash
from pistar.data.robots import aloha_state_to_model, find_robot, input_transform, output_transform
from pistar.data.transforms import Data
from pistar.errors import UserError
from pistar.models.tokenizer import load_tokenizer
from pistar.policy.load_policy import Policy, agree_contract, load_policy
from pistar.policy.options import PolicyOptions

from helpers import goldens
from helpers.metaworld_policy import PROMPT, fresh_checkpoint


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


ALOHA = PolicyOptions(robot="aloha", tokenizer="tiny", action_horizon=10)
"""What OpenPI's checkpoints do not say."""


@pytest.fixture(scope="module")
def theirs() -> Policy:
    """OpenPI's π₀ checkpoint, as a policy."""
    return load_policy(archive("pi0"), ALOHA)


def test_identity_is_of_the_weights_and_of_how_they_are_used(theirs: Policy) -> None:
    policy, longer = theirs, load_policy(archive("pi0"), ALOHA, action_horizon=20)
    mine, other = policy.identity(), longer.identity()
    assert mine["weights_sha256"] == other["weights_sha256"], "the horizon is not in the weights"
    assert {name for name, value in mine["contract"].items() if value != other["contract"][name]} == {"action_horizon"}
    name = sorted(policy.params)[-1]
    moved = dict(policy.params) | {name: policy.params[name].at[(0,) * policy.params[name].ndim].add(1)}
    assert dataclasses.replace(policy, params=moved).identity()["weights_sha256"] != mine["weights_sha256"]


@pytest.mark.parametrize("case", ["pi0", "pi05"])
def test_actions_equal_those_of_openpis_own_policy(case: str, tmp_path: Path) -> None:
    golden = goldens.arrays(f"policy_infer_{case}")
    stats = load_norm_stats(next(unpacked(case, tmp_path).rglob("norm_stats.json")))
    robot = find_robot("aloha")
    norm: Norm = "quantile" if case == "pi05" else "zscore"
    config = dataclasses.replace(goldens.config(f"{case}_tiny"), dtype="bfloat16")
    tokens = StoredTokens(golden["fake_tokens"])
    policy = Policy(
        config,
        {name: jnp.asarray(p) for name, p in read_params(archive(case), dtype=jnp.bfloat16).items()},
        # OpenPI fixes 224 here, whatever size its model takes, and its model resizes the image again.
        input_transform(robot, stats, norm, tokens, action_dim=32, image_size=224, discrete_state=False),
        output_transform(robot, stats, norm),
        robot,
    )
    (actions,) = policy.act([robot_observation(case)], golden["noise"][None])
    assert actions.shape == golden["actions"].shape
    # In units of each joint's spread, the model's own. OpenPI's bfloat16 is 1.3e-2 to 4.6e-2 away from its float32.
    error = np.abs(actions - golden["actions"]) / stats["actions"].std
    assert error.max() < 2e-2


def test_an_openpi_checkpoint_acts_with_the_options_it_needs(theirs: Policy) -> None:
    actions = theirs.act([robot_observation("pi0")] * 2, theirs.draw_noise(0, 2))
    assert actions.shape == (2, 10, 14)
    assert np.isfinite(actions).all()


def test_candidates_of_one_observation_equal_single_chunks() -> None:
    policy = load_policy(archive("pi05"), ALOHA)
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


def test_a_checkpoint_with_a_contract_needs_no_options(ours: Path, theirs: Policy) -> None:
    observations, noise = [robot_observation("pi0")] * 2, theirs.draw_noise(3, 2)
    np.testing.assert_array_equal(load_policy(ours).act(observations, noise), theirs.act(observations, noise))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"robot": "libero"}, "robot is libero but the policy was trained with aloha"),
        ({"action_horizon": 50}, "action_horizon is 50 but the policy was trained with 10"),
        ({"asset_id": "droid"}, "asset_id is droid but the policy was trained with trossen"),
        ({"prompt_format": "pi05"}, "prompt_format is pi05 but the policy was trained with pi0"),
    ],
)
def test_options_that_contradict_the_contract_are_refused(ours: Path, asked: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_policy(ours, **asked)  # type: ignore[arg-type]


def test_a_tokenizer_that_is_not_the_contracts_is_refused(ours: Path, tmp_path: Path) -> None:
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
def test_an_openpi_checkpoint_without_what_it_needs_is_refused(asked: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_policy(archive("pi0"), **asked)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_missing_norm_stats_are_refused(ours: Path, tmp_path: Path) -> None:
    (ours / "assets").rename(tmp_path / "assets")
    try:
        with pytest.raises(UserError, match=r"assets/trossen/norm_stats\.json"):
            load_policy(ours)
    finally:
        (tmp_path / "assets").rename(ours / "assets")


def edited(ours: Path, folder: Path, **changes: object) -> Path:
    """A copy of the checkpoint with an edited contract."""
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


def test_relative_actions_are_the_contracts(ours: Path, tmp_path: Path) -> None:
    absolute = load_policy(edited(ours, tmp_path, delta_mask=None))
    relative = load_policy(ours)
    observation = robot_observation("pi0")
    state = aloha_state_to_model(observation["state"])
    two, noise = [observation] * 2, relative.draw_noise(0, 2)
    moved = relative.act(two, noise) - absolute.act(two, noise)
    # Flipped joints come out flipped; the grippers (6 and 13) are absolute in both.
    expected = np.abs(state) * np.array([1, 1, 1, 1, 1, 1, 0] * 2)
    np.testing.assert_allclose(np.abs(moved), np.broadcast_to(expected, moved.shape), atol=1e-6)


def test_weights_with_nan_are_neither_written_nor_served(ours: Path, tmp_path: Path) -> None:
    params = read_params(ours)
    params["state_proj/bias"][0] = np.nan
    contract = read_contract(ours / "contract.json")
    stats = load_norm_stats(ours / "assets" / "trossen" / "norm_stats.json")
    with pytest.raises(UserError, match="state_proj/bias has NaN or Inf"):
        write_checkpoint(tmp_path, 1, params, {"trossen": stats}, contract)
    assert not (tmp_path / "1").exists()
    with pytest.MonkeyPatch.context() as patch:  # as another program would write it
        patch.setattr("pistar.checkpoints.writer._parameter_problems", lambda contract, params: [])
        broken = write_checkpoint(tmp_path, 1, params, {"trossen": stats}, contract)
    with pytest.raises(UserError, match=r"state_proj/bias has NaN or Inf; .* use an earlier checkpoint"):
        load_policy(broken)


def test_a_policy_is_printed_in_one_line_without_its_weights(theirs: Policy) -> None:
    count = sum(param.size for param in theirs.params.values())
    assert repr(theirs) == f"Policy(π₀, robot aloha, chunks of 10 actions, {count:,} parameters)"


def test_an_observation_that_is_not_in_a_list_is_refused_as_such(theirs: Policy) -> None:
    with pytest.raises(UserError, match=r"one dictionary; act takes a list of them, .* policy\.act\(\[observation\]"):
        # Without the types that tests check.
        inspect.unwrap(Policy.act)(theirs, robot_observation("pi0"), theirs.draw_noise(0, 1))


@pytest.mark.parametrize("shape", [(1, 7, 32), (2, 10, 32), (1, 10, 14), (1, 2, 3, 10, 32)])
def test_noise_of_another_shape_is_refused(theirs: Policy, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"noise has shape .* for 1 observations"):
        theirs.act([robot_observation("pi0")], np.zeros(shape, np.float32))


def test_an_assumed_horizon_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert load_policy(archive("pi0"), tokenizer="tiny", robot="aloha").config.action_horizon == 50
    assert "using OpenPI's default of 50" in caplog.text


@pytest.mark.parametrize(("case", "norm"), [("pi0", "zscore"), ("pi05", "quantile")])
def test_a_missing_contract_follows_from_openpis_rules(case: str, norm: str) -> None:
    with open_checkpoint(archive(case)) as checkpoint:
        own, _ = agree_contract(checkpoint, ALOHA)
        other, _ = agree_contract(checkpoint, dataclasses.replace(ALOHA, prompt_format="pi0"))
    assert (own.norm_kind, own.prompt_format, own.asset_id) == (norm, case, "trossen")
    assert other.prompt_format == "pi0"


def test_policies_are_loaded_in_bfloat16_as_by_openpi(ours: Path) -> None:
    policy = load_policy(ours)
    assert policy.config.dtype == "bfloat16"
    assert {str(p.dtype) for p in policy.params.values()} == {"bfloat16"}


def test_pi05_has_its_state_in_the_prompt_unless_the_format_is_pi0s() -> None:
    """With another state the tokens differ, and only then."""
    here, there = robot_observation("pi05"), robot_observation("pi05") | {"state": np.full(14, 0.3)}
    for prompt_format, equal in (("pi05", False), ("pi0", True)):
        inputs = load_policy(archive("pi05"), ALOHA, prompt_format=prompt_format).inputs
        first, second = (inputs(data)["tokenized_prompt"] for data in (here, there))
        assert np.array_equal(first, second) is equal


# --- With a label in the prompt ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_checkpoint(tmp_path_factory.mktemp("arm"))


def arm_observation(prompt: str | None) -> Data:
    state = np.random.default_rng(0).normal(0, 0.3, 17).astype(np.float32)
    return {"state": state} if prompt is None else {"state": state, "prompt": np.asarray(prompt)}


@pytest.mark.parametrize("given", [True, False])
def test_a_label_is_the_end_of_the_prompt(arm: Path, given: bool) -> None:
    default = None if given else PROMPT
    seen = arm_observation(PROMPT if given else None)
    with_label, plain = (load_policy(arm, advantage=label, default_prompt=default) for label in ("negative", "none"))
    noise = plain.draw_noise(0, 1)
    written = plain.act([arm_observation(f"{PROMPT} Advantage: negative")], noise)
    np.testing.assert_array_equal(with_label.act([seen], noise), written)
    assert np.abs(plain.act([seen], noise) - written).max() > 1e-3, "the label changes the actions"


def test_guidance_extrapolates_from_the_plain_prompt(arm: Path) -> None:
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


def test_a_prompt_too_long_for_a_label_is_refused(arm: Path) -> None:
    long = "pick up the wrench and put its ring on the peg"
    load_policy(arm).check_prompt(long)
    with pytest.raises(UserError, match=r"takes \d\d tokens and model.max_token_len is 28: the label would be cut off"):
        load_policy(arm, advantage="positive").check_prompt(long)
    with pytest.raises(UserError, match="the label would be cut off"):
        load_policy(arm, advantage="positive", default_prompt=long)
    load_policy(arm, advantage="positive").check_prompt(PROMPT)


def test_guidance_without_a_label_is_refused(arm: Path) -> None:
    with pytest.raises(UserError, match="guidance is 2 and there is no label to follow"):
        load_policy(arm, guidance=2.0)
