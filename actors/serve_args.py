"""The typed arguments of the Serve application, and the check of a serve.yaml that Serve itself does not make.

Serve ignores keys it does not know, at every level, and says nothing; `check_config` names them. It also refuses what
the running application would refuse too late: an address other than loopback without API keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from actors.gateway.access import KEYS_VARIABLE, is_loopback
from model.config import FUSED_DEFAULT, DecodeConfig, nearest_key
from model.errors import UserError

if TYPE_CHECKING:
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema

GATEWAY, REPLICA = "Gateway", "EngineReplica"
IMPORT_PATH = "actors.server:build"


class Args(BaseModel):
    """A group of arguments; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class DecodeArgs(Args):
    """How blocks are opened where a request does not say (its `diffusion` object)."""

    mode: Literal["diffusion", "ar", "lossless", "auto"] | None = Field(
        None,
        description="auto: by load, whichever answers sooner; lossless: ar's answer, drafted in blocks and verified; "
        "absent: diffusion where the model was adapted",
    )
    policy: str | None = Field(None, description="reveal rule; absent: threshold, or budgeted for a TwoTower model")
    threshold: float | None = Field(None, gt=0, le=1, description="confidence above which threshold reveals; 0.9")
    steps: int | None = Field(None, ge=1, description="denoising steps a block, of the policies with a schedule")
    factor: float | None = Field(None, gt=0, allow_inf_nan=False, description="bound of the factor policy; 1")
    gamma: float | None = Field(None, ge=0, allow_inf_nan=False, description="of dimple, budgeted, entropy")
    budget: float | None = Field(None, gt=0, allow_inf_nan=False, description="of the frechet policy; 0.5")
    refresh: str = Field("always", description="always; sub_block or every:N: the approximate sub-block cache")
    fused: str = Field(FUSED_DEFAULT, description="commit and next step in one forward: off, speculative, masked_head")
    sub_block_size: int | None = Field(None, ge=1, description="tokens denoised together; absent: the model's own")

    def decode_config(self, *, adapted: bool, two_tower: bool = False) -> DecodeConfig:
        """The decoder's view; the model decides what no mode and no policy mean."""
        return DecodeConfig.in_section(adapted=adapted, two_tower=two_tower, **self.model_dump())


class EngineArgs(Args):
    """How wide one engine runs."""

    max_rows: int = Field(8, ge=1, description="requests decoded together")
    max_length: int | None = Field(None, ge=2, description="longest prompt and answer, in tokens; absent: the context")
    prefill_tokens: int = Field(512, ge=1, description="prompt tokens read a round, so that decoding rows go on")
    pages: int | None = Field(None, ge=1, description="cache pages of one block; absent: for max_rows, 65,536 tokens")
    weights: Literal["model", "int8"] = Field("model", description="on a CPU: int8 decodes with quantised weights")
    prefix_cache: bool = Field(True, description="whether a prompt's known beginning is found in the cache")


class ScalingArgs(Args):
    """When replicas come and go, between min_replicas and max_replicas; see `actors.serving.autoscaling`."""

    target_backlog_tokens: float = Field(16_384, gt=0, description="query tokens that one replica may have before it")
    slack: float = Field(0.3, ge=0, lt=1, description="share of that by which fewer replicas must stay below it")
    upscale_delay_s: float = Field(10, ge=0, description="time a backlog must last before replicas are added")
    downscale_delay_s: float = Field(300, ge=0, description="time it must be gone before they are taken away")
    idle_delay_s: float = Field(
        600, ge=0, description="time without requests before the last one goes (min_replicas 0)"
    )
    report_s: float = Field(2, gt=0, description="time between two reports of a replica's backlog")


class RoutingArgs(Args):
    """Which of several replicas a request goes to; see `actors.serving.routing`."""

    prefix: bool = Field(True, description="prefer the replica that has the prompt's beginning in its cache")
    most_extra_tokens: float = Field(4096, ge=0, description="more backlog than the shortest that it may have for that")
    report_s: float = Field(2, gt=0, description="time between two reports of a replica's cache")


class ModelArgs(Args):
    """A further model of the application, chosen by the `model` of a request."""

    name: str = Field(min_length=1, description="what clients send as `model`")
    model: str | None = Field(None, description="a Hub id, a folder or a URI; absent: the application's own model")
    adapter: str | None = Field(None, description="a LoRA adapter saved by peft, merged into the weights at load")

    @model_validator(mode="after")
    def _differs(self) -> ModelArgs:
        if self.model is None and self.adapter is None:
            raise ValueError(f"{self.name!r} names neither a model nor an adapter")
        return self


class TracingArgs(Args):
    """OpenTelemetry spans of requests."""

    exporter: Literal["none", "otlp", "console"] = Field("none", description="otlp: over HTTP; console: to stdout")
    endpoint: str | None = Field(None, description="of otlp, with its path; absent: OTEL_EXPORTER_OTLP_* or localhost")
    sampling_ratio: float = Field(0.01, ge=0, le=1, description="share of requests traced where no traceparent decides")


