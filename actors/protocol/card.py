"""What a request must know of the served model, without its weights: the gateway keeps one, the replica the model."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from model.backbone import Backbone
from model.chat_template import ensure_chat_template
from model.config import BlockDiffusionConfig
from model.decoding import SamplingParams


@dataclass(frozen=True)
class ModelCard:
    """A served model as its callers know it. Lengths in tokens.

    `sampling`: the defaults of absent fields; `context_length`: the longest prompt and answer together;
    `plain_template`: the tokenizer brought no chat template, so chats go through the plain one; `max_answer_tokens`:
    the server's own bound on an answer, below what the context leaves.
    """

    name: str
    revision: str
    context_length: int
    vocab_size: int
    block_diffusion: BlockDiffusionConfig | None
    stop_token_ids: frozenset[int]
    sampling: SamplingParams
    tokenizer: PreTrainedTokenizerBase
    plain_template: bool = False
    max_answer_tokens: int | None = None


def model_card(
    backbone: Backbone,
    *,
    name: str | None = None,
    max_length: int | None = None,
    max_answer_tokens: int | None = None,
) -> ModelCard:
    """The card of a loaded model. max_length: the engine's own bound on a row, if it is lower than the context."""
    # Without an end token no plain template is possible: chats are then refused, prompts go on.
    plain = bool(backbone.tokenizer.eos_token) and ensure_chat_template(backbone.tokenizer)
    return ModelCard(
        name=name or backbone.name,
        revision=backbone.revision,
        context_length=min(backbone.context_length, max_length or backbone.context_length),
        vocab_size=int(backbone.model.get_input_embeddings().num_embeddings),
        block_diffusion=backbone.block_diffusion,
        stop_token_ids=backbone.stop_token_ids,
        sampling=sampling_defaults(backbone.model.generation_config),
        tokenizer=backbone.tokenizer,
        plain_template=plain,
        max_answer_tokens=max_answer_tokens,
    )


def sampling_defaults(config: GenerationConfig | None) -> SamplingParams:
    """Absent sampling fields come from the model's generation_config; where `do_sample` is not true, greedy."""
    if config is None:
        return SamplingParams()
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    return SamplingParams(
        temperature=temperature if config.do_sample is True else 0.0,
        top_p=1.0 if config.top_p is None else float(config.top_p),
        top_k=0 if config.top_k is None else int(config.top_k),
        min_p=0.0 if config.min_p is None else float(config.min_p),
        repetition_penalty=1.0 if config.repetition_penalty is None else float(config.repetition_penalty),
    )
