"""Policies: how the devices that no gang needs are divided among the rollouts."""

from rlix.scheduler.policies.base import Holding, Policy, Pool
from rlix.scheduler.policies.proportional import Proportional, proportional, published
from rlix.scheduler.policies.rlix import Rlix, rlix
from rlix.scheduler.policies.timeslice import Timeslice, timeslice

POLICIES: dict[str, Policy] = {
    "rlix": rlix,
    "proportional": proportional,
    "published": published,
    "timeslice": timeslice,
}
"""What RLIX_POLICY may name. The simulator knows these by the same names, and has baselines besides."""

__all__ = [
    "POLICIES",
    "Holding",
    "Policy",
    "Pool",
    "Proportional",
    "Rlix",
    "Timeslice",
    "proportional",
    "published",
    "rlix",
    "timeslice",
]
