"""What makes two runs the same: the keys that decide the result, hashes of the inputs, the code's revision."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from pydantic import BaseModel

from model.errors import UserError

PACKAGES = ("torch", "transformers", "tokenizers", "ray", "deepspeed", "pyarrow", "numpy", "pydantic")
CHUNK_BYTES = 1 << 22


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values as (dotted key, value)."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def identity_of(config: BaseModel) -> dict[str, Any]:
    """The nested values of the keys that decide what a job computes (those not marked NOT_IDENTITY)."""
    values: dict[str, Any] = {}
    dumped = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("identity") is False:
            continue
        inner = dict(config)[name]
        values[name] = identity_of(inner) if isinstance(inner, BaseModel) else dumped[name]
    return values


def hash_of(values: Any) -> str:
    """sha256 of the canonical JSON form, 16 hex digits."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_hash(config: BaseModel) -> str:
    """One hash for all configurations that compute the same thing."""
    return hash_of(identity_of(config))


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value before, value now) for each dotted key that differs."""
    old, new = dict(flat(before)), dict(flat(after))
    return [
        (key, old.get(key), new.get(key))
        for key in [*old, *(k for k in new if k not in old)]
        if old.get(key) != new.get(key)
    ]


def hash_file(source: str) -> str:
    """sha256 of a local file's bytes; for a remote one the store's own fingerprint of it (size, time, etag). Raises
    UserError for a local file that cannot be read."""
    filesystem, path = url_to_fs(source)
    if "file" not in filesystem.protocol:
        return f"store:{filesystem.ukey(path)}"
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        hint = " (a link that leads nowhere)" if os.path.islink(path) and not os.path.exists(path) else ""
        raise UserError(f"{source} cannot be read: {error.strerror}{hint}; mend it, or leave it out.") from None
    return f"sha256:{digest.hexdigest()}"


def hash_inputs(sources: Iterable[str | Path]) -> dict[str, str]:
    """A manifest's `inputs`: each file with its hash, in the order given."""
    return {str(source): hash_file(str(source)) for source in sources}


def git_revision() -> str | None:
    """The checkout's commit, with `-dirty` behind it when tracked files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide results."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}
