"""Text for files: without the colours that Ray puts into its tracebacks."""

import logging
import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    return _COLOURS.sub("", text)


class PlainFormatter(logging.Formatter):
    """How lines of a log file look."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))
