"""Log-probabilities in OpenAI's shapes, as the real `openai` client reads them: whole, streamed, in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from httpx import ASGITransport
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from actors.engine.events import Event
from actors.engine.loop import Engine
from actors.gateway.app import create_app
from actors.gateway.backend import Served
from actors.gateway.exposition import Scrape
from actors.protocol.card import model_card
from actors.protocol.logprobs import LogprobWriter, token_bytes, token_text
from model.backbone import Backbone, load_backbone
from model.config import DecodeConfig
from model.decoding import GenerationRequest, SamplingParams, TokenLogprob
from tests.api.successor import ANSWER, build_successor_model, letters_after
from tests.direct import gateway_over
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
TINY = tiny_tokenizer()


class EngineBackend:
    """A real engine behind the gateway, run to the end for each request."""

    def __init__(self, backbone: Backbone) -> None:
        self._engine = Engine(backbone)
        self.asked: list[GenerationRequest] = []
        self.retries = 0
        self._served = Served(model_card(backbone, name="successor"), DecodeConfig(), created=0)

    async def served(self) -> Served:
        return self._served

    async def generate(
        self, requests: Sequence[GenerationRequest], traceparent: str | None = None
    ) -> AsyncGenerator[Event, None]:
        events: list[Event] = []
        self.asked += requests
        for request in requests:
            self._engine.submit(request, events.append)
        self._engine.run_until_idle()
        for event in events:
            yield event

    async def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def ready(self) -> bool:
        return True

    async def metrics(self) -> Scrape:
        return Scrape()


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> EngineBackend:
    folder: Path = build_successor_model(tmp_path_factory.mktemp("models") / "successor")
    return EngineBackend(load_backbone(folder))


def with_client(backend: EngineBackend, talk: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    """Run `talk` with the real client of a gateway over the backend, without a network between them."""

    async def main() -> Any:
        transport = ASGITransport(create_app(gateway_over(backend)), client=("127.0.0.1", 5))
        async with httpx.AsyncClient(transport=transport) as http:
            return await talk(openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http))

    return asyncio.run(main())


def chat(backend: EngineBackend, **fields: Any) -> Any:
    return with_client(
        backend, lambda client: client.chat.completions.create(model="successor", messages=CHAT, **fields)
    )


def completion(backend: EngineBackend, **fields: Any) -> Any:
    return with_client(
        backend, lambda client: client.completions.create(model="successor", **{"prompt": "a", **fields})
    )


def streamed(backend: EngineBackend, kind: str, **fields: Any) -> list[Any]:
    async def talk(client: openai.AsyncOpenAI) -> list[Any]:
        create: Any = client.chat.completions.create if kind == "chat" else client.completions.create
        asked = {"messages": CHAT} if kind == "chat" else {"prompt": "a"}
        return [chunk async for chunk in await create(model="successor", stream=True, **{**asked, **fields})]

    return with_client(backend, talk)


# ------------------------------------------------------------------------------------------------- over HTTP
def test_a_chat_tells_each_token_with_its_bytes_and_the_most_likely_ones(backend: EngineBackend) -> None:
    answer = chat(backend, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert b"".join(bytes(one.bytes) for one in content) == f"{ANSWER}<|im_end|>".encode()
    assert content[-1].token == "<|im_end|>"
    for one in content:
        assert one.logprob <= 0 and len(one.top_logprobs) == 2
        assert (one.top_logprobs[0].token, one.top_logprobs[0].logprob) == (one.token, one.logprob)
    assert content[0].token == "bytes:\\xed", "a third of a character has no text"
    assert chat(backend).choices[0].logprobs is None
    assert chat(backend, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_a_completion_tells_tokens_their_logarithms_and_where_they_begin(backend: EngineBackend) -> None:
    answer = completion(backend, logprobs=1, max_tokens=12)
    told = answer.choices[0].logprobs
    assert "".join(told.tokens) == answer.choices[0].text == letters_after("a", 12)
    assert told.text_offset == list(range(12))
    tops = [{token: value} for token, value in zip(told.tokens, told.token_logprobs, strict=True)]
    assert told.top_logprobs == tops
    assert completion(backend, logprobs=0, max_tokens=12).choices[0].logprobs.top_logprobs == tops, "and the chosen one"
    assert completion(backend).choices[0].logprobs is None


@pytest.mark.parametrize("diffusion", [{}, {"mode": "ar"}, {"policy": "factor", "factor": 0.5}])
def test_a_stream_tells_the_same_piece_by_piece(backend: EngineBackend, diffusion: dict[str, Any]) -> None:
    extra = {"extra_body": {"diffusion": diffusion}}
    whole = chat(backend, logprobs=True, top_logprobs=3, **extra).choices[0]
    chunks = streamed(backend, "chat", logprobs=True, top_logprobs=3, **extra)
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    assert [one for piece in pieces if piece for one in piece.content] == whole.logprobs.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    told = completion(backend, logprobs=2, max_tokens=20, **extra).choices[0].logprobs
    parts = [c.choices[0].logprobs for c in streamed(backend, "completion", logprobs=2, max_tokens=20, **extra)]
    assert sum(part is not None for part in parts) > 1
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts if part for value in getattr(part, name)] == getattr(told, name)


def test_a_stream_without_them_is_as_it_was(backend: EngineBackend) -> None:
    chunks = streamed(backend, "chat")
    assert all(chunk.choices[0].logprobs is None for chunk in chunks)
    assert all(chunk.choices[0].delta.content for chunk in chunks[1:-1]), "no empty delta"


def test_sampling_fields_reach_the_engine(backend: EngineBackend) -> None:
    z = TINY("z").input_ids[0]
    assert completion(backend, logit_bias={str(z): 100}, max_tokens=5).choices[0].text == "zzzzz"
    extra = {"extra_body": {"min_p": 0.1, "top_k": 9, "repetition_penalty": 1.1}}
    completion(backend, seed=4, presence_penalty=1.5, frequency_penalty=-0.5, logit_bias={str(z): 2}, **extra)
    assert backend.asked[-1].sampling == SamplingParams(
        seed=4,
        top_k=9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        logit_bias=((z, 2.0),),
    )
    assert completion(backend, prompt="ba", max_tokens=1).choices[0].text == "b"
    penalty = {"extra_body": {"repetition_penalty": 100.0}}
    assert completion(backend, prompt="ba", max_tokens=1, **penalty).choices[0].text != "b"
    plain = completion(backend, max_tokens=60, extra_body={"min_p": 0.9, "top_k": 3}, temperature=1.0, seed=1)
    assert plain.choices[0].text == letters_after("a", 60)
    for field, value in (("presence_penalty", 3), ("logit_bias", {"x": 1}), ("logprobs", 21)):
        with pytest.raises(openai.BadRequestError) as refused:
            completion(backend, **{field: value})
        assert refused.value.param == field
    for name, value in (("min_p", 2), ("repetition_penalty", -1), ("diffusion", {"policy": "factor", "gamma": 1})):
        with pytest.raises(openai.BadRequestError) as refused:
            completion(backend, extra_body={name: value})
        assert str(refused.value.param).startswith(name)


# ------------------------------------------------------------------------------------------------- tokens in words
def written(tokens: list[int], kind: Any = "completion") -> dict[str, Any]:
    return LogprobWriter(TINY, kind).write(tokens, [TokenLogprob(-1.0)] * len(tokens))


def test_offsets_count_characters_and_special_tokens_take_no_room() -> None:
    tokens = [*TINY("aé🎉b").input_ids, 2]
    assert written(tokens)["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    writer, pieces = LogprobWriter(TINY, "completion"), list[int]()
    for token in tokens:
        pieces += writer.write([token], [TokenLogprob(-1.0)])["text_offset"]
    assert pieces == written(tokens)["text_offset"]


def test_every_token_of_a_byte_vocabulary_has_its_own_text_and_bytes() -> None:
    everything = [token_bytes(TINY, token) for token in range(VOCAB_SIZE)]
    assert sorted(everything[11:]) == [bytes([byte]) for byte in range(256)]
    texts = {token_text(token, data) for token, data in enumerate(everything)}
    assert len(texts) == VOCAB_SIZE
    assert token_bytes(TINY, VOCAB_SIZE + 5) == b"" and token_text(300, b"") == "token_id:300"


def test_a_vocabulary_with_word_starts_and_byte_fallback_is_read_too() -> None:
    names = ["<unk>", "\u2581once", "upon", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], unk_token="<unk>"))
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(spaces)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert [token_bytes(tokenizer, i) for i in (1, 2, 3 + 0xF0, 3 + 0x41)] == [b" once", b"upon", b"\xf0", b"A"]
