"""Prove that a converted checkpoint holds what its source holds: compare every parameter, and run both."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pistar.checkpoints.reader import NORM_STATS_FILE, Checkpoint
from pistar.checkpoints.tensors import Leaf, WrappedLeaf
from pistar.data.norm_stats import NormStats, load_norm_stats, norm_stats_hash
from pistar.errors import UserError
from pistar.models.config import Pi0Config
from pistar.models.infer_config import config_differences
from pistar.models.pi0 import Params, bind
from pistar.types import Observation

MERGE_TOLERANCE = 1e-4
"""How much merging may change an output, as a fraction of the largest: float32 sums in another order."""
ROUNDING_TOLERANCE = 5e-2
"""How much merging and rounding to bfloat16 may change it. Rounding alone changed small models by 1e-2; adapters merged
wrongly change them by 8e-2 and more."""
_SPARE_BYTES = 2 * 10**9
_CONTAINER = Path("/sys/fs/cgroup")
"""Where Linux states a container's memory limit."""
_PROMPT_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Outputs of pistar's model with both weight sets, compared on the same inputs."""

    difference: float
    """Largest difference of any number."""
    largest: float
    """Largest number that the source put out."""
    skipped: str | None = None
    """Why the model was not run. None if it was."""

    def within(self, tolerance: float) -> bool:
        """Whether they differ by at most this fraction of the largest number. NaN does not."""
        return self.difference <= tolerance * max(self.largest, 1.0)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was compared, by name."""

    identical: tuple[str, ...]
    """Parameters that are the source's, bit for bit."""
    rounded: tuple[str, ...]
    """Parameters that are the source's, rounded, bit for bit."""
    merged: tuple[str, ...]
    """Parameters that an adapter was merged into, and that were read back bit for bit."""
    stats: tuple[str, ...]
    """Asset ids whose statistics are the source's, number for number."""
    outputs: Outputs
    """Outputs of the written weights against the source's."""
    merged_outputs: Outputs | None = None
    """Outputs of merged weights before they were rounded, if both was done."""


class Recorder:
    """Records a checksum of every parameter while it is written."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self.sums: dict[str, str] = {}
        self._total, self._progress = total, progress

    def watch(self, leaf: Leaf) -> Leaf:
        """Give the same parameter, whose checksum is recorded when its blocks have been read once."""
        return _WatchedLeaf(leaf, self)

    def note(self, name: str, checksum: str) -> None:
        """Record the checksum of one parameter."""
        self.sums[name] = checksum
        self._progress(len(self.sums), self._total)


class _WatchedLeaf(WrappedLeaf):
    def __init__(self, leaf: Leaf, recorder: Recorder) -> None:
        super().__init__(leaf)
        self._recorder = recorder

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        digest = hashlib.sha256()
        for row, block in self._leaf.blocks(whole=whole):
            digest.update(_as_bytes(block))
            yield row, block
        self._recorder.note(self.name, digest.hexdigest())


def _as_bytes(block: np.ndarray) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


def checksum(leaf: Leaf) -> str:
    """Compute the SHA-256 of a parameter's numbers, in the order of its axes."""
    digest = hashlib.sha256()
    for _, block in leaf.blocks():
        digest.update(_as_bytes(block))
    return digest.hexdigest()


