"""How many more environment steps a second batched rollouts make than a loop over one environment.

    python benchmarks/rollouts.py [--quick]

The same policy, of the size of the preset `rl_metaworld` and fresh, acts in Meta-World's pick-place without cameras:
for 16 environments over as many processes as there are cores, one call for all of them; and for one environment in this
process, one call at a time. Both are compiled before, and measured in turn. About a minute.
"""

import argparse
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from pistar.data.norm_stats import NormStats
from pistar.data.robots import find_robot, input_transform, output_transform
from pistar.envs.env import EnvOptions, StartEnv, make_env
from pistar.envs.rollout import Clock, Request, roll_out
from pistar.envs.vector import Environments
from pistar.models.pi0 import init_params
from pistar.models.tokenizer import load_tokenizer
from pistar.presets import get_config
from pistar.training.acting import Actor
from pistar.training.policy import Policy

ENV, ENVIRONMENTS, LIMIT = "metaworld/pick-place-v3", 16, 100


def fresh_policy() -> Policy:
    """As a checkpoint's would be served."""
    model = dataclasses.replace(get_config("rl_metaworld").model, dtype="bfloat16")
    robot, tokenizer = find_robot("metaworld"), load_tokenizer("tiny", model.max_token_len)
    stats = {
        "state": NormStats(np.zeros(robot.state_dim), np.ones(robot.state_dim)),
        "actions": NormStats(np.zeros(robot.action_dim), np.ones(robot.action_dim)),
    }
    inputs = input_transform(
        robot,
        stats,
        "zscore",
        tokenizer,
        action_dim=model.action_dim,
        image_size=model.image_size,
        discrete_state=False,
    )
    params = {name: param.astype(jnp.bfloat16) for name, param in init_params(model, jax.random.key(0)).items()}
    return Policy(model, params, inputs, output_transform(robot, stats, "zscore"), robot)


def batched(envs: Environments, actor: Actor, execute: int) -> tuple[int, float, Clock]:
    """An episode of each environment: steps, seconds, and what they went to."""
    clock, since = Clock(), time.perf_counter()
    for rollout in roll_out(envs, range(ENVIRONMENTS), actor, execute=execute, clock=clock):
        assert rollout.episode is not None
    return clock.steps, time.perf_counter() - since, clock


def naive(env: StartEnv, actor: Actor, execute: int, episodes: int) -> tuple[int, float]:
    """One after the other: steps and seconds."""
    steps, since = 0, time.perf_counter()
    prompt = np.asarray(env.scene.instruction)
    for start_id in range(episodes):
        seen, _ = env.reset(options={"start_id": start_id})
        done, at = False, 0
        while not done:
            (chunk,) = actor([Request({**seen, "prompt": prompt}, start_id, at, 0)])
            for action in chunk[:execute]:
                seen, _, terminated, truncated, _ = env.step(action)
                done, at = terminated or truncated, at + 1
                if done:
                    break
        steps += at
    return steps, time.perf_counter() - since


def main() -> None:
    """Measure, print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    rounds = 2 if parser.parse_args().quick else 6
    policy, options = fresh_policy(), EnvOptions(limit=LIMIT)
    many, one = Actor(policy, ENVIRONMENTS, seed=0), Actor(policy, 1, seed=0)
    execute, env = policy.config.action_horizon, make_env(ENV, options)
    rates: dict[str, list[float]] = {"batched": [], "naive": []}
    shares: list[tuple[float, float]] = []
    with Environments(ENV, options, count=ENVIRONMENTS) as envs:
        for turn in range(rounds + 1):
            steps, seconds, clock = batched(envs, many, execute)
            alone, naive_seconds = naive(env, one, execute, episodes=4)
            if turn:  # the first one compiles
                rates["batched"].append(steps / seconds)
                rates["naive"].append(alone / naive_seconds)
                shares.append((clock.policy / seconds, clock.simulators / seconds))
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    ratio = float(np.median(np.array(rates["batched"]) / np.array(rates["naive"])))
    of_policy, of_simulators = np.median(shares, axis=0)
    result = {
        "benchmark": "rollouts",
        "steps_per_second_batched": round(medians["batched"]),
        "steps_per_second_naive": round(medians["naive"]),
        "ratio": round(ratio, 2),
        "share_policy": round(float(of_policy), 2),
        "share_simulators": round(float(of_simulators), 2),
        "share_rest": round(float(1 - of_policy - of_simulators), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
