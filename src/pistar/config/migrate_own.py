"""Settings of pistar's own older versions under today's names.

For the config.yaml of older runs, and for users' files. A setting that is gone is dropped if it had its default value,
and refused otherwise.
"""

from collections.abc import Mapping
from typing import Any

from pistar.agents.estimators import reachable_returns
from pistar.data.robots import find_robot
from pistar.errors import UserError

RENAMED = {
    "critic_optimizer": "algorithm.critic_optimizer",
    "audit_every": "algorithm.audit_every",
    "audit_frames": "algorithm.audit_frames",
    "data.weighed": "data.window_weights",
    "data.rewards": "algorithm.rewards",
    "data.tails": "algorithm.tails",
    "data.without_success": "algorithm.without_success",
    "online.contexts": "online.start_states_per_iteration",
    "online.starts": "online.start_states",
    "online.starts.at_random": "online.start_states.uniform_fraction",
    "online.exploration.warm_noise": "online.exploration.scaled_noise",
    "online.exploration.warm_noise_scale": "online.exploration.scaled_noise_scale",
    "online.exploration.misled": "online.exploration.state_noise",
    "online.exploration.misled_scale": "online.exploration.state_noise_scale",
    "online.health.rollbacks": "online.health.max_rollbacks",
    "online.health.on_trouble": "online.health.on_failure",
    "online.rollouts": "algorithm.group_size",
    "online.attempts": "algorithm.attempts",
    "online.replay": "algorithm.replay",
    "online.replay_keeps": "algorithm.replay_keeps",
    "online.windows": "algorithm.windows",
    "online.restart": "algorithm.restart",
    "online.auto_tune": "algorithm.auto_tune",
}
"""Old dotted name → today's."""

RENAMED_VALUES = {("online.health.on_failure", "tell"): "report"}
"""Today's dotted name and an old value → today's."""

_TEMPERATURE = "the temperature is adapted by AdamW with a constant learning rate of 0.01"
GONE: dict[str, tuple[object, str]] = {
    "temperature_optimizer.schedule.type": ("CosineSchedule", _TEMPERATURE),
    "temperature_optimizer.schedule.warmup_steps": (0, _TEMPERATURE),
    "temperature_optimizer.schedule.peak_lr": (0.01, _TEMPERATURE),
    "temperature_optimizer.schedule.decay_steps": (1, _TEMPERATURE),
    "temperature_optimizer.schedule.decay_lr": (0.01, _TEMPERATURE),
    "temperature_optimizer.b1": (0.9, _TEMPERATURE),
    "temperature_optimizer.b2": (0.95, _TEMPERATURE),
    "temperature_optimizer.eps": (1e-8, _TEMPERATURE),
    "temperature_optimizer.weight_decay": (1e-10, _TEMPERATURE),
    "temperature_optimizer.clip_norm": (1.0, _TEMPERATURE),
    "temperature_optimizer.moments": ("float32", _TEMPERATURE),
    "algorithm.actor_scale": (1.0, "scale algorithm.bc_scale and the learning rate instead"),
    "algorithm.critic.layer_norm": (True, "critics always have it"),
    "algorithm.critic.std_factor": (1.0, "mean_minus_std subtracts one standard deviation"),
    "algorithm.critic.own_image_size": (64, "the critic's own encoder reads 64 pixels"),
    "algorithm.critic.own_width": (256, "the critic's own encoder has 256 features"),
    "online.health.max_skipped": (0.5, "it is fixed"),
    "online.health.max_gradient_norm": (1e3, "it is fixed"),
    "online.health.max_weight_growth": (2.0, "it is fixed"),
    "online.health.max_memory_growth": (1.0, "it is fixed"),
    "online.tuning.target_drift": (0.01, "it is fixed"),
    "online.tuning.tolerance": (2.0, "it is fixed"),
    "online.tuning.factor": (1.5, "it is fixed"),
    "online.tuning.most": (4.0, "it is fixed"),
    "online.tuning.scarce": (0.2, "it is fixed"),
    "online.tuning.plenty": (0.6, "it is fixed"),
}
"""Old dotted name → its default, and what there is instead."""

_OF_RIPT = tuple(old for old, new in RENAMED.items() if old.startswith("online.") and new.startswith("algorithm."))
_WITHOUT_RIPT = {
    "online.rollouts": 1,
    "online.attempts": 1,
    "online.replay": "none",
    "online.windows": "looked",
    "online.restart": False,
    "online.auto_tune": False,
}
"""What RIPT's settings were in a run of ACRLPD."""
_OF_ACRLPD = ("critic_optimizer", "audit_every", "audit_frames", "data.rewards", "data.tails", "data.without_success")
_CHECKED = ("algorithm.action_dims", "algorithm.critic_loss", "algorithm.step_reward", "algorithm.last_reward")
"""Gone, and checked together with other settings."""


