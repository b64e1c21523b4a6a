"""That a converted checkpoint is the one it was made from: every parameter mapped back, and both run."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pistar.config import Pi0Config
from pistar.data.norm_stats import NormStats, load_norm_stats, norm_stats_hash
from pistar.errors import UserError
from pistar.models.inspect import config_differences
from pistar.models.pi0 import Params, bind
from pistar.training.checkpoints import NORM_STATS_FILE, Checkpoint
from pistar.training.leaves import Leaf
from pistar.types import Observation

MERGE_TOLERANCE = 1e-4
"""How far merged weights may move an output, as a part of the largest one: float32 sums in another order."""
ROUNDING_TOLERANCE = 5e-2
"""How far merged weights may move it that are rounded to bfloat16 as well. Rounding alone moved small models by 1e-2;
adapters merged wrongly move them by 8e-2 and more."""
_SPARE_BYTES = 2 * 10**9
_CONTAINER = Path("/sys/fs/cgroup")
"""Where Linux says what a container may have."""
_PROMPT = 16


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What our own model made of both weight sets on the same inputs."""

    difference: float
    """The largest, of any number it put out."""
    largest: float
    """Number it put out."""
    skipped: str | None = None
    """Why it was not run."""

    def within(self, tolerance: float) -> bool:
        """Whether they differ by no more than this part of the largest. Not a number is no agreement."""
        return self.difference <= tolerance * max(self.largest, 1.0)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was found."""

    identical: tuple[str, ...]
    """Parameters that came back bit for bit."""
    rounded: tuple[str, ...]
    """Parameters that came back bit for bit as the rounding of what was there."""
    merged: tuple[str, ...]
    """Parameters that took an adapter in, and came back bit for bit as that."""
    stats: tuple[str, ...]
    """Asset ids whose statistics came back number for number."""
    outputs: Outputs
    """Of what was written, against the source's."""
    merged_outputs: Outputs | None = None
    """Of weights that were merged and then rounded: before the rounding."""


class Recorder:
    """Keeps a checksum of every parameter that passes."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self.sums: dict[str, str] = {}
        self._total, self._progress = total, progress

    def watch(self, leaf: Leaf) -> Leaf:
        """The same parameter, to be gone through once."""
        return _WatchedLeaf(leaf, self)

    def note(self, name: str, checksum: str) -> None:
        """Of a parameter that has passed."""
        self.sums[name] = checksum
        self._progress(len(self.sums), self._total)


class _WatchedLeaf(Leaf):
    def __init__(self, leaf: Leaf, recorder: Recorder) -> None:
        self.name, self._leaf, self._recorder = leaf.name, leaf, recorder

    @property
    def shape(self) -> tuple[int, ...]:
        return self._leaf.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._leaf.dtype

    @property
    def rows_of_a_block(self) -> int:
        return self._leaf.rows_of_a_block

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        return self._leaf.read(index)

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        digest = hashlib.sha256()
        for row, block in self._leaf.blocks(whole=whole):
            digest.update(_bytes(block))
            yield row, block
        self._recorder.note(self.name, digest.hexdigest())


def _bytes(block: np.ndarray) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


def checksum(leaf: Leaf) -> str:
    """SHA-256 of a parameter's numbers in the order of its axes."""
    digest = hashlib.sha256()
    for _, block in leaf.blocks():
        digest.update(_bytes(block))
    return digest.hexdigest()


def check_came_back(
    target: Checkpoint,
    sums: Mapping[str, str],
    config: Pi0Config,
    stats: Mapping[str, Mapping[str, NormStats]],
    acts_by: str | None,
    progress: Callable[[int, int], None],
) -> None:
    """Refuse a checkpoint unless it holds these parameters, bit for bit under the same names, and these statistics;
    `acts_by`: whose of them the policy uses."""
    bug = "nothing was written; the disk is faulty or pistar is, please report it"
    if differing := config_differences(config, target.model):
        field, ours, theirs = differing[0]
        raise UserError(f"{field} went in as {ours} and came back as {theirs}; {bug}.")
    leaves = {leaf.name: leaf for leaf in target.leaves()}
    if stray := sorted(leaves.keys() ^ sums.keys()):
        raise UserError(f"{stray[0]} is there only {'before' if stray[0] in sums else 'after'}; {bug}.")
    for done, (name, leaf) in enumerate(leaves.items()):
        progress(done, len(leaves))
        if checksum(leaf) != sums[name]:
            raise UserError(f"{name} came back with other numbers than went in; {bug}.")
    progress(len(leaves), len(leaves))
    assert target.step is not None  # it was just written
    for asset_id, numbers in stats.items():
        path = target.step / "assets" / asset_id / NORM_STATS_FILE
        if not path.exists() or norm_stats_hash(load_norm_stats(path)) != norm_stats_hash(numbers):
            raise UserError(f"the statistics of {asset_id} came back with other numbers than went in; {bug}.")
    # Of several robots' LeRobot acts by one, in its own file.
    if acts_by is not None and acts_by not in target.norm_stats:
        raise UserError(f"LeRobot's own statistics are not those of {acts_by}; {bug}.")


