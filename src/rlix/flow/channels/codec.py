"""Any object as a skeleton and its tensors, so that a few small bytes go one way and the large ones the fastest way.

The skeleton is a pickle with holes where tensors and arrays were, however deep; one that occurs twice travels once.
Gradients do not travel, and a tensor arrives contiguous.
"""

import io
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from ray import cloudpickle

Leaf: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
_ALIGN = 64
INLINE_BYTES = 64 << 10  # a message of this size is as fast as a file
_NOTHING: "np.ndarray[Any, Any]" = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor's place in a block of memory; `kind` is "torch" or "numpy". `onto`: the reader's device, not its host
    memory. `shared`: the GPU on which it is, and a handle of its bytes there."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    onto: bool = False
    shared: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Parcel:
    """An object packed to be sent: its tensors' bytes are in `data`, or in the file `path` in shared memory.

    `landed`: at the reader, of each layout that is `shared`, its bytes on the GPU.
    """

    skeleton: bytes
    layouts: tuple[Layout, ...]
    nbytes: int
    data: bytes = b""
    path: str = ""
    landed: tuple[torch.Tensor | None, ...] = ()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.leaves: list[Leaf] = []
        self._known: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not _is_leaf(value):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = len(self.leaves)
            self.leaves.append(value)
        return self._known[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, skeleton: bytes, leaves: Sequence[Leaf]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._leaves = leaves

    def persistent_load(self, index: int) -> Leaf:
        return self._leaves[index]


def encode(value: object) -> tuple[bytes, tuple[Leaf, ...]]:
    """The skeleton, and the tensors and arrays that it has holes for."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), tuple(pickler.leaves)


def decode(skeleton: bytes, leaves: Sequence[Leaf]) -> Any:
    """The object again. Only of senders who are trusted: it is a pickle."""
    return _Unpickler(skeleton, leaves).load()


def pack(
    value: object,
    folder: Path | None = None,
    name: str = "",
    *,
    onto: bool = False,
    share: Callable[[torch.Tensor], tuple[str, str] | None] | None = None,
) -> Parcel:
    """Copy an object's bytes once: into a new file of `folder` where there is one and it pays, else into the parcel.

    Tensors on a device are brought to host memory, and stay there, or go `onto` the reader's device; those of which
    `share` gives a handle stay on theirs.

    Raises:
        OSError: the folder has no room; no file is left.
    """
    skeleton, leaves = encode(value)
    shares = [share(leaf) if share is not None and isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    blocks = [_bytes(leaf) if shared is None else _NOTHING for leaf, shared in zip(leaves, shares, strict=True)]
    layouts, end = [], 0
    for leaf, block, shared in zip(leaves, blocks, shares, strict=True):
        offset = -(-end // _ALIGN) * _ALIGN
        end = offset + block.nbytes
        kind, dtype = ("numpy", leaf.dtype.str) if isinstance(leaf, np.ndarray) else ("torch", str(leaf.dtype)[6:])
        again = onto and shared is None and isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
        layouts.append(Layout(kind, dtype, tuple(leaf.shape), offset, block.nbytes, again, shared))
    nbytes = end + len(skeleton)
    if folder is None or end < INLINE_BYTES:
        data = bytearray(end)
        _fill(np.frombuffer(data, np.uint8) if end else _NOTHING, layouts, blocks)
        return Parcel(skeleton, tuple(layouts), nbytes, data=bytes(data))
    path = folder / name
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for layout, block in zip(layouts, blocks, strict=True):
            _write(fd, block, layout.offset)
    except BaseException:  # raised again
        path.unlink()
        raise
    finally:
        os.close(fd)
    return Parcel(skeleton, tuple(layouts), nbytes, path=str(path))


def unpack(parcel: Parcel, device: str = "cpu") -> Any:
    """The object; what lay in shared memory is not copied, and what the reader writes is its own.

    `device`: the reader's, for what is to go onto it.

    Raises:
        FileNotFoundError: the file is gone.
    """
    memory: Any = bytearray(parcel.data)
    if parcel.path:
        fd = os.open(parcel.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
    landed = parcel.landed or (None,) * len(parcel.layouts)
    leaves = [_leaf(layout, memory, there) for layout, there in zip(parcel.layouts, landed, strict=True)]
    moved = [
        leaf.to(device) if layout.onto and isinstance(leaf, torch.Tensor) else leaf
        for layout, leaf in zip(parcel.layouts, leaves, strict=True)
    ]
    return decode(parcel.skeleton, moved)


def _is_leaf(value: Any) -> bool:
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and not value.is_quantized and not value.is_complex()
    return type(value) is np.ndarray and not value.dtype.hasobject and value.dtype.names is None


def _bytes(leaf: Leaf) -> "np.ndarray[Any, Any]":
    if isinstance(leaf, np.ndarray):
        return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    if not leaf.numel():
        return _NOTHING
    block: np.ndarray[Any, Any] = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return block


def _write(fd: int, block: "np.ndarray[Any, Any]", offset: int) -> None:
    """Twice as fast as to fill a map of the file: the kernel need not clear pages first. Where memory is short it is an
    error here, and not a SIGBUS later."""
    left = block.data
    while left.nbytes:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written


def _fill(target: "np.ndarray[Any, Any]", layouts: Sequence[Layout], blocks: Sequence[Any]) -> None:
    for layout, block in zip(layouts, blocks, strict=True):
        target[layout.offset : layout.offset + layout.nbytes] = block


def _leaf(layout: Layout, memory: Any, landed: torch.Tensor | None) -> Leaf:
    if landed is not None:
        return landed.view(getattr(torch, layout.dtype)).reshape(layout.shape)
    block = np.frombuffer(memory, np.uint8, layout.nbytes, layout.offset) if layout.nbytes else _NOTHING
    if layout.kind == "numpy":
        return block.view(np.dtype(layout.dtype)).reshape(layout.shape)
    if not layout.nbytes:
        return torch.empty(layout.shape, dtype=getattr(torch, layout.dtype))
    return torch.from_numpy(block).view(getattr(torch, layout.dtype)).reshape(layout.shape)
