"""The audit on critics whose values are known, and its statistics compared with loops over all pairs."""

import dataclasses
import io
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array
from rich.console import Console

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.base import Agent
from pistar.agents.config import AcrlpdConfig
from pistar.agents.flow_bc import FlowBC
from pistar.config.model_presets import MODELS
from pistar.config.train import RLTrainConfig
from pistar.data.chunk_source import ChunkSource, ModelInputs
from pistar.data.loader import gather_chunks, to_devices
from pistar.data.norm_stats import NormStats
from pistar.data.replay import ReplayBuffer
from pistar.data.robots import Robot
from pistar.data.windows import NEVER, WindowOptions, build_windows
from pistar.distributed.sharding import make_mesh
from pistar.errors import UserError
from pistar.models.config import CriticConfig, GemmaConfig, SiglipConfig
from pistar.models.pi0 import Params, init_params
from pistar.models.tokenizer import load_tokenizer
from pistar.training.audit_metrics import (
    AuditFrames,
    Values,
    auc,
    choose_frames,
    monte_carlo_returns,
    rank_correlation,
    summarise,
)
from pistar.training.critic_audit import GROWING_AUDITS, Audit
from pistar.training.setup import Run
from pistar.types import AnyArray, ChunkBatch, Episode, Observation, RewardScheme

from helpers.linear_critic import linear_critic

GAMMA, HORIZON, EXECUTED = 0.9, 4, 3
MODEL = dataclasses.replace(
    MODELS["pi0_tiny"],
    vlm=GemmaConfig(width=16, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    expert=GemmaConfig(width=8, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    vision=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=2, patch_size=14),
    action_dim=3,
    action_horizon=HORIZON,
    max_token_len=16,
    image_size=14,
    cameras=("base_0_rgb",),
    remat="none",
)
ROBOT = Robot(name="dot", action_dim=2, state_keys={"state": 2}, cameras={"base_0_rgb": "image"})
ONE = NormStats(np.zeros(2), np.full(2, 1 - 1e-6))
"""Statistics that leave numbers as they are."""
INPUTS = ModelInputs(ROBOT, {"state": ONE, "actions": ONE}, "zscore", load_tokenizer("tiny", 16), 3, 14, False)


# --- Statistics -------------------------------------------------------------------------------------------------------


def test_returns_by_hand() -> None:
    """Of a success of 3 steps, a failure of 2, a time-out of 2, and 4 steps that reach the goal in the second."""
    lengths = np.array([3, 2, 2, 4])
    rewards = np.array([-1, -1, 0, -1, -10, -1, -1, -1, 0, -1, -1], np.float32)
    ended = np.zeros(11, bool)
    ended[[2, 4, 8]] = True
    windows = build_windows(lengths, rewards, ended, np.zeros(4, bool), WindowOptions(2, 2))
    nan = np.nan
    wanted = [-1.5, -1, 0, -6, -10, nan, nan, -1, 0, nan, nan]
    np.testing.assert_allclose(monte_carlo_returns(windows, np.arange(11), 0.5), wanted)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    gamma=st.sampled_from([0.5, 0.99, 1.0]),
    data=st.data(),
)
def test_returns_equal_those_of_a_backward_loop(lengths: list[int], gamma: float, data: st.DataObject) -> None:
    n = sum(lengths)
    rewards = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n)), np.float32)
    ended = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    windows = build_windows(np.array(lengths), rewards, ended, np.zeros(len(lengths), bool), WindowOptions(3, 2))
    wanted, end = [], n
    for length in reversed(lengths):
        value = np.nan  # after the last step
        for row in reversed(range(end - length, end)):
            value = float(rewards[row]) + (0 if ended[row] else gamma * value)
            wanted.append(value)
        end -= length
    found = monte_carlo_returns(windows, np.arange(n), gamma)
    np.testing.assert_allclose(found, wanted[::-1], rtol=1e-12)
    np.testing.assert_array_equal(np.isnan(found), windows.task_ends == NEVER)


