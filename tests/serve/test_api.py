"""The HTTP API as three users with different rights see it, each trying what he may not."""

import asyncio
import base64
import re
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlix.scheduler.queue.jobs import Job, Outcome
from rlix.serve.api.app import Service, make_app
from rlix.serve.api.models import JobView
from rlix.serve.page.live import Live
from rlix.serve.queue.accounts import Accounts
from rlix.serve.queue.config import QueueSpec, TeamSpec
from rlix.serve.queue.keeper import Keeper
from rlix.serve.queue.store import FILE, Store, User
from rlix.serve.queue.users import Users
from rlix.serve.service import make_hooks
from tests.serve.fakes import Clock, FakePool

SPEC = "name: sweep\nsteps: 3\nclusters:\n  actor_train: {gpus: 4}\n  actor_infer: {gpus: 8}\n"


class Api:
    def __init__(self, home: Path, devices: int = 8) -> None:
        self.clock, self.pool, self.store = Clock(), FakePool(devices), Store(home / FILE)
        config = QueueSpec(teams={"a": TeamSpec(guaranteed=4, maximum=6)})
        self.keeper = Keeper(self.store, self.pool, config, home, home / "runs", now=self.clock)
        users = Users(self.store)
        self.tokens = {
            user.name: users.add(user) for user in (User("ann", "a"), User("bob", "b"), User("root", "a", admin=True))
        }
        self.accounts = Accounts(self.store, self.keeper.usage)
        self.live = Live(self.keeper, self.accounts, self.clock)
        self.sent: list[httpx.Request] = []
        self.webhooks: Callable[[httpx.Request], httpx.Response] = lambda _: httpx.Response(204)
        self.hooks = make_hooks(self.store, self.keeper, config, self.clock, httpx.MockTransport(self._told))
        self.app = make_app(Service(self.keeper, users, self.accounts, self.live, self.hooks), now=self.clock)
        self.transport = httpx.ASGITransport(app=self.app)
        self.turn()

    def turn(self) -> None:
        asyncio.run(self.keeper.turn())

    def _told(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request)
        return self.webhooks(request)

    def deliver(self, seconds: float = 0.0) -> None:
        """What is due by then, once."""
        self.clock.now += seconds
        self.hooks.look()

        async def delivered() -> None:
            async with self.hooks.client() as client:
                await self.hooks.turn(client, wait=True)

        asyncio.run(delivered())

    def run(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run(what)

    def jobs(self) -> list[Job]:
        return list(self.keeper.jobs.values())

    def ask(self, who: str, method: str, path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.tokens.get(who, who)}"}

        async def asked() -> httpx.Response:
            async with httpx.AsyncClient(transport=self.transport, base_url="http://queue") as client:
                return await client.request(method, path, headers=headers, json=body or None)

        return asyncio.run(asked())

    def submit(self, who: str = "ann", **body: Any) -> JobView:
        answer = self.ask(who, "POST", "/v1/jobs", **({"spec": SPEC} | body))
        assert answer.status_code == 200, answer.text
        return JobView.model_validate_json(answer.text)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path)
    yield made
    made.store.close()


def test_who_submits_is_who_the_token_says_and_nobody_else(api: Api) -> None:
    job = api.submit("ann")
    assert (job.owner, job.team, job.gpus, job.state, job.reason) == ("ann", "a", 4, "submitted", "starts at once")
    for field in ("owner", "team", "user"):
        refused = api.ask("bob", "POST", "/v1/jobs", spec=SPEC, **{field: "ann"})
        assert refused.status_code == 422 and field in refused.json()["error"]


@pytest.mark.parametrize("token", ["", "rlix_wrong", "ann"])
def test_without_a_token_no_door_opens(api: Api, token: str) -> None:
    api.tokens = {}
    described = api.ask("", "GET", "/openapi.json").json()
    for path, methods in described["paths"].items():
        for method in methods:
            assert api.ask(token, method.upper(), path.replace("{id}", "1")).status_code == 401


