"""Text as it streams: characters cut over tokens, stop strings over the edges of sub-blocks, prompts in any script."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import MODEL, Server
from tests.api.successor import LONG_ANSWER, PIECES, letters_after
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.slow
WAYS: list[dict[str, Any]] = [
    {"mode": "ar"},
    {"sub_block_size": 1},
    {"sub_block_size": 2},
    {"sub_block_size": 4},
    {"sub_block_size": 8},
    {"fused": "off"},
]
PROMPTS = [
    "안녕하세요, 오늘 날씨가 어때요?",
    "각각 (자모로 쓴 글자)",
    "🎉👩‍👩‍👧‍👦🇰🇷🏴‍☠️👍🏽",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "日本語\u3000全角\ufeff",
    "e\u0301 \u200b\u202e z",
    "NUL \u0000 and \u0001, line\u2028ends\r\n\t",
    "\U0010ffff\uffff\ue000",
]


async def streamed(client: openai.AsyncOpenAI, prompt: str, **fields: Any) -> list[str]:
    """The deltas of a streamed completion."""
    stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **fields)
    return [chunk.choices[0].text async for chunk in stream]


def everyone(*asked: Any) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*asked)

    return asyncio.run(main())


def test_the_tokens_really_end_inside_characters() -> None:
    def whole(piece: bytes) -> bool:
        try:
            return bool(piece.decode())
        except UnicodeDecodeError:
            return False

    assert sum(not whole(piece) for piece in PIECES) > len(PIECES) / 2


def test_joined_deltas_are_the_final_text_in_whole_characters(
    async_client: openai.AsyncOpenAI, client: openai.OpenAI
) -> None:
    asked = [streamed(async_client, "#", max_tokens=300, extra_body={"diffusion": way}) for way in WAYS]
    for way, deltas in zip(WAYS, everyone(*asked), strict=True):
        assert "".join(deltas) == LONG_ANSWER, way
        assert len([delta for delta in deltas if delta]) > 5
        assert not any("\ufffd" in delta for delta in deltas)
    whole = client.completions.create(model=MODEL, prompt="#", max_tokens=300)
    assert whole.choices[0].text == LONG_ANSWER and whole.usage.completion_tokens == len(PIECES) + 1


def test_wherever_the_limit_cuts_the_stream_and_the_whole_answer_agree(async_client: openai.AsyncOpenAI) -> None:
    async def whole(limit: int) -> str:
        answer = await async_client.completions.create(model=MODEL, prompt="#", max_tokens=limit)
        return answer.choices[0].text

    async def both(limit: int) -> tuple[str, list[str]]:
        return await whole(limit), await streamed(async_client, "#", max_tokens=limit)

    limits = range(1, len(PIECES) + 1)
    for limit, (text, deltas) in zip(limits, everyone(*(both(limit) for limit in limits)), strict=True):
        begun = b"".join(PIECES[:limit]).decode(errors="replace")
        assert text == "".join(deltas) == begun
        assert not any("\ufffd" in delta for delta in deltas[:-2])


def test_the_bytes_of_the_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    continued = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "#"}]
    asked: Any = {"model": MODEL, "messages": continued, "logprobs": True}
    entries = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in entries[:-1]] == PIECES
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    pieces = [bytes(entry.bytes) for c in choices if c.logprobs for entry in c.logprobs.content]
    assert pieces[:-1] == PIECES and "".join(c.delta.content or "" for c in choices) == LONG_ANSWER


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_in_any_script_arrives_whole(server: Server, prompt: str) -> None:
    fields = {"model": MODEL, "prompt": prompt + "a", "max_tokens": 4}
    for ascii_only in (True, False):
        body = json.dumps(fields, ensure_ascii=ascii_only).encode()
        headers = {"Content-Type": "application/json"}
        response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, trust_env=False)
        answer = response.json()
        assert answer["choices"][0]["text"] == letters_after("a", 4)
        assert answer["usage"]["prompt_tokens"] == len(tiny_tokenizer()(prompt + "a").input_ids)
        assert answer["usage"]["prompt_tokens"] == len((prompt + "a").encode())


def test_a_stop_string_anywhere_over_sub_block_edges_never_shows(async_client: openai.AsyncOpenAI) -> None:
    text = letters_after("a", 24)
    cases = [(begin, length, way) for begin in range(1, 18, 2) for length in (2, 3, 6) for way in (0, 2, 3)]
    asked = (
        streamed(
            async_client,
            "a",
            max_tokens=24,
            stop=["~~", text[begin : begin + length]],
            extra_body={"diffusion": WAYS[way]},
        )
        for begin, length, way in cases
    )
    for case, deltas in zip(cases, everyone(*asked), strict=True):
        assert "".join(deltas) == text[: case[0]], case


def test_what_only_begins_like_a_stop_string_is_told_in_the_end(async_client: openai.AsyncOpenAI) -> None:
    text = letters_after("a", 20)
    stops = [[text[i : i + 3] + "~"] for i in range(0, 18, 3)] + [["t~", text[-1] + text[-1]]]
    for deltas in everyone(*(streamed(async_client, "a", max_tokens=20, stop=stop) for stop in stops)):
        assert "".join(deltas) == text


@pytest.mark.parametrize("stop", ["두산이", "👩‍👧", "🇰🇷 우", "한 방울", "끝 🎉"])
def test_a_stop_string_of_several_bytes_a_character_cuts_before_it(async_client: openai.AsyncOpenAI, stop: str) -> None:
    expected = LONG_ANSWER.partition(stop)[0]
    (deltas,) = everyone(streamed(async_client, "#", max_tokens=300, stop=stop))
    assert "".join(deltas) == expected and not any("\ufffd" in delta for delta in deltas)
