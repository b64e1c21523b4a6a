"""Settings of runs: YAML and back, presets, bad values, and what differs between two runs."""

import dataclasses
from pathlib import Path

import pytest

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.config import AcrlpdConfig
from pistar.config.presets import PRESETS, get_config, list_configs
from pistar.config.train import DataConfig, differences, load_config, save_config
from pistar.data.robots import find_robot
from pistar.data.success_sources import FromCsv
from pistar.errors import UserError
from pistar.models.config import CriticConfig


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_yaml(tmp_path: Path, name: str) -> None:
    config = get_config(name)
    save_config(tmp_path / "config.yaml", config)
    assert load_config(tmp_path / "config.yaml") == config
    assert config.name == name


@pytest.mark.parametrize(
    ("name", "robot", "dims", "horizon", "critic", "candidates", "batch", "actor_lr", "critic_lr", "bc", "target_ess"),
    [
        ("rl_aloha_fold", "aloha", 14, 20, CriticConfig(10, (512,) * 3, dropout=0.1), 4, 256, 3e-5, 3e-4, 0.05, 0.3),
        ("rl_fold_box", "aloha", 14, 20, CriticConfig(2, (256,) * 2), 4, 128, 1e-5, 1e-3, 0.1, 0.3),
        ("rl_libero", "libero", 7, 10, CriticConfig(10, (512,) * 3), 8, 256, 3e-5, 3e-4, 0.05, None),
        ("rl_droid", "droid", 8, 10, CriticConfig(10, (512,) * 3), 4, 256, 3e-5, 3e-4, 0.05, None),
    ],
)
def test_presets_are_those_of_the_table(
    name: str,
    robot: str,
    dims: int,
    horizon: int,
    critic: CriticConfig,
    candidates: int,
    batch: int,
    actor_lr: float,
    critic_lr: float,
    bc: float,
    target_ess: float | None,
) -> None:
    config = get_config(name)
    algorithm = config.algorithm
    assert isinstance(algorithm, AcrlpdConfig)
    assert (config.robot, config.model.action_horizon, config.batch_size) == (robot, horizon, batch)
    assert (find_robot(robot).action_dim, algorithm.horizon, algorithm.candidates) == (dims, horizon, candidates)
    assert (algorithm.critic, algorithm.bc_scale, algorithm.target_ess) == (critic, bc, target_ess)
    assert algorithm.critic_warmup == 1_000
    assert 0.99 <= algorithm.gamma <= 0.999
    assert algorithm.tau == 0.005
    assert config.policy_optimizer.schedule.peak_lr == actor_lr
    assert algorithm.critic_optimizer.schedule.peak_lr == critic_lr
    agent = config.make_agent()
    assert isinstance(agent, Acrlpd)
    assert (agent.action_dims, agent.return_bounds) == (dims, (0.0, 1.0))
    twin = get_config(name.replace("rl_", "bc_"))
    assert dataclasses.replace(twin, name=name, algorithm=algorithm) == config


def test_an_unknown_preset_answers_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no preset 'rl_alohafold'; try rl_aloha_fold"):
        get_config("rl_alohafold")
    assert "debug" in list_configs()


def test_yaml_replaces_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 7\ndata:\n  success: {type: FromCsv, path: outcomes.csv}\nalgorithm: {gamma: 0.98}\n")
    debug = get_config("debug")
    config = load_config(path, debug)
    assert config.data.success == FromCsv("outcomes.csv")
    assert differences(debug, config) == {
        "algorithm.gamma": (0.99, 0.98),
        "data.success.type": ("FromColumn", "FromCsv"),
        "data.success.key": ("next.success", None),
        "data.success.at_least": (1.0, None),
        "data.success.path": (None, "outcomes.csv"),
        "seed": (0, 7),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sed: 7", ": sed does not exist; did you mean seed"),
        ("algorithm: {gama: 0.9}", ": algorithm.gama does not exist; did you mean gamma"),
        ("seed: seven", ": seed is 'seven'; its type is int"),
        ("[1", "is not valid YAML"),
        ("[1]", r": it is \[1\]; a table of fields belongs there"),
        ("algorithm: {gamma: 2.0}", "gamma is 2.0"),
    ],
)
def test_bad_yaml_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        load_config(path, get_config("debug"))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_must_be_shared_by_the_critics_updates() -> None:
    debug = get_config("debug")
    assert isinstance(debug.algorithm, AcrlpdConfig)
    algorithm = dataclasses.replace(debug.algorithm, critic_updates=2)
    with pytest.raises(UserError, match="batch_size 9 is not divisible by critic_updates 2"):
        dataclasses.replace(debug, batch_size=9, algorithm=algorithm)


def test_no_more_can_be_executed_than_a_chunk_has() -> None:
    debug = get_config("debug")
    with pytest.raises(UserError, match=r"algorithm.horizon is 11 and model.action_horizon 10"):
        dataclasses.replace(debug, algorithm=dataclasses.replace(debug.algorithm, horizon=11))  # type: ignore[arg-type]


def test_a_yaml_that_is_not_there() -> None:
    with pytest.raises(UserError, match="does not exist; name a YAML file"):
        load_config(Path("nowhere.yaml"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"fsdp_devices": 0}, "fsdp_devices is 0"),
        ({"gradient_accumulation": 3}, "batch_size 8 is not divisible by gradient_accumulation 3"),
        (
            {"steps": 2, "save_every": 2},
            "makes 2 updates and algorithm.critic_warmup is 2: the policy would never be trained",
        ),
        (
            {"steps": 25, "updates_per_dispatch": 2, "log_every": 2},
            "steps is 25, not a multiple of updates_per_dispatch",
        ),
        ({"exp_name": "../elsewhere"}, "exp_name is ../elsewhere; it must be a relative path"),
        ({"exp_name": "/elsewhere"}, "exp_name is /elsewhere"),
    ],
)
def test_bad_values_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dataclasses.replace(get_config("debug"), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"weights": (1.0,)}, "data.weights has 1 entries for 0 datasets"), ({"held_out": 1.0}, "data.held_out is 1.0")],
)
def test_bad_data_settings_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        DataConfig(**change)  # type: ignore[arg-type]


def test_models_that_do_not_fit_the_robot_are_refused() -> None:
    debug = get_config("debug")
    with pytest.raises(UserError, match=r"14 numbers and model.action_dim is 8"):
        dataclasses.replace(debug, model=dataclasses.replace(debug.model, action_dim=8))
    with pytest.raises(UserError, match=r"model.cameras are base_0_rgb but aloha has"):
        dataclasses.replace(debug, model=dataclasses.replace(debug.model, cameras=("base_0_rgb",)))
