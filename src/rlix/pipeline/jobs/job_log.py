"""The log of a job in its run folder, and what an error is called at its end."""

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

_LIBRARY = "rlix"
_FULL = ("No space left on device", "Disk quota exceeded", "os error 28")


class JobLog(logging.FileHandler):
    """What the library says in this process, from INFO up, in `job.log`; on stderr only what is a warning or worse.

    A log that cannot be written, on a full disk for instance, stops nothing.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "job.log", encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._screen = logging.StreamHandler()
        self._screen.setLevel(logging.WARNING)
        library = logging.getLogger(_LIBRARY)
        self._before = library.level
        library.setLevel(logging.INFO)
        library.addHandler(self)
        if not logging.getLogger().handlers:  # with a handler of its own it would say nothing there any more
            library.addHandler(self._screen)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it is opened with its first line
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Nothing: whoever logs has something else to do."""

    def close(self) -> None:
        library = logging.getLogger(_LIBRARY)
        library.removeHandler(self)
        library.removeHandler(self._screen)
        library.setLevel(self._before)
        super().close()


def is_full_disk(error: BaseException) -> bool:
    """Whether a full disk is behind it, in whatever process that was found."""
    return any(
        (isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)) or any(text in str(e) for text in _FULL)
        for e in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
