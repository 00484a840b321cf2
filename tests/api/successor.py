"""A tiny adapted Llama whose every token has one successor: real weights and forwards, with answers known in advance.

Attention and MLP add nothing, so a position's hidden state is its token's embedding, and the head's row of a token is
the embedding of the token before it. A masked slot (embedding 0) predicts nothing with confidence, so the threshold
policy opens one position a step. The successors:

    a -> b -> ... -> z -> A -> ... -> Z -> a      (never ends)
    newline -> the bytes of ANSWER -> <|im_end|>  (what every chat gets: its template ends with a newline)
    # -> the tokens of LONG_ANSWER -> <|im_end|>    (each of a few bytes, cut without regard to where characters end)
"""

from __future__ import annotations

import itertools
import random
import string
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.tiny import VOCAB_SIZE, tiny_config, tiny_tokenizer

ANSWER = "한글🎉é"
LONG_ANSWER = (
    "동해 물과 백두산이 마르고 닳도록 👩‍👩‍👧‍👦 하느님이 보우하사 🇰🇷 우리나라 만세. "
    "각 e\u0301 ñ ß Ω жук 日本語 العربية हिन्दी 🏴‍☠️ 👍🏽 𝄞 끝 🎉"
)
LETTERS = string.ascii_lowercase + string.ascii_uppercase
MASK, END = 3, 2
BLOCK_DIFFUSION = {"block_size": 8, "mask_token_id": MASK, "sub_block_size": 4}
WIDTH = 64
SHARPNESS = 60.0


def cut_anywhere(data: bytes) -> list[bytes]:
    """The bytes in different pieces of two to four, longer where a piece was there before; always the same ones."""
    draw = random.Random(0)
    pieces: list[bytes] = []
    while data:
        length = draw.randint(2, 4)
        while data[:length] in pieces and length < len(data):
            length += 1
        pieces.append(data[:length])
        data = data[length:]
    return pieces


PIECES = cut_anywhere(LONG_ANSWER.encode())


def successor_tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer(pieces=PIECES)


def successors() -> dict[int, int]:
    """Token id -> the id that follows it."""
    tokenizer = successor_tokenizer()
    letters = [tokenizer(letter).input_ids[0] for letter in LETTERS]
    short = [*tokenizer("\n" + ANSWER).input_ids, END]
    long = [*tokenizer("#").input_ids, *range(VOCAB_SIZE, VOCAB_SIZE + len(PIECES)), END]
    for chain in (short, long):
        assert len(set(chain)) == len(chain), "a token of an answer would have two successors"
    circle = dict(zip(letters, letters[1:] + letters[:1], strict=True))
    return circle | dict(itertools.pairwise(short)) | dict(itertools.pairwise(long))


def letters_after(letter: str, count: int) -> str:
    """What the model writes after a prompt that ends with `letter`."""
    start = LETTERS.index(letter) + 1
    return "".join(LETTERS[(start + i) % len(LETTERS)] for i in range(count))


def build_successor_model(folder: Path, *, context: int = 512, sharpness: float = SHARPNESS) -> Path:
    """Write the Hugging Face folder and return it. sharpness: a successor's logit; if it is small, hot draws wander."""
    size = VOCAB_SIZE + len(PIECES)
    shape = {"hidden_size": WIDTH, "num_hidden_layers": 1, "max_position_embeddings": context}
    config = tiny_config(**shape, tie_word_embeddings=False, vocab_size=size)
    config.block_diffusion = BLOCK_DIFFUSION
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(size, WIDTH, generator=generator))
    embeddings[MASK] = 0
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token, following in successors().items():
            model.lm_head.weight[following] += sharpness / WIDTH**0.5 * embeddings[token]
    model.save_pretrained(folder)
    successor_tokenizer().save_pretrained(folder)
    return folder
