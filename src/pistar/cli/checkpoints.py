"""`pistar verify`, `export` and `import`: what a checkpoint is, and other systems' formats."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.text import Text

from pistar.cli.printing import and_more, make_table
from pistar.cli.printing import out as standard_output
from pistar.errors import UserError

if TYPE_CHECKING:
    from pistar.checkpoints.convert.convert import ConvertedCheckpoint, ConvertOptions
    from pistar.checkpoints.convert.proof import Outputs

SourcePath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
CheckpointPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]


def verify(
    checkpoint: CheckpointPath,
    /,
    model_type: Literal["pi0", "pi05"] | None = None,
    action_dim: int | None = None,
    tokenizer: str | None = None,
    vision_heads: int | None = None,
) -> None:
    """Show what a checkpoint is, from its weights and assets, and check all of it.

    Args:
        checkpoint: A step folder, its params folder (what lies beside it is checked too), or a .tar.gz of either; or a
            PyTorch model.safetensors, or its folder, of OpenPI or LeRobot.
        model_type: Fail unless it is this model.
        action_dim: Fail unless its padded actions have this many numbers.
        tokenizer: Fail unless it was trained with this SentencePiece file ("tiny" is pistar's own).
        vision_heads: Heads of a PyTorch checkpoint's vision tower that is not So400m.
    """
    from rich.progress import Progress

    from pistar.checkpoints import verify as verification
    from pistar.checkpoints.reader import opened_step

    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        report = verification.verify(
            checkpoint,
            model_type=model_type,
            action_dim=action_dim,
            tokenizer=tokenizer,
            vision_heads=vision_heads,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    opened = opened_step(checkpoint, vision_heads)  # of a run's folder, its step
    facts = make_table("", "", title=Text(str(opened)), show_header=False)
    checks = make_table("", "", "", show_header=False)
    for name, value in report.facts.items():
        facts.add_row(name, Text(value))
    for check in report.checks:
        mark = Text("✗", "red") if check.problems else Text("·") if check.absent else Text("✓", "green")
        checks.add_row(mark, check.name, Text("\n".join(check.problems) or check.detail))
    console = standard_output()
    console.print(facts, checks)
    if report.problems:
        raise UserError(f"{checkpoint}: {and_more(report.problems[0], len(report.problems) - 1)}.")
    console.print("Whole and sound.")


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
    """Write a checkpoint in another system's format, with proof that it is the same policy.

    Args:
        checkpoint: Any checkpoint that `pistar verify` takes, in any format.
        format: The format to write.
        out: A new folder. It appears when it is complete and proven.
        dtype: Number format of the weights. The default keeps each parameter's format.
        merge_lora: Merge adapters into the weights they adapt. PyTorch and LeRobot have no place for them.
        vlm_alpha: Alpha of the language model's adapters, if neither contract nor size determines it.
        expert_alpha: Alpha of the action expert's adapters, if neither contract nor size determines it.
        action_horizon: Number of actions in a chunk. Needed for a checkpoint without a contract.
        asset_id: Name of the norm stats to use, if there are several.
        vision_heads: Heads of a PyTorch checkpoint's vision tower that is not So400m.
        skip_outputs: Do not run the model on both sets of weights.
    """
    from pistar.checkpoints.convert.convert import ConvertOptions, find_dialect, find_dtype

    options = ConvertOptions(
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
    _convert(checkpoint, out, options)


def import_checkpoint(
    source: SourcePath,
    /,
    out: Path,
    asset_id: str | None = None,
    vision_heads: int | None = None,
    skip_outputs: bool = False,
) -> None:
    """Convert a checkpoint of OpenPI's PyTorch or of LeRobot to OpenPI, with proof that it is the same policy.

    Args:
        source: A folder with model.safetensors, LeRobot's pretrained_model, or the file. The weights show its
            format.
        out: A new folder. It appears when it is complete and proven.
        asset_id: Name for LeRobot's norm stats, which have none of their own.
        vision_heads: Heads of a vision tower that is not So400m.
        skip_outputs: Do not run the model on both sets of weights.
    """
    from pistar.checkpoints.convert.convert import ConvertOptions

    _convert(
        source, out, ConvertOptions("openpi", asset_id=asset_id, vision_heads=vision_heads, run_model=not skip_outputs)
    )


def _convert(path: str, out: Path, options: "ConvertOptions") -> None:
    from rich.progress import Progress

    from pistar.checkpoints.convert.convert import convert
    from pistar.distributed.compilation_cache import use_compilation_cache

    use_compilation_cache()
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("opening", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        done = convert(path, out, options, progress)
    _print_result(path, done)


def _print_result(path: str, done: "ConvertedCheckpoint") -> None:
    from pistar.checkpoints.convert.notes import cannot_load, differences
    from pistar.models.infer_config import MODEL_NAMES

    proof, console = done.proof, standard_output()
    kind, dialect = MODEL_NAMES[done.config.model_type], done.source.checkpoint.dialect
    title = f"{path}: {kind}, {dialect} → {done.options.dialect}"
    table = make_table("", "what", "how", title=Text(title), show_header=False)
    same, rounding = Text("=", "green"), Text("≈", "yellow")
    if proof.identical:
        table.add_row(
            same, "identical", f"{len(proof.identical)} parameters: mapped back, every checksum equals the source's"
        )
    if proof.merged:
        table.add_row(
            same,
            "merged",
            f"{len(proof.merged)} weights with their adapters merged; mapped back, every checksum is equal",
        )
    if proof.rounded:
        table.add_row(
            rounding,
            "rounded",
            f"{len(proof.rounded)} parameters to the nearest bfloat16; mapped back, they are equal",
        )
    if proof.stats:
        table.add_row(same, "identical", f"statistics of {', '.join(proof.stats)}, number for number")
    if done.source.contract is not None:
        table.add_row(same, "copied", "contract.json" + (", without the adapters" if proof.merged else ""))
    merging = proof.merged_outputs
    if merging is not None and merging.skipped is None:
        text = f"after merging, before rounding, pistar's model differs by up to {_largest_difference(merging)}"
        table.add_row(rounding, "outputs", text)
    table.add_row(*_outputs_row(done))
    for note in differences(done):
        table.add_row(Text("!", "yellow"), note.topic, Text(note.text))
    console.print(table)
    useless = cannot_load(done)
    console.print(f"Wrote {done.folder}" + (f". But {useless.text}" if useless else ""), markup=False)


def _outputs_row(done: "ConvertedCheckpoint") -> tuple[Text, str, str]:
    outputs = done.proof.outputs
    if outputs.skipped is not None:
        return Text("·"), "outputs", f"the model was not run on both: {outputs.skipped}"
    if outputs.difference == 0:
        return Text("=", "green"), "outputs", "pistar's model gives the same numbers with both, bit for bit"
    return Text("≈", "yellow"), "outputs", f"pistar's model differs by up to {_largest_difference(outputs)}"


def _largest_difference(outputs: "Outputs") -> str:
    return f"{outputs.difference:.1e}; the largest output is {outputs.largest:.2g}"
