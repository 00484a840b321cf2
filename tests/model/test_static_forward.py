"""The static-shape forward: its mask and buffers on CPU, its graphs on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine.loop import Engine
from actors.engine.together import generate_all
from model.backbone import Backbone, load_backbone
from model.decoding import Decoder, GenerationRequest, Phase, Turn
from model.decoding.packing import pack
from model.decoding.static_forward import StaticForward, bucket
from tests.decoding import BLOCK, ENTRY, make_request, mixed_requests, prompt_of
from tests.tiny import build_tiny_model


def with_static_forward(engine: Engine) -> Engine:
    decoder = engine.decoder
    decoder.static_forward = StaticForward(decoder.backbone.model, decoder.cache, rows=engine.config.max_rows)
    return engine


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(n) for n in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]


@pytest.mark.slow
def test_any_mix_of_rows_writes_what_the_plain_forward_writes(sharp_backbone: Backbone) -> None:
    exact = load_backbone(sharp_backbone.name, dtype=torch.float64)
    requests = mixed_requests()
    plain, static = (
        {r.id: r.token_ids for r in generate_all(e, requests)} for e in (Engine(exact), static_engine(exact))
    )
    assert static == plain


def static_engine(backbone: Backbone) -> Engine:
    return with_static_forward(Engine(backbone))


def test_shapes_depend_on_the_bucket_alone(sharp_backbone: Backbone) -> None:
    """What a graph needs: two rounds of one bucket use the same tensors, whatever is in them."""
    decoder = Decoder(sharp_backbone, rows=3)
    forward = StaticForward(decoder.backbone.model, decoder.cache, rows=3)
    rows = [decoder.make_row(make_request(str(i), prompt_of(BLOCK + 3 + i), 3 * BLOCK)) for i in range(3)]
    seen: dict[tuple[int, int], tuple[int, ...]] = {}
    with torch.inference_mode():
        for _ in range(4):
            turns = [Turn(row, row.prefill_left) for row in rows]
            for turn in turns:
                decoder.supply(turn)
            forward(pack(turns, decoder.cache))
            for key, run in forward._runs.items():
                addresses = tuple(tensor.data_ptr() for tensor in vars(run.buffers).values())
                assert seen.setdefault(key, addresses) == addresses
            decoder.step(turns)
    assert len(forward._runs) <= 3


def test_logits_equal_the_plain_forward_s_under_a_sliding_window(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, initializer_range=0.5, block_diffusion=ENTRY)
    backbone = load_backbone(tmp_path, dtype=torch.float64)
    decoder = Decoder(backbone, rows=2)
    forward = StaticForward(backbone.model, decoder.cache, rows=2)
    rows = [decoder.make_row(make_request(str(i), prompt_of(4 * BLOCK + i), BLOCK)) for i in range(2)]
    turns = [Turn(row, row.prefill_left) for row in rows]
    for turn in turns:
        decoder.supply(turn)
    window = 11

    class Windowed:
        """Every layer of a plan slides."""

        def __init__(self, plan: object) -> None:
            self.plan = plan

        def attend(self, *args: object) -> torch.Tensor:
            out: torch.Tensor = type(self.plan).attend(self.plan, *args[:-1], window)  # type: ignore[attr-defined]
            return out

    with torch.inference_mode():
        packed = pack(turns, decoder.cache)
        plain = backbone.model(
            input_ids=packed.ids, position_ids=packed.positions, use_cache=False, attention_plan=Windowed(packed.plan)
        ).logits
        forward(packed)
        (run,) = forward._runs.values()
        static = backbone.model(
            input_ids=run.buffers.ids,
            position_ids=run.buffers.positions,
            use_cache=False,
            attention_plan=Windowed(run.plan),
        ).logits
    tokens = sum(len(turn.query) for turn in turns)
    assert torch.allclose(plain[0, :tokens], static[0, :tokens], atol=1e-9)


@pytest.mark.gpu
def test_graphs_write_what_eager_cuda_writes(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, initializer_range=0.5, block_diffusion=ENTRY)
    backbone = load_backbone(tmp_path, device="cuda")
    requests: list[GenerationRequest] = mixed_requests()
    plain, static = (
        {r.id: r.token_ids for r in generate_all(e, requests)} for e in (Engine(backbone), static_engine(backbone))
    )
    assert static == plain


@pytest.mark.gpu
def test_a_round_synchronises_once(tmp_path: Path) -> None:
    """The forward itself must not: only the choices are read."""
    build_tiny_model(tmp_path, initializer_range=0.5, block_diffusion=ENTRY)
    engine = static_engine(load_backbone(tmp_path, device="cuda"))
    decoder = engine.decoder
    row = decoder.make_row(make_request("r", prompt_of(BLOCK), 2 * BLOCK))
    while row.phase is Phase.PREFILL:
        decoder.step([Turn(row, row.prefill_left)])
    decoder.step([Turn(row)])
    turn = Turn(row)
    decoder.supply(turn)
    assert decoder.static_forward is not None
    with torch.inference_mode():
        packed = pack([turn], decoder.cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoder.static_forward(packed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
