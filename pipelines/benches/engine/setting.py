"""What all parts share: the model, how it is decoded, what it is asked."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig, LlamaConfig

from actors.engine.loop import Engine, EngineConfig
from actors.engine.scheduler import Planner, plan_round
from actors.protocol.card import model_card
from model.backbone import DTYPES, Backbone, load_backbone, load_tokenizer, make_block_diffusion
from model.config import DecodeConfig, nearest_key
from model.decoding import GenerationRequest
from model.errors import UserError
from model.sources import fetch_model
from pipelines.assessment.contenders import AR
from pipelines.assessment.questions import Question, make_requests, task_questions
from pipelines.benches.engine.config import EngineBenchConfig
from pipelines.benches.result import device_name, model_of

BLOCK_SIZE = 32  # of a model that was not adapted
HEAD_DIM = 64  # of the random Llama, as SmolLM2 and Qwen2.5-0.5B have it
TEXT_TASKS = 32  # their questions make a text long enough that its turns differ
GROUP = 3  # its query heads to a key head, where they divide


@dataclass(frozen=True)
class PartResult:
    """Lines of the table and ratios of one part."""

    lines: list[dict[str, Any]]
    ratios: dict[str, float]


@dataclass(frozen=True)
class Setting:
    """folder: where the weights lie, for others to load; adapted: whether answers mean anything, so that stop tokens
    end them and they are judged. Other models write `max_tokens` tokens in all forms.
    """

    config: EngineBenchConfig
    backbone: Backbone
    folder: str
    name: str
    adapted: bool

    @property
    def block_size(self) -> int:
        assert self.backbone.block_diffusion is not None, "open_setting makes it one"
        return self.backbone.block_diffusion.block_size

    @property
    def exact(self) -> bool:
        """Whether forms that compute the same must give the same tokens: not in bfloat16."""
        return self.config.dtype != "bfloat16"

    @property
    def blocks(self) -> DecodeConfig:
        """The block decoder of all parts but `single`."""
        first = next(iter(self.policies().values()))
        return replace(first, fused=self.config.fused)

    def policies(self) -> dict[str, DecodeConfig]:
        """Block decoders by name: one a threshold; under a fixed number of steps where confidences mean nothing."""
        if self.adapted:
            return {f"threshold {t:g}": DecodeConfig(threshold=t) for t in self.config.thresholds}
        steps = self.config.steps or max(1, self.block_size // 4)
        return {f"{steps} steps": DecodeConfig(policy="static", steps=steps)}

    def questions(self, count: int | None = None) -> list[Question]:
        return task_questions(count or self.config.tasks, self.config.seed, self.config.max_tokens)

    def requests(
        self, decode: DecodeConfig, count: int | None = None, *, backbone: Backbone | None = None
    ) -> list[GenerationRequest]:
        """The questions as requests, to another model with this tokenizer's chats where one is given."""
        requests = make_requests(self.questions(count), model_card(backbone or self.backbone), decode, self.config.seed)
        if self.adapted:
            return requests
        return [replace(request, stop_token_ids=frozenset(), stop_strings=()) for request in requests]

    def behind_text(self, requests: Sequence[GenerationRequest], lengths: Sequence[int]) -> list[GenerationRequest]:
        """The requests with other questions before them, prompts of `lengths` tokens, as far as the context reaches."""
        text = [token for request in self.requests(AR, TEXT_TASKS) for token in request.prompt_ids]
        longer = []
        for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            room = self.backbone.context_length - request.max_tokens
            before = np.resize(np.roll(text, i), max(0, min(length, room) - len(request.prompt_ids))).tolist()
            longer.append(replace(request, prompt_ids=(*before, *request.prompt_ids)))
        return longer

    def engine(
        self,
        requests: Sequence[GenerationRequest],
        rows: int,
        *,
        backbone: Backbone | None = None,
        planner: Planner = plan_round,
    ) -> Engine:
        """An engine of `rows` rows, long enough for the requests; without prefix cache, for prompts come again."""
        backbone = backbone or self.backbone
        longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        whole = -(-longest // self.block_size) * self.block_size
        length = min(whole, backbone.context_length)
        config = EngineConfig(rows, length, prefix_cache=False, weights=self.config.weights)
        return Engine(backbone, config, planner=planner)


@contextmanager
def open_setting(config: EngineBenchConfig) -> Iterator[Setting]:
    """The model of --model, of the demo, or a random one of --width, which lives as long as the context."""
    source, name = model_of(config)
    with tempfile.TemporaryDirectory(prefix="blockcast-bench-") as scratch:
        folder = str(fetch_model(source))
        if config.width is not None:
            folder = str(_random_llama(folder, Path(scratch), config))
            name = f"random Llama {config.width} wide, tokenizer of {name}"
        backbone = load_backbone(folder, dtype=DTYPES[config.dtype], device=device_name())
        adapted = backbone.block_diffusion is not None
        if not adapted:
            backbone = make_block_diffusion(backbone, block_size=BLOCK_SIZE, trained_context_length=None)
        yield Setting(config, backbone, folder, name, adapted)


def _random_llama(source: str, folder: Path, config: EngineBenchConfig) -> Path:
    """A Llama of --width with random weights, the vocabulary, depth and context of the model in `source`."""
    from transformers import LlamaForCausalLM

    width = config.width or 0
    like = AutoConfig.from_pretrained(source).get_text_config()
    head = min(HEAD_DIM, width)
    if width % head:
        raise UserError(f"--width {width} is not a multiple of the head's {head}.")
    heads = width // head
    sizes = LlamaConfig(
        vocab_size=like.vocab_size,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 64) * 64,
        num_hidden_layers=config.layers or like.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // GROUP if heads % GROUP == 0 else heads,
        max_position_embeddings=like.max_position_embeddings,
        tie_word_embeddings=True,
        eos_token_id=like.eos_token_id,
        bos_token_id=like.bos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(sizes)
    model.generation_config = GenerationConfig(eos_token_id=like.eos_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    return folder


def parse_decoder(text: str) -> DecodeConfig:
    """A block decoder of --also: DecodeConfig's fields as name=value, separated by commas. Raises UserError."""
    known = {field.name for field in fields(DecodeConfig)} - {"mode"}
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, found, value = pair.partition("=")
        if not found or name not in known:
            raise UserError(f"--also {text}: {name!r} is no field of a decoder: {nearest_key(name, known)}.")
        values[name] = _number(value)
    return DecodeConfig(**values)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
