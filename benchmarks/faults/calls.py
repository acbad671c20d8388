"""Calls that make no sense: each must be refused to its caller, and nobody else may notice."""

import time
from collections.abc import Callable
from typing import Any

import ray

from benchmarks.faults.campaign import Campaign
from benchmarks.faults.pool import actor
from benchmarks.faults.table import Fault
from rlix.control.gang_queue import Asked
from rlix.control.rpc import root_cause
from rlix.protocol.errors import RlixError
from rlix.protocol.events import DrainStarted
from rlix.protocol.messages import Demand
from rlix.protocol.types import ORCHESTRATOR_ACTOR_NAME, SCHEDULER_ACTOR_NAME, Phase

GANG = Phase.INITIALIZATION
Call = Callable[[Any, str, Campaign], Any]  # (scheduler, the caller's own pipeline, ...) -> reference

WRONG: dict[str, Call] = {
    "gang: unknown cluster": lambda s, p, _: s.poll_gang.remote(p, "nope", GANG, Asked()),
    "gang: unknown pipeline": lambda s, p, _: s.poll_gang.remote("ft_999", "probe", GANG, Asked()),
    "gang: no phase": lambda s, p, _: s.poll_gang.remote(p, "probe", 99, Asked()),
    "gang: rollout phase": lambda s, p, _: s.poll_gang.remote(p, "probe", Phase.ROLLOUT, Asked()),
    "gang: asked is a word": lambda s, p, _: s.poll_gang.remote(p, "probe", GANG, "please"),
    "gang: holder is a word": lambda s, p, _: s.poll_gang.remote(p, "probe", GANG, Asked(holder="me")),  # type: ignore[arg-type]
    "gang: holding words": lambda s, p, _: s.poll_gang.remote(p, "probe", GANG, Asked(holding=("x",))),  # type: ignore[arg-type]
    "gang: key is a number": lambda s, p, _: s.poll_gang.remote(p, "probe", GANG, Asked(key=7)),  # type: ignore[arg-type]
    "gang: timeout is a word": lambda s, p, _: s.poll_gang.remote(p, "probe", GANG, Asked(timeout_s="soon")),  # type: ignore[arg-type]
    "gang: longest is negative": lambda s, p, _: s.poll_gang.remote(p, "probe", GANG, Asked(longest_s=-1)),
    "gang: wait is a word": lambda s, p, _: s.poll_gang.remote(p, "probe", GANG, Asked(), "long"),
    "gang: too few arguments": lambda s, p, _: s.poll_gang.remote(p),
    "gang: too many arguments": lambda s, p, _: s.poll_gang.remote(p, "probe", GANG, Asked(), 1.0, 2.0, 3.0),
    "holders: a word": lambda s, p, _: s.name_holders.remote(p, "", {0: "me"}),
    "holders: rank is a word": lambda s, p, run: s.name_holders.remote(p, "probe", {"x": run.probe.process}),
    "holders: a list": lambda s, p, _: s.name_holders.remote(p, "probe", [1, 2]),
    "holders: unknown cluster": lambda s, p, _: s.name_holders.remote(p, "nope", {}),
    "beat: process is a word": lambda s, p, _: s.beat.remote(p, "me", ()),
    "beat: holds words": lambda s, p, run: s.beat.remote(p, run.probe.process, ["x"]),
    "beat: holds a number": lambda s, p, run: s.beat.remote(p, run.probe.process, 7),
    "beat: unknown pipeline": lambda s, p, run: s.beat.remote("nope", run.probe.process, ()),
    "rollout: not elastic": lambda s, p, _: s.poll_rollout.remote(p, "probe", None, (), (), 0.1),
    "rollout: process is a word": lambda s, p, run: s.poll_rollout.remote(_crew(run), "roll", "me", (), (), 0.1),
    "rollout: holds words": lambda s, p, run: s.poll_rollout.remote(_crew(run), "roll", None, ("x",), (), 0.1),
    "rollout: wait is a word": lambda s, p, run: s.poll_rollout.remote(_crew(run), "roll", None, (), (), "x"),
    "demand: a word": lambda s, p, run: s.report_demand.remote(_crew(run), "roll", "lots"),
    "demand: negative": lambda s, p, run: s.report_demand.remote(_crew(run), "roll", Demand(-1)),
    "demand: not a number": lambda s, p, run: s.report_demand.remote(
        _crew(run), "roll", Demand(1, work_s=float("nan"))
    ),
    "demand: words inside": lambda s, p, run: s.report_demand.remote(_crew(run), "roll", Demand("3")),  # type: ignore[arg-type]
    "withdraw: key is a list": lambda s, p, _: s.withdraw_gang.remote(p, ["x"]),
    "release: never granted": lambda s, p, _: s.release.remote(p, [10**9]),
    "release: a word": lambda s, p, _: s.release.remote(p, "x"),
    "release: nothing": lambda s, p, _: s.release.remote(p, None),
    "release: of another job": lambda s, p, run: s.release.remote(p, [_others(run)]),
    "register: unknown id": lambda s, p, _: s.register_pipeline.remote("ft_999", "ns", {}, {}),
    "register: otherwise": lambda s, p, _: s.register_pipeline.remote(p, "ns", {"a": 1}, {"a": [0]}),
    "register: sizes are words": lambda s, p, _: s.register_pipeline.remote(p, "ns", {"a": "x"}, {"a": [0]}),
    "register: no such device": lambda s, p, _: s.register_pipeline.remote(p, "ns", {"a": 1}, {"a": [99999999]}),
    "register: a list": lambda s, p, _: s.register_pipeline.remote(p, 3, [1], [2]),
    "allocate: a number": lambda s, p, _: s.allocate_pipeline_id.remote(3),
    "allocate: two words": lambda s, p, _: s.allocate_pipeline_id.remote("a b"),
    "admit: unknown": lambda s, p, _: s.admit_pipeline.remote("nope"),
    "unregister: unknown": lambda s, p, _: s.unregister_pipeline.remote("nope"),
    "unregister: a list": lambda s, p, _: s.unregister_pipeline.remote(["x"]),
    "unregister: spare is a word": lambda s, p, _: s.unregister_pipeline.remote(p, "", "me"),
    "unregister: reason is a number": lambda s, p, _: s.unregister_pipeline.remote(p, 3),
    "give up: not quarantined": lambda s, p, _: s.give_up_device.remote(0),
    "give up: a word": lambda s, p, _: s.give_up_device.remote("x"),
    "log: since a word": lambda s, p, run: s.lease_log.remote(_crew(run), "x"),
    "orchestrator: unknown id": lambda s, p, _: actor(ORCHESTRATOR_ACTOR_NAME).admit_pipeline.remote("nope"),
    "orchestrator: wrong types": lambda s, p, _: actor(ORCHESTRATOR_ACTOR_NAME).register_pipeline.remote(p, 1, 2, 3),
}


