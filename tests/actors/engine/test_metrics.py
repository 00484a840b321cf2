"""GET /metrics: one valid exposition of all replicas, and figures that agree with what really happened."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from actors.gateway.access import load_key_hashes
from actors.gateway.exposition import Families, Scrape, Told, encode, merge
from actors.gateway.metrics import GatewayMetrics, Scraper
from actors.serving.replica import EngineReplica
from tests.api.successor import build_successor_model
from tests.direct import DirectBackend, client_of, direct_app
from tests.exposition import Values, names, read, total

PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 24}
KEYS = load_key_hashes(None, {"BLOCKCAST_API_KEYS": "sesame"})
METRIC = re.compile(r"\bblockcast_[a-z_]+")


@pytest.fixture(scope="module")
def successor_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_successor_model(tmp_path_factory.mktemp("models") / "successor")


# ------------------------------------------------------------------------------------------------- merging
def rounds(value: float) -> Metric:
    return CounterMetricFamily("blockcast_rounds", "Rounds.", value=value)


def wait() -> Metric:
    return HistogramMetricFamily("blockcast_wait", "Wait.", buckets=[("1.0", 1), ("+Inf", 2)], sum_value=3)


def text_of(families: Families) -> str:
    return encode(families, "")[0].decode()


def test_two_replicas_make_one_family_with_a_sample_of_each() -> None:
    told = [Told("one", "m", (rounds(1), wait())), Told("two", "m", (wait(), rounds(2)))]
    text = text_of(merge(told))
    values = read(text)
    assert text.count("# HELP blockcast_rounds_total") == text.count("# TYPE blockcast_wait histogram") == 1
    assert total(values, "blockcast_rounds_total", replica="one", model="m") == 1
    assert total(values, "blockcast_rounds_total") == 3
    assert total(values, "blockcast_wait_bucket", le="+Inf") == 4 and total(values, "blockcast_wait_sum") == 6


def test_a_family_of_another_type_from_another_version_is_left_out_and_the_rest_stands() -> None:
    gauge = GaugeMetricFamily("blockcast_rounds", "Rounds.", value=7)
    values = read(text_of(merge([Told("old", "m", (rounds(1),)), Told("new", "m", (gauge, wait()))])))
    assert total(values, "blockcast_rounds_total") == 1 and "blockcast_rounds" not in names(values)
    assert total(values, "blockcast_wait_count", replica="new") == 2


def test_names_from_outside_cannot_break_the_exposition() -> None:
    nasty = 'm"\n# TYPE blockcast_rounds gauge\\'
    values = read(text_of(merge([Told("one", nasty, (rounds(1),))])))
    ((_, labels),) = values
    assert dict(labels)["model"] == nasty


def test_open_metrics_is_spoken_to_whom_asks_for_it() -> None:
    families = merge([Told("one", "m", (rounds(1),))])
    body, content_type = encode(families, "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert body.endswith(b"# EOF\n") and content_type.startswith("application/openmetrics-text")
    assert encode(families, "*/*")[1].startswith("text/plain")


def scraped(answers: list[Scrape]) -> Iterator[Values]:
    """What one gateway tells while its engines answer so, one after the other."""
    scrapes = iter(answers)

    async def ask() -> Scrape:
        return next(scrapes)

    scraper = Scraper(GatewayMetrics("gateway", "m", inside=lambda: 0, limit=1, retries=lambda: 0), ask)

    async def all_of_them() -> list[str]:
        return [text_of(await scraper.scrape()) for _ in answers]

    return map(read, asyncio.run(all_of_them()))


def test_a_replica_that_does_not_answer_is_left_out_and_shown_as_down_until_it_is_taken_away() -> None:
    one, two = Told("one", "m", (rounds(1),)), Told("two", "m", (rounds(2),))
    both, silent, gone = scraped([Scrape((one, two)), Scrape((one,), silent=1), Scrape((one,))])
    assert [total(both, "blockcast_replica_up", replica=name) for name in ("one", "two")] == [1, 1]
    assert total(both, "blockcast_replicas_silent") == 0
    assert total(silent, "blockcast_replica_up", replica="two") == 0
    assert total(silent, "blockcast_replicas_silent") == 1 and total(silent, "blockcast_rounds_total") == 1
    assert total(gone, "blockcast_replica_up") == 1
    with pytest.raises(AssertionError):
        total(gone, "blockcast_replica_up", replica="two")


def test_every_gateway_tells_of_all_gateways_and_of_itself_once() -> None:
    def gateway(name: str) -> GatewayMetrics:
        metrics = GatewayMetrics(name, "m", inside=lambda: 0, limit=1, retries=lambda: 0)
        metrics.ended("chat", "stop", 1.0)
        return metrics

    one, two = gateway("one"), gateway("two")

    async def engines() -> Scrape:
        return Scrape()

    async def gateways() -> Scrape:
        return Scrape((one.told(), two.told()))

    values = read(text_of(asyncio.run(Scraper(one, engines, gateways).scrape())))
    assert total(values, "blockcast_requests_total", outcome="stop", replica="one") == 1
    assert total(values, "blockcast_requests_total", outcome="stop") == 2


# ------------------------------------------------------------------------------------------------- a real engine
async def metrics_of(client: httpx.AsyncClient) -> Values:
    response = await client.get("/metrics")
    assert response.status_code == 200, response.text
    return read(response.text)


def test_the_figures_agree_with_the_answers(successor_model: Path) -> None:
    app, _ = direct_app(successor_model)

    async def talk() -> tuple[Values, Values, list[dict[str, Any]]]:
        async with client_of(app) as client:
            before = await metrics_of(client)
            asked = [client.post("/v1/completions", json={**PROMPT, "seed": i}) for i in range(6)]
            answers = [response.json() for response in await asyncio.gather(*asked)]
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "b" * 20}], "stream": True}
            await client.post("/v1/chat/completions", json=chat)
            await client.post("/v1/completions", json={**PROMPT, "n": 0})
            return before, await metrics_of(client), answers

    before, values, answers = asyncio.run(talk())
    assert names(before) == names(values), "every series is there from the start"
    assert total(before, "blockcast_requests_total") == total(before, "blockcast_errors_total") == 0
    assert total(values, "blockcast_requests_total", endpoint="completion", outcome="length") == 6
    assert total(values, "blockcast_requests_total", endpoint="chat", outcome="stop") == 1
    assert total(values, "blockcast_requests_total", outcome="refused") == 1
    assert total(values, "blockcast_errors_total", kind="bad_request") == total(values, "blockcast_errors_total") == 1
    assert total(values, "blockcast_time_to_first_token_seconds_count") == 7
    assert total(values, "blockcast_request_seconds_count") == total(values, "blockcast_queue_wait_seconds_count") == 7
    assert total(values, "blockcast_delta_gap_seconds_count") >= 6 * 4, "answers of 24 tokens have 6 sub-blocks"
    figures = [answer["diffusion"] for answer in answers]
    blocks = sum(len(figure["steps_per_block"]) for figure in figures)
    assert blocks <= total(values, "blockcast_steps_per_block_count") <= blocks + 3
    assert total(values, "blockcast_tokens_per_forward_count") == 7
    steps = sum(sum(figure["steps_per_block"]) for figure in figures)
    assert total(values, "blockcast_forwards_total", phase="denoise") >= steps
    assert total(values, "blockcast_completion_tokens_total") >= 6 * 24
    assert total(values, "blockcast_pages_used") == total(values, "blockcast_rows_running") == 0
    assert total(values, "blockcast_gateway_requests") == 0


def test_sums_by_phase_and_mix_are_the_engine_s_own(successor_model: Path) -> None:
    app, gateway = direct_app(successor_model)

    async def talk() -> Values:
        async with client_of(app) as client:
            prompts = [{**PROMPT, "prompt": "a" * length} for length in (3, 30, 60, 90)]
            await asyncio.gather(*(client.post("/v1/completions", json=prompt) for prompt in prompts))
            values = await metrics_of(client)
            while total(values, "blockcast_rounds_total") < (await backend.replicas[0].stats()).rounds:
                values = await metrics_of(client)  # an answer's end is heard before its round is counted
            return values

    backend = gateway.backend
    assert isinstance(backend, DirectBackend)
    values = asyncio.run(talk())
    stats = asyncio.run(backend.replicas[0].stats())
    assert total(values, "blockcast_rounds_total") == stats.rounds
    assert total(values, "blockcast_query_tokens_total") == stats.query_tokens
    assert total(values, "blockcast_forwards_total") == sum(stats.forwards.values())
    assert total(values, "blockcast_committed_tokens_total") == stats.committed_tokens
    mixed = [mix for mix, count in stats.rounds_by_mix.items() if count and "+" in mix]
    assert mixed, "four prompts at once, and no round had two phases"
    assert sum(stats.query_tokens_by_phase.values()) == stats.query_tokens


@pytest.mark.parametrize(
    ("headers", "address", "status"),
    [
        ({}, "10.0.0.9", 401),
        ({"Authorization": "Bearer wrong"}, "127.0.0.1", 401),
        ({"Authorization": "Bearer sesame"}, "10.0.0.9", 200),
    ],
)
def test_with_keys_the_metrics_ask_for_one(
    successor_model: Path, headers: dict[str, str], address: str, status: int
) -> None:
    app, _ = direct_app(successor_model, keys=KEYS)

    async def ask() -> int:
        async with client_of(app, address) as client:
            return (await client.get("/metrics", headers=headers)).status_code

    assert asyncio.run(ask()) == status


def test_without_keys_the_metrics_are_for_this_machine(successor_model: Path) -> None:
    app, _ = direct_app(successor_model)

    async def ask(address: str) -> int:
        async with client_of(app, address) as client:
            return (await client.get("/metrics")).status_code

    assert asyncio.run(ask("10.0.0.9")) == 403 and asyncio.run(ask("127.0.0.1")) == 200


# ------------------------------------------------------------------------------------------------- docs and deploy
@pytest.fixture(scope="module")
def scrape(successor_model: Path) -> str:
    app, _ = direct_app(successor_model)

    async def ask() -> str:
        async with client_of(app) as client:
            await client.post("/v1/completions", json=PROMPT)
            return (await client.get("/metrics")).text

    return asyncio.run(ask())


def table_of(scrape: str) -> list[tuple[str, str, str]]:
    """(name, type, labels) of every family, in the exposition's order."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scrape, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in types}
    for name, have in read(scrape):
        family = name if name in types else re.sub(r"_(bucket|sum|count)$", "", name)
        labels[family] |= {label for label, _ in have} - {"replica", "model", "le"}
    return [(name, kind, ", ".join(f"`{label}`" for label in sorted(labels[name]))) for name, kind in types.items()]


