"""Policies: how the devices that no gang needs are divided among the rollouts."""

from rlix.scheduler.policies.base import Holding, Policy, Pool
from rlix.scheduler.policies.proportional import Proportional, proportional
from rlix.scheduler.policies.rlix import Rlix, rlix

__all__ = ["Holding", "Policy", "Pool", "Proportional", "Rlix", "proportional", "rlix"]
