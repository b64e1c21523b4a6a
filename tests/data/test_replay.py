"""The replay buffer: each window of a batch is checked against the episode it comes from."""

import dataclasses
from collections.abc import Mapping

import jax
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pistar.data.chunk_source import ModelInputs
from pistar.data.loader import Loader, Part
from pistar.data.norm_stats import NormStats
from pistar.data.replay import ReplayBuffer
from pistar.data.robots import Robot, input_transform
from pistar.data.transforms import stack_observations
from pistar.data.windows import WindowOptions
from pistar.errors import UserError
from pistar.models.tokenizer import load_tokenizer
from pistar.types import ChunkBatch, Episode, RewardScheme

SIZE, HORIZON, EXECUTED = 4, 4, 3
ROBOT = Robot(
    name="dot",
    action_dim=2,
    state_keys={"state": 2},
    cameras={"base_0_rgb": "image", "left_wrist_0_rgb": None},
)
ONE = NormStats(np.zeros(2), np.full(2, 1 - 1e-6))
"""Leaves numbers as they are."""
INPUTS = ModelInputs(ROBOT, {"state": ONE, "actions": ONE}, "zscore", load_tokenizer("tiny", 16), 3, SIZE, False)


def episode(number: int, length: int, end: str = "success", *, kept: bool = True) -> Episode:
    """State (number, time), action −state, and images whose brightness is the time."""
    times = np.arange(length + kept)
    state = np.stack([np.full_like(times, number), times], axis=1).astype(np.float32)
    images = np.tile(times[:, None, None, None], (1, SIZE, SIZE, 3)).astype(np.uint8)
    return Episode(
        observations={"state": state, "image": images},
        actions=-state[:length],
        rewards=np.zeros(length, np.float32),
        terminated=end != "timeout",
        truncated=end == "timeout",
        success=end == "success",
        task=f"task {number % 3}",
    )


def replay(capacity: int = 100, *, min_steps: int = 1, scheme: RewardScheme | None = None) -> ReplayBuffer:
    options = WindowOptions(HORIZON, EXECUTED)
    return ReplayBuffer(capacity, INPUTS, options, scheme or RewardScheme("success"), fps=10.0, min_steps=min_steps)


def draw(buffer: ReplayBuffer, size: int = 64, step: int = 0) -> ChunkBatch:
    return Loader([Part(buffer)], size, seed=0).sample_batch(step)


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(
    lengths=lengths,
    capacity=st.integers(9, 40),
    ends=st.lists(st.sampled_from(["success", "failure", "timeout"]), min_size=12, max_size=12),
    kept=st.booleans(),
)
def test_every_window_lies_in_one_finished_episode(
    lengths: list[int], capacity: int, ends: list[str], kept: bool
) -> None:
    buffer = replay(capacity)
    for number, length in enumerate(lengths):
        buffer.add(episode(number, length, ends[number], kept=kept))
    left: list[int] = []
    for number in reversed(range(len(lengths))):  # the newest that fit
        if sum(lengths[n] for n in left) + lengths[number] > capacity:
            break
        left.append(number)
    assert len(buffer) == sum(lengths[n] for n in left) <= capacity
    batch = draw(buffer)
    for i in range(64):
        number, time = (int(x) for x in batch.observations.state[i, :2])
        length, end = lengths[number], ends[number]
        assert number in left
        assert batch.observations.images["base_0_rgb"][i].max() == time
        real = min(HORIZON, length - time)
        assert batch.valid[i].tolist() == [k < real for k in range(HORIZON)]
        for k in range(HORIZON):
            assert batch.actions[i, k].tolist() == [-number, -min(time + k, length - 1), 0]
            assert batch.rewards[i, k] == (end == "success" and time + k == length - 1)
            assert batch.masks[i, k] == (end == "timeout" or time + k < length - 1)
        after = min(time + EXECUTED, length)
        ended = end != "timeout" and time + EXECUTED >= length
        stored = after < length or kept
        assert batch.next_terminal[i] == (ended or not stored)
        assert batch.sequence_mask[i] == (ended or stored)
        if not batch.next_terminal[i]:
            assert batch.next_observations.state[i, :2].tolist() == [number, after]
            assert batch.next_observations.images["base_0_rgb"][i].max() == after