@pytest.mark.parametrize("verb", ["cancel", "hold", "release", "requeue", "priority"])
def test_only_its_owner_and_an_admin_change_a_job(api: Api, verb: str) -> None:
    held = verb == "release"
    for who, allowed in (("bob", False), ("ann", True), ("root", True)):
        job = api.submit("ann", hold=held)
        if verb == "requeue":
            api.ask("ann", "POST", f"/v1/jobs/{job.id}/cancel")
        answer = api.ask(
            who, "POST", f"/v1/jobs/{job.id}/{verb}", **({"priority": "low"} if verb == "priority" else {})
        )
        if allowed:
            assert answer.status_code == 200, answer.text
        else:
            assert answer.status_code == 403 and "ann's" in answer.json()["error"]
            assert api.ask("ann", "GET", f"/v1/jobs/{job.id}").json()["priority"] == "normal"


def test_what_an_admin_holds_its_owner_does_not_release(api: Api) -> None:
    job = api.submit("ann")
    api.ask("root", "POST", f"/v1/jobs/{job.id}/hold")
    assert api.ask("ann", "POST", f"/v1/jobs/{job.id}/release").status_code == 403
    assert api.ask("root", "POST", f"/v1/jobs/{job.id}/release").status_code == 200
    api.ask("ann", "POST", f"/v1/jobs/{job.id}/cancel")
    api.ask("root", "POST", f"/v1/jobs/{job.id}/requeue")
    refused = api.ask("ann", "POST", f"/v1/jobs/{job.id}/release")
    assert (refused.status_code, refused.json()["error"]) == (409, f"job {job.id} (sweep) is submitted, not held")


def test_logs_are_their_owners_and_come_in_parts(api: Api, tmp_path: Path) -> None:
    job = api.submit("ann")
    log = tmp_path / "runs" / str(job.id) / "sweep" / "job.log"
    log.parent.mkdir(parents=True)
    log.write_bytes("step 1 ×".encode()[:-1])
    assert api.ask("bob", "GET", f"/v1/jobs/{job.id}/log").status_code == 403
    part = api.ask("ann", "GET", f"/v1/jobs/{job.id}/log").json()
    assert part == {"text": "step 1 ", "next": 7, "ended": False}, "who follows it waits"
    log.write_text("step 1 × 2\n")
    assert api.ask("root", "GET", f"/v1/jobs/{job.id}/log?offset=7").json()["text"] == "× 2\n"
    log.write_text("again\n")
    part = api.ask("ann", "GET", f"/v1/jobs/{job.id}/log?offset=12").json()
    assert (part["text"], part["next"]) == ("again\n", 6), "it began again, and who follows it reads on"
    for offset in ("-1", "nan", "1e300", "x"):
        assert api.ask("ann", "GET", f"/v1/jobs/{job.id}/log?offset={offset}").status_code == 422
        assert api.ask("ann", "GET", f"/v1/usage?since={offset}").status_code == 422


def test_only_an_admin_adds_users_and_a_new_token_replaces_the_old_one(api: Api) -> None:
    assert api.ask("ann", "POST", "/v1/users", name="eve", admin=True).status_code == 403
    token = api.ask("root", "POST", "/v1/users", name="bob", team="a").json()["token"]
    assert api.ask("bob", "GET", "/v1/pool").status_code == 401
    pool = api.ask(token, "GET", "/v1/pool").json()
    assert (pool["user"], pool["team"], pool["admin"], pool["devices"]) == ("bob", "a", False, 8)


def test_only_an_admin_drains_the_queue_and_everybody_sees_it(api: Api) -> None:
    for verb in ("drain", "resume"):
        refused = api.ask("ann", "POST", f"/v1/queue/{verb}")
        assert refused.status_code == 403 and "only an admin may" in refused.json()["error"]
    assert api.ask("root", "POST", "/v1/queue/drain").json()["drained"] == "root"
    job = api.submit("ann")
    assert "which root has drained: nothing starts until `rlix queue resume`" in job.reason
    assert api.ask("bob", "GET", "/v1/pool").json()["drained"] == "root"
    assert api.ask("root", "POST", "/v1/queue/resume").json()["drained"] == ""


