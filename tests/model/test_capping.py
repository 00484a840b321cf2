"""Capped attention scores (Gemma 2): decoding and training are those of the mask written out, and of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.backbone import Backbone, load_backbone
from model.decoding import Decoder, Turn
from model.decoding.packing import pack
from model.decoding.static_forward import StaticForward
from model.objective import TrainingModel
from tests.decoding import BLOCK, ENTRY, answers, make_request, naive_decode, prompt_of
from tests.model.rows import MASK, random_rows
from tests.model.test_training import assert_same, loss_and_gradients, noise, objective
from tests.oracles import reference_loss
from tests.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.towers import tiny_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 2 that was "adapted" to blocks of 8. The window is beyond every row: the oracles know none."""
    place = tmp_path_factory.mktemp("models") / "gemma2"
    model = tiny_decoder("gemma2", torch.float32, vocab_size=VOCAB_SIZE, sliding_window=120, block_diffusion=ENTRY)
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def backbone(folder: Path) -> Backbone:
    return load_backbone(folder, dtype=torch.float64)


def test_blocks_are_those_of_a_decoder_that_knows_no_pages(backbone: Backbone) -> None:
    requests = [make_request(str(n), prompt_of(n), 13) for n in (3, BLOCK, 21)]
    expected = {request.id: naive_decode(backbone, request)[0] for request in requests}
    assert answers(backbone, requests, max_rows=2, prefill_tokens=BLOCK) == expected


def test_token_by_token_it_writes_what_transformers_writes(backbone: Backbone, folder: Path) -> None:
    """With eager attention, which transformers demands of this model, and without a cache."""
    requests = [make_request(str(n), prompt_of(n), 8, mode="ar") for n in (5, 12)]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    expected = {}
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        for _ in range(request.max_tokens):
            with torch.no_grad():
                ids = torch.cat((ids, plain(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
        expected[request.id] = tuple(ids[0, len(request.prompt_ids) :].tolist())
    assert answers(backbone, requests) == expected


def test_static_shapes_give_the_same_logits(backbone: Backbone) -> None:
    decoder = Decoder(backbone, rows=2)
    forward = StaticForward(backbone.model, decoder.cache, rows=2)
    rows = [decoder.make_row(make_request(str(i), prompt_of(BLOCK + i), BLOCK)) for i in range(2)]
    while any(row.prefill_left for row in rows):
        decoder.step([Turn(row, row.prefill_left) for row in rows])
    turns = [Turn(row) for row in rows]
    for turn in turns:
        decoder.supply(turn)
    with torch.inference_mode():
        packed = pack(turns, decoder.cache)
        plain, static = decoder._forward(packed), forward(packed)
    assert len(plain) and torch.allclose(plain, static, atol=1e-9)


def test_training_takes_the_loss_and_gradients_of_the_published_form(backbone: Backbone) -> None:
    rows = random_rows(0)
    mask = noise(rows, 0)
    ours = TrainingModel(backbone.model)(objective(backbone).corrupted(rows, mask, range(2)))
    expected = reference_loss(backbone.model, rows, mask, MASK, BLOCK, streams=2)
    assert_same(loss_and_gradients(backbone, ours), loss_and_gradients(backbone, expected))
