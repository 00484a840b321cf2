"""The C++ kernels: the same numbers as PyTorch, and a token's result that nothing beside it can change."""

from __future__ import annotations

import copy
import ctypes
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from model.kernels import build
from model.kernels.fused import FORMATS, FusedForward
from model.kernels.paged_attention import available, paged_attention, write_kv
from model.kernels.peaks import peaks

needs_kernels = pytest.mark.skipif(not available(), reason="the C++ kernels do not compile here")
pytestmark = needs_kernels

PAGE = 4
GROUP = 32  # inputs that share a scale in int8
SHAPE: dict[str, Any] = {
    "vocab_size": 147,  # no multiple of a panel
    "hidden_size": 72,  # nor of a group
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------- rows and pages


class Pages:
    """Rows with shuffled page tables over one storage."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        counts = [math.ceil(length / PAGE) for length in lengths]
        generator = torch.Generator().manual_seed(seed)
        self.slots = (sum(counts) + 3) * PAGE
        self.table = torch.randperm(self.slots // PAGE, generator=generator)[: sum(counts)].contiguous()
        self.begin = [sum(counts[:i]) for i in range(len(counts))]

    def where(self, row: int, start: int, end: int) -> Tensor:
        position = torch.arange(start, end)
        return self.table[self.begin[row] + position // PAGE] * PAGE + position % PAGE


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


# ------------------------------------------------------------------------------------------------- fused forward


def llama(**changes: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "attention_bias": True, "mlp_bias": True, **changes}))


def llama3_rope() -> LlamaForCausalLM:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    return llama(tie_word_embeddings=True, rope_parameters={**rope, "original_max_position_embeddings": 32})


def qwen2() -> Qwen2ForCausalLM:
    window = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, **window))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama, llama3 rope, tied": llama3_rope,
    "qwen2, one layer slides": qwen2,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "mistral, sliding window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=7)),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model whose biases and norms are random as well."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model.to(dtype).eval()


def make_fused(model: PreTrainedModel, weights: str) -> FusedForward:
    fused = FusedForward.build(model, weights)
    assert fused is not None
    return fused


class Rows:
    """Rows of token ids over one cache of a fused forward."""

    def __init__(self, fused: FusedForward, ids: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.fused, self.ids = fused, ids
        self.pages = Pages([ids.shape[1]] * ids.shape[0])
        shape = (self.pages.slots, SHAPE["num_key_value_heads"], SHAPE["head_dim"])
        self.keys, self.values = ([torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)] for _ in range(2))

    def forward(self, spans: list[tuple[int, int, int]], span: int = 1, padding: int = 0) -> Tensor:
        """Logits of (row, start, end) stretches, packed in that order."""
        pieces, offset = [], 0
        for row, start, end in spans:
            pieces.append([offset, end - start, start, end, span, self.pages.begin[row]])
            offset += end - start
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans] + [torch.zeros(padding).long()])
        ids = torch.cat([self.ids[row, start:end] for row, start, end in spans] + [torch.zeros(padding).long()])
        where = torch.cat([self.pages.where(*s) for s in spans])
        table, read = self.pages.table, torch.arange(offset)
        tensors = (ids[None], positions[None], torch.tensor(pieces), table, PAGE, where, self.keys, self.values, read)
        return self.fused(*tensors)


def some_ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(5))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def expected_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=ids[None], use_cache=False).logits[0]


class QuantisedLinear(torch.nn.Linear):
    """int8 as the kernels are meant to compute it: groups of 32 inputs, symmetric, weight scales in bfloat16."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self._rounded(part, torch.bfloat16) for part in self.weight.split(GROUP, -1)], -1)
        inputs = torch.cat([self._rounded(part, torch.float32) for part in x.split(GROUP, -1)], -1)
        return torch.nn.functional.linear(inputs, weight, self.bias)

    @staticmethod
    def _rounded(x: Tensor, scale_dtype: torch.dtype) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 127).to(scale_dtype).float()
        return (x / scale).round().clamp(-127, 127) * scale


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model whose linear layers compute in int8."""
    other = copy.deepcopy(model)
    for module in list(other.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Linear:
                setattr(module, name, QuantisedLinear(child))
    return other


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("weights", "cache", "tolerance"), [("float32", torch.float32, 1e-5), ("bfloat16", torch.bfloat16, 3e-2)]
)
def test_the_fused_forward_equals_the_model(name: str, weights: str, cache: torch.dtype, tolerance: float) -> None:
    model, ids = make(name), some_ids(1, 40)
    rows = Rows(make_fused(model, weights), ids, cache)
    assert relative_error(rows.forward([(0, 0, 40)]), expected_logits(model, ids[0])) <= tolerance


@pytest.mark.parametrize("name", MODELS)
def test_int8_equals_the_same_quantisation_in_pytorch(name: str) -> None:
    """Up to inputs on the edge between two steps, which a last bit moves; and it keeps close to the model itself."""
    model, ids = make(name), some_ids(1, 40)
    logits = Rows(make_fused(model, "int8"), ids).forward([(0, 0, 40)])
    expected = expected_logits(model, ids[0])
    assert relative_error(logits, expected_logits(quantised(model), ids[0])) <= 1e-2
    assert relative_error(logits, expected) <= 6e-2
    divergence = torch.nn.functional.kl_div(
        logits.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence <= 1e-2


def test_a_bfloat16_model_is_taken_too() -> None:
    model, ids = make("llama", torch.bfloat16), some_ids(1, 40)
    rows = Rows(make_fused(model, "float32"), ids)
    assert relative_error(rows.forward([(0, 0, 40)]), expected_logits(model.float(), ids[0])) <= 1e-5


def test_a_block_sees_itself_in_both_directions() -> None:
    model, ids = make("llama"), some_ids(1, 40)
    rows = Rows(make_fused(model, "float32"), ids)
    rows.forward([(0, 0, 32)], span=8)
    q, k = torch.arange(40)[:, None], torch.arange(40)[None]
    mask = torch.zeros(40, 40).masked_fill_(k // 8 > q // 8, -torch.inf)[None, None]
    with torch.inference_mode():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, 32:]
    assert relative_error(rows.forward([(0, 32, 40)], span=8), expected) <= 1e-5


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_s_logits_depend_on_nothing_beside_it(weights: str, cache: torch.dtype, threads: int) -> None:
    fused, ids = make_fused(make("llama"), weights), some_ids(7, 90)
    reference = Rows(fused, ids, cache).forward([(3, 0, 90)])
    torch.set_num_threads(threads)
    crowded = Rows(fused, ids, cache).forward([(row, 0, 90) for row in range(7)], padding=3)
    assert torch.equal(crowded[270:360], reference)
    rows = Rows(fused, ids, cache)
    for start, end in ((0, 1), (1, 3), (3, 10), (10, 26), (26, 59), (59, 90)):
        crowd = [(0, start, end)] if start % 2 else []
        logits = rows.forward([*crowd, (3, start, end)])
        assert torch.equal(logits[-(end - start) :], reference[start:end])


def test_padding_and_an_empty_forward_write_nothing() -> None:
    fused, ids = make_fused(make("llama"), "float32"), some_ids(1, 8)
    rows = Rows(fused, ids)
    none = torch.zeros(0, dtype=torch.int64)
    tensors = (torch.zeros(1, 4).long(), torch.zeros(1, 4).long(), none.view(0, 6), none, PAGE, none)
    assert fused(*tensors, rows.keys, rows.values, none).shape == (0, SHAPE["vocab_size"])
    assert all(layer.isnan().all() for layer in (*rows.keys, *rows.values))


@pytest.mark.parametrize("weights", FORMATS)
def test_what_is_not_finite_reaches_the_logits_of_its_row_only(weights: str) -> None:
    """The decoder tells a damaged model by its logits: quantising must not swallow a NaN."""
    model = make("llama")
    fused = make_fused(model, weights)
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] = torch.nan
    logits = Rows(fused, torch.tensor([[1, 3], [1, 2]])).forward([(0, 0, 2), (1, 0, 2)])
    assert logits[1].isnan().all() and logits[2:].isfinite().all()


@pytest.mark.parametrize("name", ["down_proj.weight", "up_proj.bias"])
def test_a_single_damaged_number_reaches_int8_logits(name: str) -> None:
    """In the weight it meets the quantisation of weights; in the bias, that of one input among sound ones."""
    model, library = make("llama"), build.load_kernels()
    with torch.no_grad():
        model.model.layers[0].mlp.get_parameter(name).view(-1)[5] = torch.nan
    assert library is not None
    assert Rows(FusedForward(library, model, "int8"), torch.tensor([[1]])).forward([(0, 0, 1)]).isnan().all()


def test_ids_slots_and_shapes_out_of_range_are_refused() -> None:
    rows = Rows(make_fused(make("llama"), "float32"), torch.tensor([[1, SHAPE["vocab_size"]]]))
    with pytest.raises(IndexError):
        rows.forward([(0, 0, 2)])
    rows.keys[1] = rows.keys[1].double()
    with pytest.raises(ValueError, match="cache tensor"):
        rows.forward([(0, 0, 1)])


def test_a_cache_of_another_shape_in_the_same_memory_is_refused() -> None:
    rows = Rows(make_fused(make("llama"), "float32"), torch.tensor([[1, 2]]))
    rows.forward([(0, 0, 1)])
    rows.keys, rows.values = ([t.view(-1, 1, t.shape[2]) for t in side] for side in (rows.keys, rows.values))
    with pytest.raises(ValueError, match="cache tensor"):
        rows.forward([(0, 1, 1)])


# ------------------------------------------------------------------------------------------------- refusals


class Halved(torch.nn.Linear):
    """A linear layer that is not what its weights say."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64))


