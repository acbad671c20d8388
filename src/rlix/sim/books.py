"""Reads along what the core records, and books which devices drain and how many bundles change hands."""

from collections.abc import Sequence

from rlix.protocol.events import DrainStarted, Event, LeaseGranted, LeaseReleased, PipelineEnding
from rlix.protocol.messages import Lease, LeaseState
from rlix.protocol.types import Phase
from rlix.scheduler.state import State
from rlix.sim.ledger import Use
from rlix.sim.trace import Trace


class Forgetful:
    """A journal that keeps nothing."""

    def check(self, event: Event) -> None:
        pass

    def append(self, events: Sequence[Event]) -> None:
        pass

    def compact(self, events: Sequence[Event]) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Books(Forgetful):
    """A journal that keeps nothing. What jobs do on devices that they may use, they book themselves.

    A device that waits for others of its grant to drain counts as draining. `state` is the core's, to be set before
    anything is granted; events come when they have been applied to it.
    """

    state: State

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._leases: dict[int, Lease] = {}  # by epoch

    def append(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case LeaseGranted():
                    self._granted(event.lease)
                case DrainStarted():
                    self._trace.ledger.put(self._leases[event.epoch].devices, Use.DRAIN)
                case LeaseReleased():
                    self._ended(event.epoch)
                case PipelineEnding():  # grants that are not active yet go with their pipeline
                    of_pipeline = [e for e, lease in self._leases.items() if lease.pipeline_id == event.pipeline_id]
                    for epoch in of_pipeline:
                        if epoch not in self.state.leases:
                            self._ended(epoch)

    def _granted(self, lease: Lease) -> None:
        self._leases[lease.epoch] = lease
        self._trace.switches += lease.phase is Phase.ROLLOUT
        if self.state.leases[lease.epoch].state is LeaseState.PENDING:
            self._trace.ledger.put(lease.devices, Use.DRAIN)

    def _ended(self, epoch: int) -> None:
        for device in self._leases.pop(epoch).devices:
            if self.state.holder(device) is None:
                promised = self.state.successors((device,))
                self._trace.ledger.put((device,), Use.DRAIN if promised else Use.FREE)
