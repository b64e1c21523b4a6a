"""Contracts for checkpoints that tests write."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pistar.checkpoints.contract import Contract
from pistar.config.model_presets import MODELS
from pistar.data.norm_stats import NormStats, norm_stats_hash
from pistar.models.tokenizer import load_tokenizer


def aloha_contract(stats: Mapping[str, NormStats], **changes: Any) -> Contract:
    """Make the contract of a tiny π₀ for an ALOHA with these statistics and absolute actions, after changes."""
    contract = Contract(
        model=MODELS["pi0_tiny"],
        robot="aloha",
        asset_id="trossen",
        state_dim=14,
        action_dim=14,
        delta_mask=None,
        prompt_format="pi0",
        tokenizer_sha256=load_tokenizer("tiny", 48).sha256,
        norm_kind="zscore",
        norm_stats_sha256=norm_stats_hash(stats),
    )
    return dataclasses.replace(contract, **changes)
