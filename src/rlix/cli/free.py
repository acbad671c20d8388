"""`rlix free`: a person's word that nobody's memory is on a quarantined device any more."""

from collections.abc import Callable

from rlix.cli.answers import FreeAnswer, print_answer
from rlix.cli.pool import StatusSource, running_pool
from rlix.cli.view import alarms, make_console
from rlix.control.rpc import get
from rlix.control.settings import Settings
from rlix.monitor.waits import device_list
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import ControlStatus, Lease, LeaseState

CALL_TIMEOUT_S = 30.0
EXIT_FAILED = 1


def free_device(device: int, *, sure: bool, ask: Callable[[str], bool], as_json: bool = False) -> int:
    """End what keeps a quarantined device, once `ask` has been told what that is, unless the user is `sure`."""
    console = make_console(stderr=as_json)
    with running_pool(Settings.from_env()) as pool:
        if pool is None:
            raise SpecError("no control plane runs here, so no device is in quarantine")
        control = StatusSource(pool)()
        devices = kept_with(control, device)
        for alarm in alarms(control):
            console.print(alarm, markup=False, highlight=False, soft_wrap=True)
        which = device_list(devices)
        if not sure and not ask(f"Give {which} to other jobs? Memory that is still there may fail them."):
            return EXIT_FAILED
        ended: tuple[Lease, ...] = get(
            pool.orchestrator.give_up_device.remote(device), what=f"freeing device {device}", timeout_s=CALL_TIMEOUT_S
        )
    freed = tuple(sorted({d for lease in ended for d in lease.devices}))
    if as_json:
        print_answer(FreeAnswer(devices=freed))
    else:
        console.print(f"free again: {device_list(freed)}", markup=False, highlight=False)
    return 0


def kept_with(control: ControlStatus, device: int) -> tuple[int, ...]:
    """The devices that are freed with a quarantined one: those of its lease.

    Raises:
        SpecError: it is not quarantined; the message says which are.
    """
    kept = [status.lease.devices for status in control.leases if status.state is LeaseState.QUARANTINED]
    with_it = {other for devices in kept if device in devices for other in devices}
    if not with_it:
        there = tuple(sorted({d for devices in kept for d in devices}))
        others = f"those in quarantine: {device_list(there)}" if there else "none is"
        raise SpecError(f"rlix free {device}: that device is not in quarantine; {others}")
    return tuple(sorted(with_it))
