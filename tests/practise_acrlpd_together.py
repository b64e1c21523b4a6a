"""One of several processes that practise by ACRLPD, and write down what they do: run by test_hosts_acrlpd."""

import dataclasses
import hashlib
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pistar import cli
from pistar.config import AcrlpdConfig
from pistar.data import loader
from pistar.training import hosts as meeting
from pistar.training import sharding
from pistar.training.acrlpd_learner import AcrlpdLearner
from pistar.training.config import RLTrainConfig, save_config
from pistar.training.exploring import Behaviour
from pistar.training.online_config import HealthConfig
from pistar.training.optimizers import AdamWConfig, ConstantSchedule
from training.test_acrlpd_online import settings


def together(checkpoint: Path, runs: Path) -> RLTrainConfig:
    """Two iterations of six episodes, two updates each, half of a batch from a dataset that lies beside the
    checkpoint."""
    config = settings(
        checkpoint,
        runs,
        [checkpoint.parent / "demos"],
        environments=4,
        contexts=6,
        replay_min_steps=20,
        evaluate_every=2,
        evaluate_episodes=4,
        health=HealthConfig(max_drift=None, max_success_drop=None),  # of four episodes one is much
    )
    assert isinstance(config.algorithm, AcrlpdConfig)
    # So large an eps makes steps of Adam's that are smooth in the gradient, however small that is.
    smooth = AdamWConfig(ConstantSchedule(0, 1e-2), eps=1e-2)
    return dataclasses.replace(
        config,
        # By weight: drawing rows in proportion to it, a last bit could draw others.
        algorithm=dataclasses.replace(config.algorithm, critic_warmup=1, awr_by="weight"),
        online=dataclasses.replace(config.online, updates=2),
        policy_optimizer=smooth,
        critic_optimizer=smooth,
        steps=2,
        batch_size=16,
        updates_per_dispatch=1,
    )


def write_down(folder: Path, host: str) -> None:
    """Which policy and critic act, and what is learnt from."""
    policies, batches = (folder / f"{host}.{what}" for what in ("policies", "batches"))
    behaviour, to_devices = AcrlpdLearner.behaviour, loader.to_devices

    def acting(self: AcrlpdLearner, *given: Any, **how: Any) -> Behaviour:
        made = behaviour(self, *given, **how)
        assert made.judge is not None
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves((made.params, made.judge.params)):
            digest.update(np.asarray(leaf).tobytes())
        with policies.open("a") as file:
            file.write(f"{made.version} {digest.hexdigest()}\n")
        return made

    def learnt_from(batch: Any, where: Any = None) -> Any:
        with batches.open("ab") as file:
            pickle.dump(batch, file)
        return to_devices(batch, where)

    AcrlpdLearner.behaviour, loader.to_devices = acting, learnt_from  # type: ignore[method-assign,assignment]


def main(port: str, hosts: str, host: str, folder: str, checkpoint: str, *flags: str) -> None:
    """Practise to the end, by the command."""
    sharding.SMALL = 1024  # or nothing of so small a model would be split
    meeting.HEARTBEAT_SECONDS = 300  # a busy machine may stand still
    settings_file = Path(folder, f"{host}.yaml")
    write_down(Path(folder), host)
    save_config(settings_file, together(Path(checkpoint), Path(folder, "runs")))
    where = ["--coordinator", f"127.0.0.1:{port}", "--hosts", hosts, "--host", host]
    cli.main(["train", "acrlpd_online_metaworld", "--config", str(settings_file), *where, *flags])


if __name__ == "__main__":
    main(*sys.argv[1:])
