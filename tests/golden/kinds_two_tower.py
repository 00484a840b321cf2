"""Golden kinds of TwoTower: the published towers' logits, Algorithm 1, AR mode, and the training pass with gradients.

Parameters are float64; transformers' norms, router and scan round to float32 inside: the README's second row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import DecodeConfig
from model.layout import RowBatch
from model.two_tower.decoding import TowerRequest, log_likelihoods, write_blocks, write_tokens
from model.two_tower.layout import Corruption, TwoTowerBatch, lay_out_two_tower, whole_spans
from model.two_tower.lossless import write_lossless
from model.two_tower.published import load_published, map_name
from model.two_tower.reader import Reader, Stretch
from model.two_tower.towers import TwoTower
from model.two_tower.training import TwoTowerTraining, denoise, read_context, token_losses

METHOD = "two_tower"
RELATIVE = 1e-5
ORDERS = (("published", "reference"), ("norm_first", "norm_first"))


@lru_cache(maxsize=4)
def golden_towers(folder: Path, order: str = "published") -> TwoTower:
    return load_published(folder, dtype=torch.float64, order=order, block_size=4, experts_implementation="eager")


def sized(towers: TwoTower, block_size: int) -> TwoTower:
    """The same towers with the case's block size."""
    return TwoTower(towers.context, towers.denoiser, type(towers.config)(block_size, towers.config.mask_token_id))


