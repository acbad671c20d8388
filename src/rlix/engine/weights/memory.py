"""Memory that several processes of one node see at once."""

import ast
import mmap
import os

import numpy as np
import torch


class HostMemory:
    """Anonymous host memory of this process that others on the node can map. The kernel frees it with its last user."""

    def __init__(self, size: int) -> None:
        # Not a file in /dev/shm: nothing stays behind whoever is killed, and containers keep that folder small.
        self._fd = os.memfd_create("rlix-shared")
        os.ftruncate(self._fd, size)
        self.data = _mapped(self._fd, size)
        self.handle = repr((f"/proc/{os.getpid()}/fd/{self._fd}", size))

    def close(self) -> None:
        """Others keep what they have mapped, and so does who uses `data`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def opened_host(handle: str) -> torch.Tensor:
    """The bytes of another process's `HostMemory`.

    Raises:
        OSError: that process is gone, or not of this user or node.
    """
    path, size = ast.literal_eval(handle)
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _mapped(descriptor, size)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8))
