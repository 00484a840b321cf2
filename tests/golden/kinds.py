"""Golden cases: finding them, and the recorded model.

A kind of case is named by `meta.kind` of its file. A module `kinds_*.py` in this folder holds `METHOD`, whose cases it
replays, and `KINDS`, from the kind's name to the function that replays a case: it gets the case, the file's meta and
the folder of the model, and asserts.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.backbone import Backbone, load_backbone

Replay = Callable[[dict[str, Any], dict[str, Any], Path], None]


def load_kinds() -> dict[tuple[str, str], Replay]:
    """All kinds of this folder's modules, by (method, kind)."""
    kinds: dict[tuple[str, str], Replay] = {}
    for path in sorted(Path(__file__).parent.glob("kinds_*.py")):
        module = importlib.import_module(f"tests.golden.{path.stem}")
        found = {(module.METHOD, kind): replay for kind, replay in module.KINDS.items()}
        assert not found.keys() & kinds.keys(), f"{path.name} names a kind that another module has"
        kinds |= found
    return kinds


@dataclass(frozen=True)
class GoldenCase:
    """One case of one cases file."""

    method: str
    file: Path
    meta: dict[str, Any]
    case: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.meta.get("kind") or self.file.stem.removeprefix("cases_"))

    @property
    def model_folder(self) -> Path:
        return self.file.parent / str(self.case.get("model", "model"))


def discover(root: Path) -> list[GoldenCase]:
    """Every case of every `*/cases_*.json` under the folder, in a fixed order."""
    cases = []
    for file in sorted(root.glob("*/cases_*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        cases += [GoldenCase(file.parent.name, file, content.get("meta", {}), case) for case in content["cases"]]
    return cases


@functools.cache
def golden_backbone(folder: Path, dtype: torch.dtype = torch.float64) -> Backbone:
    """The recorded model, loaded once for all cases."""
    return load_backbone(folder, dtype=dtype)


@functools.cache
def weights_hash(folder: Path) -> str:
    """sha256 of the model's weights, to compare with the one a case was recorded with."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
