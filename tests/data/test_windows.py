import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pistar.agents.estimators import h_step_return
from pistar.data.windows import WindowFields, WindowOptions, Windows, at_last_step, build_windows
from pistar.errors import UserError
from pistar.types import Tails

from helpers.paths import FIXTURES

QC = FIXTURES / "qc" / "golden_qc.json"
GAMMA = 0.99


@dataclasses.dataclass(frozen=True)
class Steps:
    """One episode of a test."""

    rewards: tuple[float, ...]
    ended: tuple[bool, ...]
    """True at steps that ended the task."""
    has_next: bool = False

    def __len__(self) -> int:
        return len(self.rewards)


def success(length: int, has_next: bool = False) -> Steps:
    """Rewards of −1 per step, 0 for the last."""
    return Steps((-1.0,) * (length - 1) + (0.0,), (False,) * (length - 1) + (True,), has_next)


def timeout(length: int, has_next: bool = False) -> Steps:
    return Steps((-1.0,) * length, (False,) * length, has_next)


def failure(length: int, penalty: float) -> Steps:
    return Steps((-1.0,) * (length - 1) + (-penalty,), (False,) * (length - 1) + (True,))


def windows(episodes: Sequence[Steps], h: int, horizon: int = 0, tails: Tails = "absorb", stride: int = 1) -> Windows:
    return build_windows(
        lengths=np.array([len(e) for e in episodes], np.int64),
        rewards=np.array([r for e in episodes for r in e.rewards], np.float32),
        ended=np.array([m for e in episodes for m in e.ended], bool),
        has_next=np.array([e.has_next for e in episodes], bool),
        options=WindowOptions(horizon=horizon or h, critic_horizon=h, tails=tails, stride=stride),
    )


def every(cut: Windows) -> WindowFields:
    return cut.gather(cut.starts)


def targets(cut: Windows, gamma: float = GAMMA) -> tuple[np.ndarray, np.ndarray]:
    fields = every(cut)
    returns, factors = h_step_return(
        fields.rewards, fields.masks, fields.valid, gamma=gamma, h=cut.options.critic_horizon
    )
    return np.asarray(returns), np.asarray(factors)


# The slow, obvious twin: one episode, one window, one step at a time.


def slow_window(episodes: Sequence[Steps], which: int, t: int, options: WindowOptions) -> dict[str, Any]:
    episode, h = episodes[which], options.critic_horizon
    actions_before = sum(len(e) for e in episodes[:which])
    observations_before = sum(len(e) + e.has_next for e in episodes[:which])
    observations = len(episode) + episode.has_next

    window: dict[str, Any] = {name: [] for name in ("action_rows", "rewards", "masks", "valid", "terminals")}
    over = False
    for k in range(t, t + options.horizon):
        real = k < len(episode)
        pays = real and not (over and options.tails == "absorb")
        over = over or (real and episode.ended[k])
        window["action_rows"].append(actions_before + (k if real else len(episode) - 1))
        window["rewards"].append(episode.rewards[k] if pays else 0.0)
        window["masks"].append(0.0 if over else 1.0)
        window["valid"].append(real)
        window["terminals"].append(k == len(episode) - 1)

    reached_end = any(episode.ended[k] for k in range(t, min(t + h, len(episode))))
    after = t + h if t + h < len(episode) else len(episode)
    next_exists = after < observations
    window["observation_rows"] = observations_before + t
    window["next_rows"] = observations_before + (after if next_exists else observations - 1)
    window["next_terminal"] = reached_end or not next_exists
    if options.tails == "drop" and t + h > len(episode):
        window["sequence_mask"] = False
    else:
        window["sequence_mask"] = reached_end or next_exists
    return window


def slow_starts(length: int, options: WindowOptions) -> list[int]:
    last_whole = max(length - options.critic_horizon, 0)
    return [t for t in range(length) if t % options.stride == last_whole % options.stride]


@st.composite
def an_episode(draw: st.DrawFn) -> Steps:
    length = draw(st.integers(1, 14))
    rewards = draw(st.lists(st.integers(-3, 3), min_size=length, max_size=length))
    ended = [False] * length
    ended[-1] = draw(st.booleans())  # success or failure; else a time-out
    for k in draw(st.lists(st.integers(0, length - 1), max_size=2)):  # play data that goes on
        ended[k] = True
    return Steps(tuple(map(float, rewards)), tuple(ended), draw(st.booleans()))


