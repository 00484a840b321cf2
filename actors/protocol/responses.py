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
DONE = "data: [DONE]\n\n"


def diffusion_figures(result: GenerationResult) -> dict[str, Any]:
    """How the answer came about: the forwards its row took part in, and the denoising steps of each block."""
    return {
        "mode": result.mode,
        "forwards": dict(result.forwards),
        "tokens_per_forward": result.tokens_per_forward,
        "steps_per_block": list(result.steps_per_block),
    }


def usage(result: GenerationResult) -> dict[str, Any]:
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

    def whole(self, result: GenerationResult, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of a request that does not stream. logprobs: as `LogprobWriter` shapes them."""
        if self.kind == "chat":
            content: dict[str, Any] = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
        else:
            content = {"text": result.text}
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": result.finish_reason}
        return {**self._head(0), "choices": [choice], "usage": usage(result), "diffusion": diffusion_figures(result)}

    def opening(self) -> list[dict[str, Any]]:
        """A chat's stream begins with the role; a completion's with its first text."""
        return [self._chunk({"role": "assistant", "content": ""})] if self.kind == "chat" else []

    def delta(self, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        """A piece of final text; with log-probabilities, those of the tokens that became final with it."""
        return self._chunk({"content": text} if self.kind == "chat" else text, logprobs=logprobs)

    def closing(self, result: GenerationResult) -> list[dict[str, Any]]:
        """The chunk with finish_reason and `diffusion`, then the usage where it was asked for."""
        last = self._chunk({} if self.kind == "chat" else "", result.finish_reason)
        last["diffusion"] = diffusion_figures(result)
        tail = {**self._head(1), "choices": [], "usage": usage(result)}
        return [last, tail] if self.include_usage else [last]

    def _head(self, streamed: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": OBJECTS[self.kind][streamed],
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"blockcast-{self.revision}",
        }

    def _chunk(
        self, content: Any, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        key = "delta" if self.kind == "chat" else "text"
        choice = {"index": 0, key: content, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head(1), "choices": [choice]}
        return {**chunk, "usage": None} if self.include_usage else chunk


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def canvas(event: Canvas, texts: Sequence[str]) -> dict[str, Any]:
    """What one forward decided; positions count from the prompt's first token and may come in any order.

    texts: each revealed token as a person reads it (`actors.protocol.logprobs.token_text`).
    """
    reveals = [
        {"position": r.position, "token_id": r.token, "confidence": r.confidence, "text": text}
        for r, text in zip(event.reveals, texts, strict=True)
    ]
    return {
        "id": event.id,
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
