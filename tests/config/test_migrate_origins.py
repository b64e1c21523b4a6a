"""The command lines and YAML that users of ac_training and PI0-RIPT were shown (tests/fixtures/origins): what each
becomes."""

import shlex
from pathlib import Path

import pytest
import yaml

from pistar.agents.config import AcrlpdConfig, RiptConfig
from pistar.config.migrate import as_ours, flags_as_ours
from pistar.config.presets import get_config, list_configs
from pistar.config.train import RLTrainConfig, load_config
from pistar.data.loader import PoolOptions
from pistar.errors import UserError
from pistar.optim import CosineSchedule

from helpers.paths import ROOT
from helpers.small_online_run import online_settings

ORIGINS = ROOT / "tests/fixtures/origins"


def loaded(name: str, preset: str) -> tuple[RLTrainConfig, dict[str, str]]:
    """The run a file becomes, and its notes by the name they are about."""
    notes: list[str] = []
    path = ORIGINS / name
    config = load_config(path, get_config(preset), say=notes.append)
    told = [note.removeprefix(f"{path}: ") for note in notes]
    return config, {note.split()[0]: note for note in told}


def commands(name: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in (ORIGINS / name).read_text(encoding="utf-8").splitlines()]


def names_in(table: object, prefix: str = "") -> set[str]:
    if not isinstance(table, dict):
        return {prefix}
    return {found for key, value in table.items() for found in names_in(value, f"{prefix}.{key}" if prefix else key)}


def test_every_setting_of_pi0_ript_becomes_ours() -> None:
    config, notes = loaded("pi0_ript.yaml", "ript_libero_goal")
    online, algorithm, optimizer = online_settings(config), config.algorithm, config.policy_optimizer
    assert isinstance(algorithm, RiptConfig)
    assert (config.checkpoint, str(config.data.norm_stats)) == ("PATH", "PATH/norm_stats.json")
    assert (online.environment, online.environments, online.limit) == ("libero/goal/2", 1, 200)
    assert (algorithm.group_size, online.start_states_per_iteration, online.epochs) == (10, 1, 5.0)
    assert (config.batch_size, config.gradient_accumulation, online.updates) == (4, 2, None)
    assert optimizer.schedule == CosineSchedule(warmup_steps=0, peak_lr=1e-5, decay_steps=100, decay_lr=1e-7)
    assert (optimizer.weight_decay, optimizer.b1, optimizer.b2, optimizer.clip_norm) == (0.01, 0.9, 0.999, 1.0)
    assert (algorithm.weighting, algorithm.standardise, algorithm.beta) == ("cfg", True, 1.0)
    assert (config.save_every, online.evaluate_every) == (5, 1)
    assert (config.trackers, config.wandb_project) == (("wandb",), "pi0-rl-training")
    assert (online.patience, online.min_gain, config.model.dtype) == (10, 0.001, "bfloat16")
    assert (online.health.on_failure, algorithm.auto_tune) == ("roll_back", True)
    assert (online.start_states.choice, online.start_states.target) == ("curriculum", (0.7, 0.7))
    assert notes["loss.type"].startswith("loss.type is algorithm.weighting here, as cfg (cfg labels chunks")
    assert notes["debug.save_videos"].endswith("no videos are made while a run trains.")


def test_no_setting_of_the_origins_is_dropped_silently() -> None:
    """Each has a note, but those that have the same name and meaning here."""
    for name, preset, alike in (
        ("pi0_ript.yaml", "ript_libero_goal", {"training.batch_size", "optimizer.weight_decay"}),
        ("pi0_ript_first_stage.yaml", "ript_libero_goal", {"optimizer.weight_decay"}),
        ("ac_training.yaml", "rl_fold_box", {f"{part}_optimizer.weight_decay" for part in ("actor", "critic")}),
    ):
        _, notes = loaded(name, preset)
        table = yaml.safe_load((ORIGINS / name).read_text(encoding="utf-8"))
        whole = {"advanced.scheduler", "actor_lr_schedule", "critic_lr_schedule"}  # tables that become one setting
        missing = {
            name for name in names_in(table) if name not in notes and name.rpartition(".")[0] not in whole & set(notes)
        }
        assert missing - alike == set()


