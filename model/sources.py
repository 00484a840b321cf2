"""Where a model comes from: a folder, an fsspec URI or a Hub id, fetched once into a local folder.

Only what a model needs is taken: JSON, tokenizer files and safetensors. Pickled weights and Python files are never
fetched, and a folder that holds nothing else is refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from model.errors import JobError, UserError

PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
CONFIGS = ("config.json", "generation_config.json")


def cache_folder() -> Path:
    """`BLOCKCAST_CACHE`, else the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("BLOCKCAST_CACHE") or Path(home) / "blockcast")


def fetch_model(source: str | Path, key: str = "--model") -> Path:
    """Local folder of a model. source: folder, fsspec URI (`scheme://...`) or Hub id (`owner/name`). key: what an
    error calls it.

    Raises UserError when nothing usable is there, JobError when the network failed.
    """
    text = str(source)
    if "://" in text:
        return _fetch_uri(text, PATTERNS, key)
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{key} {text} is a file: give the folder that holds config.json and the safetensors.")
    if text.count("/") == 1 and not text.startswith(("/", ".", "~")):
        return _fetch_hub(text, PATTERNS, key)
    raise UserError(f"{key} {text}: there is no such folder.")


def fetch_config(source: str | Path) -> Path:
    """As `fetch_model`, but of a Hub id or URI only the JSON files, no weights and no tokenizer."""
    text = str(source)
    if "://" not in text and (Path(text).expanduser().exists() or text.count("/") != 1):
        return fetch_model(text)
    return _fetch_uri(text, CONFIGS) if "://" in text else _fetch_hub(text, CONFIGS)


def _fetch_hub(repo_id: str, patterns: Sequence[str] = PATTERNS, key: str = "--model") -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(patterns)))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{key} {repo_id} is neither a folder here nor a model on the Hub (private ones need HF_TOKEN)."
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise JobError(f"Could not fetch {repo_id} from the Hub: {first_line(error)}") from error


def _fetch_uri(uri: str, patterns: Sequence[str] = PATTERNS, key: str = "--model") -> Path:
    """Download a folder once per machine: into a temporary folder, then renamed into the cache."""
    import fsspec

    kind = "models" if patterns == PATTERNS else "configs"
    target = cache_folder() / kind / hashlib.blake2b(uri.encode(), digest_size=10).hexdigest()
    if target.is_dir():
        return target
    try:
        system, root = fsspec.core.url_to_fs(uri)
        names = [n for n in system.ls(root, detail=False) if any(Path(n).match(p) for p in patterns)]
    except FileNotFoundError as error:
        raise UserError(f"{key} {uri}: there is no such folder.") from error
    except (ValueError, ImportError) as error:
        raise UserError(f"{key} {uri}: {first_line(error)}") from error
    except OSError as error:
        raise JobError(f"Could not read {uri}: {first_line(error)}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=".part-"))
    try:
        for name in names:
            system.get_file(name, str(part / Path(name).name))
        if not target.is_dir():
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
