"""Families of many replicas as one exposition: each family once, each sample labelled with where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

CREATED = "_created"  # OpenMetrics' timestamps of series: one more series for each, which nobody here asks for


@dataclass(frozen=True)
class Told:
    """What one replica, named `replica`, told: its families at this moment, without the labels of its place.

    model: the name that clients ask for; a family may name the model itself.
    """

    replica: str
    model: str
    families: tuple[Metric, ...]


@dataclass(frozen=True)
class Scrape:
    """Answers of all replicas of a deployment that answered in time; silent: how many did not."""

    told: tuple[Told, ...] = ()
    silent: int = 0


@dataclass(frozen=True)
class Families:
    """What a registry is to prometheus_client's encoders."""

    families: tuple[Metric, ...]

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


def merge(told: Iterable[Told]) -> Families:
    """Each family once, in the order it is first met, with `replica` and `model` on every sample.

    Where replicas of two versions name one family with two types (in a rolling update), the first one's holds and the
    other's samples are left out: an exposition that contradicts itself would be refused as a whole.
    """
    merged: dict[str, Metric] = {}
    for part in told:
        for family in part.families:
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type, family.unit))
            if whole.type == family.type:
                for sample in family.samples:
                    if not sample.name.endswith(CREATED):
                        labels = {"model": part.model, **sample.labels, "replica": part.replica}
                        whole.samples.append(sample._replace(labels=labels))
    return Families(tuple(merged.values()))


def joined(parts: Sequence[Told]) -> Told:
    """What several models of one replica told, as one: the samples of all but the first name their model."""
    first, *others = parts
    families = list(first.families)
    for part in others:
        for family in part.families:
            named = Metric(family.name, family.documentation, family.type, family.unit)
            named.samples = [s._replace(labels={"model": part.model, **s.labels}) for s in family.samples]
            families.append(named)
    return Told(first.replica, first.model, tuple(families))


def encode(families: Families, accept: str) -> tuple[bytes, str]:
    """(body, content type), in Prometheus' text format, or in OpenMetrics where the Accept header asks for it."""
    encoder, content_type = choose_encoder(accept)
    return encoder(families), content_type
