"""What members of a channel have of `torch.distributed`, which knows nothing of it: no other group is in the way."""

from datetime import timedelta
from typing import Any

import torch


def open_store(host: str, port: int, timeout_s: float, *, server: bool = False) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, server, timeout, wait_for_workers=False)  # type: ignore[attr-defined]


def open_nccl(address: tuple[str, int], rank: int, size: int, timeout_s: float, device: torch.device) -> Any:
    """With its communicator made, which NCCL otherwise does in the first transfer; by the store at this address."""
    from torch import distributed

    dist: Any = distributed  # a build without CUDA has no ProcessGroupNCCL
    options = dist.ProcessGroupNCCL.Options()
    # When it expires NCCL's watchdog ends the process: ours is to come first.
    options._timeout = 2 * timedelta(seconds=timeout_s)
    group = dist.ProcessGroupNCCL(open_store(*address, timeout_s), rank, size, options)
    group.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.current_stream(device).synchronize()
    return group
