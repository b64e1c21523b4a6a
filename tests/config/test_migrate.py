"""Settings of other programs: flags and YAML of ac_training, YAML of PI0-RIPT."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pistar.agents.config import AcrlpdConfig, RiptConfig
from pistar.cli import runs as cli_runs
from pistar.config.migrate import PRESETS_BY_PLACE, as_ours, flags_as_ours
from pistar.config.migrate_names import ACRLPD, ACRLPD_FLAGS, OLD_PRESETS
from pistar.config.migrate_ript import RIPT
from pistar.config.model_presets import MODELS
from pistar.config.presets import PRESETS, get_config, list_configs
from pistar.config.train import RLTrainConfig, load_config
from pistar.data.robots import ROBOTS
from pistar.errors import UserError
from pistar.models.config import Pi0Config
from pistar.optim import CosineSchedule
from pistar.tables import to_table

from helpers.paths import ROOT
from helpers.small_online_run import online_settings

RIPT_YAML = """
exp_name: goal
policy_path: checkpoints/pi0_libero_pytorch
output_dir: output
task:
  benchmark_name: libero_goal
  num_parallel_envs: 4
  max_episode_length: 200
algo:
  demo_batch_size: 6
  rloo_batch_size: 4
  num_epochs: 2
  data_batch_size: 8
  gradient_accumulation_steps: 2
  lr: 1e-5
  grad_norm_clip: 0.5
  enable_dynamic_sampling: true
  enable_rollout_stats_tracking: true
  rollout_skip_threshold: 2
  rollout_stats_path: output/stats.json
  use_val_init: false
training:
  num_train_steps: 12
  seed: 42
  save_freq: 5
  save_best: true
  use_mixed_precision: true
  optimizer: {type: AdamW, weight_decay: 0.01, beta1: 0.8, beta2: 0.999}
policy:
  cfg_enabled: false
  train_expert_only: true
  freeze_vision_encoder: true
