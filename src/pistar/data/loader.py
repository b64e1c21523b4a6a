"""Batches of windows, each a pure function of (seed, step): resume is exact, and any batch can be made again.

Every host draws the whole batch and gathers its own rows, so the batches do not depend on the number of hosts.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int

from pistar.data.chunk_source import ChunkSource, FrameReader
from pistar.data.norm_stats import norm_stats_hash
from pistar.data.windows import WindowFields, Windows
from pistar.errors import UserError
from pistar.types import ChunkBatch, Observation, PolicyBatch

T = TypeVar("T")

_FIELDS = tuple(field.name for field in dataclasses.fields(WindowFields) if not field.name.endswith("_rows"))
"""Fields that `WindowFields` and `ChunkBatch` have in common."""

ALIGNMENT = 64
"""Bytes. Memory that starts at a multiple of this becomes an array of a CPU device without a copy."""


@runtime_checkable
class GrowingSource(Protocol):
    """A source that receives episodes during training, such as a replay buffer."""

    def source(self) -> ChunkSource | None:
        """Return a source of the present episodes, which later ones do not change; None if there are too few."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One source of a mixture."""

    source: ChunkSource | GrowingSource
    weight: float = 1.0
    """The part's fraction of each batch is this over the sum of all weights. Every single batch has these fractions."""


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    """Draw from a few episodes at a time, so that only their frames need to be in memory."""

    episodes: int
    """Draw from this many episodes at a time. More episodes mix better, but about twice as many are in memory."""
    reuse: float = 1.0
    """Draw each window of a pool this many times, on average, before the next pool is used."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise UserError(f"pool.episodes is {self.episodes}; give at least 1 (32 or more mix well).")
        if not 0 < self.reuse < float("inf"):
            raise UserError(f"pool.reuse is {self.reuse}; give a finite number above 0 (1 is once per pass).")


class Loader:
    """Draws batches from one source or from a mixture of several."""

    def __init__(
        self,
        mixture: Sequence[Part | ChunkSource],
        batch_size: int,
        seed: int,
        *,
        pool: PoolOptions | None = None,
        host: int = 0,
        hosts: int = 1,
        sharding: jax.sharding.Sharding | None = None,
        ahead: int = 2,
        workers: int = 1,
    ) -> None:
        """Draw batches of `batch_size` rows, of all hosts together, from `mixture`.

        `pool` applies to parts that do not grow. `sharding` lays the rows of `batches` over the devices of all hosts.
        `workers` threads make up to `ahead` batches in advance.
        """
        parts = [part if isinstance(part, Part) else Part(part) for part in mixture]
        if not parts:
            raise UserError("The mixture is empty; give the loader at least one dataset.")
        if not 0 <= host < hosts:
            raise UserError(f"host is {host} of {hosts}; give a number from 0 to {hosts - 1}.")
        if workers < 1 or ahead < 0:
            raise UserError(
                f"{workers} workers make {ahead} batches ahead; give at least 1 worker and at least 0 batches."
            )
        if batch_size < 1 or batch_size % hosts:
            raise UserError(
                f"batch_size is {batch_size}; it must be a positive multiple of the number of hosts, {hosts}: "
                f"try {max(1, round(batch_size / hosts)) * hosts}."
            )
        if any(not 0 <= part.weight < float("inf") for part in parts) or sum(part.weight for part in parts) <= 0:
            weights = [part.weight for part in parts]
            raise UserError(f"The weights of the mixture are {weights}; give finite weights ≥ 0, not all 0.")
        if not 0 <= seed < 2**63:
            raise UserError(f"seed is {seed}; give a whole number of at least 0 and below 2⁶³.")
        self.parts, self.batch_size, self._seed, self._host, self._hosts = tuple(parts), batch_size, seed, host, hosts
        self._sharding, self._ahead, self._workers = sharding, ahead, workers
        self._memory = _Memory()
        fixed = [part.source for part in parts if isinstance(part.source, ChunkSource)]
        for source in fixed:
            if not len(source.starts):
                raise UserError("A dataset of the mixture has no windows to draw; give it episodes, or leave it out.")
            _check_alike(fixed[0], source)
        total = sum(part.weight for part in parts)
        self._pools: dict[int, _PoolSchedule] = {
            id(part.source): _PoolSchedule.of(part.source, pool, seed, batch_size * part.weight / total)
            for part in parts
            if pool is not None and isinstance(part.source, ChunkSource) and part.weight > 0
        }

    def sample_batch(self, step: int) -> ChunkBatch:
        """Return this host's rows of a step's batch, as NumPy arrays. Steps may come in any order."""
        return self._sample(step, self._contents(), with_next=True).chunks()

    def sample_policy_batch(self, step: int) -> PolicyBatch:
        """Return the same windows without next observations, for imitation: half of the work."""
        return self._sample(step, self._contents(), with_next=False).imitation()

    def batches(self, start: int, stop: int | None = None) -> Iterator[ChunkBatch]:
        """Yield the batches of steps `start` to `stop` − 1, on the devices, made ahead in the background.

        Episodes added after the call are left out, so that a batch does not depend on how fast it was made.
        """
        contents = self._contents()
        return self._prefetch(lambda step: self._sample(step, contents, with_next=True).chunks(), start, stop)

    def policy_batches(self, start: int, stop: int | None = None) -> Iterator[PolicyBatch]:
        """Yield the batches of `sample_policy_batch`, as `batches` does."""
        contents = self._contents()
        return self._prefetch(lambda step: self._sample(step, contents, with_next=False).imitation(), start, stop)

    def _prefetch(self, make: Callable[[int], T], start: int, stop: int | None) -> Iterator[T]:
        steps = itertools.count(start) if stop is None else iter(range(start, stop))
        executor = ThreadPoolExecutor(self._workers, thread_name_prefix="loader")
        try:
            pending: deque[Future[T]] = deque()
            while True:
                upcoming = itertools.islice(steps, self._ahead + 1 - len(pending))
                pending.extend(
                    executor.submit(lambda step: to_devices(make(step), self._sharding), step) for step in upcoming
                )
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            executor.shutdown(cancel_futures=True)

    def _contents(self) -> list[tuple[ChunkSource, float]]:
        """Return the sources that can be drawn from now, with their weights."""
        contents = [
            (source, part.weight)
            for part in self.parts
            if (source := part.source if isinstance(part.source, ChunkSource) else part.source.source()) is not None
        ]
        if sum(weight for _, weight in contents) <= 0:
            raise UserError("Too few episodes have been collected; collect more before the first batch is drawn.")
        for source, _ in contents:
            _check_alike(contents[0][0], source)
        return contents

    def _sample(self, step: int, contents: Sequence[tuple[ChunkSource, float]], *, with_next: bool) -> "_Batch":
        rng = generator(self._seed, step)
        places = rng.permutation(self.batch_size)  # so that the rows of every host are mixed alike
        ends = _shares([weight for _, weight in contents], self.batch_size, float(rng.random()))
        size = self.batch_size // self._hosts
        batch = _Batch(contents[0][0], size, self._memory, with_next=with_next)
        for (source, _), begin, end in zip(contents, (0, *ends), ends, strict=False):
            if end == begin:
                continue
            schedule = self._pools.get(id(source))
            pool = None if schedule is None else schedule.pool(step)
            if pool is None:
                drawn = source.draw(rng, end - begin)
                frames = source.frames.view(source.episodes, np.zeros(0, np.int64), source)
            else:
                drawn = pool.starts[rng.integers(len(pool.starts), size=end - begin)]
                frames = source.frames.view(pool.episodes, pool.upcoming, source)
            here = places[begin:end] - self._host * size
            ours = (here >= 0) & (here < size)
            if ours.any():
                batch.fill(source, drawn[ours], here[ours], frames)
        return batch


def gather_chunks(source: ChunkSource, starts: Int[np.ndarray, " b"]) -> ChunkBatch:
    """Return the windows that start at these rows, in this order, as NumPy arrays."""
    batch = _Batch(source, len(starts), _Memory(), with_next=True)
    claimant = source.select(np.unique(source.windows.episodes[starts]))  # its claim ends with this function
    frames = source.frames.view(claimant.episodes, np.zeros(0, np.int64), claimant)
    batch.fill(source, starts, np.arange(len(starts)), frames)
    return batch.chunks()


def to_devices(batch: T, sharding: jax.sharding.Sharding | None = None) -> T:
    """Move a batch to the devices; with a sharding, as this host's rows of arrays over all hosts."""
    if sharding is None:
        return jax.device_put(batch)  # type: ignore[no-any-return]
    moved: T = jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)  # type: ignore[no-untyped-call]
    return moved


