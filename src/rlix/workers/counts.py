"""Whole numbers that a user gives."""

from numbers import Integral

from rlix.protocol.errors import SpecError


def is_count(value: object, least: int = 1) -> bool:
    """Whether it is a whole number, and `least` or more."""
    return isinstance(value, Integral) and int(value) >= least


def check_count(what: str, value: object, least: int = 1) -> None:
    """Raises SpecError: it is none."""
    if not is_count(value, least):
        raise SpecError(f"{what} must be a whole number from {least} on, not {value!r}")
