"""One host of several that train with RIPT online, and record what each of them did: run by test_ript_multihost."""

import dataclasses
import hashlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pistar.agents.prompt_labels import Label
from pistar.agents.ript import RiptBatch
from pistar.cli import main as cli
from pistar.config.online import HealthConfig
from pistar.config.train import DataConfig, RLTrainConfig, save_config
from pistar.distributed import multihost, sharding
from pistar.online.collector import Group
from pistar.online.exploration import PolicySnapshot
from pistar.online.ript_learner import GroupChunks, RiptLearner
from pistar.optim import AdamWConfig, ConstantSchedule

from helpers.small_online_run import small_online_run


def together(checkpoint: Path, runs: Path, **changes: Any) -> RLTrainConfig:
    """Two iterations of six start states and two updates each, for any number of hosts; with an anchor, and with
    demonstrations from the dataset beside the checkpoint. `changes` go to `online` or `algorithm`."""
    usual: dict[str, Any] = {
        "environments": 4,
        "start_states_per_iteration": 6,
        "attempts": 2,
        "demonstrations": 0.25,
        "updates": 2,
        "restart": False,
        "anchor": 0.5,
        "evaluate_every": 2,
        "evaluate_episodes": 4,
        "health": HealthConfig(max_drift=None, max_fault_rate=None),
    }
    return dataclasses.replace(
        small_online_run(checkpoint, runs, **(usual | changes)),
        data=DataConfig(datasets=(str(checkpoint.parent / "demos"),), held_out=0.0),
        # With so large an eps Adam's steps are smooth in the gradient, however small that is.
        policy_optimizer=AdamWConfig(ConstantSchedule(0, 1e-2), eps=1e-2),
        steps=2,
        batch_size=16,
        updates_per_dispatch=1,
        keep_last=2,
    )


def record(folder: Path, host: str) -> None:
    """Record start states, policies and batches. Start states that fail are repaired as soon as the host learns. A file
    `<host>.poison` makes NaN of the host's actions in the iteration it names."""
    groups, policies, batches = (folder / f"{host}.{what}" for what in ("groups", "policies", "batches"))
    poison = folder / f"{host}.poison"
    keep, snapshot, batch, learn = RiptLearner._keep, RiptLearner.snapshot, RiptLearner._batch, RiptLearner.learn
    at = -1

    def recorded_group(self: RiptLearner, group: Group, asked: Label) -> GroupChunks:
        with groups.open("a") as file:
            file.write(json.dumps([group.decisions[0][0].version, group.start[1]]) + "\n")
        return keep(self, group, asked)

    def recorded_snapshot(self: RiptLearner, *given: Any, **how: Any) -> PolicySnapshot:
        made = snapshot(self, *given, **how)
        digest = hashlib.sha256()
        for name in sorted(made.params):
            digest.update(np.asarray(made.params[name]).tobytes())
        with policies.open("a") as file:
            file.write(f"{made.version} {digest.hexdigest()}\n")
        return made

    def noted_iteration(self: RiptLearner, *given: Any, **how: Any) -> Any:
        nonlocal at
        at = given[2]
        return learn(self, *given, **how)

    def recorded_batch(self: RiptLearner, *given: Any, **acted: Any) -> RiptBatch:
        made = batch(self, *given, **acted)
        if acted:  # to measure the drift, not to learn from
            return made
        for broken in folder.glob("*.always"):
            broken.unlink(missing_ok=True)
        if poison.exists() and at == int(poison.read_text()):
            made = dataclasses.replace(made, actions=np.full_like(made.actions, np.nan))
        with batches.open("ab") as file:
            pickle.dump(made, file)
        return made

    RiptLearner._keep = recorded_group  # type: ignore[method-assign]
    RiptLearner.snapshot = recorded_snapshot  # type: ignore[method-assign]
    RiptLearner._batch = recorded_batch  # type: ignore[method-assign]
    RiptLearner.learn = noted_iteration  # type: ignore[method-assign]


def main(port: str, hosts: str, host: str, folder: str, checkpoint: str, changes: str, *flags: str) -> None:
    """Train to the end, by the command line. Some changes are the run's, others go to `online` or `algorithm`."""
    sharding.SMALL = 1024  # otherwise nothing of so small a model would be split
    multihost.HEARTBEAT_SECONDS = int(os.environ.get("HEARTBEAT_SECONDS", multihost.HEARTBEAT_SECONDS))
    changed, settings = json.loads(changes), Path(folder, f"{host}.yaml")
    of_run = {name: changed.pop(name) for name in ("steps", "save_every", "keep_last") if name in changed}
    settings.parent.mkdir(exist_ok=True)
    record(Path(folder), host)
    save_config(settings, dataclasses.replace(together(Path(checkpoint), Path(folder, "runs"), **changed), **of_run))
    where = ["--coordinator", f"127.0.0.1:{port}", "--hosts", hosts, "--host", host] if int(hosts) > 1 else []
    cli.main(["train", "ript_metaworld", "--config", str(settings), *where, *flags])


if __name__ == "__main__":
    main(*sys.argv[1:])
