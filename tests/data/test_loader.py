"""Batches equal what `input_transform` gives for the same frames, one by one."""

import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pistar.data.chunk_source import (
    ChunkSource,
    ModelInputs,
    dataset_cameras,
    dataset_source,
    label_dataset,
    split_episodes,
)
from pistar.data.dataset_stats import compute_norm_stats
from pistar.data.frame_cache import Frames, open_frames
from pistar.data.frame_pool import FramePool
from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.reader import open_dataset
from pistar.data.loader import Loader, Part, PoolOptions, _PoolSchedule, _shares
from pistar.data.robots import ROBOTS, Robot, input_transform
from pistar.data.success_sources import FromColumn
from pistar.data.transforms import stack_observations
from pistar.data.windows import WindowOptions
from pistar.errors import UserError
from pistar.models.tokenizer import PromptTokenizer, load_tokenizer
from pistar.types import ChunkBatch, Observation, RewardScheme

from helpers.paths import FIXTURES, program

LEROBOT = FIXTURES / "lerobot"
SIZE, HORIZON, EXECUTED = 24, 8, 5
OPTIONS = WindowOptions(HORIZON, EXECUTED)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return open_dataset(LEROBOT / "lerobot_v30")


@pytest.fixture(scope="module")
def frames(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return open_frames(dataset, dataset.cameras, SIZE, tmp_path_factory.mktemp("frames"))


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return load_tokenizer("tiny", 96)


def model_inputs(dataset: Dataset, tokenizer: PromptTokenizer, robot: str, norm: Any, discrete: bool) -> ModelInputs:
    stats = compute_norm_stats(dataset, ROBOTS[robot], HORIZON)
    return ModelInputs(ROBOTS[robot], stats, norm, tokenizer, 32, SIZE, discrete)


@pytest.fixture(scope="module")
def inputs(dataset: Dataset, tokenizer: PromptTokenizer) -> ModelInputs:
    return model_inputs(dataset, tokenizer, "aloha", "zscore", discrete=False)


def make_source(dataset: Dataset, inputs: ModelInputs, pictures: Frames | FramePool) -> ChunkSource:
    labels = label_dataset(dataset, FromColumn(), RewardScheme("success"))
    return dataset_source(dataset, inputs, OPTIONS, labels, pictures)


@pytest.fixture(scope="module")
def source(dataset: Dataset, inputs: ModelInputs, frames: Frames) -> ChunkSource:
    return make_source(dataset, inputs, frames)


def same(one: object, other: object) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), one, other)))


class Twin:
    """The slow and obvious way: decode and transform one frame at a time."""

    def __init__(self, dataset: Dataset, inputs: ModelInputs) -> None:
        self.dataset, self.inputs = dataset, inputs
        self.columns = dataset.columns(["observation.state", "action", "next.success"])
        self.tasks = dataset.frame_tasks()
        self.pictures = {
            camera: [p for e in dataset.episodes for p in dataset.decode(e.index, camera)] for camera in dataset.cameras
        }
        self.transform = input_transform(
            inputs.robot,
            inputs.stats,
            inputs.norm,
            inputs.tokenizer,
            action_dim=inputs.action_dim,
            image_size=inputs.image_size,
            discrete_state=inputs.discrete_state,
            repack=inputs.robot.repack,
        )

    def frame(self, row: int) -> dict[str, Any]:
        end = next(e.from_row + e.length for e in self.dataset.episodes if e.from_row <= row < e.from_row + e.length)
        steps = [min(row + k, end - 1) for k in range(HORIZON)]
        return self.transform(
            {camera: pictures[row] for camera, pictures in self.pictures.items()}
            | {
                "observation.state": self.columns["observation.state"][row],
                "action": self.columns["action"][steps],
                "prompt": self.tasks[row],
            }
        )


def check_observation(given: Observation, frames: list[dict[str, Any]]) -> None:
    wanted = stack_observations(frames)
    for field in dataclasses.fields(Observation):
        assert same(getattr(given, field.name), getattr(wanted, field.name)), field.name


