"""Phases, cluster names and the names under which Ray actors are found."""

import re
from enum import IntEnum, StrEnum

NAMESPACE = "rlix"
ORCHESTRATOR_ACTOR_NAME = "rlix:orchestrator"
SCHEDULER_ACTOR_NAME = "rlix:scheduler"
RESOURCE_MANAGER_ACTOR_NAME = "rlix:resource_manager"
COORDINATOR_ACTOR_NAME_PREFIX = "rlix:coordinator:"
NODE_AGENT_NAME_PREFIX = "rlix:node:"

LAUNCHER = "launcher:"
"""Where a cluster's name is expected, which this cannot be: whoever starts a pipeline's program."""

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
"""Of what its user names and what has files under that name: jobs, flows. At most `LONGEST_NAME` characters."""
LONGEST_NAME = 64
DEVICE_RANGE = re.compile(r"(\d{1,9}) *- *(\d{1,9})")
"""From how many devices to how many, as people write it: 4-8."""
MOST_VIRTUAL_GPUS = 16_384
REPORT_FILE, REPORTS_FOLDER = "report.html", "reports"
"""Beside run folders, which have the names of jobs."""


def folder_problem(name: str) -> str | None:
    """Why no run folder can have this name; None: one can."""
    if name in (REPORT_FILE, REPORTS_FOLDER):
        return f"{name!r} is where reports go, beside the run folders; choose another name"
    if "/" in name or name.startswith("."):
        return f"{name!r} is no name of a folder; choose one without '/' and not beginning with '.'"
    return None


HEAD_RESOURCE = "node:__internal_head__"
"""What Ray calls the head node, among a node's resources."""
VIRTUAL_DEVICE_RESOURCE = "rlix_virtual"
"""Ray custom resource that marks a node whose GPUs are virtual (CPU-backed)."""


class Phase(IntEnum):
    """What a cluster is about to do. The value is its priority: lower is more urgent."""

    INITIALIZATION = 0
    ACTOR_TRAINING = 1
    CRITIC_TRAINING = 2
    OLD_LOG_PROBS = 3
    REFERENCE_LOG_PROBS = 4
    VALUE_COMPUTE = 5
    ROLLOUT = 6

    @property
    def preemptible(self) -> bool:
        """Only rollouts give their devices back before they finish."""
        return self is Phase.ROLLOUT


class ClusterName(StrEnum):
    """The worker sets a pipeline may have."""

    ACTOR_TRAIN = "actor_train"
    ACTOR_INFER = "actor_infer"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"


def coordinator_actor_name(pipeline_id: str) -> str:
    return f"{COORDINATOR_ACTOR_NAME_PREFIX}{pipeline_id}"


def pipeline_namespace(pipeline_id: str) -> str:
    return f"pipeline_{pipeline_id}_NS"