logging: {use_wandb: true, wandb_project: mine, log_freq: 3}
distributed: {backend: nccl}
"""


def loaded(path: Path, text: str, preset: str = "ript_metaworld") -> tuple[RLTrainConfig, list[str]]:
    path.write_text(text, encoding="utf-8")
    notes: list[str] = []
    return load_config(path, get_config(preset), say=notes.append), notes


def test_a_file_of_pi0_ript_becomes_a_run_of_ours(tmp_path: Path) -> None:
    config, notes = loaded(tmp_path / "theirs.yaml", RIPT_YAML)
    assert (config.exp_name, config.checkpoint, config.runs) == (
        "goal",
        "checkpoints/pi0_libero_pytorch",
        Path("output"),
    )
    online, optimizer = online_settings(config), config.policy_optimizer
    assert (online.environment, online.environments, online.limit) == ("libero/goal", 4, 200)
    assert (online.start_states_per_iteration, online.epochs) == (6, 2.0)
    assert (online.start_states.choice, online.start_states.skips) == ("skip_solved", 2)
    assert optimizer.schedule == CosineSchedule(warmup_steps=0, peak_lr=1e-5, decay_steps=1, decay_lr=1e-5)
    assert (optimizer.weight_decay, optimizer.b1, optimizer.b2, optimizer.clip_norm) == (0.01, 0.8, 0.999, 0.5)
    assert (config.steps, config.batch_size, config.gradient_accumulation, config.seed) == (12, 8, 2, 42)
    assert (config.save_every, config.trackers, config.wandb_project) == (5, ("wandb",), "mine")
    assert config.model.freeze == ("vision", "vlm")
    assert isinstance(config.algorithm, RiptConfig)
    assert (config.algorithm.weighting, config.algorithm.group_size, config.algorithm.attempts) == ("positive", 4, 6)
    assert f"{tmp_path}/theirs.yaml: algo.rloo_batch_size is algorithm.group_size here." in notes
    left_out = [note for note in notes if "is left out" in note]
    assert any("distributed.backend is left out: devices are found automatically" in note for note in left_out)
    assert any("logging.log_freq is left out: a line of metrics is written for every iteration" in n for n in left_out)
    assert config.model.dtype == "bfloat16"
    assert not any(": exp_name is" in note for note in notes)  # it is called the same


def test_the_sections_of_its_plan_are_read_too() -> None:
    """model, environment, training, optimizer, loss, logging and debug."""
    ours, notes = as_ours(
        {
            "model": {"path": "pi0", "action_horizon": 50},
            "environment": {"name": "libero_spatial", "num_envs": 8, "max_steps": 220},
            "training": {"num_train_steps": 3},
            "optimizer": {"learning_rate": "2e-5", "type": "Adam"},
            "loss": {"advantage_clip": 3.0, "normalize_advantage": True, "kl_coef": 0.05},
            "logging": {"use_wandb": False},
            "debug": {"verbose": True},
        }
    )
    assert ours == {
        "checkpoint": "pi0",
        "model": {"action_horizon": 50},
        "online": {"environment": "libero/spatial", "environments": 8, "limit": 220},
        "steps": 3,
        "policy_optimizer": {
            "schedule": {
                "type": "CosineSchedule",
                "warmup_steps": 0,
                "peak_lr": 2e-5,
                "decay_steps": 1,
                "decay_lr": 2e-5,
            }
        },
        "algorithm": {"advantage_clip": 3.0, "standardise": True, "anchor": 0.05},
        "trackers": [],
    }
    assert "debug.verbose is left out: `pistar train --debug` prints more." in notes


def test_every_key_of_its_plans_file_is_read(tmp_path: Path) -> None:
    """Every key of its COMPLETE_RL_TRAINING_PLAN's settings file."""
    text = """
model: {checkpoint_path: pi0, norm_stats_path: norm_stats.json}
environment: {benchmark_name: libero_goal, task_id: 2, num_parallel_envs: 3, max_episode_length: 150}
training: {num_rollouts: 10, num_epochs: 5, batch_size: 4, gradient_accumulation_steps: 2}
optimizer: {type: AdamW, lr: 1e-5, weight_decay: 0.01, betas: [0.9, 0.99]}
loss: {type: cfg_weighted, normalize_advantages: true, temperature: 0.7}
logging: {log_dir: ./logs, log_every_n_steps: 10, save_checkpoints: true, save_every_n_epochs: 5}
debug: {save_videos: true, save_loss_details: true, video_dir: films}
"""
    config, notes = loaded(tmp_path / "plan.yaml", text)
    assert (config.checkpoint, str(config.data.norm_stats)) == ("pi0", "norm_stats.json")
    online = online_settings(config)
    assert (online.environment, online.environments, online.limit) == ("libero/goal/2", 3, 150)
    assert (online.epochs, config.batch_size, config.gradient_accumulation) == (5.0, 4, 2)
    assert (config.policy_optimizer.b1, config.policy_optimizer.b2, config.policy_optimizer.weight_decay) == (
        0.9,
        0.99,
        0.01,
    )
    assert isinstance(config.algorithm, RiptConfig)
    assert (config.algorithm.standardise, config.algorithm.beta) == (True, 0.7)
    assert (config.save_every, config.algorithm.weighting, config.algorithm.group_size) == (5, "cfg", 10)
    named = {note.split(": ", 1)[1].split(" is ")[0] for note in notes}
    assert {"loss.type", "training.num_rollouts", "logging.save_every_n_epochs", "debug.save_loss_details"} <= named


def test_a_changed_name_or_value_is_noted() -> None:
    _, notes = as_ours({"environment": {"environments": 4, "limit": 10}, "algo": {"demo_batch_size": 4}})
    assert notes == ["algo.demo_batch_size is online.start_states_per_iteration here."]
    _, notes = as_ours({"environment": {"name": "LIBERO_GOAL"}, "sampling": {"strategy": "random"}})
    assert notes == [
        "environment.name is online.environment here, as libero/goal.",
        "sampling.strategy is online.start_states.choice here, as uniform.",
    ]


