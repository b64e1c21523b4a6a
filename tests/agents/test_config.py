"""Settings of the algorithms: bad values are refused in one line with value, reason and remedy; bounds of returns."""

import dataclasses
from collections.abc import Callable

import pytest

from pistar.agents.config import AcrlpdConfig, BcConfig, RiptConfig
from pistar.errors import UserError
from pistar.models.config import CriticConfig
from pistar.types import RewardScheme

RECORDED, TIME = RewardScheme("recorded"), RewardScheme("time")


def acrlpd(**changes: object) -> Callable[[], AcrlpdConfig]:
    return lambda: AcrlpdConfig(**({"horizon": 5} | changes))  # type: ignore[arg-type]


def ript(**changes: object) -> Callable[[], RiptConfig]:
    return lambda: RiptConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CriticConfig(ensemble=0), "ensemble is 0; a size"),
        (lambda: CriticConfig(hidden=(256, 0)), r"critic.hidden is \(256, 0\); each width"),
        (lambda: CriticConfig(dropout=1.0), "critic.dropout is 1.0; .* below 1"),
        (lambda: CriticConfig(output_bias=float("nan")), "critic.output_bias is nan; .* finite"),
        (lambda: CriticConfig(ensemble=2, target_subset=3), "critic.target_subset is 3 of 2 networks; draw 1 to 2"),
        (acrlpd(horizon=0), "horizon is 0; a size"),
        (acrlpd(candidates=0), "candidates is 0; a size"),
        (acrlpd(gamma=1.01), "gamma is 1.01; .* at most 1"),
        (acrlpd(tau=0.0), "tau is 0.0; .* above 0"),
        (acrlpd(return_range=(0.0, 0.0)), r"return_range is \(0.0, 0.0\); .* maximum"),
        (acrlpd(return_range=(0.0, float("inf"))), "return_range is .*; .* finite"),
        (acrlpd(beta=0.0), "beta is 0.0; .* positive"),
        (acrlpd(weight_clip=0.5), "weight_clip is 0.5; .* above that"),
        (acrlpd(target_ess=1.0), "target_ess is 1.0; .* between 0 and 1"),
        (acrlpd(target_ess=0.3, actor="bc"), "target_ess is 0.3 but the actor 'bc' has no weights; use awr"),
        (acrlpd(bc_scale=-1.0), "bc_scale is -1.0; .* 0 or more"),
        (acrlpd(bc_scale=0.0, actor="bc"), "bc_scale is 0 and nothing else trains the policy"),
        (acrlpd(ema_decay=1.0), "ema_decay is 1.0; .* below 1"),
        (acrlpd(critic_warmup=-1), "critic_warmup is -1; .* 0 for none"),
        (acrlpd(audit_every=-10), "audit_every is -10; .* 0 for none"),
        (acrlpd(audit_frames=0), "audit_frames is 0; a size"),
        (lambda: BcConfig(ema_decay=-0.1), "ema_decay is -0.1; .* none for no average"),
        (ript(group_size=1), "group_size is 1; leave-one-out needs at least 2 rollouts"),
        (ript(attempts=0), "attempts is 0; a size"),
        (ript(beta=0.0), "beta is 0.0; .* positive"),
        (ript(weight_clip=0.5), "weight_clip is 0.5; .* above that"),
        (ript(anchor=-1.0), "anchor is -1.0; .* 0 or more"),
        (ript(advantage_clip=0.0), "advantage_clip is 0.0; .* none for no limit"),
        (ript(label_dropout=1.0), "label_dropout is 1.0; .* below 1"),
        (ript(guidance=-0.5), "guidance is -0.5; .* or more"),
        (ript(ema_decay=1.0), "ema_decay is 1.0; .* below 1"),
        (
            ript(replay="best", weighting="exp"),
            "replay best works only with weighting positive .weighting is exp.; change",
        ),
    ],
)
def test_a_bad_value_is_refused(make: Callable[[], object], says: str) -> None:
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
        (acrlpd()(), "awr_by", "awr_by is 'x'; it is one of weight, resample"),
        (acrlpd()(), "tails", "tails is 'x'; it is one of absorb, drop"),
        (acrlpd()(), "without_success", "without_success is 'x'; it is one of failure, timeout"),
        (RiptConfig(), "weighting", "weighting is 'x'; it is one of positive, exp, signed, cfg"),
        (RiptConfig(), "replay", "replay is 'x'; it is one of none, best"),
        (RiptConfig(), "windows", "windows is 'x'; it is one of looked, every_step"),
        (BcConfig(), "ema_dtype", "ema_dtype is 'x'; it is one of float32, bfloat16"),
    ],
)
def test_an_unknown_choice_is_refused(
    config: CriticConfig | AcrlpdConfig | RiptConfig | BcConfig, name: str, says: str
) -> None:
    config = dataclasses.replace(config)
    object.__setattr__(config, name, "x")  # the tests' own type checker would refuse it earlier
    with pytest.raises(UserError, match=says):
        config.__post_init__()


# --- Bounds of returns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "bounds"),
    [
        ({}, (0.0, 1.0)),  # 1 for success, however long it takes
        ({"gamma": 0.9, "rewards": TIME}, (-10.0, 0.0)),  # −1 per step for ever: −1/(1 − γ)
        ({"gamma": 0.9, "rewards": RewardScheme("time", failure_penalty=30.0)}, (-30.0, 0.0)),
        ({"gamma": 1.0, "rewards": RewardScheme("success", failure_penalty=2.0)}, (-2.0, 1.0)),
        ({"return_range": (-3.0, 4.0)}, (-3.0, 4.0)),
        ({"rewards": RECORDED, "return_range": (-3.0, 4.0)}, (-3.0, 4.0)),
    ],
)
def test_returns_are_bounded_by_rewards_and_discount_unless_a_range_is_given(
    changes: dict[str, object], bounds: tuple[float, float]
) -> None:
    assert acrlpd(**changes)().return_bounds() == pytest.approx(bounds)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rewards": RECORDED}, "rewards.kind is recorded and algorithm.return_range is none; give the minimum and"),
        (
            {"gamma": 1.0, "rewards": TIME},
            "gamma is 1 and every step has a reward, so returns are unbounded; set gamma",
        ),
    ],
)
def test_returns_without_a_bound_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        acrlpd(**changes)().return_bounds()


def test_algorithms_without_rewards_have_no_bounds() -> None:
    assert (BcConfig().return_bounds(), RiptConfig().return_bounds()) == (None, None)
