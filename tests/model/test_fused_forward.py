"""The fused C++ forward: the model's own logits, and a token's result that nothing beside it can change."""

from __future__ import annotations

import copy
import ctypes
import logging
from collections.abc import Callable
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
from tests.paged import PAGE, Pages, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("one_thread")]

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


# ------------------------------------------------------------------------------------------------- other processors
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["-march=x86-64", "-march=x86-64-v3"])  # SSE2; AVX2
def test_without_avx512_the_kernels_compute_the_same_within_rounding(architecture: str) -> None:
    library: ctypes.CDLL = build.load_library(architecture)
    assert not library.blockcast_features() & 1
    ids = some_ids(1, 40)
    for weights, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 1e-5)):
        model = make("qwen3")
        native = Rows(make_fused(model, weights), ids).forward([(0, 0, 40)])
        portable = Rows(FusedForward(library, model, weights), ids).forward([(0, 0, 40)])
        assert relative_error(portable, native) <= tolerance
