"""A configuration class seen as a flat list of dotted keys: what a command line can set and `--help` can explain."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Key:
    """One settable value: its dotted path, the alternatives its type allows, and what `--help` says of it."""

    path: str
    kinds: tuple[Any, ...]
    default: Any
    required: bool
    description: str

    @property
    def many(self) -> bool:
        """Whether the key takes several values."""
        return any(get_origin(kind) in (list, tuple) for kind in self.kinds)

    @property
    def item_kinds(self) -> tuple[Any, ...]:
        """The alternatives of one value of a key that takes several; of the key itself otherwise."""
        for kind in self.kinds:
            if get_origin(kind) in (list, tuple):
                return alternatives(get_args(kind)[0])
        return self.kinds

    @property
    def optional(self) -> bool:
        return type(None) in self.kinds

    @property
    def type_name(self) -> str:
        """What may be written after the key, such as `INT|null` or `split|truncate|reject`."""
        names = [_kind_name(kind) for kind in self.item_kinds if kind is not type(None)]
        return "|".join([*names, "null"] if self.optional else names) + (" ..." if self.many else "")


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(get_args(annotation))
    return (annotation,)


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section class that a field holds, also behind `| None`; None for a plain value."""
    for kind in alternatives(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(str(value) for value in get_args(kind))
    return {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT"}.get(kind, "VALUE")


def _key(path: str, field: FieldInfo, default: Any) -> Key:
    return Key(
        path=path,
        kinds=alternatives(field.annotation),
        default=default,
        required=field.is_required(),
        description=field.description or "",
    )


def list_keys(config_type: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None) -> Iterator[Key]:
    """Every key of the class, its own before its sections'. defaults: the instance that a parent's default holds."""
    sections: list[tuple[str, type[BaseModel], Any]] = []
    for name, field in config_type.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if defaults is not None:
            default = dict(defaults)[name]
        inner = section_type(field.annotation)
        if inner is None:
            yield _key(prefix + name, field, default)
        else:
            sections.append((name, inner, default))
    for name, inner, default in sections:
        yield from list_keys(inner, f"{prefix}{name}.", default)


def section_paths(config_type: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of the class with its dotted path."""
    for name, field in config_type.model_fields.items():
        inner = section_type(field.annotation)
        if inner is not None:
            yield prefix + name, inner
            yield from section_paths(inner, f"{prefix}{name}.")


def suggest(name: str, known: list[str], mark: str = "") -> str:
    """A hint for an unknown dotted key: the nearest real one, by the whole path or by its last part.

    mark: what stands before a key where it is written (`--` on a command line).
    """
    by_leaf = {path.rpartition(".")[2]: path for path in reversed(known)}
    leaf = name.rpartition(".")[2]
    near = [by_leaf[leaf]] if leaf in by_leaf else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [by_leaf[other] for other in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    return f"did you mean {mark}{near[0]}?" if near else f"the keys are {', '.join(known)}."
