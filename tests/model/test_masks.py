"""The masks against the published pictures, written out by hand."""

from __future__ import annotations

import torch

from model.masks import CLEAN, NOISY_1, NOISY_2, Tokens, block_diffusion, causal, dense, stream_tokens

FOUR_TOKENS_TWO_BLOCKS = """
11..|....|....
11..|....|....
..11|....|11..
..11|....|11..
....|11..|....
....|11..|....
....|..11|11..
....|..11|11..
....|....|11..
....|....|11..
....|....|1111
....|....|1111
"""


def picture(text: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in line if c in "1."] for line in text.split()])


def test_three_streams_of_two_blocks_attend_as_published() -> None:
    tokens = stream_tokens(torch.zeros(4, dtype=torch.long), 2, (NOISY_1, NOISY_2, CLEAN))
    assert torch.equal(dense(block_diffusion, tokens), picture(FOUR_TOKENS_TWO_BLOCKS))


def test_two_documents_never_see_each_other() -> None:
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    tokens = stream_tokens(documents, 2, (NOISY_1, NOISY_2, CLEAN))
    allowed = dense(block_diffusion, tokens)
    assert not allowed[tokens.document[:, None] != tokens.document[None]].any()
    assert allowed.diagonal().all()


def test_a_tail_block_sees_itself_only_so_no_softmax_is_empty() -> None:
    tokens = stream_tokens(torch.tensor([0, 0, -1, -1, -1, -1]), 2, (NOISY_1, NOISY_2, CLEAN))
    allowed = dense(block_diffusion, tokens)
    assert allowed.any(1).all()
    tail = tokens.document == -1
    assert not allowed[tail][:, ~tail].any()
    assert torch.equal(allowed[tail].sum(1), torch.full((int(tail.sum()),), 2))


def test_the_causal_mask_is_a_triangle_per_document() -> None:
    position = torch.arange(4)
    tokens = Tokens(torch.full((4,), CLEAN), torch.tensor([0, 0, 1, 1]), position // 2, position)
    assert torch.equal(dense(causal, tokens), picture("1... 11.. ..1. ..11"))
