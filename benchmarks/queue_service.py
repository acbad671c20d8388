"""The queue's service under load and under random death: `python -m benchmarks.queue_service [--kills N]`.

The service is real: process, HTTP, file, turns. There is no pool. Under load what was admitted runs for ever. For the
deaths jobs end in the moment in which they start: a shell takes the job's lock, writes its id into a file and
leaves a note, as the starter of a real job does. So every job must be in that file once, however often the service was
killed.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from rlix.protocol.errors import RlixError
from rlix.protocol.messages import ControlStatus, LeaseRecord
from rlix.scheduler.queue.jobs import Outcome
from rlix.serve.api.client import Client, UnreachableError, connect
from rlix.serve.api.models import JobView, Submission
from rlix.serve.queue.runner import Control, Is, Seen, Work

SPEC = "name: {name}\nclusters: {{actor_train: {{gpus: {gpus}}}}}\n"
RAN = "ran.txt"
DEVICES = 8
_START_S = 60.0


class EndlessRunner:
    """A pool on which jobs run for ever."""

    def devices(self) -> int:
        return DEVICES

    def control(self) -> Control:
        return Control()

    def leases(self, since: int) -> tuple[ControlStatus, Sequence[LeaseRecord]]:
        return ControlStatus((), (), ()), ()

    def start(self, work: Work) -> None: ...

    def look(self, works: Sequence[Work]) -> Mapping[int, Seen]:
        return {work.id: Seen(Is.RUNNING, f"ft_{work.id}", "rollout", 3, 200) for work in works}

    def stop(self, work: Work, why: str, *, now: bool) -> None: ...


class InstantRunner:
    """A pool on which a job has ended when it has started."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def devices(self) -> int:
        return DEVICES

    def control(self) -> Control:
        return Control()

    def leases(self, since: int) -> tuple[ControlStatus, Sequence[LeaseRecord]]:
        return ControlStatus((), (), ()), ()

    def start(self, work: Work) -> None:
        note = work.folder / f"note-{work.attempt}"
        script = f'test -e "{note}" || {{ echo {work.id} >> "{self._home / RAN}" && : > "{note}"; }}'
        subprocess.Popen(["flock", work.folder / "lock", "sh", "-c", script], start_new_session=True)

    def look(self, works: Sequence[Work]) -> Mapping[int, Seen]:
        ended = Seen(Is.ENDED, outcome=Outcome.FINISHED)
        return {
            work.id: ended if (work.folder / f"note-{work.attempt}").exists() else Seen(Is.ABSENT) for work in works
        }

    def stop(self, work: Work, why: str, *, now: bool) -> None:
        raise AssertionError("nothing runs long enough")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--serve", nargs=2, metavar=("HOME", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        _serve(Path(arguments.serve[0]), arguments.serve[1])
        return
    with TemporaryDirectory(prefix="rlix-queue-") as folder:
        found = {**load(Path(folder) / "load", arguments.jobs), **killed(Path(folder) / "killed", arguments.kills)}
    print(json.dumps(found, indent=2))


def _serve(home: Path, kind: str) -> None:
    from rlix.serve.service import ServeOptions, serve

    runner = InstantRunner(home) if kind == "instant" else EndlessRunner()
    serve(ServeOptions(home, home / "runs", port=0), runner)