def assert_logits(ours: torch.Tensor, expected: list[float]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert float((ours.double() - wanted).abs().max()) <= RELATIVE * float(wanted.abs().max())


def denoiser(case: dict[str, Any], meta: dict[str, Any], folder: Path) -> None:
    """A noisy block over a clean prefix at a time t, in both orders."""
    for order, field in ORDERS:
        reader, stretch = Reader(golden_towers(folder, order), tokens=512, rows=1), Stretch()
        if case["prefix_ids"]:
            reader.extend([stretch], torch.tensor([case["prefix_ids"]]))
        times = torch.tensor([case["t"]], dtype=torch.float64)
        logits = reader.denoise([stretch], torch.tensor([case["noisy_block_ids"]]), times)[0].double()
        expected = case[field]
        assert logits.argmax(-1).tolist() == expected["argmax"]
        assert logits.softmax(-1).max(-1).values.tolist() == pytest.approx(expected["top1_prob"], rel=RELATIVE)
        assert logits.logsumexp(-1).tolist() == pytest.approx(expected["logsumexp"], rel=RELATIVE)
        assert logits.norm(dim=-1).tolist() == pytest.approx(expected["l2_norm"], rel=RELATIVE)
        for slot, values in expected["logits"].items():
            assert_logits(logits[int(slot)], values)


def context(case: dict[str, Any], meta: dict[str, Any], folder: Path) -> None:
    """Last logits, likelihoods, the greedy AR continuation, and the same from lossless decoding."""
    towers = golden_towers(folder)
    reader, stretch = Reader(towers, tokens=512, rows=1), Stretch()
    last = reader.extend([stretch], torch.tensor([case["prompt_ids"]])).logits[0, -1].double()
    assert int(last.argmax()) == case["last"]["argmax"]
    assert float(last.softmax(-1).max()) == pytest.approx(case["last"]["top1_prob"], rel=RELATIVE)
    assert_logits(last, case["last"]["logits"])
    (likelihoods,) = log_likelihoods(towers, [case["prompt_ids"]])
    assert likelihoods == pytest.approx(case["logprob_of_next"], abs=RELATIVE)
    greedy = case["greedy"]
    stops = frozenset() if greedy["eos_token_id"] is None else frozenset({greedy["eos_token_id"]})
    request = TowerRequest(tuple(case["prompt_ids"]), greedy["max_new_tokens"], stop_token_ids=stops)
    (answer,) = write_tokens(towers, [request])
    assert list(answer.token_ids) == greedy["new_ids"]
    assert (answer.finish_reason == "stop") == greedy["stopped"]
    (answer,) = write_lossless(sized(towers, 8), [replace(request, max_tokens=min(16, request.max_tokens))])
    assert list(answer.token_ids) == greedy["new_ids"][:16]


def generate(case: dict[str, Any], meta: dict[str, Any], folder: Path) -> None:
    """Algorithm 1: ids, forwards, and what was revealed at which step."""
    towers = sized(golden_towers(folder, case["order"]), case["block_size"])
    stops = frozenset() if case["eos_token_id"] is None else frozenset({case["eos_token_id"]})
    decode = DecodeConfig(policy="budgeted", gamma=case["confidence_threshold"], steps=case["steps_per_block"])
    request = TowerRequest(tuple(case["prompt_ids"]), case["max_new_tokens"], decode, stop_token_ids=stops)
    (answer,) = write_blocks(towers, [request])
    assert answer.written == case["new_ids"]
    assert (answer.finish_reason == "stop") == case["stopped"]
    assert list(answer.token_ids) == case["new_ids_up_to_eos"]
    assert answer.steps_per_block == case["forwards"]["denoise_per_block"]
    assert answer.forwards["denoise"] == case["forwards"]["denoise"]
    revealed = [[sorted(step) for step in block] for block in answer.trace]
    expected = [[sorted(map(tuple, step)) for step in block] for block in case["trace"]]
    assert [[[r[:2] for r in s] for s in b] for b in revealed] == [[[r[:2] for r in s] for s in b] for b in expected]
    confidences = [r[2] for block in revealed for step in block for r in step]
    assert confidences == pytest.approx([r[2] for b in expected for s in b for r in s], rel=1e-4)


def training_batch(case: dict[str, Any], towers: TwoTower) -> TwoTowerBatch:
    ids, masked = torch.tensor(case["input_ids"]), torch.tensor(case["masked"]).bool()
    rows = RowBatch(ids, ids.clone(), torch.zeros_like(ids), torch.arange(ids.shape[1]).expand_as(ids))
    times = torch.tensor(case["t"], dtype=torch.float64)[:, None].expand_as(ids)
    return lay_out_two_tower(
        rows,
        Corruption(times, masked),
        block_size=case["block_size"],
        mask_token_id=3,
        document_rows=towers.context.recurrent,
        spans=whole_spans(rows),
        keep_all=True,
    )


def training(case: dict[str, Any], meta: dict[str, Any], folder: Path) -> None:
    """Noisy ids, loss, every token's CE, the bound, gradient norms and logits of the training pass, in both orders."""
    for order, field in ORDERS:
        towers = golden_towers(folder, order)
        batch = training_batch(case, towers)
        assert batch.noisy_ids.view(case["batch"], -1).tolist() == case["noisy_ids"]
        assert batch.scored_tokens == case["masked_count"]
        states, writer = read_context(towers.context, batch), towers.writer()
        writer.zero_grad()
        (TwoTowerTraining(writer)(batch, states) / batch.scored_tokens).backward()
        expected = case[field]
        _assert_gradients(towers, expected["grad_norms_of_loss"])
        with torch.no_grad():
            losses = token_losses(writer, batch, states)
        assert float(losses.mean()) == pytest.approx(expected["loss"], rel=RELATIVE)
        times = batch.times[batch.time_index][:, None].expand_as(batch.masked)[batch.masked]
        bound = float((losses / times).sum()) / (case["batch"] * case["length"])
        assert bound == pytest.approx(expected["bound_per_token"], rel=RELATIVE)
        if "ce" in expected:
            wanted = [ce for row in expected["ce"] for ce in row if ce is not None]
            assert losses.tolist() == pytest.approx(wanted, abs=RELATIVE, rel=RELATIVE)
        for where in expected.get("logits_at", ()):
            keep = torch.zeros(case["batch"], case["length"], dtype=torch.bool)
            keep[where["row"], where["position"]] = True
            with torch.no_grad():
                assert_logits(denoise(writer, batch, states, keep.view_as(batch.masked)).logits[0], where["logits"])


def _assert_gradients(towers: TwoTower, expected: dict[str, float]) -> None:
    writer = towers.writer()
    lm, time = dict(writer.causal_lm.named_parameters()), dict(writer.time.named_parameters())
    assert all(p.grad is None for p in towers.context.causal_lm.parameters())
    for published, norm in expected.items():
        if published == "all_denoiser_parameters":
            ours = math.sqrt(sum(float((p.grad**2).sum()) for p in writer.parameters() if p.grad is not None))
        else:
            part, name = map_name(published)
            ours = float(_gradient(time if part == "time" else lm, name).norm())
        assert ours == pytest.approx(norm, rel=RELATIVE, abs=1e-9), published


def _gradient(parameters: dict[str, Any], name: str) -> torch.Tensor:
    """By our name; experts and tables carry their number as published."""
    if name.startswith("tables."):
        return torch.as_tensor(parameters["tables"].grad[int(name.rpartition(".")[2])])
    if ".experts." in name:
        module, _, rest = name.partition(".experts.")
        number, projection, _ = rest.split(".")
        return torch.as_tensor(parameters[f"{module}.experts.{projection}"].grad[int(number)])
    return torch.as_tensor(parameters[name].grad)


KINDS = {"denoiser": denoiser, "context": context, "generate": generate, "training": training}