def test_a_dry_run_says_what_would_become_of_it_and_keeps_nothing(api: Api) -> None:
    api.submit("bob", preemptible=False, limit_s=3600.0)
    api.turn()
    found = api.submit("ann", spec=SPEC.replace("gpus: 4", "gpus: 6"), dry_run=True)
    assert found.start is not None and found.reason.startswith(
        "needs 6 GPUs at once, 4 are free; 4 are held by b/sweep"
    )
    assert [job["owner"] for job in api.ask("ann", "GET", "/v1/jobs").json()["jobs"]] == ["bob"]
    assert (found.id, found.run_dir) == (0, ""), "the next job has what it would have had"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"spec": "name: a/b\n"}, "job.yaml: name: must be a name"),
        ({"spec": "name: [\n"}, "job.yaml"),
        ({"spec": SPEC.replace("gpus: 4", "gpus: 0")}, "job.yaml: clusters.actor_train.gpus"),
        ({"spec": SPEC.replace("gpus: 4", "gpus: 7")}, "team a may have at most 6"),
        ({"spec": SPEC, "files": {"../x.py": ""}}, "not inside the folder"),
        ({"spec": SPEC, "files": {"/etc/x": ""}}, "not inside the folder"),
        *(
            ({"spec": SPEC, "files": {path: ""}}, "not inside the folder")
            for path in (
                "job.yaml",
                "./job.yaml",
                "job.yaml/",
                "a//b",
                "a/./b",
                "",
                ".",
                "a\0b",
                "x" * 256,
                "a/" * 40 + "b",
            )
        ),
        ({"spec": SPEC, "files": {"job.yaml/a": ""}}, "job.yaml: is a file, and the folder of job.yaml/a"),
        ({"spec": SPEC, "files": {"a": "", "a/b/c": ""}}, "a: is a file, and the folder of a/b/c"),
        ({"spec": SPEC + "#" * (256 << 10)}, "characters, and a queue takes 262,144"),
        ({"spec": SPEC, "files": {f"{n}": "" for n in range(1001)}}, "1,001 files go with the job"),
        ({"spec": SPEC, "limit_s": -1}, "limit_s"),
        ({"spec": SPEC, "limit_s": 1e300}, "limit_s"),
        ({"spec": f"{SPEC}lora: {{path: mine/a}}\n"}, "names mine/a, which is not among the `files`"),
        ({"spec": f"{SPEC}lora: {{path: mine/a}}\n", "dry_run": True}, "names mine/a, which is not among the `files`"),
        ({"spec": SPEC, "priority": "urgent"}, "priority"),
        ({"hold": True}, "spec"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_kept(api: Api, body: dict[str, Any], why: str) -> None:
    answer = api.ask("ann", "POST", "/v1/jobs", **body)
    assert answer.status_code == 422 and why in answer.json()["error"], answer.text
    assert api.ask("ann", "GET", "/v1/jobs").json()["jobs"] == []


def test_what_cannot_be_preempted_is_refused_where_it_would_never_start(api: Api) -> None:
    """Of 8 GPUs 4 are guaranteed to ann's team, and none to bob's."""
    asked = {"spec": SPEC.replace("gpus: 4", "gpus: 5"), "preemptible": False, "dry_run": True}
    answer = api.ask("bob", "POST", "/v1/jobs", **asked)
    assert answer.status_code == 422
    assert "would never start: 0 are guaranteed to team b, and 4 to nobody" in answer.json()["error"]
    assert api.ask("ann", "POST", "/v1/jobs", **asked).status_code == 200


def test_a_body_that_is_too_large_is_not_read_to_its_end(api: Api) -> None:
    answer = api.ask("ann", "POST", "/v1/jobs", spec="#" * (65 << 20))
    assert answer.status_code == 422 and "more than 67,108,864 bytes" in answer.json()["error"]


def test_the_same_key_is_the_same_job_for_its_user_only(api: Api) -> None:
    first = api.submit("ann", key="a-key-of-ann")
    assert api.submit("ann", key="a-key-of-ann").id == first.id
    assert api.submit("bob", key="a-key-of-ann").id != first.id


def test_a_job_through_the_doors(api: Api) -> None:
    code = base64.b64encode(b"def f(): ...").decode()
    job = api.submit("ann", files={"mine.py": code})
    api.turn()
    api.turn()
    running = api.ask("bob", "GET", f"/v1/jobs/{job.id}").json()
    assert (running["state"], running["step"], running["steps"], running["reason"]) == ("running", 1, 5, "rollout")
    api.pool.end(job.id, Outcome.FAILED, "ValueError: no\udcff")  # as in the name of a file that is no text
    api.turn()
    (ended,) = api.ask("bob", "GET", "/v1/jobs?state=ended").json()["jobs"]
    assert (ended["outcome"], ended["reason"]) == ("failed", "ValueError: no?")
    assert api.ask("bob", "GET", "/v1/jobs?state=ended&mine=1").json()["jobs"] == []
    changes = api.ask("bob", "GET", f"/v1/jobs/{job.id}/history").json()["changes"]
    assert [(change["by"], change["what"]) for change in changes] == [
        ("ann", "submitted"),
        ("", "admitted"),
        ("", "running"),
        ("", "ended: ValueError: no?"),
    ]
    assert api.ask("ann", "POST", f"/v1/jobs/{job.id}/hold").status_code == 409
    assert api.ask("ann", "GET", "/v1/jobs/99").status_code == 404


def test_what_is_described_is_what_there_is(api: Api) -> None:
    described = api.ask("", "GET", "/openapi.json").json()
    assert described["openapi"] == "3.1.0" and described["security"] == [{"token": []}]
    names = set(described["components"]["schemas"])
    text = api.ask("", "GET", "/openapi.json").text
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) <= names
    assert {"JobView", "Submission", "UsageList"} <= names and len(described["paths"]) == 19


