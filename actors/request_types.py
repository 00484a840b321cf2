"""The types of requests: exact JSON types, unknown keys refused, null equal to absent.

`actors.protocol` turns what passes here into a GenerationRequest, and a complaint into one sentence that names the
field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from model.decoding.requests import BIAS_BOUND, PENALTY_BOUND, SEED_BOUND, TOP_LOGPROBS

MAX_STOP_STRINGS = 4


def _utf8(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no text: send whole characters") from error
    return text


def _content(value: Any) -> Any:
    """A message's content: a string, or a list of text parts, which are joined."""
    if not isinstance(value, list):
        return value
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"may hold parts of type 'text' only, which part {i} is not")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"part {i} must be {{'type': 'text', 'text': a string}} and nothing else")
    return "".join(part["text"] for part in value)


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def _prompt(value: Any) -> Any:
    """A prompt: a string or a list of token ids; a list of one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and (isinstance(value[0], str) or is_ids(value[0])):
        value = value[0]
    if isinstance(value, str):
        return _utf8(value)
    if is_ids(value):
        return tuple(value)
    raise ValueError("must be one string or one list of token ids")


def _stop(value: Any) -> Any:
    """One string or up to four, as a tuple."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"may hold at most {MAX_STOP_STRINGS} strings, not {len(strings)}")
    if not all(strings):
        raise ValueError("must not hold an empty string")
    return tuple(_utf8(s) for s in strings)


def _logit_bias(value: Any) -> Any:
    """{"token id": bias} as pairs, in the order of the ids."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and biases")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and str(int(token)) == token):
            raise ValueError(f"must name tokens by id, not {token[:60]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= BIAS_BOUND:
            raise ValueError(f"of token {token} must be a number from -100 to 100")
    return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))


Text = Annotated[str, AfterValidator(_utf8)]


class Strict(BaseModel):
    """Exact JSON types, unknown keys refused, null equal to absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Message(Strict):
    """One turn of a chat. OpenAI's other keys are accepted as null only."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_content)]
    name: None = None
    refusal: None = None
    audio: None = None
    tool_calls: None = None
    function_call: None = None


class StreamOptions(Strict):
    """include_usage: a last chunk with the usage of the whole request."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class DiffusionOptions(Strict):
    """How this request wants its blocks opened; absent keys come from the server or the job."""

    mode: str | None = None
    policy: str | None = None
    threshold: float | None = Field(None, gt=0, le=1)
    steps: int | None = Field(None, ge=1)
    factor: float | None = Field(None, gt=0, allow_inf_nan=False)
    gamma: float | None = Field(None, ge=0, allow_inf_nan=False)
    budget: float | None = Field(None, gt=0, allow_inf_nan=False)
    sub_block_size: int | None = Field(None, ge=1)
    refresh: str | None = None
    fused: str | None = None
    trace: bool | None = None


class CallFields(Strict):
    """What chats and completions share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-PENALTY_BOUND, le=PENALTY_BOUND, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-PENALTY_BOUND, le=PENALTY_BOUND, allow_inf_nan=False)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias)] | None = None
    seed: int | None = Field(None, ge=-SEED_BOUND, lt=SEED_BOUND)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    diffusion: DiffusionOptions | None = None


class ChatFields(CallFields):
    """The honoured fields of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    safety_identifier: Text | None = None


class CompletionFields(CallFields):
    """The honoured fields of POST /v1/completions."""

    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]


class TokenizeFields(Strict):
    """POST /tokenize: a prompt as /v1/completions reads it, or messages as /v1/chat/completions does."""

    model: str | None = None
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
