"""What several models of one replica tell is one report, in which every sample names its model."""

from __future__ import annotations

from prometheus_client.core import GaugeMetricFamily

from actors.gateway.exposition import Told, encode, joined, merge


def told(model: str, value: float) -> Told:
    return Told("r1", model, (GaugeMetricFamily("blockcast_pages_used", "Pages in use", value=value),))


def test_models_of_one_replica_keep_their_names_and_each_family_is_there_once() -> None:
    body, _ = encode(merge([joined([told("default", 3), told("tuned", 5)])]), "text/plain")
    lines = body.decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'blockcast_pages_used{model="default",replica="r1"} 3.0',
        'blockcast_pages_used{model="tuned",replica="r1"} 5.0',
    ]
    assert sum(line.startswith("# TYPE") for line in lines) == 1