def test_whatever_is_wrong_is_json_and_no_parameter_is_passed_over(api: Api) -> None:
    for method, path, code in (
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/v1/jobs", 405),
        ("GET", "/v1/jobs?state=foo", 422),
        ("GET", "/v1/jobs?mine=yes", 422),
    ):
        answer = api.ask("ann", method, path)
        assert answer.status_code == code and answer.json()["error"], path


def test_users_are_listed_and_removed_and_an_admin_is_left(api: Api) -> None:
    for body, why in (
        ({"name": "a b"}, "name: must begin with a letter or a digit"),
        ({"name": ""}, "name: must begin"),
        ({"name": "eve", "team": "-"}, "team: must begin"),
        ({"name": "eve", "team": "nosuchteam"}, "team: nosuchteam is not in queue.yaml, which names a"),
    ):
        answer = api.ask("root", "POST", "/v1/users", **body)
        assert answer.status_code == 422 and answer.json()["error"].startswith(why)
    for method, path in (("GET", "/v1/users"), ("POST", "/v1/users/bob/remove")):
        assert api.ask("ann", method, path).status_code == 403
    assert api.ask("root", "POST", "/v1/users/nobody/remove").status_code == 404
    api.ask("bob", "POST", "/v1/hook", url="https://chat.example/x")
    left = api.ask("root", "POST", "/v1/users/bob/remove").json()["users"]
    assert left == api.ask("root", "GET", "/v1/users").json()["users"]
    assert [(user["name"], user["admin"]) for user in left] == [("ann", False), ("root", True)]
    assert api.ask("bob", "GET", "/v1/pool").status_code == 401 and api.hooks.of("bob") is None
    for path, body in (("/v1/users/root/remove", {}), ("/v1/users", {"name": "root"})):
        refused = api.ask("root", "POST", path, **body)
        assert refused.status_code == 409 and "the last admin" in refused.json()["error"]
