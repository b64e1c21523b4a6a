"""Merge adapters into the weights they adapt, layer by layer as they are read."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pistar.checkpoints.tensors import Leaf, WrappedLeaf
from pistar.errors import UserError
from pistar.models.config import LORA_VARIANTS, GemmaConfig, LoraConfig, Pi0Config, gemma_variant
from pistar.models.infer_config import is_expert_weight, is_lora
from pistar.models.lora import adapter_names, merge_adapter


class MergedLeaf(WrappedLeaf):
    """A weight with its adapter merged in, in float32: bfloat16 would round away much of what the adapter learnt."""

    def __init__(self, weight: Leaf, a: Leaf, b: Leaf, alpha: float) -> None:
        super().__init__(weight)
        self._a, self._b, self._alpha = a, b, alpha

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        return self._merge(self._leaf.read(index[:1]), index[:1])[:, *index[1:]]

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        for row, block in self._leaf.blocks(whole=whole):
            yield row, self._merge(block, (slice(row, row + len(block)),))

    def _merge(self, w: np.ndarray, layers: tuple[slice, ...]) -> np.ndarray:
        a, b = self._a.read(layers), self._b.read(layers)
        merged = np.empty(w.shape, np.float32)
        for layer in range(len(w)):
            merged[layer] = merge_adapter(self.name, w[layer], a[layer], b[layer], alpha=self._alpha)
        return merged


def has_adapters(config: Pi0Config) -> bool:
    """Whether either expert has adapters."""
    return config.vlm.lora is not None or config.expert.lora is not None


def with_known_alphas(weights: Pi0Config, trained: Pi0Config | None, alphas: Mapping[str, float | None]) -> Pi0Config:
    """Fill in the adapters' alpha, which no weight shows.

    It is the user's, else the contract's, else that of OpenPI's variant of this size. Refused if all are unknown.
    """

    def expert(name: str) -> GemmaConfig:
        found: GemmaConfig = getattr(weights, name)
        if found.lora is None:
            return found
        given, contract = alphas.get(name), None if trained is None else getattr(trained, name).lora
        usual = LORA_VARIANTS.get(gemma_variant(found) or "")
        if given is not None and contract is not None and given != contract.alpha:
            raise UserError(
                f"--{name}-alpha is {given:g}, but the contract says {name} was trained with {contract.alpha:g}; leave "
                "it out, or correct the contract if it is wrong."
            )
        if given is not None:
            lora = LoraConfig(found.lora.rank, given)
        elif contract is not None:
            lora = contract
        elif usual is not None and usual.rank == found.lora.rank:
            lora = usual
        else:
            unknown[name] = found.lora.rank
            return found
        return dataclasses.replace(found, lora=lora)

    unknown: dict[str, int] = {}
    config = dataclasses.replace(weights, vlm=expert("vlm"), expert=expert("expert"))
    if unknown:
        names = " and ".join(f"{name} (rank {rank})" for name, rank in unknown.items())
        options = " ".join(f"--{name}-alpha ALPHA" for name in unknown)
        raise UserError(
            f"the adapters of {names} have an alpha that no weight shows, and are none of OpenPI's variants; give the "
            f"alpha they were trained with: {options}."
        )
    return config


def merge_adapters(leaves: Sequence[Leaf], config: Pi0Config) -> tuple[list[Leaf], Pi0Config]:
    """Give the parameters of the same model without adapters, and its config."""
    by_name = {leaf.name: leaf for leaf in leaves}
    merged: list[Leaf] = []
    for leaf in leaves:
        if is_lora(leaf.name):
            continue
        a, b = (by_name.get(name) for name in adapter_names(leaf.name))
        if a is None or b is None:
            merged.append(leaf)
            continue
        lora = (config.expert if is_expert_weight(leaf.name) else config.vlm).lora
        assert lora is not None
        merged.append(MergedLeaf(leaf, a, b, lora.alpha))
    bare = {name: dataclasses.replace(getattr(config, name), lora=None) for name in ("vlm", "expert")}
    return merged, dataclasses.replace(config, **bare)
