"""When samples are made: by the policy that they train, or ahead of it."""

from rlix.pipeline.schedules.base import Schedule, Supply

__all__ = ["Schedule", "Supply"]
