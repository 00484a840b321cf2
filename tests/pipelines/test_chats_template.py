"""Assistant tokens are supervised, and only they, whatever the template; over-long documents are cut at turns."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from model.chat_template import PLAIN_TEMPLATE, ensure_chat_template
from model.errors import UserError
from pipelines.chats.over_long import fit
from pipelines.chats.records import Chat, PlainText, Rejected, parse
from pipelines.chats.template import ChatEncoder, Encoded
from tests.tiny import CHATML, tiny_tokenizer

MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (  # as Qwen3's: only the last answer shows that it was thought about
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKETS = (  # as Mistral's: no generation prompt, turns must alternate
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
ENDLESS = "{% for message in messages %}{{ message['role'][0] + ': ' + message['content'] + '\n' }}{% endfor %}"

words = st.text(alphabet="ab \n\t.é漢\U0001f600", min_size=1, max_size=20).filter(lambda text: text.strip())
dialogues = st.lists(st.tuples(words, words), min_size=1, max_size=4)


def chat_of(dialogue: list[tuple[str, str]], system: str | None = None) -> Chat:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in dialogue:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Chat(tuple(messages))


def encoded(encoder: ChatEncoder, chat: Chat) -> list[Encoded]:
    (result,) = encoder.encode([chat])
    assert not isinstance(result, Rejected), result
    return result


def answers_of(tokenizer: PreTrainedTokenizerBase, document: Encoded) -> list[str]:
    """The text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.r_[0, document.supervised.astype(int), 0]))
    return [tokenizer.decode(document.input_ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


@settings(max_examples=60, deadline=None)
@given(dialogue=dialogues, system=st.none() | words)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_every_answer_with_its_end_token_is_supervised_and_nothing_else(template, dialogue, system):
    tokenizer = tiny_tokenizer(chat_template=template)
    chat = chat_of(dialogue, system)
    (document,) = encoded(ChatEncoder(tokenizer), chat)
    assert tokenizer.decode(document.input_ids) == tokenizer.apply_chat_template(list(chat.messages), tokenize=False)
    assert answers_of(tokenizer, document) == [f"{answer}<|im_end|>" for _, answer in dialogue]


@settings(max_examples=40, deadline=None)
@given(dialogue=dialogues, system=st.none() | words)
def test_what_stands_before_an_answer_is_the_prompt_that_serving_would_send(dialogue, system):
    tokenizer = tiny_tokenizer()
    chat = chat_of(dialogue, system)
    (document,) = encoded(ChatEncoder(tokenizer), chat)
    starts = np.flatnonzero(np.diff(document.supervised.astype(int)) == 1) + 1
    turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    for start, turn in zip(starts, turns, strict=True):
        prompt = tokenizer.apply_chat_template(
            list(chat.messages[:turn]), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert document.input_ids[:start].tolist() == prompt


@settings(max_examples=30, deadline=None)
@given(dialogue=dialogues)
def test_a_template_that_rewrites_earlier_turns_gives_one_document_per_answer(dialogue):
    tokenizer = tiny_tokenizer(chat_template=FORGETFUL)
    documents = encoded(ChatEncoder(tokenizer), chat_of(dialogue))
    assert len(documents) == len(dialogue)
    for index, document in enumerate(documents):
        seen = chat_of(dialogue[: index + 1])
        assert tokenizer.decode(document.input_ids) == tokenizer.apply_chat_template(
            list(seen.messages), tokenize=False
        )
        assert answers_of(tokenizer, document) == [f"<think></think>{dialogue[index][1]}<|im_end|>"]


@settings(max_examples=30, deadline=None)
@given(dialogue=dialogues)
def test_a_template_without_generation_prompt_is_understood(dialogue):
    tokenizer = tiny_tokenizer(chat_template=BRACKETS)
    (document,) = encoded(ChatEncoder(tokenizer), chat_of(dialogue))
    assert answers_of(tokenizer, document) == [f" {answer}<|im_end|>" for _, answer in dialogue]


@settings(max_examples=30, deadline=None)
@given(dialogue=dialogues, system=st.none() | words)
def test_the_plain_template_closes_answers_with_the_end_token(dialogue, system):
    encoder = ChatEncoder(tiny_tokenizer(chat_template=None))
    assert encoder.plain
    (document,) = encoded(encoder, chat_of(dialogue, system))
    assert answers_of(encoder.tokenizer, document) == [f"{answer.strip()}<|im_end|>" for _, answer in dialogue]


def test_the_plain_template_reads_as_documented():
    tokenizer = tiny_tokenizer(chat_template=None)
    assert ensure_chat_template(tokenizer) and not ensure_chat_template(tokenizer)
    assert tokenizer.chat_template == PLAIN_TEMPLATE
    text = tokenizer.apply_chat_template(
        list(chat_of([("How are you? ", "Fine.")], "Be brief").messages), tokenize=False
    )
    assert text == "<|im_start|>System:\nBe brief\n\nUser:\nHow are you?\n\nAssistant:\nFine.<|im_end|>\n\n"


@pytest.mark.parametrize("template", ["{{ messages | length / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"])
def test_a_template_that_fails_while_it_computes_rejects_the_chat(template):
    (result,) = ChatEncoder(tiny_tokenizer(chat_template=template)).encode([chat_of([("a", "b")])])
    assert str(result).startswith("chat template: ")


def test_named_templates_without_a_default_are_refused():
    with pytest.raises(UserError, match="no named template 'default'"):
        ensure_chat_template(tiny_tokenizer(chat_template={"tool_use": CHATML}))


def test_a_tokenizer_without_template_and_end_token_is_refused():
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="neither a chat template nor an end token"):
        ChatEncoder(tokenizer)


def test_a_template_without_an_end_token_supervises_the_newline_that_ends_a_turn():
    tokenizer = tiny_tokenizer(chat_template=ENDLESS)
    (document,) = encoded(ChatEncoder(tokenizer), chat_of([("q", "fine")]))
    assert answers_of(tokenizer, document) == ["a: fine\n"]


def test_a_chat_that_the_template_refuses_is_rejected_with_its_words():
    encoder = ChatEncoder(tiny_tokenizer(chat_template=BRACKETS))
    good = chat_of([("a", "b")])
    bad = Chat((*good.messages, good.messages[1]))
    results = encoder.encode([bad, good, Chat(good.messages[1:])])
    assert [isinstance(result, Rejected) for result in results] == [True, False, True]
    assert str(results[0]) == "chat template: turns must alternate"


@pytest.mark.parametrize("template", [CHATML, FORGETFUL, None], ids=["chatml", "forgetful", "plain"])
def test_an_answer_that_opens_a_chat_is_supervised_too(template):
    tokenizer = tiny_tokenizer(chat_template=template)
    (document,) = encoded(ChatEncoder(tokenizer), Chat(({"role": "assistant", "content": "a"},)))
    assert answers_of(tokenizer, document) == ["a<|im_end|>"]


def test_plain_text_is_supervised_and_ends():
    tokenizer = tiny_tokenizer()
    (result,) = ChatEncoder(tokenizer).encode([PlainText("Once é.")])
    assert answers_of(tokenizer, result[0]) == ["Once é.<|im_end|>"]
    assert tokenizer.decode(result[0].input_ids) == "<|im_start|>Once é.<|im_end|>"


def test_a_document_in_a_batch_is_encoded_as_alone():
    encoder = ChatEncoder(tiny_tokenizer())
    chats = [chat_of([(f"q{number}", "a" * number)]) for number in range(1, 6)]
    together = encoder.encode([chats[0], Chat(({"role": "robot", "content": 1},)), *chats[1:]])  # type: ignore[dict-item]
    assert isinstance(together[1], Rejected)
    del together[1]
    for chat, found in zip(chats, together, strict=True):
        np.testing.assert_array_equal(found[0].input_ids, encoded(encoder, chat)[0].input_ids)


def no_straddling(folder: Path, changes: str) -> ChatEncoder:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = changes
    return ChatEncoder(tokenizer)


def test_a_token_across_the_edge_of_an_answer_is_taken_apart(shared):
    encoder = no_straddling(
        shared / "data" / "tokenizers" / "qwen2_5",
        "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    )
    (document,) = encoded(encoder, chat_of([("q", "://x")]))  # `://` is one token
    assert answers_of(encoder.tokenizer, document) == ["://x\n"]
    prompt = "user:q\nassistant:"
    assert document.input_ids[: int(document.supervised.argmax())].tolist() == encoder.tokenizer(prompt)["input_ids"]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_real_tokenizers_supervise_the_answers_of_real_chats(shared, name):
    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "tokenizers" / name)
    encoder = ChatEncoder(tokenizer)
    with gzip.open(shared / "data" / "gpteacher" / "codegen.jsonl.gz") as file:
        chats = [parse(json.loads(line), "messages") for line in islice(file, 200)]
    for chat, documents in zip(chats, encoder.encode(chats), strict=True):
        assert not isinstance(documents, Rejected) and isinstance(chat, Chat)
        answer = chat.messages[-1]["content"]
        think = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
        content = answer.lstrip("\n") if name == "qwen3" else answer
        assert answers_of(tokenizer, documents[-1]) == [f"{think}{content}<|im_end|>"]
        start = int(documents[-1].supervised.argmax())
        prompt = tokenizer.apply_chat_template(list(chat.messages[:-1]), add_generation_prompt=True, return_dict=True)
        assert documents[-1].input_ids[:start].tolist() == prompt["input_ids"]


# Over-long documents --------------------------------------------------------------------------------------------------

documents = st.lists(st.tuples(st.integers(1, 12), st.integers(3, 12)), min_size=1, max_size=8)


def document_of(exchanges: list[tuple[int, int]]) -> Encoded:
    """An encoded chat with questions and answers of the given lengths; ids count up."""
    supervised = np.concatenate([np.r_[np.zeros(q, bool), np.ones(a, bool)] for q, a in exchanges])
    ends = np.cumsum([q + a for q, a in exchanges]).tolist()
    return Encoded(np.arange(len(supervised), dtype=np.int32), supervised, tuple(ends[:-1]))


@settings(max_examples=200, deadline=None)
@given(exchanges=documents, limit=st.integers(2, 30))
def test_splitting_loses_no_supervised_token_but_those_that_begin_a_piece(exchanges, limit):
    document = document_of(exchanges)
    result = fit([document], limit, "split")
    assert all(len(piece) <= limit and piece.supervised.any() and not piece.supervised[0] for piece in result.pieces)
    kept = np.concatenate([piece.input_ids for piece in result.pieces])
    assert (np.diff(kept) > 0).all()
    learnt = np.concatenate([piece.input_ids[piece.supervised] for piece in result.pieces])
    lost = set(document.input_ids[document.supervised].tolist()) - set(learnt.tolist())
    heads = {int(piece.input_ids[0]) for piece in result.pieces}
    assert len(lost - heads) <= result.dropped
    if len(document) <= limit:
        assert (len(result.pieces), result.split) == (1, 0)


@settings(max_examples=200, deadline=None)
@given(exchanges=documents, limit=st.integers(24, 60))
def test_exchanges_that_fit_a_row_are_never_cut(exchanges, limit):
    document = document_of(exchanges)
    result = fit([document], limit, "split")
    starts = [int(piece.input_ids[0]) for piece in result.pieces]
    assert set(starts) <= {0, *document.cuts}
    assert sum(len(piece) for piece in result.pieces) == len(document)
    for first, second in zip(result.pieces, result.pieces[1:], strict=False):
        following = next((cut for cut in (*document.cuts, len(document)) if cut > second.input_ids[0]), len(document))
        assert len(first) + following - second.input_ids[0] > limit


def test_truncating_keeps_the_beginning():
    result = fit([document_of([(4, 4), (4, 4)])], 7, "truncate")
    assert [piece.input_ids.tolist() for piece in result.pieces] == [[0, 1, 2, 3, 4, 5, 6]]
    assert (result.truncated, result.split, result.dropped) == (1, 0, 0)


def test_rejecting_says_both_lengths():
    with pytest.raises(Rejected, match="over-long: 16 tokens, a row holds 7"):
        fit([document_of([(4, 4), (4, 4)])], 7, "reject")


def test_a_question_that_fills_a_row_is_dropped_and_counted():
    result = fit([document_of([(20, 5)])], 10, "split")
    assert [piece.input_ids.tolist() for piece in result.pieces] == [[20, 21, 22, 23, 24]]
    assert (result.split, result.dropped) == (1, 2)
    with pytest.raises(Rejected, match="no supervised tokens"):
        fit([document_of([(20, 5)])], 10, "truncate")


def test_an_exchange_of_exactly_a_row_is_one_piece_and_nothing_is_dropped():
    result = fit([document_of([(2, 3), (4, 6)])], 10, "split")
    assert [len(piece) for piece in result.pieces] == [5, 10]
    assert (result.split, result.dropped) == (1, 0)
