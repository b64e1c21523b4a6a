"""A checkpoint that acts: from a robot's observation to its actions, as OpenPI serves them."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pistar.agents.ript import Label, labelled
from pistar.config import Pi0Config
from pistar.data.norm_stats import NormStats, norm_stats_hash
from pistar.data.robots import Robot, find_robot, input_transform, output_transform
from pistar.data.transforms import Data, Transform, stack_observations
from pistar.errors import UserError
from pistar.models.inspect import ModelType
from pistar.models.pi0 import Params, bind, param_shapes
from pistar.models.tokenizer import (
    TINY_TOKENIZER,
    PromptTokenizer,
    check_same_tokenizer,
    check_vocab,
    load_tokenizer,
)
from pistar.training.checkpoint_writer import not_finite
from pistar.training.checkpoints import Checkpoint, Weights, open_checkpoint
from pistar.training.contract import Contract, read_contract
from pistar.training.loading import load_into
from pistar.types import Observation

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Parameters and the way of data through them."""

    config: Pi0Config
    params: Params
    inputs: Transform
    """From the robot's observation to the model's."""
    outputs: Transform
    """From the model's actions to the robot's."""
    robot: Robot
    """Whose they are."""
    num_steps: int = 10
    """Euler steps from noise to actions."""
    averaged: bool | None = None
    """Whether its checkpoint serves an average (EMA); None where nothing tells."""
    unasked: Transform | None = None
    """For guidance: `inputs` without the label, what to get away from …"""
    guidance: float = 1.0
    """… so many times as far as the label alone would lead."""
    check_prompt: Callable[[str], None] = lambda _: None
    """Refuses words that would lose their label."""
    contract: Contract | None = None
    """What was agreed on between its checkpoint and whoever loaded it."""

    @property
    def taught(self) -> tuple[str, ...] | None:
        """Instructions of the tasks it was taught; None where nobody has written them down."""
        return None if self.contract is None else self.contract.instructions

    def act(
        self, observations: Sequence[Data], noise: Float[np.ndarray, "b *n h a"] | Float[Array, "b *n h a"]
    ) -> Float[np.ndarray, "b *n h d"]:
        """Chunks in the robot's units for a batch of its observations; n of each, if the noise has that axis."""
        wanted = (len(observations), self.config.action_horizon, self.config.action_dim)
        if (noise.shape[0], *noise.shape[-2:]) != wanted or noise.ndim > 4:
            raise UserError(
                f"noise has shape {noise.shape} for {wanted[0]} observations; it must be "
                f"(observations, [candidates,] {wanted[1]}, {wanted[2]}), as draw_noise makes it."
            )
        observation = stack_observations([self.inputs(data) for data in observations])
        plain = None
        if self.unasked is not None:
            plain = stack_observations([self.unasked(data) for data in observations])
        actions = np.asarray(
            _sample(self.config, self.num_steps, self.params, observation, plain, self.guidance, jnp.asarray(noise))
        )
        state = np.asarray(observation.state)
        # One state for all of an observation's candidates.
        state = state if actions.ndim == 3 else state[:, None]
        robots: np.ndarray = self.outputs({"state": state, "actions": actions})["actions"]
        return robots

    def identity(self) -> dict[str, Any]:
        """What an evaluation keeps of it, see `results.Evaluation`. All weights are gone through."""
        return {
            "served_average": self.averaged,
            "contract": {} if self.contract is None else self.contract.identity(),
            "weights_sha256": params_hash(self.params),
        }

    def draw_noise(self, seed: int, *batch: int) -> Float[np.ndarray, "..."]:
        """Noise for chunks of this batch shape."""
        shape = (*batch, self.config.action_horizon, self.config.action_dim)
        return np.asarray(jax.random.normal(jax.random.key(seed), shape))


