"""How many more environment steps a second batched rollouts make than a loop over one environment.

    python benchmarks/rollouts.py [--quick]

The same fresh policy acts in Meta-World's pick-place without cameras. Batched: 16 environments over as many processes
as there are cores; one call of the policy serves half of them while the other half acts. Naive: one environment in this
process and one call at a time, measured twice: in Meta-World as it is installed, which is the obvious program, and in
the leaner simulator that the batched rollouts use, which shows the gain of batching alone. Each printed line describes
what its numbers measure. All are compiled first and measured in turn, for about as long. Of each the fastest round
counts, since other work on the machine only slows them down. Every round has its own start states; those of Meta-World
as installed are drawn before its clock starts, as its own lists of tasks are. Takes a few minutes.

Simulators gain at most the number of cores; the policy gains by its batch and by computing while they act. Reported for
two policies: one of the size of OpenPI's smallest Gemma, `dummy` (four layers), and one of the preset `rl_metaworld`
(one).
"""

import argparse
import dataclasses
import json
import os
import pickle
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.types import Task

from pistar.config.presets import get_config
from pistar.data.norm_stats import NormStats
from pistar.data.robots import find_robot, input_transform, output_transform
from pistar.envs.base import EnvOptions
from pistar.envs.rollout import Clock, Request, batch_size, roll_out
from pistar.envs.suites.metaworld import INSTRUCTIONS, STATE, MetaWorld
from pistar.envs.vector.vector import Environments
from pistar.models.config import GemmaConfig, Pi0Config
from pistar.models.pi0 import init_params
from pistar.models.tokenizer import load_tokenizer
from pistar.policy.actor import Actor
from pistar.policy.load_policy import Policy

TASK, LIMIT = "pick-place-v3", 100
ENVIRONMENTS, EPISODES = 16, 40
ALONE = 8
"""Episodes of the naive loop."""


_PRESET = get_config("rl_metaworld").model
_DUMMY = GemmaConfig(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16)
POLICIES = {"dummy": dataclasses.replace(_PRESET, vlm=_DUMMY, expert=_DUMMY), "rl_metaworld": _PRESET}


def fresh_policy(model: Pi0Config) -> Policy:
    """A policy with random weights, in the form in which a checkpoint is served."""
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
    """Steps of a measurement, and the time they took."""

    steps: int
    seconds: float
    clock: Clock

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.seconds


def batched(envs: Environments, actor: Actor, execute: int, starts: range) -> Round:
    """Run an episode from each start state, many environments at once."""
    clock, since = Clock(), time.perf_counter()
    for rollout in roll_out(envs, starts, actor, execute=execute, clock=clock):
        assert rollout.episode is not None
    return Round(clock.steps, time.perf_counter() - since, clock)


