"""Where the time of a RIPT iteration goes, and how much faster batched rollouts are.

    python benchmarks/online_throughput.py [--quick]

First, a fresh policy of the preset's size acts in many environments at once and in one at a time: see rollouts.py. Then
`pistar train ript_metaworld` runs as it is, from a policy cloned as in learning_online.py. The result is the fraction
of an iteration's wall time (rollouts and updates) in which simulators work, in which the policy computes, and in which
it is updated. The simulators' fraction is the processor time of their processes, averaged over the processes, so it is
too small if the machine does other work. Simulators and the policy work at the same time, so the fractions may add up
to more than 1. An iteration is bound by simulation if simulators work for 85 % of it. Reported is the median over
iterations; the first, which compiles, does not count. Takes five minutes.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from learning_online import cloned, pistar
from pistar.telemetry.metrics import read_metrics
from rollouts import POLICIES, fresh_policy, measure

BOUND = 0.85
INSTALLED, LEAN = RATIOS = "batched_by_naive_installed", "batched_by_naive_lean"
QUICK = ["--online.start-states-per-iteration", "8", "--online.updates", "100"]
"""Options of `pistar train` for small iterations."""


def iterations(folder: Path, steps: int, more: list[str]) -> list[dict[str, float]]:
    """Metrics of `steps` iterations of a run, after a first one that is left out."""
    demos, bc = cloned(folder, seed=1)
    evaluation = ("--online.evaluate-every", "0", "--online.evaluate-episodes", "1")
    how = ("--checkpoint", str(bc), "--data.datasets", str(demos), "--steps", str(steps + 1), *evaluation, *more)
    pistar("train", "ript_metaworld", *how, "--runs", str(folder / "runs"), "--exp-name", "ript")
    lines = list(read_metrics(folder / "runs" / "ript" / "metrics.jsonl"))
    return [line for line in lines if line["step"] > 1]


def shares(line: dict[str, float]) -> dict[str, float]:
    """Fractions of an iteration's wall time, and the time itself."""
    rollout, update = line["time/rollout_seconds"], line["time/update_seconds"]
    whole = rollout + update
    return {
        "simulation": line["time/simulator_fraction"] * rollout / whole,
        "inference": line["time/policy_fraction"] * rollout / whole,
        "update": update / whole,
        "seconds": whole,
    }


def main() -> None:
    """Measure, and print a JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="small iterations, fewer rounds")
    quick = parser.parse_args().quick
    rollouts = measure(fresh_policy(POLICIES["rl_metaworld"]), 1 if quick else 5)
    more = QUICK if quick else []
    with tempfile.TemporaryDirectory() as folder:
        found = [shares(line) for line in iterations(Path(folder), 2 if quick else 3, more)]
    median = {name: round(statistics.median(each[name] for each in found), 2) for name in found[0]}
    bound = median["simulation"] >= BOUND
    print(
        f"batched rollouts are {rollouts[INSTALLED]} times as fast as a loop over one environment of Meta-World as "
        f"installed ({rollouts[LEAN]} times as fast as one over the same simulator); in an iteration simulators work "
        f"{median['simulation']:.0%} of the time, the policy {median['inference']:.0%}, and updates take "
        f"{median['update']:.0%}: {'' if bound else 'not '}bound by simulation"
    )
    ratios = {name: rollouts[name] for name in RATIOS}
    print(json.dumps({"benchmark": "online_throughput", **ratios, **median, "simulation_bound": bound}))


if __name__ == "__main__":
    main()
