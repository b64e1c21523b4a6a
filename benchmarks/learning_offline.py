"""Does ACRLPD learn what imitation cannot? A simulated arm, data of mixed quality, the same budget for all policies.

    python benchmarks/learning_offline.py --out FOLDER [--seeds 1 2 3 4 5] [--only METHOD …]
    python benchmarks/learning_offline.py --quick

TAKES LONG: about 40 minutes of one core for each seed. Results are kept in --out, and a stopped run continues from
there; several processes may share a folder, each with other seeds or methods (--only). Needs the extra `metaworld`.

The data: 200 episodes of Meta-World's pick-place-v3 with deliberate errors. Its scripted expert acts in segments of 6
to 14 steps, and three of four segments are corrupted: a constant random action, a gripper forced open, an object or a
goal assumed 6 to 12 cm from where it is. A quarter of the episodes still succeed. So failures contain good segments and
successes bad ones, and a good policy has to distinguish them.

The policies: one small π₀ (no images, 17 numbers of state, chunks of 5 steps executed open loop), in π₀'s own code,
trained by `FlowBC` on everything, on successes only, and three times as long, and by `Acrlpd`. All have the same number
of policy updates: ACRLPD begins with BC, and these updates count. Settings were chosen on seed 0, which is not
reported. Success is Meta-World's own flag within 200 steps, on 100 tasks that are not in the data.
"""

import argparse
import copy
import dataclasses
import json
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from metaworld.envs.sawyer_pick_place_v3 import SawyerPickPlaceEnvV3
from metaworld.policies.sawyer_pick_place_v3_policy import SawyerPickPlaceV3Policy
from metaworld.types import Task

from pistar.agents.acrlpd import Acrlpd, AcrlpdState
from pistar.agents.base import initial_key
from pistar.agents.config import AcrlpdConfig
from pistar.agents.flow_bc import FlowBC
from pistar.agents.sampling import draw_noise
from pistar.data.chunk_source import ChunkSource, ModelInputs
from pistar.data.loader import Loader, Part
from pistar.data.norm_stats import NormStats, RunningStats
from pistar.data.replay import ReplayBuffer
from pistar.data.robots import Robot, output_transform
from pistar.data.windows import WindowOptions
from pistar.evaluation.stats import wilson
from pistar.models.config import CriticConfig, GemmaConfig, Pi0Config, SiglipConfig
from pistar.models.pi0 import Params, init_params
from pistar.models.tokenizer import load_tokenizer
from pistar.optim import AdamWConfig, CosineSchedule, make_optimizer
from pistar.policy.act import act
from pistar.policy.critic_selector import CriticSelector
from pistar.types import Episode, Observation, RewardScheme

LIMIT = 200
"""Steps of an episode."""
CHUNK = 5
CAMERA = "base_0_rgb"
SEEN = np.r_[0:7, 18:25, 36:39]
"""Of Meta-World's 39 numbers: hand, gripper and object now and a step ago, and the goal. The rest is rotation or 0."""

ROBOT = Robot(name="sawyer", action_dim=4, state_keys={"state": len(SEEN)}, cameras={CAMERA: None})
MODEL = Pi0Config(
    pi05=False,
    vlm=GemmaConfig(width=16, depth=1, mlp_dim=32, num_heads=1, num_kv_heads=1, head_dim=32),
    expert=GemmaConfig(width=128, depth=1, mlp_dim=256, num_heads=1, num_kv_heads=1, head_dim=32),
    vision=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=1, patch_size=14),
    action_dim=len(SEEN),
    action_horizon=CHUNK,
    max_token_len=4,
    vocab_size=512,
    image_size=14,
    cameras=(CAMERA,),
    dtype="float32",
    remat="none",
)


@dataclasses.dataclass(frozen=True)
class Budget:
    """Numbers of episodes, tasks and updates."""

    episodes: int = 200
    tasks: int = 100
    batch: int = 128
    updates: int = 6000
    """Updates of each policy; the baselines that train longer have three times as many."""
    imitated: int = 2000
    """Updates of ACRLPD's policy by plain BC, before there is a critic. They count."""
    critic_warmup: int = 3000
    """Updates of the critic alone, before the policy is trained further."""


QUICK = Budget(episodes=2, tasks=2, batch=16, updates=4, imitated=2, critic_warmup=2)

