"""Answers in OpenAI's shapes: whole, as chunks of a stream, and as errors; plus the extra `diffusion` object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.engine.events import Canvas
from actors.protocol.calls import Kind
from model.decoding import GenerationResult

ERROR_TYPES = {429: "rate_limit_error"}
OBJECTS = {"chat": ("chat.completion", "chat.completion.chunk"), "completion": ("text_completion", "text_completion")}
MIXED = "mixed"
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Totals:
    """What all answers of one request come to; of a single one, its own figures.

    cached_tokens: of the prompt, which counts once, as the first answer found it. mode: "mixed" where "auto" chose one
    for some and another for others. steps_per_block: of one answer after another.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    mode: str
    forwards: dict[str, int]
    steps_per_block: list[int]
    finish_reason: str
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @staticmethod
    def of(results: Sequence[GenerationResult]) -> Totals:
        """results: of each choice, in their order; one at least."""
        first, modes = results[0], {result.mode for result in results}
        reasons = {result.finish_reason for result in results}
        return Totals(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=sum(result.completion_tokens for result in results),
            cached_tokens=first.cached_tokens,
            mode=modes.pop() if len(modes) == 1 else MIXED,
            forwards={phase: sum(result.forwards[phase] for result in results) for phase in first.forwards},
            steps_per_block=[steps for result in results for steps in result.steps_per_block],
            finish_reason="stop" if reasons == {"stop"} else "length",
            drafted_tokens=sum(result.drafted_tokens for result in results),
            accepted_tokens=sum(result.accepted_tokens for result in results),
        )

    @property
    def tokens_per_forward(self) -> float:
        """Completion tokens per denoise or commit forward, as of one answer."""
        return self.completion_tokens / max(1, self.forwards["denoise"] + self.forwards["commit"])


def diffusion_figures(result: GenerationResult | Totals) -> dict[str, Any]:
    """How the answer came about: the forwards its row took part in, and the denoising steps of each block; in lossless
    mode also how many drafted tokens were verified, and how many stood."""
    figures = {
        "mode": result.mode,
        "forwards": dict(result.forwards),
        "tokens_per_forward": result.tokens_per_forward,
        "steps_per_block": list(result.steps_per_block),
    }
    if result.mode == "lossless":
        figures |= {"drafted_tokens": result.drafted_tokens, "accepted_tokens": result.accepted_tokens}
    return figures


def usage(result: Totals) -> dict[str, Any]:
    """Tokens; the stop token counts."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }


@dataclass(frozen=True)
class Reply:
    """What every message about one request carries. created: seconds since 1970."""

    id: str
    created: int
    model: str
    revision: str
    kind: Kind
    include_usage: bool = False

    def whole(self, results: Sequence[GenerationResult], logprobs: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        """The answer of a request that does not stream: its choices, in their order. logprobs: of each, as
        `LogprobWriter` shapes them."""
        both = zip(results, logprobs, strict=True)
        choices = [self._choice(index, result, shaped) for index, (result, shaped) in enumerate(both)]
        if len(choices) > 1:
            choices = [{**c, "diffusion": diffusion_figures(r)} for c, r in zip(choices, results, strict=True)]
        totals = Totals.of(results)
        return {**self._head(0), "choices": choices, "usage": usage(totals), "diffusion": diffusion_figures(totals)}

    def _choice(self, index: int, result: GenerationResult, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        if self.kind == "chat":
            content: dict[str, Any] = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
        else:
            content = {"text": result.text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": result.finish_reason}

    def opening(self, choices: int = 1) -> list[dict[str, Any]]:
        """A chat's stream begins with the role of every choice; a completion's with its first text."""
        begun = {"role": "assistant", "content": ""}
        return [self._chunk(index, begun) for index in range(choices)] if self.kind == "chat" else []

    def delta(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """A piece of a choice's final text; with log-probabilities, of the tokens that became final with it."""
        return self._chunk(index, {"content": text} if self.kind == "chat" else text, logprobs=logprobs)

    def closing(self, index: int, result: GenerationResult) -> dict[str, Any]:
        """The last chunk of a choice, with its finish_reason and its `diffusion`."""
        last = self._chunk(index, {} if self.kind == "chat" else "", result.finish_reason)
        return {**last, "diffusion": diffusion_figures(result)}

    def tail(self, results: Sequence[GenerationResult]) -> list[dict[str, Any]]:
        """What follows the last choice: the usage of all, where it was asked for."""
        return [{**self._head(1), "choices": [], "usage": usage(Totals.of(results))}] if self.include_usage else []

    def _head(self, streamed: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": OBJECTS[self.kind][streamed],
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"blockcast-{self.revision}",
        }

    def _chunk(
        self, index: int, content: Any, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        key = "delta" if self.kind == "chat" else "text"
        choice = {"index": index, key: content, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head(1), "choices": [choice]}
        return {**chunk, "usage": None} if self.include_usage else chunk


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def canvas(answer_id: str, index: int, event: Canvas, texts: Sequence[str]) -> dict[str, Any]:
    """What one forward decided of the choice `index`; positions count from the prompt's first token and may come in any
    order.

    texts: each revealed token as a person reads it (`actors.protocol.logprobs.token_text`).
    """
    reveals = [
        {"position": r.position, "token_id": r.token, "confidence": r.confidence, "text": text}
        for r, text in zip(event.reveals, texts, strict=True)
    ]
    return {
        "id": answer_id,
        "index": index,
        "prompt_tokens": event.prompt_tokens,
        "block_size": event.block_size,
        "sub_block_size": event.sub_block_size,
        "block_start": event.block_start,
        "reveals": reveals,
    }


def sse(data: dict[str, Any], *, event: str | None = None) -> str:
    """One server-sent event; a nameless one is OpenAI's."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
