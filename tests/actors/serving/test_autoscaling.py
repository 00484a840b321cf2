"""The autoscaling policy in Serve's own wrapper (its delays, its bounds), over traces of load on a fake clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from actors.engine.backlog import BACKLOG
from actors.serve_args import ServeArgs
from actors.serving.autoscaling import STALE, autoscaling_config, replicas_for

TARGET = 1000.0
DEPLOYMENT = DeploymentID("EngineReplica", "app")
TICK_S = 0.5


def config(**bounds: Any) -> AutoscalingConfig:
    scaling = {"target_backlog_tokens": TARGET, "upscale_delay_s": 5, "downscale_delay_s": 60, "idle_delay_s": 120}
    args = {"model": "m", "min_replicas": 1, "max_replicas": 8, **bounds}
    return autoscaling_config(ServeArgs.model_validate({**args, "scaling": scaling}))


@dataclass
class Service:
    """A deployment under Serve's wrapped policy. start_s: a new replica's; silent: replicas that report nothing."""

    config: AutoscalingConfig
    start_s: float = 8.0
    now: float = 1000.0
    silent: set[int] = field(default_factory=set)
    changes: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = _apply_autoscaling_config(_resolve_policy_callable(self.config.policy))
        self.target = self.config.initial_replicas or self.config.min_replicas
        self.state: dict[str, Any] = {}
        self.born = [-math.inf] * self.target

    def context(self, backlog: float, requests: float) -> AutoscalingContext:
        running = [i for i, born in enumerate(self.born) if self.now - born >= self.start_s]
        ids = [ReplicaID(str(i), DEPLOYMENT) for i in running]
        reports = {
            name: [TimeStampedValue(self.now - 1, backlog / len(ids))]
            for i, name in zip(running, ids, strict=True)
            if i not in self.silent
        }
        return AutoscalingContext(
            deployment_id=DEPLOYMENT,
            deployment_name=DEPLOYMENT.name,
            app_name="app",
            current_num_replicas=len(ids),
            target_num_replicas=self.target,
            running_replicas=ids,
            total_num_requests=requests,
            total_queued_requests=0.0 if ids else requests,
            aggregated_metrics=None,
            raw_metrics={BACKLOG: reports},
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state=self.state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            config=self.config,
        )

    def run(self, seconds: float, load: Callable[[float], float]) -> list[int]:
        """Tick through a load in query tokens by time since the begin; returns the targets it went through."""
        begin, seen = self.now, [self.target]
        while self.now < begin + seconds:
            backlog = load(self.now - begin)
            decided, self.state = self.policy(self.context(backlog, requests=backlog / 100))
            decided = max(self.config.min_replicas, min(self.config.max_replicas, decided))
            self.born = [*self.born, *[self.now] * (decided - len(self.born))][:decided]
            if decided != self.target:
                self.target = decided
                self.changes.append((self.now - begin, decided))
                seen.append(decided)
            self.now += TICK_S
        return seen


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Service], None]:
    """Serve's delays read time.time(): they are to read the service's clock."""

    def follow(service: Service) -> None:
        monkeypatch.setattr("ray.serve.autoscaling_policy.time.time", lambda: service.now)

    return follow


# ------------------------------------------------------------------------------------------------- the rule itself
def test_replicas_are_added_when_the_backlog_is_above_what_they_may_have() -> None:
    assert replicas_for(1000, 1, target=TARGET, slack=0.3) == 1
    assert replicas_for(1001, 1, target=TARGET, slack=0.3) == 2
    assert replicas_for(7500, 2, target=TARGET, slack=0.3) == 8


def test_replicas_are_taken_away_only_when_the_rest_has_slack() -> None:
    assert replicas_for(900, 2, target=TARGET, slack=0.3) == 2, "one would be at 90%"
    assert replicas_for(700, 2, target=TARGET, slack=0.3) == 1
    assert replicas_for(0, 5, target=TARGET, slack=0.3) == 0


@given(st.integers(0, 20_000), st.integers(0, 20), st.floats(0, 0.9))
def test_a_decision_about_the_same_backlog_is_final(backlog: int, current: int, slack: float) -> None:
    decided = replicas_for(backlog, current, target=TARGET, slack=slack)
    assert decided * TARGET >= backlog
    assert replicas_for(backlog, decided, target=TARGET, slack=slack) == decided


# ------------------------------------------------------------------------------------------------- over time
def test_a_step_of_load_is_followed_by_one_change_up_and_one_down(fake_clock: Any) -> None:
    service = Service(config())
    fake_clock(service)
    assert service.run(300, lambda t: 3500 if 10 <= t < 150 else 100) == [1, 4, 1]
    (up, _), (down, _) = service.changes
    assert 15 <= up <= 16 and 210 <= down <= 211, "after the delays"


def test_a_load_at_a_replica_s_edge_does_not_make_it_come_and_go(fake_clock: Any) -> None:
    service = Service(config())
    fake_clock(service)
    assert service.run(2000, lambda t: 2000 + 150 * math.sin(t / 37)) == [1, 3]


def test_a_burst_shorter_than_the_delay_changes_nothing(fake_clock: Any) -> None:
    service = Service(config())
    fake_clock(service)
    assert service.run(120, lambda t: 5000 if t % 30 < 4 else 100) == [1]


def test_never_more_than_the_most_nor_fewer_than_the_fewest(fake_clock: Any) -> None:
    service = Service(config(min_replicas=2, max_replicas=3))
    fake_clock(service)
    assert service.run(400, lambda t: 50_000 if t < 100 else 0) == [2, 3, 2]


def test_a_replica_that_says_nothing_is_not_taken_for_an_idle_one(fake_clock: Any) -> None:
    service = Service(config(), silent={1})
    fake_clock(service)
    assert service.run(100, lambda t: 1500) == [1, 2]
    service.run(500, lambda t: 400)
    assert service.target == 2, "the other one may be busy"
    service.silent.clear()
    service.run(100, lambda t: 400)
    assert service.target == 1


def test_a_report_that_is_too_old_is_none(fake_clock: Any) -> None:
    service = Service(config(min_replicas=1))
    fake_clock(service)
    service.run(50, lambda t: 1500)
    context = service.context(0, 0)
    context.current_time = service.now + STALE * service.config.metrics_interval_s + 1
    decided, _ = _resolve_policy_callable(service.config.policy)(context)
    assert decided == 2


# ------------------------------------------------------------------------------------------------- to zero and back
def test_all_replicas_go_when_nobody_asks_and_the_first_request_starts_one(fake_clock: Any) -> None:
    service = Service(config(min_replicas=0))
    fake_clock(service)
    assert service.run(200, lambda t: 0) == [1, 0], "one starts to prove the model"
    assert service.run(100, lambda t: 100) == [0, 1], "at once"


def test_a_first_replica_that_starts_slower_than_idle_ones_go_is_waited_for(fake_clock: Any) -> None:
    service = Service(config(min_replicas=0), start_s=500)
    fake_clock(service)
    service.born = [service.now]
    assert service.run(1000, lambda t: 0) == [1, 0]
    assert service.changes[0][0] >= 500 + 120


def test_an_open_request_keeps_the_last_replica(fake_clock: Any) -> None:
    service = Service(config(min_replicas=0))
    fake_clock(service)
    assert service.run(1000, lambda t: 60) == [1]


def test_with_bounds_that_allow_it_a_deployment_starts_at_its_fewest() -> None:
    assert config(min_replicas=0).initial_replicas == 1
    assert config(min_replicas=2).initial_replicas is None
