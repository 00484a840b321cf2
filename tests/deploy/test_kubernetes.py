"""The manifests in deploy/kubernetes: the fields we use, and that they fit each other, the image and the code.

The whole resource definitions were compared once by hand (docs/serving.md names the version); here is a short list of
our own of what the manifests may say outside of pod templates.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.serve_args import REPLICA, check_config
from model.errors import UserError
from tests.deploy.dockerfile import read_dockerfile, user_of

RAY_MANIFESTS = ("raycluster.yaml", "rayjob.yaml", "rayservice.yaml")
POD = object()  # a pod template: its fields are checked by name below
RESOURCES = {"requests": dict, "limits": dict}
SECRET_REF = {"valueFrom": {"secretKeyRef": {"name": str, "key": str}}}
CLUSTER: dict[str, Any] = {
    "rayVersion": str,
    "authOptions": {"mode": str},
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": {
        "idleTimeoutSeconds": int,
        "upscalingMode": str,
        "resources": RESOURCES,
        "securityContext": dict,
    },
    "gcsFaultToleranceOptions": {"redisAddress": str, "redisPassword": SECRET_REF},
    "headGroupSpec": {"serviceType": str, "rayStartParams": dict, "template": POD},
    "workerGroupSpecs": [
        {
            "groupName": str,
            "replicas": int,
            "minReplicas": int,
            "maxReplicas": int,
            "rayStartParams": dict,
            "template": POD,
        }
    ],
}
SPECS: dict[str, dict[str, Any]] = {
    "RayCluster": CLUSTER,
    "RayJob": {
        "entrypoint": str,
        "submissionMode": str,
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "submitterPodTemplate": POD,
        "rayClusterSpec": CLUSTER,
    },
    "RayService": {
        "serveConfigV2": str,
        "excludeHeadPodFromServeSvc": bool,
        "upgradeStrategy": {"type": str},
        "rayClusterDeletionDelaySeconds": int,
        "rayClusterConfig": CLUSTER,
    },
}
CHOICES = {
    "authOptions.mode": {"token"},
    "upscalingMode": {"Default", "Aggressive", "Conservative"},
    "submissionMode": {"K8sJobMode", "HTTPMode", "SidecarMode"},
    "upgradeStrategy.type": {"NewCluster", "None"},
}
POD_FIELDS = {"terminationGracePeriodSeconds", "securityContext", "containers", "volumes", "restartPolicy"}
CONTAINER_FIELDS = {
    "name",
    "image",
    "ports",
    "env",
    "lifecycle",
    "livenessProbe",
    "readinessProbe",
    "resources",
    "securityContext",
    "volumeMounts",
}


def documents(project: Path, name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((project / "deploy" / "kubernetes" / name).read_text(encoding="utf-8")))


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    key = {"RayCluster": None, "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}[document["kind"]]
    spec: dict[str, Any] = document["spec"]
    return spec if key is None else spec[key]


def pods(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(role, pod template) of head, workers and, in a RayJob, the submitter."""
    cluster = cluster_of(document)
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield "worker", group["template"]
    if "submitterPodTemplate" in document["spec"]:
        yield "submitter", document["spec"]["submitterPodTemplate"]


