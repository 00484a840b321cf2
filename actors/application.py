"""The application of a serve.yaml as a module attribute, which is what `serve build` asks for:

    BLOCKCAST_SERVE_CONFIG=deploy/serve.yaml serve build actors.application:app -o built.yaml

`serve deploy` needs none of this: serve.yaml names the builder, `actors.server:build`, and hands it `args`. `serve
build` takes no builder, only an Application that can be imported; here `app` is one, made when it is asked for, from
the one application of the file that BLOCKCAST_SERVE_CONFIG names (absent: the project's deploy/serve.yaml).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from ray.serve import Application

from actors.serve_args import IMPORT_PATH, ServeArgs, check_config
from model.errors import UserError

CONFIG_VARIABLE = "BLOCKCAST_SERVE_CONFIG"
COMMITTED = Path(__file__).resolve().parent.parent / "deploy" / "serve.yaml"


def load_args(path: Path) -> ServeArgs:
    """The arguments of the only Blockcast application of a serve.yaml. Raises UserError."""
    check_config(path)
    applications = yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]
    ours = [application for application in applications if application["import_path"] == IMPORT_PATH]
    if len(ours) != 1:
        raise UserError(f"{path} has {len(ours)} applications of {IMPORT_PATH}: name a file with exactly one.")
    return ServeArgs.model_validate(ours[0].get("args", {}))


def __getattr__(name: str) -> Any:
    """`app`, built when it is asked for: importing this module reads no file and starts nothing."""
    if name == "app":
        return _build()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _build() -> Application:
    from actors.server import build

    return build(load_args(Path(os.environ.get(CONFIG_VARIABLE) or COMMITTED)))