def test_observations_are_what_the_transforms_make_of_them() -> None:
    buffer = replay()
    lived = episode(1, 6)
    buffer.add(lived)
    batch = draw(buffer, 8)
    transform = input_transform(
        ROBOT, INPUTS.stats, "zscore", INPUTS.tokenizer, action_dim=3, image_size=SIZE, discrete_state=False
    )
    times = [int(t) for t in batch.observations.state[:, 1]]
    frames = [
        transform(
            {"state": lived.observations["state"][t], "image": lived.observations["image"][t], "prompt": "task 1"}
        )
        for t in times
    ]
    wanted = stack_observations(frames)
    for field in dataclasses.fields(wanted):
        ours, theirs = getattr(batch.observations, field.name), getattr(wanted, field.name)
        pairs = ours.keys() if isinstance(ours, Mapping) else [None]
        for key in pairs:
            a, b = (ours, theirs) if key is None else (ours[key], theirs[key])
            assert np.array_equal(a, b), (field.name, key)


def test_online_episodes_are_paid_by_the_same_scheme_as_the_dataset() -> None:
    buffer = replay(scheme=RewardScheme("time", failure_penalty=50.0))
    buffer.add(episode(0, 3, "failure"))
    batch = draw(buffer)
    at_start = np.asarray(batch.observations.state)[:, 1] == 0
    assert np.unique(np.asarray(batch.rewards)[at_start], axis=0).tolist() == [[-1, -1, -50, 0]]


def test_below_min_steps_batches_come_from_the_other_parts() -> None:
    offline, online = replay(), replay(min_steps=8)
    offline.add(episode(0, 9))
    online.add(episode(1, 5))
    assert online.source() is None
    loader = Loader([Part(offline), Part(online)], 32, seed=0)
    assert (loader.sample_batch(0).observations.state[:, 0] == 0).all()
    online.add(episode(1, 5))
    assert (loader.sample_batch(0).observations.state[:, 0] == 1).sum() == 16  # half and half, in every batch


def test_drawing_from_an_empty_buffer_alone_is_an_error() -> None:
    with pytest.raises(UserError, match="Too few episodes have been collected"):
        draw(replay())


def test_batches_made_ahead_do_not_see_what_is_added_meanwhile() -> None:
    buffer = replay()
    buffer.add(episode(0, 5))
    loader = Loader([Part(buffer)], 8, seed=0)
    stream = loader.batches(0, 6)
    first = next(stream)
    buffer.add(episode(1, 50))
    rest = list(stream)
    assert all((np.asarray(batch.observations.state[:, 0]) == 0).all() for batch in (first, *rest))
    assert any((np.asarray(batch.observations.state[:, 0]) == 1).any() for batch in loader.batches(0, 3))


def test_the_same_episodes_give_the_same_batches() -> None:
    one, other = replay(20), replay(20)
    for buffer in (one, other):
        for number in range(6):
            buffer.add(episode(number, 4 + number))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), draw(one, step=7), draw(other, step=7)))
    assert one.episodes == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"terminated": False}, "neither terminated nor truncated"),
        ({"truncated": True}, "both terminated and truncated"),
        (
            {"actions": np.zeros((3, 2), np.float32), "rewards": np.zeros(3, np.float32)},
            r"3 actions and \[6\] observations",
        ),
        ({"actions": np.zeros((0, 2), np.float32), "rewards": np.zeros(0, np.float32)}, "has 0 steps"),
    ],
)
def test_what_is_no_finished_episode_is_refused(change: dict[str, object], words: str) -> None:
    buffer = replay()
    with pytest.raises(UserError, match=words):
        buffer.add(dataclasses.replace(episode(0, 5), **change))  # type: ignore[arg-type]
    assert len(buffer) == 0


def test_an_episode_longer_than_the_buffer_is_refused_and_nothing_is_lost() -> None:
    buffer = replay(10)
    buffer.add(episode(0, 5))
    with pytest.raises(UserError, match="has 11 steps and the replay buffer holds 10"):
        buffer.add(episode(1, 11))
    assert len(buffer) == 5


@pytest.mark.parametrize(("capacity", "min_steps"), [(0, 1), (5, 6), (5, 0)])
def test_a_buffer_that_can_never_be_drawn_from_is_refused(capacity: int, min_steps: int) -> None:
    with pytest.raises(UserError, match=f"holds {capacity} steps and is drawn from when it has {min_steps}"):
        replay(capacity, min_steps=min_steps)