@pytest.mark.parametrize(
    ("robot", "norm", "discrete"),
    [("aloha", "zscore", False), ("aloha", "quantile", True), ("aloha_absolute", "zscore", False)],
)
def test_a_batch_is_what_the_transforms_make_of_its_frames(
    dataset: Dataset,
    frames: Frames,
    tokenizer: PromptTokenizer,
    robot: str,
    norm: str,
    discrete: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ROBOTS, "aloha_absolute", dataclasses.replace(ROBOTS["aloha"], delta_mask=None))
    inputs = model_inputs(dataset, tokenizer, robot, norm, discrete)
    source, twin = make_source(dataset, inputs, frames), Twin(dataset, inputs)
    loader = Loader([Part(source)], 24, seed=3)
    batch = loader.sample_batch(11)
    starts = drawn_starts(source, 24, seed=3, step=11)
    fields = source.windows.gather(starts)
    assert not fields.valid.all()  # some reach past an episode's end
    check_observation(batch.observations, [twin.frame(int(row)) for row in fields.observation_rows])
    check_observation(batch.next_observations, [twin.frame(int(row)) for row in fields.next_rows])
    wanted = np.stack([twin.frame(int(start))["actions"] for start in starts])
    np.testing.assert_allclose(batch.actions, wanted, rtol=2e-7, atol=1e-6)
    for name in ("rewards", "masks", "valid", "terminals", "next_terminal", "sequence_mask"):
        assert np.array_equal(getattr(batch, name), getattr(fields, name)), name


def drawn_starts(source: ChunkSource, size: int, seed: int, step: int) -> np.ndarray:
    """Return the rows at which the windows of a batch start."""
    spied = spy(source)
    assert (spied.windows.kept_before == 0).all()
    return rows_of(Loader([Part(spied)], size, seed).sample_batch(step))


def spy(source: ChunkSource) -> ChunkSource:
    """Return a source of the same windows whose states are the row numbers."""
    spied = source.select(source.episodes)
    rows = np.arange(len(source.windows.rewards), dtype=np.float32)
    spied._state = np.repeat(rows[:, None], 32, axis=1)
    return spied


def rows_of(batch: ChunkBatch) -> np.ndarray:
    rows: np.ndarray = np.rint(np.asarray(batch.observations.state)[:, 0]).astype(np.int64)
    return rows


def test_a_step_always_gives_the_same_batch_and_another_step_or_seed_another(source: ChunkSource) -> None:
    loader, again = Loader([Part(source)], 16, seed=1), Loader([Part(source)], 16, seed=1)
    later = loader.sample_batch(5)
    loader.sample_batch(2)
    assert same(loader.sample_batch(5), later)
    assert same(again.sample_batch(5), later)
    spied = spy(source)
    drawn = {
        (seed, step): tuple(rows_of(Loader([Part(spied)], 16, seed).sample_batch(step)))
        for seed in (0, 1, 2**40)
        for step in (0, 1, 10**9)
    }
    assert len(set(drawn.values())) == len(drawn)


def test_batches_made_ahead_are_those_of_their_steps_and_stay_as_they_are(source: ChunkSource) -> None:
    loader = Loader([Part(source)], 8, seed=0, ahead=3, workers=2)
    kept = list(loader.batches(7, 19))  # all alive at once: none may be overwritten
    assert len(kept) == 12
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(kept[0]))
    for step, batch in enumerate(kept, start=7):
        assert same(batch, loader.sample_batch(step)), step


def test_memory_of_dropped_batches_is_used_again(source: ChunkSource) -> None:
    loader = Loader([Part(source)], 8, seed=0, ahead=1, workers=1)
    addresses = set()
    for batch in loader.batches(0, 20):
        image: Any = batch.observations.images["base_0_rgb"]
        addresses.add(image.unsafe_buffer_pointer())
        del batch, image
    # Before and after the window, three cameras, and about five batches alive at a time.
    assert len(addresses) <= 2 * 3 * 5
    assert all(address % 64 == 0 for address in addresses)


