"""Every step's samples are made by the policy that it trains."""

from rlix.pipeline.samples import Samples
from rlix.pipeline.schedules.base import Schedule
from rlix.pipeline.spec.schedule import OnPolicyOptions


class OnPolicy(Schedule):
    """First the samples, then the step."""

    Options = OnPolicyOptions

    def samples(self, step: int) -> Samples:
        source = self.supply.source
        return source.finish(source.begin(step))
