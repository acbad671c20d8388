"""Where samples come from: prompts with rewards, environments, or a source of the user's."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlix.pipeline.sources.base import Seat, Source, SourceFailedError, Surroundings

__all__ = ["Seat", "Source", "SourceFailedError", "Surroundings"]


def __getattr__(name: str) -> Any:
    """On first use: the processes of environments and rewards, which are in this package, need no torch."""
    if name in __all__:
        return getattr(import_module("rlix.pipeline.sources.base"), name)
    raise AttributeError(f"module 'rlix.pipeline.sources' has no attribute {name!r}")
