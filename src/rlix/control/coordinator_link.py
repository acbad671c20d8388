"""The scheduler's line to one job's coordinator: every call bounded, every failure the same kind of error."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rlix.control.rpc import root_cause
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Lease, Registration
from rlix.protocol.types import coordinator_actor_name

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.5
_CLOSE_WAIT_S = 5.0


class CoordinatorError(RlixError):
    """The coordinator is not there, raised, or did not answer in time. The job's failure, never the scheduler's."""


class CoordinatorLink:
    """Calls reach the coordinator in the order in which they are made here."""

    def __init__(self, registration: Registration) -> None:
        self._namespace = registration.ray_namespace
        self._name = coordinator_actor_name(registration.pipeline_id)
        self._actor: Any = None
        self._order = asyncio.Lock()

    async def grow(self, leases: Sequence[Lease], timeout_s: float) -> None:
        """Tells the job about bundles it may use; returns once it has noted them."""
        await self._call("grow_rollout", timeout_s, tuple(leases))

    async def shrink(self, leases: Sequence[Lease], deadline_s: float) -> None:
        """Takes bundles back; returns once their device memory is released."""
        await self._call("shrink_rollout", deadline_s, tuple(leases), deadline_s)

    async def bundles_lost(self, leases: Sequence[Lease], timeout_s: float) -> None:
        """Tells the job that the workers of these bundles were killed."""
        await self._call("bundles_lost", timeout_s, tuple(leases))

    async def ended(self, given_up: Callable[[], bool]) -> str:
        """Returns, with the reason, when the job's coordinator has closed or died.

        `given_up` is asked, again and again, whether to stop waiting for one that has not appeared yet.
        """
        while True:
            try:
                await (await self._submit("closed"))
            except CoordinatorError as error:
                if self._actor is not None or given_up():
                    return str(error)
                await asyncio.sleep(_LOOK_AGAIN_S)
            except ActorUnavailableError:
                await asyncio.sleep(_LOOK_AGAIN_S)
            except RayError as error:
                return f"its coordinator {self._name!r} died: {_first_line(error)}"
            else:
                return f"its coordinator {self._name!r} closed"

    async def _call(self, method: str, timeout_s: float, *args: object) -> None:
        async def submit_and_wait() -> None:
            await (await self._submit(method, *args))

        try:
            await asyncio.wait_for(submit_and_wait(), timeout_s)
        except TimeoutError:
            raise CoordinatorError(f"{self._name}.{method} did not return within {timeout_s:.1f} s") from None
        except RayActorError as error:
            raise CoordinatorError(f"{self._name}.{method}: the coordinator died: {_first_line(error)}") from None
        except RayError as error:
            raise CoordinatorError(f"{self._name}.{method} failed: {_first_line(error)}") from None

    async def _submit(self, method: str, *args: object) -> Any:
        async with self._order:
            if self._actor is None:
                try:
                    self._actor = await asyncio.to_thread(ray.get_actor, self._name, self._namespace)
                except ValueError:
                    raise CoordinatorError(f"no actor {self._name!r} in namespace {self._namespace!r}") from None
            try:
                return getattr(self._actor, method).remote(*args)
            except AttributeError:
                raise CoordinatorError(f"the coordinator {self._name!r} has no method {method!r}") from None


async def kill_workers(handles: Sequence[Any]) -> None:
    """Kills these actors and waits, for a few seconds, until Ray reports them dead: then their memory is free."""
    if not handles:
        return
    await asyncio.to_thread(lambda: [ray.kill(handle) for handle in handles])
    pending = {asyncio.ensure_future(_death(handle)) for handle in handles}
    _, alive = await asyncio.wait(pending, timeout=_CLOSE_WAIT_S)
    for task in alive:
        task.cancel()
    if alive:
        logger.error("%d of %d killed workers still run after %.0f s", len(alive), len(handles), _CLOSE_WAIT_S)


async def _death(handle: Any) -> None:
    try:
        while True:
            await handle.__ray_ready__.remote()
            await asyncio.sleep(0.02)
    except RayError:
        return


def _first_line(error: RayError) -> str:
    cause = root_cause(error) if hasattr(error, "cause") else error
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0] if text else ''}"
