"""Where samples come from: prompts with rewards, environments, or a source of the user's."""

from rlix.pipeline.sources.base import Source, SourceFailedError, Surroundings

__all__ = ["Source", "SourceFailedError", "Surroundings"]