def test_the_docs_list_exactly_the_metrics_there_are(scrape: str, project: Path) -> None:
    page = (project / "docs" / "observability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(blockcast_[a-z_]+)` \| (\w+) \| (.*?) \| (.+) \|$", page, re.MULTILINE)
    assert sorted(row[:3] for row in rows) == sorted(table_of(scrape))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", scrape, re.MULTILINE))
    for name, _, _, text in rows:
        assert text == helps[name].rstrip("."), f"the page and /metrics say different things of {name}"


def expressions(project: Path) -> list[str]:
    """Every PromQL expression and every query of the dashboard and the alert rules."""
    import yaml

    dashboard = json.loads((project / "deploy" / "grafana" / "blockcast.json").read_text(encoding="utf-8"))
    rules = yaml.safe_load((project / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    variables = [str(v["query"]) for v in dashboard["templating"]["list"]]
    texts = [str(rule["annotations"]) for group in rules["groups"] for rule in group["rules"]]
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(panels) > 30 and len(alerts) > 5
    return [*panels, *variables, *texts, *alerts]


def test_dashboard_and_alerts_ask_only_for_metrics_that_a_real_scrape_has(scrape: str, project: Path) -> None:
    known = names(read(scrape)) | {name for name, _, _ in table_of(scrape)}
    asked = {name for expression in expressions(project) for name in METRIC.findall(expression)}
    assert asked - known == set()
    shown = " ".join(expressions(project))
    missing = [name for name, _, _ in table_of(scrape) if name not in shown]
    assert missing == [], "every metric has its place on the dashboard"


def test_the_dashboard_is_one_that_grafana_can_lay_out(project: Path) -> None:
    panels = json.loads((project / "deploy" / "grafana" / "blockcast.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, f"{panel['title']} lies over another panel"
        taken |= cells
        refs = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(refs)) == len(refs)


def test_a_replica_outside_of_serve_has_a_name_and_its_metrics(successor_model: Path) -> None:
    from actors.serve_args import ServeArgs

    replica = EngineReplica(ServeArgs(model=str(successor_model), served_name="tiny"))
    told = asyncio.run(replica.metrics())
    assert told.replica == "local" and told.model == "tiny"