@st.composite
def some_options(draw: st.DrawFn) -> WindowOptions:
    horizon = draw(st.integers(1, 8))
    return WindowOptions(
        horizon=horizon,
        critic_horizon=draw(st.integers(1, horizon)),
        tails=draw(st.sampled_from(["absorb", "drop"])),
        stride=draw(st.integers(1, 6)),
    )


def cut(episodes: Sequence[Steps], options: WindowOptions) -> Windows:
    return windows(episodes, options.critic_horizon, options.horizon, options.tails, options.stride)


@settings(max_examples=400, deadline=None)
@given(st.lists(an_episode(), min_size=1, max_size=5), some_options())
def test_every_field_of_every_window_equals_the_slow_twin(episodes: list[Steps], options: WindowOptions) -> None:
    built = cut(episodes, options)
    expected, starts = [], []
    for which, episode in enumerate(episodes):
        for t in slow_starts(len(episode), options):
            starts.append(sum(len(e) for e in episodes[:which]) + t)
            expected.append(slow_window(episodes, which, t, options))
    assert built.starts.tolist() == starts
    fields = every(built)
    for field in dataclasses.fields(WindowFields):
        np.testing.assert_array_equal(
            getattr(fields, field.name), np.array([w[field.name] for w in expected]), err_msg=field.name
        )


@settings(max_examples=200, deadline=None)
@given(st.lists(an_episode(), min_size=1, max_size=5), some_options(), st.floats(0.0, 1.0))
def test_return_and_bootstrap_factor_equal_a_step_by_step_sum(
    episodes: list[Steps], options: WindowOptions, gamma: float
) -> None:
    built = cut(episodes, options)
    returns, factors = targets(built, gamma)
    i = 0
    for episode in episodes:
        for t in slow_starts(len(episode), options):
            total, discount, alive = 0.0, 1.0, True
            for k in range(t, min(t + options.critic_horizon, len(episode))):
                if alive or options.tails == "drop":
                    total += discount * episode.rewards[k]
                discount *= gamma
                alive = alive and not episode.ended[k]
            assert returns[i] == pytest.approx(total, abs=1e-4)
            assert factors[i] == pytest.approx(discount if alive else 0.0, abs=1e-5)
            i += 1


@settings(max_examples=200, deadline=None)
@given(st.lists(an_episode(), min_size=1, max_size=5), some_options())
def test_a_window_bootstraps_from_a_frame_as_many_steps_later_as_it_is_discounted(
    episodes: list[Steps], options: WindowOptions
) -> None:
    built = cut(episodes, options)
    fields = every(built)
    _, factors = targets(built, gamma=0.5)
    bootstraps = fields.sequence_mask & (factors > 0)
    away = (fields.next_rows - fields.observation_rows)[bootstraps]
    assert (away >= 1).all()
    np.testing.assert_allclose(factors[bootstraps], 0.5**away)
    np.testing.assert_array_equal(bootstraps, fields.sequence_mask & ~fields.next_terminal)


# QC's own program


def qc_sample_sequence(episodes: Sequence[Steps], h: int, gamma: float) -> dict[str, np.ndarray]:
    """QC's rule, over every start: windows run on into the next episode and are marked invalid there."""
    rewards = [r for e in episodes for r in e.rewards]
    masks = [1.0 - ended for e in episodes for ended in e.ended]
    terminals = [float(k == len(e) - 1) for e in episodes for k in range(len(e))]
    starts = range(len(rewards) - h + 1)
    return {
        "rew_last": np.array([sum(gamma**k * rewards[i + k] for k in range(h)) for i in starts]),
        "mask_last": np.array([min(masks[i : i + h]) for i in starts]),
        "valid_last": np.array([1.0 - max([0.0, *terminals[i : i + h - 1]]) for i in starts]),
    }


def qc_golden(case: str) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in json.loads(QC.read_text())[case].items()}


PLAY = Steps((-1.0, -1.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0), (False, False, True) + (False,) * 5, has_next=True)
QC_EPISODES = {
    "success_end": [success(8, has_next=True)] * 2,
    "truncated_end": [timeout(8, has_next=True)] * 2,
    "mid_success": [PLAY],
}