def check_round_trip(
    target: Checkpoint,
    sums: Mapping[str, str],
    config: Pi0Config,
    stats: Mapping[str, Mapping[str, NormStats]],
    acts_by: str | None,
    progress: Callable[[int, int], None],
) -> None:
    """Refuse a written checkpoint unless it holds these parameters, bit for bit, and these statistics.

    `acts_by` is the asset id of the statistics that the policy uses.
    """
    bug = "nothing was written; either the disk is faulty or pistar has a bug, please report it"
    if differing := config_differences(config, target.model):
        field, ours, theirs = differing[0]
        raise UserError(f"{field} was written as {ours} and read back as {theirs}; {bug}.")
    leaves = {leaf.name: leaf for leaf in target.leaves()}
    if stray := sorted(leaves.keys() ^ sums.keys()):
        raise UserError(f"{stray[0]} is only in the {'source' if stray[0] in sums else 'target'}; {bug}.")
    for done, (name, leaf) in enumerate(leaves.items()):
        progress(done, len(leaves))
        if checksum(leaf) != sums[name]:
            raise UserError(f"{name} was read back with other numbers than were written; {bug}.")
    progress(len(leaves), len(leaves))
    assert target.step is not None  # it was just written
    for asset_id, numbers in stats.items():
        path = target.step / "assets" / asset_id / NORM_STATS_FILE
        if not path.exists() or norm_stats_hash(load_norm_stats(path)) != norm_stats_hash(numbers):
            raise UserError(f"statistics of {asset_id} were read back with other numbers than were written; {bug}.")
    # LeRobot uses the statistics of one robot, in a file of its own.
    if acts_by is not None and acts_by not in target.norm_stats:
        raise UserError(f"LeRobot's own statistics are not those of {acts_by}; {bug}.")


# --- Outputs ----------------------------------------------------------------------------------------------------------


def compare_outputs(
    before: Sequence[Leaf], before_config: Pi0Config, after: Sequence[Leaf], after_config: Pi0Config
) -> Outputs:
    """Run pistar's model in float32 with both weight sets, one after the other, on the same random inputs."""
    needed = max(_bytes_in_memory(before), _bytes_in_memory(after)) + _SPARE_BYTES
    free = _free_memory()
    if needed > free:
        return Outputs(0.0, 0.0, f"it takes {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} are free")
    ours = _outputs(before_config, before)
    largest = float(np.max([np.abs(a).max() for a in ours]))  # Python's max would ignore NaN
    if not math.isfinite(largest):
        raise UserError(
            "the source's weights put out NaN or Inf; nothing was written: `pistar verify` names weights that are NaN, "
            "--skip-outputs converts them as they are."
        )
    theirs = _outputs(after_config, after)
    return Outputs(float(np.max([np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)])), largest)


def _bytes_in_memory(leaves: Sequence[Leaf]) -> int:
    sizes = [leaf.nbytes for leaf in leaves]
    return sum(sizes) + 2 * max(sizes)


def _free_memory() -> float:
    """Count the free bytes of memory, of the host or of this container."""
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
    # The cache of files, such as those just written, is freed when memory is needed.
    kept = next((line.split()[1] for line in parts.splitlines() if line.startswith("inactive_file ")), "0")
    return free if limit == "max" else min(free, float(limit) - float(used) + float(kept))


def _outputs(config: Pi0Config, leaves: Sequence[Leaf]) -> list[np.ndarray]:
    config = dataclasses.replace(config, dtype="float32", remat="none", freeze=())
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = {leaf.name: jnp.asarray(leaf.read()) for leaf in leaves}
        return [np.asarray(out) for out in _run(config, params, *_inputs(config))]


@functools.partial(jax.jit, static_argnums=0)
def _run(config: Pi0Config, params: Params, observation: Observation, noise: Array, time: Array) -> tuple[Array, Array]:
    """Give the velocity at one time, and sampled actions."""
    model = bind(config, params)
    prefix = model.encode(observation)
    return model.velocity(prefix, noise, time, prefix.state), model.sample(prefix, noise)


def _inputs(config: Pi0Config) -> tuple[Observation, Array, Array]:
    """Make two random observations, one of them without its last camera, and noise and times."""
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
        tokenized_prompt=jnp.asarray(rng.integers(0, config.vocab_size, (batch, _PROMPT_TOKENS), np.int32)),
        tokenized_prompt_mask=jnp.asarray(
            np.arange(_PROMPT_TOKENS) < np.array([[_PROMPT_TOKENS], [_PROMPT_TOKENS // 2]])
        ),
    )
    noise = rng.standard_normal((batch, config.action_horizon, config.action_dim), np.float32)
    return observation, jnp.asarray(noise), jnp.asarray([0.3, 0.8], jnp.float32)
