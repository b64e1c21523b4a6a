"""Acting with exploration: each episode explores in its own way, and what the policy saw and did is kept.

Chunks start where the policy was queried. Learning uses the true observation with the actions that were executed, in
the model's normalised space; of a chunk only the executed steps count.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from pistar.agents.prompt_labels import PromptLabeller
from pistar.config.online import EXPLORATION, ExplorationConfig
from pistar.data.transforms import Data, Transform, stack_observations
from pistar.envs.base import Scene
from pistar.envs.rollout import Request
from pistar.models.config import Pi0Config
from pistar.models.pi0 import Params
from pistar.policy.act import act, rollout_noise
from pistar.policy.actor import fill_places
from pistar.policy.critic_selector import CriticSelector


@dataclasses.dataclass(frozen=True)
class ExplorationMode:
    """How one episode explores."""

    kind: str = "plain"
    noise_scale: float = 1.0
    """Scale of the flow's initial noise."""
    hold_noise: bool = False
    """Use the same noise for every chunk."""
    action_deviation: float = 0.0
    """Standard deviation of noise on actions, in normalised units."""
    state_offset: Float[np.ndarray, " s"] | None = None
    """Offset of the state that the policy sees, in normalised units."""


ZERO_NOISE = ExplorationMode("zero noise", noise_scale=0.0)
"""The policy without randomness."""


def draw_exploration_mode(
    config: ExplorationConfig, rng: np.random.Generator, scene: Scene, state_dim: int, success: float | None = None
) -> ExplorationMode:
    """Draw a mode by the configured fractions. `success`: the start state's success rate so far, if it was tried."""
    c, at = config, rng.uniform()
    if c.adaptive and success is not None and c.total:
        at *= c.total if success == 0 else 1 / max(1 - success, 1e-6)
    for kind in EXPLORATION:
        fraction = getattr(c, kind)
        if at < fraction:
            break
        at -= fraction
    else:
        return ExplorationMode()
    if kind == "held_noise":
        return ExplorationMode(kind, noise_scale=rng.uniform(1, c.held_noise_scale), hold_noise=True)
    if kind == "scaled_noise":
        return ExplorationMode(kind, noise_scale=rng.uniform(1, c.scaled_noise_scale))
    if kind == "action_noise":
        return ExplorationMode(kind, action_deviation=rng.uniform(0, c.action_noise_scale))
    groups = scene.state_noise_groups or tuple(((number,),) for number in range(state_dim))
    offset, deviation = np.zeros(state_dim, np.float32), rng.uniform(0, c.state_noise_scale)
    for numbers in groups[rng.integers(len(groups))]:
        offset[list(numbers)] = rng.normal(0, deviation)
    return ExplorationMode(kind, state_offset=offset)


@dataclasses.dataclass(frozen=True)
class Decision:
    """One query of the policy, and the chunk it sampled."""

    step: int
    observation: Data
    """As the model reads it: the true one, whatever the policy saw."""
    noise: Float[np.ndarray, "h a"]
    """The noise the chunk was sampled from."""
    chunk: Float[np.ndarray, "h a"]
    """To learn from, normalised and padded with zeros: as sampled, or where noise was added, as executed."""
    sent: Float[np.ndarray, "h d"]
    """The same in the robot's units, within limits."""
    version: int
    """Iterations the policy had learnt from."""


@dataclasses.dataclass(frozen=True)
class PolicySnapshot:
    """A policy as it acts in an iteration."""

    params: Params
    version: int
    """Iterations it has learnt from."""
    labeller: PromptLabeller | None = None
    """Labels its prompts as positive, if it has learnt what that means."""
    guidance: float = 1.0
    """Scale of classifier-free guidance with the label."""
    best_of: int = 1
    """Chunks sampled at a time."""
    selector: CriticSelector | None = None
    """The critic that chooses the best of them."""

    @property
    def without_critic(self) -> "PolicySnapshot":
        """As it will be served."""
        return dataclasses.replace(self, best_of=1, selector=None)


