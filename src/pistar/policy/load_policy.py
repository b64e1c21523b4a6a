"""A checkpoint that acts: from a robot's observation to its actions, as OpenPI serves them."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pistar.agents.prompt_labels import PromptLabeller, labelled
from pistar.agents.sampling import draw_noise
from pistar.checkpoints.contract import Contract, read_contract
from pistar.checkpoints.load import load_into
from pistar.checkpoints.reader import Checkpoint, open_checkpoint
from pistar.checkpoints.writer import not_finite
from pistar.data.norm_stats import NormStats, norm_stats_hash
from pistar.data.robots import Robot, find_robot, input_transform, output_transform
from pistar.data.transforms import Data, Transform, stack_observations
from pistar.errors import UserError
from pistar.models.config import Pi0Config
from pistar.models.infer_config import MODEL_NAMES
from pistar.models.pi0 import Params, param_shapes
from pistar.models.tokenizer import TINY_TOKENIZER, PromptTokenizer, check_same_tokenizer, check_vocab, load_tokenizer
from pistar.policy.act import act
from pistar.policy.options import PolicyOptions

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A checkpoint's parameters, and the transforms around them."""

    config: Pi0Config
    params: Params
    inputs: Transform
    """From the robot's observation to the model's."""
    outputs: Transform
    """From the model's actions to the robot's."""
    robot: Robot
    num_steps: int = 10
    """Euler steps from noise to actions."""
    averaged: bool | None = None
    """Whether its checkpoint serves an average (EMA); None if that is unknown."""
    plain_inputs: Transform | None = None
    """For guidance: `inputs` without the label."""
    guidance: float = 1.0
    check_prompt: Callable[[str], None] = lambda _: None
    """Refuses instructions that would lose their label."""
    contract: Contract | None = None
    """What the checkpoint and whoever loaded it agreed on."""

    def __repr__(self) -> str:
        """One line, without the weights."""
        count = sum(param.size for param in self.params.values())
        return (
            f"Policy({MODEL_NAMES[self.config.model_type]}, robot {self.robot.name}, "
            f"chunks of {self.config.action_horizon} actions, {count:,} parameters)"
        )

    @property
    def instructions(self) -> tuple[str, ...] | None:
        """Instructions of the tasks it was trained on; None if that is unknown."""
        return None if self.contract is None else self.contract.instructions

    def act(
        self, observations: Sequence[Data], noise: Float[np.ndarray, "b *n h a"] | Float[Array, "b *n h a"]
    ) -> Float[np.ndarray, "b *n h d"]:
        """Chunks in the robot's units for a batch of its observations; n of each, if the noise has that axis."""
        if isinstance(observations, Mapping):
            raise UserError(
                "observations is one dictionary; act takes a list of them, one for each robot: "
                "policy.act([observation], policy.draw_noise(seed, 1))."
            )
        wanted = (len(observations), self.config.action_horizon, self.config.action_dim)
        if (noise.shape[0], *noise.shape[-2:]) != wanted or noise.ndim > 4:
            raise UserError(
                f"noise has shape {noise.shape} for {wanted[0]} observations; it must be "
                f"(observations, [candidates,] {wanted[1]}, {wanted[2]}), as draw_noise makes it."
            )
        observation = stack_observations([self.inputs(data) for data in observations])
        plain = None
        if self.plain_inputs is not None:
            plain = stack_observations([self.plain_inputs(data) for data in observations])
        chunks = np.asarray(
            act(
                self.config,
                self.params,
                observation,
                jnp.asarray(noise),
                steps=self.num_steps,
                plain=plain,
                guidance=self.guidance,
            )
        )
        state = np.asarray(observation.state)
        # One state for all of an observation's candidates.
        state = state if chunks.ndim == 3 else state[:, None]
        actions: np.ndarray = self.outputs({"state": state, "actions": chunks})["actions"]
        return actions

    def identity(self) -> dict[str, Any]:
        """What an evaluation records of it, see `results.Evaluation`. Reads all weights."""
        return {
            "served_average": self.averaged,
            "contract": {} if self.contract is None else self.contract.identity(),
            "weights_sha256": params_hash(self.params),
        }

    def draw_noise(self, seed: int, *batch: int) -> Float[np.ndarray, "..."]:
        """Noise for chunks of this batch shape."""
        return np.asarray(draw_noise(jax.random.key(seed), self.config, *batch))


