"""How many more environment steps a second batched rollouts make than a loop over one environment.

    python benchmarks/rollouts.py [--quick]

The same fresh policy acts in Meta-World's pick-place without cameras: for 16 environments over as many processes as
there are cores, one call for all of them; and for one environment in this process, one call at a time. Both are
compiled before and measured in turn, for about as long; of each the quickest round counts, since whatever else the
machine does only slows them down. `ratio_by_cpu` is what the ratio would be if no other program ran: of processor time
along the longest way, the busiest worker's and this process's. A minute or two.

Simulators gain by the number of cores and no more, the policy by its batch. So the ratio is told for two policies: of
the sizes of OpenPI's smallest Gemma, `dummy` (four layers), and of the preset `rl_metaworld` (one layer), which is so
small that the simulator is nearly all there is and two cores cannot give more than about two.
"""

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pistar.config import GemmaConfig, Pi0Config
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

ENV, ENVIRONMENTS, LIMIT, ALONE = "metaworld/pick-place-v3", 16, 100, 8


_PRESET = get_config("rl_metaworld").model
_DUMMY = GemmaConfig(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16)
POLICIES = {"dummy": dataclasses.replace(_PRESET, vlm=_DUMMY, expert=_DUMMY), "rl_metaworld": _PRESET}


def fresh_policy(model: Pi0Config) -> Policy:
    """As a checkpoint's would be served."""
    model = dataclasses.replace(model, dtype="bfloat16")
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


@dataclasses.dataclass(frozen=True)
class Round:
    """How long so many steps took, and the processor time on the longest way through them."""

    steps: int
    seconds: float
    cpu_seconds: float
    clock: Clock

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.seconds


def batched(envs: Environments, actor: Actor, execute: int) -> Round:
    """An episode of each environment. While this process is busy workers wait, and while they are it waits."""
    before, here, clock, since = worker_seconds(envs), time.process_time(), Clock(), time.perf_counter()
    for rollout in roll_out(envs, range(ENVIRONMENTS), actor, execute=execute, clock=clock):
        assert rollout.episode is not None
    seconds, busiest = time.perf_counter() - since, max(np.subtract(worker_seconds(envs), before))
    return Round(clock.steps, seconds, busiest + time.process_time() - here, clock)


def worker_seconds(envs: Environments) -> list[float]:
    """Processor time of each worker so far."""
    stats = (Path(f"/proc/{worker.process.pid}/stat").read_text() for worker in envs._workers)
    times = (stat.rpartition(")")[2].split()[11:13] for stat in stats)  # user's and system's, after the name
    return [(int(user) + int(system)) / os.sysconf("SC_CLK_TCK") for user, system in times]


def naive(env: StartEnv, actor: Actor, execute: int) -> Round:
    """One episode after the other."""
    steps, here, since = 0, time.process_time(), time.perf_counter()
    prompt = np.asarray(env.scene.instruction)
    for start_id in range(ALONE):
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
    return Round(steps, time.perf_counter() - since, time.process_time() - here, Clock())


def main() -> None:
    """Measure, print a JSON line for each policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    rounds = 3 if parser.parse_args().quick else 10
    for name, model in POLICIES.items():
        print(json.dumps({"benchmark": "rollouts", "policy": name, **measure(fresh_policy(model), rounds)}))


def measure(policy: Policy, rounds: int) -> dict[str, float]:
    """Both ways in turn, so many times."""
    options = EnvOptions(limit=LIMIT)
    many, one = Actor(policy, ENVIRONMENTS, seed=0), Actor(policy, 1, seed=0)
    execute, env = policy.config.action_horizon, make_env(ENV, options)
    together: list[Round] = []
    alone: list[Round] = []
    with Environments(ENV, options, count=ENVIRONMENTS) as envs:
        for _ in range(rounds + 1):
            together.append(batched(envs, many, execute))
            alone.append(naive(env, one, execute))
    quickest, quickest_alone = (max(each[1:], key=lambda a: a.rate) for each in (together, alone))  # the first compiles
    of_cpu = [b.cpu_seconds / b.steps / (a.cpu_seconds / a.steps) for a, b in zip(together[1:], alone[1:], strict=True)]
    clock, seconds = quickest.clock, quickest.seconds
    return {
        "steps_per_second_batched": round(quickest.rate),
        "steps_per_second_naive": round(quickest_alone.rate),
        "ratio": round(quickest.rate / quickest_alone.rate, 2),
        "ratio_by_cpu": round(float(np.median(of_cpu)), 2),
        "share_policy": round(clock.policy / seconds, 2),
        "share_simulators": round(clock.simulators / seconds, 2),
        "share_rest": round(1 - (clock.policy + clock.simulators) / seconds, 2),
    }


if __name__ == "__main__":
    main()
