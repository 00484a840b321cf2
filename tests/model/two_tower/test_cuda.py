"""On a CUDA device, and with the towers on two devices: the numbers and the tokens of the CPU."""

from __future__ import annotations

import pytest
import torch

from model.two_tower.decoding import TowerRequest, write_blocks, write_tokens
from model.two_tower.lossless import write_lossless
from model.two_tower.towers import TwoTower
from model.two_tower.training import TwoTowerTraining, read_context
from tests.towers import chat_rows, laid_out, tiny_towers

pytestmark = pytest.mark.gpu
KINDS = ("llama", "gemma2", "nemotron_h", "qwen3_next")
PLACES = (("cuda", "cuda"), ("cpu", "cuda"))  # of the context tower and of the denoiser


def placed(kind: str, context: str, denoiser: str) -> TwoTower:
    towers = tiny_towers(kind, torch.float32)
    towers.context.causal_lm.to(context)  # type: ignore[arg-type]
    towers.writer().to(denoiser)
    return towers


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_training_pass_has_the_loss_of_the_cpu(kind: str, places: tuple[str, str]) -> None:
    losses = []
    for context, denoiser in (("cpu", "cpu"), places):
        towers = placed(kind, context, denoiser)
        batch = laid_out(towers, chat_rows(), keep_all=False)
        loss = TwoTowerTraining(towers.writer())(batch, read_context(towers.context, batch))
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_writes_the_tokens_of_the_cpu(kind: str, places: tuple[str, str]) -> None:
    requests = [TowerRequest((5, 6, 7, 8, 9), 8), TowerRequest((11, 12), 9)]
    for mode in (write_blocks, write_tokens, write_lossless):
        expected, ours = (mode(placed(kind, *where), requests) for where in (("cpu", "cpu"), places))
        assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in expected]
