"""Requests: from the JSON of a client, or of a line of prompts, to one GenerationRequest. One pure function decides.

`parse_call` serves both ways in, HTTP and pipelines/generate.py, so a field means the same in both. It honours a
field or raises RequestError with its name; nothing is ignored, and null is the same as absent. No Ray, no HTTP here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from pydantic import ValidationError

from actors.protocol.card import ModelCard
from actors.protocol.fields import CHAT_FIELDS, COMPLETION_FIELDS, RequestError, check_fields
from actors.protocol.request_types import (
    CallFields,
    ChatFields,
    CompletionFields,
    DiffusionOptions,
    Message,
    StreamOptions,
    Strict,
    TokenizeFields,
    is_ids,
)
from model.config import MODES, BlockDiffusionConfig, DecodeConfig, check_sub_block, nearest_key
from model.decoding import GenerationRequest, SamplingParams
from model.decoding.policies import check_policy
from model.decoding.requests import check_for_towers
from model.errors import UserError

COMPLETION_MAX_TOKENS = 16
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
NOT_ADAPTED = (
    'the model was not adapted to write blocks (no "block_diffusion" in its config.json, nor a TwoTower folder with a '
    "denoiser)"
)
JOB_FIELDS = ("model", "stream", "stream_options")
ONE_ANSWER = "n belongs to a request over HTTP, a line of prompts has one answer: write it as several lines."

Kind = Literal["chat", "completion"]


@dataclass(frozen=True)
class Call:
    """A validated request: what the engine runs, and how the answer is to be sent.

    requests: one for each of its choices, in their order; the first has the call's own id, all have its prompt.
    """

    requests: tuple[GenerationRequest, ...]
    model: str | None
    stream: bool
    include_usage: bool
    user: str | None

    @property
    def request(self) -> GenerationRequest:
        """Of the first choice; the only one, unless the client asked for more."""
        return self.requests[0]


# ------------------------------------------------------------------------------------------------- validation
def parse_call(
    fields: Mapping[str, Any],
    *,
    kind: Kind,
    card: ModelCard,
    decode: DecodeConfig,
    request_id: str,
    default_seed: int,
) -> Call:
    """Validate the JSON of one request and turn it into tokens. Pure: the same arguments give the same call.

    decode: the server's or job's own choice (see `check_default`), for what the request leaves out. default_seed: for
    a request without one. Raises RequestError naming the field at fault.
    """
    rules = CHAT_FIELDS if kind == "chat" else COMPLETION_FIELDS
    parsed = _validate(ChatFields if kind == "chat" else CompletionFields, check_fields(fields, rules))
    if fields.get("best_of") is not None and parsed.n not in (None, 1):
        raise RequestError(f"best_of is not supported with n {parsed.n}: leave it out.", param="best_of")
    if parsed.stream_options is not None and not parsed.stream:
        raise RequestError("stream_options may only be sent with stream: true.", param="stream_options")
    trace = bool(parsed.diffusion and parsed.diffusion.trace)
    if trace and not parsed.stream:
        raise RequestError("diffusion.trace needs stream: true: canvases come as events.", param="diffusion.trace")
    prompt_ids = (
        _chat_ids(parsed.messages, card) if isinstance(parsed, ChatFields) else _prompt_ids(parsed.prompt, card)
    )
    request = GenerationRequest(
        id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=_max_tokens(parsed, len(prompt_ids), card),
        sampling=_sampling(parsed, card, default_seed),
        decode=decode_config(parsed.diffusion, decode, card.block_diffusion),
        stop_token_ids=card.stop_token_ids,
        stop_strings=parsed.stop or (),
        trace=trace,
        logprobs=_logprobs(parsed),
    )
    options = parsed.stream_options
    identifier = parsed.safety_identifier if isinstance(parsed, ChatFields) else None
    return Call(
        requests=choices_of(request, parsed.n or 1),
        model=parsed.model,
        stream=bool(parsed.stream),
        include_usage=bool(options and options.include_usage),
        user=parsed.user or identifier,
    )


def choices_of(request: GenerationRequest, count: int) -> tuple[GenerationRequest, ...]:
    """So many requests for answers to one prompt, which the first encodes for all of them.

    The first is the request itself: with its seed it gives what it gives alone. The others' seeds derive from its seed
    and their index (`derived_seed(seed, "1")`, ...), so that a call with a seed can be repeated too.
    """
    others = (
        replace(
            request,
            id=f"{request.id}.{index}",
            follows=request.id,
            sampling=replace(request.sampling, seed=derived_seed(request.sampling.seed, str(index))),
        )
        for index in range(1, count)
    )
    return (request, *others)


def parse_tokenize(fields: Mapping[str, Any], card: ModelCard) -> tuple[int, ...]:
    """The token ids that a request with this prompt or these messages would begin with. Raises RequestError."""
    parsed: TokenizeFields = _validate(TokenizeFields, {k: v for k, v in fields.items() if v is not None})
    if (parsed.prompt is None) == (parsed.messages is None):
        raise RequestError("Send one of prompt and messages.", param="prompt")
    if parsed.messages is not None:
        return _chat_ids(parsed.messages, card)
    assert parsed.prompt is not None
    return _prompt_ids(parsed.prompt, card)


def generation_request(
    fields: Mapping[str, Any],
    *,
    card: ModelCard,
    default_decode: DecodeConfig,
    request_id: str,
    default_seed: int,
) -> GenerationRequest:
    """A line of prompts without its `id`, as a request: with `messages`, `prompt` or `prompt_token_ids`."""
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in JOB_FIELDS:
        if name in fields:
            raise RequestError(f"{name} belongs to a request over HTTP, not to a line of prompts.", param=name)
    given = [name for name in ("messages", "prompt", "prompt_token_ids") if name in fields]
    if len(given) != 1:
        have = " and ".join(given) or "none of them"
        raise RequestError(f"a prompt needs one of messages, prompt and prompt_token_ids, and has {have}.")
    if "prompt_token_ids" in fields:
        ids = fields.pop("prompt_token_ids")
        if not is_ids(ids):
            raise RequestError("prompt_token_ids must be a list of token ids.", param="prompt_token_ids")
        fields["prompt"] = ids
    kind: Kind = "chat" if "messages" in fields else "completion"
    call = parse_call(
        fields, kind=kind, card=card, decode=default_decode, request_id=request_id, default_seed=default_seed
    )
    if len(call.requests) > 1:
        raise RequestError(ONE_ANSWER, param="n")
    return call.request


def derived_seed(seed: int, prompt_id: str) -> int:
    """The seed of a prompt that brings none: from the job's seed and the prompt's id, never from line order."""
    digest = hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def check_default(decode: DecodeConfig, adapted: BlockDiffusionConfig | None) -> DecodeConfig:
    """The choice of a server or a job, if its model can follow it; raises UserError where it cannot."""
    if decode.mode in ("ar", "lossless"):
        _refuse_block_choices(decode)
    if decode.mode == "auto" and adapted is None:
        return decode
    if decode.mode != "ar":
        if adapted is None:
            raise UserError(f"decode.mode {decode.mode}: {NOT_ADAPTED}: set decode.mode ar, or give an adapted model.")
        try:
            check_policy(decode)
            check_for_towers(decode, adapted)
        except UserError as error:
            raise UserError(f"decode.{error}") from error
        check_sub_block(decode.sub_block_size or adapted.sub_block_size, adapted.block_size)
    return decode


def _refuse_block_choices(decode: DecodeConfig) -> None:
    """The answer is AR mode's, no policy opens anything: a choice of how would be ignored."""
    for name in ("threshold", "steps", "factor", "gamma", "budget", "sub_block_size"):
        if getattr(decode, name) is not None:
            raise UserError(f"decode.{name} has no effect with decode.mode {decode.mode}: leave it out.")


