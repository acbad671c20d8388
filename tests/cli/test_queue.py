"""The queue's commands as users type them: against a real service, and once against a real pool."""

import contextlib
import io
import json
import re
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.queue_service import Served
from rlix.cli.main import app
from rlix.cli.queue import FOLLOW_TRIES, Wish, logs, submit_all
from rlix.cli.run_queued import Queue, follow
from rlix.cli.run_queued import served as runs_here
from rlix.cli.watch import Interrupts
from rlix.serve.api.client import UnreachableError, connect
from rlix.serve.api.models import JobView, TimelineView
from tests.cli.commands import JOB, Command
from tests.waiting import until

OWN = """
def length(prompt, completion, **rest):
    return float(len(completion))
"""


class Shell:
    """Commands in this process, as one user."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        monkeypatch.setenv("RLIX_HOME", str(folder / "home"))
        monkeypatch.delenv("RLIX_TOKEN", raising=False)
        monkeypatch.delenv("RLIX_SERVER", raising=False)
        monkeypatch.chdir(folder)

    def become(self, token: str) -> None:
        self._patch.setenv("RLIX_TOKEN", token)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == code, result.output
        return result.output

    def job(self, name: str, gpus: int) -> str:
        path = self.folder / f"{name}.yaml"
        path.write_text(JOB.format(name=name, steps=3, train=0).replace("{devices: [0]}", f"{{gpus: {gpus}}}"))
        return path.name


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, monkeypatch)


@pytest.fixture
def served(shell: Shell) -> Iterator[Served]:
    """Eight GPUs, on which jobs run for ever."""
    service = Served(shell.folder / "home", "endless")
    yield service
    service.end()


def test_a_queue_as_two_users_see_it(served: Served, shell: Shell) -> None:
    shell("submit", shell.job("first", 4), "--no-preemptible", "--hold")
    assert shell("explain", "1").startswith("first (1) is held by ")
    assert "must begin with a letter or a digit" in shell("user", "a b", code=2)
    assert "give a NAME, or --list" in shell("user", code=2)
    shell("user", "eve")
    assert "eve" in shell("user", "--list") and "eve" not in shell("user", "eve", "--remove")
    token = shell("user", "bob", "--team", "b").strip()
    assert shell("submit", shell.job("big", 8), shell.job("small", 2), "--time", "2h").split() == ["2", "3"]
    found = json.loads(shell("ps", "--json"))["jobs"]
    assert [(job["name"], job["gpus"], job["limit_s"]) for job in found] == [
        ("first", 4, None),
        ("big", 8, 7200.0),
        ("small", 2, 7200.0),
    ]
    assert "has no log so far: is held by" in shell("logs", "1")
    assert "there is no job 99" in shell("explain", "99", code=2) + shell("logs", "98", code=2)
    shell.become(token)
    assert "may read the log of it, or an admin; you are bob" in " ".join(shell("logs", "1", code=2).split())
    assert "may cancel it, or an admin; you are bob" in " ".join(shell("cancel", "1", code=2).split())
    assert "only an admin may add users" in shell("user", "eve", code=2)
    assert (
        shell("submit", "--dry-run", "--json", shell.job("mine", 4))
        and len(json.loads(shell("ps", "--json"))["jobs"]) == 3
    )
    assert shell("submit", shell.job("mine", 4)).strip() == "4"
    assert json.loads(shell("ps", "--mine", "--json"))["jobs"][0]["team"] == "b"
    shell("set-priority", "4", "--to", "high")
    text = shell("cancel", "99", "4", code=2)
    assert "there is no job 99" in text and re.search(r"mine \(4\) (cancelled|stops)", text), (
        "the others have their turn"
    )
    interrupts = Interrupts()
    interrupts.note(signal.SIGINT)  # before it has begun to watch
    client = connect(shell.folder / "home")
    told = io.StringIO()
    waiting = submit_all([shell.job("more", 8)], Wish())[1]
    (ended,) = follow(client, waiting, Console(file=told), interrupts)
    assert (ended.outcome, "cancelling" in told.getvalue()) == ("cancelled", True)
    assert "priority high by bob" in (told_of := shell("history", "4")) and "cancelled by bob\n" in told_of
    assert shell("usage", "--csv", "--since", "1d").startswith("job,name,owner,team,phase,given_s")


class Told(Queue):
    """A queue in which a job does one thing after another."""

    def __init__(self, *views: JobView | UnreachableError) -> None:
        self.views = list(views)

    def job(self, id: int) -> JobView:
        view = self.views.pop(0)
        if isinstance(view, UnreachableError):
            raise view
        return view

    def post(self, path: str, answer: type[JobView]) -> JobView:
        raise AssertionError(path)


def test_a_run_through_the_queue_says_why_it_waits_and_how_it_ended() -> None:
    waits = JobView(
        id=7, name="j", owner="ann", team="a", state="submitted", gpus=4, priority="normal", preemptible=True,
        limit_s=None, submitted_at=0.0, since=0.0, started_at=None, reason="needs 4 GPUs at once, 2 are free",
    )  # fmt: skip
    runs = waits.model_copy(update={"state": "running", "step": 1, "steps": 3, "reason": "rollout"})
    ended = waits.model_copy(update={"state": "ended", "outcome": "failed", "reason": "ValueError: no"})
    told, interrupts = io.StringIO(), Interrupts()
    interrupts.wake.set()  # it need not wait between two looks
    queue = Told(waits, UnreachableError("away"), runs, runs, ended)
    assert follow(queue, [waits], Console(file=told, width=200), interrupts) == [ended]
    assert told.getvalue().splitlines() == [
        "j (7): needs 4 GPUs at once, 2 are free",
        "j (7): runs: step 1/3, rollout",
        "j (7): failed: ValueError: no",
    ]


def test_who_runs_jobs_past_the_queue_asks_none(shell: Shell) -> None:
    (shell.folder / "home").mkdir()
    (shell.folder / "home" / "serve.json").write_text('{"url": "http://127.0.0.1:9"}')
    (shell.folder / "home" / "queue.token").write_text("token")
    assert not runs_here(), "nobody answers: it died"


def test_who_follows_a_log_finds_the_service_that_was_started_again(served: Served, shell: Shell) -> None:
    shell("submit", shell.job("one", 1), "--hold")
    log = shell.folder / "home" / "runs" / "1" / "one" / "job.log"
    log.parent.mkdir(parents=True)
    log.write_text("before\n")
    again: list[Served] = []

    def sleep(_: float) -> None:
        """When there is nothing more to read: it dies; another one, at another port, has more and an ended job."""
        if not again:
            served.end(signal.SIGKILL)
            again.append(Served(shell.folder / "home", "endless"))
            log.write_text("before\nafter\n")
            shell("cancel", "1")

    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            logs(1, follow=True, sleep=sleep)
        assert output.getvalue() == "before\nafter\n"
    finally:
        for service in again:
            service.end()


def test_who_follows_a_log_is_told_once_that_nobody_answers_and_not_kept_for_ever(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    (shell.folder / "home").mkdir()
    (shell.folder / "home" / "serve.json").write_text('{"url": "http://127.0.0.1:9"}')
    (shell.folder / "home" / "queue.token").write_text("token")
    slept: list[float] = []
    with pytest.raises(UnreachableError):
        logs(1, follow=True, sleep=slept.append)
    assert len(slept) == FOLLOW_TRIES
    assert capsys.readouterr().err.count("no queue answers at http://127.0.0.1:9") == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("submit", "--time", "4"), "--time 4: must be a time such as 30m, 4h or 7d"),
        (("usage", "--since", "x"), "--since x: must be a time"),
        (("explain", "7"), "no queue is known here"),
    ],
)
def test_a_mistake_is_one_sentence(shell: Shell, arguments: tuple[str, ...], why: str) -> None:
    more = (shell.job("one", 1),) if arguments[0] == "submit" else ()
    assert why in " ".join(shell(*arguments, *more, code=2).split())


def test_files_that_cannot_go_with_a_job_are_named(shell: Shell) -> None:
    path = shell.folder / "jobs" / "own.yaml"
    path.parent.mkdir()
    (shell.folder / "own.py").write_text(OWN)
    text = JOB.format(name="own", steps=3, train=0)
    path.write_text(text.replace("steps: 3", "steps: 3\nlora: {path: ../own.py}"))
    output = " ".join(shell("submit", str(path), code=2).split())
    assert "own.py" in output


@pytest.mark.ray
@pytest.mark.slow
def test_jobs_run_once_although_the_service_is_killed(tmp_path: Path) -> None:
    """Killed while one job runs and another waits, by a pool on which one of them has room."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(
            JOB.format(name=name, steps=4, train=0).replace("{devices: [0]}", "{gpus: 2}")
        )
    home = tmp_path / "home"
    service = Command(tmp_path, "serve", "--port", "0")
    try:
        await_address(home, service)
        assert Command(tmp_path, "submit", "one.yaml", "two.yaml").wait() == 0
        following = Command(tmp_path, "logs", "-f", "1")
        following.wait_for("one begins")
        (home / "serve.json").unlink()
        service.process.kill()
        service.process.wait()
        service = Command(tmp_path, "serve", "--port", "0", mark=service.mark)
        await_address(home, service)
        client = connect(home)
        until(lambda: service.process.poll() is not None or len(client.jobs(ended=True)) == 2, service.output)
        assert service.process.poll() is None, service.output()
        ended = sorted(client.jobs(ended=True), key=lambda job: job.id)
        assert [(job.outcome, job.reason, job.requeues) for job in ended] == [("finished", "", 0)] * 2
        timeline = client.get("/v1/timeline", TimelineView, seconds=3600)
        assert len(timeline.lanes) == 2 and {"rollout", "actor_training"} <= set(timeline.phases), "the page has it"
        for job in ended:
            rows = (Path(job.run_dir) / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(row)["step"] for row in rows] == [0, 1, 2, 3]
        assert following.wait() == 0
    finally:
        service.process.terminate()
        Command(tmp_path, "down").wait()