@pytest.mark.parametrize("name", ["pi0_ript.yaml", "pi0_ript_first_stage.yaml", "ac_training.yaml"])
def test_each_of_their_tables_is_read_alone(name: str) -> None:
    for key, value in yaml.safe_load((ORIGINS / name).read_text(encoding="utf-8")).items():
        if key == "critic_optimizer":  # also a name of pistar's older versions
            continue
        ours, notes = as_ours({key: value})
        assert notes, key
        assert key not in ours or isinstance(ours[key], dict), key


def test_the_tables_of_its_first_stage_are_read() -> None:
    config, notes = loaded("pi0_ript_first_stage.yaml", "ript_metaworld")
    assert (online_settings(config).epochs, online_settings(config).updates) == (3.0, None)
    assert notes["online.updates"] == "online.updates is none, because of num_epochs."
    assert notes["debug_loss_computation"].startswith("debug_loss_computation is left out: losses are in metrics.jsonl")


def test_every_setting_of_ac_training_becomes_ours() -> None:
    config, notes = loaded("ac_training.yaml", "rl_aloha_fold")
    algorithm = config.algorithm
    assert isinstance(algorithm, AcrlpdConfig)
    assert (config.checkpoint, config.model.action_horizon, algorithm.horizon) == ("checkpoints/pi0_base", 20, 20)
    assert (algorithm.critic.ensemble, algorithm.critic.hidden, algorithm.critic.dropout) == (10, (512, 512, 512), 0.1)
    assert (algorithm.candidates, algorithm.bc_scale, algorithm.gamma, algorithm.tau) == (4, 0.1, 0.99, 0.005)
    assert (algorithm.ema_decay, algorithm.target_ess, config.fsdp_devices) == (0.999, 0.3, 1)
    assert (config.policy_optimizer.schedule.peak_lr, algorithm.critic_optimizer.schedule.peak_lr) == (3e-5, 3e-4)
    assert isinstance(config.policy_optimizer.schedule, CosineSchedule)
    assert config.policy_optimizer.schedule.decay_steps == 50_000
    assert (config.policy_optimizer.weight_decay, algorithm.critic_optimizer.weight_decay) == (1e-4, 1e-4)
    assert config.data.pool == PoolOptions(64)
    assert notes["critic_weight"].startswith("critic_weight is left out: the critic has an optimiser of its own")
    assert notes["critic_ema_decay"] == "critic_ema_decay is left out: another name in the file sets algorithm.tau."
    assert "every checkpoint is OpenPI's" in notes["openpi_compatibility.save_openpi_checkpoints"]


