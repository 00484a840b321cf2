"""The prepare job in this process, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.jobkit import main
from pipelines.prepare import PrepareConfig, plan, run
from tests.pipelines.prepared import Prepare, Prepared


@pytest.fixture
def prepare(tmp_path: Path, tiny_model: Path, local_ray: None) -> Prepare:
    """Run the job in this process on the tiny model: small blocks and rows, two workers."""

    def call(*words: str, output: str = "out", model: Path = tiny_model, block: int = 8, row: int = 128) -> Prepared:
        place = tmp_path / output
        common = ["--model", str(model), "--output", str(place), "--workers", "2"]
        pack = ["--pack.block_size", str(block), "--pack.context_length", str(row)]
        return Prepared(main("prepare", PrepareConfig, run, plan, [*common, *pack, *words]), place)

    return call
