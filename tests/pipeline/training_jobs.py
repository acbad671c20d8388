"""Small jobs of every kind of training, on four devices."""

import time
from typing import Any

import ray

from rlix.pipeline.spec import JobSpec, load_job
from rlix.protocol.messages import LeaseStatus
from rlix.protocol.types import NAMESPACE, ORCHESTRATOR_ACTOR_NAME

STEPS = 4


def small(example: str = "sort_digits", **changes: Any) -> JobSpec:
    """A shipped example cut down to a few small steps; sections are given as dictionaries of what differs."""
    base = load_job(example).model_dump()
    base |= {"steps": STEPS, "warmup": {"steps": 5, "batch_size": 64, "learning_rate": 1e-3}}
    base["rollout"] |= {"prompts_per_step": 8, "samples_per_prompt": 4}
    for name, value in changes.items():
        old = base.get(name)
        base[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return JobSpec.model_validate(base)


def ppo(**changes: Any) -> JobSpec:
    """All seven phases: a critic and a reference model besides the policy."""
    part = {"devices": (2, 3), "tensor_parallel": 1}
    return small(
        name="ppo",
        pipeline="actor_critic",
        algorithm={"name": "ppo", "kl_coefficient": 0.05, "minibatches": 2},
        critic={"learning_rate": 1e-3},
        clusters={"critic": part, "reference": part},
        **changes,
    )


def ahead(asynchronous: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    """The next step's trajectories are generated while a step trains."""
    rule = asynchronous or {"max_staleness": 1}
    return small(name="ahead", pipeline="asynchronous", asynchronous=rule, **changes)


def leases_left(timeout_s: float = 20.0) -> tuple[LeaseStatus, ...]:
    """What is still held once all jobs ended: the control plane hears of a job's end a moment after its driver."""
    orchestrator = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, namespace=NAMESPACE)
    deadline = time.monotonic() + timeout_s
    while (left := ray.get(orchestrator.status.remote(), timeout=10).leases) and time.monotonic() < deadline:
        pass
    return tuple(left)
