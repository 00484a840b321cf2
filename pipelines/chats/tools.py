"""Tools in chats, in OpenAI's form: the definitions a chat declares, and the calls an assistant's message makes.

    {"tools": [{"type": "function", "function": {"name", "description"?, "parameters"?}}, ...],
     "messages": [..., {"role": "assistant", "content": null, "tool_calls": [{"id"?, "type"?: "function",
                        "function": {"name", "arguments": an object, or the JSON text of one}}]},
                       {"role": "tool", "content", "name"?, "tool_call_id"?}, ...]}

Arguments become objects, which is what chat templates expect. Whether a template renders them is checked where it is
rendered (pipelines/chats/render.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pipelines.chats.refusal import Rejected, kind_of, sound

KIND = "tool calls"
_Value = TypeVar("_Value")


def definitions(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools of a record: a list, or (as Parquet often has it) the JSON text of one. Raises Rejected."""
    tools = _parsed(value, "'tools'") if isinstance(value, str) and value.strip() else value
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise Rejected(KIND, f"'tools' must be a list, not {kind_of(tools)}")
    return _sound(tuple(_definition(tool, number) for number, tool in enumerate(tools, 1)), "'tools'")


def _definition(tool: Any, number: int) -> dict[str, Any]:
    tool = _parsed(tool, f"tool {number}") if isinstance(tool, str) else tool
    if not isinstance(tool, Mapping) or not name_of(tool):
        raise Rejected(KIND, f"tool {number} must be an object with a name")
    return without_nulls(tool)


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a definition or a call, bare or under "function"; empty where there is none."""
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else ""


def calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The `tool_calls` of a message with their arguments as objects. Raises Rejected."""
    if not isinstance(value, list):
        raise Rejected(KIND, f"{where}: tool_calls must be a list, not {kind_of(value)}")
    return _sound([_call(call, where) for call in value], where)


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not name_of(call):
        raise Rejected(KIND, f"{where} has a call without the name of a function")
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}: the arguments of {name_of(call)}") if arguments.strip() else {}
    if not isinstance(arguments, Mapping | None):
        raise Rejected(KIND, f"{where}: the arguments of {name_of(call)} must be an object, not {kind_of(arguments)}")
    called = {"type": "function", "function": {"name": name_of(call), "arguments": without_nulls(arguments or {})}}
    return {"id": call["id"], **called} if isinstance(call.get("id"), str) else called


def _sound(value: _Value, where: str) -> _Value:
    sound(json.dumps(value, ensure_ascii=False, default=str), where)
    return value


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Rejected(KIND, f"{what} is not valid JSON: {error}") from None


def without_nulls(value: Any) -> Any:
    """Without the keys that Arrow fills in with null wherever another record has them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
