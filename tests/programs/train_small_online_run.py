"""A small online run in a process of its own, which tests can kill."""

import json
import sys
from pathlib import Path

from rich.console import Console

from pistar.online.loop import train

from helpers.small_online_run import small_online_run

if __name__ == "__main__":  # the simulators' processes import this file, too
    folders, changes = [Path(argument) for argument in sys.argv[1:3]], json.loads(sys.argv[3])
    train(small_online_run(*folders, **changes), Console(stderr=True))
