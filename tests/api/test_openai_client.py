"""The served API as the real `openai` client sees it: sync and async, whole and streamed."""

from __future__ import annotations

import asyncio

import openai
import pytest

from actors.protocol.fields import CHAT_FIELDS, COMPLETION_FIELDS
from tests.api.conftest import MODEL, Server
from tests.api.successor import ANSWER, letters_after
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.slow
CHAT = [{"role": "user", "content": "안녕 🎉"}]
ANSWER_TOKENS = len(ANSWER.encode()) + 1


def test_the_model_is_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_is_answered_with_usage_and_decoding_figures(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == ANSWER_TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + ANSWER_TOKENS
    figures = answer.diffusion
    assert set(figures["forwards"]) == {"prefill", "denoise", "commit"}
    spent = figures["forwards"]["denoise"] + figures["forwards"]["commit"]
    assert figures["tokens_per_forward"] == pytest.approx(ANSWER_TOKENS / spent)
    assert sum(figures["steps_per_block"]) == figures["forwards"]["denoise"]


def test_a_completion_is_answered_from_text_and_from_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a")
    assert answer.choices[0].text == letters_after("a", 16) and answer.choices[0].finish_reason == "length"
    by_id = client.completions.create(model=MODEL, prompt=tiny_tokenizer()("a").input_ids)
    assert by_id.choices[0].text == answer.choices[0].text


def test_every_optional_field_may_be_null(client: openai.OpenAI) -> None:
    required = ("model", "messages", "prompt", "stream")
    chat_nulls = {name: None for name in CHAT_FIELDS if name not in required}
    nulls = {name: None for name in COMPLETION_FIELDS if name not in required}
    chat = client.chat.completions.create(model=MODEL, messages=CHAT, extra_body={**chat_nulls, "stream": None})
    assert chat.choices[0].message.content == ANSWER
    completion = client.completions.create(model=MODEL, prompt="a", extra_body={**nulls, "stream": None})
    assert completion.choices[0].text == letters_after("a", 16)


def test_joined_deltas_are_the_final_text_in_whole_characters(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(deltas) == ANSWER and len(deltas) >= 2
    assert not any("\ufffd" in delta for delta in deltas)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-2].diffusion["forwards"]["denoise"] > 0
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == ANSWER_TOKENS
    assert {c.id for c in chunks} == {chunks[0].id}


def test_a_streamed_completion_without_usage_ends_with_its_finish_reason(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="a", max_tokens=30, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == letters_after("a", 30)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(c.usage is None for c in chunks)


def test_a_stop_string_across_a_sub_block_edge_never_shows(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="a", max_tokens=30, stop=["zzz", "klm"])
    assert whole.choices[0].text == letters_after("a", 9) and whole.choices[0].finish_reason == "stop"
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=30, stop="klm", stream=True)
    assert "".join(c.choices[0].text for c in stream) == letters_after("a", 9)


def test_a_last_assistant_message_is_continued(client: openai.OpenAI) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "xy"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
    assert answer.choices[0].message.content == letters_after("y", 5)


def test_the_diffusion_object_chooses_how_blocks_open(client: openai.OpenAI) -> None:
    def ask(**diffusion: object) -> object:
        return client.completions.create(model=MODEL, prompt="a", max_tokens=16, extra_body={"diffusion": diffusion})

    for diffusion in ({"mode": "ar"}, {"policy": "sequential"}, {"threshold": 1.0}, {"sub_block_size": 2}):
        assert ask(**diffusion).choices[0].text == letters_after("a", 16)
    assert ask(mode="ar").diffusion["forwards"]["denoise"] == 0
    one_step = ask(policy="static", steps=1, sub_block_size=8)
    assert max(one_step.diffusion["steps_per_block"]) == 1


def test_canvases_come_beside_the_final_text_when_traced(client: openai.OpenAI) -> None:
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt="a", max_tokens=12, stream=True, extra_body={"diffusion": {"trace": True}}
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.count("event: canvas") >= 8
    assert lines[-1] == "data: [DONE]"


def test_an_unknown_model_is_a_404_and_a_refused_field_a_400_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=CHAT)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    for extra in ({"n": 0}, {"best_of": 2}, {"temprature": 1}, {"temperature": 3}, {"diffusion": {"steps": 2}}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=extra)
        assert str(refused.value.param).startswith(next(iter(extra)))
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="a" * 600)
    assert long.value.code == "context_length_exceeded"


def test_concurrent_requests_each_get_their_own_answer(async_client: openai.AsyncOpenAI) -> None:
    async def ask(letter: str, count: int) -> str:
        answer = await async_client.completions.create(model=MODEL, prompt=f"nonce {letter}", max_tokens=count)
        return answer.choices[0].text

    async def stream(letter: str, count: int) -> str:
        chunks = await async_client.completions.create(
            model=MODEL, prompt=f"nonce {letter}", max_tokens=count, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def everyone() -> list[tuple[str, str]]:
        expected, asked = [], []
        for i in range(24):
            letter, count = "abcdefghijklmnopqrstuvwx"[i], 5 + 3 * (i % 7)
            expected.append(letters_after(letter, count))
            asked.append((stream if i % 2 else ask)(letter, count))
        return list(zip(await asyncio.gather(*asked), expected, strict=True))

    for got, expected in asyncio.run(everyone()):
        assert got == expected


def test_several_answers_to_one_prompt_come_with_their_index_whole_and_streamed(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    alone = client.chat.completions.create(model=MODEL, messages=CHAT)
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, n=3)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (index, ANSWER, "stop") for index in range(3)
    ]
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert answer.usage.completion_tokens == 3 * ANSWER_TOKENS
    assert [choice.diffusion["steps_per_block"] for choice in answer.choices] == [
        alone.diffusion["steps_per_block"]
    ] * 3
    assert answer.diffusion["forwards"]["denoise"] == 3 * alone.diffusion["forwards"]["denoise"]

    async def streamed() -> tuple[dict[int, str], list[int], int]:
        options = {"include_usage": True}
        stream = await async_client.completions.create(
            model=MODEL, prompt="a", n=4, max_tokens=20, stop="n", stream=True, stream_options=options
        )
        texts, ended, tokens = dict.fromkeys(range(4), ""), [], 0
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ended += [choice.index] if choice.finish_reason else []
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return texts, ended, tokens

    texts, ended, tokens = asyncio.run(streamed())
    assert texts == dict.fromkeys(range(4), letters_after("a", 12)) and sorted(ended) == [0, 1, 2, 3]
    assert tokens >= 4 * 13


def test_a_client_that_leaves_several_answers_frees_all_their_rows(client: openai.OpenAI, server: Server) -> None:
    before = server.stats()
    stream = client.completions.create(model=MODEL, prompt="a", n=6, max_tokens=400, stream=True)
    for _ in range(9):
        next(stream)
    stats = server.stats()
    assert (stats.running, stats.waiting) == (4, 2), "there are four rows"
    stream.close()
    after = server.await_idle()
    assert after.pages_used == 0 and after.committed_tokens - before.committed_tokens < 6 * 380


def test_a_client_that_leaves_frees_its_row(client: openai.OpenAI, server: Server) -> None:
    for streaming in (True, False):
        before = server.stats()
        if streaming:
            stream = client.completions.create(model=MODEL, prompt="a", max_tokens=500, stream=True)
            for _ in range(3):
                next(stream)
            assert server.stats().running == 1
            stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.3).completions.create(model=MODEL, prompt="a", max_tokens=500)
        after = server.await_idle()
        assert after.committed_tokens - before.committed_tokens < 480
        assert after.pages_used == 0
