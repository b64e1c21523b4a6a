"""Audit of the critic on held-out episodes. docs/explanation/acrlpd.md says how to read the numbers.

The frames and the random keys are chosen once: two audits of one state give the same numbers to the bit.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from rich.console import Console

from pistar.agents.base import HasCritic
from pistar.agents.critic_queries import AuditBatch, audit_queries
from pistar.data.chunk_source import ChunkSource
from pistar.data.loader import gather_chunks, to_devices
from pistar.distributed.multihost import compile_in_lockstep
from pistar.distributed.sharding import batch_sharding, replicated
from pistar.errors import UserError
from pistar.training.audit_metrics import STREAM, Values, choose_frames, summarise
from pistar.training.setup import Run

S = TypeVar("S", contravariant=True)
"""The state of the audited agent."""

OPTIMISM = 0.3
"""Fraction of the reachable range. With rewards 0 and 1, a success n steps away returns x = γⁿ; to a policy twice as
fast it is worth √x, and √x − x is never above ¼. Values further above the returns of successes are impossible."""
GROWTH = 0.1
"""Fraction of the reachable range by which the bias rises above zero over GROWING_AUDITS audits without falling once. A
critic that learns settles; one that bootstraps on its own errors does not."""
GROWING_AUDITS = 4
CLIPPED = 0.05
"""Fraction of values or targets out of range: none with a sound critic, but for errors at the edges."""
BLIND = 0.55
"""Fraction of frames whose own action beats another frame's: ½ if actions do not matter; over 200 frames hardly ever
this by chance."""
UNRANKED = 0.2
"""Rank correlation with returns: less explains less than 4 % of their order."""
GUESSING = 0.55
"""AUC: ½ is guessing."""
ENOUGH_FRAMES, ENOUGH_EPISODES = 20, 5
"""Fewer (of each kind of episode) give numbers too noisy to warn of."""
DIVERGING_REMEDY = (
    "lower the critic's learning rate, use fewer candidates or aggregation min (normal early in training)"
)
"""Remedy for a critic whose values diverge."""


class Audit(Generic[S]):
    """Evaluates the critic on the same frames every time."""

    def __init__(
        self,
        agent: HasCritic[S],
        sources: Sequence[ChunkSource],
        *,
        gamma: float,
        bounds: tuple[float, float],
        candidates: int,
        seed: int,
        frames: int,
        every: int = 1,
        batch_size: int,
        sharding: jax.sharding.NamedSharding | None = None,
    ) -> None:
        """`bounds`: minimum and maximum return. `sharding` spreads the rows of a batch over the devices of all
        hosts."""
        if frames < 1:
            raise UserError(f"audit_frames is {frames}; use 1 or more (256), or set audit_every 0 for no audit.")
        self.frames, self._bounds = choose_frames(sources, gamma, frames, seed), bounds
        self._sharding, self._every = sharding, every
        self._key = jax.random.fold_in(jax.random.key(seed), STREAM)
        self._batches = self._gather(sources, batch_size)
        self._biases: list[float] = []
        kinds = (self.frames.episode[self.frames.early & (self.frames.success == kind)] for kind in (True, False))
        self._enough_episodes = min(len(np.unique(kind)) for kind in kinds) >= ENOUGH_EPISODES

        # Every host gets all values and computes the same numbers.
        whole = None if sharding is None else replicated(sharding.mesh)
        self._ask = compile_in_lockstep("the audit", jax.jit(audit_queries(agent, candidates), out_shardings=whole))

    @staticmethod
    def of(run: Run) -> "Audit[Any] | None":
        """The audit of a run; None without a critic, without held-out episodes, or if audits are switched off."""
        config, agent = run.config, run.agent
        if not isinstance(agent, HasCritic) or not agent.config.audit_every or not run.held_out:
            return None
        return Audit(
            agent,
            run.held_out,
            gamma=agent.config.gamma,
            bounds=agent.critic.bounds,
            candidates=agent.config.candidates,
            seed=config.seed,
            frames=agent.config.audit_frames,
            every=agent.config.audit_every,
            batch_size=config.batch_size // config.gradient_accumulation,
            sharding=batch_sharding(run.mesh),
        )

    def due(self, step: int) -> bool:
        """Whether an audit is due after this many updates."""
        return step % self._every == 0

    def _gather(self, sources: Sequence[ChunkSource], batch_size: int) -> list[AuditBatch]:
        """This host's rows of all frames, in batches of one size; the last is filled up with copies."""
        frames, count = self.frames, len(self.frames.start)
        batches = -(-count // batch_size)
        devices = 1 if self._sharding is None else self._sharding.num_devices
        size = -(-count // (batches * devices)) * devices
        rows = np.minimum(np.arange(batches * size), count - 1).reshape(batches, jax.process_count(), -1)
        actions = np.concatenate(
            [
                source.actions(starts, source.windows.gather(starts))
                for source, starts in ((s, frames.start[frames.source == i]) for i, s in enumerate(sources))
                if len(starts)
            ]
        )
        prepared = []
        for mine in rows[:, jax.process_index()]:
            pieces = [
                gather_chunks(sources[i], frames.start[mine][frames.source[mine] == i])
                for i in np.unique(frames.source[mine])  # in the order of `mine`: frames are sorted by source
            ]
            chunks = jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
            prepared.append(
                AuditBatch(
                    row=mine.astype(np.int32),
                    observations=chunks.observations,
                    next_observations=chunks.next_observations,
                    actions=chunks.actions,
                    others=actions[frames.partner[mine]],
                    valid=chunks.valid,
                )
            )
        return prepared

    def run(self, state: S) -> dict[str, float]:
        """The audit's metrics of a state."""
        answers = []
        for i, batch in enumerate(self._batches):
            # One batch at a time on the devices, beside a state that fills them.
            asked = self._ask(state, to_devices(batch, self._sharding), jax.random.fold_in(self._key, i))
            answers.append(jax.device_get(asked))
        columns: dict[str, np.ndarray] = jax.tree.map(lambda *rows: np.concatenate(rows).astype(np.float64), *answers)
        # One value per frame: the copies that fill up the last batch are dropped.
        count, (_, first) = len(self.frames.start), np.unique(columns.pop("row"), return_index=True)
        values = Values(**{name: answer[first] for name, answer in columns.items()})
        answered = np.column_stack([values.data, values.shuffled, values.policy, values.ahead])
        lost = int((~np.isfinite(answered).all(axis=1)).sum())
        if lost:
            raise UserError(
                f"Q is NaN or infinite on {lost} of {count} held-out frames: the critic has diverged; lower its "
                "learning rate and resume from an earlier checkpoint."
            )
        return summarise(self.frames, values, self._bounds)

    def warn(self, found: dict[str, float], console: Console) -> None:
        """Print a line for every number that is out of its healthy range. The bias's history is lost on a resume."""
        if "audit/bias" in found:
            self._biases = [*self._biases, found["audit/bias"]][-GROWING_AUDITS:]
        for line in self._warnings(found):
            console.print(f"warning: {line}", markup=False, highlight=False)

    def _warnings(self, found: dict[str, float]) -> list[str]:
        f = {name.removeprefix("audit/"): value for name, value in found.items()}
        width = self._bounds[1] - self._bounds[0]
        known = f["frames"] - f["frames_without_return"]
        lines = []

        def warning(name: str, meaning: str) -> None:
            lines.append(f"audit/{name} is {f[name]:.3g}: {meaning}.")

        if f.get("bias_success", 0) > OPTIMISM * width:
            warning(
                "bias_success",
                f"Q is higher than the return of a policy twice as fast as the successes; {DIVERGING_REMEDY}",
            )
        grown = self._biases[-1] - max(self._biases[0], 0.0) if len(self._biases) == GROWING_AUDITS else 0.0
        if grown > GROWTH * width and self._biases == sorted(self._biases):
            warning("bias", f"Q has risen by {grown:.3g} over the last {GROWING_AUDITS} audits; {DIVERGING_REMEDY}")
        if f["q_policy_minus_data"] > OPTIMISM * width:
            warning(
                "q_policy_minus_data",
                f"Q values the policy's own chunks far above the recorded ones; {DIVERGING_REMEDY}",
            )
        for name in ("out_of_range_fraction", "target_clip_fraction"):
            if f.get(name, 0) > CLIPPED:
                warning(
                    name,
                    "values leave the range of returns; use the bounded head, or correct algorithm.return_range",
                )
        if f.get("q_shuffled_win_rate", 1) < BLIND and self.frames.whole.sum() >= ENOUGH_FRAMES:
            warning(
                "q_shuffled_win_rate",
                f"other frames' actions are valued as much as the recorded ones (drop {f['q_shuffled_drop']:.3g}), so "
                "the critic ignores actions and advantages are noise; train it longer, or on failures too",
            )
        if f.get("rank_correlation", 1) < UNRANKED and known >= ENOUGH_FRAMES:
            warning(
                "rank_correlation",
                "Q does not rise where returns do; train longer, and if it stays so, check where success comes from",
            )
        if f.get("auc_early", 1) < GUESSING and self._enough_episodes:
            warning(
                "auc_early",
                "Q does not separate successes from other episodes at their beginnings; this is normal if all begin "
                "alike, else set which ones failed (algorithm.without_success failure)",
            )
        if known == 0:
            warning(
                "frames_without_return",
                "no held-out episode ended its task, so there are no returns to compare Q with; hold out more, or say "
                "which ones failed (algorithm.without_success failure)",
            )
        return lines
