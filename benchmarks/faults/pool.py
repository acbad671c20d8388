"""A control plane of the campaign's own: eight virtual GPUs, a small disk for its journal, and nothing left behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Self

import psutil
import ray

from rlix.control.announcement import Announcement, Claim
from rlix.control.init import init, shutdown
from rlix.control.settings import Settings
from rlix.node.device_lock import DIRECTORY_VARIABLE, LockRecord, holder
from rlix.node.process import state
from rlix.protocol.messages import ControlStatus, Device, Process
from rlix.protocol.types import NAMESPACE, VIRTUAL_DEVICE_RESOURCE

DEVICES = 8
MARK = "RLIX_FAULT_CAMPAIGN"
HOME_BYTES = 64 << 20
_ENDS_S = 20.0
_START = """
from ray._private import services
services.resolve_ip_for_localhost = lambda host: host  # `ray start` would leave the loopback interface
from ray.scripts.scripts import main
main()
"""


class Pool:
    """Use it as a context; the environment of this process is changed for good."""

    def __init__(self, settings: dict[str, float]) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="rlix-faults-"))
        self.home = self.folder / "home"
        self.home.mkdir()
        self.locks = self.folder / "locks"
        os.environ |= {
            MARK: self.mark,
            "RLIX_HOME": str(self.home),
            DIRECTORY_VARIABLE: str(self.locks),
            "RAY_AUTH_MODE": "disabled",
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path[1:]]),
        }
        os.environ.pop("RAY_ADDRESS", None)
        self.settings = Settings(home=self.home, ray_address="local", **settings)  # type: ignore[arg-type]
        self._claim: Claim | None = None
        self.small_disk = self._mount()
        self.orchestrator: Any = None
        self.nodes: list[subprocess.Popen[bytes]] = []

    def _mount(self) -> bool:
        """Whether the home is a disk of its own, which may be filled."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={HOME_BYTES}", "tmpfs", str(self.home)]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            return False

    def __enter__(self) -> Self:
        try:
            self.orchestrator = init(virtual_gpus=DEVICES, settings=self.settings, log_level="INFO")
            self._claim = Claim(self.home)
            assert self._claim.take()
            address = ray.get_runtime_context().gcs_address
            self._claim.announce(Announcement(address, os.getpid(), time.time(), DEVICES, "cpu", 1e6, None))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._claim is not None:
            self._claim.withdraw()
            self._claim.close()
        shutdown()
        ray.shutdown()
        for process in self.ours():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.small_disk:
            subprocess.run(["umount", "-l", str(self.home)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ours(self) -> list[psutil.Process]:
        """Every process of the campaign but this one."""
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and _mark_of(p) == self.mark]

    def left(self) -> list[psutil.Process]:
        """The campaign's processes that do not end by themselves in a while, once Ray was shut down."""
        deadline = time.monotonic() + _ENDS_S
        while (left := self.ours()) and time.monotonic() < deadline:
            psutil.wait_procs(left, timeout=0.5)
        return left

    def journal(self) -> Path:
        return next(path for path in self.home.glob("journal-*.db"))

    def status(self, timeout_s: float = 60.0) -> ControlStatus:
        status: ControlStatus = ray.get(self.orchestrator.status.remote(), timeout=timeout_s)
        return status

    # -- what is on its host, and on any

    def here(self) -> tuple[Device, ...]:
        """The devices of this host."""
        return self.status().devices[:DEVICES]

    def look(self, device: Device) -> LockRecord | None:
        """Who has bytes on a device."""
        record = holder(device.key, self.locks)
        return record if record is not None and record.processes else None

    def signal(self, process: Process, number: signal.Signals) -> None:
        os.kill(process.pid, number)

    def state(self, process: Process) -> str:
        return state(process)

    # -- a second node

    def add_node(self, gpus: int) -> str:
        """Starts another raylet of this machine; returns its node id."""
        before = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        arguments = [f"--address={ray.get_runtime_context().gcs_address}", "--node-ip-address=127.0.0.1"]
        arguments += [f"--num-gpus={gpus}", "--num-cpus=16", "--object-store-memory=100000000", "--disable-usage-stats"]
        arguments += [f'--resources={{"{VIRTUAL_DEVICE_RESOURCE}": 1}}', "--block"]
        command = [sys.executable, "-c", _START, "start", *arguments]
        with (self.folder / "node.log").open("ab") as log:
            self.nodes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for node in ray.nodes():
                if node["Alive"] and node["NodeID"] not in before:
                    return str(node["NodeID"])
            time.sleep(0.1)
        raise TimeoutError(f"no second node within 60 s: {(self.folder / 'node.log').read_text()[-2000:]}")

    def kill_nodes(self) -> None:
        """As if their machines lost power: the raylets and all that they started."""
        for node in self.nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(node.pid)
                for process in [top, *top.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            node.wait(10)
        self.nodes = []


def actor(name: str) -> Any:
    return ray.get_actor(name, NAMESPACE)


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK) if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None