def test_batches_are_made_before_they_are_asked_for(source: ChunkSource, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    sample = Loader._sample

    def counting(self: Loader, step: int, *args: Any, **options: Any) -> Any:
        made.append(step)
        return sample(self, step, *args, **options)

    monkeypatch.setattr(Loader, "_sample", counting)
    stream = Loader([Part(source)], 4, seed=0, ahead=3).batches(0, 9)
    next(stream)
    deadline = time.monotonic() + 20
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(made) == [0, 1, 2, 3]  # the one taken and three ahead, no more


def test_a_batch_becomes_a_device_array_without_a_copy(source: ChunkSource) -> None:
    image: Any = Loader([Part(source)], 4, seed=0).sample_batch(0).observations.images["base_0_rgb"]
    assert jax.device_put(image).unsafe_buffer_pointer() == image.ctypes.data


def test_an_endless_stream_stops_its_threads_when_it_is_closed(source: ChunkSource) -> None:
    stream = Loader([Part(source)], 4, seed=0).batches(0)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_an_error_in_the_background_reaches_the_reader(source: ChunkSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise UserError("the disk is gone")

    monkeypatch.setattr(type(source.frames), "gather", fail)
    with pytest.raises(UserError, match="the disk is gone"):
        next(iter(Loader([Part(source)], 4, seed=0).batches(0, 3)))


def test_policy_batches_hold_the_same_windows_without_next_observations(source: ChunkSource) -> None:
    loader = Loader([Part(source)], 8, seed=0)
    chunks, policy = loader.sample_batch(4), loader.sample_policy_batch(4)
    assert same(policy.observations, chunks.observations)
    assert same((policy.actions, policy.valid), (chunks.actions, chunks.valid))
    assert np.array_equal(policy.weight, np.ones(8))
    assert same(next(iter(loader.policy_batches(4, 5))), policy)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_all_hosts_together_hold_the_batch_of_a_single_host(source: ChunkSource, hosts: int) -> None:
    whole = Loader([Part(source)], 16, seed=9).sample_batch(3)
    parts = [Loader([Part(source)], 16, seed=9, host=host, hosts=hosts).sample_batch(3) for host in range(hosts)]
    assert same(jax.tree.map(lambda *rows: np.concatenate(rows), *parts), whole)


def test_rows_are_laid_over_the_devices_by_a_sharding(source: ChunkSource) -> None:
    mesh = jax.make_mesh((1,), ("batch",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))  # type: ignore[no-untyped-call]
    loader = Loader([Part(source)], 8, seed=0, sharding=sharding)
    batch = next(iter(loader.batches(0, 1)))
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(batch))
    assert same(batch, loader.sample_batch(0))


@pytest.mark.parametrize(("hosts", "devices"), [(1, 8), (2, 2)])
def test_rows_lie_on_the_devices_of_all_hosts(tmp_path: Path, hosts: int, devices: int) -> None:
    script = program("draw_on_devices")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, port, str(hosts), str(host), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(hosts)
    ]
    for process in processes:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        assert f"{hosts * devices} devices, {devices} here" in out


# Mixing


def test_each_batch_keeps_the_shares_and_its_halves_are_mixed_alike(source: ChunkSource) -> None:
    spied = spy(source)
    low, high = spied.select(spied.episodes[:4]), spied.select(spied.episodes[4:])
    border = int(spied.windows.ends[3])
    loader = Loader([Part(low, 1.0), Part(high, 3.0)], 64, seed=0)
    firsts = []
    for step in range(20):
        rows = rows_of(loader.sample_batch(step))
        assert (rows < border).sum() == 16
        firsts.append((rows[:32] < border).sum())
    assert 4 < np.mean(firsts) < 12  # 8 of the first half


