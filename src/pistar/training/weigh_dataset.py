"""Weigh every window of a dataset once by a critic's advantage; after that imitation needs no critic.

For a large model this is the cheap way to AWR. Trained together, every update of the policy reads two observations and
samples N chunks at each; here each window is valued once, and the rest is plain imitation, in which every row counts.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Bool, Float

from pistar.agents.base import HasCritic, abstract_state
from pistar.agents.estimators import awr_weights
from pistar.checkpoints.manager import parts_of, restore
from pistar.config.train import load_config
from pistar.data.chunk_source import ChunkSource
from pistar.data.loader import gather_chunks, to_devices
from pistar.data.window_weights import write_weights
from pistar.distributed.sharding import batch_sharding, state_sharding
from pistar.errors import UserError
from pistar.training.run_folder import CONFIG_FILE
from pistar.training.setup import Run, prepare

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class WeighedWindows:
    """Weights and advantages by window."""

    weights: Float[np.ndarray, " w"]
    advantages: Float[np.ndarray, " w"]
    success: Bool[np.ndarray, " w"]
    """Whether the window's episode succeeded."""
    effective: float
    """Effective fraction of the windows: 1 if all weigh the same."""
    clipped: float
    """Fraction of the windows whose weight was clipped."""

    def summary(self) -> str:
        """One sentence."""
        share = float(self.weights[self.success].sum() / self.weights.sum())
        return (
            f"{len(self.weights)} windows weighed: {self.effective:.0%} of them effective, {self.clipped:.1%} clipped; "
            f"successful episodes, {self.success.mean():.0%} of the windows, have {share:.0%} of the weight."
        )


def weigh_dataset(
    checkpoint: Path,
    out: Path,
    *,
    beta: float | None = None,
    clip: float | None = None,
    progress: Progress = lambda *_: None,
) -> WeighedWindows:
    """Write w = min(exp(A / (β·std A)), clip) of every window the run trained on, by its critic.

    A is the window's advantage over the checkpoint's policy; β and clip are the run's own unless given.
    """
    settings = checkpoint.parent.parent / CONFIG_FILE
    if not checkpoint.name.isdecimal() or not settings.exists():
        raise UserError(f"{checkpoint} is no checkpoint of a run; name one in its folder: runs/NAME/checkpoints/STEP.")
    # Start from the checkpoint itself: its policy as the critic valued it, and its own norm stats.
    config = dataclasses.replace(load_config(settings), checkpoint=str(checkpoint))
    if not isinstance(agent := config.make_agent(), HasCritic):
        raise UserError(f"{checkpoint} was trained without a critic to weigh by; train one (algorithm.actor none).")
    run = prepare(config)
    sources = [part.source for part in run.loader.parts if isinstance(part.source, ChunkSource)]
    advantages = _advantages(run, checkpoint, sources, progress)
    beta = agent.config.beta if beta is None else beta
    clip = agent.config.weight_clip if clip is None else clip
    computed, metrics = awr_weights(jax.numpy.asarray(advantages), beta, clip)
    weights = np.asarray(computed)
    by_frame = [np.zeros(len(source.windows.episodes), np.float32) for source in sources]
    begin = 0
    for source, frames in zip(sources, by_frame, strict=True):
        frames[source.starts] = weights[begin : begin + len(source.starts)]
        begin += len(source.starts)
    write_weights(out, config.data.datasets, by_frame)
    success = np.concatenate([source.success[source.windows.episodes[source.starts]] for source in sources])
    effective, clipped = (float(metrics[name]) for name in ("actor/ess", "actor/weight_clip_fraction"))
    return WeighedWindows(weights, advantages, success, effective, clipped)


def _advantages(run: Run, checkpoint: Path, sources: list[ChunkSource], progress: Progress) -> Float[np.ndarray, " w"]:
    """The advantage of every window, source by source."""
    agent, size = run.agent, run.config.batch_size
    assert isinstance(agent, HasCritic)
    abstract = abstract_state(agent)
    where, rows, key = state_sharding(abstract, run.mesh), batch_sharding(run.mesh), jax.random.key(run.config.seed)
    total, done, advantages = sum(len(source.starts) for source in sources), 0, []
    ask = jax.jit(agent.advantages)
    with jax.set_mesh(run.mesh):
        state, _ = restore(checkpoint.parent, int(checkpoint.name), abstract, where, lambda s: parts_of(agent, s))
        for source in sources:
            for begin in range(0, len(source.starts), size):
                starts = source.starts[begin : begin + size]
                whole = np.resize(starts, size)  # one shape for all: the last batch is filled up with copies
                batch = to_devices(gather_chunks(source, whole), rows)
                advantages.append(np.asarray(ask(state, batch, jax.random.fold_in(key, done)))[: len(starts)])
                done += len(starts)
                progress(done, total)
    return np.concatenate(advantages)