def _check_alike(one: ChunkSource, other: ChunkSource) -> None:
    """Refuse sources whose windows cannot be in one batch."""
    if one.fps != other.fps:
        raise UserError(
            f"The datasets of the mixture have {one.fps:g} and {other.fps:g} frames per second; a chunk would last "
            "longer in one than in the other: resample them to one rate."
        )
    if one.windows.options != other.windows.options:
        raise UserError(
            f"The datasets of the mixture have different windows ({one.windows.options}, {other.windows.options}); "
            "use the same options for all."
        )
    ours, theirs = one.inputs, other.inputs
    if norm_stats_hash(ours.stats) != norm_stats_hash(theirs.stats) or ours.norm != theirs.norm:
        raise UserError(
            "The datasets of the mixture are normalised differently; the same numbers would mean different actions: "
            "use one set of norm stats for all."
        )
    if not np.array_equal(ours.tokenizer.tokenize("fold", None)[0], theirs.tokenizer.tokenize("fold", None)[0]):
        raise UserError("The datasets of the mixture have different tokenizers; use one for all.")
    for name in ("action_dim", "image_size", "discrete_state"):
        if getattr(ours, name) != getattr(theirs, name):
            raise UserError(
                f"The datasets of the mixture have {name} {getattr(ours, name)} and {getattr(theirs, name)}; "
                "prepare all of them for one model."
            )


