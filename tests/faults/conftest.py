"""One served application for the folder: a fault that it does not get over fails the tests behind it too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.serving import Rig, rig


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("faults")) as running:
        yield running