AGENT = AcrlpdConfig(
    horizon=CHUNK,
    gamma=0.98,
    tau=0.01,
    candidates=4,
    flow_steps=3,
    critic=CriticConfig(ensemble=4, hidden=(256, 256), output_bias=-3.0, target_subset=2),
    beta=0.5,
    weight_clip=30.0,
    awr_by="resample",
    bc_scale=0.0,
    augmentation=False,
)
POLICY_RATE, CRITIC_RATE = 1e-3, 5e-4
ACTING_STEPS = 10
"""Euler steps of every policy that acts. ACRLPD samples with fewer in training."""

METHODS = {
    "bc": "BC",
    "bc_long": "BC, 3× longer",
    "successes": "BC on successes only",
    "successes_long": "BC on successes only, 3× longer",
    "acrlpd": "ACRLPD",
}
ROWS = {
    **{name: title for name, title in METHODS.items() if name != "acrlpd"},
    "start_best_of_4": "the BC that ACRLPD begins with, best of 4",
    "acrlpd_1": "ACRLPD, N = 1",
    "acrlpd_best_of_4": "ACRLPD, best of 4",
}


# --- The simulator ----------------------------------------------------------------------------------------------------


class Arm(SawyerPickPlaceEnvV3):
    """pick-place-v3 without its dense reward and the object's rotation, which are not used here: twice as fast.

    Its observations and its success flag are the original's, step for step; every run checks that.
    """

    def evaluate_state(self, obs: np.ndarray, action: np.ndarray) -> tuple[float, dict[str, Any]]:
        """Return no reward, and whether the object is within 7 cm of the goal."""
        del action
        return 0.0, {"success": float(np.linalg.norm(obs[4:7] - self._target_pos) <= 0.07)}

    def _get_quat_objects(self) -> np.ndarray:
        return np.zeros(4)

    def copied(self) -> "Arm":
        """Return another arm in the same state. Only its moving parts are copied."""
        other: Arm = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.data = copy.copy(self.data)
        return other


def draw_task(rng: np.random.Generator) -> Task:
    """Draw the positions of object and goal as Meta-World does."""
    low, high = np.array([-0.1, 0.6, 0.02, -0.1, 0.8, 0.05]), np.array([0.1, 0.7, 0.02, 0.1, 0.9, 0.3])
    while True:
        where = rng.uniform(low, high)
        if np.linalg.norm(where[:2] - where[3:5]) >= 0.15:
            task = {"env_cls": SawyerPickPlaceEnvV3, "rand_vec": where, "partially_observable": False}
            return Task("pick-place-v3", pickle.dumps(task))


def set_up(arm: Arm, task: Task) -> np.ndarray:
    """Begin a task, and return its first observation."""
    arm.set_task(task)
    first: np.ndarray = arm.reset()[0]
    return first


def check_arm(steps: int = 60) -> None:
    """Refuse an arm whose observations differ from the original's."""
    arm, original, rng = Arm(), SawyerPickPlaceEnvV3(), np.random.default_rng(0)
    task = draw_task(rng)
    seen = set_up(arm, task)
    original.set_task(task)
    original.reset()
    for _ in range(steps):
        action = np.clip(expert_action(seen) + rng.normal(0, 0.1, 4), -1, 1)
        seen, _, _, _, info = arm.step(action)
        wanted, _, _, _, wanted_info = original.step(action)
        if not np.array_equal(seen[SEEN], wanted[SEEN]) or info["success"] != wanted_info["success"]:
            raise AssertionError("the fast arm differs from Meta-World's")


# --- The data ---------------------------------------------------------------------------------------------------------


