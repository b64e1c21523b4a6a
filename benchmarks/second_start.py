"""How much faster is the second start of a run? Compiled programs and decoded frames are kept on disk.

    python benchmarks/second_start.py

Trains one update of the preset `debug` twice, each time in a new process, with caches that are empty at first. Measures
the processor time from the start of Python to the end of the first update. Takes about two minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

DATASET = Path(__file__).parent.parent / "tests" / "fixtures" / "lerobot" / "lerobot_v30"

RUN = """
import sys, time
from pistar.cli.main import main
from pistar.telemetry.progress import ProgressLine

def stepped(self, step, state, really=ProgressLine.stepped):
    really(self, step, state)
    import jax
    jax.block_until_ready(state)
    print("first step after", time.process_time(), "CPU seconds", flush=True)

ProgressLine.stepped = stepped
sys.exit(main(sys.argv[1:]))
"""


def start(folder: Path, exp_name: str) -> float:
    """Train one update, and return the CPU seconds until its end."""
    settings = {**os.environ, "PISTAR_CACHE": str(folder / "cache")}
    settings.pop("JAX_COMPILATION_CACHE_DIR", None)
    options = ["--data.datasets", str(DATASET), "--runs", str(folder / "runs"), "--exp-name", exp_name]
    options += ["--steps", "1", "--save-every", "1", "--algorithm.critic-warmup", "0"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, "train", "debug", *options],
        env=settings,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("first step after")]
    return float(line.split()[3])


def main() -> None:
    """Measure both starts, and print their ratio."""
    with tempfile.TemporaryDirectory() as scratch:
        first, second = (start(Path(scratch), name) for name in ("first", "second"))
    print(f"first start {first:.1f} CPU s to its first update, second {second:.1f}: {second / first:.2f} of it")
    print(json.dumps({"benchmark": "second_start", "second_over_first": round(second / first, 3)}))


if __name__ == "__main__":
    main()
