"""One host of several that train a small run together, with four devices each, or alone with eight."""

import json
import sys
from pathlib import Path

import jax
from rich.console import Console

from pistar.training import sharding
from pistar.training.hosts import join_hosts, part
from pistar.training.offline import train
from small_run import small_run


def main(port: str, hosts: str, host: str, folder: str, changes: str, *flags: str) -> None:
    """Train to the end."""
    sharding.SMALL = 1024  # or nothing of so small a model would be split
    if int(hosts) > 1:
        join_hosts(f"127.0.0.1:{port}", int(hosts), int(host))
    assert jax.device_count() == 8
    config = small_run(Path(folder, "runs"), Path(folder, "cache"), batch_size=8, **json.loads(changes))
    train(config, Console(stderr=True, quiet=host != "0"), resume="--resume" in flags)
    part()


if __name__ == "__main__":
    main(*sys.argv[1:])
