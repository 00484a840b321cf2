"""Fixtures every room shares: the shared data folder, tiny models, one local Ray for the whole pytest process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch, ray or transformers are imported anywhere: two cores, no network, no authentication surprises.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "BLOCKCAST_CONFIG", "BLOCKCAST_STORAGE"):
    os.environ.pop(name, None)

import pytest
import torch

from tests.tiny import build_tiny_model

if TYPE_CHECKING:
    from model.backbone import Backbone
    from tests.training_runs import TrainingRun

PROJECT = Path(__file__).resolve().parent.parent
OBJECT_STORE_BYTES = 200_000_000
SERVE_NOBODY = ("model", "actors", "golden")  # folders here


def shared_folder() -> Path:
    """The folder of shared test data: BLOCKCAST_SHARED, else ../shared beside the project."""
    return Path(os.environ.get("BLOCKCAST_SHARED") or PROJECT.parent / "shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--at-length", action="store_true", help="faults of serving: each many times, not once")


@pytest.fixture(scope="session")
def at_length(request: pytest.FixtureRequest) -> bool:
    """Whether what takes minutes is wanted too."""
    return bool(request.config.getoption("--at-length"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        room = item.path.relative_to(PROJECT / "tests").parts[0]
        fast_but_for_ray = "local_ray" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("slow")
        if room in SERVE_NOBODY or fast_but_for_ray:
            item.add_marker(pytest.mark.beside)
        if fast_but_for_ray:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch with one thread while a test runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def project() -> Path:
    """The root of the checkout."""
    return PROJECT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared data folder; absent, the test is skipped, but fails where CI=true."""
    folder = shared_folder()
    if not folder.is_dir():
        reason = "the shared data folder is absent: set BLOCKCAST_SHARED to it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder.resolve()


@pytest.fixture(scope="session")
def golden_model(shared: Path) -> Path:
    """The tiny Qwen2 model on which the published reference's outputs were recorded."""
    return shared / "golden" / "fast_dllm_v2" / "model"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama folder, not adapted (AR only). Do not write into it."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_adapted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a "block_diffusion" entry: block 8, sub-block 4, mask token `<|spare_0|>` (3)."""
    entry = {"block_size": 8, "mask_token_id": 3, "sub_block_size": 4}
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny_adapted", block_diffusion=entry)


@pytest.fixture(scope="session")
def tower_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny towers in one folder, the denoiser and its time conditioning moved away from the context tower."""
    from tests.towers import build_tower_folder

    return build_tower_folder(tmp_path_factory.mktemp("models") / "towers")


@pytest.fixture(scope="session")
def sharp_backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """A loaded tiny adapted Llama (block 8, sub-block 4) whose confidences are spread; for decoding tests."""
    from tests.decoding import sharp_backbone

    return sharp_backbone(tmp_path_factory.mktemp("models") / "sharp")


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One Ray for the whole pytest process, two CPUs, no dashboard; jobs called in this process find it initialised."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def training_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packed rows that tiny_model can learn from; see tests.training_runs."""
    from tests.training_runs import write_training_rows

    return write_training_rows(tmp_path_factory.mktemp("training") / "rows")


@pytest.fixture(scope="session")
def uninterrupted(
    local_ray: None, tiny_model: Path, training_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainingRun:
    """A whole training run on one worker with nothing in the way."""
    from tests.training_runs import adapt, arguments

    output = tmp_path_factory.mktemp("training") / "uninterrupted"
    return adapt(arguments(tiny_model, training_rows, output), output)
