"""GB/s of moving a model's bytes off the device and back, as a share of one large copy through pinned memory."""

import torch

from benchmarks.gpu.common import Row, seconds, settle
from rlix.engine.movers import SwapMover
from rlix.engine.residency import ResidentSet


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    off, on = _copy_speed(2**30 if cuda else 2**22, device)
    # The shapes of an 8 GB training state: blocks of large matrices, small norms and biases between them.
    tensors = [torch.ones(2**24 if cuda else 2**14, device=device) for _ in range(124)]
    tensors += [torch.ones(4096, device=device) for _ in range(500)]
    resident = ResidentSet("benchmark", lambda: tensors, device, mover=SwapMover(device))
    moves = []
    for _ in range(4):
        away = resident.to_host()
        held = torch.cuda.memory_allocated(device) if cuda else 0
        back = resident.to_device()
        settle(device)
        moves.append((away, back))
    first = moves[0][0]
    away = max((move[0] for move in moves[1:]), key=lambda move: move.bytes_per_second)
    back = max((move[1] for move in moves), key=lambda move: move.bytes_per_second)
    print(f"{away.bytes / 1e9:.1f} GB; left on the device while away: {held / 1e6:.1f} MB")
    print(f"fragmentation {away.fragmentation_before:.3f} -> {away.fragmentation_after:.3f} by moving off")
    assert all(float(tensor[0]) == 1.0 == float(tensor[-1]) for tensor in tensors)
    return [
        Row("to the host", away.bytes_per_second / 1e9, "GB/s", "pinned copy", off, ">= 0.8"),
        Row("to the host, first (allocates buffers)", first.bytes_per_second / 1e9, "GB/s", "pinned copy", off),
        Row("to the device", back.bytes_per_second / 1e9, "GB/s", "pinned copy", on, ">= 0.8"),
    ]


def _copy_speed(size: int, device: torch.device) -> tuple[float, float]:
    """GB/s to and from pinned host memory."""
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    off = seconds(lambda: host.copy_(there, non_blocking=True), device)
    on = seconds(lambda: there.copy_(host, non_blocking=True), device)
    return size / off / 1e9, size / on / 1e9