def strange_part() -> PreTrainedModel:
    model = llama()
    model.model.layers[0].mlp.down_proj = Halved(SHAPE["intermediate_size"], SHAPE["hidden_size"])
    return model


def hooked() -> PreTrainedModel:
    model = llama()
    model.model.layers[1].register_forward_hook(lambda module, args, output: output)
    return model


def patched() -> PreTrainedModel:
    """Unknown to every check of types: only the comparison of logits can tell."""
    model = llama()
    layer = model.model.layers[0].mlp
    layer.forward = lambda x: 1.01 * layer.down_proj(layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x))
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (gpt2, "GPT2LMHeadModel is not one of"),
        (strange_part, "contains Halved"),
        (hooked, "hooks"),
        (patched, "logits differ"),
        (lambda: llama(hidden_act="gelu"), "contains GELU"),
        (lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rotary"),
        (lambda: llama().double(), "float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_is_not_known_is_refused(
    model: Callable[[], PreTrainedModel], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING):
        assert FusedForward.build(model().eval(), "float32") is None
    assert reason in caplog.text and "stays on PyTorch" in caplog.text


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


@pytest.mark.slow
def test_without_avx512_the_kernels_compute_the_same_within_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    library: ctypes.CDLL = build.load_library("-march=x86-64-v3")
    assert not library.blockcast_features() & 1
    ids = some_ids(1, 40)
    for weights, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 1e-5)):
        model = make("qwen3")
        native = Rows(make_fused(model, weights), ids).forward([(0, 0, 40)])
        portable = Rows(FusedForward(library, model, weights), ids).forward([(0, 0, 40)])
        assert relative_error(portable, native) <= tolerance


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
