"""GB/s of a weight sync through host memory, all in one process, against a plain copy and a per-parameter loop.

Weights are packed into host buckets, which are copied once as Ray's object store would copy them, and applied from
there to a replica.
"""

import torch
from torch import nn

from benchmarks.gpu.common import Row, seconds
from rlix.engine.weights import publication


def measure(device: torch.device) -> list[Row]:
    cuda = device.type == "cuda"
    shapes = {
        "large tensors": (32, 2**24) if cuda else (4, 2**16),
        "small tensors": (20_000, 4096) if cuda else (500, 512),
    }
    return [row for name, (count, size) in shapes.items() for row in _compare(name, count, size, device)]


def _compare(name: str, count: int, size: int, device: torch.device) -> list[Row]:
    trainer = _model(count, size, 1.0, device)
    replica = _model(count, size, 0.0, device)
    nbytes = 4 * count * size

    def sync() -> None:
        named = publication.named_weights(trainer)
        published = publication.publish(named.items(), 0, put=lambda bucket: bucket.copy())
        publication.apply(replica, published)

    @torch.no_grad()
    def loop() -> None:
        """Each parameter to the host, into shared memory, and to the replica."""
        for source, target in zip(trainer, replica, strict=True):
            target.copy_(torch.from_numpy(source.detach().cpu().numpy().copy()))

    copy = _copy_seconds(count * size, device)
    ours = nbytes / seconds(sync, device, repeat=3) / 1e9
    assert all(bool((tensor == 1.0).all()) for tensor in (replica[0], replica[-1]))
    each = nbytes / seconds(loop, device, repeat=3) / 1e9
    return [
        Row(f"{count:,} {name}", ours, "GB/s", "plain copy", nbytes / copy / 1e9),
        Row(f"{count:,} {name}", ours, "GB/s", "loop", each, ">= 10" if "small" in name else ""),
    ]


def _copy_seconds(size: int, device: torch.device) -> float:
    """As many bytes in one tensor, through the host."""
    source, target = torch.ones(size, device=device), torch.zeros(size, device=device)
    return seconds(lambda: target.copy_(source.cpu()), device, repeat=3)


def _model(count: int, size: int, value: float, device: torch.device) -> nn.ParameterList:
    return nn.ParameterList(torch.full((size,), value, device=device) for _ in range(count))