def await_address(home: Path, service: Command) -> None:
    until(lambda: service.process.poll() is not None or (home / "serve.json").exists(), service.output)
    assert service.process.poll() is None, service.output()


@pytest.fixture
def stranger() -> Iterator[str]:
    """Somebody else's server at the address of a queue, which answers everything."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if "history" in self.path else 200)
            self.end_headers()
            self.wfile.write(b"<html>a page</html>")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_whatever_is_wrong_is_one_sentence_and_a_code(
    stranger: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str, code: int, **environment: str) -> str:
        with monkeypatch.context() as patch:
            for name, value in {"RLIX_TOKEN": "token", "RLIX_SERVER": stranger, **environment}.items():
                patch.setenv(name, value)
            text = " ".join(shell(*arguments, code=code).split())
        assert "Traceback" not in text and "<html>" not in text
        return text

    for command in ("explain", "logs", "history"):
        assert "is no queue, or one of another version" in said(command, "1", code=2 if command == "history" else 1)
        assert "no queue answers at http://127.0.0.1:9 " in said(command, "1", code=1, RLIX_SERVER="http://127.0.0.1:9")
        for wrong in ("sweep", "9" * 30, "1.5"):
            assert f"{wrong[:20]}" in (text := said(command, wrong, code=2)) and "`rlix ps`" in text
    for address in ("127.0.0.1:7459", "http://127.0.0.1:port", "http://", "ftp://127.0.0.1"):
        assert "is no address of a queue" in said("explain", "1", code=2, RLIX_SERVER=address)
    assert "RLIX_TOKEN: holds what no token has" in said("explain", "1", code=2, RLIX_TOKEN="tokén\n")
    absent = said("explain", "1", code=2, RLIX_SERVER="https://127.0.0.1:9", RLIX_SERVER_CA="/no/such/file")
    assert "RLIX_SERVER_CA=/no/such/file: cannot be read" in absent
    monkeypatch.delenv("RLIX_TOKEN", raising=False)
    assert "no queue is known here" in " ".join(shell("explain", "1", code=2).split())
