"""Policies: how the devices that no gang needs are divided among the rollouts."""

from rlix.scheduler.policies.base import Holding, Policy, Pool
from rlix.scheduler.policies.proportional import Proportional, proportional

__all__ = ["Holding", "Policy", "Pool", "Proportional", "proportional"]
