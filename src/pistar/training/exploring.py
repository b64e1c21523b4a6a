"""A policy that practises: it acts, each episode exploring in its own way, and what it looked at and did is kept.

Chunks begin where the policy really looked. What is learnt from is the true observation with the actions that came of
it, in the model's own space; of a chunk only the steps that were executed.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.agents.ript import Label, asked_by, labelled, prompts_of
from pistar.config import Pi0Config
from pistar.data.transforms import Data, Transform, stack_observations
from pistar.envs.env import Scene
from pistar.envs.rollout import Request
from pistar.models.critic import Critic
from pistar.models.pi0 import Params, bind
from pistar.models.tokenizer import PromptTokenizer
from pistar.training.acting import Judge, choose
from pistar.training.online_config import ExplorationConfig
from pistar.training.policy import check_label_fits
from pistar.types import AnyArray, Episode, Observation


@dataclasses.dataclass(frozen=True)
class Mood:
    """How one episode explores."""

    kind: str = "plain"
    noise_scale: float = 1.0
    """Of the flow's initial noise."""
    hold_noise: bool = False
    """The same noise for every chunk."""
    action_deviation: float = 0.0
    """In the model's units."""
    shift: Float[np.ndarray, " s"] | None = None
    """What the state the policy is told is off by, in the model's units."""


ZERO_NOISE = Mood("zero noise", noise_scale=0.0)
"""The policy without chance."""


def draw_mood(
    config: ExplorationConfig, rng: np.random.Generator, scene: Scene, state_dim: int, success: float | None = None
) -> Mood:
    """By the shares configured. `success`: the start state's rate so far, if it was tried."""
    c, at = config, rng.uniform()
    if c.adaptive and success is not None and c.total:
        at *= c.total if success == 0 else 1 / max(1 - success, 1e-6)
    for kind in ("held_noise", "warm_noise", "action_noise", "misled"):
        share = getattr(c, kind)
        if at < share:
            break
        at -= share
    else:
        return Mood()
    if kind == "held_noise":
        return Mood(kind, noise_scale=rng.uniform(1, c.held_noise_scale), hold_noise=True)
    if kind == "warm_noise":
        return Mood(kind, noise_scale=rng.uniform(1, c.warm_noise_scale))
    if kind == "action_noise":
        return Mood(kind, action_deviation=rng.uniform(0, c.action_noise_scale))
    things = scene.things or tuple(((number,),) for number in range(state_dim))
    shift, deviation = np.zeros(state_dim, np.float32), rng.uniform(0, c.misled_scale)
    for numbers in things[rng.integers(len(things))]:
        shift[list(numbers)] = rng.normal(0, deviation)
    return Mood(kind, shift=shift)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One look and what was decided on it."""

    step: int
    seen: Data
    """As the model reads it. The truth, whatever the policy was told."""
    noise: Float[np.ndarray, "h a"]
    """The chunk was made of."""
    chunk: Float[np.ndarray, "h a"]
    """To learn from, as the model has it, padded with zeros: as sampled, or where noise was added, as executed."""
    sent: Float[np.ndarray, "h d"]
    """The same in the robot's units, within limits."""
    version: int
    """Of the policy."""


@dataclasses.dataclass(frozen=True)
class PromptLabels:
    """Writes into prompts how good the actions are to be."""

    tokenizer: PromptTokenizer
    discrete_state: bool
    state_dim: int
    """Of the robot."""

    def check(self, prompt: str) -> None:
        """Refuse a prompt too long for its label, which would be cut off and tell nothing."""
        check_label_fits(self.tokenizer, prompt, self.state_dim if self.discrete_state else None)

    def tokens(self, prompt: str, label: Label, state: Float[np.ndarray, " a"]) -> Data:
        """What takes the place of a frame's prompt. `state` as the model has it, which π₀.₅ reads there."""
        own = state[: self.state_dim] if self.discrete_state else None
        tokens, mask = self.tokenizer.tokenize(labelled(prompt, label), own)
        return {"tokenized_prompt": tokens, "tokenized_prompt_mask": mask}

    def write(self, chunks: "Chunks", prompt: str, label: Label) -> "Chunks":
        """The same chunks with a label."""
        rows = [self.tokens(prompt, label, state) for state in np.asarray(chunks.observations.state)]
        tokens, mask = (np.stack([row[name] for row in rows]) for name in ("tokenized_prompt", "tokenized_prompt_mask"))
        return dataclasses.replace(chunks, observations=asked_by(chunks.observations, tokens, mask))


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """A policy as it acts at a time."""

    params: Params
    version: int
    """Iterations it has learnt from."""
    labels: PromptLabels | None = None
    """Asked for good actions in its prompt, if it has learnt what that means …"""
    guidance: float = 1.0
    """… and so many times as far from what it would do unasked."""
    best_of: int = 1
    """Chunks it makes up at a time …"""
    judge: Judge | None = None
    """… the best of which is done, by this critic."""

    @property
    def alone(self) -> "Behaviour":
        """Without its critic, as it will be served."""
        return dataclasses.replace(self, best_of=1, judge=None)


