"""The one validation of requests: every field honoured or refused by name, null the same as absent."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from actors.protocol.calls import check_default, decode_config, derived_seed, generation_request, parse_call
from actors.protocol.card import ModelCard, sampling_defaults
from actors.protocol.fields import CHAT_FIELDS, COMPLETION_FIELDS, RequestError, markdown
from actors.protocol.request_types import DiffusionOptions, Message, StreamOptions
from model.config import BlockDiffusionConfig, DecodeConfig
from model.decoding import POLICIES, GenerationRequest, SamplingParams
from model.errors import UserError
from tests.tiny import tiny_tokenizer

ADAPTED = BlockDiffusionConfig(block_size=8, mask_token_id=3, sub_block_size=4)
CARD = ModelCard(
    name="tiny",
    revision="r",
    context_length=512,
    vocab_size=267,
    block_diffusion=ADAPTED,
    stop_token_ids=frozenset({2}),
    sampling=SamplingParams(),
    tokenizer=tiny_tokenizer(),
)
AR_CARD = dataclasses.replace(CARD, block_diffusion=None)
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}


def parse(fields: dict[str, Any], *, card: ModelCard = CARD) -> GenerationRequest:
    decode = DecodeConfig(mode="diffusion" if card.block_diffusion else "ar")
    kind = "chat" if "messages" in fields else "completion"
    return parse_call(fields, kind=kind, card=card, decode=decode, request_id="x", default_seed=7).request


def refusal(fields: dict[str, Any], *, card: ModelCard = CARD) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(fields, card=card)
    return caught.value


def test_a_chat_becomes_the_templates_tokens_and_may_fill_the_context() -> None:
    request = parse(CHAT)
    expected = CARD.tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").input_ids
    assert list(request.prompt_ids) == expected
    assert request.max_tokens == 512 - len(expected)
    assert request.stop_token_ids == frozenset({2})


def test_a_completion_gets_sixteen_tokens_unless_it_asks() -> None:
    assert parse(PROMPT).max_tokens == 16
    assert parse({**PROMPT, "max_tokens": 3}).max_tokens == 3


def test_null_is_the_same_as_absent_for_every_field() -> None:
    for fields, rules, required in ((CHAT, CHAT_FIELDS, "messages"), (PROMPT, COMPLETION_FIELDS, "prompt")):
        nulls = {name: None for name in rules if name not in ("model", required)}
        assert parse({**nulls, **fields}) == parse(fields)
    message = {"name": None, "refusal": None, "audio": None, "tool_calls": None, "function_call": None}
    assert parse({**CHAT, "messages": [{**message, **CHAT["messages"][0]}]}) == parse(CHAT)
    assert parse({**CHAT, "diffusion": dict.fromkeys(DiffusionOptions.model_fields)}) == parse(CHAT)


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_every_refused_field_is_refused_by_name_and_its_neutral_values_are_accepted(endpoint: str) -> None:
    fields, rules = (CHAT, CHAT_FIELDS) if endpoint == "chat" else (PROMPT, COMPLETION_FIELDS)
    for name, rule in rules.items():
        if rule.honoured:
            continue
        error = refusal({**fields, name: "something"})
        assert error.param == name and name in str(error) and error.status == 400
        for neutral in rule.neutral:
            assert parse({**fields, name: neutral}) == parse(fields)


def test_a_whole_number_may_be_written_with_a_point() -> None:
    assert parse({**PROMPT, "prompt": [5.0, 6], "max_tokens": 3.0, "seed": 7.0, "top_k": 1e1}) == parse(
        {**PROMPT, "prompt": [5, 6], "max_tokens": 3, "seed": 7, "top_k": 10}
    )


def test_an_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    error = refusal({**CHAT, "temprature": 0.5})
    assert error.param == "temprature" and "'temperature'" in str(error)


@pytest.mark.parametrize("fields", [{"\ud800": 1}, {"diffusion": {"\ud800": 1}}, {"temperature": "\ud800"}])
def test_a_refusal_is_text_even_where_what_it_quotes_is_none(fields: dict[str, Any]) -> None:
    error = refusal({**CHAT, **fields})
    assert "\\ud800" in str(error) and (str(error) + str(error.param)).encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_p", -1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", "7"),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", 512),
        ("max_completion_tokens", 0),
        ("stop", ""),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("user", 5),
        ("n", 0),
        ("n", 17),
        ("n", 1.5),
        ("n", True),
        ("logprobs", 1),
        ("top_logprobs", 0),
        ("top_logprobs", 21),
        ("top_logprobs", True),
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", "1.2"),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.5),
        ("presence_penalty", True),
        ("frequency_penalty", -2.5),
        ("logit_bias", []),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": math.nan}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"267": 1}),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("messages", []),
        ("messages", "Hi"),
        ("messages", [None]),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence_that_names_the_field(name: str, value: Any) -> None:
    error = refusal({**CHAT, name: value})
    assert error.status == 400
    assert str(error.param).split("[")[0] == name
    assert name in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "boss", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "name": "Kim"}, "messages[0].name"),
        ({"role": "user", "content": "x", "nmae": "Kim"}, "messages[0].nmae"),
    ],
)
def test_a_bad_message_is_refused_by_its_path(message: dict[str, Any], param: str) -> None:
    assert refusal({**CHAT, "messages": [message]}).param == param


def test_text_parts_are_joined_and_developer_is_read_as_system() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert parse({**CHAT, "messages": [{"role": "user", "content": parts}]}) == parse(CHAT)
    by_role = [parse({**CHAT, "messages": [{"role": r, "content": "x"}]}) for r in ("developer", "system")]
    assert by_role[0] == by_role[1]


def test_a_last_assistant_message_is_continued() -> None:
    request = parse({**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "Sure"}]})
    assert CARD.tokenizer.decode(request.prompt_ids).endswith("<|im_start|>assistant\nSure")


def test_a_chat_that_the_template_refuses_or_that_has_no_template_is_a_400() -> None:
    strict = tiny_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    error = refusal(CHAT, card=dataclasses.replace(CARD, tokenizer=strict))
    assert error.param == "messages" and "roles must alternate" in str(error)
    without = dataclasses.replace(CARD, tokenizer=tiny_tokenizer(chat_template=None))
    assert refusal(CHAT, card=without).param == "messages"


def test_a_prompt_is_text_or_ids_and_a_list_of_one_prompt_is_that_prompt() -> None:
    ids = list(parse(PROMPT).prompt_ids)
    for prompt in (["Hi"], ids, [ids]):
        assert parse({**PROMPT, "prompt": prompt}) == parse(PROMPT)
    for prompt in (["Hi", "Ho"], [ids, ids], [1.5], [True], {}, 5, ["\ud800"]):
        assert refusal({**PROMPT, "prompt": prompt}).param == "prompt"
    assert refusal({**PROMPT, "prompt": [267]}).param == "prompt"


def test_an_empty_prompt_starts_from_bos_or_is_refused() -> None:
    assert parse({**PROMPT, "prompt": ""}).prompt_ids == (1,)
    assert parse({**PROMPT, "prompt": []}).prompt_ids == (1,)
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    assert refusal({**PROMPT, "prompt": ""}, card=dataclasses.replace(CARD, tokenizer=tokenizer)).param == "prompt"


def test_a_prompt_that_fills_the_context_is_refused_with_its_length() -> None:
    error = refusal({**PROMPT, "prompt": [5] * 512})
    assert error.param == "prompt" and error.code == "context_length_exceeded" and "512" in str(error)
    assert parse({**PROMPT, "prompt": [5] * 511}).max_tokens == 1
    assert refusal({**PROMPT, "prompt": [5] * 511, "max_tokens": 2}).param == "max_tokens"


def test_both_names_of_the_token_limit_work_and_must_agree() -> None:
    assert parse({**CHAT, "max_completion_tokens": 9}).max_tokens == 9
    assert parse({**CHAT, "max_completion_tokens": 9, "max_tokens": 9}).max_tokens == 9
    assert refusal({**CHAT, "max_completion_tokens": 9, "max_tokens": 8}).param == "max_tokens"


def test_absent_sampling_fields_come_from_the_model_and_greedy_where_it_does_not_sample() -> None:
    samples = sampling_defaults(GenerationConfig(do_sample=True, temperature=0.7, top_p=0.8, top_k=20))
    assert (samples.temperature, samples.top_p, samples.top_k) == (0.7, 0.8, 20)
    assert sampling_defaults(GenerationConfig(temperature=0.7)).temperature == 0.0
    assert sampling_defaults(GenerationConfig(do_sample=True)).temperature == 1.0
    request = parse({**CHAT, "top_p": 0.5}, card=dataclasses.replace(CARD, sampling=samples))
    assert request.sampling == SamplingParams(temperature=0.7, top_p=0.5, top_k=20, seed=7)


def test_a_request_brings_its_own_seed_or_gets_the_default() -> None:
    assert parse(CHAT).sampling.seed == 7
    assert parse({**CHAT, "seed": -3}).sampling.seed == -3
    assert parse({**CHAT, "temperature": 1.0, "top_p": 0}).sampling.greedy


def test_penalties_biases_and_min_p_reach_the_sampler() -> None:
    asked = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "logit_bias": {"10": -100, "9": 1.5},
    }
    expected = SamplingParams(
        min_p=0.1,
        seed=7,
        repetition_penalty=1.2,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias=((9, 1.5), (10, -100.0)),
    )
    for fields in (CHAT, PROMPT):
        assert parse({**fields, **asked}).sampling == expected
        neutral = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
        assert parse({**fields, **neutral}) == parse(fields)


def test_the_model_s_own_penalty_and_min_p_hold_where_a_request_says_nothing() -> None:
    own = sampling_defaults(GenerationConfig(repetition_penalty=1.1, min_p=0.05, do_sample=True))
    assert (own.repetition_penalty, own.min_p) == (1.1, 0.05)
    card = dataclasses.replace(CARD, sampling=own)
    assert parse(CHAT, card=card).sampling.repetition_penalty == 1.1
    assert parse({**CHAT, "repetition_penalty": 1}, card=card).sampling.repetition_penalty == 1
    assert sampling_defaults(GenerationConfig()) == SamplingParams()


def test_log_probabilities_are_asked_for_in_each_endpoint_s_own_way() -> None:
    assert parse(CHAT).logprobs is None and parse({**CHAT, "logprobs": False}).logprobs is None
    assert parse({**CHAT, "logprobs": True}).logprobs == 0
    assert parse({**CHAT, "logprobs": True, "top_logprobs": 20}).logprobs == 20
    assert [parse({**PROMPT, "logprobs": n}).logprobs for n in (None, 0, 20)] == [None, 0, 20]
    for bad in (True, 21, -1, "5"):
        assert refusal({**PROMPT, "logprobs": bad}).param == "logprobs"
    alone = refusal({**CHAT, "logprobs": False, "top_logprobs": 2})
    assert alone.param == "top_logprobs" and "logprobs: true" in str(alone)


def test_the_diffusion_object_overrides_the_default_one() -> None:
    assert parse(CHAT).decode == DecodeConfig()
    asked = {"policy": "static", "steps": 2, "sub_block_size": 2}
    assert parse({**CHAT, "diffusion": asked}).decode == DecodeConfig(policy="static", steps=2, sub_block_size=2)
    assert parse({**CHAT, "diffusion": {"mode": "ar"}}).decode.mode == "ar"
    asked = {"policy": "dimple", "gamma": 0.9, "steps": 4, "refresh": "sub_block"}
    assert parse({**CHAT, "diffusion": asked}).decode == DecodeConfig(
        policy="dimple", gamma=0.9, steps=4, refresh="sub_block"
    )


def test_every_policy_may_be_asked_for_with_its_own_parameters() -> None:
    for name, policy in POLICIES.items():
        asked = {"policy": name, **dict.fromkeys(policy.parameters, 1)}
        assert parse({**CHAT, "diffusion": asked}).decode == DecodeConfig(**asked)


def test_another_policy_than_the_server_s_leaves_the_server_s_parameter_behind() -> None:
    server = DecodeConfig(threshold=0.7, sub_block_size=2, refresh="sub_block")

    def chosen(**asked: Any) -> DecodeConfig:
        return decode_config(DiffusionOptions(**asked), server, ADAPTED)

    assert chosen(sub_block_size=4) == dataclasses.replace(server, sub_block_size=4)
    assert chosen(policy="threshold") == server
    assert chosen(policy="entropy") == DecodeConfig(policy="entropy", sub_block_size=2, refresh="sub_block")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"threshold": 0}, "diffusion.threshold"),
        ({"threshold": 1.1}, "diffusion.threshold"),
        ({"steps": 3}, "diffusion.steps"),
        ({"steps": 10**400}, "diffusion.steps"),
        ({"policy": "static", "threshold": 0.5}, "diffusion.threshold"),
        ({"policy": "sequential", "threshold": 0.5}, "diffusion.threshold"),
        ({"policy": "treshold"}, "diffusion.policy"),
        ({"policy": "entropy", "factor": 1}, "diffusion.factor"),
        ({"policy": "entropy", "gamma": -1}, "diffusion.gamma"),
        ({"policy": "dimple", "gamma": 1.5}, "diffusion.gamma"),
        ({"policy": "factor", "factor": 0}, "diffusion.factor"),
        ({"policy": "frechet", "budget": math.inf}, "diffusion.budget"),
        ({"gamma": 0.5}, "diffusion.gamma"),
        ({"refresh": "never"}, "diffusion.refresh"),
        ({"mode": "ar", "refresh": "always"}, "diffusion.refresh"),
        ({"mode": "parallel"}, "diffusion.mode"),
        ({"mode": "lossless", "threshold": 0.5}, "diffusion.threshold"),
        ({"mode": "lossless", "policy": "threshold"}, "diffusion.policy"),
        ({"mode": "lossless", "refresh": "always"}, "diffusion.refresh"),
        ({"mode": "ar", "threshold": 0.5}, "diffusion.threshold"),
        ({"sub_block_size": 3}, "diffusion.sub_block_size"),
        ({"sub_block_size": 16}, "diffusion.sub_block_size"),
        ({"block_length": 8}, "diffusion.block_length"),
        ({"trace": True}, "diffusion.trace"),
        ("fast", "diffusion"),
    ],
)
def test_a_diffusion_key_without_effect_or_sense_is_refused_by_name(asked: Any, param: str) -> None:
    assert refusal({**CHAT, "diffusion": asked}).param == param


def test_an_unadapted_model_decodes_in_ar_mode_and_refuses_diffusion() -> None:
    assert parse(CHAT, card=AR_CARD).decode.mode == "ar"
    assert refusal({**CHAT, "diffusion": {"mode": "diffusion"}}, card=AR_CARD).param == "diffusion.mode"
    assert refusal({**CHAT, "diffusion": {"threshold": 0.5}}, card=AR_CARD).param == "diffusion.threshold"
    with pytest.raises(UserError, match="not adapted"):
        check_default(DecodeConfig(mode="diffusion"), None)
    with pytest.raises(UserError, match="does not divide"):
        check_default(DecodeConfig(sub_block_size=3), ADAPTED)
    with pytest.raises(UserError, match=r"decode\.gamma 0\.5 has no effect with policy 'threshold'"):
        check_default(DecodeConfig(gamma=0.5), ADAPTED)
    with pytest.raises(UserError, match=r"decode\.policy 'treshold' is not known: did you mean 'threshold'"):
        check_default(DecodeConfig(policy="treshold"), ADAPTED)
    with pytest.raises(UserError, match=r"decode\.threshold has no effect with decode\.mode ar"):
        check_default(DecodeConfig(mode="ar", threshold=0.5), ADAPTED)


def test_a_line_of_prompts_means_the_same_as_over_http() -> None:
    def line(fields: dict[str, Any]) -> GenerationRequest:
        return generation_request(fields, card=CARD, default_decode=DecodeConfig(), request_id="x", default_seed=7)

    without_model = {k: v for k, v in CHAT.items() if k != "model"}
    assert line(without_model) == parse(CHAT)
    assert line({"prompt": "Hi", "messages": None}) == parse(PROMPT)
    assert line({"prompt_token_ids": list(parse(PROMPT).prompt_ids)}) == parse(PROMPT)
    for bad in ({}, {"prompt": "Hi", **without_model}, {"prompt": "Hi", "stream": True}, {"prompt_token_ids": "Hi"}):
        with pytest.raises(RequestError):
            line(bad)


def test_a_seed_derives_from_job_seed_and_prompt_id_only() -> None:
    assert derived_seed(0, "a") == derived_seed(0, "a")
    assert len({derived_seed(s, i) for s in (0, 1) for i in ("a", "b")}) == 4
    assert 0 <= derived_seed(0, "a") < 2**63


def test_the_table_covers_every_field_of_the_openai_client() -> None:
    from typing import get_type_hints

    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
    from openai.types.completion_create_params import CompletionCreateParamsBase as Params

    assert set(get_type_hints(ChatParams)) <= set(CHAT_FIELDS)
    assert set(get_type_hints(Params)) <= set(COMPLETION_FIELDS)


def test_the_table_covers_every_argument_of_the_client_and_marks_what_is_not_openais() -> None:
    import inspect

    from openai.resources.chat import AsyncCompletions as AsyncChats
    from openai.resources.chat import Completions as Chats
    from openai.resources.completions import AsyncCompletions, Completions

    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for resources, rules in (((Chats, AsyncChats), CHAT_FIELDS), ((Completions, AsyncCompletions), COMPLETION_FIELDS)):
        for resource in resources:
            theirs = set(inspect.signature(resource.create).parameters) - transport
            assert theirs <= set(rules)
            assert {name for name in rules if "not OpenAI's" in rules[name].note} == set(rules) - theirs


def test_the_keys_inside_messages_and_stream_options_are_known_as_well() -> None:
    from typing import get_type_hints

    from openai.types import chat

    assert set(get_type_hints(chat.ChatCompletionStreamOptionsParam)) == set(StreamOptions.model_fields)
    for role in ("Developer", "System", "User", "Assistant"):
        message = getattr(chat, f"ChatCompletion{role}MessageParam")
        assert set(get_type_hints(message)) <= set(Message.model_fields)


def test_the_documented_table_is_the_table_in_force(project: Path) -> None:
    page = (project / "docs" / "http.md").read_text(encoding="utf-8")
    assert markdown(CHAT_FIELDS) in page, "`python -m actors.protocol.fields` prints what docs/http.md must hold"
    assert markdown(COMPLETION_FIELDS) in page


def test_a_real_chat_template_is_followed(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "tokenizers" / "qwen2_5")
    card = dataclasses.replace(CARD, tokenizer=tokenizer, vocab_size=151936)
    text = "한국어 🎉 <|im_end|>"
    request = parse({**CHAT, "messages": [{"role": "user", "content": text}]}, card=card)
    turns = [{"role": "user", "content": text}]
    assert tokenizer.decode(request.prompt_ids) == tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )


def test_errors_survive_pickling_and_json() -> None:
    import pickle

    error = refusal({**CHAT, "n": 0})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.param, again.status) == (str(error), "n", 400)
    json.dumps({"message": str(error)})