def test_a_name_counts_only_in_its_section() -> None:
    """A log's path is no checkpoint, a model's type no optimiser, and what training resumes is not W&B's."""
    with pytest.raises(UserError, match=r"logging\.path is an unknown .* did you mean model\.path or policy\.path\?"):
        as_ours({"logging": {"path": "logs"}})
    ours, notes = as_ours({"model": {"type": "pi0"}, "training": {"resume": True}, "logging": {"resume": True}})
    assert ours == {}
    assert notes == [
        "model.type is left out: the weights say whether it is π₀ or π₀.₅.",
        "training.resume is left out: `pistar train … --resume` continues a run.",
        "logging.resume is left out: metrics.jsonl is always written; W&B takes its own settings from its environment "
        "variables.",
    ]
    with pytest.raises(
        UserError, match=r"lr is an unknown setting; did you mean algo\.lr or training\.lr or optimizer\.lr\?"
    ):
        as_ours({"policy_path": "p", "lr": 1e-5})


def test_no_wandb_means_no_tracker() -> None:
    assert as_ours({"logging": {"use_wandb": False}})[0] == {"trackers": []}


def test_one_task_of_a_suite_is_named_by_its_number() -> None:
    ours, _ = as_ours({"task": {"benchmark_name": "libero_goal", "task_name": 3}})
    assert ours == {"online": {"environment": "libero/goal/3"}}
    ours, _ = as_ours({"task": {"benchmark_name": "libero_goal", "task_name": None}})
    assert ours == {"online": {"environment": "libero/goal"}}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            {"algo": {"rlo_batch_size": 4}},
            r"algo\.rlo_batch_size is an unknown .* did you mean rloo_batch_size\?",
        ),
        ({"algo": {}, "trainig": {}}, r"trainig is an unknown setting; did you mean training\?"),
        ({"algo": {"xyzzy": 1}}, r"algo\.xyzzy is an unknown setting; see docs/how-to/migrate.md"),
        ({"algo": {"use_val_init": True}}, r"algo\.use_val_init: True is not available; start states"),
        ({"optimizer": {"type": "SGD"}}, r"optimizer\.type: 'SGD' is not available; the optimiser is AdamW"),
        ({"algo": {"lr": "fast"}}, r"algo\.lr is 'fast', which is no value for it"),
        ({"debug": {"save_vidoes": True}}, r"debug\.save_vidoes is an unknown setting; did you mean save_videos\?"),
        ({"optimizer": {"betas": [0.9]}}, r"optimizer\.betas is \[0\.9\], which is no value for it"),
        ({"acrlpd": {"num_critic": 4}}, r"acrlpd\.num_critic is an unknown setting; did you mean num_critics\?"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(table: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        as_ours(table)


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"theirs\.yaml: algo\.lrr is an unknown setting"):
        loaded(tmp_path / "theirs.yaml", "algo: {lrr: 1e-5}")


def test_a_table_of_ac_training_becomes_a_run_of_ours(tmp_path: Path) -> None:
    text = """
num_train_steps: 20000
log_interval: 20
acrlpd:
  discount: 0.99
  target_update_rate: 0.01
  critic_lr: 3e-5
  critic_hidden_dims: [512, 512]
  num_critics: 6
  q_aggregation: min
  actor_lr: 1e-5
  actor_update_freq: 4
  num_action_samples: 8
  bc_loss_weight: 10
  pi0_ema_decay: 0.999
  positive_episode_ratio: 0.4
qchunking: {horizon_length: 20, action_dim: 14, reward_scale: 1.0}
"""
    config, notes = loaded(tmp_path / "theirs.yaml", text, "rl_fold_box")
    algorithm = config.algorithm
    assert isinstance(algorithm, AcrlpdConfig)
    assert (algorithm.gamma, algorithm.tau, algorithm.horizon) == (0.99, 0.01, 20)
    assert (algorithm.critic.ensemble, algorithm.critic.hidden, algorithm.critic.aggregation) == (6, (512, 512), "min")
    assert (algorithm.actor_delay, algorithm.candidates, algorithm.bc_scale, algorithm.ema_decay) == (4, 8, 10, 0.999)
    assert (config.steps, config.log_every) == (20_000, 20)
    assert isinstance(config.policy_optimizer.schedule, CosineSchedule)
    assert isinstance(algorithm.critic_optimizer.schedule, CosineSchedule)
    assert (config.policy_optimizer.schedule.peak_lr, algorithm.critic_optimizer.schedule.peak_lr) == (1e-5, 3e-5)
    assert any("acrlpd.positive_episode_ratio is left out" in note for note in notes)
    assert any("qchunking.action_dim is left out: the robot has it" in note for note in notes)


@pytest.mark.parametrize("preset", ["rl_fold_box", "ript_metaworld", "bc_droid"])
def test_our_own_files_are_left_alone(tmp_path: Path, preset: str) -> None:
    table = to_table(get_config(preset))
    assert as_ours(table) == (table, [])
    config, notes = loaded(tmp_path / "ours.yaml", yaml.safe_dump(table), preset)
    assert config == get_config(preset)
    assert notes == []


def test_flags_of_ac_training_are_taken() -> None:
    theirs = "--config rl_fold_box --exp_name box --max_steps 5000 --pi0_lr 2e-5 --critic_lr=1e-3 --no_wandb --resume"
    ours, notes = flags_as_ours(theirs.split(), list_configs())
    assert ours == [
        *("rl_fold_box", "--exp_name", "box", "--steps", "5000"),
        *("--policy-optimizer.schedule.peak-lr", "2e-05", "--policy-optimizer.schedule.decay-lr", "2e-06"),
        *("--algorithm.critic-optimizer.schedule.peak-lr", "0.001"),
        *("--algorithm.critic-optimizer.schedule.decay-lr", "0.0001"),
        "--resume",
    ]
    assert "--max_steps is --steps here." in notes
    assert "--config rl_fold_box is `pistar train rl_fold_box` here; --config is for YAML files." in notes


def test_their_command_line_becomes_a_run_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    flags = """--config rl_fold_box --exp_name box --max_steps 5000 --batch_size 64 --pi0_lr 2e-5 --critic_lr 1e-3
        --log_interval 50 --save_interval 500 --eval_interval 250 --seed 42 --checkpoint_dir here --no_wandb
        --lerobot_repo_id me/fold_box --debug-transforms --fsdp_fix direct --env_name none --dry_run"""
    parser = cli_runs._run_parser("train", "")
    parser.add_argument("--dry-run", action="store_true")
    options, config = cli_runs._read_run(parser, flags.split())
    assert options.dry_run
    assert (config.name, config.exp_name, config.steps, config.batch_size) == ("rl_fold_box", "box", 5000, 64)
    assert isinstance(config.algorithm, AcrlpdConfig)
    assert (config.log_every, config.save_every, config.algorithm.audit_every, config.seed) == (50, 500, 250, 42)
    assert (config.runs, config.data.datasets) == (Path("here"), ("me/fold_box",))
    assert isinstance(config.policy_optimizer.schedule, CosineSchedule)
    assert config.policy_optimizer.schedule.decay_lr == pytest.approx(2e-6)
    printed = capsys.readouterr().err
    both = "--policy-optimizer.schedule.peak-lr and --policy-optimizer.schedule.decay-lr"
    assert f"note: --pi0_lr is {both} here (falls to a tenth)." in printed
    assert "note: --env_name is left out: `pistar eval --env` evaluates a checkpoint." in printed


def test_our_own_arguments_pass_as_they_are() -> None:
    ours = ["rl_fold_box", "--config", "mine.yaml", "--steps", "5", "--data.datasets", "a", "b", "--algorithm.tau=0.1"]
    assert flags_as_ours(ours, list_configs()) == (ours, [])


def test_a_rate_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match=r"--pi0_lr is 'fast', which is no value for it"):
        flags_as_ours(["--pi0_lr", "fast"], list_configs())


