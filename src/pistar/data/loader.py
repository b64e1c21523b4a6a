"""Batches of windows, each a pure function of (seed, step): resume is exact and any step can be looked at again.

Every host draws the whole batch and gathers its own part of it, so a run on other hosts sees the same batches.
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

from pistar.data.chunks import WindowFields, Windows
from pistar.data.norm_stats import norm_stats_hash
from pistar.data.source import ChunkSource, Pictures
from pistar.errors import UserError
from pistar.types import ChunkBatch, Observation, PolicyBatch

T = TypeVar("T")

ALIGNMENT = 64
"""Bytes. Memory that begins at a multiple of this becomes a CPU device's array without a copy."""


@runtime_checkable
class Growing(Protocol):
    """A source whose episodes come in while one trains, such as a replay buffer."""

    def source(self) -> ChunkSource | None:
        """What there is by now, which does not change any more; None while it is too little to draw from."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One of the things a batch is mixed from."""

    source: ChunkSource | Growing
    weight: float = 1.0
    """Its share of each batch is this over the sum of all. Shares are kept batch by batch, not on average."""


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    """Draw from a few episodes at a time, so that only their pictures need to be in memory."""

    episodes: int
    """In a pool. More mix better; about twice as many are in memory."""
    reuse: float = 1.0
    """How often each of a pool's windows is drawn, on average, before the next pool's turn."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise UserError(f"pool.episodes is {self.episodes}; a pool has at least 1 (32 or more mix well).")
        if not 0 < self.reuse < float("inf"):
            raise UserError(f"pool.reuse is {self.reuse}; windows are drawn more than 0 times (1 is once a pass).")


class Loader:
    """Draws batches from one source, or from several mixed."""

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
        """`mixture`: what each batch is drawn from. `batch_size` is that of all hosts together. `pool` is for parts
        that do not grow. `sharding` lays the rows of `batches` over the devices of all hosts. Up to `ahead` batches are
        made by `workers` threads before they are asked for.
        """
        parts = [part if isinstance(part, Part) else Part(part) for part in mixture]
        if not parts:
            raise UserError("There is nothing to draw from; give the loader at least one dataset.")
        if not 0 <= host < hosts:
            raise UserError(f"host is {host} of {hosts}; hosts count from 0.")
        if workers < 1 or ahead < 0:
            raise UserError(
                f"{workers} workers make {ahead} batches ahead; give at least 1 worker, and 0 or more ahead."
            )
        if batch_size < 1 or batch_size % hosts:
            raise UserError(
                f"batch_size is {batch_size}; it must be a positive multiple of the number of hosts, {hosts}: "
                f"try {max(1, round(batch_size / hosts)) * hosts}."
            )
        if any(not 0 <= part.weight < float("inf") for part in parts) or sum(part.weight for part in parts) <= 0:
            weights = [part.weight for part in parts]
            raise UserError(f"The weights of the mixture are {weights}; give shares from 0 up, not all of them 0.")
        if not 0 <= seed < 2**63:
            raise UserError(f"seed is {seed}; give a whole number from 0 up, below 2⁶³.")
        self.parts, self.batch_size, self._seed, self._host, self._hosts = tuple(parts), batch_size, seed, host, hosts
        self._sharding, self._ahead, self._workers = sharding, ahead, workers
        self._memory = _Memory()
        fixed = [part.source for part in parts if isinstance(part.source, ChunkSource)]
        for source in fixed:
            if not len(source.starts):
                raise UserError("A dataset of the mixture has no window to draw; give it episodes, or leave it out.")
            _check_alike(fixed[0], source)
        total = sum(part.weight for part in parts)
        self._pools: dict[int, _PoolSchedule] = {
            id(part.source): _PoolSchedule.of(part.source, pool, seed, batch_size * part.weight / total)
            for part in parts
            if pool is not None and isinstance(part.source, ChunkSource) and part.weight > 0
        }

    def sample_batch(self, step: int) -> ChunkBatch:
        """The batch of that step, this host's rows of it, as numpy. Also of steps long gone or far ahead."""
        return self._sample(step, self._contents(), with_next=True).chunks()

    def sample_policy_batch(self, step: int) -> PolicyBatch:
        """The same windows for those who only imitate: without what they lead to, which is half of the work."""
        return self._sample(step, self._contents(), with_next=False).to_imitate()

    def batches(self, start: int, stop: int | None = None) -> Iterator[ChunkBatch]:
        """Batches from step `start` to before `stop`, on the devices, made ahead in the background.

        What has grown since the call is left out, lest a batch depend on how fast it was made.
        """
        contents = self._contents()
        return self._prefetch(lambda step: self._sample(step, contents, with_next=True).chunks(), start, stop)

    def policy_batches(self, start: int, stop: int | None = None) -> Iterator[PolicyBatch]:
        """As `batches`, of `sample_policy_batch`."""
        contents = self._contents()
        return self._prefetch(lambda step: self._sample(step, contents, with_next=False).to_imitate(), start, stop)

    def _prefetch(self, make: Callable[[int], T], start: int, stop: int | None) -> Iterator[T]:
        steps = itertools.count(start) if stop is None else iter(range(start, stop))
        executor = ThreadPoolExecutor(self._workers, thread_name_prefix="loader")
        try:
            made: deque[Future[T]] = deque()
            while True:
                wanted = itertools.islice(steps, self._ahead + 1 - len(made))
                made.extend(
                    executor.submit(lambda step: to_devices(make(step), self._sharding), step) for step in wanted
                )
                if not made:
                    return
                yield made.popleft().result()
        finally:
            executor.shutdown(cancel_futures=True)

    def _contents(self) -> list[tuple[ChunkSource, float]]:
        """What can be drawn from now, and its share."""
        there = [
            (source, part.weight)
            for part in self.parts
            if (source := part.source if isinstance(part.source, ChunkSource) else part.source.source()) is not None
        ]
        if sum(weight for _, weight in there) <= 0:
            raise UserError("Nothing has been collected yet; collect more episodes before the first batch is drawn.")
        for source, _ in there:
            _check_alike(there[0][0], source)
        return there

    def _sample(self, step: int, contents: Sequence[tuple[ChunkSource, float]], *, with_next: bool) -> "_Filling":
        rng = generator(self._seed, step)
        places = rng.permutation(self.batch_size)  # so that any part of a batch is mixed alike
        ends = _shares([weight for _, weight in contents], self.batch_size, float(rng.random()))
        size = self.batch_size // self._hosts
        batch = _Filling(contents[0][0], size, self._memory, with_next=with_next)
        for (source, _), begin, end in zip(contents, (0, *ends), ends, strict=False):
            if end == begin:
                continue
            schedule = self._pools.get(id(source))
            turn = None if schedule is None else schedule.turn(step)
            if turn is None:
                drawn = source.draw(rng, end - begin)
            else:
                drawn = turn.starts[rng.integers(len(turn.starts), size=end - begin)]
            here = places[begin:end] - self._host * size
            ours = (here >= 0) & (here < size)
            if turn is None:
                pictures = source.pictures.view(source.episodes, np.zeros(0, np.int64), source)
            else:
                pictures = source.pictures.view(turn.episodes, turn.upcoming, source)
            if ours.any():
                batch.fill(source, drawn[ours], here[ours], pictures)
        return batch


