"""The types of requests: exact JSON types, unknown keys refused, null equal to absent.

`actors.protocol.calls` turns what passes here into a GenerationRequest, and a complaint into one sentence that names
the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from model.decoding.requests import BIAS_BOUND, PENALTY_BOUND, SEED_BOUND, TOP_LOGPROBS

MAX_STOP_STRINGS = 4
MAX_CHOICES = 16  # answers of one request


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


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is the whole number 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(_whole(i), int) and not isinstance(i, bool) for i in value)


def _prompt(value: Any) -> Any:
    """A prompt: a string or a list of token ids; a list of one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and (isinstance(value[0], str) or is_ids(value[0])):
        value = value[0]
    if isinstance(value, str):
        return _utf8(value)
    if is_ids(value):
        return tuple(_whole(i) for i in value)
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


class Strict(BaseModel):
    """Exact JSON types, unknown keys refused, null equal to absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


# How the values look that are read by a function: for the OpenAPI document alone, the functions check by themselves.
_Bias = Annotated[float, Field(ge=-BIAS_BOUND, le=BIAS_BOUND)]
_TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]*)$")]
_Biases = Annotated[dict[_TokenId, _Bias], Field(json_schema_extra={"additionalProperties": False})]
_NotEmpty = Annotated[str, Field(min_length=1)]
_Stops = _NotEmpty | Annotated[list[_NotEmpty], Field(max_length=MAX_STOP_STRINGS)]
_TokenIds = list[Annotated[int, Field(ge=0)]]
_Single = Field(min_length=1, max_length=1)
_Prompts = str | _TokenIds | Annotated[list[str], _Single] | Annotated[list[_TokenIds], _Single]

Text = Annotated[str, AfterValidator(_utf8)]
Whole = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Seed = Annotated[int, Field(ge=-SEED_BOUND, lt=SEED_BOUND), BeforeValidator(_whole)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), BeforeValidator(_whole)]
TopCount = Annotated[int, Field(ge=0, le=TOP_LOGPROBS), BeforeValidator(_whole)]


class Message(Strict):
    """One turn of a chat. OpenAI's other keys are accepted as null only."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_content, json_schema_input_type=str | list[TextPart])]
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
    steps: Positive | None = None
    factor: float | None = Field(None, gt=0, allow_inf_nan=False)
    gamma: float | None = Field(None, ge=0, allow_inf_nan=False)
    budget: float | None = Field(None, gt=0, allow_inf_nan=False)
    sub_block_size: Positive | None = None
    refresh: str | None = None
    fused: str | None = None
    trace: bool | None = None


class CallFields(Strict):
    """What chats and completions share."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: Whole | None = None
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-PENALTY_BOUND, le=PENALTY_BOUND, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-PENALTY_BOUND, le=PENALTY_BOUND, allow_inf_nan=False)
    logit_bias: (
        Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias, json_schema_input_type=_Biases)] | None
    ) = None
    seed: Seed | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop, json_schema_input_type=_Stops)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    n: Choices | None = None
    diffusion: DiffusionOptions | None = None


class ChatFields(CallFields):
    """The honoured fields of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    safety_identifier: Text | None = None


class CompletionFields(CallFields):
    """The honoured fields of POST /v1/completions."""

    logprobs: TopCount | None = None
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt, json_schema_input_type=_Prompts)]


class TokenizeFields(Strict):
    """POST /tokenize: a prompt as /v1/completions reads it, or messages as /v1/chat/completions does."""

    model: str | None = None
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt, json_schema_input_type=_Prompts)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
