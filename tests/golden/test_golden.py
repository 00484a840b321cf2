"""Parity with the published references: one test per recorded case, named by the case's id.

Cases are every `*/cases_*.json` under BLOCKCAST_GOLDEN (default: golden/ in the shared folder); its sub-folders are
methods, each with a test function of its own (`test_fast_dllm_v2[gen-01]`); one may be absent. A kind of case that
nobody can replay fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.kinds import GoldenCase, discover, load_kinds, weights_hash

PROJECT = Path(__file__).resolve().parent.parent.parent
SHARED = Path(os.environ.get("BLOCKCAST_SHARED") or PROJECT.parent / "shared")
NAMED = os.environ.get("BLOCKCAST_GOLDEN")
ROOT = Path(NAMED) if NAMED else SHARED / "golden"

KINDS = load_kinds()
CASES = discover(ROOT)


def test_golden_cases_are_there() -> None:
    if not CASES and NAMED is None and os.environ.get("CI") != "true":
        pytest.skip("no golden cases: set BLOCKCAST_GOLDEN, or BLOCKCAST_SHARED to the folder of shared test data")
    assert CASES, f"{ROOT} holds no */cases_*.json"


def replay(golden: GoldenCase) -> None:
    kind = (golden.method, golden.kind)
    assert kind in KINDS, f"no function here replays {golden.method} cases of kind {golden.kind!r} ({golden.file.name})"
    recorded = golden.meta.get("model_sha256")
    if isinstance(recorded, dict):
        recorded = recorded[golden.model_folder.name]
    if recorded is not None:
        assert recorded == weights_hash(golden.model_folder), "the cases were recorded with other weights"
    KINDS[kind](golden.case, golden.meta, golden.model_folder)


def test_of_method(method: str) -> Callable[[GoldenCase], None]:
    """A test function for the cases of one method, so that ids which two methods share stay apart."""

    @pytest.mark.parametrize("golden", [pytest.param(c, id=str(c.case["id"])) for c in CASES if c.method == method])
    def test(golden: GoldenCase) -> None:
        replay(golden)

    return test


test_of_method.__test__ = False  # type: ignore[attr-defined]
for name in sorted({c.method for c in CASES}):
    globals()[f"test_{name}"] = test_of_method(name)
