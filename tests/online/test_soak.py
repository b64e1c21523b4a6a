"""The memory of a long run."""

import json
import subprocess
import sys

from helpers.paths import program


def test_host_memory_stays_flat_over_many_iterations() -> None:
    """In its own process. tests/programs/soak.py runs 2,000 iterations by itself."""
    done = subprocess.run(
        [sys.executable, program("soak"), "--iterations", "300"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["iterations"] == 300, "every iteration must run"
    assert found["growth"] <= 0.02