few_values = st.integers(0, 4).map(float)  # so that many are equal


@given(pairs=st.lists(st.tuples(few_values, few_values), max_size=12))
def test_rank_correlation_is_that_of_ranks_from_all_pairs(pairs: list[tuple[float, float]]) -> None:
    x, y = np.array(pairs, float).reshape(-1, 2).T

    def ranks(values: np.ndarray) -> np.ndarray:
        return np.array([sum((other < v) + 0.5 * (other == v) for other in values) for v in values])

    found = rank_correlation(x, y)
    if len(set(x)) < 2 or len(set(y)) < 2:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1], abs=1e-12)


def test_rank_correlation_by_hand() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(x, np.exp(x)) == pytest.approx(1)
    assert rank_correlation(x, -(x**3)) == pytest.approx(-1)
    assert rank_correlation(x, np.array([1.0, 1.0, 2.0, 0.0])) == pytest.approx(-1 / np.sqrt(5 * 4.5) * 1.5)


@given(positives=st.lists(few_values, max_size=8), negatives=st.lists(few_values, max_size=8))
def test_auc_is_the_fraction_of_pairs_in_order(positives: list[float], negatives: list[float]) -> None:
    found = auc(np.array(positives), np.array(negatives))
    if not positives or not negatives:
        assert found is None
    else:
        won = [(p > n) + 0.5 * (p == n) for p in positives for n in negatives]
        assert found == pytest.approx(np.mean(won), abs=1e-12)


def frames_of(**changes: Any) -> AuditFrames:
    """Frames of a success with 3, 2 and 1 steps to go, of a failure with 1, and of a time-out."""
    frames = AuditFrames(
        source=np.zeros(5, np.int64),
        start=np.arange(5),
        episode=np.array([0, 0, 0, 1, 2]),
        success=np.array([True, True, True, False, False]),
        early=np.array([True, False, False, True, True]),
        returns=np.array([0.25, 0.5, 1.0, 0.0, np.nan]),
        steps_to_go=np.array([3, 2, 1, 1, NEVER]),
        chunk_return=np.array([0.0, 0.0, 1.0, 0.0, 0.0]),
        bootstrap=np.array([0.5, 0.5, 0.0, 0.0, 0.5]),
        trains=np.array([True, True, True, True, False]),
        whole=np.array([True, True, False, True, False]),
        partner=np.array([1, 3, 2, 0, 4]),
    )
    return dataclasses.replace(frames, **changes)


def values_of(data: list[float], **changes: Any) -> Values:
    q = np.array(data)
    values = Values(data=q, shuffled=q - 0.1, policy=np.stack([q, q + 0.2], axis=1), ahead=np.ones(5))
    return dataclasses.replace(values, **changes)


def test_metrics_by_hand() -> None:
    found = summarise(
        frames_of(),
        values_of([0.5, 0.5, 1.1, 0.2, 0.4], shuffled=np.array([0.2, 0.5, 9.0, 0.3, 9.0]), ahead=np.full(5, 2.2)),
        (0.0, 1.0),
    )
    expected = {
        "frames": 5,
        "frames_without_return": 1,
        "q_mean": 2.7 / 5,
        "return_mean": 1.75 / 4,
        "bias": (0.25 + 0 + 0.1 + 0.2) / 4,
        "bias_success": 0.35 / 3,
        "bias_failure": 0.2,
        "bias_near": (0.1 + 0.2) / 2,
        "bias_mid": 0,
        "bias_far": 0.25,
        "rank_correlation": np.corrcoef([2.5, 2.5, 4, 1], [2, 3, 4, 1])[0, 1],
        "rank_correlation_near": 1,  # in the other thirds there is one frame each
        "q_policy_minus_data": 0.1,
        "q_max_minus_mean": 0.1,
        "q_shuffled_drop": (0.3 + 0 - 0.1) / 3,
        "q_shuffled_win_rate": (1 + 0.5 + 0) / 3,
        "out_of_range_fraction": 1 / 5,
        "target_clip_fraction": 2 / 4,  # 1.1, 1.1, 1, 0
        "td_error": (0.5 + 0.5 + 0.1 + 0.2) / 4,
        "auc_early": 1,  # 0.5 against 0.2 and 0.4
    }
    assert found == {f"audit/{name}": pytest.approx(value) for name, value in expected.items()}


