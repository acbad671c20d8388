"""Policies: how the devices that no gang needs are divided among the rollouts."""

from rlix.scheduler.policies.base import Holding, Policy, Pool
from rlix.scheduler.policies.proportional import Proportional, proportional
from rlix.scheduler.policies.rlix import Rlix, rlix

POLICIES: dict[str, Policy] = {
    "rlix": rlix,
    "proportional": proportional,
}
"""What RLIX_POLICY may name. The simulator knows these by the same names, and has baselines besides."""

__all__ = [
    "POLICIES",
    "Holding",
    "Policy",
    "Pool",
    "Proportional",
    "Rlix",
    "proportional",
    "rlix",
]
