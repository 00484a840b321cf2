"""The faults: how each is done to a running service, and when the service is whole again."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from model.errors import JobError
from pipelines.benches.serving.load import Load, wait_for
from pipelines.benches.serving.tally import Fault, Tally
from tests.faults.serving import CLIENTS, REPLICAS, Rig, serve_args

WARM, AFTER = 8, 8  # right answers before a fault, and after it is over
WHOLE_S, ANSWER_S = 150.0, 90.0
REDEPLOY_S = 240.0
FULL_ANSWERS, DOWN_ANSWERS = 30, 10  # right answers while the disk is full, while the control store is down
CHUNK = 2**20


@dataclass(frozen=True)
class Struck:
    """What a fault left behind. pids: processes that must go; since: from when on (time.monotonic()) a right answer
    shows that the service got over it.
    """

    pids: list[int]
    since: float


Inject = Callable[[Rig, Load], Struck]


@dataclass(frozen=True)
class Scenario:
    """inject: does it. often: times at length; quick: whether once is part of
    `make test`. cuts_connections: whether clients are connected to what is killed. noticed: whether Serve must find an
    engine unhealthy. needs: None, "redis" or "disk".
    """

    name: str
    inject: Inject
    often: int
    quick: bool = True
    cuts_connections: bool = False
    noticed: bool = False
    needs: str | None = None

    def missing(self, rig: Rig) -> str | None:
        """Why this cannot be done here."""
        if self.needs == "redis" and rig.redis is None:
            return "there is no redis-server"
        if self.needs == "disk" and rig.disk is None:
            return "mounting a small filesystem needs root, and leave to"
        return None


def kill_replica(rig: Rig, load: Load) -> Struck:
    return kill([rig.random.choice(rig.service.processes("replica"))])


def kill_gateway(rig: Rig, load: Load) -> Struck:
    return kill(rig.service.processes("gateway"))


def kill_proxy(rig: Rig, load: Load) -> Struck:
    return kill(rig.service.processes("proxy"))


def stop_replica(rig: Rig, load: Load) -> Struck:
    process = rig.random.choice(rig.service.processes("replica"))
    process.suspend()
    return Struck([process.pid], time.monotonic())


def kill_engine_thread(rig: Rig, load: Load) -> Struck:
    return Struck([int(rig.service.tell("call", method="kill_engine_thread"))], time.monotonic())


def stick_engine(rig: Rig, load: Load) -> Struck:
    return Struck([int(rig.service.tell("call", method="stick_engine"))], time.monotonic())


def kill_controller(rig: Rig, load: Load) -> Struck:
    gone = [process.pid for process in rig.service.processes("controller")]
    rig.service.tell("kill_controller")
    return Struck(gone, time.monotonic())


def redeploy(rig: Rig, load: Load) -> Struck:
    """Another number of rows: every replica is replaced."""
    since = time.monotonic()
    gone = [process.pid for process in rig.service.processes("replica")]
    rig.rows = 5 if rig.rows == 4 else 4
    rig.service.tell("redeploy", args=serve_args(rig.model, engine={"max_rows": rig.rows}), timeout_s=REDEPLOY_S)
    return Struck(gone, since)


def fill_disk(rig: Rig, load: Load) -> Struck:
    """Not a byte is left where Ray keeps its logs and sockets, while answers go on."""
    assert rig.disk is not None
    with no_space(rig.disk):
        since = time.monotonic()
        load.await_right(FULL_ANSWERS, since, ANSWER_S)
    return Struck([], since)


def kill_replica_on_a_full_disk(rig: Rig, load: Load) -> Struck:
    """One replica goes while no new one can write its logs; it is replaced at the latest when there is space again."""
    assert rig.disk is not None
    with no_space(rig.disk):
        struck = kill_replica(rig, load)
        load.await_right(FULL_ANSWERS, struck.since, ANSWER_S)
    return struck


def restart_gcs(rig: Rig, load: Load) -> Struck:
    """Kill Ray's control store; answers go on without it; start it again as it was: what it knew is in Redis."""
    process = rig.service.processes("gcs")[0] if not rig.gcs else psutil.Process(rig.gcs[-1].pid)
    command, environment = process.cmdline(), process.environ()
    process.kill()
    since = time.monotonic()
    if rig.gcs:
        rig.gcs[-1].wait()
    load.await_right(DOWN_ANSWERS, since, ANSWER_S)
    quiet = subprocess.DEVNULL
    rig.gcs.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True))
    return Struck([process.pid], since)