def test_the_buffer_copies_the_episodes_arrays() -> None:
    buffer, lived = replay(), episode(1, 6)
    buffer.add(lived)
    before = jax.tree.map(np.copy, draw(buffer))
    for array in (*lived.observations.values(), lived.actions, lived.rewards):
        array.flags.writeable = True
        array[:] = 99  # the collector fills its arrays again
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), draw(buffer), before))


def test_each_added_episode_can_be_drawn_at_once() -> None:
    buffer = replay()
    for number in range(5):
        buffer.add(episode(number, 4))
        assert set(np.asarray(draw(buffer, 128).observations.state)[:, 0]) == set(range(number + 1))


def test_each_episode_keeps_its_prompt_and_recorded_rewards() -> None:
    buffer = replay(scheme=RewardScheme("recorded"))
    for number in range(3):
        buffer.add(dataclasses.replace(episode(number, 4), rewards=np.full(4, number, np.float32)))
    batch = draw(buffer)
    for i, number in enumerate(np.asarray(batch.observations.state)[:, 0].astype(int)):
        tokens, _ = INPUTS.tokenizer.tokenize(f"task {number}", None)
        assert np.array_equal(batch.observations.tokenized_prompt[i], tokens)
        assert np.array_equal(batch.next_observations.tokenized_prompt[i], tokens)
        assert batch.rewards[i, 0] == number


def test_images_are_resized_to_the_models_size() -> None:
    buffer, lived = replay(), episode(0, 3)
    large = np.repeat(np.repeat(lived.observations["image"], 3, axis=1), 3, axis=2)
    buffer.add(dataclasses.replace(lived, observations={**lived.observations, "image": large}))
    batch = draw(buffer, 8)
    assert batch.observations.images["base_0_rgb"].shape == (8, SIZE, SIZE, 3)


def test_actions_are_relative_to_the_state_they_start_from_also_where_last_observations_are_kept() -> None:
    robot = dataclasses.replace(ROBOT, delta_mask=(False, True))
    inputs = dataclasses.replace(INPUTS, robot=robot)
    buffer = ReplayBuffer(100, inputs, WindowOptions(HORIZON, EXECUTED), RewardScheme("success"), fps=10.0)
    for number in range(4):
        buffer.add(episode(number, 5))
    batch = draw(buffer)
    for i in range(64):
        number, time = (int(x) for x in batch.observations.state[i, :2])
        steps = [min(time + k, 4) for k in range(HORIZON)]
        np.testing.assert_allclose(batch.actions[i, :, 0], -number, atol=1e-4)
        np.testing.assert_allclose(batch.actions[i, :, 1], [-step - time for step in steps], atol=1e-4)


@pytest.mark.parametrize("rewards", [np.zeros(4, np.float32), np.full(5, np.nan, np.float32)])
def test_rewards_that_would_spoil_every_batch_are_refused(rewards: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without it
    buffer = replay(scheme=RewardScheme("recorded"))
    with pytest.raises(UserError, match="give each action a finite reward"):
        buffer.add(dataclasses.replace(episode(0, 5), rewards=rewards))


def test_episodes_of_other_cameras_are_refused() -> None:
    robot = dataclasses.replace(ROBOT, cameras={**ROBOT.cameras, "left_wrist_0_rgb": "eye"}, optional_cameras=("eye",))
    inputs = dataclasses.replace(INPUTS, robot=robot)
    buffer = ReplayBuffer(100, inputs, WindowOptions(HORIZON, EXECUTED), RewardScheme("success"), fps=10.0)
    buffer.add(episode(0, 5))
    seeing = episode(1, 5)
    seeing = dataclasses.replace(seeing, observations={**seeing.observations, "eye": seeing.observations["image"]})
    with pytest.raises(UserError, match="give all episodes of a replay buffer the same cameras"):
        buffer.add(seeing)


def test_a_buffer_that_does_not_fit_the_dataset_is_refused_when_it_is_first_drawn_from() -> None:
    options = WindowOptions(HORIZON, EXECUTED)
    slow = ReplayBuffer(100, INPUTS, options, RewardScheme("success"), fps=5.0)
    fast = replay()
    slow.add(episode(0, 5))
    fast.add(episode(0, 5))
    with pytest.raises(UserError, match="10 and 5 frames per second"):
        Loader([Part(fast), Part(slow)], 4, seed=0).sample_batch(0)