def wrong_call(name: str, run: Campaign) -> Fault:
    """One call; recovered when the pool has granted a device after it."""
    at = time.time()
    refused, note = False, f"{name}: was taken"
    try:
        ray.get(WRONG[name](actor(SCHEDULER_ACTOR_NAME), run.probe_id, run), timeout=30)
    except (RlixError, TypeError, ValueError) as error:  # Ray itself refuses a wrong number of arguments
        cause = root_cause(error) if isinstance(error, ray.exceptions.RayTaskError) else error
        refused, note = not isinstance(cause, TimeoutError), f"{name}: {type(cause).__name__}"
    except ray.exceptions.RayTaskError as error:
        refused, note = True, f"{name}: {type(root_cause(error)).__name__}: {root_cause(error)}"
    except ray.exceptions.RayError as error:
        note = f"{name}: {error}"
    answered = time.time() - at
    grants = run.grants_since(at)
    return Fault("nonsense call", answered, 0.0, grants, refused and grants is not None, note)


def harm_of(run: Campaign) -> list[str]:
    """Leases that were taken because somebody else had given them back."""
    drained = [event for _, event in run.watcher.events_since(0) if isinstance(event, DrainStarted)]
    return [f"lease {e.epoch}: {e.reason}" for e in drained if "gone, but device" in e.reason and "locked" in e.reason]


def _crew(run: Campaign) -> str:
    return next(p.pipeline_id for p in run.pool.status().pipelines if p.name.startswith("crew") and not p.ending)


def _others(run: Campaign) -> int:
    lease, _ = run.holder_of(lambda lease: lease.pipeline_id != run.probe_id)
    return lease.epoch
