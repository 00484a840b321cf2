"""Replicas come with the backlog and go without it, down to none, and nobody who asks notices."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.scaling.conftest import App, Load, Stream, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LONG = 8000


def test_replicas_follow_the_backlog_up_and_down_to_none_and_no_request_is_lost(app: App, slow_model: Path) -> None:
    delays = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "idle_delay_s": 3, "report_s": 0.25}
    scaling = {"target_backlog_tokens": 100_000, **delays}
    app.deploy(slow_model, min_replicas=0, max_replicas=2, engine={"max_rows": 8}, scaling=scaling)
    streams = [Stream(app, LONG) for _ in range(2)]
    load = Load(app, clients=60, count=300)
    wait_until(lambda: app.running() == 2, "a second replica under load")
    streams += [Stream(app, LONG // 2) for _ in range(2)]
    wait_until(lambda: all(stream.text for stream in streams), "streams on both replicas")
    load.check()
    wait_until(lambda: app.running() == 1, "one replica less without the load")
    assert any(stream.open for stream in streams), "it was taken away while streams were open"
    for stream in streams:
        stream.check()

    wait_until(lambda: not app.states(), "no replica while nobody asks")
    for _ in range(5):
        assert httpx.get(f"{app.url}/ready", timeout=20).status_code == 200
        assert httpx.get(f"{app.url}/v1/models", timeout=20).status_code == 200
    assert not app.states(), "probes wake nobody"
    for stream in [Stream(app, 20) for _ in range(3)]:
        stream.check()
    assert app.running() == 1
