"""Folders of a TwoTower model; which form of it, the `model` fixture of each module says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from model.two_tower.folder import TwoTowerModel, save_two_tower
from tests.tiny import build_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base") / "model", initializer_range=0.3)


@pytest.fixture(scope="module")
def saved(model: TwoTowerModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "towers"
    save_two_tower(model, folder, context=True)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "towers"))
