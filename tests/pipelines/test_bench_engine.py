"""bench engine: every part runs on a tiny model, rivals that must agree do, and what cannot take part says why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine.loop import Engine, EngineConfig
from actors.engine.scheduler import Demand, Grant
from actors.engine.together import generate_all
from model.backbone import Backbone
from model.decoding import GenerationRequest
from model.errors import JobError, UserError
from pipelines.bench import start
from pipelines.benches.engine import llama_worker
from pipelines.benches.engine.config import ALL_PARTS
from pipelines.benches.engine.lockstep import LockstepContestant, check_equal
from pipelines.benches.engine.lockstep_decoder import LockstepDecoder
from pipelines.benches.engine.lockstep_rows import LockstepRows
from pipelines.benches.engine.open_loop import Arrival, Figures, Served, poisson, serve
from pipelines.benches.engine.schedulers import PhasesInTurn, plan_largest_phase, plan_prefill_first, schedulers
from pipelines.benches.engine.setting import parse_decoder
from tests.decoding import ENTRY, answers, make_request, prompt_of
from tests.tiny import build_tiny_model

SMALL = [
    "--rounds", 1, "--tasks", 2, "--max_tokens", 10, "--batch", 3, "--per_slot", 1, "--concurrency", 1, 2,
    "--arrivals", 5, "--long_prompt", 200, 300, "--queries", 1, 4, "--cached", 16,
]  # fmt: skip
STOP = {2, *range(11, 40)}  # of 256 bytes so many that answers end at different lengths


def bench(output: Path, *words: object) -> dict[str, Any]:
    """Run the bench and return its JSON."""
    assert start(["engine", "--output", str(output), *map(str, words)]) == 0
    content: dict[str, Any] = json.loads(output.read_text())
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in content["ratios"].values())
    return content


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All parts on an adapted model whose confidences are spread, in float32, so that forms must agree exactly."""
    folder = tmp_path_factory.mktemp("bench-engine")
    build_tiny_model(folder / "sharp", initializer_range=0.5, block_diffusion=ENTRY)
    words = ["--model", folder / "sharp", "--control", folder / "sharp", "--dtype", "float32", *SMALL]
    return bench(folder / "e.json", *words, "--thresholds", 0.4, "--also", "policy=static,steps=2")


def lines(content: dict[str, Any], part: str, batch: int | None = None) -> dict[str, dict[str, Any]]:
    """A part's lines by decoder, of one batch size where given."""
    found = [line for line in content["table"] if line["part"] == part and batch in (None, line.get("batch"))]
    assert len({line["decoder"] for line in found}) == len(found)
    return {line["decoder"]: line for line in found}


# ------------------------------------------------------------------------------------------------- the parts
def test_every_part_is_in_the_table(content: dict[str, Any]) -> None:
    assert list(dict.fromkeys(line["part"] for line in content["table"])) == list(ALL_PARTS)
    assert "adapted" in content["note"]


def test_one_request_at_a_time_compares_every_block_form_with_ar_and_with_transformers(content: dict[str, Any]) -> None:
    single = lines(content, "single")
    forms = ["blocks, threshold 0.4" + fused + refresh
             for fused in ("", ", masked_head", ", speculative") for refresh in ("", ", sub_block")]  # fmt: skip
    rivals = ["transformers generate", "transformers generate, packed products", "control sharp, AR"]
    assert list(single) == ["AR", "lossless", *forms, "blocks, policy=static,steps=2", *rivals]
    for rival in ("lossless", *rivals):
        assert single[rival]["equal to AR"] == 1, rival
    assert single["blocks, threshold 0.4, speculative"]["tokens"] == single["blocks, threshold 0.4"]["tokens"]
    assert all(line["tokens/s"] > 0 and 0 <= line["exact match"] <= 1 for line in single.values())
    assert all(line["points"] == 100 * line["exact match"] - 100 * single["AR"]["exact match"]
               for line in single.values())  # fmt: skip
    for form in forms:
        for other in ("AR, same engine", "transformers generate"):
            assert f"{form} over {other}" in content["ratios"]


def test_llama_cpp_that_is_absent_is_a_line_with_the_reason(content: dict[str, Any]) -> None:
    (line,) = (line for line in content["table"] if line["part"] == "rivals")
    assert line["decoder"] == "llama.cpp"
    assert "llama_cpp" in line["reason"] or "not installed" in line["reason"]


def test_auto_is_measured_with_its_choices_at_every_level(content: dict[str, Any]) -> None:
    for level in (1, 2):
        closed = lines(content, "closed", level)
        assert closed["AR"]["share in blocks"] == 0
        assert closed["blocks"]["share in blocks"] == 1
        assert 0 <= closed["auto"]["share in blocks"] <= 1
        assert f"auto over AR, {level} at a time" in content["ratios"]


