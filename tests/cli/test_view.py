import threading
import time
from dataclasses import replace
from io import StringIO
from typing import cast

import pytest
from ray._private import worker as ray_worker
from rich.console import Console

from rlix.cli.pool import _let_ray_print
from rlix.cli.text import count, still
from rlix.cli.view import Snapshot, alarms, holdings, job_line, render, utilisation
from rlix.cli.watch import LogScreen
from rlix.monitor.waits import device_list
from rlix.pipeline.rollout.shares import Share
from rlix.protocol.messages import Cluster, ControlStatus, Demand, LeaseState, PipelineStatus, Process
from rlix.protocol.types import Phase
from tests.cli.fakes import control, job_status, lease


def drawn(snapshot: Snapshot, width: int = 110) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(render(snapshot))
    return console.export_text().splitlines()


def line_of(lines: list[str], word: str) -> str:
    return next(line for line in lines if line.lstrip().startswith(word))


def test_live_view_shows_every_job_and_device() -> None:
    status = control(
        lease(1, "ft_1", (0, 1), phase=Phase.ACTOR_TRAINING),
        lease(2, "ft_2", (2,), LeaseState.DRAINING),
        lease(3, "ft_1", (2,), LeaseState.PENDING, Phase.OLD_LOG_PROBS),
    )
    jobs = (
        job_status("sort", "ft_1", phase="actor_training", reward=0.4321, exact=0.25, tokens_per_s=1234.5),
        job_status("copy", "ft_2", step=7),
    )
    lines = drawn(Snapshot(jobs, status, 65.0, 0.5, notice="stopping", stalls=("copy waits",)))
    assert "0:01:05" in lines[0]
    assert "75 % of 4 devices in use, 50 % on average" in lines[0]
    sort = line_of(lines, "sort")
    for cell in ("3/10", "actor training", "0.432", "0.250", "1,234", "0–1"):
        assert cell in sort
    assert "7/10" in line_of(lines, "copy")
    assert "sort" in line_of(lines, "0 (cpu)")
    assert "actor training" in line_of(lines, "0 (cpu)")
    contested = line_of(lines, "2 (cpu)")
    assert contested.index("copy") < contested.index("rollout, giving way") < contested.index("sort old log probs")
    assert "free" in line_of(lines, "3 (cpu)")
    assert "copy waits" in lines[-2]
    assert "stopping" in lines[-1]


def test_a_gang_that_moved_says_from_where() -> None:
    """As one that came to two devices of its three at home, and a rollout's bundle, do not."""
    gang = Cluster("cluster", 1, (0, 1), ((2, 3),))
    narrow = Cluster("cluster", 1, (0, 1, 2), ((0, 1),))
    bundle = Cluster("cluster", 1, (0, 1, 2, 3), elastic=True)
    for cluster, devices, phase in (
        (gang, (2, 3), "actor training, moved from 0–1"),
        (gang, (0, 1), "actor training"),
        (narrow, (0, 1), "actor training"),
        (bundle, (3,), "rollout"),
    ):
        status = control(lease(1, "ft_1", devices, phase=Phase.ROLLOUT if cluster.elastic else Phase.ACTOR_TRAINING))
        status = replace(status, pipelines=(PipelineStatus("ft_1", (cluster,), (), Demand(0)),))
        line = line_of(drawn(Snapshot((job_status("sort", "ft_1"),), status, 1.0, None)), f"{devices[0]} (cpu)")
        assert line.split("sort")[1].strip() == phase


def test_what_jobs_do_is_cut_before_what_they_are_called() -> None:
    status = control(lease(1, "ft_1", (0,)), lease(2, "ft_2", (1,)))
    names = ("a-rather-long-name-of-a-job-of-the-vision-team", "another-name-that-says-what-the-job-is-about")
    phase = "waits to start: needs about 3.2 GB of memory, 1.1 GB are free, and two jobs are ahead of it"
    jobs = tuple(job_status(name, f"ft_{i + 1}", phase=phase, reward=0.5, exact=0.5) for i, name in enumerate(names))
    lines = drawn(Snapshot(jobs, status, 5.0, None), 120)
    for name in names:
        assert " wai" in line_of(lines, name)
    assert max(map(len, lines)) <= 120


