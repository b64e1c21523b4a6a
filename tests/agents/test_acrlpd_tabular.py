"""The critic's loss on a small corridor, whose optimal values of chunks are found by brute force."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from pistar.agents.estimators import ema, h_step_return, reachable_returns
from pistar.agents.td_loss import Transitions, compute_critic_loss
from pistar.data.windows import WindowOptions, build_windows
from pistar.models.config import CriticConfig, Head
from pistar.models.critic import Critic, CriticInput
from pistar.models.pi0 import Params
from pistar.types import Tails

# A corridor of states 1..5 between a pit (0: the task failed) and a goal (6). Actions step left or right; the reward is
# −1 per step, 0 for the step that reaches the goal, −FALL for the one into the pit. Chunks of H steps are open loop.
PIT, GOAL, FALL, GAMMA, H, LIMIT = 0, 6, 8.0, 0.9, 3, 9
CHUNKS = np.array(list(itertools.product((-1, 1), repeat=H)), np.float32)


def play(state: int, chunk: np.ndarray) -> tuple[float, int, int]:
    """The return of a chunk from a state, the state after it, and its number of steps."""
    total = 0.0
    for k, action in enumerate(chunk):
        state += int(action)
        total += GAMMA**k * {PIT: -FALL, GOAL: 0.0}.get(state, -1.0)
        if state in (PIT, GOAL):
            return total, state, k + 1
    return total, state, len(chunk)


def optimal_values() -> np.ndarray:
    """Q*(s, chunk), by value iteration."""
    q = np.zeros((GOAL + 1, len(CHUNKS)))
    for _ in range(200):
        for s in range(1, GOAL):
            for c, chunk in enumerate(CHUNKS):
                total, after, _ = play(s, chunk)
                q[s, c] = total + (0.0 if after in (PIT, GOAL) else GAMMA**H * q[after].max())
    return q[1:GOAL]


@dataclasses.dataclass(frozen=True)
class Data:
    rows: dict[str, np.ndarray]
    ends: dict[str, int]
    """Number of episodes by their end."""


@functools.cache
def data(tails: Tails) -> Data:
    """Windows of episodes of random actions, cut by the package's own code; the last observation is kept."""
    rng = np.random.default_rng(0)
    states, actions, rewards, ended, lengths = [], [], [], [], []
    ends = {"success": 0, "failure": 0, "timeout": 0}
    for _ in range(400):
        state, steps = int(rng.integers(1, GOAL)), 0
        while True:
            action = int(rng.choice((-1, 1)))
            states.append(state)
            state += action
            steps += 1
            actions.append(action)
            rewards.append({PIT: -FALL, GOAL: 0.0}.get(state, -1.0))
            ended.append(state in (PIT, GOAL))
            if ended[-1] or steps == LIMIT:
                break
        states.append(state)
        lengths.append(steps)
        ends[{PIT: "failure", GOAL: "success"}.get(state, "timeout")] += 1
    options = WindowOptions(horizon=H, critic_horizon=H, tails=tails)
    has_next = np.ones(len(lengths), bool)
    cut = build_windows(np.array(lengths), np.array(rewards, np.float32), np.array(ended), has_next, options)
    fields = cut.gather(cut.starts)
    returns, bootstrap = h_step_return(fields.rewards, fields.masks, fields.valid, gamma=GAMMA, h=H)
    rows = {
        "state": np.array(states)[fields.observation_rows],
        "next_state": np.array(states)[fields.next_rows],
        "actions": np.array(actions, np.float32)[fields.action_rows][..., None],
        "valid": fields.valid,
        "returns": returns,
        "bootstrap": np.where(fields.next_terminal, 0, bootstrap).astype(np.float32),
        "trains": fields.sequence_mask,
    }
    return Data(rows, ends)


def inputs(states: Array) -> CriticInput:
    return CriticInput(jax.nn.one_hot(states, GOAL + 1), jnp.zeros((len(states), 0)), None)


def critic_of(head: Head) -> Critic:
    config = CriticConfig(ensemble=2, hidden=(64, 64), head=head)
    bounds = reachable_returns((-1.0, -1.0), (-FALL, 0.0), GAMMA)
    return Critic(config, H, 1, state_dims=0, feature_dims=GOAL + 1, cameras=(), bounds=bounds)


@functools.cache
def learnt_values(head: Head, tails: Tails) -> np.ndarray:
    critic = critic_of(head)
    rows = jax.tree.map(jnp.asarray, data(tails).rows)
    steps, size = 400, 64
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    params = critic.init(jax.random.key(0))

    def step(carry: tuple[Params, Params, optax.OptState], key: Array) -> tuple[tuple[Params, Params, Array], Array]:
        params, target, state = carry
        draw_key, order_key, loss_key = jax.random.split(key, 3)
        which = jax.random.randint(draw_key, (size,), 0, len(rows["state"]))
        row = jax.tree.map(lambda leaf: leaf[which], rows)
        order = jax.vmap(lambda k: jax.random.permutation(k, len(CHUNKS)))(jax.random.split(order_key, size))
        batch = Transitions(
            inputs=inputs(row["state"]),
            actions=row["actions"],
            valid=row["valid"],
            returns=row["returns"],
            bootstrap=row["bootstrap"],
            next_inputs=inputs(row["next_state"]),
            candidates=jnp.asarray(CHUNKS)[order][..., None],
            trains=row["trains"],
        )
        gradient, _ = jax.grad(compute_critic_loss, argnums=1, has_aux=True)(critic, params, target, batch, loss_key)
        changes, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, changes)
        return (params, ema(target, params, 0.95), state), jnp.float32(0)

    @jax.jit
    def train(params: Params) -> Params:
        keys = jax.random.split(jax.random.key(1), steps)
        (params, _, _), _ = jax.lax.scan(step, (params, params, optimizer.init(params)), keys)
        return params

    everything = jnp.broadcast_to(jnp.asarray(CHUNKS)[None, ..., None], (GOAL - 1, *CHUNKS.shape, 1))
    return np.asarray(critic.values(train(params), inputs(jnp.arange(1, GOAL)), everything).mean(axis=0))


@pytest.mark.parametrize("head", ["bounded", "linear"])
def test_the_critic_finds_the_exact_values_of_chunked_control(head: Head) -> None:
    assert min(data("absorb").ends.values()) > 30, "success, failure and time-out all happen"
    exact = optimal_values()
    worst = np.abs(learnt_values(head, "absorb") - exact).max() / np.abs(exact).max()
    assert worst < 0.02
