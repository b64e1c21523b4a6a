"""One host of several that train a small run together, with two devices each, or alone with four."""

import json
import os
import sys
from pathlib import Path

from pistar.agents.config import BcConfig
from pistar.cli import main as cli
from pistar.config.train import save_config
from pistar.distributed import multihost as meeting
from pistar.distributed import sharding

from helpers.small_run import small_run


def main(port: str, hosts: str, host: str, folder: str, changes: str, *flags: str) -> None:
    """Train to the end, by the command. "imitate" among the changes: without a critic, which compiles sooner."""
    sharding.SMALL = 1024  # or nothing of so small a model would be split
    meeting.HEARTBEAT_SECONDS = int(os.environ.get("HEARTBEAT_SECONDS", meeting.HEARTBEAT_SECONDS))
    settings, changed = Path(folder, f"{host}.yaml"), json.loads(changes)
    if changed.pop("imitate", False):
        changed["algorithm"] = BcConfig()
    settings.parent.mkdir(exist_ok=True)
    save_config(settings, small_run(Path(folder, "runs"), Path(folder, "cache"), batch_size=8, **changed))
    together = ["--coordinator", f"127.0.0.1:{port}", "--hosts", hosts, "--host", host] if int(hosts) > 1 else []
    cli.main(["train", "debug", "--config", str(settings), *together, *flags])


if __name__ == "__main__":
    main(*sys.argv[1:])
