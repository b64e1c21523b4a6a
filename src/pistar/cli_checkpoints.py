"""The commands about checkpoints' dialects: `pistar export` and `pistar import`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pistar.training.conversion import Conversion, Wanted
    from pistar.training.proof import Outputs

Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]


def export_checkpoint(
    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    /,
    format: Annotated[str, tyro.conf.arg(metavar="openpi|openpi-pytorch|lerobot")],
    out: Path,
    dtype: Annotated[str | None, tyro.conf.arg(metavar="float32|bfloat16")] = None,
    merge_lora: bool = False,
    vlm_alpha: float | None = None,
    expert_alpha: float | None = None,
    action_horizon: int | None = None,
    asset_id: str | None = None,
    vision_heads: int | None = None,
    skip_outputs: bool = False,
) -> None:
    """Write a checkpoint in another system's form, with proof that it is the same policy.

    Args:
        checkpoint: Any that `pistar verify` takes, in any dialect.
        format: Whose form.
        out: A new folder. It appears when it is whole and proven.
        dtype: Of the weights; as they are if left out.
        merge_lora: Put adapters into the weights they adapt. PyTorch and LeRobot have no place for them.
        vlm_alpha: What the language model's adapters were trained with, where neither contract nor size tells.
        expert_alpha: The same of the action expert's.
        action_horizon: Of a checkpoint without a contract.
        asset_id: Whose statistics, where there are several.
        vision_heads: Of a PyTorch checkpoint whose vision tower is not So400m.
        skip_outputs: Do not run the model on both weight sets.
    """
    from pistar.training.conversion import Wanted, find_dialect, find_dtype

    wanted = Wanted(
        dialect=find_dialect(format),
        dtype=None if dtype is None else find_dtype(dtype),
        merge_lora=merge_lora,
        vlm_alpha=vlm_alpha,
        expert_alpha=expert_alpha,
        action_horizon=action_horizon,
        asset_id=asset_id,
        vision_heads=vision_heads,
        run_model=not skip_outputs,
    )
    _convert(checkpoint, out, wanted)


def import_checkpoint(
    source: Source,
    /,
    out: Path,
    asset_id: str | None = None,
    vision_heads: int | None = None,
    skip_outputs: bool = False,
) -> None:
    """Make an OpenPI checkpoint of one that PyTorch or LeRobot wrote, with proof that it is the same policy.

    Args:
        source: A folder with model.safetensors, LeRobot's pretrained_model, or the file. What it is, the weights tell.
        out: A new folder. It appears when it is whole and proven.
        asset_id: Name for LeRobot's statistics, which have none of their own.
        vision_heads: Of a vision tower that is not So400m.
        skip_outputs: Do not run the model on both weight sets.
    """
    from pistar.training.conversion import Wanted

    _convert(source, out, Wanted("openpi", asset_id=asset_id, vision_heads=vision_heads, run_model=not skip_outputs))


def _convert(path: str, out: Path, wanted: "Wanted") -> None:
    from rich.progress import Progress

    from pistar.training.conversion import convert
    from pistar.training.offline import use_compilation_cache

    use_compilation_cache()
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("opening", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        done = convert(path, out, wanted, progress)
    _tell(path, done)


def _tell(path: str, done: "Conversion") -> None:
    from pistar.models.inspect import MODEL_NAMES
    from pistar.training.dialect_notes import cannot_load, differences

    proof, console = done.proof, Console(soft_wrap=True, highlight=False)
    kind, dialect = MODEL_NAMES[done.config.model_type], done.source.checkpoint.dialect
    title = f"{path}: {kind}, {dialect} → {done.wanted.dialect}"
    table = Table(title=Text(title), show_header=False)
    for column in ("", "what", "how"):
        table.add_column(column, overflow="fold")
    same, rounding = Text("=", "green"), Text("≈", "yellow")
    if proof.identical:
        table.add_row(
            same, "identical", f"{len(proof.identical)} parameters: mapped back, every checksum is the source's"
        )
    if proof.merged:
        table.add_row(
            same, "merged", f"{len(proof.merged)} weights took their adapters in; mapped back, every checksum is theirs"
        )
    if proof.rounded:
        table.add_row(
            rounding,
            "rounded",
            f"{len(proof.rounded)} parameters to bfloat16, to the nearest; mapped back, they are that",
        )
    if proof.stats:
        table.add_row(same, "identical", f"statistics of {', '.join(proof.stats)}, number for number")
    if done.source.contract is not None:
        table.add_row(same, "carried along", "contract.json" + (", without the adapters" if proof.merged else ""))
    merging = proof.merged_outputs
    if merging is not None and merging.skipped is None:
        told = f"merged, and not yet rounded, our own model's numbers move by up to {_moved(merging)}"
        table.add_row(rounding, "outputs", told)
    table.add_row(*_outputs_row(done))
    for note in differences(done):
        table.add_row(Text("!", "yellow"), note.topic, Text(note.text))
    Console().print(table)
    useless = cannot_load(done)
    console.print(f"Wrote {done.folder}" + (f". But {useless.text}" if useless else ""), markup=False)


def _outputs_row(done: "Conversion") -> tuple[Text, str, str]:
    outputs = done.proof.outputs
    if outputs.skipped is not None:
        return Text("·"), "outputs", f"our own model was not run on both: {outputs.skipped}"
    if outputs.difference == 0:
        return Text("=", "green"), "outputs", "our own model puts out the same numbers, bit for bit"
    return Text("≈", "yellow"), "outputs", f"our own model's numbers move by up to {_moved(outputs)}"


def _moved(outputs: "Outputs") -> str:
    return f"{outputs.difference:.1e}, the largest being {outputs.largest:.2g}"
