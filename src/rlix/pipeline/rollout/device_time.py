"""How long there was a device to generate on."""

from collections.abc import Callable


class DeviceTime:
    """A clock that stands while there is none: what waits in the queue for one loses none of its time.

    One thread notes, any may read.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state: tuple[float, float | None] = (0.0, None)  # seconds so far, and since when there is one now

    def note(self, has_devices: bool) -> None:
        """From now on there is a device, or none."""
        _, since = self._state
        if has_devices != (since is not None):
            self._state = (self.seconds, self._clock() if has_devices else None)

    @property
    def seconds(self) -> float:
        before, since = self._state
        return before if since is None else before + self._clock() - since
