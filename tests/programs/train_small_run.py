"""A small offline run, in a process of its own that tests can kill."""

import json
import sys
from pathlib import Path

from rich.console import Console

from pistar.distributed import sharding
from pistar.training.offline import train

from helpers.small_run import small_run

if __name__ == "__main__":  # simulators' processes import this file, too
    folders, changes = [Path(argument) for argument in sys.argv[1:3]], json.loads(sys.argv[3])
    sharding.SMALL = 1024  # or nothing of so small a model would be split
    train(small_run(*folders, **changes), Console(stderr=True), resume=sys.argv[4:] == ["--resume"])