@pytest.mark.parametrize("case", QC_EPISODES)
def test_dropped_tails_reproduce_qc_to_the_digit(case: str) -> None:
    golden, built = qc_golden(case), windows(QC_EPISODES[case], h=5, tails="drop")
    starts = len(golden["valid_last"])  # QC never starts in the last h − 1 frames of the whole dataset
    fields, (returns, _) = every(built), targets(built)
    np.testing.assert_array_equal(fields.sequence_mask[:starts], golden["valid_last"] == 1)
    np.testing.assert_array_equal(fields.masks[:starts, -1], golden["mask_last"])
    if "rew_last" in golden:
        trains = golden["valid_last"] == 1
        np.testing.assert_array_equal(np.round(returns[:starts][trains], 6), golden["rew_last"][trains].astype("f4"))


def test_where_qc_reads_on_into_the_next_episode_we_stop() -> None:
    # Starts 4..7 reach 1..4 steps into the next episode, each of them −1. QC adds them up (and ignores the row).
    returns, _ = targets(windows(QC_EPISODES["success_end"], h=5, tails="drop"))
    leaked = np.array([-sum(GAMMA**k for k in range(5 - over, 5)) for over in (1, 2, 3, 4)])
    np.testing.assert_allclose(returns[4:8] + leaked, qc_golden("success_end")["rew_last"][4:8], atol=1e-6)


def test_the_rule_for_qc_in_this_file_equals_qcs_program() -> None:
    for case, episodes in QC_EPISODES.items():
        ours = qc_sample_sequence(episodes, h=5, gamma=GAMMA)
        for name, values in qc_golden(case).items():
            np.testing.assert_allclose(ours[name], values, atol=1e-6)


@settings(max_examples=200, deadline=None)
@given(st.lists(an_episode(), min_size=1, max_size=5), st.integers(1, 6))
def test_windows_that_train_qcs_critic_are_the_same_in_ours(episodes: list[Steps], h: int) -> None:
    episodes = [dataclasses.replace(e, has_next=True) for e in episodes]  # QC stores every next observation
    theirs, built = qc_sample_sequence(episodes, h, GAMMA), windows(episodes, h, tails="drop")
    fields, (returns, factors) = every(built), targets(built)
    trains = theirs["valid_last"] == 1
    starts = len(trains)
    np.testing.assert_array_equal(fields.sequence_mask[:starts], trains)
    assert not fields.sequence_mask[starts:].any()
    np.testing.assert_allclose(returns[:starts][trains], theirs["rew_last"][trains], atol=1e-5)
    np.testing.assert_allclose(factors[:starts][trains], GAMMA**h * theirs["mask_last"][trains], atol=1e-6)


# Worked out by hand


def test_with_dropped_tails_exactly_one_window_sees_the_success() -> None:
    built = windows([success(8)], h=5, tails="drop")
    fields = every(built)
    assert fields.sequence_mask.tolist() == [True, True, True, True, False, False, False, False]
    assert (fields.sequence_mask & (fields.masks[:, -1] == 0)).tolist() == [False] * 3 + [True] + [False] * 4


def test_absorbing_tails_train_the_last_frames_of_a_success() -> None:
    built = windows([success(4)], h=3)
    returns, factors = targets(built, gamma=0.5)
    # start 0: −1 −.5 −.25, then Q(s₃); start 1: −1 −.5 +0; start 2: −1 +0; start 3: 0.
    assert returns.tolist() == [-1.75, -1.5, -1.0, 0.0]
    assert factors.tolist() == [0.125, 0.0, 0.0, 0.0]
    fields = every(built)
    assert fields.sequence_mask.all()
    assert fields.next_terminal.tolist() == [False, True, True, True]


def test_a_chunk_ending_in_failure_does_not_bootstrap_and_pays_the_penalty_once() -> None:
    returns, factors = targets(windows([failure(3, penalty=10.0)], h=4), gamma=0.5)
    assert returns.tolist() == [-1 - 0.5 - 2.5, -1 - 5, -10]  # LeRobot's repeated last row would add it again
    assert factors.tolist() == [0.0, 0.0, 0.0]


def test_a_timeout_bootstraps_from_the_kept_observation_over_the_steps_really_taken() -> None:
    built = windows([timeout(4, has_next=True)], h=3)
    returns, factors = targets(built, gamma=0.5)
    assert returns.tolist() == [-1.75, -1.75, -1.5, -1.0]
    assert factors.tolist() == [0.125, 0.125, 0.25, 0.5]  # γ³, γ³, γ², γ¹: not γ³ throughout
    fields = every(built)
    assert fields.next_rows.tolist() == [3, 4, 4, 4]
    assert fields.sequence_mask.all()
    assert not fields.next_terminal.any()


