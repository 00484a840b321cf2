"""The C++ kernels: attention over pages and the peaks of logits equal PyTorch's, and how they are compiled."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.kernels import build
from model.kernels.paged_attention import paged_attention, write_kv
from model.kernels.peaks import peaks
from tests.paged import PAGE, Pages, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("one_thread")]


def dense(query: Tensor, key: Tensor, value: Tensor, start: int, visible: int, span: int, window: int | None) -> Tensor:
    """Oracle: query [n, Hq, D] from position `start` on, key and value [L, Hkv, D] of the whole row."""
    q, k = torch.arange(start, start + len(query))[:, None], torch.arange(len(key))[None]
    allowed = (k < visible) & (k < (q // span + 1) * span)
    if window is not None:
        allowed &= q - k < window
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) / math.sqrt(query.shape[2])
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))


CASES: dict[str, tuple[int, int, int, int | None]] = {  # start, count, span, window
    "causal": (0, 70, 1, None),
    "one token": (69, 1, 1, None),
    "block-causal": (32, 32, 8, None),
    "a block": (48, 16, 16, None),
    "part of a block": (52, 4, 16, None),
    "causal, sliding window": (0, 70, 1, 9),
    "block, sliding window": (48, 16, 16, 40),
    "one token, sliding window": (69, 1, 1, 3),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "width"), [((6, 2), 12), ((2, 2), 64), ((9, 3), 40)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_paged_attention_equals_dense_attention(
    case: str, heads: tuple[int, int], width: int, dtype: torch.dtype, tolerance: float
) -> None:
    start, count, span, window = CASES[case]
    torch.manual_seed(1)
    length = start + count
    visible = 64 if case == "part of a block" else length
    length = max(length, visible)
    pages = Pages([30, length])
    keys, values = (torch.full((pages.slots, heads[1], width), torch.nan, dtype=dtype) for _ in range(2))
    query = torch.randn(count + 2, heads[0], width, dtype=dtype)
    key, value = (torch.randn(length, heads[1], width, dtype=dtype) for _ in range(2))
    write_kv(keys, values, pages.where(1, 0, length), key, value)
    pieces = torch.tensor([[1, count, start, visible, span, pages.begin[1]]])
    out = paged_attention(query, keys, values, pieces, pages.table, PAGE, width**-0.5, window)
    exact = [x.double() for x in (query[1 : 1 + count], key, value)]
    assert (out[1 : 1 + count].double() - dense(*exact, start, visible, span, window)).abs().max() <= tolerance
    assert not out[0].any() and not out[-1].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 37])
def test_a_token_s_attention_depends_on_nothing_beside_it(dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(2)
    pages = Pages([90, 90], seed=3)
    keys, values = (torch.randn(pages.slots, 3, 64, dtype=dtype) for _ in range(2))
    query = torch.randn(180, 9, 64, dtype=dtype)

    def attend(pieces: list[list[int]]) -> Tensor:
        return paged_attention(query, keys, values, torch.tensor(pieces), pages.table, PAGE, 0.125, window)

    whole = attend([[0, 90, 0, 90, 1, pages.begin[0]], [90, 90, 0, 90, 1, pages.begin[1]]])
    for size in (1, 5, 32):
        starts = range(0, 90, size)
        chunks = [[s, min(size, 90 - s), s, 90, 1, pages.begin[0]] for s in starts]
        assert torch.equal(attend(chunks)[:90], whole[:90])
    torch.set_num_threads(2)
    assert torch.equal(attend([[0, 90, 0, 90, 1, pages.begin[0]]])[:90], whole[:90])


LAST = 2**63 - 1  # a sum with it wraps around to what looks small


def test_indices_out_of_range_are_refused() -> None:
    pages = Pages([8])
    keys = torch.zeros(pages.slots, 1, 16)
    query = torch.zeros(8, 1, 16)
    for piece in (
        [0, 9, 0, 9, 1, 0],
        [0, 1, 0, 1, 1, 2],
        [0, 1, 11, 12, 1, 0],
        [-1, 1, 0, 1, 1, 0],
        [0, 1, 0, 1, 0, 0],
        [LAST, 1, 0, 1, 1, 0],
        [0, LAST, 0, 1, 1, 0],
        [0, 1, LAST, 1, 1, 0],
        [0, 1, 0, 1, LAST, 0],
        [0, 1, 0, 1, 1, LAST],
    ):
        with pytest.raises(IndexError):
            paged_attention(query, keys, keys, torch.tensor([piece]), pages.table, PAGE, 1.0)
    for page in (-1, LAST, 2**60):
        with pytest.raises(IndexError):
            paged_attention(query, keys, keys, torch.tensor([[0, 8, 0, 8, 1, 0]]), torch.tensor([page] * 2), PAGE, 1.0)
    with pytest.raises(ValueError, match="int64"):
        paged_attention(query, keys, keys, torch.zeros(1, 6), pages.table, PAGE, 1.0)


# ------------------------------------------------------------------------------------------------- peaks
@pytest.mark.parametrize("width", [1, 15, 16, 267, 49_152])
def test_peaks_are_argmax_and_logsumexp(width: int) -> None:
    logits = 5 * torch.randn(7, width, generator=torch.Generator().manual_seed(width))
    logits[3] = logits[3].round()  # ties: the first wins
    token, normaliser = peaks(logits)
    assert torch.equal(token, logits.argmax(-1))
    assert torch.allclose(normaliser, logits.logsumexp(-1), atol=1e-5, rtol=1e-6)
    for count in (1, 2, 5):
        assert torch.equal(peaks(logits[:count])[1], normaliser[:count]), "a row does not depend on the others"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 17, 99])
def test_a_row_that_is_not_finite_is_seen_and_leaves_the_others_alone(bad: float, place: int) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    expected = peaks(logits)[1]
    logits[1, place] = bad
    token, normaliser = peaks(logits)
    assert not normaliser[1].isfinite() and 0 <= token[1] < 100
    assert torch.equal(normaliser[[0, 2]], expected[[0, 2]])
    banned = torch.full((1, 100), -torch.inf)
    assert not peaks(banned)[1].isfinite()
    banned[0, 5] = 1.0
    assert peaks(banned)[0].item() == 5 and peaks(banned)[1].item() == 1.0


# ------------------------------------------------------------------------------------------------- compiling
def test_without_a_compiler_there_is_one_warning_and_no_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BLOCKCAST_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.load_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert build.load_kernels() is None and build.load_kernels() is None
        assert caplog.text.count("no-such-compiler") == 1 and "stays on PyTorch" in caplog.text
    finally:
        build.load_kernels.cache_clear()


def stub_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own, and a compiler that takes no time: it writes a library that holds next to nothing."""
    script = folder / "compiler"
    source = 'extern "C" void* blockcast_model_new() { return nullptr; }'
    script.write_text(f"#!/bin/sh\nfor o; do :; done\necho '{source}' | g++ -shared -fPIC -x c++ - -o $o\n")
    script.chmod(0o755)
    monkeypatch.setenv("BLOCKCAST_CACHE", str(folder))
    monkeypatch.setenv("CXX", str(script))


