"""Whole tensors out of the shards of several ranks, which this process is one after the other."""

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlix.engine.weights.gather import whole_tensors

COPIES, RANKS = 2, 3
WHOLE = {
    "rows": (torch.arange(35.0).view(5, 7), Shard(0)),
    "columns": (torch.arange(35.0).view(5, 7) + 0.5, Shard(1)),
    "last": (torch.arange(30).view(2, 3, 5), Shard(-1)),
    "short": (torch.ones(1, dtype=torch.bfloat16), Shard(0)),
    "empty": (torch.empty(0, 3), Shard(0)),
    "copied": (torch.eye(3), Replicate()),
}


@pytest.mark.parametrize("chunk_bytes", [1, 200, 2**20])
def test_tensors_are_gathered_along_the_dimension_they_are_cut_along(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    sent: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def gather(flat: torch.Tensor, pieces: list[torch.Tensor] | None, **_: Any) -> None:
        sent[dist.get_rank()].append(flat)
        for rank, piece in enumerate(pieces or ()):
            piece.copy_(sent[rank][len(sent[0]) - 1])

    monkeypatch.setattr(dist, "gather", gather)
    for rank in reversed(range(COPIES * RANKS)):
        found = gathered(rank, chunk_bytes)
        assert not (found and rank)
    assert sorted(sent) == list(range(RANKS))
    assert found.keys() == WHOLE.keys()
    for name, (whole, _) in WHOLE.items():
        assert found[name].dtype == whole.dtype
        assert torch.equal(found[name], whole)


def gathered(rank: int, chunk_bytes: int) -> dict[str, torch.Tensor]:
    dist.init_process_group("fake", rank=rank, world_size=COPIES * RANKS, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (COPIES, RANKS))
        parts = []
        for name, (whole, how) in WHOLE.items():
            chunks = whole.chunk(RANKS, how.dim) if isinstance(how, Shard) else [whole] * RANKS
            at = rank % RANKS
            local = chunks[at] if at < len(chunks) else chunks[0].narrow(how.dim, 0, 0)
            given = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
            parts.append((name, DTensor.from_local(local, mesh, (Replicate(), how), **given)))
        return dict(whole_tensors(parts, chunk_bytes))
    finally:
        dist.destroy_process_group()
