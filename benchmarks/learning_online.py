"""Does RIPT make a policy succeed more often, from its own rollouts and 0/1 success alone, and which settings matter?

    python benchmarks/learning_online.py --out FOLDER [--seeds 1 2 3] [--variants ript …]

For each seed: five noisy demonstrations of Meta-World's push-v3 by its scripted expert, a small π₀ cloned from them,
and `pistar train ript_metaworld` from there: once as it is, and once for each ablation. Every command is one a user
would type, and is printed before it runs. Each policy is evaluated on 100 held-out start states before and after,
without noise and sampled. Minutes are those of rollouts and updates. Finished runs are kept in --out and not repeated;
a run that was stopped is resumed. TAKES LONG: some 10 minutes for each seed and variant.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from pistar.evaluation.stats import wilson
from pistar.report.charts import curve_chart
from pistar.telemetry.metrics import read_metrics

ENV, LIMIT = "metaworld/push-v3", "100"
EVALUATIONS = {"zero_noise": "without noise", "sampled": "sampled"}
"""Kinds of evaluation, and how the chart calls them."""
NO_EXPLORATION = [f"--online.exploration.{kind}=0" for kind in ("held-noise", "action-noise", "state-noise")]
VARIANTS: dict[str, list[str]] = {
    "ript": [],
    "exploration_off": NO_EXPLORATION,
    "replay_best": ["--algorithm.replay", "best"],
    "exp": ["--algorithm.weighting", "exp"],
    "cfg": ["--algorithm.weighting", "cfg"],
    "cfg_longer": [
        *("--algorithm.weighting", "cfg", "--algorithm.guidance", "3", "--online.updates", "2000"),
        *("--policy-optimizer.schedule.decay-steps", "2000", "--policy-optimizer.schedule.warmup-steps", "200"),
    ],
    "signed": ["--algorithm.weighting", "signed", "--algorithm.anchor", "1.0"],
}


def pistar(*args: str) -> None:
    """Print a pistar command, and run it."""
    print(f"$ pistar {shlex.join(args)}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-c", "from pistar.cli.main import main; main()", *args], check=True)


def cloned(out: Path, seed: int) -> tuple[Path, Path]:
    """Folder of the demonstrations and checkpoint of the policy that imitates them; made if they are missing."""
    demos, runs = out / f"demonstrations_{seed}", out / "runs"
    if not demos.exists():
        starts = ("--expert", "--noise", "0.1", "--episodes", "5", "--limit", LIMIT, "--seed", str(seed))
        pistar("data", "collect", ENV, str(demos), *starts)
    bc = runs / f"bc_{seed}" / "checkpoints" / "1500"
    if not bc.exists():
        how = ("--data.datasets", str(demos), "--data.held-out", "0", "--steps", "1500", "--seed", str(seed))
        pistar("train", "bc_metaworld", *how, "--runs", str(runs), "--exp-name", f"bc_{seed}", "--overwrite")
    return demos, bc


def trained(out: Path, seed: int, variant: str, more: list[str]) -> list[dict[str, Any]]:
    """The metrics of a run; it is trained if that has not been done before."""
    demos, bc = cloned(out, seed)
    runs, name = out / "runs", f"{variant}_{seed}"
    if not (out / f"{name}.done").exists():
        begun = (runs / name / "checkpoints").exists()
        how = ["--checkpoint", str(bc), "--data.datasets", str(demos), "--seed", str(seed), *VARIANTS[variant], *more]
        where = ["--runs", str(runs), "--exp-name", name, "--resume" if begun else "--overwrite"]
        pistar("train", "ript_metaworld", *how, *where)
        (out / f"{name}.done").touch()
    return list(read_metrics(runs / name / "metrics.jsonl"))


def evaluations(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that report an evaluation."""
    return [line for line in lines if "eval/sampled_successes" in line]


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Successes before and after with their intervals, and what the run cost."""
    evaluated = evaluations(lines)
    iterations = [line for line in lines if line["step"] > 0]  # line 0 is the evaluation of the cloned policy
    updated = [line for line in iterations if line["train/updates"] > 0]
    seconds = sum(line["time/rollout_seconds"] for line in iterations)
    seconds += sum(line["time/update_seconds"] for line in updated)
    steps = sum(line["rollout/env_steps"] for line in iterations)
    informative = [line["rollout/informative_groups"] / line["rollout/groups"] for line in iterations]
    counts: dict[str, Any] = {}
    for when, line in (("before", evaluated[0]), ("after", evaluated[-1])):
        for kind in EVALUATIONS:
            won, of = int(line[f"eval/{kind}_successes"]), int(line[f"eval/{kind}_episodes"])
            interval = [round(end, 3) for end in wilson(won, of)]
            counts[f"{when}_{kind}"] = {"successes": won, "episodes": of, "wilson_95": interval}
    return {
        **counts,
        "iterations": evaluated[-1]["step"],
        "env_steps": round(steps),
        "minutes": round(seconds / 60, 1),
        "informative_fraction": [round(min(informative), 2), round(max(informative), 2)],
    }


def draw(out: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Draw successes by iteration, without noise and sampled."""
    panels = {
        f"successes on 100 held-out start states, {title}": {
            name: {line["step"]: line[f"eval/{kind}_successes"] for line in evaluations(lines)}
            for name, lines in runs.items()
        }
        for kind, title in EVALUATIONS.items()
    }
    title = f"RIPT on {ENV}, from a small π₀ cloned from five demonstrations"
    (out / "learning_online.svg").write_text(curve_chart(panels, title=title, across="iterations"), encoding="utf-8")


def main() -> None:
    """Train what is missing, draw the curves, and print a JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=["ript"], choices=list(VARIANTS))
    parser.add_argument("--more", default="", help="further options of `pistar train`, as one string")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {
        f"{variant.replace('_', ' ')}, seed {seed}": trained(args.out, seed, variant, shlex.split(args.more))
        for seed in args.seeds
        for variant in args.variants
    }
    draw(args.out, runs)
    found = {name: summary(lines) for name, lines in runs.items()}
    print(json.dumps({"benchmark": "learning_online", "environment": ENV, "runs": found}))


if __name__ == "__main__":
    main()