def gather_chunks(source: ChunkSource, starts: Int[np.ndarray, " b"]) -> ChunkBatch:
    """The windows that start there, in this order, as numpy."""
    batch = _Filling(source, len(starts), _Memory(), with_next=True)
    once = source.select(np.unique(source.windows.episodes[starts]))  # whose claim on the pictures ends with it
    pictures = source.pictures.view(once.episodes, np.zeros(0, np.int64), once)
    batch.fill(source, starts, np.arange(len(starts)), pictures)
    return batch.chunks()


def to_devices(batch: T, sharding: jax.sharding.Sharding | None = None) -> T:
    """As device arrays; with a sharding, this host's rows as part of arrays over all hosts."""
    if sharding is None:
        return jax.device_put(batch)  # type: ignore[no-any-return]
    moved: T = jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)  # type: ignore[no-untyped-call]
    return moved


def _check_alike(one: ChunkSource, other: ChunkSource) -> None:
    """Windows of one batch must mean the same."""
    if one.fps != other.fps:
        raise UserError(
            f"The datasets of the mixture have {one.fps:g} and {other.fps:g} frames a second; a chunk would last "
            "longer in one than in the other: bring them to one rate."
        )
    if one.windows.options != other.windows.options:
        raise UserError(
            f"The datasets of the mixture are cut differently ({one.windows.options}, {other.windows.options}); "
            "cut all of them alike."
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
    """Where each part of a batch ends. Exact when the shares are whole numbers, else so on average over `offset`."""
    edges = np.cumsum(weights) / np.sum(weights) * count
    # Edges a rounding error below a whole number must not lose a row.
    ends = np.floor(np.round(edges, 9) + offset * (np.round(edges, 9) % 1 > 0))
    return (*(int(end) for end in ends[:-1]), count)


def generator(seed: int, step: int) -> np.random.Generator:
    """Random numbers that depend on these two alone."""
    # As integers: numpy makes floats of large ones in a list, and of neighbours the same.
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))


