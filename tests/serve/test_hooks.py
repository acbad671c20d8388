"""Webhooks: who is told what and when, how often it is tried, and what is never said."""

import json
import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from rlix.scheduler.queue.jobs import Outcome
from rlix.serve.queue.hooks import MOST, PAUSES_S, SIGNATURE, signature
from tests.serve.test_api import SPEC, Api, api

__all__ = ["api"]
URL = "https://chat.example/hooks/T0/secret-room"


def told(api: Api) -> list[tuple[str, str, int]]:
    found = [(str(request.url), json.loads(request.content)) for request in api.sent]
    return [(url, body["event"], body["job"]["id"]) for url, body in found]


def test_a_job_and_an_owner_are_told_each_once_of_what_they_want(api: Api) -> None:
    secret = api.ask("ann", "POST", "/v1/hook", url=URL, on=["failed"]).json()["secret"]
    small = SPEC.replace("gpus: 4", "gpus: 2")
    ids = [api.submit("ann", spec=small, webhook=url).id for url in ("", "http://other.example/x", URL)]
    api.submit("bob", spec=small)
    for _ in range(2):
        api.turn()
    ends = (Outcome.FINISHED, Outcome.FINISHED, Outcome.FAILED, Outcome.FAILED)
    for id, outcome in zip([*ids, 4], ends, strict=True):
        api.pool.end(id, outcome)
    api.turn()
    api.deliver()
    api.deliver()
    assert sorted(told(api)) == [("http://other.example/x", "finished", ids[1]), (URL, "failed", ids[2])]
    for request in api.sent:
        assert request.headers[SIGNATURE] == signature(secret, request.content)
        assert URL not in request.content.decode()


def test_what_a_person_cancels_is_told_to_nobody(api: Api) -> None:
    job = api.submit("ann", webhook=URL)
    api.ask("ann", "POST", f"/v1/jobs/{job.id}/cancel")
    api.deliver()
    assert api.sent == []


def test_who_waits_for_a_day_is_told_of_once(api: Api) -> None:
    api.pool.size = 0
    api.turn()
    api.submit("bob", webhook=URL)
    api.deliver(86399.0)
    assert api.sent == []
    api.deliver(1.0)
    api.deliver(86400.0)
    assert told(api) == [(URL, "starved", 1)]
    assert json.loads(api.sent[0].content)["job"]["reason"]


@pytest.mark.parametrize("trouble", [500, 429, httpx.ConnectError(f"no route to {URL}"), httpx.ReadTimeout("late")])
def test_who_is_away_is_told_later_and_not_for_ever(
    api: Api, trouble: int | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(trouble, Exception):
            raise trouble
        return httpx.Response(trouble)

    caplog.set_level(logging.DEBUG)
    api.webhooks = answer
    job = api.submit("ann", webhook=URL)
    end(api, job.id)
    for pause in (0.0, *PAUSES_S, 1e6):
        api.deliver(pause)
    assert len(api.sent) == 1 + len(PAUSES_S)
    said = api.ask("ann", "GET", f"/v1/jobs/{job.id}/history").json()["changes"][-1]["what"]
    assert said.startswith("the webhook at chat.example was not told that it has finished: ")
    assert "secret-room" not in caplog.text + said


def test_who_refuses_is_not_asked_again_and_a_redirect_is_not_followed(api: Api) -> None:
    api.webhooks = lambda _: httpx.Response(302, headers={"Location": "http://169.254.169.254/"})
    end(api, api.submit("ann", webhook=URL).id)
    for _ in range(3):
        api.deliver(1000.0)
    assert [str(request.url) for request in api.sent] == [URL]


def test_an_answer_without_an_end_is_not_read(api: Api) -> None:
    read: list[bytes] = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while len(read) < 1000:
                read.append(b"x" * 1000)
                yield read[-1]

    api.webhooks = lambda _: httpx.Response(200, stream=Endless())
    job = api.submit("ann", webhook=URL)
    end(api, job.id)
    api.deliver()
    api.deliver(1000.0)
    assert len(api.sent) == 1 and read == []


def test_no_more_are_kept_than_so_many(api: Api) -> None:
    job = api.keeper.job(api.submit("ann", webhook=URL).id)
    assert job is not None
    for _ in range(MOST + 3):
        api.hooks._tell(job, "failed")
    assert len(api.hooks._waiting) == MOST
    changes = api.keeper.changes(job.id)
    assert sum("too many others" in change.what for change in changes) == 3


def test_a_hook_is_its_owners_outlives_the_service_and_is_not_shown_again(api: Api) -> None:
    api.ask("ann", "POST", "/v1/hook", url=URL)
    shown = {"host": "chat.example", "on": ["finished", "failed", "starved"], "secret": ""}
    assert api.ask("ann", "GET", "/v1/hook").json() == shown
    assert api.ask("bob", "GET", "/v1/hook").json()["host"] == ""
    assert json.loads(api.store.hooks()["ann"])["url"] == URL
    assert api.ask("ann", "POST", "/v1/hook", url="").json()["host"] == "" and api.store.hooks() == {}


@pytest.mark.parametrize("url", ["chat.example", "ftp://chat.example/x", "https:///x", "http://[::1", "https://a\nb/"])
def test_what_is_no_address_is_refused_and_not_repeated(api: Api, url: str) -> None:
    for path, body in (("/v1/hook", {"url": url}), ("/v1/jobs", {"spec": SPEC, "webhook": url})):
        refused = api.ask("ann", "POST", path, **body)
        assert refused.status_code == 422 and "must be an address" in refused.json()["error"]
        assert url not in refused.json()["error"]


def end(api: Api, id: int) -> None:
    api.turn()
    api.pool.end(id)
    api.turn()
