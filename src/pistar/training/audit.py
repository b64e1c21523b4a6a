"""What the critic knows about episodes it never learnt from. docs/acrlpd.md says how to read the numbers.

The frames are chosen once, and so are the keys: two looks at one state give the same numbers to the bit.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from rich.console import Console

from pistar.agents.acrlpd import Acrlpd, AcrlpdState
from pistar.data.loader import gather_chunks, to_devices
from pistar.data.source import ChunkSource
from pistar.errors import UserError
from pistar.training.audit_numbers import STREAM, Values, choose_frames, summarise
from pistar.training.hosts import in_step
from pistar.training.run import Run
from pistar.training.sharding import everywhere, over_rows
from pistar.types import AnyArray, Observation, pytree

S = TypeVar("S", contravariant=True)
"""The state of what is audited."""

OPTIMISM = 0.3
"""Share of the reachable range. Paid 0 or 1, a success n steps away returns x = γⁿ; to a policy twice as fast it is
worth √x, and √x − x is never above ¼. Values more than this above the returns of successes promise the impossible."""
GROWTH = 0.1
"""Share of the reachable range by which the bias has risen above zero in GROWING_LOOKS looks without falling once: a
critic that learns comes to rest, one that bootstraps on its own errors does not."""
GROWING_LOOKS = 4
CLIPPED = 0.05
"""Share of values or targets out of reach: with a sound critic none, but for errors at the edges."""
BLIND = 0.55
"""Share of frames whose own action beats another frame's: ½ if actions don't matter, and by chance over 200 frames
hardly ever this."""
UNRANKED = 0.2
"""Rank correlation with returns: less explains less than 4 % of their order."""
UNTOLD = 0.55
"""AUC: ½ is guessing."""
ENOUGH_FRAMES, ENOUGH_EPISODES = 20, 5
"""Fewer (of each kind of episode) give numbers too noisy to warn of."""
CALM = "unless it has only begun to learn, lower its learning rate, take fewer candidates, or aggregate by min"
"""What helps a critic that runs away."""


@runtime_checkable
class HasCritic(Protocol[S]):
    """What is audited."""

    def sample_candidates(
        self, state: S, observations: Observation, key: PRNGKeyArray, n: int
    ) -> Float[Array, "b n h a"]: ...

    def q_values(
        self, state: S, observations: Observation, actions: Float[Array, "b *n h a"], valid: Bool[Array, "b h"]
    ) -> Float[Array, "b *n"]: ...


@pytree
class Shown:
    """A batch of frames, as they are put to the critic."""

    row: Int[AnyArray, " b"]
    """Which frame of the audit each is: devices need not keep the order hosts are counted in."""
    observations: Observation
    next_observations: Observation
    actions: Float[AnyArray, "b h a"]
    others: Float[AnyArray, "b h a"]
    valid: Bool[AnyArray, "b h"]


def questions(agent: HasCritic[S], candidates: int) -> Callable[[S, Shown, PRNGKeyArray], dict[str, Array]]:
    """What is asked about a batch of frames, as one program."""

    def ask(state: S, shown: Shown, key: PRNGKeyArray) -> dict[str, Array]:
        here, there = jax.random.split(key)
        samples = agent.sample_candidates(state, shown.observations, here, candidates)
        chunks = jnp.concatenate([jnp.stack([shown.actions, shown.others], axis=1), samples], axis=1)
        q = agent.q_values(state, shown.observations, chunks, jnp.asarray(shown.valid))
        ahead = agent.sample_candidates(state, shown.next_observations, there, candidates)
        best = agent.q_values(state, shown.next_observations, ahead, jnp.ones_like(shown.valid)).max(axis=1)
        return {"row": jnp.asarray(shown.row), "data": q[:, 0], "shuffled": q[:, 1], "policy": q[:, 2:], "ahead": best}

    return ask


class Audit(Generic[S]):
    """Asks the critic the same questions about the same frames, whenever one wants to look."""

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
        batch_size: int,
        sharding: jax.sharding.NamedSharding | None = None,
    ) -> None:
        """`bounds`: of what returns can be. `sharding` lays the rows of a batch over the devices of all hosts."""
        if frames < 1:
            raise UserError(f"audit_frames is {frames}; look at 1 or more (256), or set audit_every 0 for no audit.")
        self.frames, self._bounds = choose_frames(sources, gamma, frames, seed), bounds
        self._sharding = sharding
        self._key = jax.random.fold_in(jax.random.key(seed), STREAM)
        self._batches = self._gather(sources, batch_size)
        self._biases: list[float] = []
        kinds = (self.frames.episode[self.frames.early & (self.frames.success == kind)] for kind in (True, False))
        self._enough_episodes = min(len(np.unique(kind)) for kind in kinds) >= ENOUGH_EPISODES

        # Every host gets all values: each of them counts alike.
        whole = None if sharding is None else everywhere(sharding.mesh)
        self._ask = in_step("the audit", jax.jit(questions(agent, candidates), out_shardings=whole))

    @staticmethod
    def of(run: Run) -> "Audit[AcrlpdState] | None":
        """A run's; nothing where there is no critic or no episode to judge it by, or where none is wanted."""
        config, agent = run.config, run.agent
        if not config.audit_every or not run.held_out or not isinstance(agent, Acrlpd):
            return None
        return Audit(
            agent,
            run.held_out,
            gamma=agent.config.gamma,
            bounds=agent.critic.bounds,
            candidates=agent.config.candidates,
            seed=config.seed,
            frames=config.audit_frames,
            batch_size=config.batch_size // config.gradient_accumulation,
            sharding=over_rows(run.mesh),
        )

    def _gather(self, sources: Sequence[ChunkSource], batch_size: int) -> list[Shown]:
        """All frames, this host's rows of them, in batches of one size; the last is filled up with copies."""
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
        shown = []
        for mine in rows[:, jax.process_index()]:
            pieces = [
                gather_chunks(sources[i], frames.start[mine][frames.source[mine] == i])
                for i in np.unique(frames.source[mine])  # in the order of `mine`: frames are sorted by source
            ]
            chunks = jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
            shown.append(
                Shown(
                    row=mine.astype(np.int32),
                    observations=chunks.observations,
                    next_observations=chunks.next_observations,
                    actions=chunks.actions,
                    others=actions[frames.partner[mine]],
                    valid=chunks.valid,
                )
            )
        return shown

    def look(self, state: S) -> dict[str, float]:
        """The numbers of a state; the same ones every time."""
        answers = []
        for i, shown in enumerate(self._batches):
            # One batch at a time on the devices, beside a state that fills them.
            asked = self._ask(state, to_devices(shown, self._sharding), jax.random.fold_in(self._key, i))
            answers.append(jax.device_get(asked))
        told: dict[str, np.ndarray] = jax.tree.map(lambda *rows: np.concatenate(rows).astype(np.float64), *answers)
        # By frame; the copies that fill up the last batch say what their frame says.
        count, (_, first) = len(self.frames.start), np.unique(told.pop("row"), return_index=True)
        values = Values(**{name: answer[first] for name, answer in told.items()})
        answered = np.column_stack([values.data, values.shuffled, values.policy, values.ahead])
        lost = int((~np.isfinite(answered).all(axis=1)).sum())
        if lost:
            raise UserError(
                f"Q is NaN or infinite on {lost} of {count} held-out frames: the critic has diverged; lower its "
                "learning rate and resume from an earlier checkpoint."
            )
        return summarise(self.frames, values, self._bounds)

    def warn(self, found: dict[str, float], console: Console) -> None:
        """One line for each thing that should not be. Remembers the bias, to see it grow; not across a resume."""
        if "audit/bias" in found:
            self._biases = [*self._biases, found["audit/bias"]][-GROWING_LOOKS:]
        for line in self._alarms(found):
            console.print(f"warning: {line}", markup=False, highlight=False)

    def _alarms(self, found: dict[str, float]) -> list[str]:
        f = {name.removeprefix("audit/"): value for name, value in found.items()}
        width = self._bounds[1] - self._bounds[0]
        known = f["frames"] - f["frames_without_return"]
        lines = []

        def alarm(name: str, meaning: str) -> None:
            lines.append(f"audit/{name} is {f[name]:.3g}: {meaning}.")

        if f.get("bias_success", 0) > OPTIMISM * width:
            alarm("bias_success", f"Q promises more than a policy twice as fast as the successes could earn; {CALM}")
        grown = self._biases[-1] - max(self._biases[0], 0.0) if len(self._biases) == GROWING_LOOKS else 0.0
        if grown > GROWTH * width and self._biases == sorted(self._biases):
            alarm("bias", f"Q has run away by {grown:.3g} over the last {GROWING_LOOKS} looks; {CALM}")
        if f["q_policy_minus_data"] > OPTIMISM * width:
            alarm("q_policy_minus_data", f"Q takes the policy's own chunks for far better than any recorded; {CALM}")
        for name in ("out_of_range_share", "target_clipped"):
            if f.get(name, 0) > CLIPPED:
                alarm(name, "values leave what returns can be; use the bounded head, or mend step_ and last_reward")
        if f.get("q_shuffled_wins", 1) < BLIND and self.frames.whole.sum() >= ENOUGH_FRAMES:
            alarm(
                "q_shuffled_wins",
                f"other frames' actions are valued as much as the recorded ones (drop {f['q_shuffled_drop']:.3g}), so "
                "the critic ignores actions and advantages are noise; train it longer, or on failures too",
            )
        if f.get("rank_correlation", 1) < UNRANKED and known >= ENOUGH_FRAMES:
            alarm(
                "rank_correlation",
                "Q does not rise where returns do; train on, and if it stays so, check where success comes from",
            )
        if f.get("auc_early", 1) < UNTOLD and self._enough_episodes:
            alarm(
                "auc_early",
                "from their beginnings Q cannot tell successes from other episodes; sound if all begin alike, else "
                "say which ones failed (data.without_success failure)",
            )
        if known == 0:
            alarm(
                "frames_without_return",
                "no held-out episode ended its task, so nothing tells what Q should be; hold out more, or say which "
                "ones failed (data.without_success failure)",
            )
        return lines