def from_before(
    table: Mapping[str, Any], kind: str | None = None, gamma: float = 0.99
) -> tuple[dict[str, Any], list[str]]:
    """A table under today's names, and a note on every name that changed.

    `kind` and `gamma` are the algorithm and the discount of the preset, for tables that do not name their own.
    """
    flat = _flatten(table)
    if not any(_is_old(name) for name in flat):
        return dict(table), []
    kind = flat.get("algorithm.type", kind)
    if "online.environment" in flat and flat["online.environment"] is None:  # a run that made no rollouts
        flat = {name: value for name, value in flat.items() if not name.startswith("online.")} | {"online": None}
    _bound_recorded_rewards(flat, gamma)
    _check_action_dims(flat)
    if flat.get("algorithm.critic_loss") == "huber" and flat.get("algorithm.critic.head") == "linear":
        raise UserError(
            "algorithm.critic_loss is huber, and a linear head learns by squared error now; start a new run."
        )
    renamed: dict[str, Any] = {}
    notes: dict[str, None] = {}
    for name, value in flat.items():
        if name in GONE:
            _check_default(name, value)
        elif name in _CHECKED:
            continue
        elif _is_under(name, _OF_RIPT) and kind != "RiptConfig":
            if kind == "AcrlpdConfig" and value != _WITHOUT_RIPT.get(name, value):
                raise UserError(f"{name} is {value}, which is for RIPT; ACRLPD has no such setting: leave it out.")
        elif _is_under(name, _OF_ACRLPD) and kind != "AcrlpdConfig":
            continue  # another algorithm's
        else:
            if old := _renamed_part(name):
                notes[f"{old} is {RENAMED[old]} now."] = None
            new = _new_name(name)
            if renamed.get(new, value) != value or (new != name and flat.get(new, value) != value):
                raise UserError(f"{name} is {value} and {new}, its name today, has another value; leave {name} out.")
            renamed[new] = RENAMED_VALUES.get((new, value), value) if isinstance(value, str) else value
    return _unflatten(renamed), list(notes)


def _is_under(name: str, groups: tuple[str, ...]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def _is_old(name: str) -> bool:
    return _new_name(name) != name or name in _CHECKED or name in GONE


def _renamed_part(name: str) -> str:
    """The longest beginning of a name that has another name now; empty if there is none."""
    return max((old for old in RENAMED if _is_under(name, (old,))), key=len, default="")


def _new_name(name: str) -> str:
    old = _renamed_part(name)
    return RENAMED[old] + name[len(old) :] if old else name


def _check_default(name: str, value: object) -> None:
    default, instead = GONE[name]
    if value != default:
        raise UserError(f"{name} is {value} and is no setting any more; {instead}: leave it out.")


def _check_action_dims(flat: Mapping[str, Any]) -> None:
    """The critic always values all numbers of the robot's actions."""
    ours, robot = flat.get("algorithm.action_dims"), flat.get("robot")
    if ours is not None and robot is not None and ours != find_robot(robot).action_dim:
        raise UserError(
            f"algorithm.action_dims is {ours} and is no setting any more; the critic values all "
            f"{find_robot(robot).action_dim} numbers of {robot}'s actions: start a new run."
        )


def _bound_recorded_rewards(flat: dict[str, Any], gamma: float) -> None:
    """Compute the range of returns, which is a setting now, from the minimum and maximum rewards of older versions."""
    names = ("algorithm.step_reward", "algorithm.last_reward")
    recorded = flat.get("data.rewards.kind") == "recorded"
    if not recorded or flat.get("algorithm.return_range") is not None or any(flat.get(name) is None for name in names):
        return
    step, last = (_bounds(name, flat[name]) for name in names)
    gamma = float(flat.get("algorithm.gamma", gamma))
    if gamma < 1 or step == (0.0, 0.0):  # else returns have no bound, and the user has to give one
        flat["algorithm.return_range"] = list(reachable_returns(step, last, gamma))


def _bounds(name: str, value: object) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(bound, int | float) for bound in value):
        return float(value[0]), float(value[1])
    raise UserError(f"{name} is {value!r}; give the minimum and maximum reward, or algorithm.return_range instead.")


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value and prefix + name != "data.columns":  # whose keys are no settings
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for dotted, value in flat.items():
        *groups, last = str(dotted).split(".")
        inner = table
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return table