@pytest.mark.parametrize(
    ("table", "ours"),
    [
        ({"critic_ema_decay": 0.99}, {"algorithm": {"tau": 0.01}}),
        ({"use_ema": False}, {"algorithm": {"ema_decay": None}}),
        ({"use_adaptive_temperature": False}, {"algorithm": {"target_ess": None}}),
        ({"enable_fsdp": True}, {}),
        ({"advanced": {"use_amp": False}}, {"model": {"dtype": "float32"}}),
        ({"system": {"error_recovery": False}}, {"online": {"health": {"on_failure": "stop"}}}),
        (
            {"sampling": {"success_rate_target": 0.6}},
            {"online": {"start_states": {"target": [0.6, 0.6], "choice": "curriculum"}}},
        ),
        (
            {"advanced": {"scheduler": {"type": "linear", "T_max": 50}}},
            {
                "policy_optimizer": {
                    "schedule": {
                        "type": "LinearSchedule",
                        "warmup_steps": 0,
                        "decay_steps": 50,
                        "decay_lr": 0.0,
                        "peak_lr": 1e-5,
                    }
                }
            },
        ),
    ],
)
def test_what_a_setting_becomes(table: dict[str, object], ours: dict[str, object]) -> None:
    assert as_ours(table)[0] == ours


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"loss": {"type": "ppo"}}, r"loss\.type: 'ppo' is not available; use cfg_weighted"),
        ({"synchronization": {"gradient_sync_freq": 4}}, r"gradient_sync_freq: 4 is not .* gradient_accumulation"),
        ({"early_stopping": {"monitor": "val_loss"}}, r"monitor: 'val_loss' is not available; a run can end early"),
        ({"advanced": {"scheduler": {"type": "cosine_annealing"}}}, r"advanced\.scheduler: T_max is missing"),
        ({"advanced": {"scheduler": {"type": "step", "T_max": 1}}}, r"type 'step' is not available; use cosine"),
        ({"advanced": {"scheduler": {"gamma": 1, "last": 2}}}, r"gamma, last: unknown; a scheduler has type, T_max"),
        ({"logging": {"save_checkpoints": False}}, r"save_checkpoints: False is not available; a run always saves"),
        ({"skip_norm_stats": True}, r"skip_norm_stats: True is not available; statistics come from"),
        ({"critic": {"use_layer_norm": False}}, r"use_layer_norm: False is not available; critics always have"),
        ({"critic": {"spectral_norm": True}}, r"critic\.spectral_norm is an unknown setting"),
        ({"actor_lr_schedule": "step"}, r"actor_lr_schedule: 'step' is not available; the schedules are cosine"),
        ({"critic_lr_schedule": {"tmax": 4}}, r"critic_lr_schedule: tmax: unknown; a schedule has type, peak_lr"),
        ({"openpi_compatibility": {"enable_ema_for_inference": False}}, r"use_ema: false keeps no average"),
        (
            {"sampling": {"strategy": "random", "difficulty_adaptation": True}},
            r"difficulty_adaptation sets online\.start_states\.choice to curriculum, .* to uniform; leave one out",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(table: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        as_ours(table)


def test_all_unknown_names_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("algo: {rlo_batch_size: 4, lr: fast}\ntrainig: {}\nloss: {type: ppo}\n", encoding="utf-8")
    with pytest.raises(UserError) as refused:
        load_config(theirs, get_config("ript_metaworld"))
    for name in ("algo.rlo_batch_size", "algo.lr", "trainig", "loss.type"):
        assert name in str(refused.value)
    assert "\n" not in str(refused.value)
    ours = tmp_path / "ours.yaml"
    ours.write_text("sed: 7\nalgorithm: {gama: 0.9, horizn: 5}\ndata: {promt: x}\nsteps: many\n", encoding="utf-8")
    with pytest.raises(UserError) as refused:
        load_config(ours, get_config("rl_fold_box"))
    for name in ("sed does not exist; did you mean seed?", "algorithm.gama", "algorithm.horizn", "data.promt"):
        assert name in str(refused.value)


def test_all_flags_that_cannot_be_read_are_told_at_once() -> None:
    with pytest.raises(UserError, match=r"--config is 'rl_fold_bx', .* did you mean rl_fold_box\? --pi0_lr is 'fast'"):
        flags_as_ours(["--config", "rl_fold_bx", "--pi0_lr", "fast"], list_configs())


def test_the_command_lines_of_ac_training_are_runs_of_ours() -> None:
    ours = [flags_as_ours(line, list_configs())[0] for line in commands("ac_training_commands.txt")]
    assert ours == [
        ["rl_fold_box", "--exp_name", "test_v2"],
        [
            *("rl_fold_box", "--exp_name", "my_experiment", "--steps", "50000"),
            *("--policy-optimizer.schedule.peak-lr", "1e-05", "--policy-optimizer.schedule.decay-lr", "1e-06"),
            *("--algorithm.critic-optimizer.schedule.peak-lr", "0.001"),
            *("--algorithm.critic-optimizer.schedule.decay-lr", "0.0001", "--batch_size", "128"),
        ],
        ["rl_fold_box", "--exp_name", "debug_test", "--debug"],
        ["rl_fold_box", "--exp_name", "test", "--dry-run"],
        [
            *("rl_aloha_fold", "--exp_name", "E", "--data.datasets", "D", "--steps", "50000"),
            *("--save-every", "5000", "--overwrite"),
        ],
    ]
    _, notes = flags_as_ours(commands("ac_training_commands.txt")[-1], list_configs())
    assert "--config aloha_fold is `pistar train rl_aloha_fold` here; --config is for YAML files." in notes
    assert any(note.startswith("--enable_fsdp does not change --fsdp-devices") for note in notes)
    assert "--no_wandb is left out: nothing is sent to W&B unless trackers is [wandb]." in notes


def test_the_command_lines_of_pi0_ript_are_options_of_ours() -> None:
    lines = [flags_as_ours(line, list_configs()) for line in commands("pi0_ript_commands.txt")]
    assert [ours for ours, _ in lines] == [
        ["--config", "configs/quick_test.yaml", "--steps", "10"],
        ["--config", "configs/full_test.yaml", "--steps", "100"],
        ["--config", "configs/benchmark.yaml"],
    ]
    assert "`pistar eval CHECKPOINT --env … --against OTHER`" in lines[2][1][0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("aloha_fold", "rl_aloha_fold"),
        ("acrlpd_v2_aloha_fold", "rl_aloha_fold"),
        ("fold_box", "rl_fold_box"),
        ("libero", "rl_libero"),
        ("droid", "rl_droid"),
    ],
)
def test_their_names_of_configurations_are_known(theirs: str, ours: str) -> None:
    assert flags_as_ours([theirs, "--steps", "5"], list_configs()) == (
        [ours, "--steps", "5"],
        [f"{theirs} is {ours} here."],
    )
    assert flags_as_ours(["--config", theirs], list_configs())[0] == [ours]


@pytest.mark.parametrize(
    ("name", "text", "preset"),
    [
        ("benchmark.yaml", "environment: {benchmark_name: libero_goal, task_id: 2}", "ript_libero_goal"),
        ("mine.yaml", "task: {benchmark_name: libero_10}", "ript_libero_long"),
        ("mine.yaml", "environment: {name: metaworld/reach-v3}", "ript_metaworld"),
        ("quick_test.yaml", "loss: {type: cfg_weighted}", "ript_quick_test"),
        ("quick_test.yaml", "online: {limit: 5}", "ript_quick_test"),
        ("mine.yaml", "name: rl_libero\nsteps: 5", "rl_libero"),
        ("fold_box.yaml", "acrlpd: {discount: 0.9}", "rl_fold_box"),
        ("rl_droid.yaml", "steps: 5", "rl_droid"),
    ],
)
def test_a_file_finds_its_preset_where_it_says_enough(tmp_path: Path, name: str, text: str, preset: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    ours, notes = flags_as_ours(["--config", str(path), "--max_steps", "10"], list_configs())
    assert ours == [preset, "--config", str(path), "--steps", "10"]
    assert f"{path} is read as a run of the preset {preset}." in notes


def test_a_file_that_does_not_say_enough_needs_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text in ("acrlpd: {discount: 0.9}", "steps: 5", "[1, 2]", "{", "environment: {name: elsewhere/x}"):
        path.write_text(text, encoding="utf-8")
        assert flags_as_ours(["--config", str(path)], list_configs()) == (["--config", str(path)], [])
    path.write_text("algo: {lrr: 1}", encoding="utf-8")
    with pytest.raises(UserError, match=r"mine\.yaml: algo\.lrr is an unknown setting"):
        flags_as_ours(["--config", str(path)], list_configs())


def test_settings_of_ac_training_are_flags_too() -> None:
    line = (
        "rl_fold_box --pi0_checkpoint_path p --best_of_n 8 --bc_weight=0.2 --critic_hidden_dims [64,64] --use_ema false"
    )
    ours, _ = flags_as_ours(line.split(), list_configs())
    assert ours == [
        *("rl_fold_box", "--checkpoint", "p", "--algorithm.candidates", "8", "--algorithm.bc-scale", "0.2"),
        *("--algorithm.critic.hidden", "64", "64", "--algorithm.ema-decay", "none"),
    ]