# Taking turns


@dataclasses.dataclass(frozen=True, eq=False)
class _Turn:
    """One pool."""

    episodes: Int[np.ndarray, " e"]
    starts: Int[np.ndarray, " s"]
    upcoming: Int[np.ndarray, " f"]
    """The episodes of the pool after this one."""


class _PoolSchedule:
    """Which episodes are drawn from at a step: all of them in turn, in another order in each pass."""

    def __init__(self, windows: Windows, starts: np.ndarray, size: int, pass_steps: int, seed: int) -> None:
        self._windows, self._starts, self._size = windows, starts, size
        self._pass_steps, self._seed = pass_steps, seed
        self._episodes, self._counts = np.unique(windows.episodes[starts], return_counts=True)
        self._turns: dict[tuple[int, int], _Turn] = {}

    @classmethod
    def of(cls, source: ChunkSource, options: PoolOptions, seed: int, drawn_per_step: float) -> "_PoolSchedule":
        pools = -(-len(source.episodes) // options.episodes)
        steps = max(pools, round(options.reuse * len(source.starts) / drawn_per_step))
        return cls(source.windows, source.starts, options.episodes, steps, seed)

    def turn(self, step: int) -> _Turn:
        """The pool of that step. Its steps are in proportion to its windows, so that all are drawn alike."""
        number, offset = divmod(step, self._pass_steps)
        pools, ends = self._pass(number)
        index = int(np.searchsorted(ends, offset, side="right"))
        key = (number, index)
        if key not in self._turns:
            upcoming = pools[index + 1] if index + 1 < len(pools) else self._pass(number + 1)[0][0]
            mask = np.isin(self._windows.episodes[self._starts], pools[index])
            self._turns = {k: t for k, t in self._turns.items() if k[0] >= number - 1} | {
                key: _Turn(pools[index], self._starts[mask], upcoming)
            }
        return self._turns[key]

    def _pass(self, number: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The pools of one pass over all episodes, and at which of its steps each ends."""
        order = generator(self._seed, 2**63 + number).permutation(len(self._episodes))
        groups = [order[i : i + self._size] for i in range(0, len(order), self._size)]
        windows = np.cumsum([int(self._counts[group].sum()) for group in groups])
        ends = np.round(windows / windows[-1] * self._pass_steps).astype(np.int64)
        return [np.sort(self._episodes[group]) for group in groups], ends


# Filling


class _Memory:
    """Arrays for batches, given back when the last one who uses a batch, be it a device, lets go of it.

    Fresh memory costs several times what filling it does: the kernel clears it page by page.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def array(self, shape: tuple[int, ...]) -> np.ndarray:
        """Of uint8, with anything in it."""
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
    """Arrays made of it keep it alive."""

    def __init__(self, memory: np.ndarray, free: list[np.ndarray]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


class _Filling:
    """A batch in the making."""

    def __init__(self, like: ChunkSource, size: int, memory: _Memory, *, with_next: bool) -> None:
        self._size = size
        pixels = (size, like.inputs.image_size, like.inputs.image_size, 3)
        self._slots = list(like.cameras)
        moments = range(1 + with_next)  # before, and after
        self._images = [{slot: memory.array(pixels) for slot in self._slots} for _ in moments]
        self._masks = [{slot: np.empty(size, bool) for slot in self._slots} for _ in moments]
        self._rest: list[dict[str, np.ndarray]] = [{} for _ in moments]
        self._fields: dict[str, np.ndarray] = {}

    def fill(self, source: ChunkSource, starts: np.ndarray, places: np.ndarray, pictures: Pictures) -> None:
        """Put the windows that start there at these places."""
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
                    pictures.gather(camera, rows, self._images[which][slot], places)
        self._put(
            self._fields,
            places,
            {name: getattr(fields, name) for name in FIELDS} | {"actions": source.actions(starts, fields)},
        )

    def chunks(self) -> ChunkBatch:
        """The batch, once every place has been filled."""
        return ChunkBatch(observations=self._observation(0), next_observations=self._observation(1), **self._fields)

    def to_imitate(self) -> PolicyBatch:
        """The batch without what the windows lead to."""
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


FIELDS = tuple(field.name for field in dataclasses.fields(WindowFields) if not field.name.endswith("_rows"))
"""What windows and batches have in common."""
