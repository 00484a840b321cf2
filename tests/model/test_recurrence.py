"""Next-token training of models with recurrent layers: a packed row's documents never see each other."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from model.backbone import load_backbone
from model.corruption import IGNORED
from model.decoding import Decoder
from model.errors import UserError
from model.layout import RowBatch
from model.objective import BlockDiffusion, NextToken, TrainingModel, held_out_loss
from model.recurrence import is_recurrent, unclamp_time_steps
from tests.hybrid import write_hybrid
from tests.model.rows import random_rows
from tests.towers import CONFIGS, HYBRIDS, VOCAB, tiny_decoder

K = 8


def packed() -> RowBatch:
    return random_rows(7, rows=3, vocabulary=VOCAB)


def next_token(model: PreTrainedModel) -> NextToken:
    return NextToken(K, model.config.num_hidden_layers - 1)


def by_documents(model: PreTrainedModel, rows: RowBatch) -> torch.Tensor:
    """The sum of cross-entropy of every document alone, as transformers computes it."""
    plain = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), attn_implementation="eager", experts_implementation="eager"
    ).to(torch.float64)
    plain.load_state_dict(model.state_dict())
    unclamp_time_steps(plain)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows.input_ids)):
        for document in range(int(rows.document_ids[row].max()) + 1):
            inside = rows.document_ids[row] == document
            ids, labels = rows.input_ids[row][inside], rows.labels[row][inside]
            logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
            total = total + functional.cross_entropy(logits, labels[1:], ignore_index=IGNORED, reduction="sum")
    total.backward()
    for name, parameter in plain.named_parameters():
        model.get_parameter(name).grad = parameter.grad
    return total.detach()


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_packed_row_trains_as_its_documents_alone(kind: str) -> None:
    scaled = {"logits_scaling": 3.0} if kind == "granitemoehybrid" else {}
    model, rows = tiny_decoder(kind, **scaled), packed()
    expected = by_documents(model, rows)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = TrainingModel(model).train()(next_token(model).batch(rows, range(3), 0))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-6)
    for name, parameter in model.named_parameters():
        if name in gradients and parameter.grad is not None:
            assert (parameter.grad - gradients[name]).abs().max() <= 1e-5 * gradients[name].abs().max() + 1e-8, name


def test_only_models_with_such_layers_count_as_recurrent() -> None:
    assert {kind for kind in CONFIGS if is_recurrent(tiny_decoder(kind))} == set(HYBRIDS)


def test_blocks_read_both_ways_are_refused_in_a_sentence() -> None:
    model = tiny_decoder("nemotron_h")
    batch = BlockDiffusion(K, 3, 0, 3).batch(packed(), range(3), 0)
    with pytest.raises(UserError, match=r"recurrent layers .* next_token"):
        TrainingModel(model)(batch)


def test_rows_without_anything_to_learn_give_zero() -> None:
    model, rows = tiny_decoder("nemotron_h"), packed()
    nothing = replace(rows, labels=torch.full_like(rows.labels, IGNORED))
    assert float(TrainingModel(model)(next_token(model).batch(nothing, range(3), 0)).detach()) == 0


def test_the_held_out_loss_does_not_depend_on_how_rows_are_grouped() -> None:
    model, rows = tiny_decoder("nemotron_h"), packed()
    one = [RowBatch(*(x[i : i + 1] for x in vars(rows).values())) for i in range(3)]
    together = held_out_loss(model, next_token(model), [rows])
    assert held_out_loss(model, next_token(model), one) == pytest.approx(together, rel=1e-9)


def test_the_engine_refuses_to_forget_states(tmp_path: Path) -> None:
    backbone = load_backbone(write_hybrid(tmp_path / "hybrid"))
    with pytest.raises(UserError, match=r"has recurrent layers, whose states the pages do not hold.*load_model"):
        Decoder(backbone, rows=1)
