"""Does RIPT make a policy succeed more often, by practice and 0/1 success alone, and what of it is why?

    python benchmarks/learning_online.py --out FOLDER [--seeds 1 2 3] [--variants ript …]

For each seed: five noisy demonstrations of Meta-World's push-v3 by its scripted expert, a small π₀ cloned from them,
and `pistar train ript_metaworld` from there: once as it is, and once for each ablation. Every command is one a user
would type, and is told. Judged on 100 held-out start states before and after, without noise and sampled; minutes are of
practice and learning. What is done is kept in --out and not done again; a run that was stopped goes on. TAKES LONG:
some 10 minutes for each seed and variant.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from pistar.report.charts import curve_chart
from pistar.training.counting import wilson
from pistar.training.metrics import read_metrics

ENV, LIMIT = "metaworld/push-v3", "100"
NO_EXPLORATION = [f"--online.exploration.{kind}=0" for kind in ("held-noise", "action-noise", "misled")]
VARIANTS: dict[str, list[str]] = {
    "ript": [],
    "exploration_off": NO_EXPLORATION,
    "replay_best": ["--online.replay", "best"],
    "exp": ["--algorithm.weighting", "exp"],
    "cfg": ["--algorithm.weighting", "cfg"],
    "cfg_longer": [
        *("--algorithm.weighting", "cfg", "--algorithm.guidance", "3", "--online.updates", "2000"),
        *("--policy-optimizer.schedule.decay-steps", "2000", "--policy-optimizer.schedule.warmup-steps", "200"),
    ],
    "signed": ["--algorithm.weighting", "signed", "--algorithm.anchor", "1.0"],
}


def pistar(*args: str) -> None:
    """A command of ours, told before it runs."""
    print(f"$ pistar {shlex.join(args)}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-c", "from pistar.cli import main; main()", *args], check=True)


def cloned(out: Path, seed: int) -> tuple[Path, Path]:
    """Demonstrations, and the policy that imitates them."""
    demos, runs = out / f"demonstrations_{seed}", out / "runs"
    if not demos.exists():
        starts = ("--expert", "--noise", "0.1", "--episodes", "5", "--limit", LIMIT, "--seed", str(seed))
        pistar("data", "collect", ENV, str(demos), *starts)
    bc = runs / f"bc_{seed}" / "checkpoints" / "1500"
    if not bc.exists():
        how = ("--data.datasets", str(demos), "--data.held-out", "0", "--steps", "1500", "--seed", str(seed))
        pistar("train", "bc_metaworld", *how, "--runs", str(runs), "--exp-name", f"bc_{seed}", "--overwrite")
    return demos, bc


def practised(out: Path, seed: int, variant: str, more: list[str]) -> list[dict[str, Any]]:
    """What a run measured, which may have been made before."""
    demos, bc = cloned(out, seed)
    runs, name = out / "runs", f"{variant}_{seed}"
    if not (out / f"{name}.done").exists():
        begun = (runs / name / "checkpoints").exists()
        how = ["--checkpoint", str(bc), "--data.datasets", str(demos), "--seed", str(seed), *VARIANTS[variant], *more]
        where = ["--runs", str(runs), "--exp-name", name, "--resume" if begun else "--overwrite"]
        pistar("train", "ript_metaworld", *how, *where)
        (out / f"{name}.done").touch()
    return list(read_metrics(runs / name / "metrics.jsonl"))


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Successes before and after, of how many, and what it took."""
    judged = [line for line in lines if "evaluation/sampled" in line]
    seconds = sum(line.get(f"time/{part}_seconds", 0) for line in lines for part in ("practice", "learning"))
    steps = sum(line.get("practice/environment_steps", 0) for line in lines)
    counts: dict[str, Any] = {}
    for when, line in (("before", judged[0]), ("after", judged[-1])):
        for name in ("zero_noise", "sampled"):
            won, of = int(line[f"evaluation/{name}"]), int(line[f"evaluation/{name}_of"])
            counts[f"{when}_{name}"] = {"succeeded": won, "of": of, "wilson_95": [round(x, 3) for x in wilson(won, of)]}
    groups = [
        (line["practice/informative"], line["practice/start_states"])
        for line in lines
        if "practice/informative" in line
    ]
    shares = [some / all_ for some, all_ in groups]
    rest = {"environment_steps": round(steps), "minutes": round(seconds / 60, 1)}
    return {**counts, "iterations": judged[-1]["step"], **rest, "informative": [round(min(shares), 2), max(shares)]}


def draw(out: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Successes by iteration, without noise and sampled."""
    panels = {
        f"succeeded of 100 held-out start states, {told}": {
            name: {line["step"]: line[f"evaluation/{kind}"] for line in lines if f"evaluation/{kind}" in line}
            for name, lines in runs.items()
        }
        for kind, told in (("zero_noise", "without noise"), ("sampled", "sampled"))
    }
    title = f"{ENV}: a small π₀ cloned from five demonstrations practises"
    (out / "learning_online.svg").write_text(curve_chart(panels, title=title, across="iterations"), encoding="utf-8")


def main() -> None:
    """Run what is missing, print a JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=["ript"], choices=list(VARIANTS))
    parser.add_argument("--more", default="", help="further options of `pistar train`, as one string")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {
        f"{variant.replace('_', ' ')}, seed {seed}": practised(args.out, seed, variant, shlex.split(args.more))
        for seed in args.seeds
        for variant in args.variants
    }
    draw(args.out, runs)
    found = {name: summary(lines) for name, lines in runs.items()}
    print(json.dumps({"benchmark": "learning_online", "environment": ENV, "runs": found}))


if __name__ == "__main__":
    main()