# --- Outputs ----------------------------------------------------------------------------------------------------------


def compare_outputs(
    before: Sequence[Leaf], before_config: Pi0Config, after: Sequence[Leaf], after_config: Pi0Config
) -> Outputs:
    """Both weight sets through our own model in float32, one after the other, on the same made-up inputs."""
    needed = max(_bytes_in_memory(before), _bytes_in_memory(after)) + _SPARE_BYTES
    free = _free_memory()
    if needed > free:
        return Outputs(0.0, 0.0, f"it takes {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} are free")
    ours = _outputs(before_config, before)
    largest = float(np.max([np.abs(a).max() for a in ours]))  # Python's own max would pass over a NaN
    if not math.isfinite(largest):
        raise UserError(
            "the weights put out NaN or Inf before they are converted; nothing was written: `pistar verify` names "
            "those that are NaN, --skip-outputs takes them as they are."
        )
    theirs = _outputs(after_config, after)
    return Outputs(float(np.max([np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)])), largest)


def _bytes_in_memory(leaves: Sequence[Leaf]) -> int:
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    return sum(sizes) + 2 * max(sizes)


def _free_memory() -> float:
    """Of the host, or of what this container may have of it."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free = 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, LookupError):
        return 0.0
    try:
        limit, used, parts = (
            (_CONTAINER / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current", "stat")
        )
    except OSError:
        return free
    # What is kept of files that were read or written, such as those just now, is given up when it is needed.
    kept = next((line.split()[1] for line in parts.splitlines() if line.startswith("inactive_file ")), "0")
    return free if limit == "max" else min(free, float(limit) - float(used) + float(kept))


def _outputs(config: Pi0Config, leaves: Sequence[Leaf]) -> list[np.ndarray]:
    config = dataclasses.replace(config, dtype="float32", remat="none", freeze=())
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = {leaf.name: jnp.asarray(leaf.read()) for leaf in leaves}
        return [np.asarray(out) for out in _run(config, params, *_inputs(config))]


@functools.partial(jax.jit, static_argnums=0)
def _run(config: Pi0Config, params: Params, observation: Observation, noise: Array, time: Array) -> tuple[Array, Array]:
    """The velocity at one time, and the actions all of them lead to."""
    model = bind(config, params)
    prefix = model.encode(observation)
    return model.velocity(prefix, noise, time, prefix.state), model.sample(prefix, noise)


def _inputs(config: Pi0Config) -> tuple[Observation, Array, Array]:
    """Two observations, one of them without its last camera."""
    rng = np.random.default_rng(0)
    size, batch = config.image_size, 2
    images = {camera: rng.integers(0, 256, (batch, size, size, 3), np.uint8) for camera in config.cameras}
    seen = {camera: np.ones(batch, bool) for camera in config.cameras}
    if len(seen) > 1:
        seen[config.cameras[-1]] = np.array([True, False])
    observation = Observation(
        images={camera: jnp.asarray(image) for camera, image in images.items()},
        image_masks={camera: jnp.asarray(mask) for camera, mask in seen.items()},
        state=jnp.asarray(rng.standard_normal((batch, config.action_dim), np.float32)),
        tokenized_prompt=jnp.asarray(rng.integers(0, config.vocab_size, (batch, _PROMPT), np.int32)),
        tokenized_prompt_mask=jnp.asarray(np.arange(_PROMPT) < np.array([[_PROMPT], [_PROMPT // 2]])),
    )
    noise = rng.standard_normal((batch, config.action_horizon, config.action_dim), np.float32)
    return observation, jnp.asarray(noise), jnp.asarray([0.3, 0.8], jnp.float32)
