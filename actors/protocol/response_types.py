"""The types of answers, for the OpenAPI document: what `actors.protocol.responses` writes, and nothing beside it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.protocol.request_types import MAX_CHOICES

Index = Annotated[int, Field(ge=0, lt=MAX_CHOICES)]  # of a choice, from 0


class Exact(BaseModel):
    """No other keys, and all of these."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Exact):
    """message: one sentence; param: the field's path; code: for programs, `context_length_exceeded` for one."""

    message: str = Field(min_length=1)
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Exact):
    """Every error, in OpenAI's shape."""

    error: ErrorDetails


class Health(Exact):
    status: Literal["ok"]


class Readiness(Exact):
    status: Literal["ready"]


class Blocks(Exact):
    """How a model writes: tokens of a block, and of a part of it that is denoised together."""

    block_size: int
    sub_block_size: int


class ModelEntry(Exact):
    """A served model. created: seconds since 1970.

    Of the application's first model also: max_model_len, tokens that prompt and answer may have together, and
    block_diffusion, null where it writes token by token only.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = 0
    block_diffusion: Blocks | None = None


class ModelList(Exact):
    object: Literal["list"]
    data: list[ModelEntry]


class Tokens(Exact):
    """What a prompt or a chat is read as. max_model_len: tokens that prompt and answer may have together."""

    tokens: list[int]
    count: int
    max_model_len: int


class PromptDetails(Exact):
    cached_tokens: int


class Usage(Exact):
    """Tokens; the stop token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Forwards(Exact):
    """Forwards that the request took part in."""

    prefill: int
    denoise: int
    commit: int


class DiffusionFigures(Exact):
    """How the answer came about. tokens_per_forward: completion tokens over denoise and commit forwards.

    Of several choices at once: their sums; mode "mixed" where they differ. Only with mode "lossless": drafted_tokens,
    tokens that were verified, and accepted_tokens, those of them that stood.
    """

    mode: Literal["diffusion", "ar", "lossless", "mixed"]
    forwards: Forwards
    tokens_per_forward: float
    steps_per_block: list[int]
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None


class TopLogprob(Exact):
    """bytes: the token's UTF-8, a part of a character at times. logprob: natural."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Exact):
    content: list[ChatLogprob]
    refusal: None


class CompletionLogprobs(Exact):
    """One entry a token; text_offset: where in the text it begins, in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AnswerMessage(Exact):
    role: Literal["assistant"]
    content: str
    refusal: None


class Choice(Exact):
    """One answer. diffusion: its own figures, where the request asked for several."""

    index: Index
    finish_reason: Literal["stop", "length"]
    diffusion: DiffusionFigures | None = None


class ChatChoice(Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Answer(Exact):
    """What both kinds of answers carry. system_fingerprint: of the served weights."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    diffusion: DiffusionFigures


class ChatAnswer(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice] = Field(min_length=1, max_length=MAX_CHOICES)


class CompletionAnswer(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice] = Field(min_length=1, max_length=MAX_CHOICES)


class ChatDelta(Exact):
    """The first has the role, the last has nothing."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(Exact):
    index: Index
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunkChoice(Exact):
    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Chunk(Exact):
    """What both kinds of chunks carry; diffusion: in the one with finish_reason; usage: only where it was asked for."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    diffusion: DiffusionFigures | None = None


class ChatChunk(Chunk):
    """A piece of final text, or, without choices, the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(max_length=1)


class CompletionChunk(Chunk):
    """A piece of final text, or, without choices, the usage."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice] = Field(max_length=1)


class CanvasReveal(Exact):
    """position: from the prompt's first token. text: the token as a person reads it."""

    position: int
    token_id: int
    confidence: float
    text: str


class CanvasEvent(Exact):
    """With `diffusion.trace`, as `event: canvas`: what one forward decided. Sizes in tokens."""

    id: str
    index: Index
    prompt_tokens: int
    block_size: int
    sub_block_size: int
    block_start: int
    reveals: list[CanvasReveal]
