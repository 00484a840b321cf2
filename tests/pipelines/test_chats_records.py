"""Records of five shapes become chats; what could not be rendered faithfully is rejected with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipelines.chats.records import Chat, PlainText, Rejected, called_names, detect, parse

QUESTION = {"role": "user", "content": "What?"}
ANSWER = {"role": "assistant", "content": "That."}
CHAT = Chat((QUESTION, ANSWER))
CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("format", "record"),
    [
        ("messages", {"messages": [QUESTION, ANSWER]}),
        ("messages", {"messages": [QUESTION, {**ANSWER, "name": None}], "id": 7}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}]}, ANSWER]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]}),
        ("alpaca", {"instruction": "What?", "input": "", "output": "That."}),
        ("alpaca", {"instruction": "What?", "input": None, "output": "That."}),
        ("prompt_completion", {"prompt": "What?", "completion": "That."}),
        ("prompt_completion", {"question": "What?", "answer": "That."}),
        ("prompt_completion", {"prompt": [QUESTION], "completion": [ANSWER]}),
    ],
)
def test_every_format_gives_the_same_chat(format, record):
    assert detect([record]) == format
    assert parse(record, format) == CHAT


def test_alpaca_joins_instruction_and_input():
    chat = parse({"instruction": "Sort.", "input": "b a", "output": "a b", "system": "Be brief."}, "alpaca")
    assert [message["content"] for message in chat.messages] == ["Be brief.", "Sort.\n\nb a", "a b"]


def test_plain_text_has_no_turns():
    assert detect([{"text": "Once."}]) == "text"
    assert parse({"text": "Once."}, "text") == PlainText("Once.")


def test_developer_is_read_as_system_and_roles_in_any_capitals():
    chat = parse({"messages": [{"role": "Developer", "content": ""}, QUESTION, ANSWER]}, "messages")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]


def test_tool_calls_and_tools_are_read_in_all_their_forms():
    tool = {"type": "function", "function": {"name": "add", "description": None}}
    turns = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", **CALL}, {"name": "now", "arguments": ""}]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1", "tool_calls": None},
        ANSWER,
    ]
    chat = parse({"messages": turns, "tools": [tool]}, "messages")
    assert chat == parse({"messages": turns, "tools": json.dumps([tool])}, "messages")
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
            {"type": "function", "function": {"name": "now", "arguments": {}}},
        ],
    }
    assert chat.messages[2] == {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"}
    assert (called_names(chat.messages[1]), chat.tool_names) == (["add", "now"], ["add"])
    assert "description" not in chat.tools[0]["function"]


@pytest.mark.parametrize(
    ("format", "record", "reason"),
    [
        ("messages", ["a"], "not an object: a line must hold a JSON object, not a list"),
        ("messages", None, "not an object: a line must hold a JSON object, not null"),
        ("messages", {"chat": 1}, "missing key: there is no 'messages'"),
        ("messages", {"messages": None}, "missing key: there is no 'messages', or null"),
        ("messages", {"messages": "hi"}, "wrong type: 'messages' must be a list, not text"),
        ("messages", {"messages": []}, "empty chat: 'messages' has no messages"),
        ("messages", {"messages": ["hi", ANSWER]}, "wrong type: message 1 must be an object, not text"),
        ("messages", {"messages": [QUESTION]}, "no assistant turn"),
        (
            "messages",
            {"messages": [{"role": "robot", "content": "x"}, ANSWER]},
            "wrong role: message 1 has the role 'robot'",
        ),
        ("messages", {"messages": [{"content": "x"}, ANSWER]}, "wrong role: message 1 has the role None"),
        ("messages", {"messages": [{"role": 1, "content": "x"}]}, "wrong role: message 1 has the role 1"),
        ("messages", {"messages": [QUESTION, {"role": "assistant", "content": None}]}, "no content: message 2"),
        ("messages", {"messages": [QUESTION, {"role": "assistant"}]}, "no content: message 2 has no content"),
        (
            "messages",
            {"messages": [QUESTION, {"role": "assistant", "content": " \n"}]},
            "no content: message 2 (assistant)",
        ),
        (
            "messages",
            {"messages": [QUESTION, {"role": "assistant", "content": 5}]},
            "wrong type: message 2: content must be text",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
            "wrong type: message 1 has a part that is not text",
        ),
        (
            "messages",
            {"messages": [QUESTION, {**ANSWER, "tool_calls": [{}]}]},
            "tool calls: message 2 has a call",
        ),
        ("messages", {"messages": [{**QUESTION, "tool_calls": [CALL]}, ANSWER]}, "tool calls: message 1 (user) has"),
        (
            "messages",
            {"messages": [QUESTION, {**ANSWER, "function_call": CALL}]},
            "tool calls: message 2 has function",
        ),
        (
            "messages",
            {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "tool calls: message 2: the arguments of f is not valid JSON",
        ),
        (
            "messages",
            {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"name": "f", "arguments": [1]}]}]},
            "tool calls: message 2: the arguments of f must be an object, not a list",
        ),
        (
            "messages",
            {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud83d"}'}]}]},
            "broken Unicode: message 2 has a lone",
        ),
        ("messages", {"messages": [QUESTION, ANSWER], "tools": "nonsense"}, "tool calls: 'tools' is not valid JSON"),
        (
            "messages",
            {"messages": [QUESTION, ANSWER], "tools": [{"x": 1}]},
            "tool calls: tool 1 must be an object",
        ),
        ("messages", {"messages": [QUESTION, {**ANSWER, "content": "\ud83d"}]}, "broken Unicode: message 2 has a lone"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "x"}]}, "no assistant turn"),
        ("sharegpt", {"conversations": [{"role": "user", "content": "x"}]}, "wrong role: message 1 has the from None"),
        ("alpaca", {"instruction": "x"}, "missing key: there is no 'output', or null"),
        ("alpaca", {"instruction": "x", "output": ""}, "no content: message 2 (assistant) is empty"),
        ("prompt_completion", {"prompt": "x"}, "missing key: there is no 'completion'"),
        ("text", {"text": "  "}, "no content: the text is empty"),
        ("text", {"text": ["x"]}, "wrong type: 'text' must be text, not a list"),
    ],
)
def test_a_bad_record_is_rejected_with_its_reason(format: str, record: Any, reason: str):
    with pytest.raises(Rejected) as caught:
        parse(record, format)
    assert str(caught.value).startswith(reason)
    assert reason.startswith(caught.value.kind)


def test_the_format_is_that_of_most_records():
    records = [{"text": "x"}, {"messages": []}, {"messages": []}, 5, {"prompt": "x"}]
    assert detect(records) == "messages"
    assert detect([{"messages": [], "text": "x"}]) == "messages"
    assert detect([{"a": 1}, 5]) is None
    assert detect([]) is None
