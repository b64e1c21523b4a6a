"""One host of several that train with ACRLPD online, and record what each of them did: run by test_acrlpd_multihost."""

import dataclasses
import hashlib
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pistar.cli import main as cli
from pistar.config.online import HealthConfig
from pistar.config.train import RLTrainConfig, save_config
from pistar.data import loader
from pistar.distributed import multihost, sharding
from pistar.online.acrlpd_learner import AcrlpdLearner
from pistar.online.exploration import PolicySnapshot
from pistar.optim import AdamWConfig, ConstantSchedule

from helpers.small_online_run import online_settings, small_acrlpd_run
from helpers.small_run import acrlpd_settings


def together(checkpoint: Path, runs: Path) -> RLTrainConfig:
    """Two iterations of six episodes and two updates each. Half of a batch comes from the dataset beside the
    checkpoint."""
    config = small_acrlpd_run(
        checkpoint,
        runs,
        [checkpoint.parent / "demos"],
        environments=4,
        start_states_per_iteration=6,
        replay_min_steps=20,
        evaluate_every=2,
        evaluate_episodes=4,
        health=HealthConfig(max_drift=None, max_success_drop=None),  # one of four episodes is a large drop
    )
    # With so large an eps Adam's steps are smooth in the gradient, however small that is.
    smooth = AdamWConfig(ConstantSchedule(0, 1e-2), eps=1e-2)
    return dataclasses.replace(
        config,
        # By weight: where rows are drawn in proportion to it, a last bit could draw others.
        algorithm=dataclasses.replace(
            acrlpd_settings(config), critic_optimizer=smooth, critic_warmup=1, awr_by="weight"
        ),
        online=dataclasses.replace(online_settings(config), updates=2),
        policy_optimizer=smooth,
        steps=2,
        batch_size=16,
        updates_per_dispatch=1,
    )


def record(folder: Path, host: str) -> None:
    """Record which policy and critic act, and the batches."""
    policies, batches = (folder / f"{host}.{what}" for what in ("policies", "batches"))
    snapshot, to_devices = AcrlpdLearner.snapshot, loader.to_devices

    def recorded_snapshot(self: AcrlpdLearner, *given: Any, **how: Any) -> PolicySnapshot:
        made = snapshot(self, *given, **how)
        assert made.selector is not None
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves((made.params, made.selector.params)):
            digest.update(np.asarray(leaf).tobytes())
        with policies.open("a") as file:
            file.write(f"{made.version} {digest.hexdigest()}\n")
        return made

    def recorded_batch(batch: Any, where: Any = None) -> Any:
        with batches.open("ab") as file:
            pickle.dump(batch, file)
        return to_devices(batch, where)

    AcrlpdLearner.snapshot = recorded_snapshot  # type: ignore[method-assign]
    loader.to_devices = recorded_batch  # type: ignore[assignment]


def main(port: str, hosts: str, host: str, folder: str, checkpoint: str, *flags: str) -> None:
    """Train to the end, by the command line."""
    sharding.SMALL = 1024  # otherwise nothing of so small a model would be split
    multihost.HEARTBEAT_SECONDS = 300  # a busy machine may pause
    settings_file = Path(folder, f"{host}.yaml")
    record(Path(folder), host)
    save_config(settings_file, together(Path(checkpoint), Path(folder, "runs")))
    where = ["--coordinator", f"127.0.0.1:{port}", "--hosts", hosts, "--host", host]
    cli.main(["train", "acrlpd_online_metaworld", "--config", str(settings_file), *where, *flags])


if __name__ == "__main__":
    main(*sys.argv[1:])
