"""Steps of given sizes, one after the other: what a profile of a job measures."""

from pydantic import BaseModel, ConfigDict

from rlix.pipeline.samples import Samples
from rlix.pipeline.schedules.base import Schedule


class SizesOptions(BaseModel):
    """`prompts` of each step, from the first again after the last."""

    model_config = ConfigDict(extra="forbid")

    prompts: list[int]


class Sizes(Schedule):
    """First the samples, then the step."""

    Options = SizesOptions
    options: SizesOptions

    def samples(self, step: int) -> Samples:
        source, sizes = self.supply.source, self.options.prompts
        return source.finish(source.begin(step, sizes[step % len(sizes)]))
