"""The OpenAPI document against the routes and the one validation: what it allows is taken, what it forbids is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

from actors.gateway.app import create_app
from actors.gateway.document import openapi_document
from actors.protocol.calls import parse_call
from actors.protocol.fields import CHAT_FIELDS, COMPLETION_FIELDS, RequestError
from model.config import DecodeConfig
from tests.actors.gateway.test_gateway import GOOD, ScriptedBackend
from tests.actors.protocol.test_protocol import CARD, CHAT, PROMPT
from tests.direct import gateway_over

DOCUMENT = openapi_document(keys=False, deadline_s=600)


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


def test_every_route_is_documented_and_no_other() -> None:
    app = create_app(gateway_over(ScriptedBackend(GOOD)))
    routes = {
        (r.path.replace("{name:path}", "{model}"), m.lower())
        for r in app.routes
        if isinstance(r, APIRoute)
        for m in r.methods
    }
    documented = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    heads = {(path, "head") for path, method in documented if method == "get"}
    for people in ("/openapi.json", "/", "/page/{name}"):  # the document itself, and the page, which is no API
        heads |= {(people, "get"), (people, "head")}
    assert routes == documented | heads


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    names = {part.split('"')[0] for part in json.dumps(DOCUMENT).split('"#/components/schemas/')[1:]}
    assert names <= set(DOCUMENT["components"]["schemas"])
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_only_a_server_with_keys_asks_for_one() -> None:
    assert "security" not in DOCUMENT and "401" not in json.dumps(DOCUMENT)
    keyed = openapi_document(keys=True, deadline_s=600)
    assert keyed["security"] == [{"key": []}] and "403" not in keyed["paths"]["/v1/models"]["get"]["responses"]
    assert keyed["paths"]["/health"]["get"]["security"] == []


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_the_document_lists_the_fields_of_the_table_and_their_notes(kind: str) -> None:
    name, rules = ("ChatFields", CHAT_FIELDS) if kind == "chat" else ("CompletionFields", COMPLETION_FIELDS)
    schema = DOCUMENT["components"]["schemas"][name]
    assert set(schema["properties"]) == set(rules) and schema["additionalProperties"] is False
    assert all(schema["properties"][field]["description"].startswith(rule.note) for field, rule in rules.items())


VALUES: list[tuple[str, Any]] = [
    *((name, value) for name in ("temperature", "top_p", "min_p") for value in (None, 0, 1, 0.5, -0.1, 2.5, "1", True)),
    *(("logit_bias", v) for v in (None, {}, {"5": 1.5}, {"05": 1}, {"5": 101}, {"5": "1"}, {"a": 1}, [], [[5, 1]])),
    *(("stop", v) for v in (None, "x", ["x"], [], ["a", "b", "c", "d"], list("abcde"), "", [""], [1], 5)),
    *(("stream", v) for v in (None, True, False, 0, "true")),
    *(("seed", v) for v in (None, -(2**63), 2**63 - 1, 2**63, 0.5)),
    *(("top_k", v) for v in (None, 0, 5, 5.0, 5.5, -1, True, "5")),
    *(("user", v) for v in (None, "", "kim", 5, {})),
    *(
        ("diffusion", v)
        for v in (None, {}, {"policy": "factor"}, {"policy": "x"}, {"mode": "x"}, {"mode": "lossless"}, {"mode": "ar"})
    ),
    *(("diffusion", {"refresh": v}) for v in (None, "always", "sub_block", "every:2", "every:0", "never", "every:-1")),
    *(("diffusion", {"fused": v}) for v in (None, "off", "on", True)),
    *(("n", v) for v in (None, 1, 2, 2.0, 16, 17, 0, True, "1")),
    ("temprature", 1),
]
MESSAGES: list[Any] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "developer", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "Ho"}]}],
    [{"role": "user", "content": "Hi", "name": None}],
    [{"role": "user", "content": "Hi", "name": "Kim"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "tool", "content": "Hi"}],
    [{"role": "user"}],
    [],
    "Hi",
    None,
]
PROMPTS: list[Any] = [
    "Hi",
    "",
    [],
    [5, 6],
    ["Hi"],
    [[5, 6]],
    ["Hi", "Ho"],
    [[5], [6]],
    [-1],
    [1.5],
    [True],
    {},
    None,
    5,
]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_what_the_document_allows_is_what_is_taken(kind: str) -> None:
    name, base, rules = (
        ("ChatFields", CHAT, CHAT_FIELDS) if kind == "chat" else ("CompletionFields", PROMPT, COMPLETION_FIELDS)
    )
    variants: list[tuple[str, Any]] = [*VALUES]
    variants += [("messages", v) for v in MESSAGES] if kind == "chat" else [("prompt", v) for v in PROMPTS]
    variants += [
        (field, v) for field, rule in rules.items() if not rule.honoured for v in (None, *rule.neutral, "x", {})
    ]
    schema = validator(name)
    for field, value in variants:
        body = {**base, field: value}
        assert schema.is_valid(body) == taken(body, kind), (field, value)


def taken(body: dict[str, Any], kind: Any) -> bool:
    try:
        parse_call(body, kind=kind, card=CARD, decode=DecodeConfig(), request_id="x", default_seed=7)
    except RequestError:
        return False
    return True
