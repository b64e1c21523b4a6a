"""One host of several that practise together in the cheap environment, and write down what each of them did."""

import dataclasses
import hashlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pistar import cli
from pistar.agents.ript import Label, RiptBatch
from pistar.config import RiptConfig
from pistar.presets import get_config
from pistar.training import hosts as meeting
from pistar.training import sharding
from pistar.training.config import DataConfig, RLTrainConfig, save_config
from pistar.training.exploring import Behaviour
from pistar.training.learner import Kept, Learner
from pistar.training.online_config import HealthConfig, StartsConfig
from pistar.training.optimizers import AdamWConfig, ConstantSchedule
from pistar.training.practice import Group


def together(checkpoint: Path, runs: Path, **online: Any) -> RLTrainConfig:
    """Two iterations of six start states, two updates each, for as many hosts as there are; with an anchor, and
    demonstrations that lie beside the checkpoint."""
    config = get_config("ript_metaworld")
    practice = dataclasses.replace(
        config.online,
        environment="envs.walk:make",
        limit=12,
        environments=4,
        workers=0,
        contexts=6,
        rollouts=4,
        attempts=2,
        starts=StartsConfig("uniform", pool=30),
        replay="best",
        demonstrations=0.25,
        updates=2,
        restart=False,
        evaluate_every=2,
        evaluate_episodes=4,
        health=HealthConfig(max_drift=None, max_fault_rate=None),
    )
    return dataclasses.replace(
        config,
        checkpoint=str(checkpoint),
        online=dataclasses.replace(practice, **online),
        data=DataConfig(datasets=(str(checkpoint.parent / "demos"),), held_out=0.0),
        algorithm=RiptConfig(anchor=0.5, ema_decay=None, augmentation=False),
        # So large an eps makes steps of Adam's that are smooth in the gradient, however small that is.
        policy_optimizer=AdamWConfig(ConstantSchedule(0, 1e-2), eps=1e-2),
        steps=2,
        batch_size=16,
        updates_per_dispatch=1,
        keep_last=2,
        runs=runs,
        exp_name="run",
    )


def write_down(folder: Path, host: str) -> None:
    """What the learner is given and gives, beside what it does with it. Start states that fail are mended as soon as it
    learns. `poison` in a host's name makes NaN of its rows in the iteration named in there."""
    groups, policies, batches = (folder / f"{host}.{what}" for what in ("groups", "policies", "batches"))
    poison = folder / f"{host}.poison"
    keep, behaviour, batch, learn = Learner._keep, Learner.behaviour, Learner._batch, Learner.learn
    at = -1

    def kept(self: Learner, group: Group, asked: Label) -> Kept:
        with groups.open("a") as file:
            file.write(json.dumps([group.plans[0][0].version, group.start[1]]) + "\n")
        return keep(self, group, asked)

    def acting(self: Learner, *given: Any, **how: Any) -> Behaviour:
        made = behaviour(self, *given, **how)
        digest = hashlib.sha256()
        for name in sorted(made.params):
            digest.update(np.asarray(made.params[name]).tobytes())
        with policies.open("a") as file:
            file.write(f"{made.version} {digest.hexdigest()}\n")
        return made

    def learning(self: Learner, state: Any, lessons: Any, iteration: int, stride: Any) -> Any:
        nonlocal at
        at = iteration
        return learn(self, state, lessons, iteration, stride)

    def learnt_from(self: Learner, *given: Any) -> RiptBatch:
        made = batch(self, *given)
        for broken in folder.glob("*.always"):
            broken.unlink(missing_ok=True)
        if poison.exists() and at == int(poison.read_text()):
            made = dataclasses.replace(made, actions=np.full_like(made.actions, np.nan))
        with batches.open("ab") as file:
            pickle.dump(made, file)
        return made

    Learner._keep, Learner.behaviour, Learner._batch = kept, acting, learnt_from  # type: ignore[method-assign,assignment]
    Learner.learn = learning  # type: ignore[method-assign]


def main(port: str, hosts: str, host: str, folder: str, checkpoint: str, changes: str, *flags: str) -> None:
    """Practise to the end, by the command. Some changes are the run's, others `online`'s."""
    sharding.SMALL = 1024  # or nothing of so small a model would be split
    meeting.HEARTBEAT_SECONDS = int(os.environ.get("HEARTBEAT_SECONDS", meeting.HEARTBEAT_SECONDS))
    changed, settings = json.loads(changes), Path(folder, f"{host}.yaml")
    of_run = {name: changed.pop(name) for name in ("steps", "save_every", "keep_last") if name in changed}
    settings.parent.mkdir(exist_ok=True)
    write_down(Path(folder), host)
    save_config(settings, dataclasses.replace(together(Path(checkpoint), Path(folder, "runs"), **changed), **of_run))
    where = ["--coordinator", f"127.0.0.1:{port}", "--hosts", hosts, "--host", host] if int(hosts) > 1 else []
    cli.main(["train", "ript_metaworld", "--config", str(settings), *where, *flags])


if __name__ == "__main__":
    main(*sys.argv[1:])
