"""The chunked loss is the plain one: values and gradients, whatever the chunk, and without the logits of all rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model.backbone import Backbone, load_backbone
from model.cross_entropy import LossHead, cross_entropy
from model.errors import UserError
from model.objective import BlockDiffusion, TrainingModel, predicted_logits, token_losses
from tests.model.rows import MASK, random_rows

N, H, V = 23, 6, 40


def inputs(seed: int, dtype: torch.dtype = torch.float64, *, bias: bool = False) -> list[Tensor]:
    """hidden, weight, bias (or none), targets, weights."""
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((N, H), (V, H))]
    if bias:
        made.append(torch.randn(V, generator=g, dtype=torch.float64).to(dtype))
    made = [x.requires_grad_() for x in made]
    return [*made, torch.randint(V, (N,), generator=g), torch.rand(N, generator=g)]


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor, softcap: float | None = None
) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (functional.cross_entropy(wide, targets, reduction="none") * weights).sum()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 22, 23, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_loss_and_gradients_equal_the_plain_form_for_any_chunk(rows: int, bias: bool, softcap: float | None) -> None:
    *parameters, targets, weights = inputs(rows, bias=bias)
    hidden, weight, offset = (*parameters, None)[:3]
    expected = plain(hidden, weight, offset, targets, weights, softcap)
    gradients = torch.autograd.grad(3 * expected, parameters)
    total, losses = cross_entropy(hidden, weight, offset, targets, weights, softcap=softcap, chunk_rows=rows)
    assert total.item() == pytest.approx(expected.item(), rel=1e-13)
    assert float((losses * weights).sum()) == pytest.approx(expected.item(), rel=1e-13)
    for ours, theirs in zip(torch.autograd.grad(3 * total, parameters), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_other_formats_the_gradients_stay_within_rounding(dtype: torch.dtype) -> None:
    hidden, weight, targets, weights = inputs(3, dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = torch.autograd.grad(plain(*exact, None, targets, weights), exact)
    total, losses = cross_entropy(hidden, weight, None, targets, weights, chunk_rows=4)
    assert total.dtype == losses.dtype == torch.float32
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for ours, theirs in zip(torch.autograd.grad(total, (hidden, weight)), expected, strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - theirs).abs().max()) < tolerance * float(theirs.abs().max())


def test_a_frozen_head_gets_no_gradient_and_a_second_backward_pass_is_refused() -> None:
    hidden, weight, targets, weights = inputs(4)
    weight.requires_grad_(False)
    total, losses = cross_entropy(hidden, weight, None, targets, weights, chunk_rows=7)
    assert not losses.requires_grad
    total.backward(retain_graph=True)
    assert hidden.grad is not None and weight.grad is None
    with pytest.raises(RuntimeError, match="one backward pass"):
        total.backward()


def test_no_tensor_is_as_large_as_the_logits_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at every operation: rows x V floats never exist, and what waits for backward holds no V per row."""
    rows, vocabulary = 400, 1000
    hidden = torch.randn(rows, H, requires_grad=True)
    weight = torch.randn(vocabulary, H, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    monkeypatch.setattr("model.cross_entropy.CPU_CHUNK_BYTES", 4 * 50 * vocabulary)
    with Watch():
        cross_entropy(hidden, weight, None, torch.zeros(rows, dtype=torch.long))[0].backward()
    assert largest == 50 * vocabulary


@pytest.fixture(scope="module")
def backbone(tiny_model: Path) -> Backbone:
    return load_backbone(tiny_model, dtype=torch.float64)


def test_the_training_model_keeps_its_weights_names_and_tie_and_computes_the_plain_loss(backbone: Backbone) -> None:
    names = [name for name, _ in backbone.model.named_parameters()]
    batch = BlockDiffusion(8, MASK, 0, backbone.layers - 1).batch(random_rows(5), [0, 1], 0)
    expected = functional.cross_entropy(predicted_logits(backbone.model, batch), batch.targets, reduction="none")
    module = TrainingModel(backbone.model)
    assert isinstance(backbone.model.lm_head, LossHead)
    assert backbone.model.lm_head.weight is backbone.model.model.embed_tokens.weight
    assert [name for name, _ in backbone.model.named_parameters()] == names
    assert module(batch).item() == pytest.approx(expected.sum().item(), rel=1e-12)
    torch.testing.assert_close(token_losses(backbone.model, batch), expected.detach(), rtol=1e-12, atol=1e-14)
    assert TrainingModel(backbone.model).causal_lm.lm_head is backbone.model.lm_head


def test_a_model_without_a_linear_head_is_refused(backbone: Backbone) -> None:
    class Headless(torch.nn.Module):
        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(UserError, match="no linear head"):
        TrainingModel(Headless())  # type: ignore[arg-type]
