"""What Prometheus reads, by hand; and that the dashboard asks for nothing else."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlix.cli.deploy import shipped
from rlix.monitor.measures import Measures
from rlix.protocol.errors import RlixError
from rlix.scheduler.queue.jobs import Job, State
from rlix.serve.queue.accounts import MEASURED_S, Reading
from rlix.serve.queue.runner import Control
from rlix.serve.queue.store import Used
from tests.serve.test_accounts import HOUR, ROWS, lease, read_run, write
from tests.serve.test_api import SPEC, Api, api

__all__ = ["api"]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(api: Api, who: str = "bob") -> Samples:
    answer = api.ask(who, "GET", "/metrics")
    assert answer.status_code == 200, answer.text
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def at(samples: Samples, name: str, /, **labels: str) -> dict[frozenset[tuple[str, str]], float]:
    """The samples of that name with these labels, by the labels that they have beside them."""
    wanted = frozenset(labels.items())
    return {found - wanted: value for (this, found), value in samples.items() if this == name and found >= wanted}


def busy(api: Api, run_dir: Path) -> Job:
    """A job that runs and has a history, two that wait, and what the control plane said."""
    for who in ("bob", "ann", "ann"):
        api.submit(who, spec=SPEC.replace("gpus: 4", "gpus: 3"))
        api.turn()
    api.submit("bob", hold=True)
    api.turn()
    rows = [*ROWS, lease("shrinking", 2, [0], "rollout", 3810.0), lease("granted", 3, [0], "rollout", 3820.0)]
    rows[-1]["waited_s"] = 2.5
    write(run_dir, rows)
    row = {"tokens": 100, "tokens_recomputed": 10, "staleness": 0.5, "reward": 0.25}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **row}) + "\n" for n in range(3)))
    job = api.keeper.job(1)
    assert job is not None
    api.clock.now = HOUR + 4000.0
    api.accounts.take(job, read_run(job, run_dir), api.clock.now)
    api.run(api.keeper.look_at_control())
    return job


def test_what_is_exposed_is_what_there_is(api: Api, tmp_path: Path) -> None:
    busy(api, tmp_path / "run")
    found = scraped(api)

    def value(name: str, /, **labels: str) -> float:
        (one,) = at(found, name, **labels).values()
        return one

    assert (value("rlix_pool_up"), value("rlix_pool_devices")) == (1.0, 8.0)
    assert (value("rlix_plan_total"), value("rlix_plan_seconds_total")) == (7.0, 0.5)
    assert (value("rlix_pool_devices_leased"), value("rlix_pool_devices_quarantined")) == (3.0, 1.0)
    assert value("rlix_pool_gangs_waiting", phase="actor_training") == 2.0
    assert value("rlix_jobs", team="b", state="held") == 1.0
    assert value("rlix_jobs_waiting", team="b", reason="held") == 1.0
    assert sum(at(found, "rlix_jobs_waiting").values()) == sum(job.state in ("submitted", "held") for job in api.jobs())
    assert value("rlix_team_places_guaranteed", team="a") == 4.0 and value("rlix_team_places_maximum", team="a") == 6.0
    job = {"id": "1", "name": "sweep", "owner": "bob", "team": "b"}
    assert value("rlix_job_device_seconds_total", **job, phase="actor_training") == 400.0
    assert value("rlix_job_device_busy_seconds_total", **job, phase="actor_training") == 190.0
    assert value("rlix_job_device_switching_seconds_total", **job, phase="actor_training") == 10.0
    assert value("rlix_job_switch_seconds_total", **job, direction="load") == 20.0
    assert value("rlix_job_leases_granted_total", **job, phase="rollout") == 2.0
    assert value("rlix_job_lease_wait_seconds_total", **job, phase="rollout") == 2.5
    assert (value("rlix_job_shrinks_total", **job), value("rlix_job_steps_total", **job)) == (1.0, 3.0)
    assert (value("rlix_job_tokens_total", **job), value("rlix_job_tokens_recomputed_total", **job)) == (300.0, 30.0)
    assert (value("rlix_job_staleness_steps", **job), value("rlix_job_reward", **job)) == (0.5, 0.25)


def test_counters_do_not_fall_when_a_job_goes_on_from_a_checkpoint(api: Api, tmp_path: Path) -> None:
    job = busy(api, tmp_path / "run")
    scraped(api)
    row = Used(1, 1000, "rollout", 1.0, 1.0, 0.0)
    api.accounts.take(job, Reading((row,), Measures(steps=1, tokens=100)), api.clock.now)
    assert list(at(scraped(api), "rlix_job_steps_total").values()) == [3.0]


def test_a_job_is_told_until_an_hour_after_its_end(api: Api, tmp_path: Path) -> None:
    busy(api, tmp_path / "run")
    api.pool.end(1)
    api.turn()
    ended = api.keeper.job(1)
    assert ended is not None and ended.state is State.ENDED
    assert at(scraped(api), "rlix_job_steps_total")
    api.clock.now += MEASURED_S
    assert not at(scraped(api), "rlix_job_steps_total")


@pytest.mark.parametrize("token", ["", "rlix_wrong"])
def test_numbers_are_for_users(api: Api, token: str) -> None:
    assert api.ask(token, "GET", "/metrics").status_code == 401


def test_without_a_pool_it_says_so(api: Api) -> None:
    api.submit("ann")
    api.pool.away = "nobody is there"
    api.turn()
    found = scraped(api)
    assert list(at(found, "rlix_pool_up").values()) == [0.0]
    assert list(at(found, "rlix_jobs_waiting", reason="no_pool").values()) == [1.0]


def test_what_is_not_known_of_the_control_plane_is_not_told_as_0(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def plans() -> list[float]:
        return list(at(scraped(api), "rlix_plan_total").values())

    assert plans() == []
    api.run(api.keeper.look_at_control())
    while_asked: list[Control | None] = []
    monkeypatch.setattr(api.pool, "devices", lambda: while_asked.append(api.keeper.control))
    api.run(api.keeper.look_at_control())
    monkeypatch.undo()
    assert while_asked == [api.keeper.control] and plans() == [7.0]
    api.pool.away = "nobody is there"
    with pytest.raises(RlixError):
        api.run(api.keeper.look_at_control())
    assert plans() == []


_STRINGS = re.compile(r'"[^"]*"')
_WORDS = frozenset(["sum", "rate", "by", "or", "vector", "clamp_min", "label_values", "on", "ignoring"])


def test_the_dashboard_asks_for_what_there_is(api: Api, tmp_path: Path) -> None:
    busy(api, tmp_path / "run")
    labels: dict[str, set[str]] = {}
    for name, found in scraped(api):
        labels.setdefault(name, set()).update(dict(found), {"job"} if name.startswith("process_") else ())
    dashboard = json.loads(shipped("grafana"))
    variables = [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set()
    for expression, legend in [*((t["expr"], t["legendFormat"]) for t in targets), *((v, "") for v in variables)]:
        plain = re.sub(r"\[[^]]*\]", "", _STRINGS.sub("", expression))
        names = {word for word in re.findall(r"[a-z_]{3,}", plain) if word.startswith(("rlix_", "process_"))}
        assert names and names <= labels.keys(), expression
        has = set.intersection(*(labels[name] for name in names))
        others = set(re.findall(r"[a-z_]+", plain)) - names - _WORDS
        assert others | set(re.findall(r"{{(\w+)}}", legend)) <= has, expression
        asked |= names
    assert {name for name in labels if name.startswith("rlix_")} - asked == {"rlix_pool_places"}