def names_of(config: object, prefix: str = "") -> set[str]:
    """Dotted names of all fields, those of tables included."""
    found = set()
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        found.add(prefix + field.name)
        if dataclasses.is_dataclass(value):
            found |= names_of(value, f"{prefix}{field.name}.")
    return found


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("bc_aloha_fold --model.action-horizon 50", MODELS["pi0"]),
        ("rl_fold_box --model.action-horizon 50 --model.pi05 --model.max-token-len 200", MODELS["pi05"]),
        (
            "bc_libero --model.no-pi05 --model.max-token-len 48 --model.action-horizon 50 --robot libero_delta",
            MODELS["pi0"],
        ),
        (
            "rl_droid --model.action-horizon 16 --robot droid_position",
            dataclasses.replace(MODELS["pi05"], action_horizon=16),
        ),
        (
            "bc_droid --model.no-pi05 --model.max-token-len 48",
            dataclasses.replace(MODELS["pi0"], action_horizon=10),
        ),
    ],
)
def test_openpis_configs_are_these_presets_with_these_options(line: str, model: Pi0Config) -> None:
    """As docs/how-to/migrate.md has it, of pi0_aloha, pi05_aloha, pi0_libero, pi05_full_droid_finetune, pi0_droid."""
    _, config = cli_runs._read_run(cli_runs._run_parser("train", ""), line.split())
    assert config.model == model
    assert config.norm_kind == ("quantile" if model.pi05 else "zscore")
    assert (config.prompt_format or config.model.model_type) == config.model.model_type