def test_the_engine_and_lock_step_batches_give_the_same_answers(content: dict[str, Any]) -> None:
    assert {name: line["equal to lock-step"] for name, line in lines(content, "lockstep").items()} == {
        "engine": 1, "engine, fused speculative": 1, "lock-step batches": 1, "lock-step batches, our forward": 1
    }  # fmt: skip


def test_schedulers_differ_in_time_not_in_answers(content: dict[str, Any]) -> None:
    found = lines(content, "open")
    assert list(found) == list(schedulers())
    for line in found.values():
        assert line["equal to mixed"] == 1
        assert 0 < line["TTFT p50 s"] <= line["TTFT p95 s"]


def test_the_host_share_is_what_a_round_does_outside_the_model(content: dict[str, Any]) -> None:
    for line in lines(content, "host").values():
        assert 0 < line["model ms"] < line["step ms"] < line["round ms"]
        assert line["host share"] == pytest.approx(1 - line["model ms"] / line["round ms"])


def test_logits_are_made_only_for_slots_that_are_decided(content: dict[str, Any]) -> None:
    for batch in (1, 3):
        for line in lines(content, "memory", batch).values():
            assert 0 <= line["peak growth MiB"] < line["process MiB"]
            assert 0 < line["logit rows"] <= batch * (4 + 1) < line["query tokens"], "a sub-block's slots and a guess"
    kv_bytes = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, float32
    expected = lines(content, "memory", 1)["AR"]["cache MiB"] * 2**20
    assert expected % (8 * kv_bytes) == 0, "whole pages of one block"


def test_a_round_is_timed_by_its_query_length(content: dict[str, Any]) -> None:
    assert list(lines(content, "forward", 3)) == ["1 token", "4 tokens"]


def test_the_bandwidth_floor_is_what_reading_every_product_s_weights_once_takes(content: dict[str, Any]) -> None:
    found = lines(content, "floor")
    assert list(found) == ["1 token", "reading the weights"]
    hidden, inner, vocabulary, key_width, layers = 32, 64, 256 + 11, 16, 2
    weights = layers * (2 * hidden**2 + 2 * hidden * key_width + 3 * hidden * inner) + vocabulary * hidden
    assert {line["weights MiB"] for line in found.values()} == {weights * 4 / 2**20}