class Lean:
    """The simulator the batched rollouts use."""

    def __init__(self) -> None:
        self._env = MetaWorld(TASK, EnvOptions(limit=LIMIT))

    def reset(self, start_id: int) -> np.ndarray:
        """Start an episode; return its first observation, all numbers of it."""
        self._env.begin(start_id)
        return self._env.observe()["environment_state"]

    def know(self, starts: range) -> None:
        """Do nothing: it draws a start state when an episode begins, as the batched simulators do."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, bool]:
        """Execute an action; return the observation and whether the task succeeded."""
        ending = self._env.act(action)[1]
        return self._env.observe()["environment_state"], ending == "success"


class Plain:
    """Meta-World as it is installed, with the same start states."""

    def __init__(self) -> None:
        self._sim = ALL_V3_ENVIRONMENTS[TASK]()
        self._draw = MetaWorld(TASK, EnvOptions(limit=LIMIT))._draw_start
        self._tasks: dict[int, Task] = {}

    def know(self, starts: range) -> None:
        """Draw the start states: users of Meta-World have a list of tasks before the first episode."""
        fixed = {"env_cls": type(self._sim), "partially_observable": False}
        self._tasks = {
            start_id: Task(TASK, pickle.dumps({**fixed, "rand_vec": self._draw(start_id)})) for start_id in starts
        }

    def reset(self, start_id: int) -> np.ndarray:
        """Start an episode; return its first observation, all numbers of it."""
        self._sim.set_task(self._tasks[start_id])
        seen: np.ndarray = self._sim.reset()[0]
        return seen

    def step(self, action: np.ndarray) -> tuple[np.ndarray, bool]:
        """Execute an action; return the observation and whether the task succeeded."""
        seen, _, _, _, info = self._sim.step(np.clip(action, -1, 1))
        return seen, bool(info["success"])


def naive(env: Lean | Plain, actor: Actor, execute: int, starts: range) -> Round:
    """Run one episode after the other."""
    env.know(starts)
    steps, since, prompt = 0, time.perf_counter(), np.asarray(INSTRUCTIONS[TASK])
    for start_id in starts:
        seen, done, at = env.reset(start_id), False, 0
        while not done and at < LIMIT:
            (chunk,) = actor(
                [Request({"state": seen[STATE].astype(np.float32), "prompt": prompt}, start_id, at, start_id, 0)]
            )
            for action in chunk[:execute]:
                seen, done = env.step(action)
                at += 1
                if done or at == LIMIT:
                    break
        steps += at
    return Round(steps, time.perf_counter() - since, Clock())


def measure(policy: Policy, rounds: int) -> dict[str, float | str]:
    """Measure all ways in turn, `rounds` times each."""
    many, one = Actor(policy, batch_size(ENVIRONMENTS), seed=0), Actor(policy, 1, seed=0)
    execute, plain, lean = policy.config.action_horizon, Plain(), Lean()
    with Environments(f"metaworld/{TASK}", EnvOptions(limit=LIMIT), count=ENVIRONMENTS) as envs:
        workers = envs.workers
        ways: list[Callable[[range], Round]] = [
            lambda starts: batched(envs, many, execute, starts),
            lambda starts: naive(plain, one, execute, starts[:ALONE]),
            lambda starts: naive(lean, one, execute, starts[:ALONE]),
        ]
        # Start states nobody has begun from, as in an evaluation. The first round compiles.
        rounds_of = [range(i * EPISODES, (i + 1) * EPISODES) for i in range(rounds + 1)]
        found = [[way(starts) for way in ways] for starts in rounds_of][1:]
    together, of_plain, of_lean = (max(each, key=lambda a: a.rate) for each in zip(*found, strict=True))
    clock, seconds = together.clock, together.seconds
    cores, loop = len(os.sched_getaffinity(0)), "one environment, one call of the policy at a time, over"
    return {
        "batched": f"{ENVIRONMENTS} environments over {workers} processes on {cores} cores, in our leaner simulator",
        "naive_installed": f"{loop} Meta-World as installed",
        "naive_lean": f"{loop} our leaner simulator, the one of `batched`",
        "steps_per_second_batched": round(together.rate),
        "steps_per_second_naive_installed": round(of_plain.rate),
        "steps_per_second_naive_lean": round(of_lean.rate),
        "batched_by_naive_installed": round(together.rate / of_plain.rate, 2),
        "batched_by_naive_lean": round(together.rate / of_lean.rate, 2),
        "share_policy": round(clock.policy / seconds, 2),
        "share_waiting_for_simulators": round(clock.waiting / seconds, 2),
        "share_rest": round(1 - (clock.policy + clock.waiting) / seconds, 2),
        "simulators_of_all_processors": round(clock.simulators / seconds / cores, 2),
    }


def main() -> None:
    """Measure, and print a JSON line for each policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    rounds = 3 if parser.parse_args().quick else 10
    for name, model in POLICIES.items():
        print(json.dumps({"benchmark": "rollouts", "policy": name, **measure(fresh_policy(model), rounds)}))


if __name__ == "__main__":
    main()
