"""The page: what it is told, who is told it, that it is bounded, and that it works in a browser."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from rlix.monitor.curves import POINTS, Curves, RunReader
from rlix.monitor.report import build_report, write_report
from rlix.protocol.messages import Cluster, Demand, Lease, LeaseRecord, PipelineStatus, Waiting
from rlix.protocol.types import Phase
from rlix.serve.page.history import EXACT, LANES, History
from rlix.serve.queue.keeper import Asked
from tests.monitor.synthetic import demo_runs
from tests.serve.browser import CHROMIUM, Browser, browser
from tests.serve.test_api import SPEC, Api

START = 1_000_000.0


def record(event: str, job: str, epoch: int, devices: tuple[int, ...], time: float) -> LeaseRecord:
    lease = Lease(epoch, job, "c", Phase.ROLLOUT, devices)
    return LeaseRecord(int(time * 1e6) + epoch, event, lease, time)  # type: ignore[arg-type]


leases = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 7), st.integers(0, 99), st.integers(1, 50)), max_size=30
)


@settings(max_examples=40)
@given(leases, st.integers(0, 60), st.sampled_from([8, 80]))
def test_what_is_told_of_a_stretch_is_the_time_that_was_lent(
    found: list[tuple[str, int, int, int]], since: int, devices: int
) -> None:
    """Against adding it up lease by lease, told one by one and, with many devices, in parts of time."""
    history, records = History(), []
    for epoch, (job, device, start, length) in enumerate(found):
        records.append(record("granted", job, epoch, (device,), START + start))
        records.append(record("released", job, epoch, (device,), START + start + length))
    records.sort(key=lambda each: each.time)
    for portion in (records[:7], records[3:], records):  # some are read twice
        history.take(portion)
    start, end = history.aligned(START + since, 120), START + 120
    told = history.told(range(devices), start, end, 120)
    lent: dict[str, float] = {}
    for job, _, a, length in found:
        lent[job] = lent.get(job, 0.0) + max(0.0, min(a + length, 120) - max(a, start - START))
    seen: dict[str, float] = {}
    for lane, job, _, a, b, share in told.rows:
        assert start <= a < b <= end
        of = told.pipelines[job]
        seen[of] = seen.get(of, 0.0) + (b - a) * share * told.lanes[lane].devices
    assert sum(seen.values()) == pytest.approx(sum(lent.values()), abs=0.011 * len(told.rows) * 2 + 1e-6)
    if devices == 8:
        assert {job: value for job, value in seen.items() if value} == pytest.approx(
            {job: value for job, value in lent.items() if value}
        )


def test_history_forgets_the_oldest_and_leases_that_nobody_holds() -> None:
    history = History(kept=100)
    for epoch in range(300):
        history.take([record("granted", "a", epoch, (0,), START + epoch)])
        history.take([record("released", "a", epoch, (0,), START + epoch + 0.5)])
    rows = history.told([0], START, START + 400, 400).rows
    assert 50 <= len(rows) <= 101 and max(b for *_, b, _ in rows) == START + 299.5
    history.take([record("granted", "b", 900, (0,), START + 350)])
    history.only({900}, START + 360)
    assert history.told([0], START + 340, START + 380, 40).rows[0][3:5] == (START + 350, START + 380)
    history.only((), START + 360)
    assert history.told([0], START + 340, START + 380, 40).rows[0][3:5] == (START + 350, START + 360)


def test_curves_are_thinned_evenly_and_keep_the_last_step(tmp_path: Path) -> None:
    curves = Curves()
    for step in range(10_000):
        curves.add({"step": step, "reward": step / 10_000, "time": START + step})
    told = curves.told()
    assert len(told["step"]) <= POINTS + 1 and told["step"][0] == 0 and told["step"][-1] == 9999
    gaps = {b - a for a, b in zip(told["step"][:-2], told["step"][1:-1], strict=True)}
    assert len(gaps) == 1, gaps
    curves.add({"step": 5000, "reward": 0.0})  # it went on from a checkpoint
    assert curves.told()["step"][-1] == 5000
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "reward": 0.5, "kl": null, "x": NaN}\n{"step": 1, "rew')
    reader = RunReader(tmp_path)
    assert reader.curves()["step"] == [0]
    with path.open("a") as file:
        file.write('ard": 0.75}\nnonsense\n[]\n' + "[" * 100_000 + f'\n{{"step": 2, "x": 1{"0" * 400}}}\n')
    assert reader.curves()["metrics"] == {"reward": [0.5, 0.75]}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path)
    yield made
    made.store.close()


def fill(api: Api, home: Path) -> int:
    """A job of ann's that runs and has learnt, one of bob's that waits, and a program that waits for ann's."""
    job = api.submit("ann")
    api.turn()
    api.turn()
    folder = home / "runs" / str(job.id) / "sweep"
    folder.mkdir(parents=True)
    rows = [
        {"step": s, "time": START + s, "reward": 0.2 + s / 100, "loss": 1 / (s + 1), "exact": s / 80} for s in range(60)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {"step": 59, "prompt": "sort 3 1 2", "completion": "<b>1 2 3</b>\ud800", "reward": 1.0, "end": "stop"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    pool, clock = api.pool, api.clock
    train = Cluster("actor_train", 1, (0, 1, 2, 3))
    ours = PipelineStatus("ft_1", (train,), (), Demand(0), name="sweep")
    other = PipelineStatus("job_2", (train,), ("actor_train",), Demand(0), name="my script")
    waiting = Waiting("job_2", "actor_train", Phase.ACTOR_TRAINING, clock.now, "ft_1", ((0, 1, 2, 3),))
    pool.status = pool.status.__class__(pool.status.devices, (ours, other), (), waiting=(waiting,))
    for epoch in range(1, 20):
        pool.lend(clock, "ft_1", range(4) if epoch % 2 else range(2, 8), epoch, Phase(6 if epoch % 2 else 1))
        clock.now += 30
        pool.give_back(clock, epoch)
        clock.now += 5
    pool.lend(clock, "ft_1", range(4), 99, Phase.ACTOR_TRAINING)
    clock.now += 20
    for _ in range(3):
        api.submit("bob", spec=SPEC.replace("gpus: 4", "gpus: 8").replace("sweep", "large"))
    api.turn()
    api.run(api.live.look())
    return job.id


def test_a_page_is_told_the_queue_the_pool_and_who_waits_on_whom(api: Api, tmp_path: Path) -> None:
    id = fill(api, tmp_path)
    overview = api.ask("bob", "GET", "/v1/overview").json()
    assert [(job["name"], job["state"]) for job in overview["jobs"]] == [("sweep", "running")] + [
        ("large", "submitted")
    ] * 3
    assert overview["jobs"][1]["reason"].startswith("needs 8 GPUs at once, 4 are free; 4 are held by a/sweep (1)")
    assert overview["leased"] == 4
    (wait,) = overview["waits"]
    assert wait["text"].endswith("for devices 0–3 (actor train): sweep (1) holds 0–3 for actor training")
    assert [(program["name"], program["phase"]) for program in overview["programs"]] == [
        ("my script", "waits for actor_train")
    ]
    told = api.ask("bob", "GET", "/v1/timeline?seconds=600").json()
    assert len(told["lanes"]) == 8 and told["jobs"]["ft_1"] == "sweep (1)"
    last = [row for row in told["rows"] if row[0] == 0][-1]
    assert (told["phases"][last[2]], round(last[4] - last[3])) == ("actor_training", 20)
    more = api.ask("bob", "GET", f"/v1/timeline?seconds=600&since={told['end']}").json()
    assert sum(b - a for *_, a, b, _ in more["rows"]) <= 8
    assert api.ask("bob", "GET", "/v1/timeline?seconds=1e9").status_code == 422
    assert api.ask("bob", "POST", f"/v1/jobs/{id}/cancel").status_code == 403
    changed = api.ask("ann", "POST", f"/v1/jobs/{id}/cancel").json()
    assert api.ask("bob", "GET", "/v1/overview").json()["jobs"][0]["reason"] == changed["reason"] != "rollout"


def test_samples_are_their_owners_and_curves_everybodys(api: Api, tmp_path: Path) -> None:
    id = fill(api, tmp_path)
    mine, theirs = (api.ask(who, "GET", f"/v1/jobs/{id}/run").json() for who in ("ann", "bob"))
    said = [(sample["prompt"], sample["completion"]) for sample in mine["samples"]]
    assert said == [("sort 3 1 2", "<b>1 2 3</b>?")], "what is no character does not keep the rest from being read"
    assert theirs["samples"] == [] and not theirs["may_read"]
    assert theirs["metrics"] == mine["metrics"] and mine["metrics"]["reward"][-1] == 0.79


def test_what_a_page_is_told_of_500_jobs_on_1024_devices_is_bounded(tmp_path: Path) -> None:
    api = Api(tmp_path, devices=1024)
    try:
        clock = api.clock
        for index in range(520):
            api.keeper.submit(Asked(f"job{index}", 1 + index % 64), "ann", "a", {"job.yaml": b""}, None)
        epoch = 0
        for _ in range(15):  # each device is taken by another job every 4 minutes
            for first in range(0, 1024, 2):
                epoch += 1
                lease = Lease(epoch, f"ft_{epoch % 500}", "c", Phase.ROLLOUT, (first, first + 1))
                api.pool.records.append(LeaseRecord(int(clock.now * 1e6) + epoch, "granted", lease, clock.now))
                end = clock.now + 235
                api.pool.records.append(LeaseRecord(int(end * 1e6) + epoch, "released", lease, end))
            clock.now += 240
        api.run(api.live.look())
        overview = api.ask("ann", "GET", "/v1/overview")
        assert len(overview.json()["jobs"]) == 500 and overview.json()["more_jobs"] == 20
        whole = api.ask("ann", "GET", "/v1/timeline?seconds=3600")
        told = whole.json()
        assert len(told["lanes"]) == LANES and EXACT < 15_360
        more = api.ask("ann", "GET", f"/v1/timeline?seconds=3600&since={told['end'] - 1}")
        sizes = [len(answer.content) for answer in (overview, whole, more)]
        assert sizes[0] < 500_000 and sizes[1] < 1_000_000 and sizes[2] < 30_000, sizes
    finally:
        api.store.close()


def test_the_pages_files_name_no_other_place_and_nothing_is_told_without_a_token(api: Api) -> None:
    page = api.ask("", "GET", "/")
    assert page.status_code == 200 and "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert "set-cookie" not in page.headers
    for name in ("page.js", "page.css", "common.js", "timeline.js", "curves.js", "report.css"):
        assert f"/page/{name}" in page.text
        text = api.ask("", "GET", f"/page/{name}").text
        assert text and "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
        assert "innerHTML" not in text and "document.cookie" not in text


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_in_a_browser(api: Api, tmp_path: Path) -> None:
    """As ann, who may change her job and not bob's; and the report, which is made of the same scripts."""
    id = fill(api, tmp_path)
    report = write_report(build_report(demo_runs(tmp_path / "demo", steps=10)), tmp_path / "report.html")
    server = uvicorn.Server(uvicorn.Config(api.app, port=0, log_level="warning", lifespan="off"))

    def look() -> None:
        with browser(tmp_path / "profile") as tab:
            look_at(tab, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/", api, id, tmp_path)
            tab.open(report.as_uri())
            assert tab.evaluate("document.querySelectorAll('.chart path').length") == 8
            assert tab.evaluate("document.querySelector('#legend').textContent").startswith("sort_digits")
            tab.shot(tmp_path / "report.png")
            assert tab.problems == []

    async def served() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await asyncio.to_thread(look)  # the queue belongs to this thread
        finally:
            server.should_exit = True
            await serving

    asyncio.run(served())


def look_at(tab: Browser, url: str, api: Api, id: int, shots: Path) -> None:
    tab.open(url)
    tab.until("!document.getElementById('sign-in').hidden")
    assert tab.evaluate("document.getElementById('content').hidden")
    tab.open(f"{url}?#token={api.tokens['ann']}")
    tab.until("document.querySelectorAll('#queue tbody tr').length === 4 && data.spans.length")
    assert tab.evaluate("location.hash") == "" and tab.evaluate("document.cookie") == ""
    said = tab.evaluate("document.querySelector('#waits').textContent")
    assert "my script waits" in said and "sweep (1) holds 0–3" in said
    verbs = (
        "[...document.querySelectorAll('#queue tbody tr')].map((row) => "
        "[...row.querySelectorAll('.actions button')].map((button) => button.dataset.verb))"
    )
    assert tab.evaluate(verbs) == [["cancel"], [], [], []], "bob's are bob's"
    tab.evaluate("document.querySelector('#queue .link').click()")
    tab.until("document.querySelectorAll('#job .chart path').length === 4 && document.querySelector('#samples td')")
    assert tab.evaluate("document.querySelector('#samples td:nth-child(3)').textContent") == "<b>1 2 3</b>?"
    tab.shot(shots / "page.png")
    cancel = "document.querySelector('#queue [data-verb=cancel]')"
    tab.evaluate(f"{cancel}.click()")
    assert api.keeper.jobs[id].stop is None, "it asks first"
    tab.evaluate(f"{cancel}.click()")
    tab.until(
        "document.querySelector('#queue tr:first-child td:nth-child(8)').textContent.includes('cancelled by ann')"
    )
    assert api.keeper.jobs[id].stop is not None
    tab.evaluate("document.getElementById('filter').value = 'large'; showQueue()")
    assert tab.evaluate("document.querySelectorAll('#queue tbody tr').length") == 3
