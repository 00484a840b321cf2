"""Turns are found in any template, one that trims, ends answers twice or calls tools; and without many renderings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipelines.chats.records import Chat, Rejected, parse
from pipelines.chats.render import Renderer
from pipelines.chats.template import ChatEncoder
from tests.pipelines.test_chats_template import BRACKETS, ENDLESS, FORGETFUL, MARKED, answers_of, chat_of
from tests.tiny import CHATML, tiny_tokenizer

TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")  # as Llama 3's
TWO_ENDS = CHATML.replace(  # as templates that end a turn and the text
    "+ '<|im_end|>\n'", "+ ('<|im_end|><|endoftext|>\n' if message['role'] == 'assistant' else '<|im_end|>\n')"
)
MARKED_TWO_ENDS = MARKED.replace("{{ '<|im_end|>\n' }}", "{{ '<|im_end|><|endoftext|>\n' }}")
THINKING = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
TEMPLATES = {
    "chatml": CHATML, "marked": MARKED, "forgetful": FORGETFUL, "brackets": BRACKETS, "endless": ENDLESS,
    "trimming": TRIMMING, "two_ends": TWO_ENDS, "marked_two_ends": MARKED_TWO_ENDS, "plain": None,
}  # fmt: skip

words = st.text(alphabet="abZq0 \n\t.é\U0001f600<|", min_size=1, max_size=20).filter(lambda text: text.strip())
dialogues = st.lists(st.tuples(words, words), min_size=1, max_size=4)


def renderer(template: str | None) -> Renderer:
    encoder = ChatEncoder(tiny_tokenizer(chat_template=template))  # gives the plain template where there is none
    return Renderer(encoder.tokenizer)


@settings(max_examples=25, deadline=None)
@given(chats=st.lists(st.tuples(dialogues, st.none() | words), min_size=1, max_size=4))
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_form_finds_what_rendering_by_prefixes_finds(template, chats):
    render = renderer(template)
    for dialogue, system in chats:
        chat = chat_of(dialogue, system)
        found = render(chat)
        if isinstance(found, Rejected):  # the template refuses a system message
            assert template == BRACKETS and system
        else:
            assert found == render.by_prefixes(chat)


@pytest.mark.parametrize("template", [CHATML, MARKED, TWO_ENDS], ids=["chatml", "marked", "two_ends"])
def test_a_chat_of_known_roles_is_rendered_once_however_long(template, monkeypatch):
    render = renderer(template)
    chat = chat_of([(f"question {n}", f"answer {n}") for n in range(50)])
    first = render(chat)
    calls: list[str] = []
    for name in ("text", "_turns"):  # the two ways through the template
        way = getattr(render, name)
        monkeypatch.setattr(render, name, lambda *a, name=name, way=way, **k: (calls.append(name), way(*a, **k))[1])
    assert render(chat) == first and calls == ["_turns"]


@settings(max_examples=40, deadline=None)
@given(dialogue=dialogues)
def test_a_template_that_trims_supervises_the_trimmed_answers(dialogue):
    tokenizer = tiny_tokenizer(chat_template=TRIMMING)
    (found,) = ChatEncoder(tokenizer).encode([chat_of(dialogue)])
    assert answers_of(tokenizer, found[0]) == [f"{answer.strip()}<|im_end|>" for _, answer in dialogue]


@pytest.mark.parametrize("template", [TWO_ENDS, MARKED_TWO_ENDS], ids=["plain", "marked"])
def test_all_end_tokens_of_an_answer_are_supervised(template):
    tokenizer = tiny_tokenizer(chat_template=template)
    (found,) = ChatEncoder(tokenizer).encode([chat_of([("q", "one"), ("q", "two")])])
    assert answers_of(tokenizer, found[0]) == ["one<|im_end|><|endoftext|>", "two<|im_end|><|endoftext|>"]


def test_an_answer_that_is_prompted_otherwise_than_it_is_shown_is_not_supervised_and_counted():
    tokenizer = tiny_tokenizer(chat_template=THINKING)
    encoder = ChatEncoder(tokenizer)
    mixed, none = encoder.encode([chat_of([("q", "bare"), ("q", "<think>so</think>yes")]), chat_of([("q", "bare")])])
    assert isinstance(none, Rejected) and "renders no answer as the generation prompt" in str(none)
    assert not isinstance(mixed, Rejected) and mixed[0].unlearnt == 1
    assert answers_of(tokenizer, mixed[0]) == ["so</think>yes<|im_end|>"]


# Tools ----------------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def tool_chat(**changes: Any) -> Chat:
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": json.dumps({"a": 1, "b": "é"})}}] * 2,
        },
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "also 3"},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Sure."},
    ]
    chat = parse({"messages": messages, "tools": [TOOL], **changes}, "messages")
    assert isinstance(chat, Chat)
    return chat


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_calls_are_supervised_and_what_tools_answer_is_not(shared: Path, name: str) -> None:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(shared / "data" / "tokenizers" / name)
    (found,) = ChatEncoder(tokenizer).encode([tool_chat()])
    assert not isinstance(found, Rejected)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    learnt = [text for document in found for text in answers_of(tokenizer, document)]
    if name == "qwen2_5":
        (document,) = found
        assert learnt == [f"{call}\n{call}<|im_end|>", "It is 3.<|im_end|>", "Sure.<|im_end|>"]
        start = int(document.supervised.argmax())
        chat = tool_chat()
        prompt = tokenizer.apply_chat_template(
            list(chat.messages[:1]), tools=list(chat.tools), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert document.input_ids[:start].tolist() == prompt
        assert [tokenizer.decode(document.input_ids[cut:][:2]) for cut in document.cuts] == ["<|im_start|>user"]
    assert f"{call}\n{call}<|im_end|>" in learnt[0]
    assert all("also 3" not in text and "Adds." not in text for text in learnt)
    assert any('"description": "Adds."' in tokenizer.decode(document.input_ids) for document in found)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_a_template_that_leaves_tools_out_rejects_the_chat(template):
    encoder = ChatEncoder(tiny_tokenizer(chat_template=template))
    with_tools, with_calls = encoder.encode([tool_chat(), tool_chat(tools=None)])
    assert str(with_tools) == "tool calls: the chat template does not render the chat's tools (add)"
    assert str(with_calls).startswith("tool calls: the chat template does not render the calls of message 2 (add)")