def test_a_random_model_of_a_given_width_answers_in_full_length_and_is_not_judged(
    tiny_model: Path, tmp_path: Path
) -> None:
    words = ["--model", tiny_model, "--width", 64, "--layers", 1, "--parts", "lockstep", "rivals", *SMALL]
    content = bench(tmp_path / "w.json", *words, "--dtype", "bfloat16")
    assert content["note"].startswith("random Llama 64 wide")
    assert "not adapted: how fast, not how good" in content["note"]
    tokens = {line["tokens"] for line in lines(content, "lockstep").values()}
    assert tokens == {10 // 4 + 20 // 4 + 30 // 4}, "a quarter, a half and three quarters of max_tokens"
    assert "no GGUF" in lines(content, "rivals")["llama.cpp"]["reason"]


# ------------------------------------------------------------------------------------------------- lock-step batches
def ragged(**fields: Any) -> list[GenerationRequest]:
    """Prompts shorter and longer than a block, at its edge and behind it; some answers stop early."""
    lengths = [5, 8, 9, 16, 30]
    return [make_request(f"r{i}", prompt_of(n, i), 6 + 5 * i, stop=STOP, **fields) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("fields", [{}, {"threshold": 1.0}, {"policy": "static", "steps": 3}])
def test_a_lock_step_batch_answers_as_the_engine_does(sharp_backbone: Backbone, fields: dict[str, Any]) -> None:
    requests = ragged(**fields)
    engine = Engine(sharp_backbone, EngineConfig(len(requests)))
    expected = list(answers(sharp_backbone, requests, max_rows=2).values())
    assert LockstepDecoder(sharp_backbone).answer(requests) == expected
    assert LockstepRows(engine.decoder).answer(requests) == expected
    engine.decoder.cache.pool.check()
    assert len(set(map(len, expected))) > 2, "the answers are ragged"


def test_rows_that_wait_are_in_every_forward_of_the_batch(sharp_backbone: Backbone) -> None:
    engine = Engine(sharp_backbone, EngineConfig(5))
    turns: list[int] = []
    step = engine.decoder.step
    engine.decoder.step = lambda given, **rest: turns.append(len(given)) or step(given, **rest)  # type: ignore
    LockstepRows(engine.decoder).answer(ragged())
    assert set(turns) == {5}


def test_margins_say_how_close_the_closest_decision_was(sharp_backbone: Backbone) -> None:
    requests = ragged()
    close = LockstepDecoder(sharp_backbone, margins=True).decode(requests)
    assert close.answers() == LockstepDecoder(sharp_backbone).decode(requests).answers()
    assert all(0 < margin < 1 for margin in close.margin)


def test_a_policy_that_batches_do_not_know_is_refused(sharp_backbone: Backbone) -> None:
    with pytest.raises(UserError, match="threshold or static"):
        LockstepDecoder(sharp_backbone).decode(ragged(policy="sequential"))


# ------------------------------------------------------------------------------------------------- schedulers
DEMANDS = [
    Demand("a", 0, 8, 8, "denoise"),
    Demand("b", 40, 0, 8, "prefill"),
    Demand("c", 0, 8, 8, "commit"),
    Demand("d", 0, 8, 8, "denoise"),
]


def test_prefill_first_runs_whole_prompts_and_nothing_else() -> None:
    assert plan_prefill_first(DEMANDS, 16) == [Grant("b", 40)]
    assert [grant.id for grant in plan_prefill_first([DEMANDS[0], DEMANDS[2]], 16)] == ["a", "c"]


def test_the_largest_phase_runs_alone() -> None:
    assert [grant.id for grant in plan_largest_phase(DEMANDS, 16)] == ["a", "d"]
    assert plan_largest_phase(DEMANDS[1:3], 16) == [Grant("b", 16)]


def test_phases_take_turns_and_empty_ones_are_passed_over() -> None:
    plan = PhasesInTurn()
    assert [[grant.id for grant in plan(DEMANDS, 16)] for _ in range(4)] == [["a", "d"], ["b"], ["c"], ["a", "d"]]
    assert [grant.id for grant in plan([DEMANDS[0]], 16)] == ["a"]
    assert plan([], 16) == []


@pytest.mark.parametrize("name", list(schedulers()))
def test_every_scheduler_serves_the_same_tokens(sharp_backbone: Backbone, name: str) -> None:
    requests = [replace(r, decode=replace(r.decode, fused="speculative")) for r in ragged()]
    engine = Engine(sharp_backbone, EngineConfig(3, prefill_tokens=8), planner=schedulers()[name])
    served = serve(engine, [Arrival(0.002 * i, request) for i, request in enumerate(requests)])
    expected = generate_all(Engine(sharp_backbone, EngineConfig(3)), requests)
    assert [one.token_ids for one in served] == [result.token_ids for result in expected]
    assert all(one.ttft > 0 and one.deltas == sorted(one.deltas) for one in served)


# ------------------------------------------------------------------------------------------------- arrivals, figures
def test_arrivals_come_at_the_asked_rate_and_are_the_same_for_a_seed(sharp_backbone: Backbone) -> None:
    requests = [make_request(str(i), (20,), 1) for i in range(4000)]
    arrivals = poisson(requests, 5.0, seed=1)
    assert arrivals == poisson(requests, 5.0, seed=1) != poisson(requests, 5.0, seed=2)
    assert len(requests) / arrivals[-1].at == pytest.approx(5.0, rel=0.05)


def test_figures_of_an_open_loop_count_from_the_arrival() -> None:
    request = make_request("a", (20,), 1)
    served = [Served(Arrival(1.0, request), [1.5, 2.5], (1, 2)), Served(Arrival(2.0, request), [4.0], (3,))]
    assert Figures.of(served) == Figures(tokens_per_s=3 / 4, ttft_p50=1.25, ttft_p95=pytest.approx(1.925), gap_p95=1.0)


# ------------------------------------------------------------------------------------------------- llama.cpp
STAND_IN = '''
"""The part of llama_cpp that the worker uses. The next token of a sequence is the sum of its tokens and its length."""
import ctypes
from types import SimpleNamespace

__version__ = "stand-in"
VOCABULARY = 50

def following(tokens):
    return (sum(tokens) + len(tokens)) % VOCABULARY

class Llama:
    def __init__(self, path, **options):
        self.options = options
    def reset(self):
        pass
    def generate(self, tokens, temp):
        tokens = list(tokens)
        while True:
            tokens.append(following(tokens))
            yield tokens[-1]

def llama_model_default_params(): return SimpleNamespace()
def llama_context_default_params(): return SimpleNamespace()
def llama_model_load_from_file(path, params): return "model"
def llama_init_from_model(model, params): return SimpleNamespace(params=params, rows={}, logits={})
def llama_get_memory(context): return context
def llama_model_get_vocab(model): return "vocabulary"
def llama_vocab_n_tokens(vocabulary): return VOCABULARY
def llama_memory_clear(memory, data): memory.rows.clear()
def llama_memory_seq_rm(memory, row, first, last): del memory.rows[row]
def llama_batch_init(tokens, embeddings, sequences):
    columns = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
    return SimpleNamespace(**columns, seq_id=[[0] for _ in range(tokens)], n_tokens=0)
def llama_decode(context, batch):
    context.logits.clear()
    for i in range(batch.n_tokens):
        row = context.rows.setdefault(batch.seq_id[i][0], [])
        assert batch.pos[i] == len(row)
        row.append(batch.token[i])
        if batch.logits[i]:
            context.logits[i] = [float(token == following(row)) for token in range(VOCABULARY)]
    return 0
def llama_get_logits_ith(context, i):
    array = (ctypes.c_float * VOCABULARY)(*context.logits[i])
    return ctypes.cast(array, ctypes.POINTER(ctypes.c_float))
'''


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a module llama_cpp."""
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    return tmp_path


@pytest.fixture
def worker(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> llama_worker.Worker:
    monkeypatch.syspath_prepend(stand_in)
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    return llama_worker.Worker("model.gguf", threads=1, slots=2, length=40)


def test_sequences_answer_as_one_prompt_at_a_time_does(worker: llama_worker.Worker) -> None:
    prompts = [[3, 4], [7], [1, 2, 3, 4, 5], [9, 9]]
    job: Callable[..., Any] = lambda how: worker.job(how, 2, prompts, [6, 2, 9, 4], [14])  # noqa: E731
    answered = job("sequences")
    assert answered == job("generate") == job("sequences")
    assert answered[0] == [9, 19, 39, 29, 9, 19]
    assert all(len(answer) <= most for answer, most in zip(answered, [6, 2, 9, 4], strict=True))


def test_llama_cpp_takes_part_from_an_interpreter_that_has_it(stand_in: Path, tiny_adapted_model: Path) -> None:
    interpreter, gguf = stand_in / "python", stand_in / "Model.Q4_1.gguf"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={stand_in} exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    gguf.touch()
    words = ["--model", tiny_adapted_model, "--parts", "rivals", "--llama_python", interpreter, "--gguf", gguf, *SMALL]
    content = bench(stand_in / "r.json", *words)
    assert list(lines(content, "rivals", 1)) == ["AR", "blocks", "llama.cpp, sequences", "llama.cpp, Llama.generate"]
    several = lines(content, "rivals", 3)
    assert several["llama.cpp, sequences"]["weights"] == "GGUF Q4_1"
    assert several["AR"]["weights"] == "bfloat16"
    assert "blocks over llama.cpp, sequences, batch 3" in content["ratios"]


def test_an_interpreter_that_is_absent_is_a_line_with_the_reason(tiny_adapted_model: Path, tmp_path: Path) -> None:
    words = ["--model", tiny_adapted_model, "--parts", "rivals", "--llama_python", "/no/such/python", *SMALL]
    (line,) = bench(tmp_path / "r.json", *words)["table"]
    assert "/no/such/python" in line["reason"] or "not installed" in line["reason"]


# ------------------------------------------------------------------------------------------------- bad options
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "singel"], "parts"),
        (["--parts", "host", "host"], "each once"),
        (["--thresholds", "1.5"], "threshold must be above 0"),
        (["--concurrency", "0"], "at least 1"),
        (["--also", "treshold=0.5"], "did you mean 'threshold'"),
        (["--long_prompt", "300", "200"], "in this order"),
        (["--gguf", "/no/such.gguf"], "no such file"),
        (["--cached", "100"], "not a multiple"),
        (["--model", "MODEL", "--width", "100"], "not a multiple of the head's 64"),
        (["--model", "/no/such/model"], "no such folder"),
    ],
)
def test_bad_options_end_with_one_sentence_and_exit_code_2(
    words: list[str], message: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tiny_model) if word == "MODEL" else word for word in words]
    assert start(["engine", *given, "--output", str(tmp_path / "out.json")]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out.json").exists()


def test_decoders_of_also_are_read_by_field() -> None:
    decode = parse_decoder("policy=static,steps=8,fused=speculative")
    assert (decode.policy, decode.steps, decode.fused) == ("static", 8, "speculative")


def test_an_answer_that_differs_for_no_reason_fails_the_bench(sharp_backbone: Backbone) -> None:
    rival = LockstepContestant(LockstepDecoder(sharp_backbone), ragged(), 5)
    rival.run()
    setting: Any = SimpleNamespace(backbone=sharp_backbone)
    check_equal("engine", rival.answers, rival, setting)
    with pytest.raises(JobError, match="answer 1"):
        check_equal("engine", [rival.answers[0], (1,), *rival.answers[2:]], rival, setting)