def decode_config(
    asked: DiffusionOptions | None, default: DecodeConfig, adapted: BlockDiffusionConfig | None
) -> DecodeConfig:
    """The request's own choices over the default ones. A key without effect is refused, never ignored."""
    given = asked.model_dump(exclude_none=True, exclude={"trace"}) if asked is not None else {}
    if not given:
        return default
    mode = given.get("mode", default.mode)
    if mode not in MODES:
        raise RequestError(f"diffusion.mode must be one of {', '.join(MODES)}, not {mode!r}.", param="diffusion.mode")
    if mode == "ar" or (mode == "auto" and adapted is None):
        _refuse_all_but(("mode",), given, "mode 'ar'" if adapted else "a model that was not adapted to write blocks")
        return DecodeConfig(mode="ar")
    if adapted is None:
        raise RequestError(
            f"diffusion.mode {mode!r}: {NOT_ADAPTED}: send mode 'ar', or ask an adapted model.",
            param="diffusion.mode",
        )
    if mode == "lossless":
        _refuse_all_but(("mode", "fused"), given, "mode 'lossless'")
        return _chosen(DecodeConfig(mode=mode, fused=default.fused), given, adapted)
    if given.get("policy", default.policy) != default.policy:  # its parameters mean nothing to another policy
        kept = {name: getattr(default, name) for name in ("sub_block_size", "refresh", "fused")}
        default = DecodeConfig(**kept)
    chosen = _chosen(default, {**given, "mode": mode}, adapted)
    if "sub_block_size" in given:
        _named("diffusion.sub_block_size", check_sub_block, given["sub_block_size"], adapted.block_size)
    return chosen


def _refuse_all_but(names: tuple[str, ...], given: Mapping[str, Any], why: str) -> None:
    for name in given:
        if name not in names:
            raise RequestError(f"diffusion.{name} has no effect with {why}: leave it out.", param=f"diffusion.{name}")


def _chosen(default: DecodeConfig, given: Mapping[str, Any], adapted: BlockDiffusionConfig) -> DecodeConfig:
    try:
        chosen = replace(default, **given)
        check_policy(chosen)
        check_for_towers(chosen, adapted)
    except UserError as error:  # which begins with the field
        raise RequestError(f"diffusion.{error}", param=f"diffusion.{str(error).split()[0]}") from error
    return chosen


# ------------------------------------------------------------------------------------------------- the parts
def _sampling(parsed: CallFields, card: ModelCard, default_seed: int) -> SamplingParams:
    given = {name: getattr(parsed, name) for name in SAMPLING_FIELDS}
    values = {name: value for name, value in given.items() if value is not None}
    if values.get("top_p") == 0:  # the smallest nucleus: the most likely token alone
        values |= {"top_p": 1.0, "top_k": 1}
    for token, _ in parsed.logit_bias or ():
        if token >= card.vocab_size:
            message = f"logit_bias names the token id {token}, outside the vocabulary of {card.vocab_size}."
            raise RequestError(message, param="logit_bias")
    return replace(card.sampling, **values, seed=default_seed if parsed.seed is None else parsed.seed)


def _logprobs(parsed: ChatFields | CompletionFields) -> int | None:
    """How many of the most likely tokens to tell beside each chosen one; None: no log-probabilities at all."""
    if isinstance(parsed, CompletionFields):
        return parsed.logprobs
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise RequestError("top_logprobs may only be sent with logprobs: true.", param="top_logprobs")
    return (parsed.top_logprobs or 0) if parsed.logprobs else None


def _chat_ids(messages: Sequence[Message], card: ModelCard) -> tuple[int, ...]:
    """The chat through the tokenizer's template; a last assistant message is continued, else a new turn is opened."""
    if not card.tokenizer.chat_template:
        raise RequestError(f"{card.name} has no chat template: send a prompt (/v1/completions).", param="messages")
    roles = {"developer": "system"}
    turns = [{"role": roles.get(m.role, m.role), "content": m.content} for m in messages]
    going_on = turns[-1]["role"] == "assistant"
    try:
        ids = card.tokenizer.apply_chat_template(
            turns, tokenize=True, return_dict=False, add_generation_prompt=not going_on, continue_final_message=going_on
        )
    except (TemplateError, ValueError) as error:
        raise RequestError(f"messages do not fit the model's chat template: {error}", param="messages") from error
    return _fitting(ids, "messages", card)


def _prompt_ids(prompt: str | Sequence[int], card: ModelCard) -> tuple[int, ...]:
    """The prompt's tokens, special ones as the tokenizer adds them; an empty prompt starts from bos."""
    ids: Sequence[int] = card.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
    for i in ids:
        if not 0 <= i < card.vocab_size:
            message = f"prompt holds the token id {i}, outside the vocabulary of {card.vocab_size}."
            raise RequestError(message, param="prompt")
    if not ids and card.tokenizer.bos_token_id is None:
        raise RequestError("prompt is empty and the model has no token to start from: send some text.", param="prompt")
    return _fitting(ids or [card.tokenizer.bos_token_id], "prompt", card)


def _fitting(ids: Sequence[int], param: str, card: ModelCard) -> tuple[int, ...]:
    if len(ids) >= card.context_length:
        raise RequestError(
            f"{param}: {len(ids)} tokens leave no room for an answer in the context of {card.context_length}.",
            param=param,
            code="context_length_exceeded",
        )
    return tuple(int(i) for i in ids)


def _max_tokens(parsed: CallFields, prompt_tokens: int, card: ModelCard) -> int:
    """The request's bound on its answer: chats may fill the context, completions get 16 tokens."""
    room = card.context_length - prompt_tokens
    newer = parsed.max_completion_tokens if isinstance(parsed, ChatFields) else None
    if None not in (newer, parsed.max_tokens) and newer != parsed.max_tokens:
        raise RequestError("max_tokens and max_completion_tokens differ: send one of them.", param="max_tokens")
    asked = newer if newer is not None else parsed.max_tokens
    most = room if card.max_answer_tokens is None else min(room, card.max_answer_tokens)
    if asked is None:
        return most if isinstance(parsed, ChatFields) else min(COMPLETION_MAX_TOKENS, most)
    param = "max_tokens" if parsed.max_tokens is not None else "max_completion_tokens"
    if asked > room:
        raise RequestError(
            f"{param} {asked} and a prompt of {prompt_tokens} tokens exceed the context of {card.context_length}: "
            f"ask for at most {room}.",
            param=param,
            code="context_length_exceeded",
        )
    if asked > most:
        raise RequestError(f"{param} {asked} is more than this server gives: ask for at most {most}.", param=param)
    return asked


# ------------------------------------------------------------------------------------------------- errors in words
def _named(param: str, check: Any, *values: Any) -> None:
    """Run a check of the model's room and give its complaint the field's name."""
    try:
        check(*values)
    except UserError as error:
        raise RequestError(f"{param}: {error}", param=param) from error


def _validate(kind: Any, fields: Mapping[str, Any]) -> Any:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False)[0]) from None


def _request_error(error: Any) -> RequestError:
    """One sentence from pydantic's first complaint: the field, the value and the rule."""
    param = _path(error["loc"])
    kind, value = error["type"], error["input"]
    if kind == "missing" or (value is None and kind != "value_error"):
        return RequestError(f"{param} is required.", param=param)
    if kind == "extra_forbidden":
        return RequestError(f"{param} is not a known key: {_nearest(param)}", param=param)
    if kind == "value_error":
        return RequestError(f"{param} {error['ctx']['error']}.", param=param)
    what = error["msg"].removeprefix("Input ").strip()
    return RequestError(f"{param} {what[0].lower()}{what[1:]}, not {_short(value)}.", param=param)


def _nearest(param: str) -> str:
    owner, _, key = param.rpartition(".")
    types: dict[str, type[Strict]] = {"diffusion": DiffusionOptions, "stream_options": StreamOptions}
    return nearest_key(key, types.get(owner, Message).model_fields)


def _path(location: Sequence[str | int]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _short(value: Any) -> str:
    """The value as the client wrote it, cut; containers by their kind, however deep they are."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "an array" if value else "an empty array"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
