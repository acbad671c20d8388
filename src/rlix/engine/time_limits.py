"""How long it may take until weights are where they are wanted: the longer, the more of them there are."""

from pathlib import Path

SLOWEST_BYTES_S = 50e6
"""Bytes a second that any disk or network is expected to bring."""
START_S = 300.0
"""For processes to start and models to be made, whatever their size."""


def loading_s(size: int, at_least_s: float = START_S) -> float:
    """Seconds within which so many bytes are read, converted and in place, or something is wrong."""
    return at_least_s + size / SLOWEST_BYTES_S


def folder_bytes(folder: str | Path | None) -> int:
    """Of the weights in a folder; 0 where there is no such folder."""
    return 0 if folder is None else sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