def test_names_in_the_tables_for_openpi_and_lerobot_exist() -> None:
    text = (ROOT / "docs/how-to/migrate.md").read_text(encoding="utf-8")
    rows = text[: text.index("## ac_training")].splitlines()
    here = " ".join(row.split("|")[2] for row in rows if row.startswith("| "))
    words = re.findall(r"`([^`]*)`", here)
    options = {option for span in words for option in re.findall(r"--([\w.-]+)", span)}
    dotted = {option.replace("-", "_").replace("model.no_", "model.") for option in options}
    assert len(dotted) > 20
    assert dotted - {"lora", "format"} <= names_of(PRESETS["rl_fold_box"])
    presets = {word for word in words if re.fullmatch(r"(bc|rl|debug)_\w+", word)}
    assert len(presets) > 6
    assert presets <= set(PRESETS)
    assert {robot for span in words for robot in re.findall(r"--robot (\w+)", span)} <= set(ROBOTS)


def test_every_name_on_our_side_exists() -> None:
    ript, acrlpd = names_of(PRESETS["ript_metaworld"]), names_of(PRESETS["rl_fold_box"])
    assert {rule.ours for names in RIPT.values() for rule in names.values() if rule.ours} <= ript
    assert {rule.ours for names in ACRLPD.values() for rule in names.values() if rule.ours} <= acrlpd
    assert set(ACRLPD_FLAGS.values()) == {"--dry-run"}
    assert {*OLD_PRESETS.values(), *PRESETS_BY_PLACE.values()} <= set(PRESETS)
    also = {name for names in (*RIPT.values(), *ACRLPD.values()) for rule in names.values() for name in rule.also}
    assert also <= ript


def test_a_tasks_number_follows_its_suite_whatever_their_order() -> None:
    for task in ({"benchmark_name": "libero_goal", "task_name": 3}, {"task_name": 3, "benchmark_name": "libero_goal"}):
        assert as_ours({"task": task})[0] == {"online": {"environment": "libero/goal/3"}}


def test_a_file_of_pi0_ript_with_steps_at_the_top_is_not_read_as_ac_trainings() -> None:
    table, _ = as_ours({"policy_path": "p", "num_train_steps": 20, "task": None})
    assert table == {"checkpoint": "p", "steps": 20}


def test_two_names_for_one_setting_must_agree() -> None:
    with pytest.raises(UserError, match=r"horizon_length sets algorithm.horizon to 10, .* sets it to 5; leave one out"):
        as_ours({"qchunking": {"chunk_length": 5, "horizon_length": 10}})
    assert as_ours({"qchunking": {"chunk_length": 5, "horizon_length": 5}})[0] == {"algorithm": {"horizon": 5}}


def test_a_flag_without_a_value_does_not_take_the_next_flag_for_it() -> None:
    ours, _ = flags_as_ours(["--config", "rl_fold_box", "--fsdp_fix", "--dry_run", "--max_steps", "5"], ["rl_fold_box"])
    assert ours == ["rl_fold_box", "--dry-run", "--steps", "5"]