class ServeArgs(Args):
    """`args` of the application in serve.yaml."""

    model: str = Field(description="a Hub id, a folder that every node sees, or an fsspec URI")
    served_name: str | None = Field(None, description="what clients send as `model`; absent: `model` as it is here")
    models: tuple[ModelArgs, ...] = Field((), description="further models of the same application")
    models_per_replica: int = Field(2, ge=1, description="further models that one replica keeps loaded")
    min_replicas: int = Field(1, ge=0, description="engine replicas at rest; 0: the first request starts one")
    max_replicas: int = Field(1, ge=1, description="engine replicas under load")
    gpus_per_replica: float = Field(0, ge=0, description="GPUs of one engine replica; 0 runs on the CPU")
    cpus_per_replica: float = Field(1, gt=0, description="CPU cores of one engine replica")
    scaling: ScalingArgs = ScalingArgs()
    routing: RoutingArgs = RoutingArgs()
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU, else float32")
    engine: EngineArgs = EngineArgs()
    decode: DecodeArgs = DecodeArgs()
    gateway_replicas: int = Field(1, ge=1, description="gateways; they share the bounds on open requests evenly")
    max_queue: int = Field(256, ge=0, description="requests that may wait; one more gets a 429 with Retry-After")
    max_body_bytes: int = Field(16 * 2**20, ge=1, description="largest request body")
    body_timeout_s: float = Field(30, gt=0, description="a body that takes longer to arrive is refused with a 408")
    max_answer_tokens: int | None = Field(None, ge=1, description="longest answer; absent: what the context leaves")
    deadline_s: float = Field(600, gt=0, description="an answer that takes longer is ended with a 504")
    max_requests_per_key: int | None = Field(None, ge=1, description="open requests of one API key; absent: no bound")
    cors_origins: tuple[str, ...] = Field((), description="web origins whose pages may call the API from a browser")
    api_keys_file: str | None = Field(None, description=f"keys, one a line; absent: {KEYS_VARIABLE}, or loopback")
    log_format: Literal["json", "text"] = Field("text", description="of the lines in Serve's log files")
    tracing: TracingArgs = TracingArgs()
    stall_s: float = Field(
        5, gt=0, description="an engine without a finished round for so long, and 3 of its longest rounds, is replaced"
    )
    drain_s: float = Field(120, ge=0, description="time that open answers get to end when a replica is taken away")

    @model_validator(mode="after")
    def _bounds(self) -> ServeArgs:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}")
        names = [self.default_model.name, *(further.name for further in self.models)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"models: two are named {twice!r}")
        for name, bound in (("max_queue", self.requests_at_once), ("max_requests_per_key", self.max_requests_per_key)):
            if bound is not None and bound < self.gateway_replicas:
                raise ValueError(f"{name} leaves no request for each of {self.gateway_replicas} gateway_replicas")
        return self

    @property
    def default_model(self) -> ModelArgs:
        """The model that every replica has, under the name that clients send."""
        return ModelArgs(name=self.served_name or self.model, model=self.model)

    @property
    def device(self) -> str:
        return "cuda" if self.gpus_per_replica else "cpu"

    @property
    def dtype_name(self) -> str:
        return ("bfloat16" if self.gpus_per_replica else "float32") if self.dtype == "auto" else self.dtype

    @property
    def requests_at_once(self) -> int:
        """Running and waiting requests that all gateways together let in."""
        return self.max_queue + self.engine.max_rows * self.max_replicas

    @property
    def requests_per_gateway(self) -> int:
        """Of them, those of one gateway. None knows of the others: equal shares keep the sum within the bound."""
        return self.requests_at_once // self.gateway_replicas

    @property
    def key_requests_per_gateway(self) -> int | None:
        """Open requests of one API key in one gateway; None: no bound of its own."""
        return None if self.max_requests_per_key is None else self.max_requests_per_key // self.gateway_replicas


# ------------------------------------------------------------------------------------------------- serve.yaml
def check_config(path: Path) -> None:
    """Raises UserError, one sentence, for the first thing in a serve.yaml that would be ignored or refused."""
    from ray.serve.schema import ServeDeploySchema

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"There is no file {path}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    for where, message in unknown_keys(config, ServeDeploySchema, ""):
        raise UserError(f"{path}: {where} is not a key that Serve knows: {message}")
    try:
        schema = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        raise UserError(f"{path}: {_first(error)}") from error
    for application in schema.applications:
        if application.import_path == IMPORT_PATH:
            _check_application(path, application, schema.http_options)


def _check_application(path: Path, application: ServeApplicationSchema, http: HTTPOptionsSchema) -> None:
    try:
        args = ServeArgs.model_validate(application.args)
    except ValidationError as error:
        raise UserError(f"{path}: args.{_first(error)}") from error
    for name in (deployment.name for deployment in application.deployments):
        if name not in (GATEWAY, REPLICA):
            raise UserError(f"{path}: there is no deployment {name!r}: {nearest_key(name, (GATEWAY, REPLICA))}")
    variables = application.runtime_env.get("env_vars", {}) | dict(os.environ)
    host, timeout_s = http.host, http.request_timeout_s
    if timeout_s is not None and timeout_s <= args.deadline_s:
        rule = f"leave it out, or set args.deadline_s below {timeout_s:g}"
        raise UserError(f"{path}: http_options.request_timeout_s ends answers without our error: {rule}.")
    if not is_loopback(host) and args.api_keys_file is None and KEYS_VARIABLE not in variables:
        rule = "set args.api_keys_file, or serve 127.0.0.1"
        raise UserError(f"{path}: http_options.host {host} is open to others without API keys: {rule}.")


def unknown_keys(value: Any, kind: Any, where: str) -> Iterator[tuple[str, str]]:
    """(path, hint) of every key of `value` that the pydantic type `kind` does not have, at any depth."""
    models = list(_models(kind))
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from unknown_keys(item, kind, f"{where}[{i}]")
    if not isinstance(value, dict) or not models:
        return
    fields = {name: field for model in models for name, field in model.model_fields.items()}
    for key, item in value.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in fields:
            yield path, nearest_key(str(key), fields)
        else:
            yield from unknown_keys(item, fields[key].annotation, path)


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models inside an annotation such as `Optional[list[X]]`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _models(part)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'the arguments'}: {first['msg']}"
