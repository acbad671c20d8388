"""Memory that several processes of one node, or of one GPU, see at once."""

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


class GpuMemory:
    """Memory of this process's GPU that other processes on it can map (CUDA IPC)."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.data = torch.empty(size, dtype=torch.uint8, device=device)
        # Numbers and bytes only, so that the text is read back without running anything, which a pickle would.
        self.handle = repr(self.data.untyped_storage()._share_cuda_())

    def close(self) -> None:
        """The memory lives as long as `data`, and until whoever was given the handle has opened it and let go."""


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


def opened_gpu(handle: str, device: torch.device) -> torch.Tensor:
    """The bytes of another process's `GpuMemory`."""
    _, *shared = ast.literal_eval(handle)
    torch.cuda.init()  # this may be the first that the process does on a GPU
    # The GPU's number may differ between the two processes: each sees a selection of its own.
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *shared)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def synchronize(device: torch.device) -> None:
    """Wait for what was asked of a GPU; elsewhere it is done already."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8))
