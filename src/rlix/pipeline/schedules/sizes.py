"""Steps of given sizes, one after the other: what a profile of a job measures."""

from pydantic import BaseModel, ConfigDict

from rlix.pipeline.samples import Samples
from rlix.pipeline.schedules.base import Schedule, Supply


class SizesOptions(BaseModel):
    """`prompts` of each step, from the first again after the last. `off_policy`: samples count as if they might be."""

    model_config = ConfigDict(extra="forbid")

    prompts: list[int]
    off_policy: bool = False


class Sizes(Schedule):
    """First the samples, then the step."""

    Options = SizesOptions
    options: SizesOptions

    def __init__(self, options: SizesOptions, supply: Supply) -> None:
        super().__init__(options, supply)
        self.off_policy = options.off_policy

    def samples(self, step: int) -> Samples:
        source, sizes = self.supply.source, self.options.prompts
        return source.finish(source.begin(step, sizes[step % len(sizes)]))
