"""Tensors that go from one process to another without leaving their GPU.

The sender copies one into memory that it shares, so that it may write to its own at once; the reader copies it into its
own as soon as it comes, so that nothing of it is the sender's any more when the message is there.
"""

from dataclasses import replace

import torch

from rlix.flow.channels.codec import INLINE_BYTES, Parcel
from rlix.flow.memory import GpuMemory, opened_gpu, synchronize
from rlix.flow.messages.routes import Carrier, Place, Route


def gpu_of(tensor: torch.Tensor, place: Place) -> str:
    """The name of the GPU that it is on, "" in host memory."""
    return place.gpus[tensor.device.index] if tensor.device.type == "cuda" else ""


def shared(tensor: torch.Tensor, place: Place, way: Route, held: list[GpuMemory]) -> tuple[str, str] | None:
    """The tensor's GPU and a handle of its bytes in memory there; None: it goes another way.

    The memory is added to `held`, and must live until the reader has copied it.
    """
    gpu = gpu_of(tensor, place)
    if way.of(gpu) is not Carrier.CUDA_IPC or tensor.nbytes < INLINE_BYTES:
        return None
    block = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    memory = GpuMemory(block.numel(), tensor.device)
    memory.data.copy_(block)
    synchronize(tensor.device)
    held.append(memory)
    return gpu, memory.handle


def landed(parcel: Parcel, place: Place) -> Parcel:
    """With copies in place of what lies in the sender's memory on GPUs of this process."""
    copies = []
    for layout in parcel.layouts:
        block = None
        if layout.shared is not None:
            gpu, handle = layout.shared
            device = torch.device("cuda", place.gpus.index(gpu))
            block = opened_gpu(handle, device).clone()
            synchronize(device)
        copies.append(block)
    return replace(parcel, landed=tuple(copies))