@given(
    weights=st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda w: sum(w) > 0.1),
    count=st.integers(1, 300),
    offset=st.floats(0, 1, exclude_max=True),
)
def test_shares_are_never_off_by_more_than_one_row(weights: list[float], count: int, offset: float) -> None:
    ends = _shares(weights, count, offset)
    assert ends[-1] == count
    assert list(ends) == sorted(ends)
    sizes = np.diff([0, *ends])
    wanted = np.array(weights) / sum(weights) * count
    assert (abs(sizes - wanted) <= 1 + 1e-6).all()


def test_shares_that_are_not_whole_rows_are_right_on_average() -> None:
    sizes = [np.diff([0, *_shares([1.0, 2.0], 4, float(offset))])[0] for offset in np.arange(0.005, 1, 0.01)]
    assert np.mean(sizes) == pytest.approx(4 / 3, abs=0.02)


def test_a_dataset_of_another_rate_is_not_mixed_in(source: ChunkSource) -> None:
    slow = source.select(source.episodes)
    slow.fps = 10.0
    with pytest.raises(UserError, match="50 and 10 frames per second"):
        Loader([Part(source), Part(slow)], 4, seed=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mixture": []}, "mixture is empty"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 5, "hosts": 2}, "multiple of the number of hosts, 2: try 4"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"hosts": 2, "host": 2}, "host is 2 of 2"),
        ({"workers": 0}, "0 workers"),
        ({"ahead": -1}, "-1 batches ahead"),
        ({"weight": 0.0}, r"weights of the mixture are \[0.0\]"),
        ({"weight": -1.0}, r"weights of the mixture are \[-1.0\]"),
        ({"episodes": []}, "no windows to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused(source: ChunkSource, change: dict[str, Any], words: str) -> None:
    given = source.select(np.array(change.pop("episodes"), np.int64)) if "episodes" in change else source
    parts = [Part(given, change.pop("weight", 1.0))]
    options: dict[str, Any] = {"mixture": parts, "batch_size": 4, "seed": 0}
    with pytest.raises(UserError, match=words):
        Loader(**(options | change))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("action_dim", 16, "action_dim 32 and 16"), ("image_size", 48, "image_size 24 and 48")],
)
def test_datasets_prepared_for_different_models_are_not_mixed(
    source: ChunkSource, field: str, value: Any, words: str
) -> None:
    other = source.select(source.episodes)
    other.inputs = dataclasses.replace(source.inputs, **{field: value})
    with pytest.raises(UserError, match=words):
        Loader([Part(source), Part(other)], 4, seed=0)


def test_datasets_normalised_or_tokenised_differently_are_not_mixed(source: ChunkSource, dataset: Dataset) -> None:
    other = source.select(source.episodes)
    other.inputs = dataclasses.replace(source.inputs, norm="quantile")
    with pytest.raises(UserError, match="normalised differently"):
        Loader([Part(source), Part(other)], 4, seed=0)
    other.inputs = dataclasses.replace(source.inputs, stats=compute_norm_stats(dataset, ROBOTS["aloha"], 2))
    with pytest.raises(UserError, match="normalised differently"):
        Loader([Part(source), Part(other)], 4, seed=0)
    other.inputs = dataclasses.replace(source.inputs, tokenizer=load_tokenizer("tiny", 20))
    with pytest.raises(UserError, match="different tokenizers"):
        Loader([Part(source), Part(other)], 4, seed=0)


def test_datasets_with_different_windows_are_not_mixed(source: ChunkSource) -> None:
    other = source.select(source.episodes)
    other.windows = dataclasses.replace(source.windows, options=WindowOptions(HORIZON, 2))
    with pytest.raises(UserError, match="have different windows"):
        Loader([Part(source), Part(other)], 4, seed=0)


