"""A tiny random Llama with a byte-level tokenizer, made in a second: the real classes at a size a test can afford.

The tokenizer knows every byte (so any text round-trips and UTF-8 boundaries fall inside characters), ChatML markers and
eight spare special tokens, one of which becomes the mask token. The weights are random but fixed by the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|spare_{i}|>" for i in range(8)))
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def tiny_tokenizer(*, chat_template: str | None = CHATML, pieces: Sequence[bytes] = ()) -> PreTrainedTokenizerFast:
    """Special tokens first (ids 0..10), then one token for each of the 256 bytes; eos = `<|im_end|>` (2).

    pieces: tokens of several bytes, with the ids from 267; a model may write them, no text is read as them.
    """
    written = ["".join(bytes_to_unicode()[byte] for byte in piece) for piece in pieces]
    names = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *written]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(**overrides: object) -> LlamaConfig:
    """Two layers, 32 wide, four heads over two KV heads, 512 positions."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**{**values, **overrides})


def build_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    chat_template: str | None = CHATML,
    block_diffusion: dict[str, Any] | None = None,
    **overrides: object,
) -> Path:
    """Write the Hugging Face folder (config, safetensors, tokenizer) and return it.

    block_diffusion: stored under that key of config.json, as an adapted model has it. overrides: LlamaConfig fields.
    """
    config = tiny_config(**overrides)
    if block_diffusion is not None:
        config.block_diffusion = dict(block_diffusion)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tiny_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder
