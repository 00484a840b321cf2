"""The table of request fields, walked over HTTP by the real `openai` client: each honoured, or refused by name."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from actors.protocol.fields import CHAT_FIELDS, COMPLETION_FIELDS, FieldRule
from tests.api.conftest import MODEL
from tests.api.successor import ANSWER, letters_after, successor_tokenizer

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "a"}
Z = successor_tokenizer()("z").input_ids[0]
DIGITS = [str(i) for i in successor_tokenizer()("0123456789").input_ids]  # which follow nothing: all alike
ANY_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}

SHARED_VALUES: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 5,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {str(Z): -5},
    "seed": 7,
    "stop": ["zz", "yy"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "user": "kim",
    "diffusion": {"threshold": 0.8, "sub_block_size": 2},
    "n": 2,
}
CHAT_VALUES: dict[str, Any] = {
    **SHARED_VALUES,
    "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "max_completion_tokens": 5,
    "safety_identifier": "someone",
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": SCHEMA,
    "tools": [ANY_TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "functions": [{"name": "add"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "audio": {"format": "wav", "voice": "alloy"},
    "web_search_options": {},
    "prediction": {"type": "content", "content": "x"},
    "moderation": {"model": "omni-moderation-latest"},
    "reasoning_effort": "low",
    "verbosity": "low",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
}
COMPLETION_VALUES: dict[str, Any] = {
    **SHARED_VALUES,
    "prompt": "b",
    "best_of": 3,
    "echo": True,
    "logprobs": 2,
    "suffix": "the end",
}
COMPANY: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
ENDPOINTS = {
    "chat": (CHAT, CHAT_FIELDS, CHAT_VALUES),
    "completion": (PROMPT, COMPLETION_FIELDS, COMPLETION_VALUES),
}
FIELDS = [(kind, name) for kind, (_, rules, _) in ENDPOINTS.items() for name in rules]
REQUIRED = ("model", "messages", "prompt")


def arguments(create: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as the client takes them: those it knows by name, the others in extra_body."""
    known = inspect.signature(create).parameters
    extra = {name: value for name, value in fields.items() if name not in known}
    return {name: value for name, value in fields.items() if name in known} | {"extra_body": extra}


def ask(client: openai.OpenAI, kind: str, **fields: Any) -> Any:
    base, _, _ = ENDPOINTS[kind]
    create = client.chat.completions.create if kind == "chat" else client.completions.create
    return create(**arguments(create, {**base, **fields}))


def test_every_field_of_the_tables_has_a_value_here() -> None:
    for _, rules, values in ENDPOINTS.values():
        assert set(values) == set(rules)


@pytest.mark.parametrize(("kind", "name"), [pair for pair in FIELDS if pair[1] != "stream_options"])
def test_a_field_is_honoured_or_refused_by_name_and_null_asks_for_nothing(
    client: openai.OpenAI, kind: str, name: str
) -> None:
    _, rules, values = ENDPOINTS[kind]
    given = {**COMPANY.get(name, {}), name: values[name]}
    if rules[name].honoured:
        assert ask(client, kind, **given).choices[0].finish_reason in ("stop", "length")
    else:
        assert refusal(client, kind, **given).param == name
    for neutral in rules[name].neutral:
        assert ask(client, kind, **{name: neutral}).choices[0].finish_reason
    if name in REQUIRED:
        assert refusal(client, kind, **{name: None}).param == name
    else:
        assert text_of(ask(client, kind, **{name: None})) == (ANSWER if kind == "chat" else letters_after("a", 16))


def refusal(client: openai.OpenAI, kind: str, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, kind, **fields)
    assert refused.value.type == "invalid_request_error"
    return refused.value


def text_of(answer: Any) -> str:
    choice = answer.choices[0]
    return str(choice.message.content if hasattr(choice, "message") else choice.text)


