"""Which start states are tried, and which of their successes are kept."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pistar.agents.config import RiptConfig
from pistar.config.online import ExplorationConfig, OnlineConfig, StartStateChoice, StartStatesConfig
from pistar.errors import UserError
from pistar.online.chunks import ExecutedChunks
from pistar.online.start_states import StartState, StartStateSampler, load_start_states, save_start_states
from pistar.online.success_buffer import SuccessBuffer, load_successes, save_successes
from pistar.tables import from_table
from pistar.types import Observation


def chunks(steps: int, mark: float = 0.0) -> ExecutedChunks:
    """An episode of this many steps, in chunks of three."""
    rows = -(-steps // 3)
    seen = Observation(
        images={"b": np.zeros((rows, 2, 2, 3), np.uint8), "a": np.ones((rows, 2, 2, 3), np.uint8)},
        image_masks={"b": np.zeros(rows, bool), "a": np.ones(rows, bool)},
        state=np.full((rows, 2), mark, np.float32),
        tokenized_prompt=np.zeros((rows, 4), np.int32),
        tokenized_prompt_mask=np.ones((rows, 4), bool),
    )
    valid = np.arange(rows * 3).reshape(rows, 3) < steps
    return ExecutedChunks(seen, np.full((rows, 3, 2), mark, np.float32), valid)


TASK = "walk"
ENV = "metaworld/push-v3"


def numbers(chosen: list[StartState]) -> list[int]:
    return sorted(start for _, start in chosen)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.sampled_from(["uniform", "skip_solved", "curriculum", "unsolved_first"]), st.integers(1, 30))
def test_chosen_start_states_are_different_and_of_the_pool(choice: StartStateChoice, count: int) -> None:
    starts = StartStateSampler(StartStatesConfig(choice, pool=20), {TASK: range(1000, 2000)})
    starts.record((TASK, 1003), 5, 5)
    starts.record((TASK, 1004), 0, 5)
    chosen = starts.choose(count, rng(), 0.5, without=[(TASK, 1000), (TASK, 1001)])
    assert len(set(chosen)) == len(chosen) <= count
    assert set(chosen) <= {(TASK, start) for start in range(1002, 1020)}
    assert len(chosen) >= min(count, 17)


@pytest.mark.parametrize("choice", ["uniform", "skip_solved", "curriculum", "unsolved_first"])
def test_when_all_have_been_tried_none_is_chosen(choice: StartStateChoice) -> None:
    starts = StartStateSampler(StartStatesConfig(choice), {TASK: range(3)})
    assert starts.choose(2, rng(), 0.5, without=[(TASK, start) for start in range(3)]) == []


def test_a_solved_start_state_is_skipped_a_few_times_and_then_tried_again() -> None:
    starts = StartStateSampler(StartStatesConfig("skip_solved", pool=2, skips=3), {TASK: range(2)})
    starts.record((TASK, 0), 4, 4)
    assert [starts.choose(2, rng(i), 0.0) for i in range(3)] == [[(TASK, 1)]] * 3
    assert numbers(starts.choose(2, rng(), 0.0)) == [0, 1]
    starts.record((TASK, 0), 4, 4)
    assert numbers(starts.choose(2, rng(), 0.0)) == [1]
    starts.record((TASK, 0), 3, 4)
    assert numbers(starts.choose(2, rng(), 0.0)) == [0, 1]


def test_solved_start_states_do_not_replace_uninformative_ones() -> None:
    """Nor are they counted as skipped a second time in the same iteration."""
    starts = StartStateSampler(StartStatesConfig("skip_solved", pool=4, skips=2), {TASK: range(4)})
    for start in (0, 1):
        starts.record((TASK, start), 4, 4)
    tried = starts.choose(4, rng(), 0.0)
    assert numbers(tried) == [2, 3]
    assert starts.choose(2, rng(), 0.0, without=tried) == []
    assert starts.choose(1, rng(), 0.0, without=tried[:1]) == tried[1:]
    assert [numbers(starts.choose(4, rng(), 0.0)) for _ in range(2)] == [[2, 3], [0, 1, 2, 3]]


def test_when_all_are_solved_all_are_tried() -> None:
    starts = StartStateSampler(StartStatesConfig("skip_solved", pool=3), {TASK: range(3)})
    for start in range(3):
        starts.record((TASK, start), 4, 4)
    assert numbers(starts.choose(3, rng(), 0.0)) == [0, 1, 2]


def choice_rates(starts: StartStateSampler, progress: float = 0.0) -> np.ndarray:
    """How often each start state is chosen."""
    drawn = np.concatenate([numbers(starts.choose(1, rng(seed), progress)) for seed in range(3000)])
    return np.bincount(drawn, minlength=4) / len(drawn)


def test_unsolved_first_chooses_solved_ones_rarely_and_unsolved_ones_twice_as_often() -> None:
    starts = StartStateSampler(StartStatesConfig("unsolved_first", pool=4), {TASK: range(4)})
    starts.record((TASK, 0), 5, 5)
    starts.record((TASK, 1), 0, 5)
    starts.record((TASK, 2), 2, 5)
    np.testing.assert_allclose(choice_rates(starts), np.array([0.15, 2, 1, 1]) / 4.15, atol=0.03)


def test_the_curriculum_prefers_success_rates_near_its_target() -> None:
    starts = StartStateSampler(
        StartStatesConfig("curriculum", pool=4, target=(1.0, 0.0), uniform_fraction=0.2), {TASK: range(4)}
    )
    for start, successes in enumerate((0, 10, 5, 5)):
        starts.record((TASK, start), successes, 10)
    early, late = choice_rates(starts, 0.0), choice_rates(starts, 1.0)
    assert early.argmax() == 1
    assert late.argmax() == 0
    assert min(early.min(), late.min()) > 0.03, "a fraction of the choices is uniform"


def test_the_shortest_successes_are_kept_and_rare_ones_weigh_more() -> None:
    starts, best = StartStateSampler(StartStatesConfig(), {TASK: range(10)}), SuccessBuffer(2, 1000)
    for length, mark in ((9, 1.0), (5, 2.0), (7, 3.0), (5, 4.0)):
        best.add((TASK, 4), chunks(length, mark))
    best.add((TASK, 2), chunks(30, 5.0))
    starts.record((TASK, 4), 4, 5)
    starts.record((TASK, 2), 1, 5)
    kept = best.weighted(starts)
    assert [float(each.actions[0, 0, 0]) for each, _ in kept] == [5.0, 2.0, 4.0]
    np.testing.assert_allclose([weight for _, weight in kept], [1.2, 0.6, 0.6])


def test_a_full_success_buffer_drops_the_longest_second_successes_first() -> None:
    best = SuccessBuffer(2, 40)
    for start, lengths in {1: (20,), 2: (4, 9), 3: (5, 6)}.items():
        for length in lengths:
            best.add((TASK, start), chunks(length, 0.0))
    assert best.lengths == [[TASK, 1, 20], [TASK, 2, 4], [TASK, 3, 5], [TASK, 3, 6]]
    best.add((TASK, 4), chunks(30, 0.0))
    assert best.lengths == [[TASK, 1, 20], [TASK, 2, 4], [TASK, 3, 5]]
    best.add((TASK, 5), chunks(12, 0.0))
    assert best.lengths == [[TASK, 2, 4], [TASK, 3, 5], [TASK, 5, 12]]


def test_records_and_successes_are_read_as_they_were_saved(tmp_path: Path) -> None:
    starts, best = StartStateSampler(StartStatesConfig(), {TASK: range(10)}), SuccessBuffer(2, 1000)
    starts.record((TASK, 3), 2, 5)
    starts.record((TASK, 7), 5, 5)
    made: dict[str, Any] = {"noise": np.full((3, 3, 2), 0.5, np.float32), "version": np.array([2, 2, 2])}
    best.add((TASK, 7), dataclasses.replace(chunks(8, 1.0), **made))
    best.add((TASK, 7), chunks(4, 2.0))
    best.add((TASK, 3), chunks(11, 3.0))
    save_start_states(tmp_path, starts.records)
    save_successes(tmp_path, best.kept)
    again, kept = StartStateSampler(StartStatesConfig(), {TASK: range(10)}), SuccessBuffer(2, 1000)
    load_start_states(tmp_path, again)
    load_successes(tmp_path, kept, ["b", "a"])
    assert again.records == starts.records
    for (one, weight), (other, other_weight) in zip(best.weighted(starts), kept.weighted(again), strict=True):
        assert weight == other_weight
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.valid, other.valid)
        assert (one.noise is None) == (other.noise is None)
        np.testing.assert_array_equal(one.noise, other.noise)
        np.testing.assert_array_equal(one.version, other.version)
        np.testing.assert_array_equal(one.observations.state, other.observations.state)
        for camera in ("a", "b"):
            np.testing.assert_array_equal(one.observations.images[camera], other.observations.images[camera])
            np.testing.assert_array_equal(one.observations.image_masks[camera], other.observations.image_masks[camera])


def test_files_of_an_older_checkpoint_are_read(tmp_path: Path) -> None:
    starts, best = StartStateSampler(StartStatesConfig(), {TASK: range(10)}), SuccessBuffer(2, 1000)
    starts.record((TASK, 3), 2, 5)
    best.add((TASK, 3), chunks(11, 3.0))
    save_start_states(tmp_path, starts.records)
    save_successes(tmp_path, best.kept)
    (tmp_path / "start_states.json").rename(tmp_path / "starts.json")
    (tmp_path / "successes.npz").rename(tmp_path / "best.npz")
    again, kept = StartStateSampler(StartStatesConfig(), {TASK: range(10)}), SuccessBuffer(2, 1000)
    load_start_states(tmp_path, again)
    load_successes(tmp_path, kept, ["b", "a"])
    assert again.records == starts.records
    assert kept.lengths == [[TASK, 3, 11]]


def kept_lengths(best: SuccessBuffer) -> dict[int, list[int]]:
    return {start: [int(each.valid.sum()) for each in kept] for (_, start), kept in best.kept.items() if kept}


def test_hosts_keep_no_more_successes_together_than_one_would() -> None:
    first, second = SuccessBuffer(2, 1000), SuccessBuffer(2, 1000)
    for start, length in ((1, 8), (1, 5), (2, 4)):
        first.add((TASK, start), chunks(length, 0.0))
    for start, length in ((1, 5), (1, 6), (3, 9)):
        second.add((TASK, start), chunks(length, 0.0))
    everywhere = [first.lengths, second.lengths]
    first.drop_longer_than_others(everywhere, 0)
    second.drop_longer_than_others(everywhere, 1)
    assert kept_lengths(first) == {1: [5], 2: [4]}
    assert kept_lengths(second) == {1: [5], 3: [9]}


def test_hosts_load_their_own_successes_or_share_them_out_anew(tmp_path: Path) -> None:
    for host in (0, 1):
        best = SuccessBuffer(2, 1000)
        for start in (host, host + 2, 10):
            best.add((TASK, start), chunks(4 + start + host, 0.0))
        save_successes(tmp_path, best.kept, host, 2)

    def loaded(host: int, hosts: int) -> dict[int, list[int]]:
        best = SuccessBuffer(2, 1000)
        load_successes(tmp_path, best, ["a", "b"], host, hosts)
        return kept_lengths(best)

    assert loaded(0, 2) == {0: [4], 2: [6], 10: [14]}
    assert loaded(1, 2) == {1: [6], 3: [8], 10: [15]}
    everything = {0: [4], 1: [6], 2: [6], 3: [8], 10: [14, 15]}
    assert loaded(0, 1) == everything
    shared = [loaded(host, 3) for host in range(3)]
    assert sum(map(len, shared)) == 5, "each start state went to one host"
    assert shared[0] | shared[1] | shared[2] == everything


def test_a_checkpoint_without_its_successes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no successes\.npz, the successes kept so far"):
        load_successes(tmp_path, SuccessBuffer(2, 1000), ["a"])


def test_start_states_of_several_tasks_are_chosen_together() -> None:
    starts = StartStateSampler(StartStatesConfig("uniform", pool=3), {"push": range(10), "reach": range(100, 200)})
    chosen = starts.choose(6, rng(), 0.0)
    assert sorted(chosen) == [*(("push", n) for n in range(3)), *(("reach", n) for n in range(100, 103))]
    starts.record(("push", 1), 3, 4)
    assert starts.records.keys() == {("push", 1)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExplorationConfig(held_noise=0.6, state_noise=0.6), "add up to 1.2"),
        (lambda: ExplorationConfig(held_noise=-0.1), "held_noise is -0.1; it is a fraction"),
        (lambda: ExplorationConfig(action_noise_scale=-1.0), "action_noise_scale is -1.0"),
        (lambda: StartStatesConfig(pool=0), "pool is 0"),
        (lambda: StartStatesConfig(target=(0.7, 1.5)), "target is 1.5"),
        (lambda: RiptConfig(group_size=1), "group_size is 1; leave-one-out needs at least 2"),
        (lambda: OnlineConfig(ENV, start_states_per_iteration=0), "start_states_per_iteration is 0"),
        (lambda: OnlineConfig(ENV, updates=0), "updates is 0"),
        (lambda: OnlineConfig(ENV, demonstrations=1.0), "demonstrations is 1.0"),
        (lambda: OnlineConfig(ENV, epochs=0.0), "epochs is 0.0"),
        (lambda: OnlineConfig(ENV, max_drift=0.0), "max_drift is 0.0"),
        (lambda: from_table(RiptConfig, {"replay": "all"}, "algorithm"), "algorithm.replay"),
        (lambda: from_table(StartStatesConfig, {"choice": "best"}, "start_states"), "start_states.choice"),
        (lambda: OnlineConfig(ENV, evaluate_every=-1), "evaluate_every is -1"),
        (lambda: StartStateSampler(StartStatesConfig(), {TASK: range(0)}), "no start states to learn from"),
    ],
)
def test_bad_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]