@pytest.mark.parametrize("tails", ["absorb", "drop"])
def test_a_timeout_whose_next_observation_was_not_kept_is_not_learnt_from(tails: Tails) -> None:
    fields = every(windows([timeout(4)], h=3, tails=tails))
    assert fields.sequence_mask.tolist() == [True, False, False, False]
    assert fields.next_terminal.tolist() == [False, True, True, True]
    assert fields.masks.all()  # the task did not end


def test_the_last_frame_never_bootstraps_on_itself() -> None:
    fields = every(windows([timeout(3), success(3), timeout(3, has_next=True)], h=1))
    own = fields.next_rows == fields.observation_rows
    assert own.tolist() == [False, False, True, False, False, True, False, False, False]
    assert (~fields.sequence_mask | fields.next_terminal)[own].all()


def test_dropping_the_last_action_lets_a_lerobot_timeout_train_the_critic() -> None:
    # docs/explanation/q-chunks.md: the last frame becomes the observation after the last action left.
    fields = every(windows([timeout(3, has_next=True)], h=2))
    assert fields.sequence_mask.all()
    assert fields.next_rows.tolist() == [2, 3, 3]


def test_windows_never_cross_into_the_next_episode() -> None:
    built = windows([success(3, has_next=True), success(2)], h=2, horizon=4)
    fields = every(built)
    assert fields.action_rows.tolist() == [[0, 1, 2, 2], [1, 2, 2, 2], [2, 2, 2, 2], [3, 4, 4, 4], [4, 4, 4, 4]]
    # Observation rows count the one kept after the first episode.
    assert fields.observation_rows.tolist() == [0, 1, 2, 4, 5]
    assert fields.next_rows.tolist() == [2, 3, 3, 5, 5]


def test_padded_steps_are_never_valid_and_have_no_reward() -> None:
    fields = every(windows([Steps((0.0, 0.0, 1.0), (False, False, True))], h=2, horizon=4))
    assert fields.valid.tolist() == [[True, True, True, False], [True, True, False, False], [True, False, False, False]]
    assert fields.rewards.tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]]  # 1 at the end, not repeated
    assert fields.terminals.tolist() == [[False, False, True, False], [False, True, False, False], [True] + [False] * 3]


def test_a_critic_horizon_shorter_than_the_policys_ends_the_return_there() -> None:
    built = windows([success(6)], h=2, horizon=5, tails="drop")
    fields = every(built)
    returns, factors = targets(built, gamma=0.5)
    assert fields.sequence_mask.tolist() == [True] * 5 + [False]
    assert returns.tolist() == [-1.5, -1.5, -1.5, -1.5, -1.0, 0.0]
    assert factors.tolist() == [0.25, 0.25, 0.25, 0.25, 0.0, 0.0]
    assert fields.next_rows.tolist()[:4] == [2, 3, 4, 5]
    # The policy's window of start 2 sees the success at step 3; the critic's, of two steps, does not.
    assert fields.masks[2].tolist() == [1, 1, 1, 0, 0]
    assert fields.valid[2].tolist() == [True, True, True, True, False]


def test_after_a_success_in_mid_episode_absorbing_windows_pay_nothing_and_qcs_do() -> None:
    absorb, _ = targets(windows([PLAY], h=5, tails="absorb"), gamma=1.0)
    drop, factors = targets(windows([PLAY], h=5, tails="drop"), gamma=1.0)
    assert absorb[:4].tolist() == [-2.0, -1.0, 0.0, -5.0]
    assert drop[:4].tolist() == [-4.0, -4.0, -4.0, -5.0]
    assert factors[:4].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_play_data_after_its_success_is_still_imitated() -> None:
    fields = every(windows([PLAY], h=5))
    assert fields.valid[2].all()


@pytest.mark.parametrize("tails", ["absorb", "drop"])
@pytest.mark.parametrize("stride", [1, 2, 3, 7, 50])
def test_no_stride_skips_the_window_that_sees_how_the_episode_ended(tails: Tails, stride: int) -> None:
    for length in (5, 6, 9, 40):
        fields = every(windows([success(length)], h=5, tails=tails, stride=stride))
        assert (fields.sequence_mask & (fields.masks[:, 4] == 0)).any()


