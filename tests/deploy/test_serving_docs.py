"""docs/serving.md names every argument of serve.yaml with its default; the files that it names are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from actors.serve_args import ServeArgs

ROW = re.compile(r"^\| `([\w.]+)` \| (.+?) \| (.+) \|$", re.MULTILINE)


def argument_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, default) of every argument; a group of arguments is its members."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from argument_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, ... if field.is_required() else field.get_default(call_default_factory=True)


def as_written(default: Any) -> str:
    """A default as the table writes it."""
    if default is ...:
        return "required"
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    if isinstance(default, tuple):
        default = list(default)
    if isinstance(default, BaseModel):
        default = default.model_dump()
    text = yaml.safe_dump(default, default_flow_style=True, width=200).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`"


@pytest.fixture(scope="module")
def page(project: Path) -> str:
    return (project / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def table(page: str) -> dict[str, str]:
    """Argument -> default, from the page's table."""
    section = page.split("## Every argument")[1].split("\n## ")[0]
    return {path: default for path, default, _ in ROW.findall(section)}


@pytest.mark.parametrize("path", [path for path, _ in argument_fields(ServeArgs)])
def test_every_argument_is_in_the_operators_table_with_its_default(table: dict[str, str], path: str) -> None:
    assert path in table, f"docs/serving.md, 'Every argument', has no row for {path}"
    assert table[path] == as_written(dict(argument_fields(ServeArgs))[path])


def test_the_table_names_no_argument_that_is_not_there(table: dict[str, str]) -> None:
    assert set(table) == {path for path, _ in argument_fields(ServeArgs)}


def test_the_committed_serve_yaml_writes_no_argument_without_a_row(project: Path, table: dict[str, str]) -> None:
    args = yaml.safe_load((project / "deploy" / "serve.yaml").read_text(encoding="utf-8"))["applications"][0]["args"]
    groups = {path.split(".")[0] for path in table if "." in path}
    written = {key for key in args if key not in groups}
    written |= {f"{group}.{key}" for group in groups & set(args) for key in args[group]}
    assert written <= set(table)


def test_every_file_that_the_page_names_is_there(project: Path, page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page)
    commands = re.findall(r"\b((?:deploy|pipelines)/[\w./-]+\.(?:py|yaml))\b", page)
    manifests = re.findall(r"`(\w+\.yaml)`", page.split("## Kubernetes")[1])
    named = [project / "docs" / link for link in links] + [project / command for command in commands]
    named += [project / "deploy" / "kubernetes" / manifest for manifest in manifests]
    assert len(named) > 10
    assert [str(path) for path in named if not path.resolve().exists()] == []
