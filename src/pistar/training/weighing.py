"""A dataset judged once, window by window, by a critic: after that imitation needs no critic any more.

For a large model this is the cheap way to AWR. Trained together, every update of the policy reads two observations and
samples N chunks at each; here each window is judged once, and the rest is plain imitation, in which every row counts.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Bool, Float

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.estimators import awr_weights
from pistar.config import AcrlpdConfig
from pistar.data.loader import gather_chunks, to_devices
from pistar.data.source import ChunkSource
from pistar.data.weights import write_weights
from pistar.errors import UserError
from pistar.training.config import load_config
from pistar.training.plan import abstract_state
from pistar.training.run import prepare
from pistar.training.saving import parts_of, restore
from pistar.training.sharding import over_rows, state_sharding

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Weighed:
    """What came of it, by window."""

    weights: Float[np.ndarray, " w"]
    advantages: Float[np.ndarray, " w"]
    success: Bool[np.ndarray, " w"]
    """Of the episode a window is from."""
    effective: float
    """Part of the windows: 1 if all weigh alike."""
    clipped: float
    """Part of the windows whose weight was cut."""

    def told(self) -> str:
        """In a sentence."""
        share = float(self.weights[self.success].sum() / self.weights.sum())
        return (
            f"{len(self.weights)} windows weighed: {self.effective:.0%} of them effective, {self.clipped:.1%} clipped; "
            f"successful episodes, {self.success.mean():.0%} of the windows, have {share:.0%} of the weight."
        )


def weigh(
    checkpoint: Path,
    out: Path,
    *,
    beta: float | None = None,
    clip: float | None = None,
    progress: Progress = lambda *_: None,
) -> Weighed:
    """By the critic of one of a run's checkpoints: w = min(exp(A / (β·std A)), clip) over all windows it trained on.

    A is the window's advantage over the policy of the checkpoint; β and clip are the run's own unless given.
    """
    settings = checkpoint.parent.parent / "config.yaml"
    if not checkpoint.name.isdecimal() or not settings.exists():
        raise UserError(f"{checkpoint} is no checkpoint of a run; name one in its folder: runs/NAME/checkpoints/STEP.")
    # The policy as it was when the critic judged it, and its own norm stats.
    config = dataclasses.replace(load_config(settings), checkpoint=str(checkpoint))
    if not isinstance(config.algorithm, AcrlpdConfig):
        raise UserError(f"{checkpoint} was trained by imitation, without a critic to weigh by; train one (actor none).")
    run = prepare(config)
    agent = run.agent
    assert isinstance(agent, Acrlpd)
    abstract = abstract_state(config, agent)
    where = state_sharding(abstract, run.mesh)
    sources = [part.source for part in run.loader.parts if isinstance(part.source, ChunkSource)]
    rows, key = over_rows(run.mesh), jax.random.key(config.seed)
    size, total, done = config.batch_size, sum(len(source.starts) for source in sources), 0
    ask = jax.jit(agent.advantages)
    advantages = []
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
    found = np.concatenate(advantages)
    beta = config.algorithm.beta if beta is None else beta
    made, told = awr_weights(jax.numpy.asarray(found), beta, config.algorithm.weight_clip if clip is None else clip)
    weights = np.asarray(made)
    frames = [np.zeros(len(source.windows.episodes), np.float32) for source in sources]
    begin = 0
    for source, each in zip(sources, frames, strict=True):
        each[source.starts] = weights[begin : begin + len(source.starts)]
        begin += len(source.starts)
    write_weights(out, config.data.datasets, frames)
    success = np.concatenate([source.success[source.windows.episodes[source.starts]] for source in sources])
    return Weighed(weights, found, success, float(told["ess"]), float(told["clip_rate"]))