def test_jobs_of_one_name_are_told_apart_by_their_ids() -> None:
    status = control(lease(1, "ft_1", (0,)), lease(2, "ft_2", (1,)), lease(3, "ft_3", (2,)))
    jobs = (job_status("sort", "ft_1", step=1), job_status("sort", "ft_2", step=2), job_status("copy", "ft_3"))
    snapshot = Snapshot(jobs, status, 1.0, None)
    lines = drawn(snapshot)
    assert "1/10" in line_of(lines, "sort (ft_1)") and "2/10" in line_of(lines, "sort (ft_2)")
    assert "sort (ft_2)" in line_of(lines, "1 (cpu)")
    assert "(ft_3)" not in line_of(lines, "copy")
    out = StringIO()
    LogScreen(Console(file=out, width=200)).show(snapshot)
    assert [line.split(": ")[0] for line in out.getvalue().splitlines()] == [
        f"0:00:01 {name}" for name in ("sort (ft_1)", "sort (ft_2)", "copy")
    ]


def test_a_single_look_says_no_average() -> None:
    lines = drawn(Snapshot((), control(lease(1, "ft_1", (0,))), 65.0, None))
    assert lines[0].rstrip().endswith("25 % of 4 devices in use")


def test_a_failed_job_is_shown_as_failed() -> None:
    lines = drawn(Snapshot((job_status(state="failed", phase="rollout"),), control(), 1.0, 0.0))
    assert "failed" in line_of(lines, "sort")


def test_runs_of_a_job_say_what_became_of_them_while_it_goes_on() -> None:
    runs = (
        job_status(
            "plain", step=4, phase="rollout", evaluation=0.75, tokens_per_s=99.0, staleness=0.5, share=Share(1024, 64)
        ),
        job_status("wide", state="failed", phase="failed", error="Traceback\n  somewhere\nValueError: no prompts"),
        job_status("later", state="stopped", phase="paused"),
    )
    lines = drawn(Snapshot((job_status("many", runs=runs),), control(), 1.0, 0.0))
    plain = line_of(lines, "plain")
    assert plain.split()[-5:] == ["0.750", "99", "1,024", "64", "0.5"]
    assert "failed" in line_of(lines, "wide")
    assert "paused" in line_of(lines, "later")
    assert lines[-1].strip() == "many: run wide failed: ValueError: no prompts"
    assert job_line(job_status("many", runs=runs), (), 1.0).endswith("plain 4/10, wide 3/10 failed, later 3/10 paused")


def test_nodes_are_named_where_there_are_several() -> None:
    status = control(devices=2)
    there = replace(status.devices[1], node_id="other", node_ip="10.0.0.2")
    two = replace(status, devices=(status.devices[0], there))
    assert "10.0.0.2" in line_of(drawn(Snapshot((), two, 1.0, 0.0)), "1 (cpu)")
    assert "127.0.0.1" not in line_of(drawn(Snapshot((), status, 1.0, 0.0)), "1 (cpu)")


def test_a_large_pool_is_cut_and_fits_a_narrow_terminal() -> None:
    lines = drawn(Snapshot((job_status(),), control(devices=100), 1.0, 0.0), width=80)
    assert "and 76 more" in line_of(lines, "and 76 more")
    assert max(map(len, lines)) <= 80


def test_pending_leases_hold_nothing_yet() -> None:
    status = control(
        lease(1, "a", (0,)), lease(2, "b", (1, 0), LeaseState.PENDING), lease(3, "a", (3,), LeaseState.DRAINING)
    )
    assert holdings(status) == {"a": (0, 3)}
    assert utilisation(status) == pytest.approx(0.5)
    assert utilisation(control(devices=0)) == 0.0