def test_what_cannot_be_measured_is_left_out() -> None:
    nothing = np.full(5, np.nan)
    frames = frames_of(returns=nothing, success=np.zeros(5, bool), partner=np.arange(5), trains=np.zeros(5, bool))
    found = summarise(frames, values_of([0.1, 0.2, 0.3, 0.4, 0.5]), (0.0, 1.0))
    assert set(found) == {
        f"audit/{name}"
        for name in (
            *("frames", "frames_without_return", "q_mean", "out_of_range_fraction"),
            *("q_policy_minus_data", "q_max_minus_mean"),
        )
    }


# --- The frames -------------------------------------------------------------------------------------------------------


def episode(number: int, length: int, end: str) -> Episode:
    """An episode whose state is (number, time), and whose action is minus that."""
    times = np.arange(length)
    state = np.stack([np.full_like(times, number), times], axis=1).astype(np.float32)
    rng = np.random.default_rng(number)
    return Episode(
        observations={"state": state, "image": rng.integers(0, 256, (length, 14, 14, 3), np.uint8)},
        actions=-state,
        rewards=np.zeros(length, np.float32),
        terminated=end != "timeout",
        truncated=end == "timeout",
        success=end == "success",
        task=f"task {number % 3}",
    )


def source_of(*episodes: Episode) -> ChunkSource:
    replay = ReplayBuffer(10_000, INPUTS, WindowOptions(HORIZON, EXECUTED), RewardScheme("success"), fps=10.0)
    for each in episodes:
        replay.add(each)
    source = replay.source()
    assert source is not None
    return source


ENDS = {0: ("success", 20), 1: ("failure", 15), 2: ("timeout", 12), 3: ("success", 30), 4: ("failure", 9)}
LONGEST = 30


@pytest.fixture(scope="module")
def sources() -> tuple[ChunkSource, ChunkSource]:
    made = [episode(number, length, end) for number, (end, length) in ENDS.items()]
    return source_of(*made[:2]), source_of(*made[2:])


def test_frames_are_spread_over_episodes_and_time(sources: tuple[ChunkSource, ...]) -> None:
    frames = choose_frames(sources, GAMMA, 40, seed=0)
    assert len(frames.start) == 40
    assert np.bincount(frames.episode).tolist() == [8] * 5
    for number, (end, length) in ENDS.items():
        mine = frames.episode == number
        source = sources[frames.source[mine][0]]
        windows, starts = source.windows, frames.start[mine]
        assert (windows.episodes[starts] == windows.episodes[starts[0]]).all()
        times = starts - (windows.ends[windows.episodes[starts[0]]] - length)
        assert len(set(times)) == 8
        assert max(np.diff([0, *times, length])) <= 2 * -(-length // 8)
        assert frames.early[mine].tolist() == (times < max(1, round(0.1 * length))).tolist()
        assert frames.early[mine].any()
        assert (frames.success[mine] == (end == "success")).all()
        wanted = {"success": GAMMA ** (length - 1 - times), "failure": 0 * times, "timeout": np.nan * times}[end]
        np.testing.assert_allclose(frames.returns[mine], wanted)


def test_the_same_seed_chooses_the_same_frames_and_another_seed_others(sources: tuple[ChunkSource, ...]) -> None:
    one, again, other = (choose_frames(sources, GAMMA, 30, seed) for seed in (1, 1, 2))
    for field in dataclasses.fields(AuditFrames):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(again, field.name))
    assert one.start.tolist() != other.start.tolist()