@dataclasses.dataclass
class Explorer:
    """Acts for up to `batch` environments at once. An episode's randomness derives from key and episode number."""

    model: Pi0Config
    inputs: Transform
    outputs: Transform
    action_dim: int
    """Numbers of the robot's action."""
    scene: Scene
    batch: int
    policy: PolicySnapshot
    key: PRNGKeyArray
    modes: Sequence[ExplorationMode]
    """By episode."""
    flow_steps: int = 10
    first: int = 0
    """Number of this host's first episode."""
    keep: bool = True
    """Keep what was seen and decided, in `decisions`."""
    decisions: dict[int, list[Decision]] = dataclasses.field(default_factory=dict)

    def __call__(self, requests: Sequence[Request]) -> Float[np.ndarray, "b h d"]:
        """Chunks in the robot's units."""
        frames = [self.inputs(dict(request.observation)) for request in requests]
        modes = [self.modes[self.first + request.episode] for request in requests]
        noises, chunks = self._sample(requests, frames, modes)
        decided = zip(requests, frames, modes, noises, chunks, strict=True)
        decisions = [self._decide(*each) for each in decided]
        if self.keep:
            for request, decision in zip(requests, decisions, strict=True):
                number = self.first + request.episode
                if request.step == 0:  # also where an episode is run again
                    self.decisions[number] = []
                self.decisions[number].append(decision)
        return np.stack([decision.sent for decision in decisions])

    def _sample(
        self, requests: Sequence[Request], frames: Sequence[Data], modes: Sequence[ExplorationMode]
    ) -> tuple[Float[np.ndarray, "b h a"], Float[np.ndarray, "b h a"]]:
        """The noise and the chunk of each request. With best-of-N, the first noise and the best chunk."""
        policy = self.policy
        seen = [_with_offset(frame, mode) for frame, mode in zip(frames, modes, strict=True)]
        asked, plain = seen, None
        if policy.labeller is not None:
            asked = [
                frame | policy.labeller.tokens(str(request.observation["prompt"]), "positive", frame["state"])
                for frame, request in zip(seen, requests, strict=True)
            ]
            plain = seen if policy.guidance != 1 else None
        rows = fill_places(requests, self.batch)
        noise = rollout_noise(
            self.model,
            policy.best_of,
            self.key,
            np.array([self.first + requests[row].episode for row in rows], np.int32),
            np.array([-1 if modes[row].hold_noise else requests[row].step for row in rows], np.int32),
            np.array([modes[row].noise_scale for row in rows], np.float32),
        )
        chunks = act(
            self.model,
            policy.params,
            stack_observations([asked[row] for row in rows]),
            noise if policy.selector is not None else noise[:, 0],
            steps=self.flow_steps,
            plain=None if plain is None else stack_observations([plain[row] for row in rows]),
            guidance=policy.guidance,
            selector=policy.selector,
        )
        places = [request.place for request in requests]
        return np.asarray(noise)[places, 0], np.asarray(chunks)[places]

    def _decide(
        self,
        request: Request,
        frame: Data,
        mode: ExplorationMode,
        noise: Float[np.ndarray, "h a"],
        chunk: Float[np.ndarray, "h a"],
    ) -> Decision:
        chunk = np.where(np.arange(chunk.shape[-1]) < self.action_dim, chunk, 0)  # padding is zero, as in all data
        if mode.action_deviation:
            number = self.first + request.episode
            rng = np.random.default_rng([*np.asarray(jax.random.key_data(self.key)), number, request.step])
            off = rng.normal(0, mode.action_deviation, (len(chunk), self.action_dim))
            chunk = chunk + np.pad(off, ((0, 0), (0, chunk.shape[-1] - self.action_dim))).astype(chunk.dtype)
        sent = self.outputs({"state": frame["state"], "actions": chunk})["actions"]
        sent = np.clip(sent, self.scene.action_low, self.scene.action_high).astype(np.float32)
        if mode.action_deviation:
            chunk = self.inputs({**request.observation, "actions": sent})["actions"]
        return Decision(request.step, frame, noise, chunk, sent, self.policy.version)


def _with_offset(frame: Data, mode: ExplorationMode) -> Data:
    if mode.state_offset is None:
        return frame
    state = frame["state"].copy()
    state[..., : len(mode.state_offset)] += mode.state_offset
    return frame | {"state": state}
