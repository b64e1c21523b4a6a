"""Paths, column names and tables of LeRobot v3.0, with the metadata that `datasets` and pandas look for."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
DEFAULT_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns that every LeRobot dataset has."""
OUTCOME_COLUMNS = ("next.reward", "next.done", "next.success", "next.truncated")
ORIGIN_COLUMNS = ("start_id", "seed")
"""Of simulated episodes: the start state it began from, and the seed of the policy's random numbers."""


def data_table(columns: Mapping[str, np.ndarray | Sequence[bytes]], features: Mapping[str, Mapping[str, Any]]) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """Make the arrow table of a data file, with the schema and metadata that `datasets` writes for LeRobot.

    A column holds numbers, text, or one PNG per row.
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


def write_meta_tables(root: Path, episodes: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> None:
    """Write meta/episodes, one row per episode, and meta/tasks.parquet."""
    meta = root / "meta"
    (meta / "episodes" / "chunk-000").mkdir(parents=True)
    table = pa.table({key: pa.array([line[key] for line in episodes]) for key in episodes[0]})
    pq.write_table(table, meta / "episodes" / "chunk-000" / "file-000.parquet")
    pq.write_table(_tasks_table(tasks), meta / "tasks.parquet")


def _tasks_table(tasks: Sequence[str]) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """Make the table as pandas writes a frame whose index is the task's text: LeRobot looks tasks up in the index."""
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
        "pandas_version": "2.2.3",  # the version whose layout this is
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
