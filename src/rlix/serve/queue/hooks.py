"""Webhooks: who is told when a job has finished, has failed, or waits for long.

Deliveries are tried a few times, each for a bounded time, beside everything else, and forgotten when the service ends.
A URL may be a secret, as those of chat rooms are: of it only the host is ever said.
"""

import asyncio
import contextlib
import hashlib
import heapq
import hmac
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from rlix.protocol.errors import RlixError, SpecError
from rlix.scheduler.queue.jobs import Job, Outcome, State
from rlix.serve.queue.keeper import Keeper
from rlix.serve.queue.store import Store

logger = logging.getLogger(__name__)

Event = Literal["finished", "failed", "starved"]
EVENTS: tuple[Event, ...] = ("finished", "failed", "starved")
SIGNATURE = "X-RLix-Signature"
PAUSES_S = (2.0, 15.0, 60.0, 300.0)
"""After each failure; then it is given up."""
MOST = 1000
"""Deliveries that are on their way; of more the oldest are given up."""
_AT_ONCE, _TIMEOUT_S, _LOOK_S = 16, 10.0, 60.0
_LONGEST_URL = 2000
_AGAIN = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class Hook:
    """Where one owner's jobs are told of. `secret` signs what is sent."""

    url: str
    on: tuple[Event, ...] = EVENTS
    secret: str = field(default="", repr=False)


@dataclass(order=True, slots=True)
class _Delivery:
    due: float
    number: int
    job: Job = field(compare=False)
    event: Event = field(compare=False)
    url: str = field(compare=False, repr=False)
    secret: str = field(compare=False, repr=False)
    body: bytes = field(compare=False, repr=False)
    failures: int = field(default=0, compare=False)


def check_url(url: str, what: str) -> str:
    """Raises SpecError: it is no address that a webhook can have; does not say which."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and url.isprintable() and len(url) <= _LONGEST_URL:
            return url
    raise SpecError(f"{what}: must be an address that begins with http:// or https://")


def host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


class Hooks:
    """Belongs to the keeper's loop. `describe`: a job as others see it."""

    def __init__(
        self,
        store: Store,
        keeper: Keeper,
        describe: Callable[[Job], Mapping[str, Any]],
        *,
        starved_s: float,
        now: Callable[[], float],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._store, self._keeper, self._describe, self._starved_s, self._now = store, keeper, describe, starved_s, now
        self._hooks = {owner: _hook(body) for owner, body in store.hooks().items()}
        self._waiting: list[_Delivery] = []
        self._numbers = itertools.count()
        self._starved: set[tuple[int, int]] = set()
        self._transport = transport
        self._going: set[asyncio.Task[None]] = set()
        self._more = asyncio.Event()
        keeper.on_end = self.ended
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every URL, and with it what is secret in it

    def of(self, owner: str) -> Hook | None:
        return self._hooks.get(owner)

    def put(self, owner: str, hook: Hook | None) -> None:
        """None: that owner is told nothing any more."""
        self._store.put_hook(owner, None if hook is None else json.dumps(asdict(hook)))
        if hook is None:
            self._hooks.pop(owner, None)
        else:
            self._hooks[owner] = hook

    def ended(self, job: Job) -> None:
        if job.outcome in (Outcome.FINISHED, Outcome.FAILED, Outcome.TIMEOUT):
            self._tell(job, "finished" if job.outcome is Outcome.FINISHED else "failed")

    def look(self) -> None:
        """Who has waited for so long is told of, once in a service's life for each time that it is queued."""
        now = self._now()
        for job in self._keeper.jobs.values():
            key = (job.id, job.requeues)
            if job.state is State.SUBMITTED and now - job.since >= self._starved_s and key not in self._starved:
                self._starved.add(key)
                self._tell(job, "starved")
        self._starved = {key for key in self._starved if key[0] in self._keeper.jobs}

    def _tell(self, job: Job, event: Event) -> None:
        hook = self._hooks.get(job.owner)
        secret = "" if hook is None else hook.secret
        urls = {job.webhook} if job.webhook else set()
        if hook is not None and event in hook.on:
            urls.add(hook.url)
        if not urls:
            return
        body = json.dumps({"event": event, "time": self._now(), "job": self._describe(job)}).encode()
        for url in sorted(urls):
            heapq.heappush(self._waiting, _Delivery(self._now(), next(self._numbers), job, event, url, secret, body))
        while len(self._waiting) > MOST:
            oldest = min(self._waiting, key=lambda one: one.number)
            self._waiting.remove(oldest)
            heapq.heapify(self._waiting)
            self._give_up(oldest, "too many others are on their way")
        self._more.set()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=_TIMEOUT_S, transport=self._transport, follow_redirects=False)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with self.client() as client:
            while True:
                self._more.clear()
                self.look()
                await self.turn(client)
                due = self._waiting[0].due - self._now() if self._waiting and len(self._going) < _AT_ONCE else _LOOK_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._more.wait(), max(0.05, min(due, _LOOK_S)))

    async def turn(self, client: httpx.AsyncClient, *, wait: bool = False) -> None:
        """Begins what is due, as far as there is room."""
        while self._waiting and self._waiting[0].due <= self._now() and len(self._going) < _AT_ONCE:
            task = asyncio.create_task(self._deliver(client, heapq.heappop(self._waiting)))
            self._going.add(task)
            task.add_done_callback(self._done)
        if wait and self._going:
            await asyncio.wait(self._going)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._going.discard(task)
        self._more.set()

    async def _deliver(self, client: httpx.AsyncClient, one: _Delivery) -> None:
        headers = {"Content-Type": "application/json"}
        if one.secret:
            headers[SIGNATURE] = signature(one.secret, one.body)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                async with client.stream("POST", one.url, content=one.body, headers=headers) as answer:
                    status = answer.status_code  # what else it says may have no end
            problem, again = f"it answered {status}", status >= 500 or status in _AGAIN
            if 200 <= status < 300:
                return
        except TimeoutError:
            problem, again = f"it did not answer within {_TIMEOUT_S:g} s", True
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:  # the text may have the URL in it
            problem, again = type(error).__name__, True
        one.failures += 1
        if not again or one.failures > len(PAUSES_S):
            self._give_up(one, problem)
            return
        one.due = self._now() + PAUSES_S[one.failures - 1]
        heapq.heappush(self._waiting, one)

    def _give_up(self, one: _Delivery, problem: str) -> None:
        what = f"the webhook at {host_of(one.url)} was not told that it {_SAID[one.event]}: {problem}"
        logger.warning("%s: %s", one.job.said, what)
        with contextlib.suppress(RlixError):  # a full disk: it is in the log
            self._keeper.note(one.job.id, what)


_SAID: Mapping[Event, str] = {"finished": "has finished", "failed": "has failed", "starved": "waits for long"}


def signature(secret: str, body: bytes) -> str:
    """HMAC (RFC 2104) of the body with SHA-256: by it the receiver knows that this service has sent it."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"


def _hook(body: str) -> Hook:
    found = json.loads(body)
    return Hook(found["url"], tuple(found["on"]), found["secret"])
