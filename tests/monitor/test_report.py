import json
import re
import shutil
from pathlib import Path

from rich.console import Console

from rlix.monitor.report import Report, build_report, page_data, render_html, summary, write_report
from rlix.monitor.tables import duration, render_text
from rlix.monitor.trace import JOB_PROCESS_OFFSET, trace_events, write_trace
from tests.monitor.synthetic import demo_runs, job_event, pool, span, write_run


def embedded(page: str) -> dict[str, object]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data: dict[str, object] = json.loads(match[1])
    return data


def test_page_is_self_contained_and_holds_everything(tmp_path: Path) -> None:
    report = build_report(demo_runs(tmp_path, steps=10))
    page = write_report(report, tmp_path / "deep" / "report.html").read_text()
    assert not re.search(
        r"(src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)", page
    )
    for word in ("sort_digits", "copy_digits", "virtual GPUs", "Sharing against a fixed split", "split 2 + 2"):
        assert word in page
    data = embedded(page)
    assert isinstance(data["spans"], list)
    assert len(data["spans"]) == sum(len(record.spans) for record in report.records)
    rewards = [job["metrics"]["reward"] for job in data["jobs"]]  # type: ignore[attr-defined]
    assert [len(values) for values in rewards] == [10, 10]


def test_virtual_gpus_of_no_declared_speed_are_compared_with_nothing(tmp_path: Path) -> None:
    """They compete for the machine's cores, so no time on them is one of devices."""
    folders = demo_runs(tmp_path, steps=10)
    for folder in folders:
        (folder / "spec.yaml").write_text(f"name: {folder.name}\n")
    report = build_report(folders)
    page = render_html(report)
    assert "split" not in page.split("<script", 1)[0]
    assert "say nothing of GPUs" in page
    assert summary(report)["split_estimate"] is None


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    spec = "name: '</script><script>alert(1)</script>'\n"
    folder = write_run(tmp_path / "run", spec=spec, events=[pool(1), job_event("started", 0), span(0, 0, 1)])
    page = render_html(build_report([folder]))
    assert "<script>alert" not in page
    assert embedded(page)["jobs"][0]["name"] == "</script><script>alert(1)</script>"  # type: ignore[index]


def test_an_empty_run_still_makes_a_report(tmp_path: Path) -> None:
    report = build_report([write_run(tmp_path / "run", events=[], metrics=[])])
    assert "0 devices" in render_html(report)
    json.dumps(summary(report), allow_nan=False)


def test_the_adapters_of_a_job_have_a_table_and_curves(tmp_path: Path) -> None:
    (folder, *_) = demo_runs(tmp_path, steps=6)
    shutil.copytree(folder, folder / "runs" / "a", ignore=lambda _, names: [n for n in names if n == "runs"])
    rows = [{"step": i, "tokens": 600, "gang_s": 45.0, "gang_wait_s": 0.5, "staleness": i} for i in range(3)]
    write_run(folder / "runs" / "c", events=[], metrics=rows)
    failed = [{"type": "job", "time": 1.0, "event": "failed", "detail": "no such data"}]
    write_run(folder / "runs" / "b", events=failed, metrics=[])  # before its first step
    report = build_report([folder])
    assert [run.name for run in report.runs] == [f"{folder.name}/{name}" for name in "abc"]
    assert report.tables[2].rows[2][1:] == ("1,800", "2 min 15 s", "1.5 s", "1.00")
    assert [use["gang_wait_s"] for use in summary(report)["adapters"]] == [0.0, 0.0, 1.5]
    assert [row[:3] for row in report.tables[1].rows] == [
        (f"{folder.name}/a", report.runs[0].state, "6"),
        (f"{folder.name}/b", "failed", "0"),
        (f"{folder.name}/c", "unfinished", "3"),
    ]
    assert [run["name"] for run in page_data(report)["runs"]] == [run.name for run in report.runs]
    assert f"{folder.name}/b" in render_html(report)


def text_of(report: Report) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render_text(report.tables))
    return capture.get()


def test_text_and_page_show_the_same_cells(tmp_path: Path) -> None:
    report = build_report(demo_runs(tmp_path, steps=10))
    text, page = text_of(report), render_html(report)
    for table in report.tables:
        for row in (*table.rows, *table.footer):
            for cell in row:
                assert cell in text
                assert f">{cell}<" in page


def test_summary_is_plain_json(tmp_path: Path) -> None:
    found = json.loads(json.dumps(summary(build_report(demo_runs(tmp_path, steps=10))), allow_nan=False))
    assert found["split_estimate"]["jobs"][0]["devices"] == 2
    assert {"busy_s", "switching_s", "held_s", "free_s", "idle_s"} <= set(found["devices"][0])
    assert 0 < found["contended"]["idle_share"] < 1


def test_trace_has_a_process_per_device_and_a_track_per_job_and_phase(tmp_path: Path) -> None:
    report = build_report(demo_runs(tmp_path, steps=10))
    trace = json.loads(write_trace(report.records, tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names[0] == "device 0 (cpu, 127.0.0.1)"
    assert set(names) == {0, 1, 2, 3, JOB_PROCESS_OFFSET, JOB_PROCESS_OFFSET + 1}
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert "sort_digits: actor_training" in tracks.values()
    spans = [event for event in trace if event["ph"] == "X"]
    assert len(spans) == sum(len(record.spans) for record in report.records)
    assert all((event["pid"], event["tid"]) in tracks and event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    assert {event["name"] for event in trace if event["ph"] == "C"} == {"reward", "exact", "tokens_per_s"}


def test_trace_times_are_microseconds_since_the_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", events=[pool(1), job_event("started", 1), span(0, 2, 2.25)])
    (event,) = [e for e in trace_events(build_report([folder]).records) if e["ph"] == "X"]
    assert (event["ts"], event["dur"]) == (1e6, 0.25e6)


def test_duration() -> None:
    assert [duration(s) for s in (8.31, 59.0, 280.2, 11_130.0)] == ["8.3 s", "59.0 s", "4 min 40 s", "3 h 05 min"]