@pytest.mark.parametrize(("frames", "per_kind", "each"), [(16, [2, 2], 4), (10, [1, 1], 5), (3, [0, 1], 3)])
def test_among_too_many_episodes_as_many_successes_as_others_are_chosen(
    sources: tuple[ChunkSource, ...], frames: int, per_kind: list[int], each: int
) -> None:
    chosen = choose_frames(sources, GAMMA, frames, seed=0)
    kinds = [len(np.unique(chosen.episode[chosen.success == kind])) for kind in (True, False)]
    assert kinds == per_kind
    assert np.unique(chosen.episode, return_counts=True)[1].tolist() == [each] * sum(per_kind)


def test_all_frames_are_chosen_where_there_is_room(sources: tuple[ChunkSource, ...]) -> None:
    assert len(choose_frames(sources, GAMMA, 10_000, seed=0).start) == sum(length for _, length in ENDS.values())


def test_the_partner_of_a_frame_without_padding_is_another_such_frame(sources: tuple[ChunkSource, ...]) -> None:
    frames = choose_frames(sources, GAMMA, 1000, seed=0)
    assert not frames.whole.all()
    everyone = np.arange(86)
    whole = np.flatnonzero(frames.whole)
    assert sorted(frames.partner[whole]) == whole.tolist()
    assert (frames.partner[whole] != whole).all()
    assert (frames.partner == everyone)[~frames.whole].all()


def test_chunks_are_gathered_in_the_order_of_their_starts(sources: tuple[ChunkSource, ...]) -> None:
    starts = np.array([30, 2, 21, 2])
    batch = gather_chunks(sources[0], starts)
    assert np.asarray(batch.observations.state)[:, :2].tolist() == [[1, 10], [0, 2], [1, 1], [0, 2]]
    assert np.asarray(batch.actions)[0].tolist() == [[-1, -10, 0], [-1, -11, 0], [-1, -12, 0], [-1, -13, 0]]
    np.testing.assert_array_equal(batch.valid, sources[0].windows.gather(starts).valid)
    wanted = np.random.default_rng(0).integers(0, 256, (20, 14, 14, 3), np.uint8)[2]
    np.testing.assert_array_equal(np.asarray(batch.observations.images["base_0_rgb"])[1], wanted)


# --- Critics whose values are known -----------------------------------------------------------------------------------


class Oracle:
    """Q(s, a) = scale·(the episode's return from s) + shift − care·|a_0 − the recorded action|"""

    critic = linear_critic()
    config = AcrlpdConfig(horizon=EXECUTED, gamma=GAMMA)

    def __init__(self) -> None:
        returns = np.zeros((len(ENDS), LONGEST), np.float32)
        for number, (end, length) in ENDS.items():
            if end == "success":
                returns[number, :length] = GAMMA ** (length - 1 - np.arange(length))
        self.returns = jnp.asarray(returns)
        self.traced = 0

    def sample_candidates(self, state: dict[str, Array], observations: Observation, key: Array, n: int) -> Array:
        """The recorded action, and others that differ by 1, 2, … and by some noise."""
        self.traced += 1
        recorded = -jnp.asarray(observations.state)[:, None, None] + jnp.zeros((n, HORIZON, 1))
        noise = state["noise"] * jax.random.normal(key, recorded.shape[:2])
        return recorded.at[..., 0].add((jnp.arange(n) + noise)[..., None])

    def q_values(self, state: dict[str, Array], observations: Observation, actions: Array, valid: AnyArray) -> Array:
        assert valid.shape == actions.shape[:1] + actions.shape[2:3]
        number, time = jnp.asarray(observations.state)[:, :2].T.astype(int)
        off = jnp.abs(actions[:, :, 0] + jnp.asarray(observations.state)[:, None]).sum(axis=-1)
        true = self.returns[number, time][:, None]
        return state["scale"] * true + state["shift"] - state["care"] * off

    def critic_params(self, state: dict[str, Array]) -> Params:
        raise AssertionError("an audit only asks for values")

    def advantages(self, state: dict[str, Array], batch: ChunkBatch, key: Array) -> Array:
        raise AssertionError("an audit only asks for values")