@dataclasses.dataclass
class Explorer:
    """Acts for up to `batch` environments at once. An episode's chance is its own, of key and number."""

    model: Pi0Config
    inputs: Transform
    outputs: Transform
    action_dim: int
    """Of the robot."""
    scene: Scene
    batch: int
    behaviour: Behaviour
    key: PRNGKeyArray
    moods: Sequence[Mood]
    """By episode."""
    flow_steps: int = 10
    first: int = 0
    """The number of the first episode asked for here: of several hosts each has some of them."""
    keep: bool = True
    """What was looked at and done, in `plans`."""
    plans: dict[int, list[Plan]] = dataclasses.field(default_factory=dict)

    def __call__(self, requests: Sequence[Request]) -> Float[np.ndarray, "b h d"]:
        """Chunks in the robot's units."""
        frames = [self.inputs(dict(request.observation)) for request in requests]
        moods = [self.moods[self.first + request.episode] for request in requests]
        told = [_misled(frame, mood) for frame, mood in zip(frames, moods, strict=True)]
        asked, unasked = told, None
        if (labels := self.behaviour.labels) is not None:
            prompts = [str(request.observation["prompt"]) for request in requests]
            asked = [
                frame | labels.tokens(prompt, "positive", frame["state"])
                for frame, prompt in zip(told, prompts, strict=True)
            ]
            unasked = told if self.behaviour.guidance != 1 else None
        rows = [0] * self.batch  # where nobody asks, somebody's question stands in
        for index, request in enumerate(requests):
            rows[request.place] = index
        judge = self.behaviour.judge
        noise, chunks = _sample(
            self.model,
            self.flow_steps,
            self.behaviour.best_of,
            None if judge is None else judge.critic,
            self.behaviour.params,
            None if judge is None else judge.params,
            stack_observations([asked[row] for row in rows]),
            None if unasked is None else stack_observations([unasked[row] for row in rows]),
            self.behaviour.guidance,
            self.key,
            np.array([self.first + requests[row].episode for row in rows], np.int32),
            np.array([-1 if moods[row].hold_noise else requests[row].step for row in rows], np.int32),
            np.array([moods[row].noise_scale for row in rows], np.float32),
        )
        noises, samples = np.asarray(noise), np.asarray(chunks)
        places = [request.place for request in requests]
        decided = zip(requests, frames, moods, noises[places], samples[places], strict=True)
        plans = [self._decide(*each) for each in decided]
        if self.keep:
            for request, plan in zip(requests, plans, strict=True):
                number = self.first + request.episode
                if request.step == 0:  # also where an episode begins again
                    self.plans[number] = []
                self.plans[number].append(plan)
        return np.stack([plan.sent for plan in plans])

    def _decide(
        self,
        request: Request,
        frame: Data,
        mood: Mood,
        noise: Float[np.ndarray, "h a"],
        chunk: Float[np.ndarray, "h a"],
    ) -> Plan:
        chunk = np.where(np.arange(chunk.shape[-1]) < self.action_dim, chunk, 0)  # padding, as in all data
        if mood.action_deviation:
            number = self.first + request.episode
            rng = np.random.default_rng([*np.asarray(jax.random.key_data(self.key)), number, request.step])
            off = rng.normal(0, mood.action_deviation, (len(chunk), self.action_dim))
            chunk = chunk + np.pad(off, ((0, 0), (0, chunk.shape[-1] - self.action_dim))).astype(chunk.dtype)
        sent = self.outputs({"state": frame["state"], "actions": chunk})["actions"]
        sent = np.clip(sent, self.scene.action_low, self.scene.action_high).astype(np.float32)
        if mood.action_deviation:
            chunk = self.inputs({**request.observation, "actions": sent})["actions"]
        return Plan(request.step, frame, noise, chunk, sent, self.behaviour.version)