def strange(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Where `value` is not of `kind`: a type, a dict of fields, a list of one kind, or POD."""
    if kind is POD:
        yield from (f"{where}.spec.{key}" for key in set(value["spec"]) - POD_FIELDS)
        for container in value["spec"]["containers"]:
            yield from (f"{where}: container {key}" for key in set(container) - CONTAINER_FIELDS)
    elif isinstance(kind, list):
        for i, item in enumerate(value):
            yield from strange(item, kind[0], f"{where}[{i}]")
    elif isinstance(kind, dict):
        for key, item in value.items():
            path = f"{where}.{key}"
            if key not in kind:
                yield path
            else:
                yield from strange(item, kind[key], path)
                yield from (
                    f"{path}: {item!r}"
                    for end, choices in CHOICES.items()
                    if path.endswith(end) and item not in choices
                )
    elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{where}: {value!r} is no {kind.__name__}"


@pytest.fixture(scope="module", params=RAY_MANIFESTS)
def manifest(request: pytest.FixtureRequest, project: Path) -> dict[str, Any]:
    return documents(project, request.param)[0]


@pytest.fixture(scope="module")
def service(project: Path) -> dict[str, Any]:
    return documents(project, "rayservice.yaml")[0]


@pytest.fixture(scope="module")
def served(service: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return loaded


def seconds_of_prestop(container: dict[str, Any]) -> tuple[int, int]:
    """What Ray is told is left, and how long the pod then waits."""
    script = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    told, slept = re.search(r"--deadline-remaining-seconds (\d+)", script), re.search(r"sleep (\d+)$", script)
    assert told and slept
    return int(told[1]), int(slept[1])


# ------------------------------------------------------------------------------------------- the fields we use
def test_it_uses_only_fields_that_were_checked(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "ray.io/v1"
    assert list(strange(manifest["spec"], SPECS[manifest["kind"]], "spec")) == []
    assert {"headGroupSpec", "workerGroupSpecs", "rayVersion"} <= set(cluster_of(manifest))


def test_a_misspelt_field_would_be_found(service: dict[str, Any]) -> None:
    spec = yaml.safe_load(yaml.safe_dump(service["spec"]))
    spec["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    spec["rayClusterConfig"]["authOptions"]["mode"] = "tokens"
    spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["container"] = []
    spec["excludeHeadPodFromServeSvc"] = "true"
    found = " ".join(strange(spec, SPECS["RayService"], "spec"))
    assert all(name in found for name in ("minReplica", "'tokens'", "spec.container", "excludeHeadPodFromServeSvc"))


def test_its_ray_is_the_pinned_one_with_token_and_fault_tolerance(manifest: dict[str, Any], project: Path) -> None:
    cluster = cluster_of(manifest)
    pinned = re.search(r"^ray==(.+)$", (project / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned and cluster["rayVersion"] == pinned[1]
    assert cluster["authOptions"] == {"mode": "token"}
    redis = {document["kind"]: document for document in documents(project, "redis.yaml")}
    port = redis["Service"]["spec"]["ports"][0]["port"]
    options = cluster["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == f"redis://{redis['Service']['metadata']['name']}:{port}"
    its_password = redis["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["env"][0]
    assert options["redisPassword"]["valueFrom"] == its_password["valueFrom"]


# ------------------------------------------------------------------------------------------- pods
def test_no_pod_runs_as_root_or_may_gain_rights(manifest: dict[str, Any], project: Path) -> None:
    uid, gid = user_of(project / "deploy" / "Dockerfile")
    for role, pod in pods(manifest):
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True, role
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (uid, gid, gid)
        for container in pod["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_every_container_has_our_image_requests_and_a_memory_limit(manifest: dict[str, Any], project: Path) -> None:
    variants = {i.stage.removeprefix("torch-") for i in read_dockerfile(project / "deploy" / "Dockerfile")}
    images = {container["image"] for _, pod in pods(manifest) for container in pod["spec"]["containers"]}
    assert len(images) == 1, "head, workers and submitter must have the same packages"
    name, tag = images.pop().split(":")
    assert name == "blockcast" and tag in variants
    for _, pod in pods(manifest):
        for container in pod["spec"]["containers"]:
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]) and "memory" in resources["limits"]
            gpus = [resources[kind].get("nvidia.com/gpu") for kind in ("requests", "limits")]
            assert gpus[0] == gpus[1], "a GPU cannot be requested without being the limit"


def test_head_and_workers_are_probed_and_mount_what_is_there(manifest: dict[str, Any], project: Path) -> None:
    claims = {document["metadata"]["name"] for document in documents(project, "storage.yaml")}
    for role, pod in pods(manifest):
        if role == "submitter":
            continue
        container = pod["spec"]["containers"][0]
        assert container["livenessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}
        assert "httpGet" in container["readinessProbe"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] in claims


def test_its_environment_is_read_by_the_code_and_its_files_are_in_the_image(
    manifest: dict[str, Any], project: Path
) -> None:
    folders = ("model", "actors", "pipelines")
    code = "".join(path.read_text(encoding="utf-8") for name in folders for path in (project / name).rglob("*.py"))
    workdir = next(i.rest for i in read_dockerfile(project / "deploy" / "Dockerfile") if i.keyword == "WORKDIR")
    for _, pod in pods(manifest):
        for variable in pod["spec"]["containers"][0].get("env", []):
            assert variable["name"] in code or variable["name"] in ("HF_HOME", "HF_TOKEN"), variable
            value = variable.get("value", "")
            if value.startswith(f"{workdir}/"):
                assert (project / value.removeprefix(f"{workdir}/")).is_file(), value


def test_no_secret_is_written_down_and_each_is_documented(project: Path) -> None:
    page = (project / "docs" / "serving.md").read_text(encoding="utf-8")
    for path in sorted((project / "deploy" / "kubernetes").iterdir()):
        text = path.read_text(encoding="utf-8")
        assert all(document["kind"] != "Secret" for document in yaml.safe_load_all(text))
        for name, key in re.findall(r"secretKeyRef: \{name: ([\w-]+), key: ([\w-]+)", text):
            assert re.search(rf"\| `{name}`[^|]*\| `{key}` \|", page), (path.name, name)
            assert name in ("blockcast-hf",) or f"create secret generic {name} --from-literal={key}=" in (
                text + (project / "deploy/kubernetes/rayservice.yaml").read_text(encoding="utf-8")
            )


# ------------------------------------------------------------------------------------------- the service and the job
def test_the_service_serves_what_serve_yaml_serves_but_to_everyone(served: dict[str, Any], project: Path) -> None:
    committed = yaml.safe_load((project / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
    assert served == {**committed, "http_options": {**committed["http_options"], "host": "0.0.0.0"}}


def test_the_service_is_accepted_with_the_keys_of_its_pods_and_refused_without(
    service: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(service["spec"]["serveConfigV2"], encoding="utf-8")
    monkeypatch.delenv("BLOCKCAST_API_KEYS", raising=False)
    with pytest.raises(UserError, match=r"0\.0\.0\.0"):
        check_config(path)
    monkeypatch.setenv("BLOCKCAST_API_KEYS", "key")
    check_config(path)
    for role, pod in pods(service):
        names = {variable["name"] for variable in pod["spec"]["containers"][0]["env"]}
        assert "BLOCKCAST_API_KEYS" in names, role


def test_open_answers_have_time_to_end(service: dict[str, Any], served: dict[str, Any]) -> None:
    drain_s = served["applications"][0]["args"]["drain_s"]
    worker = cluster_of(service)["workerGroupSpecs"][0]["template"]["spec"]
    told, slept = seconds_of_prestop(worker["containers"][0])
    assert drain_s < told == slept < worker["terminationGracePeriodSeconds"]
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > drain_s


def test_every_prestop_command_is_one_that_ray_has(manifest: dict[str, Any]) -> None:
    from click.testing import CliRunner
    from ray.scripts.scripts import cli

    for _, pod in pods(manifest):
        if "lifecycle" in pod["spec"]["containers"][0]:
            script = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
            words = shlex.split(script.split(";")[0])
            options = [word for word in words if word.startswith("--")]
            told = CliRunner().invoke(cli, [words[1], "--help"]).output
            assert words[0] == "ray" and options and all(option in told for option in options)
            assert words[words.index("--reason") + 1] in told


def test_an_engine_fits_its_pod_and_there_are_pods_for_every_replica(
    service: dict[str, Any], served: dict[str, Any]
) -> None:
    args = served["applications"][0]["args"]
    group = cluster_of(service)["workerGroupSpecs"][0]
    asked = group["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert float(asked["cpu"]) >= args["cpus_per_replica"]
    assert float(asked["nvidia.com/gpu"]) == args["gpus_per_replica"]
    surge = {
        deployment["name"]: deployment["max_surge_percent"] for deployment in served["applications"][0]["deployments"]
    }
    beside = math.ceil(args["max_replicas"] * surge[REPLICA] / 100)
    assert (group["minReplicas"], group["maxReplicas"]) == (args["min_replicas"], args["max_replicas"] + beside)


def test_the_disruption_budget_covers_the_engine_pods(project: Path, service: dict[str, Any]) -> None:
    budget = documents(project, "rayservice.yaml")[1]
    assert (budget["apiVersion"], budget["kind"]) == ("policy/v1", "PodDisruptionBudget")
    assert isinstance(budget["spec"]["minAvailable"], int), "nothing else works for pods of a custom resource"
    wanted = budget["spec"]["selector"]["matchLabels"].items()
    labels = {role: pod["metadata"]["labels"].items() for role, pod in pods(service)}
    assert wanted <= labels["worker"] and not wanted <= labels["head"]


def test_the_job_runs_a_job_of_ours_on_the_gpus_of_its_recipe(project: Path) -> None:
    job = documents(project, "rayjob.yaml")[0]
    interpreter, script = job["spec"]["entrypoint"].split()
    assert interpreter == "python" and (project / script).is_file()
    group = cluster_of(job)["workerGroupSpecs"][0]
    container = group["template"]["spec"]["containers"][0]
    environment = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    recipe = yaml.safe_load((project / environment["BLOCKCAST_CONFIG"].removeprefix("/app/")).read_text("utf-8"))
    asked = container["resources"]["requests"]
    assert group["minReplicas"] * int(asked["nvidia.com/gpu"]) == recipe["train"]["workers"]
    workers_a_pod = int(asked["nvidia.com/gpu"])
    assert int(asked["cpu"]) >= workers_a_pod * recipe["train"]["cpus_per_worker"]
    assert environment["BLOCKCAST_STORAGE"].startswith("s3://")