def critic(**changes: float) -> dict[str, Array]:
    return {
        name: jnp.float32(changes.get(name, usual))
        for name, usual in {"scale": 1.0, "shift": 0.0, "care": 0.01, "noise": 0.0}.items()
    }


OPTIONS: dict[str, Any] = {
    "gamma": GAMMA,
    "bounds": (0.0, 1.0),
    "candidates": 3,
    "seed": 0,
    "frames": 1000,  # more than there are
    "batch_size": 16,
}


def audit_of(sources: tuple[ChunkSource, ...], **changes: Any) -> Audit[Any]:
    return Audit(Oracle(), sources, **(OPTIONS | changes))


@pytest.fixture(scope="module")
def audit(sources: tuple[ChunkSource, ...]) -> Audit[Any]:
    return audit_of(sources)


def warnings_of(audit: Audit[Any], *states: dict[str, Array]) -> list[str]:
    """Lines printed by the last of these audits."""
    audit._biases.clear()
    printed = io.StringIO()
    for state in states:
        printed.seek(0)
        printed.truncate()
        audit.warn(audit.run(state), Console(file=printed, width=10_000))
    return printed.getvalue().splitlines()


def test_a_perfect_critic_has_no_bias_and_orders_all_frames(audit: Audit[Any]) -> None:
    found = audit.run(critic())
    assert found["audit/frames"] == 86
    assert found["audit/frames_without_return"] == 12
    for name in ("", "_near", "_mid", "_far", "_success", "_failure"):
        assert found[f"audit/bias{name}"] == pytest.approx(0, abs=1e-6)
    for name in ("", "_near", "_mid", "_far"):
        assert found[f"audit/rank_correlation{name}"] == pytest.approx(1)
    # Candidates are off by 0, 1 and 2.
    assert found["audit/q_policy_minus_data"] == pytest.approx(-0.01, abs=1e-6)
    assert found["audit/q_max_minus_mean"] == pytest.approx(0.01, abs=1e-6)
    assert found["audit/q_shuffled_drop"] > 0.05
    assert found["audit/q_shuffled_win_rate"] == 1
    assert found["audit/td_error"] == pytest.approx(0, abs=1e-6)  # of every frame: h-step returns fit the whole ones
    assert found["audit/target_clip_fraction"] == found["audit/out_of_range_fraction"] == 0
    assert found["audit/auc_early"] == 1
    assert warnings_of(audit, critic()) == []


def test_the_shuffled_actions_are_the_partners(audit: Audit[Any]) -> None:
    frames = audit.frames
    first_row = np.array([0, 20, 0, 12, 42])[frames.episode]
    state = np.stack([frames.episode, frames.start - first_row], axis=1)
    off = abs(state - state[frames.partner]).sum(axis=1)[frames.whole]
    found = audit.run(critic(care=0.125))
    assert found["audit/q_shuffled_drop"] == pytest.approx(0.125 * off.mean(), rel=1e-5)


def test_a_critic_that_ignores_actions_is_reported(audit: Audit[Any]) -> None:
    found = audit.run(critic(care=0.0))
    assert found["audit/q_shuffled_drop"] == 0
    assert found["audit/q_shuffled_win_rate"] == 0.5
    (line,) = warnings_of(audit, critic(care=0.0))
    assert "audit/q_shuffled_win_rate is 0.5" in line
    assert "ignores actions" in line