def test_stride_spaces_the_starts_and_not_the_steps() -> None:
    built = windows([timeout(7), timeout(2)], h=3, stride=3)
    assert built.starts.tolist() == [1, 4, 7]  # back from the last whole window, 4; a short episode keeps its first
    assert every(built).action_rows[0].tolist() == [1, 2, 3]


def test_an_episode_shorter_than_the_window_is_one_absorbing_tail() -> None:
    built = windows([success(2)], h=5)
    returns, factors = targets(built, gamma=0.5)
    assert returns.tolist() == [-1.0, 0.0]
    assert factors.tolist() == [0.0, 0.0]
    assert every(built).sequence_mask.all()
    assert not every(windows([success(2)], h=5, tails="drop")).sequence_mask.any()


def test_a_label_goes_on_the_last_step_and_on_no_other() -> None:
    steps = at_last_step(np.array([True, False, True]), np.array([3, 1, 2]))
    assert steps.tolist() == [False, False, True, False, False, True]


def test_a_whole_window_discounts_by_gamma_to_the_h() -> None:
    _, factors = targets(windows([timeout(60, has_next=True)], h=50), gamma=0.999)
    assert factors[0] == pytest.approx(0.95121, abs=1e-5)


def test_a_terminal_reward_repeated_over_the_padding_counts_once() -> None:
    # As LeRobot returns it: the last row repeated, with a padding flag.
    returns, factors = h_step_return(
        rewards=np.array([[0, 1, 1, 1]], np.float32),
        masks=np.array([[1, 0, 0, 0]], np.float32),
        valid=np.array([[True, True, False, False]]),
        gamma=0.5,
        h=4,
    )
    assert np.asarray(returns).tolist() == [0.5]
    assert np.asarray(factors).tolist() == [0.0]


def test_return_is_the_same_under_jit() -> None:
    fields = every(windows([success(6), timeout(5, has_next=True)], h=3))
    compiled = jax.jit(h_step_return, static_argnames=("gamma", "h"))
    theirs = compiled(fields.rewards, fields.masks, fields.valid, gamma=GAMMA, h=3)
    ours = h_step_return(fields.rewards, fields.masks, fields.valid, gamma=GAMMA, h=3)
    for a, b in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert np.asarray(b).dtype == np.float32


def test_no_episodes_have_no_windows() -> None:
    built = windows([], h=3)
    assert built.starts.tolist() == []
    assert every(built).rewards.shape == (0, 3)


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon": 0, "critic_horizon": 1}, "horizon is 0"),
        ({"horizon": 5, "critic_horizon": 6}, "critic_horizon is 6"),
        ({"horizon": 5, "critic_horizon": 0}, "critic_horizon is 0"),
        ({"horizon": 5, "critic_horizon": 5, "stride": 0}, "stride is 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        WindowOptions(**options)  # type: ignore[arg-type]


def test_unknown_tails_are_refused() -> None:
    options = WindowOptions(1, 1)
    object.__setattr__(options, "tails", "absord")  # the tests' own type checker would refuse it earlier
    with pytest.raises(UserError, match="tails is 'absord'"):
        options.__post_init__()


def test_an_empty_episode_is_refused_by_number() -> None:
    with pytest.raises(UserError, match="Episode 1 has no steps"):
        windows([success(2), Steps((), ())], h=2)


def test_a_reward_that_is_no_number_is_refused_by_row() -> None:
    with pytest.raises(UserError, match="row 3 is nan"):
        windows([success(2), Steps((0.0, float("nan")), (False, True))], h=2)


def test_columns_of_other_lengths_are_a_bug() -> None:
    with pytest.raises(ValueError, match="3 steps, but 2 rewards"):
        build_windows(np.array([3]), np.zeros(2, np.float32), np.zeros(2, bool), np.zeros(1, bool), WindowOptions(1, 1))


def test_a_start_before_the_first_row_is_a_bug() -> None:
    with pytest.raises(IndexError, match="-1"):
        windows([success(2)], h=2).gather(np.array([-1]))


def test_gathering_is_fast() -> None:
    built = windows([success(300)] * 100, h=10, horizon=50)
    rng = np.random.default_rng(0)
    batches = [rng.choice(built.starts, 256) for _ in range(40)]
    start = time.process_time()
    for batch in batches:
        built.gather(batch)
    rate = 256 * len(batches) / (time.process_time() - start)
    # Several hundred thousand per second on an idle core; a Python loop does a few thousand.
    assert rate > 30_000