def params_hash(params: Params) -> str:
    """SHA-256 of names, shapes, types and numbers."""
    digest = hashlib.sha256()
    for name, param in sorted(params.items()):
        digest.update(f"{name} {param.shape} {param.dtype}".encode())
        # A copy: JAX keeps the host's copy for as long as the array it was made from.
        digest.update(np.ascontiguousarray(jnp.copy(param)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def load_policy(
    path: str | Path,
    options: PolicyOptions | None = None,
    *,
    default_prompt: str | None = None,
    **changes: Any,  # noqa: ANN401  # fields of PolicyOptions
) -> Policy:
    """Load the policy of a checkpoint, in bfloat16 as OpenPI serves it.

    `changes` are fields of `PolicyOptions`: load_policy(path, robot="aloha", action_horizon=50).
    """
    options = dataclasses.replace(options or PolicyOptions(), **changes)
    with open_checkpoint(path) as checkpoint:
        contract, tokenizer = agree_contract(checkpoint, options)
        config = dataclasses.replace(contract.model, dtype="bfloat16", remat="none")
        stats = _norm_stats(checkpoint, contract.asset_id)
        served = {name: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16) for name, s in param_shapes(config).items()}  # type: ignore[no-untyped-call]
        leaves = {leaf.name: leaf.read().astype(jnp.bfloat16) for leaf in checkpoint.leaves(options.weights)}
        params, _ = load_into(served, leaves)
        averaged = checkpoint.averaged
    if broken := not_finite(params):
        raise UserError(f"{path}: {broken[0]} has NaN or Inf; the training diverged, use an earlier checkpoint.")
    robot = contract.find_robot()
    inputs = input_transform(
        robot,
        stats,
        contract.norm_kind,
        tokenizer,
        action_dim=config.action_dim,
        image_size=config.image_size,
        discrete_state=contract.prompt_format == "pi05",
        default_prompt=default_prompt,
    )
    outputs = output_transform(robot, stats, contract.norm_kind)
    policy = Policy(config, params, inputs, outputs, robot, averaged=averaged, contract=contract)
    if options.advantage == "none":
        return policy
    labeller = PromptLabeller(tokenizer, robot.state_dim if contract.prompt_format == "pi05" else None)
    return _with_label(policy, labeller, options, default_prompt)


def _with_label(policy: Policy, labeller: PromptLabeller, options: PolicyOptions, default_prompt: str | None) -> Policy:
    """The same policy with a label appended to every prompt."""
    inputs = policy.inputs

    def with_label(data: Data) -> Data:
        prompt = data.get("prompt", default_prompt)
        if prompt is None:
            return inputs(data)
        return inputs({**data, "prompt": np.asarray(labelled(str(prompt), options.advantage))})

    if default_prompt is not None:
        labeller.check(default_prompt)
    plain = inputs if options.guidance != 1 else None
    return dataclasses.replace(
        policy, inputs=with_label, plain_inputs=plain, guidance=options.guidance, check_prompt=labeller.check
    )


def agree_contract(checkpoint: Checkpoint, options: PolicyOptions) -> tuple[Contract, PromptTokenizer]:
    """The checkpoint's contract, checked against its weights, norm stats and the options; or an assumed one."""
    weights = checkpoint.model
    if checkpoint.contract is None:
        return _assume_contract(checkpoint, weights, options)
    contract = read_contract(checkpoint.contract)
    trained = {**vars(contract), "action_horizon": contract.model.action_horizon}
    for name in ("robot", "asset_id", "action_horizon", "prompt_format"):
        value = getattr(options, name)
        if value is not None and value != trained[name]:
            raise UserError(f"{name} is {value} but the policy was trained with {trained[name]}; leave it out.")
    if problems := contract.problems(weights, _norm_stats(checkpoint, contract.asset_id)):
        raise UserError(f"{checkpoint.step}: {problems[0]}.")
    return contract, _contract_tokenizer(contract, options.tokenizer)


def _camera_order(names: Sequence[str], robot: Robot, cameras: tuple[str, ...]) -> tuple[str, ...]:
    """The model's cameras in the order of a LeRobot policy's, by the robot's names or the model's own."""
    slots = {name: slot for slot, name in robot.lerobot_cameras.items()} | {slot: slot for slot in cameras}
    if unknown := [name for name in names if name not in slots]:
        logger.warning(
            "The LeRobot policy has the cameras %s, and %s has no %s; using %s in this order.",
            ", ".join(names),
            robot.name,
            ", ".join(unknown),
            ", ".join(cameras),
        )
        return cameras
    return tuple(dict.fromkeys([*(slots[name] for name in names), *cameras]))


def _assume_contract(
    checkpoint: Checkpoint, config: Pi0Config, options: PolicyOptions
) -> tuple[Contract, PromptTokenizer]:
    """A contract for OpenPI's checkpoints, which have none: from the weights, OpenPI's rules, and the options."""
    if options.robot is None:
        raise UserError(f"{checkpoint.step} has no contract.json to name its robot; give the robot, for example aloha.")
    config = dataclasses.replace(config, action_horizon=_horizon(checkpoint, config, options.action_horizon))
    asset_id = _asset_id(checkpoint, options.asset_id)
    robot, stats = find_robot(options.robot), _norm_stats(checkpoint, asset_id)
    if checkpoint.lerobot is not None:
        config = dataclasses.replace(config, cameras=_camera_order(checkpoint.lerobot.cameras, robot, config.cameras))
    for key, dim in (("state", robot.state_dim), ("actions", robot.action_dim)):
        if not stats[key].covers(dim):
            raise UserError(
                f"robot {robot.name} has {dim} numbers in its {key} but norm stats of {asset_id} have "
                f"{len(stats[key].mean)}; choose the robot the checkpoint was trained for."
            )
    tokenizer = load_tokenizer(options.tokenizer, config.max_token_len)
    check_vocab(tokenizer, config.vocab_size)
    contract = Contract(
        model=config,
        robot=robot.name,
        asset_id=asset_id,
        state_dim=robot.state_dim,
        action_dim=robot.action_dim,
        delta_mask=robot.delta_mask,
        prompt_format=options.prompt_format or config.model_type,
        tokenizer_sha256=tokenizer.sha256,
        norm_kind=checkpoint.norm,
        norm_stats_sha256=norm_stats_hash(stats),
    )
    return contract, tokenizer


def _horizon(checkpoint: Checkpoint, config: Pi0Config, given: int | None) -> int:
    if given is None:
        if not checkpoint.horizon_known:
            logger.warning(
                "No weight shows the action horizon; using OpenPI's default of %d. Give it if the policy's is another.",
                config.action_horizon,
            )
        return config.action_horizon
    if checkpoint.horizon_known and given != config.action_horizon:
        raise UserError(
            f"action_horizon is {given} but the checkpoint's settings say {config.action_horizon}; "
            "leave it out, or correct them if they are wrong."
        )
    return given


def _asset_id(checkpoint: Checkpoint, given: str | None) -> str:
    assets = list(checkpoint.norm_stats)
    asset_id = assets[0] if given is None and len(assets) == 1 else given
    if asset_id is None or asset_id not in assets:
        wanted = "none was chosen" if asset_id is None else f"asset_id is {asset_id}"
        raise UserError(
            f"{checkpoint.step} has norm stats for {', '.join(assets) or 'no robot'} and {wanted}; "
            "give the one to use (asset_id), or copy the assets folder beside params."
        )
    return asset_id


def _contract_tokenizer(contract: Contract, source: str | Path | None) -> PromptTokenizer:
    length = contract.model.max_token_len
    tiny = load_tokenizer(TINY_TOKENIZER, length)
    if source is None and tiny.sha256 == contract.tokenizer_sha256:
        return tiny  # it ships with pistar, so it need not be named
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