def test_a_critic_that_overestimates_is_reported(audit: Audit[Any]) -> None:
    state = critic(shift=0.4, scale=0.5)
    found = audit.run(state)
    known = audit.frames.returns[~np.isnan(audit.frames.returns)]
    assert found["audit/bias"] == pytest.approx(0.4 - 0.5 * known.mean(), abs=1e-6)
    assert found["audit/bias_failure"] == pytest.approx(0.4, abs=1e-6)
    assert warnings_of(audit, state) == []
    too_much = critic(shift=0.65, scale=0.35)
    (line,) = warnings_of(audit, too_much)
    assert f"audit/bias_success is {audit.run(too_much)['audit/bias_success']:.3g}" in line
    assert "twice as fast" in line


def test_a_bias_that_grows_from_audit_to_audit_is_reported(audit: Audit[Any]) -> None:
    rising = [critic(shift=0.1 * i, scale=0.5) for i in range(GROWING_AUDITS)]
    assert warnings_of(audit, *rising[:-1]) == []
    (line,) = warnings_of(audit, *rising)
    bias = audit.run(rising[-1])["audit/bias"]  # it was below zero at first
    assert f"audit/bias is {bias:.3g}: Q has risen by {bias:.3g} over the last {GROWING_AUDITS} audits" in line
    assert warnings_of(audit, *rising, rising[0]) == []
    learning = [critic(shift=-0.5 + 0.15 * i, scale=0.5) for i in range(GROWING_AUDITS)]
    assert not [line for line in warnings_of(audit, *learning) if "Q has risen" in line], "from below it settles"


def test_values_out_of_range_are_reported(audit: Audit[Any]) -> None:
    found = audit.run(critic(shift=-0.05))
    returns = np.nan_to_num(audit.frames.returns)
    assert found["audit/out_of_range_fraction"] == pytest.approx((returns < 0.05).mean())
    lines = warnings_of(audit, critic(shift=-0.05))
    assert [line.split()[1] for line in lines] == ["audit/out_of_range_fraction", "audit/target_clip_fraction"]


def test_a_critic_that_ranks_in_reverse_is_reported(audit: Audit[Any]) -> None:
    found = audit.run(critic(scale=-0.2, shift=0.3))
    assert found["audit/rank_correlation"] == pytest.approx(-1)
    assert found["audit/auc_early"] == 0
    (line,) = warnings_of(audit, critic(scale=-0.2, shift=0.3))
    assert "audit/rank_correlation is -1" in line, "there is no warning of the AUC: there are too few episodes"


def test_an_auc_of_one_half_is_reported_if_there_are_enough_episodes() -> None:
    source = source_of(*(episode(0 if i % 2 else 1, 8, "success" if i % 2 else "timeout") for i in range(10)))
    audit = audit_of((source,), frames=80)
    lines = warnings_of(audit, critic(scale=0.0, shift=0.3))
    assert audit.run(critic(scale=0.0, shift=0.3))["audit/auc_early"] == 0.5
    assert any("audit/auc_early is 0.5" in line for line in lines)


def test_where_no_task_ended_there_is_no_bias_and_a_warning() -> None:
    audit = audit_of((source_of(episode(0, 9, "timeout"), episode(1, 9, "timeout")),))
    found = audit.run(critic())
    assert not {"audit/bias", "audit/rank_correlation", "audit/auc_early"} & set(found)
    assert all(np.isfinite(value) for value in found.values())
    (line,) = warnings_of(audit, critic())
    assert "no held-out episode ended its task" in line


def test_a_critic_that_has_diverged_stops_the_run(audit: Audit[Any]) -> None:
    with pytest.raises(UserError, match="Q is NaN or infinite on 86 of 86 held-out frames"):
        audit.run(critic(shift=np.nan))


def test_an_audit_without_frames_is_refused(sources: tuple[ChunkSource, ...]) -> None:
    with pytest.raises(UserError, match="audit_frames is 0"):
        audit_of(sources, frames=0)


