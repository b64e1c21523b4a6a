"""Where the time of a RIPT iteration goes, and what batched rollouts give it.

    python benchmarks/online_throughput.py [--quick]

First the same fresh policy, of the preset's size, in many environments at once and in one at a time: see rollouts.py.
Then `pistar train ript_metaworld` as it is, from a policy cloned as in learning_online.py: of an iteration's wall time,
practice and learning, the share that simulators worked (processor time of each of their processes, on average, so a
machine that is busy otherwise makes it too small), that the policy was asked, and that updates took. Simulators and the
policy work at once, so the shares may add up to more than 1. An iteration is bound by simulation if simulators work for
85 % of it. Of several iterations the median; the first, which compiles, does not count. Five minutes.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from learning_online import cloned, pistar
from pistar.training.metrics import read_metrics
from rollouts import POLICIES, fresh_policy, measure

BOUND = 0.85
INSTALLED, LEAN = RATIOS = "batched_by_naive_installed", "batched_by_naive_lean"


def iterations(folder: Path, steps: int, more: list[str]) -> list[dict[str, float]]:
    """So many, and one before: what each measured."""
    demos, bc = cloned(folder, seed=1)
    judged = ("--online.evaluate-every", "0", "--online.evaluate-episodes", "1")
    how = ("--checkpoint", str(bc), "--data.datasets", str(demos), "--steps", str(steps + 1), *judged, *more)
    pistar("train", "ript_metaworld", *how, "--runs", str(folder / "runs"), "--exp-name", "ript")
    lines = list(read_metrics(folder / "runs" / "ript" / "metrics.jsonl"))
    return [line for line in lines if line["step"] > 1]


def shares(line: dict[str, float]) -> dict[str, float]:
    """Of an iteration's wall time."""
    practice, learning = line["time/practice_seconds"], line["time/learning_seconds"]
    whole = practice + learning
    return {
        "simulation": line["time/simulators_share"] * practice / whole,
        "inference": line["time/policy_share"] * practice / whole,
        "update": learning / whole,
        "seconds": whole,
    }


def main() -> None:
    """Measure, print a JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="small iterations, fewer rounds")
    quick = parser.parse_args().quick
    rollouts = measure(fresh_policy(POLICIES["rl_metaworld"]), 1 if quick else 5)
    more = ["--online.contexts", "8", "--online.updates", "100"] if quick else []
    with tempfile.TemporaryDirectory() as folder:
        found = [shares(line) for line in iterations(Path(folder), 2 if quick else 3, more)]
    median = {name: round(statistics.median(each[name] for each in found), 2) for name in found[0]}
    bound = median["simulation"] >= BOUND
    print(
        f"batched rollouts are {rollouts[INSTALLED]} times as fast as a loop over one environment of Meta-World as "
        f"installed ({rollouts[LEAN]} of the same simulator); of an iteration simulators work "
        f"{median['simulation']:.0%}, the policy is asked {median['inference']:.0%}, updates take "
        f"{median['update']:.0%}: {'' if bound else 'not '}bound by simulation"
    )
    ratios = {name: rollouts[name] for name in RATIOS}
    print(json.dumps({"benchmark": "online_throughput", **ratios, **median, "simulation_bound": bound}))


if __name__ == "__main__":
    main()
