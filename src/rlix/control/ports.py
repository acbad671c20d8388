"""What `Core` needs of the world: a clock and the nodes. The live pool and the simulator bring their own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rlix.protocol.messages import Device, Occupant, Process


class Timer(Protocol):
    def cancel(self) -> object: ...


class Clock(Protocol):
    """Seconds of one clock, and callbacks later on its thread. An asyncio event loop is one."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer: ...


class Nodes(Protocol):
    """Looks at devices and processes, on whichever node they are, and ends processes.

    Each call returns at once; `done` is called exactly once, on the clock's thread, perhaps before the call returns.
    A node that does not answer has no news: nothing is said of its devices but that they are occupied.
    """

    def occupied(self, devices: Sequence[Device], done: Callable[[tuple[Occupant, ...]], None]) -> None:
        """Which of the devices are locked now, and by whom."""
        ...

    def kill(
        self,
        processes: Sequence[Process],
        why: str,
        done: Callable[[tuple[Process, ...]], None],
        devices: Sequence[Device] = (),
    ) -> None:
        """Ends the processes, which are told `why` where that is not empty; `done` gets those that still live after a
        few seconds. Given devices, a node ends those only that it sees to have one of their locks open."""
        ...

    def states(self, processes: Sequence[Process], done: Callable[[Mapping[Process, str]], None]) -> None:
        """ "running", "stopped" or "dead" by process; one whose node does not answer is left out."""
        ...
