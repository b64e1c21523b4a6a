"""Sizes of models: bad values are refused in one line with value, reason and remedy."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from pistar.config.model_presets import MODELS
from pistar.errors import UserError, check_writable
from pistar.models.config import GemmaConfig, LoraConfig, Pi0Config, SiglipConfig

TINY = MODELS["pi0_tiny"]


def tiny(**changes: object) -> Callable[[], Pi0Config]:
    return lambda: dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LoraConfig(rank=0, alpha=1.0), "lora.rank is 0; .* at least rank 1"),
        (
            lambda: GemmaConfig(8, 1, 8, num_heads=6, num_kv_heads=4, head_dim=2),
            "num_heads 6 is not divisible by num_kv_heads 4",
        ),
        (lambda: GemmaConfig(8, 1, 8, num_heads=2, num_kv_heads=1, head_dim=3), "head_dim is 3; .* even"),
        (lambda: SiglipConfig(10, 1, 8, num_heads=4, patch_size=14), "vision.width is 10, not divisible .* 4"),
        (tiny(expert=dataclasses.replace(TINY.expert, depth=5)), "expert.depth is 5 but vlm.depth is 3"),
        (tiny(expert=dataclasses.replace(TINY.expert, width=33)), "expert.width is 33; .* even width"),
        (tiny(image_size=60), "image_size is 60, not a multiple .* 14; use 56"),
        (tiny(action_horizon=0), "action_horizon is 0; a size is a whole number of at least 1"),
        (tiny(action_dim=-1), "action_dim is -1; a size"),
        (lambda: LoraConfig(rank=1, alpha=float("nan")), "lora.alpha is nan; .* positive"),
        (lambda: GemmaConfig(8, 1, 8, num_heads=2, num_kv_heads=0, head_dim=2), "num_kv_heads is 0; a size"),
        (tiny(cameras=()), "cameras is empty; .* at least one camera"),
    ],
)
def test_a_bad_value_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_presets_have_openpis_lengths() -> None:
    assert (MODELS["pi0"].max_token_len, MODELS["pi05"].max_token_len) == (48, 200)
    assert {config.action_horizon for name, config in MODELS.items() if "tiny" not in name} == {50}
    assert MODELS["pi05_lora"].model_type == "pi05"
    assert MODELS["pi0"].image_tokens == 256


def test_a_place_nothing_can_be_written_to_is_refused_and_one_that_can_be_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for fine in (tmp_path / "new" / "deep", tmp_path, tmp_path / "file"):
        check_writable("--out", fine)
    for broken in (tmp_path / "file" / "below", Path("/proc/deep/out")):
        with pytest.raises(UserError, match=rf"--out is {broken}, which cannot be written \(.+\); name another place"):
            check_writable("--out", broken)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
