"""Lists of items in the object store: whoever takes some of them reads these, and no others."""

import io
import pickle
import sys
import threading
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import numpy as np
from ray import cloudpickle

LARGE = 1 << 16
"""Bytes of an array from which on it is not copied into its item's pickle, and where numpy has it not out of it."""

_reading = threading.local()


class Items:
    """Items that are sent one by one: packed when the object store takes them, and unpacked where they are taken."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = list(items)

    def __len__(self) -> int:
        return len(self._items)

    def cut(self, begin: int, end: int) -> list[Any]:
        return self._items[begin:end]

    def __reduce__(self) -> tuple[Any, ...]:
        file, shared = io.BytesIO(), _Shared()
        buffers: list[pickle.PickleBuffer] = []
        ends, counts = [0], [0]
        for item in self._items:
            _Pickler(file, shared, buffers).dump(item)
            ends.append(file.tell())
            counts.append(len(buffers))
        # As an array it is read where it lies; bytes would be copied for every reader.
        data = np.frombuffer(file.getbuffer(), dtype=np.uint8)
        return Packed, (data, np.array(ends), np.array(counts), buffers, shared.values)


class Packed:
    """`Items` as another process has them."""

    def __init__(
        self,
        data: "np.typing.NDArray[np.uint8]",
        ends: "np.typing.NDArray[np.int64]",
        counts: "np.typing.NDArray[np.int64]",
        buffers: Sequence[Any],
        shared: Sequence[Any],
    ) -> None:
        self._data, self._ends, self._counts = data.data, ends, counts
        self._buffers, self._shared = buffers, shared

    def __len__(self) -> int:
        return len(self._ends) - 1

    def cut(self, begin: int, end: int) -> list[Any]:
        outer = getattr(_reading, "shared", ())  # an item may read others while it is read
        _reading.shared = self._shared
        try:
            return [self._item(i) for i in range(*slice(begin, end).indices(len(self)))]
        finally:
            _reading.shared = outer

    def _item(self, i: int) -> Any:
        mine = self._buffers[self._counts[i] : self._counts[i + 1]]
        return pickle.loads(self._data[self._ends[i] : self._ends[i + 1]], buffers=mine)


class _Shared:
    """Classes and functions that items are made of: sent once, however many items there are. But no function that has
    something of the place where it was made: that may be of the item, and must be the same one there."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[int, int] = {}

    def index(self, value: Any) -> int:
        if id(value) not in self._index:
            self._index[id(value)] = len(self.values)
            self.values.append(value)
        return self._index[id(value)]


class _Pickler(cloudpickle.CloudPickler):
    def __init__(self, file: io.BytesIO, shared: _Shared, buffers: list[pickle.PickleBuffer]) -> None:
        self._shared = shared

        def inside(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < LARGE:
                return True
            buffers.append(buffer)
            return False

        super().__init__(file, protocol=5, buffer_callback=inside)

    def reducer_override(self, obj: Any) -> Any:
        common = isinstance(obj, type) or (isinstance(obj, FunctionType) and obj.__closure__ is None)
        if common and obj is not _of_shared:
            return _of_shared, (self._shared.index(obj),)
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_plain(obj, torch):
            flat = obj.contiguous().reshape(-1).view(torch.uint8) if obj.numel() else torch.empty(0, dtype=torch.uint8)
            return _tensor, (pickle.PickleBuffer(flat.numpy()), obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Whether its bytes, type and shape are all of it."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    more = tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.__dict__
    return plain and not (more or tensor.is_quantized or tensor.is_nested)


def _of_shared(index: int) -> Any:
    return _reading.shared[index]


def _tensor(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A copy, for what lies in the object store cannot be written."""
    import torch

    data = bytearray(buffer)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