def test_the_async_client_sees_the_same_for_every_field(async_client: openai.AsyncOpenAI) -> None:
    async def outcome(kind: str, name: str, rule: FieldRule) -> tuple[str, str, bool]:
        base, _, values = ENDPOINTS[kind]
        create: Any = async_client.chat.completions.create if kind == "chat" else async_client.completions.create
        try:
            answer = await create(**arguments(create, {**base, **COMPANY.get(name, {}), name: values[name]}))
            if name == "stream_options":
                return kind, name, [chunk async for chunk in answer][-1].usage is not None
            return kind, name, rule.honoured and answer.choices[0].finish_reason in ("stop", "length")
        except openai.BadRequestError as error:
            return kind, name, not rule.honoured and error.param == name

    async def everything() -> list[tuple[str, str, bool]]:
        return await asyncio.gather(*(outcome(kind, name, ENDPOINTS[kind][1][name]) for kind, name in FIELDS))

    assert [(kind, name) for kind, name, good in asyncio.run(everything()) if not good] == []


def test_what_is_honoured_shows(client: openai.OpenAI) -> None:
    assert text_of(ask(client, "completion", max_tokens=3)) == "bcd"
    assert text_of(ask(client, "chat", max_completion_tokens=3)) == ANSWER[:1]
    assert text_of(ask(client, "completion", stop=["e", "d"])) == "bc"
    assert text_of(ask(client, "completion", max_tokens=4, logit_bias={str(Z): 100})) == "zzzz"
    assert not text_of(ask(client, "completion", prompt="ba", repetition_penalty=100)).startswith("b")
    drawn = {"temperature": 2.0, "logit_bias": dict.fromkeys(DIGITS, 100), "max_tokens": 12}
    texts = [text_of(ask(client, "completion", seed=seed, **drawn)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert text_of(ask(client, "completion", seed=1, **drawn, top_k=1)) == text_of(
        ask(client, "completion", seed=2, **drawn, top_p=0)
    )


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    for kind, tokens in (("chat", len(ANSWER.encode()) + 1), ("completion", 16)):
        chunks = list(ask(client, kind, stream=True, stream_options={"include_usage": True}))
        assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].usage.completion_tokens == tokens
        assert list(ask(client, kind, stream=True, stream_options=None))[-1].usage is None
    assert refusal(client, "chat", stream_options={"include_usage": True}).param == "stream_options"


def test_a_field_that_openai_does_not_have_yet_is_refused_by_name(client: openai.OpenAI) -> None:
    error = refusal(client, "completion", max_tokenz=5)
    assert error.param == "max_tokenz" and "max_tokens" in error.message


@pytest.mark.parametrize("logprobs", [False, True])
def test_answers_are_whole_by_the_client_s_own_types(client: openai.OpenAI, logprobs: bool) -> None:
    asked: dict[str, dict[str, Any]] = {"chat": {}, "completion": {}}
    if logprobs:
        asked = {"chat": {"logprobs": True, "top_logprobs": 3}, "completion": {"logprobs": 3}}
    for kind, whole, piece in (("chat", ChatCompletion, ChatCompletionChunk), ("completion", Completion, Completion)):
        answer = ask(client, kind, **asked[kind])
        assert unknown_keys(whole.model_validate(answer.to_dict())) == {"diffusion"}
        for chunk in ask(client, kind, stream=True, **asked[kind]):
            assert unknown_keys(piece.model_validate(complete(chunk.to_dict()))) <= {"diffusion"}


def unknown_keys(answer: Any) -> set[str]:
    extras = set(answer.model_extra or {})
    return extras.union(*(set(choice.model_extra or {}) for choice in answer.choices))


def complete(chunk: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's own text completions stream an open finish_reason as null, which its type of a whole one has not."""
    if chunk["object"] == "text_completion":
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    return chunk


def test_a_listed_model_is_whole_by_the_client_s_own_type(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert openai.types.Model.model_validate(model.to_dict()).owned_by == "blockcast"
