"""Best-of-N: a run's critic that chooses among a policy's chunks."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pistar.agents.base import HasCritic
from pistar.agents.td_loss import best_candidate
from pistar.checkpoints.reader import Checkpoint, open_checkpoint
from pistar.config.train import RLTrainConfig, load_config
from pistar.errors import UserError
from pistar.models.critic import Critic
from pistar.models.pi0 import Params, Prefix
from pistar.types import Observation


@dataclasses.dataclass(frozen=True)
class CriticSelector:
    """A critic and its weights."""

    critic: Critic
    params: Params


def choose_best(
    critic: Critic | None,
    params: Params | None,
    observation: Observation,
    prefix: Prefix,
    samples: Float[Array, "b n h a"],
) -> Float[Array, "b h a"]:
    """The best of n chunks of each observation by the critic; without a critic, the first."""
    if critic is None or params is None:
        return samples[:, 0]
    return best_candidate(critic, params, critic.inputs(observation, prefix), samples)[0]


def run_settings(checkpoint: Checkpoint) -> RLTrainConfig | None:
    """The settings of the run a checkpoint lies in; None if it does not lie in a run's folder."""
    path = None if checkpoint.step is None else checkpoint.step.parent.parent / "config.yaml"
    return None if path is None or not path.exists() else load_config(path)


def labels_prompts(path: str | Path) -> bool | None:
    """Whether a checkpoint's run labelled prompts with advantages; None if its run is unknown."""
    with open_checkpoint(path) as checkpoint:
        try:
            settings = run_settings(checkpoint)
        except UserError:  # another program's config.yaml
            return None
    return None if settings is None else settings.algorithm.labels_prompts


def load_critic_selector(path: str | Path) -> CriticSelector:
    """The critic that a run has learnt, from one of its checkpoints."""
    with open_checkpoint(path) as checkpoint:
        settings = run_settings(checkpoint)
        if settings is None or checkpoint.train_state is None:
            raise UserError(
                f"{path} has no critic to choose by: --best-of needs a checkpoint in the run's own folder, with its "
                "train_state; leave it out, or name that one."
            )
        agent = settings.make_agent()
        if not isinstance(agent, HasCritic):
            raise UserError(f"{path} was trained without a critic to choose by; leave --best-of out.")
        leaves = {leaf.name: leaf for leaf in checkpoint.state_leaves()}
        names = jax.eval_shape(agent.critic.init, jax.random.key(0))
        params = {name: jnp.asarray(leaves[f"critic/{name}"].read()) for name in names}
    return CriticSelector(agent.critic, params)
