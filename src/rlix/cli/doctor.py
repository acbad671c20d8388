"""`rlix doctor`: what the hosts of a pool have, see and reach, and what of it does not fit together."""

import shutil
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import ray
from rich.console import Console
from rich.table import Table

from rlix.cli.answers import DoctorAnswer, DoctorHostAnswer, print_answer
from rlix.cli.pool import running_pool
from rlix.cli.text import count
from rlix.cli.view import make_console
from rlix.control.hosts import START_WITH_GPUS
from rlix.control.rpc import get
from rlix.control.settings import Settings
from rlix.node.addresses import host_name
from rlix.node.devices import device_keys
from rlix.node.host import Host, host
from rlix.node.shared_folder import Token
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Device, NodeState, NodeStatus

EXIT_FAILED = 1
_TIMEOUT_S = 90.0
_LEAST_SHM_BYTES = 2**30


def examine(runs_dir: Path, paths: Sequence[Path], *, as_json: bool = False) -> int:
    """Print what each host has, and what is wrong; returns 1 when anything is."""
    console = make_console(stderr=as_json)
    token = Token(runs_dir.absolute())
    try:
        asked = [str(token.path), *(str(path.absolute()) for path in paths)]
        with running_pool(Settings.from_env()) as pool:
            if pool is None:
                nodes: tuple[NodeStatus, ...] = ()
                devices: tuple[Device, ...] | None = None
                hosts: tuple[Host, ...] = (host("", "this host", (), asked, token.text),)
                console.print("no control plane runs here: this is about this host alone", highlight=False)
            else:
                requests = [pool.orchestrator.nodes.remote(), pool.orchestrator.hosts.remote(asked, token.text)]
                nodes, hosts = get(requests, what="the hosts of the pool of themselves", timeout_s=_TIMEOUT_S)
                here = ray.get_runtime_context().get_node_id()
                hosts = tuple(sorted(hosts, key=lambda each: each.node_id != here))
                devices = get(pool.orchestrator.devices.remote(), what="the pool of its devices", timeout_s=_TIMEOUT_S)
    finally:
        token.remove()
    named = {str(token.path): f"{runs_dir.absolute()}, which {host_name()} sees: runs of several hosts need it shared"}
    wrong = [str(node) for node in nodes if node.state is NodeState.MISCONFIGURED]
    wrong += [line for each in hosts for line in problems(each, hosts, named)]
    wrong += [] if devices is None else of_the_pool(devices)
    if as_json:
        print_answer(DoctorAnswer(hosts=tuple(map(_answer, hosts)), problems=tuple(wrong)))
        return EXIT_FAILED if wrong else 0
    console.print(_table(hosts))
    for each in hosts:
        console.print(f"{each.name}: {_packages(each)}", highlight=False, soft_wrap=True)
    console.print(_of_this_machine(runs_dir), highlight=False, soft_wrap=True)
    for line in wrong:
        console.print(f"[bold red]![/] {line}", highlight=False, soft_wrap=True)
    _verdict(console, wrong, len(hosts))
    return EXIT_FAILED if wrong else 0


def of_the_pool(devices: Sequence[Device]) -> list[str]:
    """What is wrong with all hosts together."""
    return [] if devices else [f"the pool has no GPUs: {START_WITH_GPUS}"]


def problems(one: Host, hosts: Sequence[Host], named: dict[str, str]) -> list[str]:
    """What is wrong with a host, a sentence each. `named`: what to call some of the paths that it was asked about."""
    who = f"{one.name} ({one.address})"
    names = {each.address: each.name for each in hosts}
    found = [f"{who} does not see {named.get(path, path)}" for path in one.unseen]
    found += [f"{who} does not reach {names.get(address, address)} ({address})" for address in one.unreached]
    if one.memory[0] < _LEAST_SHM_BYTES:
        found.append(f"{who}: /dev/shm has {_gib(one.memory[0])}: weights and messages pass through it")
    if any(each.locks != one.locks for each in hosts[:1]):
        found.append(f"{who} keeps device locks in {one.locks}, {hosts[0].name} in {hosts[0].locks} (RLIX_LOCK_DIR)")
    return found


def _answer(each: Host) -> DoctorHostAnswer:
    return DoctorHostAnswer(
        name=each.name,
        address=each.address,
        own_name=each.own_name,
        versions=each.software.versions,
        shm=each.memory[0],
        shm_free=each.memory[1],
        locks=each.locks,
    )


def _table(hosts: Sequence[Host]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("host", "address", "its own name is", "RLix", "Python", "/dev/shm free", "at"):
        table.add_column(column, overflow="fold")
    for each in hosts:
        versions = each.software.versions
        memory = f"{_gib(each.memory[1])} of {_gib(each.memory[0])}"
        row = each.name, each.address, _own(each), versions["RLix"], versions["Python"], memory
        table.add_row(*row, versions["the interpreter"])
    return table


def _packages(one: Host) -> str:
    shown = ("Ray", "torch", "transformers", "vLLM", "PEFT")
    return ", ".join(f"{name} {one.software.versions.get(name) or 'is missing'}" for name in shown)


def _of_this_machine(runs_dir: Path) -> str:
    free = shutil.disk_usage(runs_dir).free
    try:
        gpus = count(len(device_keys()), "GPU")
    except RlixError as error:
        gpus = f"GPUs not known ({error})"
    return f"here: {gpus}, {_gib(free)} free on the disk of {runs_dir}"


def _own(one: Host) -> str:
    """RLix names the interface where the name leads to this host alone, as on Debian."""
    shown = [address for address in one.own_name if not ip_address(address).is_link_local]
    return ", ".join(shown) or "unknown"


def _verdict(console: Console, wrong: Sequence[str], hosts: int) -> None:
    on = count(hosts, "host")
    said = f"{len(wrong)} found on {on}" if wrong else f"nothing wrong on {on}"
    console.print(said, highlight=False)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