class Served:
    """A service in a process of its own."""

    def __init__(self, home: Path, kind: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        (home / "serve.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.queue_service", "--serve", str(home), kind]
        here = Path(__file__).parent.parent
        environment = os.environ | {"RLIX_HOME": str(home)}
        self.process = subprocess.Popen(command, cwd=here, env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while not (home / "serve.json").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RlixError(f"the service did not start within {_START_S:g} s")
            time.sleep(0.01)

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


def load(home: Path, jobs: int) -> dict[str, float]:
    """`jobs` waiting jobs: how long submitting and explaining take, and how many status reads are answered."""
    served = Served(home, "endless")
    try:
        client, process = connect(home), psutil.Process(served.process.pid)
        before = process.memory_info().rss
        limits = (None, 600.0, 3600.0, 86400.0)
        asked = [
            Submission(spec=SPEC.format(name=f"j{n}", gpus=1 + n % DEVICES), limit_s=limits[n % 4]) for n in range(jobs)
        ]
        submit = [_timed(lambda one=one: client.post("/v1/jobs", JobView, one)) for one in asked]  # type: ignore[misc]
        ids = [job.id for job in client.jobs()]
        after = process.memory_info().rss
        explain = [_timed(lambda id=id: client.job(id)) for id in ids]  # type: ignore[misc]
        return {
            "jobs": jobs,
            "submit_p50_ms": _at(submit, 50),
            "submit_p99_ms": _at(submit, 99),
            "explain_p50_ms": _at(explain, 50),
            "explain_p99_ms": _at(explain, 99),
            "list_of_all_ms": 1000 * statistics.median(_timed(client.jobs) for _ in range(10)),
            **_reads(home, ids, process),
            "memory_mb": after / 1e6,
            "memory_per_job_kb": (after - before) / jobs / 1e3,
        }
    finally:
        served.end()


def _timed(what: Callable[[], object]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def _at(seconds: Sequence[float], percent: int) -> float:
    return round(1000 * statistics.quantiles(seconds, n=100)[percent - 1], 2)


def _reads(home: Path, ids: Sequence[int], process: psutil.Process, seconds: float = 5.0) -> dict[str, float]:
    """Of single jobs, by clients in processes of their own, each with a connection that stays."""
    counts, used = [], sum(process.cpu_times()[:2])
    with ProcessPoolExecutor(2) as clients:
        counts = list(clients.map(_read, [home] * 2, [ids] * 2, [seconds] * 2))
    used = sum(process.cpu_times()[:2]) - used
    return {
        "status_reads_per_s": round(sum(counts) / seconds),
        "status_reads_per_cpu_s_of_the_service": round(sum(counts) / used),
    }


def _read(home: Path, ids: Sequence[int], seconds: float) -> int:
    client, chosen, count = connect(home), random.Random(1), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        client.job(chosen.choice(ids))
        count += 1
    return count


def killed(home: Path, kills: int, seed: int = 1) -> dict[str, float]:
    """Jobs are submitted all the time while the service is killed at random moments."""
    chosen, over, known = random.Random(seed), threading.Event(), set()
    served = Served(home, "instant")

    def submit() -> None:
        number = 0
        while not over.is_set():
            number += 1
            known.add(_submitted(home, Submission(spec=SPEC.format(name=f"j{number}", gpus=1), key=uuid.uuid4().hex)))

    submitter = threading.Thread(target=submit)
    submitter.start()
    try:
        for _ in range(kills):
            time.sleep(chosen.uniform(0.0, 0.8))
            served.end(signal.SIGKILL)
            served = Served(home, "instant")
        over.set()
        submitter.join()
        client, deadline = connect(home), time.monotonic() + 120.0
        while client.jobs() and time.monotonic() < deadline:
            time.sleep(0.2)
        ran = Counter(int(line) for line in (home / RAN).read_text().split())
        return {
            "kills": kills,
            "submitted": len(known),
            "lost": len(known - ran.keys()),
            "run_twice": sum(count > 1 for count in ran.values()),
            "run_but_not_known": len(ran.keys() - known),
            "left_in_the_queue": len(client.jobs()),
        }
    finally:
        over.set()
        served.end()


def _submitted(home: Path, submission: Submission) -> int:
    """Its id, asked for until somebody answers."""
    while True:
        try:
            client: Client = connect(home)
            return client.post("/v1/jobs", JobView, submission).id
        except (UnreachableError, RlixError):
            time.sleep(0.05)


if __name__ == "__main__":
    main()
