"""A long run does not grow."""

import json
import subprocess
import sys
from pathlib import Path


def test_host_memory_stays_flat_over_many_iterations() -> None:
    """In a process of its own, whose memory is its own. `python tests/soak.py` runs 2,000."""
    program = Path(__file__).parent.parent / "soak.py"
    done = subprocess.run(
        [sys.executable, str(program), "--iterations", "300"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["iterations"] == 300, "it was stopped"
    assert found["growth"] <= 0.02
