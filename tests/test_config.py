"""Bad values die at birth, in one line with value, reason and remedy."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from pistar.config import (
    AcrlpdConfig,
    CriticConfig,
    GemmaConfig,
    LoraConfig,
    Pi0Config,
    SiglipConfig,
    check_writable,
)
from pistar.errors import UserError
from pistar.presets import MODELS

TINY = MODELS["pi0_tiny"]


def tiny(**changes: object) -> Callable[[], Pi0Config]:
    return lambda: dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LoraConfig(rank=0, alpha=1.0), "lora.rank is 0; .* at least rank 1"),
        (lambda: GemmaConfig(8, 1, 8, num_heads=6, num_kv_heads=4, head_dim=2), "num_heads is 6, .* 4 key/value heads"),
        (lambda: GemmaConfig(8, 1, 8, num_heads=2, num_kv_heads=1, head_dim=3), "head_dim is 3; .* even"),
        (lambda: SiglipConfig(10, 1, 8, num_heads=4, patch_size=14), "vision.width is 10, not divisible .* 4"),
        (tiny(expert=dataclasses.replace(TINY.expert, depth=5)), "expert.depth is 5 but vlm.depth is 3"),
        (tiny(expert=dataclasses.replace(TINY.expert, width=33)), "expert.width is 33; .* even width"),
        (tiny(image_size=60), "image_size is 60, not a multiple .* 14; use 56"),
        (tiny(action_horizon=0), "action_horizon is 0; a size is a whole number of at least 1"),
        (tiny(action_dim=-1), "action_dim is -1; a size"),
        (lambda: LoraConfig(rank=1, alpha=float("nan")), "lora.alpha is nan; .* positive"),
        (lambda: GemmaConfig(8, 1, 8, num_heads=2, num_kv_heads=0, head_dim=2), "num_kv_heads is 0; a size"),
        (tiny(cameras=()), "cameras is empty; .* at least one camera"),
    ],
)
def test_a_bad_value_is_refused_at_birth(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


def acrlpd(**changes: object) -> Callable[[], AcrlpdConfig]:
    return lambda: AcrlpdConfig(**({"horizon": 5, "action_dims": 7} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CriticConfig(ensemble=0), "ensemble is 0; a size"),
        (lambda: CriticConfig(hidden=(256, 0)), r"critic.hidden is \(256, 0\); each width"),
        (lambda: CriticConfig(dropout=1.0), "critic.dropout is 1.0; .* below 1"),
        (lambda: CriticConfig(std_factor=-1.0), "critic.std_factor is -1.0; .* 0 or more"),
        (lambda: CriticConfig(output_bias=float("nan")), "critic.output_bias is nan; .* finite"),
        (lambda: CriticConfig(ensemble=2, target_subset=3), "critic.target_subset is 3 of 2 networks; draw 1 to 2"),
        (lambda: CriticConfig(encoder="own", own_image_size=50), "critic.own_image_size is 50; .* multiple of 16"),
        (acrlpd(horizon=0), "horizon is 0; a size"),
        (acrlpd(candidates=0), "candidates is 0; a size"),
        (acrlpd(gamma=1.01), "gamma is 1.01; .* at most 1"),
        (acrlpd(tau=0.0), "tau is 0.0; .* above 0"),
        (acrlpd(step_reward=(0.0, -1.0)), r"step_reward is \(0.0, -1.0\); .* in this order"),
        (acrlpd(return_range=(0.0, 0.0)), r"return_range is \(0.0, 0.0\); .* room"),
        (acrlpd(return_range=(0.0, float("inf"))), "return_range is .*; .* finite"),
        (acrlpd(gamma=1.0, step_reward=(-1.0, -1.0)), "gamma is 1 and step_reward .* set return_range"),
        (acrlpd(last_reward=(0.0, 0.0)), "step_reward and last_reward .* nothing is ever paid"),
        (acrlpd(beta=0.0), "beta is 0.0; .* positive"),
        (acrlpd(weight_clip=0.5), "weight_clip is 0.5; .* above that"),
        (acrlpd(target_ess=1.0), "target_ess is 1.0; .* between 0 and 1"),
        (acrlpd(target_ess=0.3, actor="bc"), "target_ess is 0.3 but the actor 'bc' has no weights; use awr"),
        (acrlpd(bc_scale=-1.0), "bc_scale is -1.0; .* 0 or more"),
        (acrlpd(bc_scale=0.0, actor="bc"), "bc_scale is 0 and nothing else trains the policy"),
        (acrlpd(ema_decay=1.0), "ema_decay is 1.0; .* below 1"),
        (acrlpd(critic_warmup=-1), "critic_warmup is -1; .* 0 for none"),
    ],
)
def test_a_bad_value_of_the_algorithm_is_refused_at_birth(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "name", "says"),
    [
        (CriticConfig(), "head", "head is 'x'; it is one of bounded, linear"),
        (CriticConfig(), "aggregation", "aggregation is 'x'; it is one of mean, min, mean_minus_std"),
        (CriticConfig(), "encoder", "encoder is 'x'; it is one of prefix, own"),
        (acrlpd()(), "actor", "actor is 'x'; it is one of awr, best_of_n, bc"),
        (acrlpd()(), "critic_loss", "critic_loss is 'x'; it is one of huber, squared"),
        (acrlpd()(), "awr_by", "awr_by is 'x'; it is one of weight, resample"),
    ],
)
def test_an_unknown_choice_is_refused(config: CriticConfig | AcrlpdConfig, name: str, says: str) -> None:
    config = dataclasses.replace(config)
    object.__setattr__(config, name, "x")  # the tests' own type checker would refuse it earlier
    with pytest.raises(UserError, match=says):
        config.__post_init__()


def test_presets_have_openpis_lengths() -> None:
    assert (MODELS["pi0"].max_token_len, MODELS["pi05"].max_token_len) == (48, 200)
    assert {config.action_horizon for name, config in MODELS.items() if "tiny" not in name} == {50}
    assert MODELS["pi05_lora"].model_type == "pi05"
    assert MODELS["pi0"].image_tokens == 256


def test_a_place_nothing_can_be_written_to_is_refused_and_one_that_can_be_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for fine in (tmp_path / "new" / "deep", tmp_path, tmp_path / "file"):
        check_writable("--out", fine)
    for broken in (tmp_path / "file" / "below", Path("/proc/deep/out")):
        with pytest.raises(UserError, match=rf"--out is {broken}, which cannot be written \(.+\); name another place"):
            check_writable("--out", broken)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