def expert_action(observation: np.ndarray) -> np.ndarray:
    """The action of Meta-World's script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that actions are clipped, which is intended
        return np.clip(SawyerPickPlaceV3Policy().get_action(observation), -1, 1)


Behaviour = Callable[[np.ndarray], np.ndarray]


def draw_behaviour(rng: np.random.Generator) -> tuple[Behaviour, bool]:
    """Draw how the arm acts in a segment, and whether it is corrupted."""
    if rng.random() >= 0.75:
        return expert_action, False
    kind = rng.integers(4)
    angle, distance = rng.uniform(0, 2 * np.pi), rng.uniform(0.06, 0.12)
    shift = distance * np.array([np.cos(angle), np.sin(angle)])
    constant = rng.uniform(-1, 1, 4)

    def corrupted(observation: np.ndarray) -> np.ndarray:
        if kind == 0:
            return constant
        believed = observation.copy()
        if kind == 2:
            believed[4:6] += shift
        if kind == 3:
            believed[36:38] += shift
        action = expert_action(believed)
        return np.append(action[:3], -1.0) if kind == 1 else action

    return corrupted, True


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """Episodes, and for each step whether its segment was corrupted, which no policy sees."""

    episodes: list[Episode]
    bad: list[np.ndarray]


def collect(seed: int, count: int) -> Recorded:
    """Collect episodes of the corrupted expert. Actions have noise, and are stored as executed."""
    rng, arm = np.random.default_rng([seed, 0]), Arm()
    episodes, all_bad = [], []
    for _ in range(count):
        observation = set_up(arm, draw_task(rng))
        states = [observation[SEEN]]
        actions: list[np.ndarray] = []
        bad: list[bool] = []
        left, success = 0, False
        behaviour, corrupted = draw_behaviour(rng)
        while len(actions) < LIMIT and not success:
            if left == 0:
                behaviour, corrupted = draw_behaviour(rng)
                left = int(rng.integers(6, 15))
            action = np.clip(behaviour(observation) + rng.normal(0, 0.1, 4), -1, 1)
            observation, _, _, _, info = arm.step(action)
            success, left = bool(info["success"]), left - 1
            states.append(observation[SEEN])
            actions.append(action)
            bad.append(corrupted)
        episodes.append(episode_of(np.array(states, np.float32), np.array(actions, np.float32), success))
        all_bad.append(np.array(bad))
    return Recorded(episodes, all_bad)


def episode_of(states: np.ndarray, actions: np.ndarray, success: bool) -> Episode:
    """An episode as the replay buffer takes it. The buffer computes its rewards."""
    return Episode(
        observations={"state": states},
        actions=actions,
        rewards=np.zeros(len(actions), np.float32),
        terminated=success,
        truncated=not success,
        success=success,
        task="",
    )


def collect_once(path: Path, seed: int, count: int) -> Recorded:
    """Read the episodes from the file; if there is none, collect them and write it."""
    if not path.exists():
        made = collect(seed, count)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.npz")
        np.savez_compressed(
            aside,
            states=np.concatenate([episode.observations["state"] for episode in made.episodes]),
            actions=np.concatenate([episode.actions for episode in made.episodes]),
            bad=np.concatenate(made.bad),
            lengths=[len(episode.actions) for episode in made.episodes],
            success=[episode.success for episode in made.episodes],
        )
        os.replace(aside, path)
    with np.load(path) as found:
        ends = np.cumsum(found["lengths"])[:-1]
        actions, bad = np.split(found["actions"], ends), np.split(found["bad"], ends)
        states = np.split(found["states"], ends + np.arange(1, len(ends) + 1))  # one more state than actions in each
        won = [bool(success) for success in found["success"]]
    return Recorded([episode_of(*parts) for parts in zip(states, actions, won, strict=True)], bad)


def inputs_for(episodes: Sequence[Episode]) -> ModelInputs:
    """How the model reads these episodes: by z-scores, as π₀ does."""
    counted = {"state": RunningStats(), "actions": RunningStats()}
    for episode in episodes:
        counted["state"].update(episode.observations["state"])
        counted["actions"].update(episode.actions)
    stats: Mapping[str, NormStats] = {name: running.stats() for name, running in counted.items()}
    tokenizer = load_tokenizer("tiny", MODEL.max_token_len)
    return ModelInputs(ROBOT, stats, "zscore", tokenizer, MODEL.action_dim, MODEL.image_size, False)


def source_of(episodes: Sequence[Episode], inputs: ModelInputs) -> ChunkSource:
    """Windows of the episodes. Success is paid 1 and ends the task; a time-out does not end it."""
    steps = sum(len(episode.actions) for episode in episodes)
    replay = ReplayBuffer(steps, inputs, WindowOptions(CHUNK, CHUNK), RewardScheme("success"), fps=80.0)
    for episode in episodes:
        replay.add(episode)
    source = replay.source()
    assert source is not None
    return source


# --- Learning ---------------------------------------------------------------------------------------------------------

Act = Callable[[Observation, jax.Array], jax.Array]


def optimizer(peak: float, updates: int) -> optax.GradientTransformation:
    """AdamW with a cosine schedule down to a hundredth of the peak."""
    warmup = min(100, updates // 10)
    schedule = CosineSchedule(warmup_steps=warmup, peak_lr=peak, decay_steps=updates, decay_lr=peak / 100)
    return make_optimizer(AdamWConfig(schedule=schedule))


def print_progress(what: str, step: int, steps: int) -> None:
    """Print a line of progress on standard error every 500 updates."""
    if step % 500 == 0 or step == steps:
        print(f"{what}: {step} of {steps} updates, {time.process_time():.0f} CPU s", file=sys.stderr, flush=True)


def imitate(source: ChunkSource, updates: int, batch: int, seed: int) -> Params:
    """Train by behaviour cloning, and return the policy's weights."""
    agent = FlowBC(MODEL, optimizer(POLICY_RATE, updates), augmentation=False)
    update = jax.jit(agent.update, donate_argnums=0)
    key = jax.random.key(seed)
    state = agent.init_from(init_params(MODEL, initial_key(key)), initial_key(key))
    for step, drawn in enumerate(Loader([Part(source)], batch, seed).policy_batches(0, updates), 1):
        state, _ = update(state, drawn, jax.random.fold_in(key, step))
        print_progress(f"seed {seed}, BC", step, updates)
    return agent.policy_params(state)


