"""The process that starts one job of the queue, once: `python -m rlix.serve.queue.starter FOLDER RUNS_DIR ATTEMPT`.

A process of its own, because a job's files are its user's: what they do while they are read is not done to the
service. It holds a lock while it works, and leaves a note of what came of it, so that whoever does not know, such as a
service that was killed, may start it again.
"""

import json
import logging
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rlix.node.file_lock import FileBusyError, lock_file
from rlix.protocol.errors import RlixError, SpecError
from rlix.serve.queue.runner import FILES, JOB_FILE

_LOCK_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Note:
    """What came of a start: the job's id in the pool, or what was wrong and whether with the job itself."""

    pipeline_id: str = ""
    error: str = ""
    mistake: bool = False


def read_note(folder: Path, attempt: int) -> Note | None:
    """None: nobody has started this attempt so far."""
    path = _note(folder, attempt)
    try:
        return Note(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # of a host that lost its power
        return Note(error=f"what came of its start cannot be read in {path}")


def attempts(folder: Path) -> list[int]:
    """Those that were made with the job whose work is there."""
    numbers = [path.stem.removeprefix("started-") for path in folder.glob("started-*.json")]
    return [int(number) for number in numbers if number.isdecimal()]


def is_starting(folder: Path) -> bool:
    """Whether a starter is at work there."""
    if not (folder / _LOCK).exists():
        return False
    try:
        lock_file(folder / _LOCK).close()
    except FileBusyError:
        return True
    return False


def start(folder: Path, runs_dir: Path, attempt: int) -> None:
    """Launches the job whose work is in `folder` in the pool that runs here, unless somebody has."""
    with closing(lock_file(folder / _LOCK, _LOCK_WAIT_S)):
        if read_note(folder, attempt) is not None:
            return
        try:
            note = Note(_launched(folder, runs_dir, attempt))
        except RlixError as error:
            note = Note(error=str(error), mistake=isinstance(error, SpecError))
        partial = _note(folder, attempt).with_suffix(".partial")
        partial.write_text(json.dumps(asdict(note)))
        partial.rename(_note(folder, attempt))


def _launched(folder: Path, runs_dir: Path, attempt: int) -> str:
    from rlix.control.init import init
    from rlix.control.settings import Settings
    from rlix.node.run_folder import check_free
    from rlix.pipeline.jobs.handle import FINAL_STATES, find_jobs
    from rlix.pipeline.jobs.launch import launch
    from rlix.pipeline.spec.job import load_job

    spec = load_job(folder / FILES / JOB_FILE)
    orchestrator = init(create_if_missing=False, settings=Settings.from_env(), log_level="WARNING")
    for job in find_jobs(orchestrator):  # whoever launched it may have been killed before it could say so
        if job.run_dir == runs_dir / spec.name and job.status().state not in FINAL_STATES:
            job.start()
            return job.pipeline_id
    try:
        check_free(runs_dir / spec.name)
    except SpecError as error:  # one that was launched before and does not answer now: no mistake of the job's
        raise RlixError(str(error)) from error
    (handle,) = launch([spec], runs_dir, resume=attempt > 0)
    return handle.pipeline_id


_LOCK = "starter.lock"


def _note(folder: Path, attempt: int) -> Path:
    return folder / f"started-{attempt}.json"


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    folder, runs_dir, attempt = sys.argv[1:]
    start(Path(folder), Path(runs_dir), int(attempt))
    return 0


if __name__ == "__main__":
    sys.exit(main())
