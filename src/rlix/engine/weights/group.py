"""What members of a channel have of `torch.distributed`, which knows nothing of it: no other group is in the way."""

from datetime import timedelta
from typing import Any

import torch

from rlix.flow.workers.store import GroupStore


def open_nccl(store: GroupStore, rank: int, size: int, timeout_s: float, device: torch.device) -> Any:
    """With its communicator made, which NCCL otherwise does in the first transfer; keep the store meanwhile."""
    from torch import distributed

    dist: Any = distributed  # a build without CUDA has no ProcessGroupNCCL
    options = dist.ProcessGroupNCCL.Options()
    # When it expires NCCL's watchdog ends the process: ours is to come first.
    options._timeout = 2 * timedelta(seconds=timeout_s)
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.current_stream(device).synchronize()
    return group