def reinforce(
    source: ChunkSource, budget: Budget, seed: int, start: Params, config: AcrlpdConfig
) -> Iterator[tuple[Acrlpd, AcrlpdState, dict[str, float]]]:
    """Train by ACRLPD from a policy; yield after the critic's warm-up and at the end."""
    warmup, updates = budget.critic_warmup, budget.updates - budget.imitated
    agent = Acrlpd(
        MODEL,
        dataclasses.replace(config, critic_warmup=warmup),
        ROBOT.action_dim,
        (0.0, 1.0),
        optimizer(POLICY_RATE, updates),
        optimizer(CRITIC_RATE, warmup + updates),
    )
    update = jax.jit(agent.update, donate_argnums=0)
    key = jax.random.key(seed)
    state = agent.init_from(start, initial_key(key))
    recent: list[dict[str, jax.Array]] = []
    for step, drawn in enumerate(Loader([Part(source)], budget.batch, seed + 1000).batches(0, warmup + updates), 1):
        state, metrics = update(state, drawn, jax.random.fold_in(key, step))
        recent = [*recent[-19:], metrics]
        print_progress(f"seed {seed}, ACRLPD", step, warmup + updates)
        if step in (warmup, warmup + updates):
            means = {name: float(np.mean([float(m[name]) for m in recent])) for name in metrics}
            yield agent, jax.tree.map(jnp.copy, state), {name: value for name, value in means.items() if value == value}


def acting(params: Params) -> Act:
    """How these weights act: one sample per observation."""

    def choose(observation: Observation, key: jax.Array) -> jax.Array:
        noise = draw_noise(key, MODEL, len(observation.state))
        return act(MODEL, params, observation, noise, steps=ACTING_STEPS)

    return choose


def best_of(agent: Acrlpd, state: AcrlpdState, n: int) -> Act:
    """How the policy acts by the best of n samples."""
    params, selector = agent.policy_params(state), CriticSelector(agent.critic, agent.critic_params(state))

    def choose(observation: Observation, key: jax.Array) -> jax.Array:
        noise = draw_noise(key, MODEL, len(observation.state), n)
        return act(MODEL, params, observation, noise, steps=ACTING_STEPS, selector=selector)

    return choose


def critic_auc(
    agent: Acrlpd, states: Sequence[AcrlpdState], source: ChunkSource, recorded: Recorded, rows: int = 2000
) -> list[float]:
    """How often Q(s, a) − mean Q(s, samples) is higher for a good chunk than for a corrupted one; 0.5 is chance."""
    bad = np.concatenate(recorded.bad)
    starts = np.random.default_rng(0).choice(source.starts, min(rows, len(source.starts)), replace=False)
    fields = source.windows.gather(starts)
    seen = observe(source.inputs, source.state(fields.observation_rows))

    @jax.jit
    def advantages(state: AcrlpdState, seen: Observation, actions: jax.Array, valid: jax.Array) -> jax.Array:
        samples = agent.sample_candidates(state, seen, jax.random.key(0), agent.config.candidates)
        alike = jnp.ones_like(valid)
        return agent.q_values(state, seen, actions, valid) - agent.q_values(state, seen, samples, alike).mean(axis=1)

    corrupted = bad[fields.action_rows].mean(axis=1)

    def auc(advantage: np.ndarray) -> float:
        good, poor = advantage[corrupted == 0], advantage[corrupted == 1]
        return float((good[:, None] > poor[None]).mean()) if len(good) and len(poor) else 0.5

    actions = source.actions(starts, fields)
    return [auc(np.asarray(advantages(state, seen, actions, fields.valid))) for state in states]


