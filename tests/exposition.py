"""Reading an exposition as Prometheus would: what it holds, and whether it may hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Values = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Values:
    """Every sample by name and labels. Fails on what Prometheus would refuse or read wrongly: a family told of twice,
    a sample twice, one before its TYPE."""
    declared = Counter(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE "))
    assert declared and max(declared.values()) == 1, declared
    helped = Counter(line.split()[2] for line in text.splitlines() if line.startswith("# HELP "))
    assert helped == declared
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.type != "unknown", f"{family.name} has samples outside of its family"
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in values, f"{key} twice"
            values[key] = sample.value
    return values


def names(values: Values) -> set[str]:
    return {name for name, _ in values}


def total(values: Values, name: str, **labels: str) -> float:
    """The sum over all samples of that name with these labels; fails where there is none."""
    found = [value for (n, have), value in values.items() if n == name and labels.items() <= dict(have).items()]
    assert found, f"no sample of {name} with {labels}"
    return sum(found)
