"""Settings of pistar's own older versions: complete files of older runs, and parts of them in users' files."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from pistar.agents.config import AcrlpdConfig, BcConfig, RiptConfig
from pistar.config.migrate_own import GONE, RENAMED, from_before
from pistar.config.online import OnlineConfig
from pistar.config.presets import PRESETS, get_config
from pistar.config.train import RLTrainConfig, load_config
from pistar.errors import UserError
from pistar.tables import to_table

from helpers.paths import FIXTURES

FILES = sorted((FIXTURES / "older_settings").glob("*.yaml"))
"""Complete config.yaml files, as the version before wrote them into its runs."""

OF_REWARDS = ("data.without_success", "data.rewards", "data.tails")
OF_CRITIC = ("critic_optimizer", "audit_every", "audit_frames")
OF_ROLLOUTS = (
    "online.contexts",
    "online.exploration.warm_noise",
    "online.exploration.warm_noise_scale",
    "online.exploration.misled",
    "online.exploration.misled_scale",
    "online.starts",
    "online.starts.at_random",
    "online.health.rollbacks",
    "online.health.on_trouble",
)
OF_RIPT = tuple(
    f"online.{name}" for name in ("rollouts", "attempts", "replay", "replay_keeps", "windows", "restart", "auto_tune")
)
CHANGED = {
    "debug": ("data.weighed", *OF_REWARDS, *OF_CRITIC),
    "debug_bc": ("data.weighed",),
    "rl_aloha_fold": ("data.weighed", *OF_REWARDS, *OF_CRITIC),
    "ript_full_test": ("data.weighed", *OF_ROLLOUTS, *OF_RIPT),
    "acrlpd_online_metaworld": ("data.weighed", *OF_REWARDS, *OF_CRITIC, *OF_ROLLOUTS),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("with_default", [False, True], ids=["alone", "over the preset"])
def test_a_complete_file_of_the_version_before_is_todays_preset(path: Path, with_default: bool) -> None:
    preset = get_config(path.stem)
    assert load_config(path, preset if with_default else None) == preset


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_changed_name_is_noted_once(path: Path) -> None:
    notes: list[str] = []
    load_config(path, say=notes.append)
    assert sorted(notes) == sorted(f"{path}: {old} is {RENAMED[old]} now." for old in CHANGED[path.stem])


def test_there_is_a_file_of_each_kind_of_run() -> None:
    assert {path.stem for path in FILES} == set(CHANGED)
    assert {type(get_config(name).algorithm) for name in CHANGED} == {BcConfig, AcrlpdConfig, RiptConfig}
    assert {old for names in CHANGED.values() for old in names} == set(RENAMED)


def names_of(config: object, prefix: str = "") -> set[str]:
    """Dotted names of all fields, those of tables included."""
    found = set()
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        found.add(prefix + field.name)
        if dataclasses.is_dataclass(value):
            found |= names_of(value, f"{prefix}{field.name}.")
    return found


def test_new_names_exist_and_old_ones_do_not() -> None:
    today = set().union(*(names_of(preset) for preset in PRESETS.values()))
    assert set(RENAMED.values()) <= today
    assert not today & {*RENAMED, *GONE}


@pytest.mark.parametrize("preset", ["debug", "ript_full_test", "acrlpd_online_metaworld"])
def test_todays_files_are_left_alone(preset: str) -> None:
    table = to_table(get_config(preset))
    assert from_before(table) == (table, [])


# --- Parts of a file --------------------------------------------------------------------------------------------------


def loaded(path: Path, preset: str, table: dict[str, Any]) -> tuple[RLTrainConfig, list[str]]:
    file = path / "mine.yaml"
    file.write_text(yaml.safe_dump(table), encoding="utf-8")
    notes: list[str] = []
    return load_config(file, get_config(preset), say=lambda note: notes.append(note.removeprefix(f"{file}: "))), notes


def test_a_few_old_settings_of_rollouts_change_only_themselves(tmp_path: Path) -> None:
    preset = get_config("ript_metaworld")
    assert isinstance(preset.online, OnlineConfig)
    config, notes = loaded(tmp_path, "ript_metaworld", {"online": {"contexts": 10}})
    assert config == dataclasses.replace(
        preset, online=dataclasses.replace(preset.online, start_states_per_iteration=10)
    )
    assert notes == ["online.contexts is online.start_states_per_iteration now."]


def test_old_settings_of_rollouts_that_are_the_algorithms_now_are_set_there(tmp_path: Path) -> None:
    config, notes = loaded(tmp_path, "ript_metaworld", {"online": {"rollouts": 3, "starts": {"at_random": 0.5}}})
    preset = get_config("ript_metaworld")
    assert isinstance(preset.algorithm, RiptConfig)
    assert config.algorithm == dataclasses.replace(preset.algorithm, group_size=3)
    assert config.online is not None
    assert config.online.start_states.uniform_fraction == 0.5
    assert len(notes) == 2


def test_old_settings_of_the_critic_and_rewards_are_the_algorithms_now(tmp_path: Path) -> None:
    old = {
        "critic_optimizer": {"weight_decay": 0.5},
        "audit_every": 7,
        "data": {"tails": "drop", "rewards": {"kind": "time"}, "weighed": None},
    }
    config, _ = loaded(tmp_path, "rl_fold_box", old)
    preset = get_config("rl_fold_box")
    assert isinstance(config.algorithm, AcrlpdConfig)
    assert isinstance(preset.algorithm, AcrlpdConfig)
    assert config.algorithm.critic_optimizer == dataclasses.replace(preset.algorithm.critic_optimizer, weight_decay=0.5)
    assert (config.algorithm.audit_every, config.algorithm.tails, config.algorithm.rewards.kind) == (7, "drop", "time")
    assert config.data == preset.data


def test_settings_of_another_algorithm_are_dropped(tmp_path: Path) -> None:
    """Every run had them, whether it used them or not."""
    config, notes = loaded(tmp_path, "bc_fold_box", {"audit_every": 7, "data": {"tails": "drop"}})
    assert (config, notes) == (get_config("bc_fold_box"), [])


def test_old_values_have_new_names(tmp_path: Path) -> None:
    config, notes = loaded(tmp_path, "ript_metaworld", {"online": {"health": {"on_trouble": "tell"}}})
    assert config.online is not None
    assert config.online.health.on_failure == "report"
    assert notes == ["online.health.on_trouble is online.health.on_failure now."]


@pytest.mark.parametrize(
    ("old", "words"),
    [
        ({"temperature_optimizer": {"schedule": {"peak_lr": 0.1}}}, "constant learning rate of 0.01"),
        ({"temperature_optimizer": {"b2": 0.99}}, "temperature_optimizer.b2 is 0.99 and is no setting any more"),
        ({"robot": "aloha", "algorithm": {"action_dims": 7}}, "all 14 numbers of aloha's actions"),
    ],
)
def test_settings_that_are_fixed_now_are_refused_with_another_value(
    tmp_path: Path, old: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        loaded(tmp_path, "debug", old)


def test_names_of_columns_are_not_taken_apart(tmp_path: Path) -> None:
    columns = {"images/cam.high": "observation.images.top"}
    config, _ = loaded(tmp_path, "debug", {"data": {"columns": columns, "tails": "drop"}})
    assert config.data.columns == columns


def test_an_old_and_a_new_name_must_agree(tmp_path: Path) -> None:
    agreed, _ = loaded(tmp_path, "ript_metaworld", {"online": {"contexts": 5, "start_states_per_iteration": 5}})
    assert agreed.online is not None
    assert agreed.online.start_states_per_iteration == 5
    for names in (("contexts", "start_states_per_iteration"), ("start_states_per_iteration", "contexts")):
        with pytest.raises(UserError, match=r"online.contexts is \d and online.start_states_per_iteration, its name"):
            loaded(tmp_path, "ript_metaworld", {"online": dict(zip(names, (5, 6), strict=True))})


# --- Settings that are gone -------------------------------------------------------------------------------------------


def nested(dotted: str, value: object) -> dict[str, Any]:
    first, _, rest = dotted.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize("name", GONE)
def test_a_setting_that_is_gone_is_dropped_at_its_default_and_else_refused_with_the_remedy(name: str) -> None:
    default, instead = GONE[name]
    assert from_before(nested(name, default)) == ({}, [])
    other = not default if isinstance(default, bool) else 7
    with pytest.raises(UserError) as caught:
        from_before(nested(name, other))
    assert str(caught.value) == f"{name} is {other} and is no setting any more; {instead}: leave it out."


def test_the_file_with_such_a_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.yaml: algorithm\.actor_scale is 2\.0 .*; scale algorithm\.bc_scale"):
        loaded(tmp_path, "debug", {"algorithm": {"actor_scale": 2.0}})


def test_the_huber_loss_of_a_linear_critic_is_refused_and_other_losses_are_dropped() -> None:
    huber = {"algorithm": {"critic_loss": "huber", "critic": {"head": "linear"}}}
    with pytest.raises(UserError, match="critic_loss is huber, and a linear head learns by squared error now; start"):
        from_before(huber)
    squared = {"algorithm": {"critic_loss": "squared", "critic": {"head": "linear"}}}
    assert from_before(squared)[0] == {"algorithm": {"critic": {"head": "linear"}}}
    unused = {"algorithm": {"critic_loss": "huber", "critic": {"head": "bounded"}}}
    assert from_before(unused)[0] == {"algorithm": {"critic": {"head": "bounded"}}}


# --- Recorded rewards -------------------------------------------------------------------------------------------------


def recorded(**algorithm: object) -> dict[str, Any]:
    return {"data": {"rewards": {"kind": "recorded"}}, "algorithm": algorithm}


@pytest.mark.parametrize(
    ("gamma", "step", "last", "expected"),
    [
        (0.9, [-1.0, 0.5], [-2.0, 3.0], [-10.0, 5.0]),  # −1/(1 − γ) and 0.5/(1 − γ): going on for ever
        (0.5, [-1, 1], [-9, 9], [-9.0, 9.0]),  # ±2 for ever, and the last reward is further
        (1.0, [0, 0], [0, 4], [0.0, 4.0]),
    ],
)
def test_bounds_of_recorded_rewards_become_the_range_of_returns(
    gamma: float, step: list[float], last: list[float], expected: list[float]
) -> None:
    table, _ = from_before(recorded(gamma=gamma, step_reward=step, last_reward=last), "AcrlpdConfig")
    assert table["algorithm"] == {
        "gamma": gamma,
        "return_range": pytest.approx(expected),
        "rewards": {"kind": "recorded"},
    }


def test_the_presets_discount_counts_where_the_file_has_none(tmp_path: Path) -> None:
    """rl_fold_box has γ = 0.999: −1 per step for ever is −1000."""
    config, _ = loaded(tmp_path, "rl_fold_box", recorded(step_reward=[-1.0, -1.0], last_reward=[-5.0, 0.0]))
    assert isinstance(config.algorithm, AcrlpdConfig)
    assert config.algorithm.return_range == pytest.approx((-1000.0, 0.0))


def test_a_range_of_returns_that_was_given_stays() -> None:
    given = recorded(gamma=0.9, return_range=[-1.0, 1.0], step_reward=[-1.0, -1.0], last_reward=[0.0, 0.0])
    assert from_before(given, "AcrlpdConfig")[0]["algorithm"]["return_range"] == [-1.0, 1.0]


def test_bounds_of_other_rewards_are_dropped() -> None:
    table = {"data": {"rewards": {"kind": "success"}}, "algorithm": {"step_reward": [0, 0], "last_reward": [0, 1]}}
    assert from_before(table, "AcrlpdConfig")[0] == {"algorithm": {"rewards": {"kind": "success"}}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"gamma": 1.0, "step_reward": [-1.0, -1.0], "last_reward": [0.0, 0.0]},
            "algorithm.return_range is none; give",
        ),
        ({"step_reward": [-1.0, -1.0]}, "algorithm.return_range is none; give the minimum and maximum"),
        ({"step_reward": -1, "last_reward": [0, 0]}, "step_reward is -1; give the minimum and maximum reward"),
        ({"step_reward": ["a", "b"], "last_reward": [0, 0]}, "step_reward is .*; give the minimum and maximum"),
    ],
)
def test_recorded_rewards_without_bounds_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        loaded(tmp_path, "rl_fold_box", recorded(**changes))
