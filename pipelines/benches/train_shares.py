"""Where the time of a real training step goes: adapt itself, run for a few steps on the bench's rows.

Not the bench's own loop: Ray Train, DeepSpeed, the optimizer, the checks between workers, all as a user runs them, with
a row a forward, which bounds memory. The shares are those of metrics.jsonl, without the first step, which warms up.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from actors.training.rows import COLUMNS, RowFormat
from actors.training.run_files import METRICS, read_metrics
from model.backbone import Backbone
from model.errors import JobError
from pipelines.benches.train_step import Shape, make_case

STEPS = 3
ADAPT = Path(__file__).parent.parent / "adapt.py"
INSIDE = ("forward", "backward")


def measure_shares(source: str, shape: Shape, backbone: Backbone) -> dict[str, Any]:
    """Medians over the steps: seconds, tokens/s, each phase's share, and `outside` forward and backward in all.

    backbone: the model of `source`, for its vocabulary and tokenizer. Raises JobError where adapt fails.
    """
    with tempfile.TemporaryDirectory(prefix="blockcast-bench-") as scratch:
        rows, output = Path(scratch, "rows"), Path(scratch, "out")
        _write_rows(rows, shape, backbone)
        done = subprocess.run(_command(source, rows, output, shape), capture_output=True, text=True)
        if done.returncode:
            raise JobError(f"bench train: adapt failed over {shape.rows} x {shape.length} tokens:\n{done.stderr}")
        lines = read_metrics(LocalFileSystem(), str(output / METRICS))[1:]
    shares = {name: median(line["time_shares"][name] for line in lines) for name in lines[0]["time_shares"]}
    outside = median(1 - sum(line["time_shares"][name] for name in INSIDE) for line in lines)
    return {"seconds": median(line["seconds"] for line in lines), **shares, "outside": outside}


def _command(source: str, rows: Path, output: Path, shape: Shape) -> list[str]:
    keys: dict[str, Any] = {
        "steps": STEPS,
        "rows_per_step": shape.rows,
        "micro_rows": 1,
        "dtype": shape.dtype,
        "held_out_every": 0,
    }
    words = [sys.executable, ADAPT, "--model", source, "--data", rows, "--output", output, "--assess", "false"]
    return [*map(str, words), *(str(word) for name, value in keys.items() for word in (f"--train.{name}", value))]


def _write_rows(folder: Path, shape: Shape, backbone: Backbone) -> None:
    """Rows for all steps, other ones in each."""
    rows = make_case(replace(shape, rows=shape.rows * STEPS), backbone).rows
    assert backbone.block_diffusion is not None, "load_model makes it one"
    form = RowFormat(shape.block_size, shape.length, backbone.block_diffusion.mask_token_id)
    columns = [pa.array(list(getattr(rows, name).int().numpy())) for name in COLUMNS]
    folder.mkdir()
    pq.write_table(pa.Table.from_arrays(columns, schema=form.schema), folder / "part-00000.parquet")