# --- Acting -----------------------------------------------------------------------------------------------------------


def observe(inputs: ModelInputs, states: np.ndarray) -> Observation:
    """The model's input of these states, which are normalised and padded."""
    size, pixels = len(states), MODEL.image_size
    tokens, mask = inputs.tokenizer.tokenize("", None)
    return Observation(
        images={CAMERA: np.zeros((size, pixels, pixels, 3), np.uint8)},
        image_masks={CAMERA: np.zeros(size, bool)},
        state=states.astype(np.float32),
        tokenized_prompt=np.tile(tokens, (size, 1)),
        tokenized_prompt_mask=np.tile(mask, (size, 1)),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Beginning:
    """An arm at the start of a task, and its state."""

    arm: Arm
    state: np.ndarray


def beginnings(seed: int, count: int) -> list[Beginning]:
    """Tasks for the evaluation."""
    rng, arm = np.random.default_rng([seed, 1]), Arm()
    made = []
    for _ in range(count):
        first = set_up(arm, draw_task(rng))
        made.append(Beginning(arm.copied(), first[SEEN]))
    return made


def successes(act: Act, starts: Sequence[Beginning], inputs: ModelInputs, seed: int) -> int:
    """Count the tasks in which the policy succeeds. All run side by side, a chunk at a time."""
    arms = [start.arm.copied() for start in starts]
    states = np.array([start.state for start in starts], np.float32)
    done = np.zeros(len(arms), bool)
    to_robot = output_transform(ROBOT, inputs.stats, inputs.norm)
    for step in range(0, LIMIT, CHUNK):
        seen = observe(inputs, inputs.pad(inputs.normalize({"state": states}))["state"])
        chunks = act(seen, jax.random.fold_in(jax.random.key(seed), step))
        actions = np.clip(to_robot({"actions": np.asarray(chunks), "state": seen.state})["actions"], -1, 1)
        for i in np.flatnonzero(~done):
            for action in actions[i]:
                observation, _, _, _, info = arms[i].step(action)
                states[i], done[i] = observation[SEEN], bool(info["success"])
                if done[i]:
                    break
        if done.all():
            break
    return int(done.sum())


# --- The comparison ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Notes:
    """Results in a folder, a file for each seed and method."""

    folder: Path

    def recall(self, seed: int, method: str) -> dict[str, Any] | None:
        """A stored result; None if there is none."""
        path = self._path(seed, method)
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found

    def data(self, seed: int, episodes: int) -> Recorded:
        """The episodes of a seed."""
        return collect_once(self.folder / f"seed{seed}" / f"{episodes}_episodes.npz", seed, episodes)

    def keep(self, seed: int, method: str, found: Mapping[str, Any]) -> None:
        """Store a result, whole or not at all."""
        path = self._path(seed, method)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(found))
        os.replace(aside, path)

    def _path(self, seed: int, method: str) -> Path:
        return self.folder / f"seed{seed}" / f"{method}.json"


class World:
    """The data and tasks of a seed."""

    def __init__(self, seed: int, budget: Budget, recorded: Recorded) -> None:
        self.seed, self.budget, self.recorded = seed, budget, recorded
        episodes = self.recorded.episodes
        self.inputs = inputs_for(episodes)
        self.source = source_of(episodes, self.inputs)
        self.won = np.flatnonzero([episode.success for episode in episodes])
        self.starts = beginnings(seed, budget.tasks)

    def evaluate(self, act: Act) -> int:
        """Count successes. Every policy has the same random numbers."""
        return successes(act, self.starts, self.inputs, self.seed)

    def run(self, method: str) -> dict[str, Any]:
        """Train by a method; return successes by row of the table, and other results."""
        b, seed = self.budget, self.seed
        if method == "acrlpd":
            return self._run_acrlpd()
        source = self.source.select(self.won) if method.startswith("successes") and len(self.won) else self.source
        params = imitate(source, b.updates * (3 if method.endswith("long") else 1), b.batch, seed)
        return {"successes": {method: self.evaluate(acting(params))}}

    def _run_acrlpd(self) -> dict[str, Any]:
        b = self.budget
        start = imitate(self.source, b.imitated, b.batch, self.seed)
        (agent, before, _), (_, after, metrics) = reinforce(self.source, b, self.seed, start, AGENT)
        return {
            "successes": {
                "start_best_of_4": self.evaluate(best_of(agent, before, 4)),
                "acrlpd_1": self.evaluate(acting(agent.policy_params(after))),
                "acrlpd_best_of_4": self.evaluate(best_of(agent, after, 4)),
            },
            "critic_auc": [round(a, 3) for a in critic_auc(agent, (before, after), self.source, self.recorded)],
            "last_metrics": {name: round(value, 4) for name, value in sorted(metrics.items())},
        }