def _misled(frame: Data, mood: Mood) -> Data:
    if mood.shift is None:
        return frame
    state = frame["state"].copy()
    state[..., : len(mood.shift)] += mood.shift
    return frame | {"state": state}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sample(
    config: Pi0Config,
    flow_steps: int,
    best_of: int,
    critic: Critic | None,
    params: Params,
    critic_params: Params | None,
    observation: Observation,
    unasked: Observation | None,
    guidance: float | Float[Array, ""],
    key: PRNGKeyArray,
    episodes: Int[Array, " b"],
    steps: Int[Array, " b"],
    scales: Float[Array, " b"],
) -> tuple[Float[Array, "b h a"], Float[Array, "b h a"]]:
    """The noise of each row, made of its episode and step, and the chunk that comes of it; of several the best, and the
    first one's noise."""

    def draw(episode: Int[Array, ""], step: Int[Array, ""], scale: Float[Array, ""]) -> Float[Array, "n h a"]:
        own = jax.random.fold_in(jax.random.fold_in(key, episode), step)
        return scale * jax.random.normal(own, (best_of, config.action_horizon, config.action_dim))

    noise = jax.vmap(draw)(episodes, steps, scales)
    model = bind(config, params)
    away_from = None if unasked is None else model.encode(unasked)
    asked = model.encode(observation)
    samples = model.sample(asked, noise, num_steps=flow_steps, away_from=away_from, guidance=guidance)
    return noise[:, 0], choose(critic, critic_params, observation, asked, samples)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Chunks to learn from, many at once."""

    observations: Observation
    actions: Float[AnyArray, "b h a"]
    valid: Bool[AnyArray, "b h"]
    noise: Float[AnyArray, "b h a"] | None = None
    """What each was made of, where it is as the policy put it out …"""
    version: Int[AnyArray, " b"] | None = None
    """… and by which policy."""

    def __len__(self) -> int:
        return len(self.actions)


def executed_chunks(plans: Sequence[Plan], episode: Episode, execute: int) -> Chunks:
    """What an episode was made of: each look with its chunk, and which of its steps were done."""
    length, horizon = len(episode.actions), len(plans[0].chunk)
    done = [min(execute, length - plan.step) for plan in plans]
    assert [plan.step for plan in plans] == list(range(0, length, execute)), "one look for every chunk"
    for plan, steps in zip(plans, done, strict=True):
        # Plans of another episode would be trained on without a word.
        np.testing.assert_allclose(
            episode.actions[plan.step : plan.step + steps], plan.sent[:steps], rtol=1e-4, atol=1e-5
        )
    return Chunks(
        stack_observations([plan.seen for plan in plans]),
        np.stack([plan.chunk for plan in plans]),
        np.arange(horizon) < np.array(done)[:, None],
        np.stack([plan.noise for plan in plans]),
        np.array([plan.version for plan in plans]),
    )


def stepwise_chunks(episode: Episode, inputs: Transform, horizon: int) -> Chunks:
    """A chunk from every step that was executed: what was done from there on, expressed in that step's own frame."""
    length = len(episode.actions)
    ahead = np.arange(length)[:, None] + np.arange(horizon)
    actions = episode.actions[np.minimum(ahead, length - 1)]  # past the end anything does: it is not learnt from
    prompt = np.asarray(episode.task)
    frames = [
        inputs(
            {**{name: seen[step] for name, seen in episode.observations.items()}, "prompt": prompt, "actions": chunk}
        )
        for step, chunk in enumerate(actions)
    ]
    return Chunks(stack_observations(frames), np.stack([frame["actions"] for frame in frames]), ahead < length)


def join(parts: Sequence[Chunks]) -> Chunks:
    """One after the other, to learn from; what they were made of is left behind."""

    def together(*rows: AnyArray) -> np.ndarray:
        return np.concatenate(rows)

    observations = jax.tree.map(together, *(part.observations for part in parts))
    return Chunks(observations, together(*(part.actions for part in parts)), together(*(part.valid for part in parts)))


def with_prompts_of(chunks: Chunks, parts: Sequence[Chunks]) -> Chunks:
    """The same chunks with the prompts of these, one after the other. Pictures are not copied."""
    tokens, masks = zip(*(prompts_of(part.observations) for part in parts), strict=True)
    told = asked_by(chunks.observations, np.concatenate(tokens), np.concatenate(masks))
    return dataclasses.replace(chunks, observations=told)
