"""What LeRobot's tables hold: arrow schemas with the metadata `datasets` and pandas look for, and statistics.

The statistics are for LeRobot's eyes; what training normalises with comes from `norm_stats`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int, UInt8

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def data_table(columns: Mapping[str, np.ndarray | Sequence[bytes]], features: Mapping[str, Mapping[str, Any]]) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """An arrow table with the schema, and the schema's metadata, that `datasets` gives LeRobot's.

    Columns are numbers, text, or a PNG a row.
    """
    arrays: dict[str, Any] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for name, values in columns.items():
        dtype, shape = features[name]["dtype"], features[name]["shape"]
        kind: dict[str, Any] = {"dtype": dtype, "_type": "Value"}
        if dtype == "image":
            fields = pa.struct({"bytes": pa.binary(), "path": pa.string()})
            cells = [{"bytes": png, "path": f"frame-{i:06d}.png"} for i, png in enumerate(values)]
            arrays[name], kinds[name] = pa.array(cells, fields), {"_type": "Image"}
            continue
        rows = np.ascontiguousarray(values).reshape(-1)
        flat = pa.array(rows.tolist(), pa.string()) if dtype == "string" else pa.array(rows)
        if shape == [1]:
            arrays[name], kinds[name] = flat, kind
        else:
            type_ = pa.list_(pa.field("element", flat.type), shape[0])
            arrays[name] = pa.FixedSizeListArray.from_arrays(flat, type=type_)
            kinds[name] = {"feature": kind, "length": shape[0], "_type": "List"}
    metadata = {"huggingface": json.dumps({"info": {"features": kinds}})}
    return pa.table(arrays).replace_schema_metadata(metadata)


def episodes_table(lines: Sequence[Mapping[str, Any]]) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """meta/episodes: one row an episode."""
    return pa.table({key: pa.array([line[key] for line in lines]) for key in lines[0]})


def tasks_table(tasks: Sequence[str]) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """As pandas writes a frame whose index is the task's text: LeRobot looks tasks up there."""
    index = "__index_level_0__"
    text = {"name": None, "pandas_type": "unicode", "numpy_type": "object"}
    number = {"name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    pandas = {
        "index_columns": [index],
        "column_indexes": [{**text, "field_name": None, "metadata": {"encoding": "UTF-8"}}],
        "columns": [
            {**number, "field_name": "task_index", "metadata": None},
            {**text, "field_name": index, "metadata": None},
        ],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.3",  # whose layout this is
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def number_stats(values: np.ndarray) -> dict[str, Any]:
    """LeRobot's statistics of a column, as lists with one entry a dimension."""
    rows = values.reshape(len(values), -1)
    numbers = rows.astype(np.float64)
    stats = {
        "min": rows.min(axis=0).tolist(),
        "max": rows.max(axis=0).tolist(),
        "mean": numbers.mean(axis=0).tolist(),
        "std": numbers.std(axis=0).tolist(),
        "count": [len(rows)],
    }
    quantiles = np.quantile(numbers, list(QUANTILES.values()), axis=0)
    return stats | {key: row.tolist() for key, row in zip(QUANTILES, quantiles, strict=True)}


def sampled_frames(length: int) -> Int[np.ndarray, " n"]:
    """The pictures of an episode that statistics look at, LeRobot's choice: some 100 or more, spread over it."""
    count = min(length, max(100, round(length**0.75)))
    return np.round(np.linspace(0, length - 1, count)).astype(int)


def pixel_counts(frame: UInt8[np.ndarray, "h w 3"]) -> Int[np.ndarray, "3 256"]:
    """How often each value occurs in each colour; large pictures are thinned as LeRobot's, to about 150 a side."""
    longer = max(frame.shape[:2])
    step = max(1, longer // 150) if longer >= 300 else 1
    sample = frame[::step, ::step]
    return np.stack([np.bincount(sample[..., c].ravel(), minlength=256) for c in range(3)])


def histogram_stats(pixels: Int[np.ndarray, "3 256"], pictures: int) -> dict[str, Any]:
    """LeRobot's statistics of a camera: of colours in 0..1, as nested lists of shape (3, 1, 1)."""
    values = np.arange(256) / 255
    weight = pixels / pixels.sum(axis=1, keepdims=True)
    mean: Float[np.ndarray, " 3"] = weight @ values
    below = np.cumsum(weight, axis=1)
    stats = {
        "min": values[(pixels > 0).argmax(axis=1)],
        "max": values[255 - (pixels[:, ::-1] > 0).argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(0, weight @ values**2 - mean**2)),
    }
    quantiles = {key: values[np.minimum(255, (below < q).sum(axis=1))] for key, q in QUANTILES.items()}
    return {**_nested(stats), "count": [pictures], **_nested(quantiles)}


def _nested(colours: Mapping[str, Float[np.ndarray, " 3"]]) -> dict[str, list[list[list[float]]]]:
    return {key: value.reshape(3, 1, 1).tolist() for key, value in colours.items()}