def _shares(weights: Sequence[float], count: int, offset: float) -> tuple[int, ...]:
    """Return where each part of a batch ends. Shares that are not whole rows are right on average over `offset`."""
    edges = np.cumsum(weights) / np.sum(weights) * count
    # An edge just below a whole number, by a rounding error, must not lose a row.
    ends = np.floor(np.round(edges, 9) + offset * (np.round(edges, 9) % 1 > 0))
    return (*(int(end) for end in ends[:-1]), count)


def generator(seed: int, step: int) -> np.random.Generator:
    """Return a random generator that depends on these two numbers alone."""
    # A uint64 array: from a list NumPy makes floats, in which large neighbouring integers are equal.
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))


# Pools


@dataclasses.dataclass(frozen=True, eq=False)
class _Pool:
    """The episodes drawn from during some steps."""

    episodes: Int[np.ndarray, " e"]
    starts: Int[np.ndarray, " s"]
    upcoming: Int[np.ndarray, " f"]
    """The episodes of the next pool."""


class _PoolSchedule:
    """Which episodes are drawn from at a step: all of them in turn, in a new order in each pass."""

    def __init__(self, windows: Windows, starts: np.ndarray, size: int, pass_steps: int, seed: int) -> None:
        self._windows, self._starts, self._size = windows, starts, size
        self._pass_steps, self._seed = pass_steps, seed
        self._episodes, self._counts = np.unique(windows.episodes[starts], return_counts=True)
        self._pools: dict[tuple[int, int], _Pool] = {}

    @classmethod
    def of(cls, source: ChunkSource, options: PoolOptions, seed: int, drawn_per_step: float) -> "_PoolSchedule":
        pools = -(-len(source.episodes) // options.episodes)
        steps = max(pools, round(options.reuse * len(source.starts) / drawn_per_step))
        return cls(source.windows, source.starts, options.episodes, steps, seed)

    def pool(self, step: int) -> _Pool:
        """Return the pool of a step. A pool is used for steps in proportion to its number of windows."""
        number, offset = divmod(step, self._pass_steps)
        pools, ends = self._pass(number)
        index = int(np.searchsorted(ends, offset, side="right"))
        key = (number, index)
        if key not in self._pools:
            upcoming = pools[index + 1] if index + 1 < len(pools) else self._pass(number + 1)[0][0]
            mask = np.isin(self._windows.episodes[self._starts], pools[index])
            self._pools = {k: pool for k, pool in self._pools.items() if k[0] >= number - 1} | {
                key: _Pool(pools[index], self._starts[mask], upcoming)
            }
        return self._pools[key]

    def _pass(self, number: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the pools of one pass over all episodes, and the step of the pass at which each ends."""
        order = generator(self._seed, 2**63 + number).permutation(len(self._episodes))
        groups = [order[i : i + self._size] for i in range(0, len(order), self._size)]
        windows = np.cumsum([int(self._counts[group].sum()) for group in groups])
        ends = np.round(windows / windows[-1] * self._pass_steps).astype(np.int64)
        return [np.sort(self._episodes[group]) for group in groups], ends


# Building batches


class _Memory:
    """Memory for images that is used again when nobody, not even a device, uses the batch any more.

    Fresh memory costs several times as much as filling it, because the kernel clears it page by page.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def array(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return an uninitialised array of uint8."""
        size = int(np.prod(shape))
        free = self._free.setdefault(size, [])
        try:
            memory = free.pop()
        except IndexError:
            raw = np.empty(size + ALIGNMENT, np.uint8)
            begin = -raw.ctypes.data % ALIGNMENT
            memory = raw[begin : begin + size]
        return np.asarray(_Lease(memory, free)).reshape(shape)


class _Lease:
    """Gives its memory back when the last array made from it is deleted."""

    def __init__(self, memory: np.ndarray, free: list[np.ndarray]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


class _Batch:
    """A batch that is being built."""

    def __init__(self, like: ChunkSource, size: int, memory: _Memory, *, with_next: bool) -> None:
        self._size = size
        pixels = (size, like.inputs.image_size, like.inputs.image_size, 3)
        self._slots = list(like.cameras)
        moments = range(1 + with_next)  # before the window, and after it
        self._images = [{slot: memory.array(pixels) for slot in self._slots} for _ in moments]
        self._masks = [{slot: np.empty(size, bool) for slot in self._slots} for _ in moments]
        self._rest: list[dict[str, np.ndarray]] = [{} for _ in moments]
        self._fields: dict[str, np.ndarray] = {}

    def fill(self, source: ChunkSource, starts: np.ndarray, places: np.ndarray, frames: FrameReader) -> None:
        """Put the windows that start at `starts` into the rows `places`."""
        fields = source.windows.gather(starts)
        for which, rows in enumerate((fields.observation_rows, fields.next_rows)[: len(self._rest)]):
            tokens, token_masks = source.prompts(rows)
            self._put(
                self._rest[which],
                places,
                {"state": source.state(rows), "tokenized_prompt": tokens, "tokenized_prompt_mask": token_masks},
            )
            for slot in self._slots:
                camera = source.cameras[slot]
                self._masks[which][slot][places] = camera is not None
                if camera is None:
                    self._images[which][slot][places] = 0
                else:
                    frames.gather(camera, rows, self._images[which][slot], places)
        self._put(
            self._fields,
            places,
            {name: getattr(fields, name) for name in _FIELDS} | {"actions": source.actions(starts, fields)},
        )

    def chunks(self) -> ChunkBatch:
        """Return the batch, once every row has been filled."""
        return ChunkBatch(observations=self._observation(0), next_observations=self._observation(1), **self._fields)

    def imitation(self) -> PolicyBatch:
        """Return the batch without next observations."""
        return PolicyBatch(
            observations=self._observation(0),
            actions=self._fields["actions"],
            valid=self._fields["valid"],
            weight=np.ones(self._size, np.float32),
        )

    def _observation(self, which: int) -> Observation:
        return Observation(images=self._images[which], image_masks=self._masks[which], **self._rest[which])

    def _put(self, into: dict[str, np.ndarray], places: np.ndarray, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name not in into:
                into[name] = np.empty((self._size, *value.shape[1:]), value.dtype)
            into[name][places] = value