@pytest.mark.parametrize("batch_size", [7, 86, 1000])
def test_the_batch_size_does_not_change_the_metrics(
    sources: tuple[ChunkSource, ...], audit: Audit[Any], batch_size: int
) -> None:
    other = audit_of(sources, batch_size=batch_size)
    sizes = {len(batch.valid) for batch in other._batches}
    assert len(sizes) == 1
    assert max(sizes) <= batch_size
    assert other.run(critic()) == pytest.approx(audit.run(critic()), abs=1e-6)


def test_it_compiles_once_and_two_audits_are_equal_to_the_bit(sources: tuple[ChunkSource, ...]) -> None:
    oracle = Oracle()
    first = Audit(oracle, sources, **OPTIONS)
    found = first.run(critic(noise=1.0))
    first.run(critic())
    assert first.run(critic(noise=1.0)) == found
    assert oracle.traced == 2  # one program, which samples at s and at s'
    assert Audit(oracle, sources, **OPTIONS).run(critic(noise=1.0)) == found
    assert Audit(oracle, sources, **(OPTIONS | {"seed": 4})).run(critic(noise=1.0)) != found


# --- A real agent -----------------------------------------------------------------------------------------------------


def acrlpd(**changes: Any) -> Acrlpd:
    config = AcrlpdConfig(
        horizon=EXECUTED,
        critic=CriticConfig(ensemble=2, hidden=(8,)),
        gamma=GAMMA,
        candidates=2,
        flow_steps=2,
        augmentation=False,
        audit_every=1,
        audit_frames=20,
    )
    config = dataclasses.replace(config, **changes)
    return Acrlpd(MODEL, config, 2, (0.0, 1.0), optax.sgd(0.1), optax.sgd(0.1))


def run_of(agent: Agent[Any, Any], sources: tuple[ChunkSource, ...]) -> Run:
    config = mock.Mock(spec=RLTrainConfig, batch_size=16, gradient_accumulation=2, seed=0)
    return mock.Mock(spec=Run, config=config, agent=agent, held_out=sources, mesh=make_mesh())


def test_a_real_agent_is_audited(sources: tuple[ChunkSource, ...]) -> None:
    agent = acrlpd()
    audit = Audit.of(run_of(agent, sources))
    assert audit is not None
    state = jax.jit(lambda key: agent.init_from(init_params(MODEL, key), key))(jax.random.key(0))
    found = audit.run(state)
    assert found == audit.run(state)
    assert all(np.isfinite(value) for value in found.values())
    assert found["audit/frames"] == 20
    assert found["audit/bias"] == pytest.approx(0.5 - found["audit/return_mean"], abs=0.2)  # a fresh Q is about ½
    assert found["audit/q_max_minus_mean"] > 0
    assert found["audit/q_shuffled_drop"] != 0

    batch, frames = audit._batches[0], audit.frames
    direct = jax.jit(agent.q_values)(state, *jax.device_put((batch.observations, batch.actions, batch.valid)))
    whole = gather_chunks(sources[0], frames.start[:7])
    np.testing.assert_array_equal(batch.actions[:7], whole.actions)
    values = audit._ask(state, to_devices(batch, audit._sharding), audit._key)
    np.testing.assert_allclose(values["data"], direct, atol=1e-5)


def test_audits_are_due_as_often_as_configured(sources: tuple[ChunkSource, ...]) -> None:
    audit = Audit.of(run_of(acrlpd(audit_every=3), sources))
    assert audit is not None
    assert [step for step in range(1, 10) if audit.due(step)] == [3, 6, 9]


def test_there_is_no_audit_without_critic_or_held_out_episodes_or_where_none_is_wanted(
    sources: tuple[ChunkSource, ...],
) -> None:
    assert Audit.of(run_of(acrlpd(), ())) is None
    assert Audit.of(run_of(acrlpd(audit_every=0), sources)) is None
    assert Audit.of(run_of(FlowBC(MODEL, optax.sgd(0.1)), sources)) is None
