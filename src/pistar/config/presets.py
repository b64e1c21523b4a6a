"""Named runs, and nothing else."""

import dataclasses
import difflib
from typing import Any

from pistar.agents.config import AcrlpdConfig, BcConfig, RiptConfig
from pistar.config.model_presets import MODELS, NUMBERS_ONLY, with_adapters
from pistar.config.online import ExplorationConfig, OnlineConfig, StartStatesConfig
from pistar.config.train import DataConfig, RLTrainConfig
from pistar.errors import UserError
from pistar.models.config import CriticConfig
from pistar.optim import AdamWConfig, ConstantSchedule, CosineSchedule

replace = dataclasses.replace

# --- Offline RL and imitation -----------------------------------------------------------------------------------------


def _cosine(peak: float, steps: int, warmup: int = 1_000) -> AdamWConfig:
    """A cosine down to a tenth of the peak by the last step."""
    return AdamWConfig(CosineSchedule(min(warmup, steps // 10), peak, steps, peak / 10))


_LARGE_CRITIC = CriticConfig(ensemble=10, hidden=(512, 512, 512))
_SMALL_CRITIC = CriticConfig(ensemble=2, hidden=(256, 256))

_FOLDING = AcrlpdConfig(
    horizon=20,
    gamma=0.999,  # folding takes a thousand steps and more
    critic=replace(_LARGE_CRITIC, dropout=0.1),
    critic_optimizer=_cosine(3e-4, 30_000),
    bc_scale=0.05,
    target_ess=0.3,
    critic_warmup=1_000,
)
_TEN_STEPS = AcrlpdConfig(
    horizon=10, gamma=0.99, critic=_LARGE_CRITIC, critic_optimizer=_cosine(3e-4, 30_000), critic_warmup=1_000
)
_ALOHA_FOLD = RLTrainConfig(
    name="rl_aloha_fold",
    robot="aloha",
    model=replace(MODELS["pi0"], action_horizon=20),
    algorithm=_FOLDING,
    policy_optimizer=_cosine(3e-5, 30_000),
    batch_size=256,
)
_FOLD_BOX = replace(
    _ALOHA_FOLD,
    name="rl_fold_box",
    algorithm=replace(_FOLDING, critic=_SMALL_CRITIC, critic_optimizer=_cosine(1e-3, 30_000), bc_scale=0.1),
    policy_optimizer=_cosine(1e-5, 30_000),
    batch_size=128,
)
_LIBERO = replace(
    _ALOHA_FOLD,
    name="rl_libero",
    robot="libero",
    model=replace(MODELS["pi05"], action_horizon=10),
    prompt_format="pi0",  # as OpenPI's pi05_libero: the state is not in the prompt
    algorithm=replace(_TEN_STEPS, candidates=8),
)
_DROID = replace(
    _ALOHA_FOLD, name="rl_droid", robot="droid", model=replace(MODELS["pi05"], action_horizon=10), algorithm=_TEN_STEPS
)
_DEBUG = RLTrainConfig(
    name="debug",
    robot="aloha",
    model=MODELS["pi0_tiny"],
    tokenizer="tiny",
    algorithm=AcrlpdConfig(
        horizon=5,
        critic=CriticConfig(ensemble=2, hidden=(32,)),
        critic_optimizer=_cosine(1e-3, 20),
        flow_steps=2,
        critic_warmup=2,
        audit_every=10,
        audit_frames=16,
    ),
    data=DataConfig(held_out=0.2),
    policy_optimizer=_cosine(1e-3, 20),
    steps=20,
    batch_size=8,
    log_every=5,
    save_every=10,
)
_QUICK_TEST = replace(
    _DEBUG,
    name="quick_test",
    algorithm=replace(_DEBUG.algorithm, critic_optimizer=_cosine(1e-3, 200), audit_every=100),
    policy_optimizer=_cosine(1e-3, 200),
    steps=200,
    batch_size=32,
    log_every=20,
    save_every=100,
)
_BENCHMARK = replace(
    _ALOHA_FOLD,
    name="benchmark",
    algorithm=replace(_FOLDING, critic_warmup=0, audit_every=0),
    steps=50,
    log_every=10,
    save_every=50,
)
_SMALL_ACRLPD = AcrlpdConfig(
    horizon=5,
    gamma=0.98,
    tau=0.01,
    candidates=4,
    flow_steps=3,
    critic=CriticConfig(ensemble=4, hidden=(256, 256), output_bias=-3.0, target_subset=2),
    critic_optimizer=_cosine(5e-4, 7_000, 100),
    critic_updates=4,  # values spread back through an episode by the update, and these are cheap
    critic_warmup=3_000,
    beta=0.5,
    weight_clip=30.0,
    awr_by="resample",
    bc_scale=0.0,
    augmentation=False,
)
_METAWORLD = RLTrainConfig(
    name="rl_metaworld",
    robot="metaworld",
    model=NUMBERS_ONLY,
    tokenizer="tiny",
    algorithm=_SMALL_ACRLPD,
    policy_optimizer=_cosine(1e-3, 4_000, 100),
    steps=7_000,
    batch_size=128,
    updates_per_dispatch=10,
)


def _imitating(config: RLTrainConfig, **changes: Any) -> RLTrainConfig:  # noqa: ANN401  # of the run's fields
    """The same run without a critic."""
    changes = {"name": config.name.replace("rl_", "bc_"), "algorithm": BcConfig()} | changes
    return replace(config, **changes)


# --- RIPT -------------------------------------------------------------------------------------------------------------

_RIPT_METAWORLD = replace(
    _METAWORLD,
    name="ript_metaworld",
    algorithm=RiptConfig(group_size=5, anchor=0.0, restart=True, ema_decay=0.995, augmentation=False),
    online=OnlineConfig(
        environment="metaworld/push-v3",
        limit=100,
        environments=32,
        start_states_per_iteration=100,
        exploration=ExplorationConfig(
            held_noise=0.25,
            held_noise_scale=2.5,
            action_noise=0.25,
            state_noise=0.25,
            state_noise_scale=1.5,
            adaptive=True,
        ),
        start_states=StartStatesConfig("unsolved_first"),
        updates=500,
        evaluate_every=4,
        evaluate_episodes=100,
    ),
    policy_optimizer=_cosine(3e-3, 500, 50),
    steps=12,
    save_every=1,
)
"""The settings that were measured, see the page on RIPT."""


def _online(config: RLTrainConfig, **changes: Any) -> OnlineConfig:  # noqa: ANN401  # of OnlineConfig
    """The same rollouts with some settings changed."""
    assert config.online is not None
    return replace(config.online, **changes)


_RIPT_LIBERO = replace(
    _LIBERO,
    name="ript_libero_goal",
    algorithm=RiptConfig(group_size=8, attempts=6, anchor=0.1),  # at 95 % success a third of the groups still differ
    online=OnlineConfig(
        environment="libero/goal",
        execute=5,
        environments=32,
        start_states_per_iteration=24,
        exploration=ExplorationConfig(held_noise=0.25, scaled_noise=0.125, action_noise=0.125),
        epochs=2.0,
        max_drift=0.05,
        evaluate_every=5,
        evaluate_episodes=10,
    ),
    policy_optimizer=AdamWConfig(ConstantSchedule(warmup_steps=20, peak_lr=1e-5)),
    steps=50,
    batch_size=64,
    save_every=5,
)


def _ript_libero(suite: str, environment: str, **changes: Any) -> RLTrainConfig:  # noqa: ANN401  # of OnlineConfig
    """The same run on another LIBERO suite."""
    online = _online(_RIPT_LIBERO, environment=environment, **changes)
    return replace(_RIPT_LIBERO, name=f"ript_libero_{suite}", online=online)


_RIPT_QUICK = replace(
    _RIPT_METAWORLD,
    name="ript_quick_test",
    algorithm=replace(_RIPT_METAWORLD.algorithm, group_size=4),
    online=_online(
        _RIPT_METAWORLD,
        environment="metaworld/reach-v3",
        limit=60,
        environments=8,
        start_states_per_iteration=8,
        updates=50,
        evaluate_every=1,
        evaluate_episodes=10,
    ),
    policy_optimizer=_cosine(1e-3, 50, 5),
    steps=2,
)
"""Everything once in a minute or two; learns next to nothing."""

_RIPT_FULL = replace(
    _RIPT_QUICK,
    name="ript_full_test",
    algorithm=RiptConfig(
        group_size=4,
        attempts=2,
        weighting="cfg",
        anchor=0.1,
        windows="every_step",
        auto_tune=True,
        ema_decay=0.995,
        augmentation=False,
    ),
    online=_online(
        _RIPT_QUICK,
        environment="metaworld/reach-v3,metaworld/push-v3",
        exploration=ExplorationConfig(held_noise=0.2, scaled_noise=0.2, action_noise=0.2, state_noise=0.2),
        start_states=StartStatesConfig("curriculum"),
        updates=None,
        max_drift=0.1,
        patience=3,
        overlap=True,
        evaluate_every=2,
    ),
    steps=4,
    save_every=2,
)

_RIPT = (
    _RIPT_METAWORLD,
    _RIPT_LIBERO,
    _ript_libero("spatial", "libero/spatial"),
    _ript_libero("object", "libero/object"),
    _ript_libero("long", "libero/10", start_states_per_iteration=48),
    _ript_libero("90", "libero/90", start_states_per_iteration=180, evaluate_episodes=2),
    replace(
        _RIPT_LIBERO,
        name="ript_aloha_sim",
        robot="aloha_sim",
        model=replace(MODELS["pi0"], action_horizon=50),
        prompt_format=None,
        online=_online(_RIPT_LIBERO, environment="aloha/transfer-cube", execute=None, evaluate_episodes=50),
    ),
    _RIPT_QUICK,
    _RIPT_FULL,
    replace(
        _RIPT_METAWORLD,
        name="ript_benchmark",
        online=_online(_RIPT_METAWORLD, evaluate_every=0, evaluate_episodes=10),
        steps=3,
        save_every=3,
    ),
    replace(
        _RIPT_LIBERO,
        name="ript_distributed",
        online=_online(_RIPT_LIBERO, overlap=True),  # environments and workers are each host's
        batch_size=256,
    ),
)

# --- ACRLPD online ----------------------------------------------------------------------------------------------------

_ACRLPD_ONLINE_METAWORLD = replace(
    _METAWORLD,
    name="acrlpd_online_metaworld",
    algorithm=replace(_SMALL_ACRLPD, critic_optimizer=_cosine(5e-4, 18_000, 100), critic_warmup=600),
    data=DataConfig(held_out=0.0),
    online=OnlineConfig(
        environment="metaworld/push-v3",
        limit=150,
        environments=32,
        start_states_per_iteration=50,
        start_states=StartStatesConfig("uniform"),
        demonstrations=0.5,
        updates=300,
        evaluate_every=5,
        evaluate_episodes=100,
    ),
    policy_optimizer=_cosine(1e-3, 3_900, 100),
    steps=15,
    save_every=1,
)
_ACRLPD_ONLINE_LIBERO = replace(
    _LIBERO,
    name="acrlpd_online_libero",
    data=DataConfig(held_out=0.0),
    online=OnlineConfig(
        environment="libero/spatial/0",
        start_states_per_iteration=40,
        start_states=StartStatesConfig("uniform"),
        replay_capacity=50_000,
        replay_min_steps=2_000,
        demonstrations=0.5,
        updates=200,
        evaluate_every=5,
        evaluate_episodes=10,  # as many as LIBERO holds out
    ),
    steps=150,
    save_every=10,
    keep_every=None,
)
_ACRLPD_ONLINE = (
    _ACRLPD_ONLINE_METAWORLD,
    _ACRLPD_ONLINE_LIBERO,
    replace(
        _ACRLPD_ONLINE_LIBERO,
        name="acrlpd_online_aloha_sim",
        robot="aloha_sim",
        model=MODELS["pi0"],
        prompt_format=None,
        algorithm=replace(_TEN_STEPS, gamma=0.997, candidates=8),
        online=_online(_ACRLPD_ONLINE_LIBERO, environment="aloha/transfer-cube", evaluate_episodes=50),
    ),
)

# --- All of them ------------------------------------------------------------------------------------------------------

_RL = (_ALOHA_FOLD, _FOLD_BOX, _LIBERO, _DROID)

PRESETS: dict[str, RLTrainConfig] = {
    config.name: config
    for config in (
        *_RL,
        *(_imitating(config) for config in _RL),
        _METAWORLD,
        _imitating(
            _METAWORLD,
            algorithm=BcConfig(augmentation=False),
            policy_optimizer=_cosine(3e-3, 6_000, 100),
            steps=6_000,
        ),
        *_RIPT,
        *_ACRLPD_ONLINE,
        _DEBUG,
        _imitating(_DEBUG, name="debug_bc"),
        _QUICK_TEST,
        _BENCHMARK,
    )
}
"""Runs by name. The dataset is always the user's: --data.datasets PATH."""


def get_config(name: str) -> RLTrainConfig:
    """The run of that name, or an error with the nearest name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1) or list(PRESETS)
        raise UserError(f"There is no preset {name!r}; try {', '.join(near)}.")
    return PRESETS[name]


def with_lora(config: RLTrainConfig) -> RLTrainConfig:
    """The same run on adapters of OpenPI's sizes, without an average of the weights, as OpenPI."""
    algorithm = replace(config.algorithm, ema_decay=None)
    return replace(config, model=with_adapters(config.model), algorithm=algorithm)


def list_configs() -> list[str]:
    """Names of all runs."""
    return list(PRESETS)
