"""Named configurations, and nothing else."""

import dataclasses
import difflib
from typing import Any

from pistar.config import (
    CAMERAS,
    GEMMA_VARIANTS,
    LORA_VARIANTS,
    AcrlpdConfig,
    CriticConfig,
    GemmaConfig,
    Pi0Config,
    RiptConfig,
    SiglipConfig,
)
from pistar.errors import UserError
from pistar.training.config import BcConfig, DataConfig, RLTrainConfig
from pistar.training.online_config import ExplorationConfig, OnlineConfig, StartsConfig
from pistar.training.optimizers import AdamWConfig, ConstantSchedule, CosineSchedule

_SO400M_14 = SiglipConfig(width=1152, depth=27, mlp_dim=4304, num_heads=16, patch_size=14)

_PI0 = Pi0Config(pi05=False, vlm=GEMMA_VARIANTS["gemma_2b"], expert=GEMMA_VARIANTS["gemma_300m"], vision=_SO400M_14)
_PI05 = dataclasses.replace(_PI0, pi05=True, max_token_len=200)


def _with_adapters(model: Pi0Config) -> Pi0Config:
    """Of OpenPI's sizes, on both experts."""
    return dataclasses.replace(
        model,
        vlm=dataclasses.replace(model.vlm, lora=LORA_VARIANTS["gemma_2b"]),
        expert=dataclasses.replace(model.expert, lora=LORA_VARIANTS["gemma_300m"]),
    )


_TINY = dataclasses.replace(
    _PI0,
    vlm=GemmaConfig(width=64, depth=3, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16),
    expert=GemmaConfig(width=32, depth=3, mlp_dim=96, num_heads=8, num_kv_heads=1, head_dim=16),
    vision=SiglipConfig(width=32, depth=2, mlp_dim=64, num_heads=4, patch_size=14),
    action_horizon=10,
    vocab_size=512,
    image_size=56,
    dtype="float32",
    remat="dots",  # quicker than keeping everything, even where memory is no concern
)

MODELS: dict[str, Pi0Config] = {
    "pi0": _PI0,
    "pi05": _PI05,
    "pi0_lora": _with_adapters(_PI0),
    "pi05_lora": _with_adapters(_PI05),
    "pi0_tiny": _TINY,
    "pi05_tiny": dataclasses.replace(_TINY, pi05=True, max_token_len=200),
}
"""Model sizes by name. The tiny ones run on a laptop in seconds and need no PaliGemma tokenizer."""