def summarise(notes: Notes, seeds: Sequence[int], tasks: int, seconds: float) -> dict[str, Any]:
    """Print the table of all stored results, and return a summary."""
    found = {seed: [note for m in METHODS if (note := notes.recall(seed, m)) is not None] for seed in seeds}
    counts = {
        row: [next((n["successes"][row] for n in found[s] if row in n["successes"]), None) for s in seeds]
        for row in ROWS
    }
    pooled: dict[str, dict[str, Any]] = {}
    print(f"\n| of {tasks} tasks each | {' | '.join(f'seed {seed}' for seed in seeds)} | pooled | Wilson 95 % |")
    print("|---" * (len(seeds) + 3) + "|")
    for row, title in ROWS.items():
        known = [count for count in counts[row] if count is not None]
        if not known:
            continue
        low, high = wilson(sum(known), tasks * len(known))
        pooled[row] = {"successes": sum(known), "of": tasks * len(known), "wilson": [round(low, 3), round(high, 3)]}
        shown = " | ".join("–" if count is None else str(count) for count in counts[row])
        print(f"| {title} | {shown} | {sum(known)} of {tasks * len(known)} | {low:.2f} to {high:.2f} |")

    def beats(better: str, *others: str) -> bool | None:
        if any(row not in pooled or pooled[row]["of"] != tasks * len(seeds) for row in (better, *others)):
            return None
        return all(pooled[better]["wilson"][0] > pooled[other]["wilson"][1] for other in others)

    imitators = {"bc": ("bc", "bc_long"), "successes_only": ("successes", "successes_long")}
    return {
        "benchmark": "learning_offline",
        "seeds": list(seeds),
        "pooled": pooled,
        **{f"beats_{name}": beats("acrlpd_best_of_4", *rows) for name, rows in imitators.items()},
        **{f"beats_{name}_with_n_1": beats("acrlpd_1", *rows) for name, rows in imitators.items()},
        "critic_auc": [n["critic_auc"] for s in seeds for n in found[s] if "critic_auc" in n],
        "demo_successes": [next((n["demo_successes"] for n in found[s]), None) for s in seeds],
        "seconds_of_training_and_evaluation": round(sum(n["seconds"] for s in seeds for n in found[s])),
        "seconds": round(seconds, 1),
    }


def main(options: Sequence[str] | None = None) -> None:
    """Run what has not been run yet, and print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of results; a temporary folder if left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--episodes", type=int, default=Budget.episodes)
    parser.add_argument("--quick", action="store_true", help="run everything in a minute; nothing is learnt")
    args = parser.parse_args(options)
    begin = time.perf_counter()
    budget = QUICK if args.quick else Budget(episodes=args.episodes)
    seeds = args.seeds[:1] if args.quick else args.seeds
    with tempfile.TemporaryDirectory() as scratch:
        notes = Notes(args.out or Path(scratch))
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            compiled = str(notes.folder.resolve() / "compiled")
            jax.config.update("jax_compilation_cache_dir", compiled)  # type: ignore[no-untyped-call]
        check_arm()
        for seed in seeds:
            world: World | None = None
            for method in args.only:
                if notes.recall(seed, method) is not None:
                    continue
                world = world or World(seed, budget, notes.data(seed, budget.episodes))
                since = time.process_time()
                found = world.run(method)
                found |= {"seconds": round(time.process_time() - since, 1), "demo_successes": len(world.won)}
                print(f"seed {seed}: {json.dumps(found)}", flush=True)
                notes.keep(seed, method, found)
        result = summarise(notes, seeds, budget.tasks, time.perf_counter() - begin)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
