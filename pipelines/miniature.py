"""An untrained model of one or two million parameters, to take through a whole recipe in minutes on a CPU.

    python pipelines/miniature.py --kind hybrid --output out/hybrid
    python pipelines/adapt.py --model out/hybrid/model --objective next_token --output out/hybrid-ar

`dense` is a Llama, `hybrid` a Nemotron-H of Mamba-2, attention and experts. The byte-level vocabulary is learnt from
the project's own tasks (their training split), digits apart, with ChatML markers and a mask token. The output folder:

    model/          an ordinary Hugging Face folder with random weights
    manifest.json   configuration, versions, figures
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from model.errors import UserError
from model.weights import quiet
from pipelines.jobkit import JobConfig, OutputFolder, main
from pipelines.tasks import generate

MODEL = "model"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
PAD, BOS, EOS = 0, 1, 2
BYTES = 256
POSITIONS = 1024
HEAD = 32  # numbers in a head, of attention and of Mamba
HYBRID = "MEM*EMEM*E"  # M Mamba-2, * attention, E experts


class MiniatureConfig(JobConfig):
    """Make a small untrained model, with a tokenizer learnt from the project's tasks."""

    output_name: ClassVar[str] = "miniature"

    kind: Literal["dense", "hybrid"] = Field(
        "dense", description="dense: a Llama; hybrid: a Nemotron-H of Mamba-2, attention and experts"
    )
    width: int = Field(128, ge=HEAD, description=f"hidden size, a multiple of {HEAD}")
    layers: int = Field(6, ge=1, description=f"layers of the dense model; the hybrid's are {HYBRID}")
    vocabulary: int = Field(1024, ge=BYTES + len(SPECIAL_TOKENS), description="tokens, bytes and markers included")
    tasks: int = Field(3000, ge=1, description="generated tasks that the tokenizer is learnt from")


def run(config: MiniatureConfig) -> dict[str, Any]:
    """Make and write the model; returns the figures."""
    _check(config)
    with OutputFolder(str(config.output), job="miniature", config=config) as output:
        if output.finished is None:
            output.finish(_make(config, output))
        else:
            print(f"{output.uri(MODEL)} is finished: nothing to make.")
        assert output.finished is not None
        figures: dict[str, Any] = output.finished["figures"]
    return figures


def _check(config: MiniatureConfig) -> None:
    if config.model or config.data:
        raise UserError("miniature makes a model of its own: leave --model and --data out.")
    if config.width % HEAD:
        raise UserError(f"--width {config.width} is not a multiple of {HEAD}.")


def _make(config: MiniatureConfig, output: OutputFolder) -> dict[str, Any]:
    tokenizer = task_tokenizer(config.vocabulary, config.tasks, config.seed)
    causal_lm = random_model(describe(config, len(tokenizer)), config.seed)
    with output.stage(MODEL) as folder, quiet():
        causal_lm.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    parameters = sum(p.numel() for p in causal_lm.parameters())
    print(f"miniature: {output.uri(MODEL)}: {type(causal_lm).__name__}, {parameters:,} parameters", flush=True)
    return {"class": type(causal_lm).__name__, "parameters": parameters, "vocabulary": len(tokenizer)}


# ------------------------------------------------------------------------------------------------- tokenizer
def task_tokenizer(vocabulary: int, tasks: int, seed: int) -> PreTrainedTokenizerFast:
    """Byte pairs learnt from so many training tasks: markers first, ids 0 .. 3, then the bytes, then what was merged.

    Digits never merge. A small sample of tasks may give fewer tokens than `vocabulary`.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(tasks, seed), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        pad_token=SPECIAL_TOKENS[PAD],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _texts(tasks: int, seed: int) -> Iterator[str]:
    for task in generate("train", tasks, seed):
        yield from (str(message["content"]) for message in task.chat()["messages"])


# ------------------------------------------------------------------------------------------------- network
def describe(config: MiniatureConfig, vocabulary: int) -> PreTrainedConfig:
    """The network's config: by default 1.3 million parameters as dense, two as hybrid."""
    common = {
        "vocab_size": vocabulary,
        "hidden_size": config.width,
        "num_attention_heads": config.width // HEAD,
        "num_key_value_heads": config.width // HEAD,
        "head_dim": HEAD,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if config.kind == "dense":
        feed = -(-config.width * 8 // 3 // HEAD) * HEAD
        return AutoConfig.for_model(
            "llama",
            **common,
            num_hidden_layers=config.layers,
            intermediate_size=feed,
            tie_word_embeddings=True,
        )
    return AutoConfig.for_model(
        "nemotron_h",
        **common,
        hybrid_override_pattern=HYBRID,
        mamba_num_heads=2 * config.width // HEAD,
        mamba_head_dim=HEAD,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=config.width,
        moe_shared_expert_intermediate_size=config.width,
        intermediate_size=config.width,
    )


def random_model(described: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """The network with weights drawn from the seed, float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        causal_lm: PreTrainedModel = AutoModelForCausalLM.from_config(described, dtype=torch.float32)
    return causal_lm


if __name__ == "__main__":
    sys.exit(main("miniature", MiniatureConfig, run))