@pytest.mark.parametrize(
    ("devices", "text"), [((), "–"), ((4,), "4"), ((0, 1, 2), "0–2"), ((0, 1, 3, 5, 6), "0–1, 3, 5–6")]
)
def test_device_list(devices: tuple[int, ...], text: str) -> None:
    assert device_list(devices) == text


def test_count() -> None:
    assert [count(number, "job") for number in (0, 1, 2)] == ["no job", "1 job", "2 jobs"]


def test_job_line_says_what_is_known_and_nothing_else() -> None:
    full = job_status(phase="old_log_probs", reward=0.5, exact=0.25, tokens_per_s=1500.0)
    assert (
        job_line(full, (0, 1), 7.2)
        == "0:00:07 sort: running, step 3/10, old log probs, reward 0.500, exact 0.250, 1,500 tokens/s, devices 0–1"
    )
    failed = job_status(
        state="failed", phase="failed", error="Traceback\n  somewhere\n\x1b[36mValueError\x1b[39m: no\n"
    )
    assert job_line(failed, (), 3600.0) == "1:00:00 sort: failed, step 3/10, ValueError: no"
    attached = job_status("script", step=0, steps=0, phase="actor_training")
    assert job_line(attached, (2,), 7.2) == "0:00:07 script: running, actor training, devices 2"


def in_trouble() -> ControlStatus:
    gang = lease(1, "ft_1", (1, 2), LeaseState.QUARANTINED, Phase.ACTOR_TRAINING)
    gang = replace(gang, reason="it took too long; and device 2 is still locked by process 4711")
    stuck = tuple(Process("node", pid, 1) for pid in (4711, 4712))
    return replace(
        control(gang, lease(2, "job_2", (3,))),
        pipelines=(PipelineStatus("job_2", (), (), Demand(0), name="toy"),),
        granted_at={1: 0.0},
        holders={1: stuck, 2: tuple(Process("node", pid, 1) for pid in range(1, 6))},
        trouble="cannot write to the journal: disk full; nothing is granted",
    )


def test_who_holds_a_device_and_since_when_and_what_is_wrong() -> None:
    lines = drawn(Snapshot((job_status("sort", "ft_1"),), in_trouble(), 1.0, 0.0), width=160)
    held = line_of(lines, "2 (cpu)")
    since = time.strftime("%H:%M:%S", time.localtime(0.0))
    for cell in ("sort", "actor training, quarantined", since, "4711 +1"):
        assert cell in held
    assert "1 +4" in line_of(lines, "3 (cpu)")
    assert "toy" in line_of(lines, "3 (cpu)")  # a program that nobody launched
    assert any("cannot write to the journal: disk full" in line for line in lines)


def test_alarms_say_what_is_wrong_and_what_to_do() -> None:
    assert alarms(control(lease(1, "ft_1", (0,)))) == ()
    assert alarms(in_trouble()) == (
        "cannot write to the journal: disk full; nothing is granted",
        "devices 1–2 in quarantine, held by ft_1 (actor training, process 4711, 4712): it took too long; and device 2 "
        "is still locked by process 4711; see `rlix free --help`",
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_what_workers_print_has_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(ray_worker, "print_worker_logs", ray_worker.print_worker_logs)
    _let_ray_print(workers=True)
    file = StringIO()
    monkeypatch.setattr(file, "isatty", lambda: terminal)
    ray_worker.print_worker_logs({"pid": "4711", "actor_name": "Worker", "lines": ["said"], "ip": "a"}, file)
    assert ("\x1b[" in file.getvalue()) is terminal
    assert "(Worker pid=4711" in file.getvalue() and "said" in file.getvalue()


def test_what_takes_long_is_said_until_it_is_over() -> None:
    said = threading.Event()
    lines: list[str] = []

    class Screen:
        def print(self, line: str, **_: object) -> None:
            lines.append(line)
            said.set()

    with still(cast(Console, Screen()), "not ready", every_s=0.01):
        assert said.wait(300)
    assert lines[0].startswith("not ready (")
    assert not any(thread.name == "still" for thread in threading.enumerate())
