"""`rlix drain` and `uncordon`: a host out of service before maintenance, and back; what `rlix status` says of hosts."""

from collections.abc import Sequence

from rlix.cli.answers import HostAnswer, HostsAnswer, print_answer
from rlix.cli.pool import running_pool
from rlix.cli.view import make_console
from rlix.control.rpc import get
from rlix.control.settings import Settings
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import NodeState, NodeStatus

CALL_TIMEOUT_S = 60.0


def cordon(node: str, *, wanted: bool, as_json: bool = False) -> int:
    """Take a host out of service, or (not `wanted`) back into it."""
    with running_pool(Settings.from_env()) as pool:
        if pool is None:
            raise SpecError("no control plane runs here, so it has no hosts")
        asked = pool.orchestrator.cordon.remote(node, wanted)
        statuses: tuple[NodeStatus, ...] = get(asked, what=f"the host {node}", timeout_s=CALL_TIMEOUT_S)
    if as_json:
        print_answer(HostsAnswer(hosts=hosts_of(statuses)))
        return 0
    for status in statuses:
        make_console().print(str(status), markup=False, highlight=False, soft_wrap=True)
    return 0


def hosts_of(statuses: Sequence[NodeStatus]) -> tuple[HostAnswer, ...]:
    return tuple(HostAnswer(name=s.name, address=s.address, state=s.state, why=s.why) for s in statuses)


def host_lines(hosts: Sequence[NodeStatus]) -> tuple[str, ...]:
    """How many hosts are in which state, where there are several, and a line for each that is not ready."""
    counts = [(state, sum(host.state is state for host in hosts)) for state in NodeState]
    total = [f"hosts: {', '.join(f'{count} {state}' for state, count in counts if count)}"] if len(hosts) > 1 else []
    return (*total, *(str(host) for host in hosts if host.state is not NodeState.READY))
