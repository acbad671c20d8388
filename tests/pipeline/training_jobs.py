"""Small jobs of every kind of training, on four devices or fewer, and what their runs leave behind."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from rlix.pipeline.jobs.handle import JobHandle
from rlix.pipeline.jobs.launch import launch
from rlix.pipeline.spec.job import JobSpec, load_job
from rlix.protocol.errors import WaitTimeoutError
from rlix.protocol.messages import LeaseStatus
from rlix.protocol.types import NAMESPACE, ORCHESTRATOR_ACTOR_NAME, pipeline_namespace
from tests.waiting import HANG_S, PROGRAM_S, until

STEPS = 4
TRAIN = {"sort_digits": (0, 1), "copy_digits": (1, 2), "agentic_lookup": (0, 1)}
"""Given, not chosen: so that jobs meet on the same devices, whatever else runs in the session's pool."""
_TIMED = ("time", "_s", "slot_use", "tokens_recomputed", "env_faults", "env_timeouts", "env_retries")


def small(example: str = "sort_digits", **changes: Any) -> JobSpec:
    """A shipped example cut down to a few small steps; sections are given as dictionaries of what differs."""
    base = load_job(example).model_dump()
    base |= {"steps": STEPS, "warmup": {"steps": 5, "batch_size": 64, "learning_rate": 1e-3}}
    base["rollout"] |= {"prompts_per_step": 8, "samples_per_prompt": 4}
    base["clusters"] = {
        "actor_train": {"devices": TRAIN.get(example, (0, 1))},
        "actor_infer": {"devices": (0, 1, 2, 3)},
    }
    for name, value in changes.items():
        old = base.get(name)
        base[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return JobSpec.model_validate(base)


def ppo(**changes: Any) -> JobSpec:
    """All seven phases: a critic and a reference model besides the policy."""
    part = {"devices": (2, 3), "sequence_parallel": 2}
    return small(
        **{
            "name": "ppo",
            "algorithm": {
                "name": "ppo",
                "options": {"kl_coefficient": 0.05, "critic": {"learning_rate": 1e-3}},
                "minibatches": 2,
            },
            "clusters": {"critic": part, "reference": part},
            **changes,
        }
    )


def ahead(rule: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    """The next step's trajectories are generated while a step trains."""
    schedule = {"name": "ahead", "options": rule or {"max_staleness": 1}}
    return small(**{"name": "ahead", "schedule": schedule, **changes})


def agent(environment: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    """The next step's episodes are played while a step trains; a third of the environments fail. None hangs: what is
    late on busy cores would be taken for that, and be learnt as another episode."""
    options = {"hops": 2, "latency_scale": 0.02, "failure_rate": 0.35, "hang_share": 0.0}
    return small(
        "agentic_lookup",
        **{
            "name": "agent",
            "schedule": {"name": "ahead", "options": {"max_staleness": 1, "in_flight": "finish"}},
            "source": {
                "environment": {
                    "name": "digit_lookup",
                    "options": options,
                    "reset_timeout_s": HANG_S,
                    "step_timeout_s": HANG_S,
                    "max_turns": 3,
                    **(environment or {}),
                }
            },
            "warmup": {"steps": 40},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
            **changes,
        },
    )


def on_two_devices(first: int) -> dict[str, Any]:
    """The clusters of a job that gets on with few processes."""
    return {"actor_train": {"devices": (first,)}, "actor_infer": {"devices": (first, first + 1)}}


def moved(spec: JobSpec, by: int) -> JobSpec:
    """The same job on other devices."""
    clusters = spec.clusters.model_dump()
    for cluster in clusters.values():
        if cluster is not None:
            cluster["devices"] = tuple(device + by for device in cluster["devices"])
    return JobSpec.model_validate(spec.model_dump() | {"clusters": clusters})


class Jobs:
    """Launches jobs, and closes them whatever happens."""

    def __init__(self) -> None:
        self.handles: list[JobHandle] = []

    def start(self, *specs: JobSpec, runs: Path, resume: bool = False) -> list[JobHandle]:
        self.handles += launch(specs, runs, resume=resume)
        return self.handles[-len(specs) :]

    def finish(self, *handles: JobHandle) -> None:
        statuses = [handle.wait(PROGRAM_S) for handle in handles]
        assert [s.state for s in statuses] == ["finished"] * len(handles), statuses

    def close(self, handle: JobHandle) -> None:
        self.handles.remove(handle)
        handle.close()


@contextmanager
def closing_jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    try:
        yield jobs
    finally:
        for handle in jobs.handles:
            handle.close()


def ended(handle: JobHandle) -> bool:
    """Wait a moment; whether the job is over then."""
    with suppress(WaitTimeoutError):
        handle.wait(timeout_s=0.05)
        return True
    return False


def still_runs(handle: JobHandle) -> None:
    assert not ended(handle), f"ended too soon: {handle.wait(timeout_s=0.05)}"


def replicas(handle: JobHandle) -> list[Any]:
    """The job's rollout actors that exist by now."""
    namespace = pipeline_namespace(handle.pipeline_id)
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == namespace]
    return [ray.get_actor(name, namespace=namespace) for name in sorted(names) if "infer" in name]


def until_nothing_is_held() -> None:
    """The control plane hears of a job's end a moment after its driver."""
    orchestrator = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, namespace=NAMESPACE)

    def held() -> tuple[LeaseStatus, ...]:
        return tuple(ray.get(orchestrator.status.remote(), timeout=HANG_S).leases)

    until(lambda: not held(), lambda: f"still held: {held()}")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def learnt(folder: Path) -> list[dict[str, Any]]:
    """What a run sampled and learnt: its metrics without those that time has to do with."""
    return [learnt_of(row) for row in rows(folder / "metrics.jsonl")]


def learnt_of(row: dict[str, Any]) -> dict[str, Any]:
    """Without what was evaluated, too, which is not learnt."""
    return {k: v for k, v in row.items() if not k.endswith(_TIMED) and not k.startswith(("eval/", "baseline/"))}