def test_a_compiler_may_be_named_with_its_first_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub_compiler(tmp_path, monkeypatch)
    monkeypatch.setenv("CXX", f"env {tmp_path / 'compiler'}")  # as in CXX="ccache g++"
    build.load_library(build.NATIVE)
    assert list((tmp_path / "kernels").glob("*.so"))


@pytest.mark.parametrize("left", [0, 100, 4096, -1])
def test_a_library_that_was_cut_short_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: int
) -> None:
    stub_compiler(tmp_path, monkeypatch)
    build.load_library(build.NATIVE)
    (path,) = (tmp_path / "kernels").glob("*.so")
    whole = path.read_bytes()
    path.unlink()  # the loaded one stays whole
    path.write_bytes(whole[:left])
    build.load_library(build.NATIVE)
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_and_a_compiler_that_writes_nothing_leave_decoding_on_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stub_compiler(tmp_path, monkeypatch)
    (tmp_path / "file").write_text("in the way")
    for name, value in (("BLOCKCAST_CACHE", str(tmp_path / "file")), ("CXX", "true")):
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setenv(name, value)
            build.load_kernels.cache_clear()
            assert build.load_kernels() is None and build.load_kernels() is None
            build.load_kernels.cache_clear()
    assert caplog.text.count("stays on PyTorch") == 2