def _cosine(peak: float, steps: int, warmup: int = 1_000) -> AdamWConfig:
    """Down to a tenth by the last step."""
    return AdamWConfig(CosineSchedule(min(warmup, steps // 10), peak, steps, peak / 10))


_LARGE_CRITIC = CriticConfig(ensemble=10, hidden=(512, 512, 512))
_SMALL_CRITIC = CriticConfig(ensemble=2, hidden=(256, 256))

_FOLDING = AcrlpdConfig(
    horizon=20,
    action_dims=14,
    gamma=0.999,  # it takes a thousand steps and more
    critic=dataclasses.replace(_LARGE_CRITIC, dropout=0.1),
    bc_scale=0.05,
    target_ess=0.3,
    critic_warmup=1_000,
)
_ALOHA_FOLD = RLTrainConfig(
    name="rl_aloha_fold",
    robot="aloha",
    model=dataclasses.replace(_PI0, action_horizon=20),
    algorithm=_FOLDING,
    policy_optimizer=_cosine(3e-5, 30_000),
    critic_optimizer=_cosine(3e-4, 30_000),
    batch_size=256,
)
_FOLD_BOX = dataclasses.replace(
    _ALOHA_FOLD,
    name="rl_fold_box",
    algorithm=dataclasses.replace(_FOLDING, critic=_SMALL_CRITIC, bc_scale=0.1),
    policy_optimizer=_cosine(1e-5, 30_000),
    critic_optimizer=_cosine(1e-3, 30_000),
    batch_size=128,
)
_LIBERO = dataclasses.replace(
    _ALOHA_FOLD,
    name="rl_libero",
    robot="libero",
    model=dataclasses.replace(_PI05, action_horizon=10),
    prompt_format="pi0",  # as OpenPI's pi05_libero: the state is not in the prompt
    algorithm=AcrlpdConfig(
        horizon=10, action_dims=7, gamma=0.99, critic=_LARGE_CRITIC, candidates=8, critic_warmup=1_000
    ),
)
_DROID = dataclasses.replace(
    _ALOHA_FOLD,
    name="rl_droid",
    robot="droid",
    model=dataclasses.replace(_PI05, action_horizon=10),
    algorithm=AcrlpdConfig(horizon=10, action_dims=8, gamma=0.99, critic=_LARGE_CRITIC, critic_warmup=1_000),
)
_DEBUG = RLTrainConfig(
    name="debug",
    robot="aloha",
    model=_TINY,
    tokenizer="tiny",
    algorithm=AcrlpdConfig(
        horizon=5, action_dims=14, critic=CriticConfig(ensemble=2, hidden=(32,)), flow_steps=2, critic_warmup=2
    ),
    data=DataConfig(held_out=0.2),
    policy_optimizer=_cosine(1e-3, 20),
    critic_optimizer=_cosine(1e-3, 20),
    steps=20,
    batch_size=8,
    log_every=5,
    save_every=10,
    audit_every=10,
    audit_frames=16,
)


_SMALL_ACRLPD = AcrlpdConfig(
    horizon=5,
    action_dims=4,
    gamma=0.98,
    tau=0.01,
    candidates=4,
    flow_steps=3,
    critic=CriticConfig(ensemble=4, hidden=(256, 256), output_bias=-3.0, target_subset=2),
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
    model=Pi0Config(
        pi05=False,
        vlm=GemmaConfig(width=16, depth=1, mlp_dim=32, num_heads=1, num_kv_heads=1, head_dim=32),
        expert=GemmaConfig(width=128, depth=1, mlp_dim=256, num_heads=1, num_kv_heads=1, head_dim=32),
        vision=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=1, patch_size=14),
        action_dim=17,
        action_horizon=5,
        max_token_len=28,
        vocab_size=512,
        image_size=14,
        cameras=CAMERAS[:1],
        dtype="float32",
        remat="none",
    ),
    tokenizer="tiny",
    algorithm=_SMALL_ACRLPD,
    policy_optimizer=_cosine(1e-3, 4_000, 100),
    critic_optimizer=_cosine(5e-4, 7_000, 100),
    steps=7_000,
    batch_size=128,
    updates_per_dispatch=10,
    save_every=1_000,
)
"""What a robot of 17 numbers and no camera can be taught on a laptop, see docs/learning.md."""


def _imitating(config: RLTrainConfig) -> RLTrainConfig:
    """The same run without a critic."""
    return dataclasses.replace(config, name=config.name.replace("rl_", "bc_"), algorithm=BcConfig())


_RIPT_METAWORLD = dataclasses.replace(
    _METAWORLD,
    name="ript_metaworld",
    algorithm=RiptConfig(anchor=0.0, ema_decay=0.995, augmentation=False),
    online=OnlineConfig(
        environment="metaworld/push-v3",
        limit=100,
        environments=32,
        contexts=100,
        rollouts=5,
        exploration=ExplorationConfig(
            held_noise=0.25,
            held_noise_scale=2.5,
            action_noise=0.25,
            misled=0.25,
            misled_scale=1.5,
            adaptive=True,
        ),
        starts=StartsConfig("unsolved_first"),
        updates=500,
        restart=True,
        evaluate_every=4,
        evaluate_episodes=100,
    ),
    policy_optimizer=_cosine(3e-3, 500, 50),
    steps=12,
    batch_size=128,
    save_every=1,
)
"""What was measured, see docs/ript.md."""

_PRACTISING = OnlineConfig(
    environments=32,
    contexts=24,
    rollouts=8,
    attempts=6,  # at 95 % success only a third of the groups of 8 still differ
    exploration=ExplorationConfig(held_noise=0.25, warm_noise=0.125, action_noise=0.125),
    starts=StartsConfig("skip_solved"),
    epochs=2.0,
    max_drift=0.05,
    evaluate_every=5,
    evaluate_episodes=10,
)
_RIPT_LIBERO = dataclasses.replace(
    _LIBERO,
    name="ript_libero_goal",
    algorithm=RiptConfig(anchor=0.1),
    online=dataclasses.replace(_PRACTISING, environment="libero/goal", execute=5),
    policy_optimizer=AdamWConfig(ConstantSchedule(warmup_steps=20, peak_lr=1e-5)),
    steps=50,
    batch_size=64,
    save_every=5,
)


def _practising_in(suite: str, environment: str, **changes: Any) -> RLTrainConfig:  # noqa: ANN401  # of OnlineConfig
    """The same run in another of LIBERO's suites."""
    online = dataclasses.replace(_RIPT_LIBERO.online, environment=environment, **changes)
    return dataclasses.replace(_RIPT_LIBERO, name=f"ript_libero_{suite}", online=online)


_RIPT_QUICK = dataclasses.replace(
    _RIPT_METAWORLD,
    name="ript_quick_test",
    online=dataclasses.replace(
        _RIPT_METAWORLD.online,
        environment="metaworld/reach-v3",
        limit=60,
        environments=8,
        contexts=8,
        rollouts=4,
        updates=50,
        evaluate_every=1,
        evaluate_episodes=10,
    ),
    policy_optimizer=_cosine(1e-3, 50, 5),
    steps=2,
)
"""The whole way in a minute or two; teaches next to nothing."""

_RIPT = (
    _RIPT_METAWORLD,
    _RIPT_LIBERO,
    _practising_in("spatial", "libero/spatial"),
    _practising_in("object", "libero/object"),
    _practising_in("long", "libero/10", contexts=48),
    _practising_in("90", "libero/90", contexts=180, evaluate_episodes=2),
    dataclasses.replace(
        _RIPT_LIBERO,
        name="ript_aloha_sim",
        robot="aloha_sim",
        model=dataclasses.replace(_PI0, action_horizon=50),
        prompt_format=None,
        online=dataclasses.replace(_PRACTISING, environment="aloha/transfer-cube", evaluate_episodes=50),
    ),
    _RIPT_QUICK,
    dataclasses.replace(
        _RIPT_QUICK,
        name="ript_full_test",
        algorithm=RiptConfig("cfg", anchor=0.1, ema_decay=0.995, augmentation=False),
        online=dataclasses.replace(
            _RIPT_QUICK.online,
            environment="metaworld/reach-v3,metaworld/push-v3",
            exploration=ExplorationConfig(held_noise=0.2, warm_noise=0.2, action_noise=0.2, misled=0.2),
            starts=StartsConfig("curriculum"),
            windows="every_step",
            attempts=2,
            updates=None,
            restart=False,
            max_drift=0.1,
            patience=3,
            overlap=True,
            auto_tune=True,
            evaluate_every=2,
        ),
        steps=4,
        save_every=2,
    ),
    dataclasses.replace(
        _RIPT_METAWORLD,
        name="ript_benchmark",
        online=dataclasses.replace(_RIPT_METAWORLD.online, evaluate_every=0, evaluate_episodes=10),
        steps=3,
        save_every=3,
    ),
    dataclasses.replace(
        _RIPT_LIBERO,
        name="ript_distributed",
        online=dataclasses.replace(_RIPT_LIBERO.online, overlap=True),  # environments and workers are each host's
        batch_size=256,
    ),
)


_ACRLPD_ONLINE_METAWORLD = dataclasses.replace(
    _METAWORLD,
    name="acrlpd_online_metaworld",
    algorithm=dataclasses.replace(_SMALL_ACRLPD, critic_warmup=600),
    data=DataConfig(held_out=0.0),
    online=OnlineConfig(
        environment="metaworld/push-v3",
        limit=150,
        environments=32,
        contexts=50,
        rollouts=1,
        starts=StartsConfig("uniform"),
        demonstrations=0.5,
        updates=300,
        evaluate_every=5,
        evaluate_episodes=100,
    ),
    policy_optimizer=_cosine(1e-3, 3_900, 100),
    critic_optimizer=_cosine(5e-4, 18_000, 100),
    steps=15,
    save_every=1,
)
_ONLINE_FULL_SIZE = OnlineConfig(
    environments=16,
    contexts=40,
    rollouts=1,
    starts=StartsConfig("uniform"),
    replay_capacity=50_000,
    replay_min_steps=2_000,
    demonstrations=0.5,
    updates=200,
    evaluate_every=5,
    evaluate_episodes=50,
)
_ACRLPD_ONLINE_LIBERO = dataclasses.replace(
    _LIBERO,
    name="acrlpd_online_libero",
    data=DataConfig(held_out=0.0),
    online=dataclasses.replace(
        _ONLINE_FULL_SIZE, environment="libero/spatial/0", evaluate_episodes=10
    ),  # as many as LIBERO has to spare
    steps=150,
    save_every=10,
    keep_every=None,
)
_ACRLPD_ONLINE_ALOHA_SIM = dataclasses.replace(
    _ACRLPD_ONLINE_LIBERO,
    name="acrlpd_online_aloha_sim",
    robot="aloha_sim",
    model=_PI0,
    prompt_format=None,
    algorithm=AcrlpdConfig(
        horizon=10, action_dims=14, gamma=0.997, critic=_LARGE_CRITIC, candidates=8, critic_warmup=1_000
    ),
    online=dataclasses.replace(_ONLINE_FULL_SIZE, environment="aloha/transfer-cube"),
)


_RL = (_ALOHA_FOLD, _FOLD_BOX, _LIBERO, _DROID)

PRESETS: dict[str, RLTrainConfig] = {
    config.name: config
    for config in (
        *_RL,
        *(_imitating(config) for config in _RL),
        _METAWORLD,
        dataclasses.replace(
            _METAWORLD,
            name="bc_metaworld",
            algorithm=BcConfig(augmentation=False),
            policy_optimizer=_cosine(3e-3, 6_000, 100),
            steps=6_000,
        ),
        *_RIPT,
        _ACRLPD_ONLINE_METAWORLD,
        _ACRLPD_ONLINE_LIBERO,
        _ACRLPD_ONLINE_ALOHA_SIM,
        _DEBUG,
        dataclasses.replace(_imitating(_DEBUG), name="debug_bc"),
        dataclasses.replace(
            _DEBUG,
            name="quick_test",
            steps=200,
            batch_size=32,
            log_every=20,
            save_every=100,
            audit_every=100,
            policy_optimizer=_cosine(1e-3, 200),
            critic_optimizer=_cosine(1e-3, 200),
        ),
        dataclasses.replace(
            _ALOHA_FOLD,
            name="benchmark",
            algorithm=dataclasses.replace(_FOLDING, critic_warmup=0),
            steps=50,
            log_every=10,
            save_every=50,
            audit_every=0,
        ),
    )
}
"""Runs by name. The dataset is always the user's: --data.datasets PATH."""


def get_config(name: str) -> RLTrainConfig:
    """The run of that name, or the nearest name in the error."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1) or list(PRESETS)
        raise UserError(f"There is no preset {name!r}; try {', '.join(near)}.")
    return PRESETS[name]


def with_lora(config: RLTrainConfig) -> RLTrainConfig:
    """The same run on adapters: OpenPI's sizes, and as there no average of the weights."""
    algorithm = dataclasses.replace(config.algorithm, ema_decay=None)
    return dataclasses.replace(config, model=_with_adapters(config.model), algorithm=algorithm)


def list_configs() -> list[str]:
    """Names of all runs."""
    return list(PRESETS)