@pytest.mark.parametrize("wrong", ["root", "size", "labels"])
def test_frames_and_labels_of_another_dataset_are_refused(
    dataset: Dataset, inputs: ModelInputs, frames: Frames, wrong: str
) -> None:
    labels = label_dataset(dataset, FromColumn(), RewardScheme("success"))
    if wrong == "labels":
        labels = dataclasses.replace(labels, rewards=labels.rewards[:-1], ended=labels.ended[:-1])
    given = dataclasses.replace(inputs, image_size=48) if wrong == "size" else inputs
    source = open_dataset(LEROBOT / "lerobot_v21") if wrong == "root" else dataset
    with pytest.raises(UserError, match="make them for this dataset"):
        dataset_source(source, given, OPTIONS, labels, frames)


def test_a_norm_that_does_not_exist_is_refused(inputs: ModelInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without it
    with pytest.raises(UserError, match="norm is 'z'; it is one of zscore, quantile"):
        dataclasses.replace(inputs, norm="z")  # type: ignore[arg-type]


def test_a_bare_source_is_a_part_of_weight_one(source: ChunkSource) -> None:
    assert same(Loader([source], 4, seed=0).sample_batch(0), Loader([Part(source)], 4, seed=0).sample_batch(0))


def test_episodes_that_do_not_exist_are_not_selected(source: ChunkSource) -> None:
    with pytest.raises(UserError, match="Episodes 3 to 99 were selected; choose from 0 to 11"):
        source.select(np.array([3, 99]))


# Pools of episodes


@pytest.fixture
def pool(dataset: Dataset) -> Iterator[FramePool]:
    pool = FramePool(dataset, dataset.cameras, SIZE)
    yield pool
    pool.close()


def test_memory_pool_and_disk_cache_give_the_same_batches(
    dataset: Dataset, inputs: ModelInputs, source: ChunkSource, pool: FramePool
) -> None:
    options = PoolOptions(episodes=5)
    disk = Loader([Part(source)], 32, seed=4, pool=options)
    memory = Loader([Part(make_source(dataset, inputs, pool))], 32, seed=4, pool=options)
    for step, batch in enumerate(memory.batches(20, 50), start=20):
        assert same(batch, disk.sample_batch(step)), step
    assert same(memory.sample_batch(3), disk.sample_batch(3))  # an earlier step


def test_without_pools_the_memory_pool_holds_everything(
    dataset: Dataset, inputs: ModelInputs, source: ChunkSource, pool: FramePool
) -> None:
    memory = Loader([Part(make_source(dataset, inputs, pool))], 16, seed=4)
    assert same(memory.sample_batch(0), Loader([Part(source)], 16, seed=4).sample_batch(0))


def test_the_pool_decodes_upcoming_episodes_and_drops_old_ones(
    dataset: Dataset, pool: FramePool, source: ChunkSource
) -> None:
    def held() -> set[int]:
        return {episode for episode, _ in pool._decoded}

    mine, yours = source.select(source.episodes), source.select(source.episodes)
    view = pool.view(np.array([3, 1]), np.array([7]), mine)
    assert held() == {1, 3, 7}
    pool.view(np.array([7]), np.array([2]), mine)
    assert held() == {7, 2}
    pool.view(np.array([5]), np.array([2]), yours)  # a second claimant does not drop the first one's
    assert held() == {7, 2, 5}
    del yours
    pool.view(np.array([7]), np.array([2]), mine)
    assert held() == {7, 2}
    # A batch that is still being made keeps what it needs.
    info, out = dataset.episodes[3], np.zeros((1, SIZE, SIZE, 3), np.uint8)
    view.gather(dataset.cameras[0], np.array([info.from_row + 2]), out, np.array([0]))
    with pytest.raises(IndexError, match="not all in these episodes"):
        view.gather(dataset.cameras[0], np.array([dataset.episodes[7].from_row]), out, np.array([0]))


def test_a_pass_draws_from_every_episode_in_proportion_to_its_windows(source: ChunkSource) -> None:
    spied = spy(source)
    loader = Loader([Part(spied)], 50, seed=0, pool=PoolOptions(episodes=3, reuse=20.0))
    steps = 20 * len(spied.starts) // 50
    counts = np.zeros(len(spied.windows.ends))
    for step in range(steps):
        rows = rows_of(loader.sample_batch(step))
        episodes = np.unique(spied.windows.episodes[rows])
        assert len(episodes) <= 3
        counts += np.bincount(spied.windows.episodes[rows], minlength=len(counts))
    windows = np.bincount(spied.windows.episodes[spied.starts], minlength=len(counts))
    np.testing.assert_allclose(counts / windows, 20, rtol=0.25)


@given(step=st.integers(0, 10**6), size=st.integers(1, 14), seed=st.integers(0, 5))
def test_the_next_pool_has_the_upcoming_episodes(source: ChunkSource, step: int, size: int, seed: int) -> None:
    schedule = _PoolSchedule.of(source, PoolOptions(size), seed, 16.0)
    pool = schedule.pool(step)
    assert len(pool.episodes) <= size
    assert set(source.windows.episodes[pool.starts]) == set(pool.episodes)
    after = next(p for s in itertools.count(step + 1) if (p := schedule.pool(s)) is not pool)
    if len(schedule._pass(0)[0]) > 1:
        assert np.array_equal(after.episodes, pool.upcoming)


def test_every_pass_has_an_order_of_its_own(source: ChunkSource) -> None:
    schedule = _PoolSchedule.of(source, PoolOptions(2), 0, 16.0)
    orders = {tuple(tuple(pool) for pool in schedule._pass(number)[0]) for number in range(20)}
    assert len(orders) == 20


def test_a_pool_of_a_part_with_a_smaller_share_lasts_longer(source: ChunkSource) -> None:
    often, seldom = (_PoolSchedule.of(source, PoolOptions(2), 0, drawn) for drawn in (16.0, 4.0))
    assert seldom._pass_steps == pytest.approx(4 * often._pass_steps, rel=0.05)


def test_a_part_without_a_share_decodes_nothing(dataset: Dataset, inputs: ModelInputs, source: ChunkSource) -> None:
    pool = FramePool(dataset, dataset.cameras, SIZE)
    Loader([Part(source), Part(make_source(dataset, inputs, pool), 0.0)], 4, seed=0).sample_batch(0)
    assert not pool._decoded
    pool.close()


@pytest.mark.parametrize(("options", "words"), [((0,), "pool.episodes is 0"), ((3, 0.0), "pool.reuse is 0.0")])
def test_pools_of_nothing_are_refused(options: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        PoolOptions(*options)


# Sources


def test_windows_are_drawn_in_proportion_to_their_weights(source: ChunkSource) -> None:
    weights = np.zeros(len(source.windows.episodes), np.float32)
    weights[source.starts[[3, 10]]] = 1.0, 3.0
    heavy = source.with_weights(weights)
    assert (source.total_weight, heavy.total_weight) == (len(source.starts), 4.0)
    drawn = heavy.draw(np.random.default_rng(0), 4_000)
    assert set(drawn) == set(source.starts[[3, 10]])
    np.testing.assert_allclose((drawn == source.starts[10]).mean(), 0.75, atol=0.03)
    alone = heavy.select(source.windows.episodes[source.starts[[3]]])
    assert alone.total_weight == weights[alone.starts].sum()
    batch = Loader([heavy], 64, seed=0).sample_policy_batch(0)
    assert len(np.unique(np.asarray(batch.actions)[:, 0], axis=0)) <= 2
    with pytest.raises(UserError, match="have weight 0"):
        source.with_weights(np.zeros_like(weights))


def test_selected_episodes_are_the_only_ones_drawn(source: ChunkSource) -> None:
    spied = spy(source).select(np.array([2, 5]))
    assert spied.episodes.tolist() == [2, 5]
    drawn = {int(row) for step in range(5) for row in rows_of(Loader([Part(spied)], 64, 0).sample_batch(step))}
    assert set(spied.windows.episodes[list(drawn)]) == {2, 5}
    assert len(source.episodes) == 12  # the original is unchanged


@given(success=st.lists(st.booleans(), min_size=0, max_size=60), held_out=st.floats(0, 0.99), seed=st.integers(0, 3))
def test_a_split_is_whole_disjoint_and_even(success: list[bool], held_out: float, seed: int) -> None:
    flags = np.array(success, bool)
    train, judged = split_episodes(flags, held_out, seed)
    assert sorted([*train, *judged]) == list(range(len(flags)))
    assert same(split_episodes(flags, held_out, seed), (train, judged))
    for kind in (True, False):
        total, out = int((flags == kind).sum()), int((flags[judged] == kind).sum())
        assert abs(out - held_out * total) <= 1
        if total > 1 and held_out > 0:
            assert 0 < out < total


def test_another_seed_gives_another_split() -> None:
    flags = np.arange(40) % 2 == 0
    assert not np.array_equal(split_episodes(flags, 0.25, 0)[1], split_episodes(flags, 0.25, 1)[1])


def test_a_share_of_one_leaves_nothing_to_train_on() -> None:
    with pytest.raises(UserError, match="held_out is 1"):
        split_episodes(np.ones(3, bool), 1.0, 0)


def test_a_prompt_replaces_the_tasks(dataset: Dataset, inputs: ModelInputs, frames: Frames) -> None:
    labels = label_dataset(dataset, FromColumn(), RewardScheme("success"))
    source = dataset_source(dataset, inputs, OPTIONS, labels, frames, prompt="fold it")
    tokens, _ = inputs.tokenizer.tokenize("fold it", None)
    batch = Loader([Part(source)], 8, seed=0).sample_batch(0)
    assert (batch.observations.tokenized_prompt == tokens).all()


def test_notes_of_the_rewards_reach_the_source(source: ChunkSource) -> None:
    assert any("count as time-outs" in note for note in source.notes)


def test_recorded_rewards_are_read_from_the_dataset(dataset: Dataset) -> None:
    labels = label_dataset(dataset, FromColumn(), RewardScheme("recorded"))
    assert np.array_equal(labels.rewards, dataset.columns(["next.reward"])["next.reward"])


def robot_without(robot: Robot, camera: str) -> dict[str, Any]:
    images = {name: column for name, column in robot.repack["images"].items() if name != camera}
    return {**robot.repack, "images": images}


def test_a_camera_the_robot_may_lack_is_black_and_masked(dataset: Dataset, inputs: ModelInputs, frames: Frames) -> None:
    labels = label_dataset(dataset, FromColumn(), RewardScheme("success"))
    repack = robot_without(inputs.robot, "cam_left_wrist")
    source = dataset_source(dataset, inputs, OPTIONS, labels, frames, repack=repack)
    loader = Loader([Part(source)], 8, seed=0)
    for batch in (loader.sample_batch(0), loader.sample_batch(1)):  # the second reuses memory
        seen = batch.observations
        assert {name: bool(mask.all()) for name, mask in seen.image_masks.items()} == {
            "base_0_rgb": True,
            "left_wrist_0_rgb": False,
            "right_wrist_0_rgb": True,
        }
        assert not seen.images["left_wrist_0_rgb"].any()
        assert seen.images["base_0_rgb"].any()


def test_a_required_camera_without_a_column_is_refused(dataset: Dataset, inputs: ModelInputs) -> None:
    with pytest.raises(UserError, match="repack has no column for 'images/cam_high'"):
        dataset_cameras(dataset, inputs.robot, robot_without(inputs.robot, "cam_high"))


def test_a_camera_the_dataset_lacks_is_named_with_those_it_has(dataset: Dataset, inputs: ModelInputs) -> None:
    images = inputs.robot.repack["images"] | {"cam_high": "observation.images.cam_hihg"}
    with pytest.raises(UserError, match=r"no camera .*cam_hihg.*it has observation.images.cam_high, "):
        dataset_cameras(dataset, inputs.robot, {**inputs.robot.repack, "images": images})
