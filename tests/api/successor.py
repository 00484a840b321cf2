"""A tiny adapted Llama whose every token has one successor: real weights and forwards, with answers known in advance.

Attention and MLP add nothing, so a position's hidden state is its token's embedding, and the head's row of a token is
the embedding of the token before it. A masked slot (embedding 0) predicts nothing with confidence, so the threshold
policy opens one position a step. The successors:

    a -> b -> ... -> z -> A -> ... -> Z -> a      (never ends)
    newline -> the bytes of ANSWER -> <|im_end|>  (what every chat gets: its template ends with a newline)
"""

from __future__ import annotations

import itertools
import string
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from tests.tiny import VOCAB_SIZE, tiny_config, tiny_tokenizer

ANSWER = "한글🎉é"
LETTERS = string.ascii_lowercase + string.ascii_uppercase
MASK, END = 3, 2
BLOCK_DIFFUSION = {"block_size": 8, "mask_token_id": MASK, "sub_block_size": 4}
WIDTH = 64
SHARPNESS = 60.0


def successors() -> dict[int, int]:
    """Token id -> the id that follows it."""
    tokenizer = tiny_tokenizer()
    letters = [tokenizer(letter).input_ids[0] for letter in LETTERS]
    chain = [*tokenizer("\n" + ANSWER).input_ids, END]
    assert len(set(chain)) == len(chain), "a byte of ANSWER would have two successors"
    return dict(zip(letters, letters[1:] + letters[:1], strict=True)) | dict(itertools.pairwise(chain))


def letters_after(letter: str, count: int) -> str:
    """What the model writes after a prompt that ends with `letter`."""
    start = LETTERS.index(letter) + 1
    return "".join(LETTERS[(start + i) % len(LETTERS)] for i in range(count))


def build_successor_model(folder: Path, sharpness: float = SHARPNESS) -> Path:
    """Write the Hugging Face folder and return it. sharpness: a successor's logit; if it is small, hot draws wander."""
    config = tiny_config(hidden_size=WIDTH, num_hidden_layers=1, tie_word_embeddings=False)
    config.block_diffusion = BLOCK_DIFFUSION
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, WIDTH, generator=generator))
    embeddings[MASK] = 0
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token, following in successors().items():
            model.lm_head.weight[following] = sharpness / WIDTH**0.5 * embeddings[token]
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
