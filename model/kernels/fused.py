"""FusedForward: token ids to logits in one C++ call, for Llama-shaped models on CPU.

Built from a loaded transformers model, whose weights it copies into packed panels: what is changed in the model later
does not reach it. Only the token embeddings stay shared. Three weight formats:
    float32   as exact as the model itself; 4 bytes a weight to read in every forward
    bfloat16  products of bfloat16 pairs, accumulated in float32; 2 bytes
    int8      a scale per output and 32 inputs, inputs quantised alike per token; 1.06 bytes, sums exact in int32
Between the products everything is float32. The cache may be float32 or bfloat16; with bfloat16, queries and attention
weights are rounded to bfloat16 for the products of attention.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.attention import NAME as ATTENTION
from model.errors import UserError
from model.kernels.build import load_kernels
from model.kernels.paged_attention import Layout, make_layout, raise_for_status
from model.kernels.recognise import LayerTensors, bias_of, layer_tensors, plain, sliding_window, why_not

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
WEIGHTS = ("model", "int8")
FORMAT_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
CACHE_DTYPES = (torch.float32, torch.bfloat16)
PROBES, PROBE_TOKENS = 4, 16
HIDDEN_GROUP = 32  # as GROUP in C++
GATE = 2  # after shift and scale
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.15}  # median over tokens of error norm over logit norm

log = logging.getLogger(__name__)
Modulate = Callable[[Tensor | None], None]


class _Shape(ctypes.Structure):
    """As in forward.h."""

    _fields_ = (
        *((name, c_int32) for name in ("hidden", "heads", "key_heads", "width", "inner", "vocab", "format")),
        ("embedding_bf16", c_int32),
        ("epsilon", c_float),
        ("rotary_scale", c_float),
        ("embedding", c_void_p),
        ("inverse_frequency", c_void_p),
    )


class _LayerWeights(ctypes.Structure):
    """As in forward.h."""

    _fields_ = (*((f.name, c_void_p) for f in fields(LayerTensors)), ("window", c_int64))


class _Call(ctypes.Structure):
    """As in forward.h."""

    _fields_ = (
        ("layout", Layout),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("read", c_void_p),
        ("reads", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("logits", c_void_p),
        ("modulation", c_void_p),
        ("time_of", c_void_p),
        ("times", c_int64),
        ("cache_bf16", c_int32),
        ("threads", c_int32),
    )


@dataclass(frozen=True)
class TimeVectors:
    """Shift, scale and gate of every sublayer at M times (TwoTower's denoiser, `model.two_tower.modulation`).

    table: float32 [2 * layers, M, 3, hidden], a layer's attention before its MLP; `padded` makes it.
    """

    table: Tensor

    @classmethod
    def padded(cls, vectors: Tensor) -> TimeVectors:
        """From vectors of any float dtype; behind the hidden width come zeros, up to whole groups."""
        short = -vectors.shape[-1] % HIDDEN_GROUP
        return cls(torch.nn.functional.pad(vectors.detach().float(), (0, short)).contiguous())

    @property
    def times(self) -> int:
        return self.table.shape[1]


@dataclass(frozen=True)
class _Sizes:
    layers: int
    hidden: int
    key_heads: int
    width: int
    vocab: int


class FusedForward:
    """The forward of one model. `FusedForward.build` makes it; calls from several threads run one after another."""

    def __init__(self, library: ctypes.CDLL, model: PreTrainedModel, weights: str) -> None:
        self.weights = weights
        self._library = library
        self._embedding = model.get_input_embeddings().weight.detach().contiguous()
        attention = model.model.layers[0].self_attn
        config = model.config
        self._sizes = _Sizes(
            len(model.model.layers),
            config.hidden_size,
            config.num_key_value_heads,
            attention.head_dim,
            self._embedding.shape[0],
        )
        rotary = model.model.rotary_emb
        frequency = plain(rotary.inv_freq)
        shape = _Shape(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            width=attention.head_dim,
            inner=config.intermediate_size,
            vocab=self._sizes.vocab,
            format=FORMATS[weights],
            embedding_bf16=int(self._embedding.dtype == torch.bfloat16),
            epsilon=config.rms_norm_eps,
            rotary_scale=rotary.attention_scaling,
            embedding=self._embedding.data_ptr(),
            inverse_frequency=frequency.data_ptr(),
        )
        self._model: int | None = library.blockcast_model_new(ctypes.byref(shape))
        if self._model is None:
            raise MemoryError("no memory for the fused forward")
        for layer in model.model.layers:
            self._add_layer(layer_tensors(layer), sliding_window(model, layer))
        self._set_head(model)
        self._bound: tuple[object, ...] | None = None
        self._pointers: tuple[ctypes.Array[c_void_p], ctypes.Array[c_void_p]] | None = None

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(layers, key-value heads, head width) of the cache."""
        return self._sizes.layers, self._sizes.key_heads, self._sizes.width

    @classmethod
    def build(
        cls, model: PreTrainedModel, weights: str = "float32", modulate: Modulate | None = None
    ) -> FusedForward | None:
        """The fused forward of `model`, or None with a logged reason: no compiler, or a model that it does not know.

        weights: "float32", "bfloat16" or "int8". The result was compared with the model on a short random sequence.
        modulate: sets the vectors [sublayers, 1, 3, hidden] of the model's next forwards, where hooks in it read them;
        then the comparison was made with such vectors.
        """
        if weights not in FORMATS:
            raise ValueError(f"weights must be one of {', '.join(FORMATS)}, not {weights!r}")
        library = load_kernels()
        if library is None:
            return None
        reason = why_not(model, hooked=modulate is not None)
        if reason is None:
            fused = cls(library, model, weights)
            reason = fused._why_not_equal(model, modulate)
            if reason is None:
                return fused
        log.warning("The fused forward does not take this model: %s. Decoding stays on PyTorch.", reason)
        return None

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        pieces: Tensor,
        page_table: Tensor,
        page_size: int,
        where: Tensor,
        key_cache: Sequence[Tensor],
        value_cache: Sequence[Tensor],
        read: Tensor,
        modulation: tuple[TimeVectors, Tensor] | None = None,
    ) -> Tensor:
        """Logits float32 [N, V] of the packed tokens `read` int64 [N]; their keys and values are written to the cache.

        ids, positions: int64 [1, T], of which the first `tokens` are real and the rest padding, which is not run.
        where: int64 [tokens], storage slots. key_cache, value_cache: a tensor [S, Hkv, D] a layer, float32 or bfloat16.
        pieces, page_table, page_size: see `model.kernels.paged_attention`.
        modulation: vectors, and which of their times each token has, int64 [tokens].
        Raises IndexError where an id, slot, page or read index is out of range, ValueError for shapes that do not fit.
        """
        tokens, count = where.numel(), read.numel()
        if ids.numel() < tokens or positions.numel() < tokens:
            raise ValueError(f"{tokens} slots to write, but {ids.numel()} ids and {positions.numel()} positions")
        keys, values = self._cache_pointers(key_cache, value_cache)
        layout = make_layout(pieces, page_table, page_size, key_cache[0].shape[0], tokens, where)
        ids, positions, read = ids.contiguous(), positions.contiguous(), read.contiguous()
        if any(t.dtype != torch.int64 or t.device.type != "cpu" for t in (ids, positions, read)):
            given = ", ".join(f"{t.dtype} on {t.device}" for t in (ids, positions, read))
            raise ValueError(f"ids, positions and read must be int64 on the CPU, not {given}")
        logits = torch.empty((count, self._sizes.vocab), dtype=torch.float32)
        vectors, time_of = self._checked(modulation, tokens)
        call = _Call(
            layout=layout,
            ids=ids.data_ptr(),
            positions=positions.data_ptr(),
            read=read.data_ptr(),
            reads=count,
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            logits=logits.data_ptr(),
            modulation=None if vectors is None else vectors.table.data_ptr(),
            time_of=None if time_of is None else time_of.data_ptr(),
            times=0 if vectors is None else vectors.times,
            cache_bf16=int(key_cache[0].dtype == torch.bfloat16),
            threads=torch.get_num_threads(),
        )
        raise_for_status(self._library.blockcast_forward(c_void_p(self._model), ctypes.byref(call)))
        return logits

    def _checked(
        self, modulation: tuple[TimeVectors, Tensor] | None, tokens: int
    ) -> tuple[TimeVectors | None, Tensor | None]:
        if modulation is None:
            return None, None
        vectors, time_of = modulation
        wide = -(-self._sizes.hidden // HIDDEN_GROUP) * HIDDEN_GROUP
        expected = (2 * self._sizes.layers, vectors.times, 3, wide)
        if vectors.table.shape != expected or not vectors.table.is_contiguous():
            raise ValueError(f"time vectors are {list(vectors.table.shape)}, expected {list(expected)}")
        if time_of.dtype != torch.int64 or time_of.numel() != tokens or not time_of.is_contiguous():
            raise ValueError(f"{tokens} tokens need as many times, int64, not {time_of.dtype} {list(time_of.shape)}")
        return vectors, time_of

    def _cache_pointers(
        self, key_cache: Sequence[Tensor], value_cache: Sequence[Tensor]
    ) -> tuple[ctypes.Array[c_void_p], ctypes.Array[c_void_p]]:
        """Addresses of the cache's layers; the tensors are checked when they are not those of the last call."""
        keys, values = [t.data_ptr() for t in key_cache], [t.data_ptr() for t in value_cache]
        bound = (keys, values, key_cache[0].shape, key_cache[0].dtype)
        if self._pointers is None or self._bound != bound:
            self._check_cache([*key_cache, *value_cache])
            row = c_void_p * self._sizes.layers
            self._bound, self._pointers = bound, (row(*keys), row(*values))
        return self._pointers

    def _check_cache(self, layers: Sequence[Tensor]) -> None:
        sizes = self._sizes
        expected = (layers[0].shape[0], sizes.key_heads, sizes.width)
        if len(layers) != 2 * sizes.layers:
            raise ValueError(f"{len(layers)} cache tensors for {sizes.layers} layers")
        for layer in layers:
            fits = layer.shape == expected and layer.dtype == layers[0].dtype and layer.is_contiguous()
            if not fits or layer.dtype not in CACHE_DTYPES or layer.device.type != "cpu":
                raise ValueError(
                    f"a cache tensor is {layer.dtype} {list(layer.shape)}, expected {list(expected)} on CPU"
                )

    def _add_layer(self, tensors: LayerTensors, window: int | None) -> None:
        addresses = {f.name: None if (t := getattr(tensors, f.name)) is None else t.data_ptr() for f in fields(tensors)}
        weights = _LayerWeights(**addresses, window=-1 if window is None else window)
        raise_for_status(self._library.blockcast_model_add_layer(c_void_p(self._model), ctypes.byref(weights)))

    def _set_head(self, model: PreTrainedModel) -> None:
        norm, head, bias = plain(model.model.norm.weight), plain(model.lm_head.weight), bias_of(model.lm_head)
        addresses = [c_void_p(None if t is None else t.data_ptr()) for t in (norm, head, bias)]
        raise_for_status(self._library.blockcast_model_set_head(c_void_p(self._model), *addresses))

    def _why_not_equal(self, model: PreTrainedModel, modulate: Modulate | None) -> str | None:
        """Compare with the model itself on short random sequences; why it differs, or None.

        The median token decides: a variant we do not know is wrong everywhere, while on random text bfloat16 itself
        can be far off at some tokens (0.6 from float32 over a sequence, where ours was 0.014, was seen).
        """
        generator = torch.Generator().manual_seed(0)
        probes = torch.randint(0, self._sizes.vocab, (PROBES, 1, PROBE_TOKENS), generator=generator)
        vectors = None
        if modulate is not None:
            vectors = 0.1 * torch.randn((2 * self._sizes.layers, 1, 3, self._sizes.hidden), generator=generator)
            vectors[:, :, GATE] += 1.0
            modulate(vectors)
        error = float(torch.cat([self._errors(model, ids, vectors) for ids in probes]).median())
        if modulate is not None:
            modulate(None)
        rough = self.weights if model.dtype == torch.float32 or self.weights == "int8" else "bfloat16"
        return None if error <= TOLERANCE[rough] else f"its logits differ from the fused ones by {error:.2g}"

    def _errors(self, model: PreTrainedModel, ids: Tensor, vectors: Tensor | None) -> Tensor:
        """Relative error [T] of each token's logits, ids [1, T]."""
        positions = torch.arange(PROBE_TOKENS)[None]
        plan = {"attention_plan": _CausalPlan()} if model.config._attn_implementation == ATTENTION else {}
        with torch.inference_mode():
            expected = model(input_ids=ids, position_ids=positions, use_cache=False, **plan).logits[0].float()
        return (self._run_alone(ids, vectors) - expected).norm(dim=-1) / expected.norm(dim=-1)

    def _run_alone(self, ids: Tensor, vectors: Tensor | None) -> Tensor:
        """Logits [T, V] of one causal sequence over a cache of its own."""
        count = ids.shape[1]
        shape = (count, self._sizes.key_heads, self._sizes.width)
        keys, values = ([torch.zeros(shape) for _ in range(self._sizes.layers)] for _ in range(2))
        every, pieces = torch.arange(count), torch.tensor([[0, count, 0, count, 1, 0]])
        modulation = None if vectors is None else (TimeVectors.padded(vectors), torch.zeros_like(every))
        pages = torch.zeros(1, dtype=torch.int64)
        return self(ids, every[None], pieces, pages, count, every, keys, values, every, modulation)

    def __del__(self) -> None:
        if getattr(self, "_model", None) is not None:
            self._library.blockcast_model_free(c_void_p(self._model))


def fused_forward(model: PreTrainedModel, weights: str, modulate: Modulate | None = None) -> FusedForward | None:
    """Our forward for the model on CPU, where it knows the architecture. Raises UserError for int8 without it.

    weights: "model" for the model's own format, or "int8". modulate: see `FusedForward.build`.
    """
    if weights not in WEIGHTS:
        raise UserError(f"engine.weights must be one of {', '.join(WEIGHTS)}, not {weights!r}.")
    name = FORMAT_NAMES.get(model.dtype) if weights == "model" else weights
    fused = FusedForward.build(model, name, modulate) if name is not None and model.device.type == "cpu" else None
    if fused is None and weights != "model":
        raise UserError(
            f"engine.weights {weights} needs the C++ forward, which does not run here (a CPU, g++ and a Llama-shaped "
            "model are needed; the log says what lacks): use engine.weights model."
        )
    return fused


class _CausalPlan:
    """Dense causal attention, for the probe (the plan protocol of `model.attention`)."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None
    ) -> Tensor:
        position = torch.arange(query.shape[2])
        back = position[:, None] - position[None]
        allowed = back >= 0 if sliding_window is None else (back >= 0) & (back < sliding_window)
        return scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale, enable_gqa=True)
