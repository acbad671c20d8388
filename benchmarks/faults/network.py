"""Three hosts, and what can happen to them and between them: done from outside, asked for by the campaign within."""

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from benchmarks.faults.on_host import GPUS
from tests.hosts import OWN, SHARED, Hosts, why_not

HOSTS = 3
WITHIN = "RLIX_FAULTS_NETWORK"  # its socket, of a campaign that runs on the first host
_GIVEN_UP = '{"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}'
"""Ray counts a host as dead after some ten seconds, not after almost a minute."""


def locks_of(number: int) -> Path:
    return SHARED / "locks" / str(number)


def jobs_on(number: int) -> Path:
    return SHARED / "jobs" / str(number)


class Outside:
    """The hosts, as whoever is in none of them sees them."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._between = ExitStack()
        self._jobs: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(1, HOSTS + 1):
            for path in (locks_of(number), jobs_on(number)):
                (hosts.shared / path.relative_to(SHARED)).mkdir(parents=True)
            hosts.run(number, "mkdir", str(OWN / "locks"))
            hosts.run(number, "mount", "--bind", str(locks_of(number)), str(OWN / "locks"))
            self.ray(number)

    def cut(self, number: int) -> None:
        self._hosts.cut(number)

    def heal(self, number: int) -> None:
        self._hosts.heal(number)

    def off(self, number: int) -> None:
        """As if it lost power: nobody hears of the end of its processes."""
        self._hosts.cut(number)
        self._hosts.attempt(number, "sh", "-c", "kill -9 -1")

    def ray(self, number: int) -> None:
        """The host is on the network, and Ray begins there, anew where it ran."""
        self._hosts.heal(number)
        self._hosts.attempt(number, "ray", "stop", "--force")
        self._hosts.start_ray(number, *(["--system-config", _GIVEN_UP] if number == 1 else []), gpus=GPUS)

    def jobs(self, number: int, seed: int) -> None:
        """Its light jobs begin, unless they run there."""
        if number in self._jobs and self._jobs[number].poll() is None:
            return
        command = "python", "-m", "benchmarks.faults.on_host", str(number), str(jobs_on(number)), str(seed)
        self._jobs[number] = self._hosts.start(number, *command, output=self._hosts[number].disk / "jobs.log")

    def apart(self, first: int, second: int) -> None:
        self._between.enter_context(self._hosts.apart(first, second))

    def lossy(self, percent: int) -> None:
        self._between.enter_context(self._hosts.lossy(percent))

    def together(self) -> None:
        """No more `apart` and `lossy`."""
        self._between.close()

    def kill(self, number: int, pid: int, sent: signal.Signals) -> None:
        self._hosts.attempt(number, "kill", f"-{sent.value}", str(pid))

    def state(self, number: int, pid: int) -> str:
        code, said = self._hosts.attempt(number, "cat", f"/proc/{pid}/stat")
        letter = said.rpartition(")")[2].split()[0] if code == 0 else "X"
        return "dead" if letter in "ZX" else "stopped" if letter in "Tt" else "running"


class Network:
    """`Outside`, as the campaign asks it for something. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._connection: Connection[Any, Any] = Client(address, family="AF_UNIX")
        self._lock = Lock()

    def __getattr__(self, method: str) -> Any:
        def ask(*args: object) -> Any:
            with self._lock:
                self._connection.send((method, args))
                failed, answer = self._connection.recv()
            if failed:
                raise RuntimeError(f"{method}{args}: {answer}")
            return answer

        return ask


def _serve(listener: Listener, outside: Outside) -> None:
    connection = listener.accept()
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, getattr(outside, method)(*args)))
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            connection.send((True, str(error)))


def run(arguments: list[str], json_file: Path | None, keep: Path | None) -> int:
    """The campaign on the first of three hosts; returns its exit status."""
    if reason := why_not():
        print(f"no hosts can be made here: {reason}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        env = {"RAY_ADDRESS": "10.77.0.1:6379", "RLIX_LOCK_DIR": str(OWN / "locks")}
        with Hosts(Path(folder) / "h", HOSTS, env) as hosts:
            listener = Listener(str(hosts.shared / "network"), family="AF_UNIX")
            Thread(target=_serve, args=(listener, Outside(hosts)), daemon=True).start()
            found = SHARED / "found.json"
            command = "python", "-m", "benchmarks.faults", "--hosts", *arguments, "--json", str(found)
            within = {**hosts.env, WITHIN: str(SHARED / "network"), "PYTHONUNBUFFERED": "1"}
            code = subprocess.run(hosts[1].command(*command, env=within), check=False).returncode
            listener.close()
            if json_file is not None and (hosts.shared / found.name).exists():
                shutil.copy(hosts.shared / found.name, json_file)
            if keep is not None:
                shutil.copytree(
                    folder, keep, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("network")
                )
    return code


def network() -> Network | None:
    """That of the hosts this process runs on; None: it runs on none."""
    return Network(os.environ[WITHIN]) if WITHIN in os.environ else None
