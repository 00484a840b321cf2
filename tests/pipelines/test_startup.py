"""What a job loads before it does anything: `--help` and a wrong key wait for every module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ENTRIES = (
    "pipelines.prepare",
    "pipelines.adapt",
    "pipelines.assess",
    "pipelines.generate",
    "pipelines.export",
    "pipelines.plan",
    "pipelines.bench",
    "actors.server",
    "actors.training.trainer",
)
LATER = ("transformers.modeling_utils", "torch._dynamo", "matplotlib", "deepspeed", "datasets", "peft")
LOOK = """
import importlib, json, sys
found = {}
for entry in sys.argv[1].split():
    importlib.import_module(entry)
    found[entry] = [name for name in sys.argv[2].split() if name in sys.modules]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_no_job_loads_models_compilers_or_pictures_before_it_needs_them(project: Path) -> None:
    """They were a third of the time that it takes to import adapt."""
    command = [sys.executable, "-c", LOOK, " ".join(ENTRIES), " ".join(LATER)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {entry: [] for entry in ENTRIES}
