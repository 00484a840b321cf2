"""`denoiser: lora`: one copy of the weights, which the adapter changes for noisy tokens and for nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.adapters import LoraSettings
from model.decoding.plan import DecodePlan, Piece
from model.errors import UserError
from model.packed_linear import PackedLinear, can_pack, pack_linears
from model.two_tower.adapter import default_settings, linear_layers
from model.two_tower.config import TwoTowerConfig
from model.two_tower.decoding import TowerRequest, log_likelihoods, write_blocks, write_tokens
from model.two_tower.lossless import write_lossless
from model.two_tower.prefix import recording
from model.two_tower.reader import BOTH_WAYS, Capping, Reader, Stretch
from model.two_tower.recurrent import join_states
from model.two_tower.shared import SharedDenoiser, build_shared_towers
from model.two_tower.sublayers import sublayers_of
from model.two_tower.towers import ContextTower, TwoTower, run_tower
from model.two_tower.training import TwoTowerObjective, TwoTowerTraining, denoise, held_out_bound, read_context
from tests.towers import (
    BLOCK,
    MASK,
    VOCAB,
    by_decoding,
    chat_rows,
    document_of,
    laid_out,
    lora_towers,
    relative_error,
    tiny_decoder,
    tiny_lora_towers,
)

KINDS = ("qwen2", "llama", "gemma3_text", "gpt2", "qwen3_moe", "nemotron_h", "lfm2")
EXACT = 2e-6  # transformers rounds to float32 in norms, routers and scans
REQUESTS = [TowerRequest((5, 6, 7, 8, 9), 9), TowerRequest((20, 21, 22), 6)]


def shared(towers: TwoTower) -> SharedDenoiser:
    writer = towers.writer()
    assert isinstance(writer, SharedDenoiser)
    return writer


def causal(count: int) -> Any:
    return recording(torch.zeros(count, dtype=torch.long), torch.arange(count))


def untouched(kind: str, towers: TwoTower) -> TwoTower:
    """The base model as a context tower of its own: no hook, no adapter was ever near it."""
    base = tiny_decoder(kind, towers.context.causal_lm.dtype)
    return TwoTower(ContextTower(base), None, towers.config)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.bfloat16) for kind in KINDS), ("llama", torch.float32), ("qwen2", torch.float64)]
)
def test_an_untrained_adapter_is_the_base_model_bit_for_bit_at_every_time(kind: str, dtype: torch.dtype) -> None:
    towers = tiny_lora_towers(kind, dtype, trained=False)
    ids, positions = torch.tensor([[5, 6, 7, 8, MASK, MASK, 11, 12]]), torch.arange(8)[None]
    keep = torch.ones(1, 8, dtype=torch.bool)
    expected = untouched(kind, towers).context.read(ids, positions, causal(8), None, keep)
    for t in (0.0, 0.31, 1.0):
        with torch.no_grad():
            ours = towers.writer()(ids, positions, torch.tensor([t]), torch.tensor([0]), causal(8), {}, keep).logits
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_no_base_weight_exists_twice_and_the_model_keeps_its_names(kind: str) -> None:
    towers, plain = lora_towers(kind), tiny_decoder(kind)
    writer, base = shared(towers), towers.context.causal_lm
    assert writer.causal_lm is base
    assert {name.split(".")[0] for name in writer.state_dict()} == {"adapter", "time"}
    mine = {p.untyped_storage().data_ptr() for p in writer.parameters()}
    assert not any(p.untyped_storage().data_ptr() in mine for p in base.parameters())
    assert [name for name, _ in base.named_modules()] == [name for name, _ in plain.named_modules()]
    for (name, ours), (other, theirs) in zip(base.state_dict().items(), plain.state_dict().items(), strict=True):
        assert name == other and torch.equal(ours, theirs)
    assert not any(p.requires_grad for p in base.parameters()) and all(p.requires_grad for p in writer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_context_tower_does_is_the_base_models_bit_for_bit_whatever_the_adapter(kind: str) -> None:
    """AR mode and likelihoods, after the denoiser has run; lossless mode token for token, and some drafts stand."""
    towers = lora_towers(kind)
    plain = untouched(kind, towers)
    blocks = write_blocks(towers, REQUESTS)
    ids = (5, 6, 7, 8, 9, 30, 31)
    assert log_likelihoods(towers, [ids]) == log_likelihoods(plain, [ids])
    keep = torch.ones(1, len(ids), dtype=torch.bool)
    direct = [
        run_tower(t.context.causal_lm, torch.tensor([ids]), torch.arange(7)[None], causal(7), None, keep).logits
        for t in (towers, plain)
    ]
    assert torch.equal(*direct)
    expected = [answer.token_ids for answer in write_tokens(plain, REQUESTS)]
    assert [answer.token_ids for answer in write_tokens(towers, REQUESTS)] == expected
    assert [answer.token_ids for answer in write_lossless(towers, REQUESTS)] == expected
    assert [write_blocks(towers, [one])[0].token_ids for one in REQUESTS] == [answer.token_ids for answer in blocks]


def both_at_once(
    towers: TwoTower, *, writing: bool, packed: bool = False
) -> tuple[Reader, list[Stretch], Tensor, Tensor]:
    """Two rows, of which one reads four tokens and the other denoises four: in one forward.

    writing: False runs both as the base model. packed: as one row of eight tokens. Returns the
    reader, its rows, the canvas and the logits [2, S, V].
    """
    reader = Reader(towers, tokens=32, rows=2)
    rows = [Stretch(), Stretch()]
    reader.extend([rows[0]], torch.tensor([[5, 6, 7, 8, 9]]))
    reader.extend([rows[1]], torch.tensor([[30, 31, 32]]))
    canvas = torch.tensor([[40, MASK, MASK, 43]])
    pieces, where = [], []
    for index, (row, span) in enumerate(zip(rows, (1, BOTH_WAYS), strict=True)):
        end = row.length + BLOCK
        while len(row.pages) < reader.cache.pages_for(end):
            row.pages.append(reader.cache.pool.take())
        table = np.array(row.pages, dtype=np.int64)
        pieces.append(Piece(index * BLOCK, BLOCK, row.length, end, span, table))
        where.append(reader.cache.where(table, np.arange(row.length, end)))
    plan = Capping(DecodePlan(reader.cache, pieces, torch.from_numpy(np.concatenate(where))), reader.storage)
    positions = torch.tensor([[row.length] for row in rows]) + torch.arange(BLOCK)
    ids, keep = torch.cat((torch.tensor([[10, MASK, 12, 13]]), canvas)), torch.ones(2, BLOCK, dtype=torch.bool)
    noisy, index = torch.tensor([[False] * BLOCK, [True] * BLOCK]), torch.ones(2, BLOCK, dtype=torch.long)
    if packed:
        ids, positions, keep, noisy, index = (x.view(1, 2 * BLOCK) for x in (ids, positions, keep, noisy, index))
    cache = towers.context.cache(join_states([row.states for row in rows]), BLOCK)
    if not writing:
        logits = towers.context.read(ids, positions, plan, cache, keep)
    else:
        times = torch.tensor([0.1, 0.5])
        logits = shared(towers).mixed(ids, positions, noisy, times, index, plan, cache, keep)
    return reader, rows, canvas, logits.view(2, BLOCK, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_runs_clean_tokens_as_the_base_model_and_noisy_ones_as_the_denoiser(kind: str) -> None:
    """A row each, or both in one row where no layer carries a state from token to token."""
    towers = lora_towers(kind)
    for packed in (False,) if towers.context.recurrent else (False, True):
        *_, base = both_at_once(towers, writing=False, packed=packed)
        reader, rows, canvas, mixed = both_at_once(towers, writing=True, packed=packed)
        assert torch.equal(mixed[0], base[0])
        assert (mixed[1] != base[1]).any(-1).all()
        alone = reader.denoise([rows[1]], canvas, torch.tensor([0.5]))
        assert relative_error(mixed[1], alone[0]) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_of_a_block_equal_the_decoding_step(kind: str) -> None:
    towers, rows = lora_towers(kind), chat_rows()
    batch = laid_out(towers, rows)
    keep = torch.ones_like(batch.masked)
    with torch.no_grad():
        logits = denoise(towers.writer(), batch, read_context(towers.context, batch), keep).logits
    for n in (1, len(batch.block_row) - 1):
        number, start = int(batch.block_document[n]), int(batch.block_start[n])
        prefix = document_of(rows, number // 2, number % 2)[:start]
        expected = by_decoding(towers, prefix, batch.noisy_ids[n], batch.times[batch.time_index[n]], BLOCK)
        assert relative_error(logits.view(*keep.shape, -1)[n], expected) < EXACT


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "nemotron_h"])
def test_gradients_reach_the_adapter_and_the_time_modules_alone_with_checkpointing_or_without(kind: str) -> None:
    towers = tiny_lora_towers(kind)
    batch = laid_out(towers, chat_rows(), keep_all=False)
    writer, gradients, counts = towers.writer().train(), [], []
    runs: list[None] = []
    first: Any = sublayers_of(writer.causal_lm)[0].norm
    first.register_forward_pre_hook(lambda module, args: runs.append(None))
    expected = read_context(untouched(kind, towers).context, batch)
    for checkpointing in (False, True):
        if checkpointing:
            writer.causal_lm.activation_checkpointing_enable({"use_reentrant": False})
        writer.zero_grad()
        loss = TwoTowerTraining(writer)(batch, read_context(towers.context, batch))
        between = read_context(towers.context, batch)  # of the next batch, before this one's backward pass
        for layer, kept in between.kept.items():
            assert all(torch.equal(*pair) for pair in zip(kept, expected.kept[layer], strict=True))
        counts.append(len(runs))
        loss.backward()
        counts.append(len(runs))
        gradients.append({name: p.grad.clone() for name, p in writer.named_parameters() if p.grad is not None})
    assert all(p.grad is None for p in towers.context.causal_lm.parameters())
    assert counts[1] == counts[0] and counts[3] == counts[2] + 1  # the backward pass ran the layer again
    off, on = gradients
    assert off.keys() == on.keys() == dict(writer.named_parameters()).keys()
    assert all(off[name].any() for name in off if name.startswith("adapter.") or name == "time.tables")
    assert all(relative_error(on[name], off[name]) < EXACT for name in off if off[name].any())


def test_training_lowers_the_loss_and_the_bound_and_leaves_the_base_as_it_was() -> None:
    towers, rows = tiny_lora_towers("llama", torch.float32, trained=False), chat_rows()
    objective = TwoTowerObjective(BLOCK, MASK, 0, towers.context.recurrent)
    before = held_out_bound(towers, objective, [rows])
    base = {name: tensor.clone() for name, tensor in towers.context.causal_lm.state_dict().items()}
    module = TwoTowerTraining(towers.writer()).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for step in range(12):
        batch = objective.batch(rows, [0, 1], step)
        loss = module(batch, read_context(towers.context, batch)) / batch.scored_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = held_out_bound(towers, objective, [rows])
    assert after.loss < 0.9 * before.loss and after.bound < before.bound
    assert all(torch.equal(base[name], tensor) for name, tensor in towers.context.causal_lm.state_dict().items())


def test_a_mask_outside_the_vocabulary_is_the_adapters_and_never_written() -> None:
    """The base model keeps its vocabulary; the mask starts as the mean of all embeddings, as the module scales them."""
    towers = tiny_lora_towers("gemma3_text", mask=VOCAB)
    embedding = towers.context.causal_lm.get_input_embeddings()
    start = shared(tiny_lora_towers("gemma3_text", mask=VOCAB, trained=False)).adapter.mask.vector
    with torch.no_grad():
        assert relative_error(start, embedding(torch.arange(VOCAB)).mean(0)) < 1e-6
    assert embedding.num_embeddings == VOCAB
    expected = [answer.token_ids for answer in write_tokens(untouched("gemma3_text", towers), REQUESTS)]
    assert [answer.token_ids for answer in write_lossless(towers, REQUESTS)] == expected
    assert all(token < VOCAB for answer in write_blocks(towers, REQUESTS) for token in answer.token_ids)
    batch = laid_out(towers, chat_rows(), keep_all=False)
    loss = TwoTowerTraining(towers.writer())(batch, read_context(towers.context, batch))
    loss.backward()
    assert torch.isfinite(loss) and shared(towers).adapter.mask.vector.grad.abs().sum() > 0  # type: ignore[union-attr]


def test_the_masks_vector_stands_for_masks_of_noisy_tokens_only() -> None:
    towers = tiny_lora_towers("llama")
    masks = torch.tensor([[5, MASK, MASK, 6]])
    (before,) = log_likelihoods(towers, [masks[0].tolist()])
    draft = by_decoding(towers, torch.tensor([5, MASK, 7]), masks[0], torch.tensor(0.5))
    with torch.no_grad():
        shared(towers).adapter.mask.vector += 1.0
    assert log_likelihoods(towers, [masks[0].tolist()]) == [before]
    assert not torch.equal(by_decoding(towers, torch.tensor([5, MASK, 7]), masks[0], torch.tensor(0.5)), draft)


def test_all_linear_is_every_linear_layer_but_those_that_cannot_be() -> None:
    def ends(kind: str) -> set[str]:
        return {name.rpartition(".")[2] for name in linear_layers(tiny_decoder(kind))}

    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert ends("llama") == attention | {"gate_proj", "up_proj", "down_proj"}
    assert ends("qwen3_moe") == attention
    assert ends("nemotron_h") == attention | {"in_proj"}
    assert ends("lfm2") == {"q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"}
    assert ends("granitemoehybrid") == attention | {"in_proj", "input_linear", "output_linear"}


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        ("llama", "q_prj", "targets do not fit LlamaForCausalLM"),
        ("llama", "embed_tokens", "the embedding and the head stay as they are"),
        ("nemotron_h", "out_proj", "targets do not fit NemotronHForCausalLM"),
        ("qwen3_moe", "gate_proj", "targets do not fit Qwen3MoeForCausalLM"),
    ],
)
def test_targets_that_cannot_be_switched_are_refused(kind: str, target: str, message: str) -> None:
    config = TwoTowerConfig(BLOCK, MASK, denoiser="lora")
    with pytest.raises(UserError, match=message):
        build_shared_towers(tiny_decoder(kind), config, LoraSettings(4, 8.0, (target,)))


def test_a_target_that_runs_on_some_tokens_only_is_refused() -> None:
    model: Any = tiny_decoder("llama")
    inner = model.model.layers[0].mlp.up_proj

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((self.inner(x[:, :1]), self.inner(x[:, 1:])), dim=1)

    model.model.layers[0].mlp.up_proj = Routed()
    with pytest.raises(UserError, match=r"up_proj\.inner does not run on every token"):
        build_shared_towers(model, TwoTowerConfig(BLOCK, MASK, denoiser="lora"), default_settings(4))


@pytest.mark.skipif(not can_pack(nn.Linear(1, 1)), reason="this machine's torch has no oneDNN")
def test_packed_linear_layers_keep_the_adapter() -> None:
    towers = tiny_lora_towers("llama", torch.float32)
    arguments = torch.tensor([5, 6, 7]), torch.tensor([8, MASK, MASK, 9]), torch.tensor(0.5)
    before = by_decoding(towers, *arguments)
    pack_linears(towers.context.causal_lm)
    assert any(isinstance(module, PackedLinear) for module in towers.context.causal_lm.modules())
    assert relative_error(by_decoding(towers, *arguments), before) < 1e-4
