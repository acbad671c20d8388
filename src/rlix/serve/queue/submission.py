"""What a job file says that the queue must know. It is not checked here: reading it whole would run its user's code."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from rlix.pipeline.spec.clusters import ClustersSpec
from rlix.pipeline.spec.job import named_files
from rlix.protocol.errors import SpecError
from rlix.protocol.spec_file import problems_of, read_yaml
from rlix.protocol.types import LONGEST_NAME, NAME, ClusterName, folder_problem
from rlix.serve.queue.runner import JOB_FILE

_LONGEST_PART, _DEEPEST = 255, 32  # bytes of a file's name; folders
MOST_BYTES, MOST_FILES = 32 << 20, 1000
"""Of the files that go with a job: larger ones belong on a disk that the pool's hosts share."""
_LONGEST_SPEC = 256 << 10  # characters; YAML is read at some ten thousand a second


def read_submission(text: str, devices: int, files: Collection[str] = ()) -> tuple[str, int]:
    """The job's name, and the GPUs that its largest gang needs at once.

    Args:
        devices: of the pool, which is what a plan that says no number is made for.
        files: that were sent with it.

    Raises:
        SpecError: it says no such thing, is too long, or names a file that was not sent.
    """
    if len(text) > _LONGEST_SPEC:
        raise SpecError(
            f"{JOB_FILE}: has {len(text):,} characters, and a queue takes {_LONGEST_SPEC:,}: put what is long "
            "into files beside it"
        )
    with TemporaryDirectory(prefix="rlix-submit-") as folder:
        path = Path(folder) / JOB_FILE
        path.write_text(text, encoding="utf-8")
        try:
            data, _ = read_yaml(path)
            missing = [name for name in named_files(path) if str(PurePosixPath(name)) not in files]
        except SpecError as error:
            raise SpecError(str(error).replace(str(path), JOB_FILE)) from None
    if missing:
        raise SpecError(
            f"{JOB_FILE}: names {missing[0]}, which is not among the `files` that were sent; send it, or name it by an "
            "absolute path that the pool's hosts see"
        )
    name = data.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > LONGEST_NAME or folder_problem(name):
        raise SpecError(f"{JOB_FILE}: name: must be a name of letters, digits and ._-, not {name!r}")
    given = data.get("clusters") or {}
    try:
        clusters = ClustersSpec.model_validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        lines = [
            f"{JOB_FILE}: clusters.{p.field}: {p.message}" for p in problems_of(error.errors(), ClustersSpec, given)
        ]
        raise SpecError("\n".join(lines)) from None
    return name, _gpus(clusters, data.get("plan"), devices)


def _gpus(clusters: ClustersSpec, plan: Any, devices: int) -> int:
    """Clusters without devices of their own are placed on each other; those that name devices have these."""
    named: set[int] = set()
    most = 0
    for name, cluster in clusters.items():
        if name != ClusterName.ACTOR_INFER:
            named.update(cluster.devices or ())
            most = max(most, cluster.count or cluster.least)
    if plan is not None and not any(cluster.count for _, cluster in clusters.items()):
        planned = plan.get("gpus") if isinstance(plan, Mapping) else None
        most = planned if isinstance(planned, int) and planned > 0 else devices
    return max(1, most, len(named))


def check_files(files: Mapping[str, bytes]) -> None:
    """Raises SpecError: a path leads out of the job's folder or is none, or there is too much."""
    if len(files) > MOST_FILES:
        raise SpecError(
            f"{len(files):,} files go with the job, and a queue takes {MOST_FILES:,}: put them where the pool's "
            "hosts see them, and name them by absolute paths"
        )
    if bad := [path for path in files if not _inside(path)]:
        raise SpecError(f"{bad[0]!r}: is not inside the folder of the job file; name it by an absolute path")
    folders = {str(folder): path for path in files for folder in PurePosixPath(path).parents}
    if both := sorted(folders.keys() & {*files, JOB_FILE}):
        raise SpecError(f"{both[0]}: is a file, and the folder of {folders[both[0]]}")
    check_size(len(content) for content in files.values())


def check_size(sizes: Iterable[int]) -> None:
    """Raises SpecError when files of so many bytes are too much for a queue to keep."""
    if (total := sum(sizes)) > MOST_BYTES:
        raise SpecError(
            f"the files that the job names have {total:,} bytes, and a queue takes {MOST_BYTES:,}: put them where the "
            "pool's hosts see them, and name them by absolute paths"
        )


def _inside(path: str) -> bool:
    """Whether it is the one way to write a file's path below the folder, and the disk takes it."""
    parts = PurePosixPath(path).parts
    plain = path.isprintable() and "/".join(parts) == path and ".." not in parts
    fits = len(parts) <= _DEEPEST and all(len(part.encode()) <= _LONGEST_PART for part in parts)
    return plain and fits and path not in ("", JOB_FILE)
