"""deploy/serve.yaml and the check that Serve does not make: unknown keys at any depth, open addresses without keys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from actors.protocol.request_types import DiffusionOptions
from actors.serve_args import DecodeArgs, ServeArgs, check_config
from actors.server import build
from actors.serving.loaded_model import check_engine
from model.config import DecodeConfig
from model.decoding import POLICIES
from model.errors import JobError, UserError
from pipelines.jobkit import DecodeSection


@pytest.fixture(scope="module")
def committed(project: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((project / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
    return loaded


def complaint(config: Any, folder: Path) -> str:
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        check_config(path)
    return str(caught.value)


def changed(config: dict[str, Any], change: Callable[[dict[str, Any], dict[str, Any]], None]) -> dict[str, Any]:
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(config))
    change(copy, copy["applications"][0])
    return copy


def test_the_committed_file_passes_the_check(project: Path) -> None:
    check_config(project / "deploy" / "serve.yaml")


@pytest.mark.slow
def test_the_check_runs_as_a_script_from_anywhere(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(project / "deploy" / "check_serve.py"), str(project / "deploy" / "serve.yaml")],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr


def test_the_committed_file_states_model_bounds_and_gpus(committed: dict[str, Any]) -> None:
    args = committed["applications"][0]["args"]
    assert {"model", "min_replicas", "max_replicas", "gpus_per_replica"} <= set(args)
    assert committed["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c, a: c.update(http_option={}), "http_option"),
        (lambda c, a: c["http_options"].update(prot=1), "http_options.prot"),
        (lambda c, a: a.update(route="/"), "applications[0].route"),
        (lambda c, a: a["args"].update(min_replica=1), "min_replica"),
        (lambda c, a: a["args"]["engine"].update(rows=1), "engine.rows"),
        (
            lambda c, a: a.update(deployments=[{"name": "Gateway", "max_ongoing_request": 5}]),
            "applications[0].deployments[0].max_ongoing_request",
        ),
        (
            lambda c, a: a.update(deployments=[{"name": "Gateway", "ray_actor_options": {"num_cpu": 1}}]),
            "applications[0].deployments[0].ray_actor_options.num_cpu",
        ),
        (
            lambda c, a: a.update(deployments=[{"name": "Gateway", "autoscaling_config": {"min_replica": 1}}]),
            "applications[0].deployments[0].autoscaling_config.min_replica",
        ),
        (lambda c, a: a.update(deployments=[{"name": "Gatway"}]), "Gatway"),
        (lambda c, a: a["args"].update(max_replicas=0), "max_replicas"),
        (lambda c, a: a["args"].pop("model"), "model"),
        (lambda c, a: c["http_options"].update(host="0.0.0.0"), "http_options.host"),
        (lambda c, a: c["http_options"].update(request_timeout_s=600), "http_options.request_timeout_s"),
    ],
)
def test_a_key_or_value_that_serve_would_swallow_is_named(
    committed: dict[str, Any], tmp_path: Path, change: Any, named: str
) -> None:
    assert named in complaint(changed(committed, change), tmp_path)


def test_an_open_address_is_accepted_with_api_keys(committed: dict[str, Any], tmp_path: Path) -> None:
    def open_with_keys(config: dict[str, Any], application: dict[str, Any]) -> None:
        config["http_options"]["host"] = "0.0.0.0"
        application["args"]["api_keys_file"] = "/etc/blockcast/keys"

    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(changed(committed, open_with_keys)), encoding="utf-8")
    check_config(path)


@pytest.mark.parametrize("text", ["", "[]", "a: [", "applications: 5"])
def test_a_file_that_is_no_serve_config_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        check_config(path)
    assert "\n" not in str(caught.value)


def test_keys_are_demanded_where_haproxy_hides_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(UserError, match="HAProxy"):
        build(ServeArgs(model="m"))
    monkeypatch.setenv("BLOCKCAST_API_KEYS", "key")
    build(ServeArgs(model="m"))


def test_the_server_and_the_jobs_offer_the_same_ways_to_decode() -> None:
    """Each key of a request's `diffusion` object has a default in both places, of the same type and bounds."""
    asked = set(DiffusionOptions.model_fields) - {"trace"}
    assert asked == set(DecodeArgs.model_fields) == set(DecodeSection.model_fields) - {"dtype"}
    values = {"policy": "dimple", "gamma": 0.5, "steps": 3, "refresh": "sub_block", "sub_block_size": 2}
    expected = DecodeConfig(**values)
    assert DecodeArgs(**values).decode_config(adapted=True) == expected
    assert DecodeSection(**values).decode_config(adapted=True) == expected
    assert DecodeArgs().decode_config(adapted=False) == DecodeSection().decode_config(adapted=False)
    described = DecodeSection.model_fields["policy"].description or ""
    assert all(name in described for name in POLICIES), "--help names every policy"


def test_device_and_dtype_follow_the_gpus() -> None:
    assert (ServeArgs(model="m").device, ServeArgs(model="m").dtype_name) == ("cpu", "float32")
    on_gpu = ServeArgs(model="m", gpus_per_replica=0.5)
    assert (on_gpu.device, on_gpu.dtype_name) == ("cuda", "bfloat16")


def test_an_engine_is_unhealthy_when_its_thread_ended_or_made_no_progress() -> None:
    check_engine(alive=True, progress_at=100.0, now=105.0, stall_s=10.0)
    for alive, now in ((False, 100.0), (True, 111.0)):
        with pytest.raises(JobError):
            check_engine(alive=alive, progress_at=100.0, now=now, stall_s=10.0)


def test_further_models_have_names_of_their_own_and_a_model_or_an_adapter() -> None:
    args = ServeArgs.model_validate({"model": "m", "models": [{"name": "tuned", "adapter": "lora"}]})
    assert (args.default_model.name, args.models[0].name) == ("m", "tuned")
    for models, named in (
        ([{"name": "m", "adapter": "a"}], "'m'"),
        ([{"name": "x", "adapter": "a"}, {"name": "x", "model": "b"}], "'x'"),
        ([{"name": "x"}], "neither"),
        ([{"name": "", "model": "b"}], "name"),
    ):
        with pytest.raises(ValidationError, match=named):
            ServeArgs.model_validate({"model": "m", "models": models})


def test_several_gateways_share_the_bounds_and_each_has_a_request_at_least() -> None:
    fields: dict[str, Any] = {"model": "m", "max_queue": 7, "engine": {"max_rows": 4}, "max_requests_per_key": 5}
    for gateways in (1, 2, 3):
        args = ServeArgs.model_validate({**fields, "gateway_replicas": gateways})
        assert 11 - gateways < args.requests_per_gateway * gateways <= 11 == args.requests_at_once
        assert args.key_requests_per_gateway is not None
        assert 5 - gateways < args.key_requests_per_gateway * gateways <= 5
    assert ServeArgs(model="m", gateway_replicas=2).key_requests_per_gateway is None
    for gateways, named in ((6, "max_requests_per_key"), (12, "max_queue")):
        with pytest.raises(ValidationError, match=named):
            ServeArgs.model_validate({**fields, "gateway_replicas": gateways})