def params_hash(params: Params) -> str:
    """SHA-256 of names, shapes, types and numbers."""
    digest = hashlib.sha256()
    for name, param in sorted(params.items()):
        digest.update(f"{name} {param.shape} {param.dtype}".encode())
        # A copy: JAX keeps what came to the host for as long as the array it came of.
        digest.update(np.ascontiguousarray(jnp.copy(param)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sample(
    config: Pi0Config,
    num_steps: int,
    params: Params,
    observation: Observation,
    unasked: Observation | None,
    guidance: float | Float[Array, ""],
    noise: Array,
) -> Array:
    model = bind(config, params)
    away_from = None if unasked is None else model.encode(unasked)
    prefix = model.encode(observation)
    return model.sample(prefix, noise, num_steps=num_steps, away_from=away_from, guidance=guidance)


def load_policy(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    robot: str | None = None,
    asset_id: str | None = None,
    action_horizon: int | None = None,
    prompt_format: ModelType | None = None,
    default_prompt: str | None = None,
    weights: Weights = "serving",
    advantage: Label = "none",
    guidance: float = 1.0,
) -> Policy:
    """The policy of a checkpoint, in bfloat16 as OpenPI serves it.

    A checkpoint of ours says in its contract what it needs. OpenPI's have none: name the robot, the norm stats' asset
    id where there are several, the horizon unless it is OpenPI's 50, and the prompt format unless it is the model's own
    (OpenPI's pi05_libero leaves the state out of the prompt: "pi0").

    `advantage` is for policies that practised by `cfg`: written after every prompt, as any client of OpenPI's could, it
    asks for good actions. `guidance` goes on from what it would do unasked, as in practice: twice the work, and no
    server of OpenPI's does it.
    """
    if not np.isfinite(guidance):
        raise UserError(f"guidance is {guidance}; give a number (1 follows the label and no more).")
    if guidance != 1 and advantage == "none":
        raise UserError(f"guidance is {guidance:g} and nothing is asked for; say with advantage (positive) where to.")
    with open_checkpoint(path) as checkpoint:
        contract, prompt_tokenizer = agree_contract(
            checkpoint,
            tokenizer=tokenizer,
            robot=robot,
            asset_id=asset_id,
            action_horizon=action_horizon,
            prompt_format=prompt_format,
        )
        config = dataclasses.replace(contract.model, dtype="bfloat16", remat="none")
        stats = _norm_stats(checkpoint, contract.asset_id)
        served = {name: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16) for name, s in param_shapes(config).items()}  # type: ignore[no-untyped-call]
        params, _ = load_into(
            served, {leaf.name: leaf.read().astype(jnp.bfloat16) for leaf in checkpoint.leaves(weights)}
        )
        averaged = checkpoint.averaged
    if broken := not_finite(params):
        raise UserError(f"{path}: {broken[0]} has NaN or Inf; the training diverged, take an earlier checkpoint.")
    machine, discrete_state = contract.find_robot(), contract.prompt_format == "pi05"
    inputs = input_transform(
        machine,
        stats,
        contract.norm_kind,
        prompt_tokenizer,
        action_dim=config.action_dim,
        image_size=config.image_size,
        discrete_state=discrete_state,
        default_prompt=default_prompt,
    )
    policy = Policy(
        config,
        params,
        inputs,
        output_transform(machine, stats, contract.norm_kind),
        machine,
        averaged=averaged,
        contract=contract,
    )
    if advantage == "none":
        return policy

    def asked(data: Data) -> Data:
        prompt = data.get("prompt", default_prompt)
        return inputs(data if prompt is None else {**data, "prompt": np.asarray(labelled(str(prompt), advantage))})

    def check_prompt(prompt: str) -> None:
        check_label_fits(prompt_tokenizer, prompt, machine.state_dim if discrete_state else None)

    if default_prompt is not None:
        check_prompt(default_prompt)
    plain = inputs if guidance != 1 else None
    return dataclasses.replace(policy, inputs=asked, unasked=plain, guidance=guidance, check_prompt=check_prompt)


def check_label_fits(tokenizer: PromptTokenizer, prompt: str, state_dim: int | None) -> None:
    """Refuse a prompt too long for its label, which would be cut off and tell nothing. `state_dim` where the prompt
    holds the state, too."""
    state = None if state_dim is None else np.zeros(state_dim)
    tokens = max(len(tokenizer.encode(labelled(prompt, label), state)) for label in ("positive", "negative"))
    if tokens > tokenizer.max_len:
        raise UserError(
            f"{labelled(prompt, 'positive')!r} takes {tokens} tokens and model.max_token_len is {tokenizer.max_len}: "
            "the label would be cut off; use a model with room, or do without labels."
        )


def agree_contract(
    checkpoint: Checkpoint,
    *,
    tokenizer: str | Path | None,
    robot: str | None,
    asset_id: str | None,
    action_horizon: int | None,
    prompt_format: ModelType | None,
) -> tuple[Contract, PromptTokenizer]:
    """The checkpoint's contract, held against its weights, stats and what the user says; or what OpenPI's would say."""
    weights = checkpoint.model
    if checkpoint.contract is None:
        return _assume_contract(checkpoint, weights, tokenizer, robot, asset_id, action_horizon, prompt_format)
    contract = read_contract(checkpoint.contract)
    asked = {
        "robot": robot,
        "asset_id": asset_id,
        "action_horizon": action_horizon,
        "prompt_format": prompt_format,
    }
    trained = {**vars(contract), "action_horizon": contract.model.action_horizon}
    for name, value in asked.items():
        if value is not None and value != trained[name]:
            raise UserError(f"{name} is {value} but the policy was trained with {trained[name]}; leave it out.")
    if problems := contract.problems(weights, _norm_stats(checkpoint, contract.asset_id)):
        raise UserError(f"{checkpoint.step}: {problems[0]}.")
    return contract, _contract_tokenizer(contract, tokenizer)


def _in_order(names: Sequence[str], robot: Robot, cameras: tuple[str, ...]) -> tuple[str, ...]:
    """The model's cameras in the order in which LeRobot's policy has them, by the robot's names or the model's own."""
    slots = {name: slot for slot, name in robot.lerobot_cameras.items()} | {slot: slot for slot in cameras}
    if strangers := [name for name in names if name not in slots]:
        logger.warning(
            "LeRobot's policy has the cameras %s, and %s knows no %s; taking %s in this order.",
            ", ".join(names),
            robot.name,
            ", ".join(strangers),
            ", ".join(cameras),
        )
        return cameras
    return tuple(dict.fromkeys([*(slots[name] for name in names), *cameras]))


def _assume_contract(
    checkpoint: Checkpoint,
    config: Pi0Config,
    tokenizer: str | Path | None,
    robot: str | None,
    asset_id: str | None,
    action_horizon: int | None,
    prompt_format: ModelType | None,
) -> tuple[Contract, PromptTokenizer]:
    """For OpenPI's checkpoints, which have none: from the weights, OpenPI's rules, and the user."""
    if robot is None:
        raise UserError(f"{checkpoint.step} has no contract.json to name its robot; give the robot, for example aloha.")
    if action_horizon is None and not checkpoint.horizon_known:
        logger.warning(
            "No weight shows the action horizon; taking OpenPI's default of %d. Give it if the policy's is another.",
            config.action_horizon,
        )
    if action_horizon is not None:
        if checkpoint.horizon_known and action_horizon != config.action_horizon:
            raise UserError(
                f"action_horizon is {action_horizon} but the checkpoint's settings say {config.action_horizon}; "
                "leave it out, or mend them if they are wrong."
            )
        config = dataclasses.replace(config, action_horizon=action_horizon)
    assets = list(checkpoint.norm_stats)
    if asset_id is None and len(assets) == 1:
        asset_id = assets[0]
    if asset_id not in assets:
        wanted = "none was chosen" if asset_id is None else f"asset_id is {asset_id}"
        raise UserError(
            f"{checkpoint.step} has norm stats for {', '.join(assets) or 'no robot'} and {wanted}; "
            "give the one to use (asset_id), or copy the assets folder beside params."
        )
    machine, stats = find_robot(robot), _norm_stats(checkpoint, asset_id)
    if checkpoint.lerobot is not None:
        config = dataclasses.replace(config, cameras=_in_order(checkpoint.lerobot.cameras, machine, config.cameras))
    for key, dim in (("state", machine.state_dim), ("actions", machine.action_dim)):
        if not stats[key].covers(dim):
            raise UserError(
                f"robot {robot} has {dim} numbers in its {key} but norm stats of {asset_id} have "
                f"{len(stats[key].mean)}; choose the robot the checkpoint was trained for."
            )
    prompt_tokenizer = load_tokenizer(tokenizer, config.max_token_len)
    check_vocab(prompt_tokenizer, config.vocab_size)
    contract = Contract(
        model=config,
        robot=robot,
        asset_id=asset_id,
        state_dim=machine.state_dim,
        action_dim=machine.action_dim,
        delta_mask=machine.delta_mask,
        prompt_format=prompt_format or config.model_type,
        tokenizer_sha256=prompt_tokenizer.sha256,
        norm_kind=checkpoint.norm,
        norm_stats_sha256=norm_stats_hash(stats),
    )
    return contract, prompt_tokenizer


def _contract_tokenizer(contract: Contract, source: str | Path | None) -> PromptTokenizer:
    length = contract.model.max_token_len
    tiny = load_tokenizer(TINY_TOKENIZER, length)
    if source is None and tiny.sha256 == contract.tokenizer_sha256:
        return tiny  # ships with us, so nobody has to name it
    tokenizer = load_tokenizer(source, length)
    check_same_tokenizer(tokenizer, contract.tokenizer_sha256)
    return tokenizer


def _norm_stats(checkpoint: Checkpoint, asset_id: str) -> dict[str, NormStats]:
    if asset_id not in checkpoint.norm_stats:
        raise UserError(
            f"{checkpoint.step or checkpoint.params} has no assets/{asset_id}/norm_stats.json, without which actions "
            "come out in the wrong units; copy the training run's assets folder beside params."
        )
    return checkpoint.read_norm_stats(asset_id)
