"""What the ranks of a group do together when they write: agree that all went well, and write into one folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from rlix.node.addresses import host_name
from rlix.node.shared_folder import Token, sees
from rlix.protocol.errors import RlixError


@contextmanager
def agreed(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Leave together. What the body raises on one rank is raised on all, none of which then waits for that one.

    Raises:
        RlixError: with several ranks; names those that failed, and how.
    """
    if not dist.is_initialized():
        yield
        return
    problem = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised below, once all ranks know
        problem = f"{type(error).__name__}: {error}"
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group)
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]:
        raise RlixError("; ".join(failed))


def check_shared(folder: Path, rank: int, group: dist.ProcessGroup | None = None) -> None:
    """All ranks are to write into `folder`, which rank 0 has made: so it must be one and the same on all their hosts.

    Raises:
        RlixError: a rank's host has another one, or none; names the host, and rank 0's.
    """
    if not dist.is_initialized():
        return
    made: list[Any] = [None]
    token = None
    with agreed(group):
        if rank == 0:
            token = Token(folder)
            made[0] = token.path, token.text, host_name()
    dist.broadcast_object_list(made, group=group, group_src=0)
    path, text, first = made[0]
    with agreed(group):
        if not sees(path, text):
            raise RlixError(
                f"host {host_name()} does not see {folder}, into which rank 0 writes on host {first}: where ranks on "
                "several hosts save to, there must be a folder that these hosts share"
            )
    if token is not None:
        token.remove()


class WholeWriter(HuggingFaceStorageWriter):
    """Does not take a save for complete to which a rank's part has not come."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts = {part.storage_data.relative_path for of_rank in results for part in of_rank}
        if missing := [name for name in sorted(parts) if not (Path(self.path) / name).is_file()]:
            raise RlixError(f"{', '.join(missing)} did not come to {self.path} on rank 0's host, {host_name()}")
        super().finish(metadata, results)
