import json
import logging
from pathlib import Path

import pytest

from rlix.monitor.records import Checkpoint, PoolDevice, load_run
from rlix.protocol.errors import SpecError
from tests.monitor.synthetic import T0, job_event, pool, span, write_run


def test_reads_every_kind_of_line(tmp_path: Path) -> None:
    lease = {
        "type": "lease", "event": "granted", "epoch": 7, "cluster": "actor_train", "phase": "actor_training",
        "devices": [0, 1], "time": T0 + 1, "reason": None, "waited_s": 0.25,
    }  # fmt: skip
    checkpoint = {"type": "checkpoint", "step": 2, "path": "checkpoints/step_2", "time": T0 + 4}
    folder = write_run(
        tmp_path / "folder",
        spec="name: my_job\nsteps: 3\n",
        events=[pool(2), job_event("started", 0), lease, span(1, 2, 3, step=1), checkpoint, {"type": "news", "x": 1}],
        metrics=[{"step": 0, "time": T0 + 3, "reward": 0.5, "kl": None, "loss": float("nan"), "note": "x"}],
    )
    run = load_run(folder)
    assert run.name == "my_job"
    assert run.devices == (PoolDevice(0, "127.0.0.1", "cpu"), PoolDevice(1, "127.0.0.1", "cpu"))
    assert run.leases[0].devices == (0, 1)
    assert run.leases[0].waited_s == 0.25
    assert (run.spans[0].device, run.spans[0].start, run.spans[0].step) == (1, T0 + 2, 1)
    assert run.checkpoints == (Checkpoint(2, "checkpoints/step_2", T0 + 4),)
    assert run.metrics == ({"step": 0.0, "time": T0 + 3, "reward": 0.5},)
    assert run.state == "unfinished"
    assert run.sessions == ((T0, T0 + 3),)


def test_a_torn_last_line_is_dropped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_run(tmp_path / "run", events=[job_event("started", 0)], metrics=[{"step": 0, "time": T0}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rew')
    with caplog.at_level(logging.WARNING):
        assert [row["step"] for row in load_run(folder).metrics] == [0]
    assert "metrics.jsonl:2" in caplog.text


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{oops}", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        (json.dumps({"type": "span", "device": 0}), "'cluster' is missing"),
        (json.dumps({"type": "job", "event": "started", "time": "noon"}), "could not convert"),
        (json.dumps({"type": "job", "event": "started", "time": 10**400}), "too large"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    folder = write_run(tmp_path / "run", metrics=[])
    (folder / "events.jsonl").write_text(json.dumps(job_event("started", 0)) + f"\n{line}\n\n")
    with pytest.raises(SpecError, match=complaint) as caught:
        load_run(folder)
    assert "events.jsonl:2" in str(caught.value)


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such folder"):
        load_run(tmp_path / "missing")
    with pytest.raises(SpecError, match="not a run folder"):
        load_run(tmp_path)


def test_steps_done_again_after_a_resume_count_once(tmp_path: Path) -> None:
    rows = [
        {"step": s, "time": T0 + t, "reward": r} for s, t, r in [(0, 1, 0.0), (1, 2, 0.1), (1, 12, 0.2), (2, 13, 0.3)]
    ]
    events = [job_event("started", 0), job_event("stopped", 3), job_event("started", 10), job_event("finished", 14)]
    run = load_run(write_run(tmp_path / "run", events=events, metrics=rows))
    assert [row["reward"] for row in run.metrics] == [0.0, 0.2, 0.3]
    assert run.sessions == ((T0, T0 + 3), (T0 + 10, T0 + 14))
    assert run.state == "finished"


def test_a_killed_session_ends_with_what_it_wrote_last(tmp_path: Path) -> None:
    events = [job_event("started", 0), span(0, 1, 4), job_event("started", 100), span(0, 101, 102)]
    run = load_run(write_run(tmp_path / "run", events=events))
    assert run.sessions == ((T0, T0 + 4), (T0 + 100, T0 + 102))