SCENARIOS = (
    Scenario("SIGKILL of an engine replica", kill_replica, 20),
    Scenario("engine thread killed", kill_engine_thread, 3, noticed=True),
    Scenario("engine stuck in a forward", stick_engine, 3, noticed=True),
    Scenario("replica process stopped (SIGSTOP)", stop_replica, 2, quick=False),
    Scenario("Serve controller killed", kill_controller, 3),
    Scenario("redeployed with another configuration", redeploy, 2),
    Scenario("disk full", fill_disk, 1, needs="disk"),
    Scenario("SIGKILL of an engine replica, disk full", kill_replica_on_a_full_disk, 1, quick=False, needs="disk"),
    Scenario("GCS killed and restarted, Redis behind it", restart_gcs, 3, needs="redis"),
    Scenario("SIGKILL of the gateway", kill_gateway, 3, quick=False, cuts_connections=True),
    Scenario("SIGKILL of the Serve proxy", kill_proxy, 2, cuts_connections=True),
)


@dataclass
class Report:
    """What became of the load, in seconds from each fault. unhealthy: until Serve no longer counted the replica with
    the broken engine among those that run, where it must notice by itself. answered: to the first right answer to a
    request that began after it. whole: until as much ran again as before, beside what was broken if that had not ended.
    """

    scenario: Scenario
    unhealthy: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    tally: Tally | None = None


def befall(rig: Rig, scenario: Scenario, times: int) -> Report:
    """Let the fault happen so often under one load, each time when the service is whole and answers."""
    report = Report(scenario)
    with rig.load() as load:
        for _ in range(times):
            rig.settle()
            load.await_right(WARM, time.monotonic(), ANSWER_S)
            wait_for(lambda: is_busy(load), "requests to be under way", ANSWER_S, poll_s=0.002)
            _one(rig, load, report)
        load.await_right(AFTER, time.monotonic(), ANSWER_S)
    report.tally = Tally.of(load.records, report.faults, cuts_connections=scenario.cuts_connections)
    return report


def is_busy(load: Load) -> bool:
    """Whether a fault would meet something: half of the clients wait for an answer, and one is in the middle of it."""
    return len(load.running) >= CLIENTS // 2 and any(record.first for record in list(load.running))


def _one(rig: Rig, load: Load, report: Report) -> None:
    at = time.monotonic()
    struck = report.scenario.inject(rig, load)
    try:
        first = load.await_right(1, struck.since, ANSWER_S)[0]
        service = rig.service
        if report.scenario.noticed:
            wait_for(lambda: service.running() < REPLICAS, "Serve to notice", WHOLE_S, poll_s=0.05)
            report.unhealthy.append(time.monotonic() - struck.since)
        wait_for(lambda: service.whole(REPLICAS, struck.pids), "the service to be whole", WHOLE_S, poll_s=0.1)
        over = time.monotonic()
        wait_for(lambda: not alive(struck.pids), "what is broken to be ended", WHOLE_S)
    except JobError as error:
        raise JobError(f"{report.scenario.name}: {error} So far: {Tally.of(load.records).line()}.") from error
    report.answered.append(first.ended - struck.since)
    report.whole.append(over - struck.since)
    report.faults.append(Fault(at, max(over, first.ended)))


def kill(processes: list[psutil.Process]) -> Struck:
    """SIGKILL."""
    assert processes, "there is nothing to kill"
    for process in processes:
        process.kill()
    return Struck([process.pid for process in processes], time.monotonic())


def alive(pids: list[int]) -> bool:
    """Whether any of them still runs."""
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            continue
    return False


@contextmanager
def no_space(disk: Path) -> Iterator[None]:
    """A file takes whatever the disk has left."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            fill(file.write)
            yield
    finally:
        filler.unlink()


def fill(write: Callable[[bytes], int | None]) -> None:
    """Write until nothing more goes in, at last byte by byte."""
    size = CHUNK
    while size:
        try:
            write(b"\0" * size)
        except OSError:
            size //= 2
