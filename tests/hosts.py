"""Several hosts on one machine: network, mount, process and host name namespaces, joined by a bridge.

Host N is `nodeN` at 10.77.0.N. Each has a /tmp, a /dev/shm and a disk (`OWN`) of its own; `SHARED` is one folder on all
of them. Its own name resolves to 127.0.1.1, as Debian has it. Everything ends with the process that made it.
"""

import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.waiting import HANG_S, PROGRAM_S

OWN, SHARED = Path("/run/own"), Path("/run/shared")
BOOT_S, COMMAND_S = HANG_S, PROGRAM_S
START_TRIES = 3
_REPOSITORY = Path(__file__).parents[1]
_NAMESPACES = "--net --mount --pid --uts --ipc"
_INIT = (  # collects the dead, and ends, with all it has, when nobody holds its input any more
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"
)
_TOOLS = ("ip", "nft", "unshare", "nsenter", "mount")


def why_not() -> str:
    """Why there can be no hosts here; "" where there can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} missing: apt-get install iproute2 nftables util-linux"
    tried = subprocess.run(["unshare", *_NAMESPACES.split(), "--fork", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no namespaces without root: {tried.stderr.decode().strip()}"


class Host:
    """A machine of the network. Its commands see `OWN` and `SHARED`, and this repository as it is."""

    def __init__(self, number: int, folder: Path, names: str) -> None:
        self.number = number
        self.name, self.address = f"node{number}", f"10.77.0.{number}"
        self.disk = folder / self.name
        self.disk.mkdir(parents=True)
        (self.disk / "hosts").write_text(names)
        (self.disk / "resolv.conf").touch()
        self._init = _namespaces(_NAMESPACES, self._setup(folder / "shared"))
        self.pid = _child(self._init)

    def _setup(self, shared: Path) -> str:
        kept = [path for path in (_REPOSITORY, sys.prefix, sys.base_prefix) if Path(path).is_relative_to("/tmp")]
        keep = "".join(f"mkdir -p {p} && mount --bind /run/kept{i} {p}\n" for i, p in enumerate(kept))
        stash = "".join(f"mkdir /run/kept{i} && mount --bind {p} /run/kept{i}\n" for i, p in enumerate(kept))
        return f"""mount --make-rprivate / && echo {self.name} > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /run && mkdir {OWN} {SHARED} && mount --bind {self.disk} {OWN} && mount --bind {shared} {SHARED}
{stash}mount --bind {OWN}/hosts /etc/hosts && mount --bind {OWN}/resolv.conf /etc/resolv.conf
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -t tmpfs -o mode=1777,size=2g tmpfs /dev/shm
{keep}cd {OWN}"""

    def command(self, *arguments: str, env: Mapping[str, str]) -> list[str]:
        """What to start here, so that it runs on this host with these variables and few others."""
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        base = {"PATH": path, "HOME": str(OWN), "LANG": "C.UTF-8", "PYTHONPATH": f"{_REPOSITORY / 'src'}:{_REPOSITORY}"}
        variables = [f"{name}={value}" for name, value in {**base, **env}.items()]
        inside = shlex.join(["env", "-i", *variables, *arguments])
        into = ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "-u", "-i"]
        return [*into, "sh", "-c", f"cd {OWN} && exec {inside}"]

    def off(self) -> None:
        """All its processes end at once; its link is gone."""
        self._init.kill()
        self._init.wait()


class Hosts:
    """`count` hosts and the switch between them.

    Args:
        folder: for their disks, and for what they share.
        env: variables of every command.
    """

    def __init__(self, folder: Path, count: int, env: Mapping[str, str] | None = None) -> None:
        (folder / "shared").mkdir(parents=True)
        self.shared = folder / "shared"
        self.env = {"RLIX_HOME": str(OWN / "rlix"), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", **(env or {})}
        self._switch = _namespaces("--net", "ip link add br0 type bridge && ip link set br0 up && ip link set lo up")
        self._hosts: list[Host] = []
        try:
            for number in range(1, count + 1):
                self._boot(folder, number, count)
        except BaseException:  # raised again
            self.close()
            raise

    def _boot(self, folder: Path, number: int, count: int) -> None:
        others = [other for other in range(1, count + 1) if other != number]
        names = ["127.0.0.1 localhost", f"127.0.1.1 node{number}", *(f"10.77.0.{n} node{n}" for n in others)]
        self._hosts.append(host := Host(number, folder, "\n".join(names) + "\n"))
        port = f"p{number}"
        self._on_switch(f"ip link add {port} type veth peer name eth0 netns {host.pid}")
        self._on_switch(f"ip link set {port} master br0 && ip link set {port} up")
        self.run(number, "sh", "-c", f"ip link set lo up && ip addr add {host.address}/24 dev eth0")
        self.run(number, "sh", "-c", "ip link set eth0 up && ip route add default via 10.77.0.254")

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number - 1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self._hosts:
            host.off()
        self._switch.kill()
        self._switch.wait()

    # ---- programs ----------------------------------------------------------------------------------------------

    def run(self, number: int, *arguments: str, timeout_s: float = COMMAND_S, **env: str) -> str:
        """What a command on host `number` prints.

        Raises:
            AssertionError: it failed; says what it wrote.
        """
        done = self._done(number, *arguments, timeout_s=timeout_s, **env)
        said = f"{shlex.join(arguments)} on node{number}: {done.stdout}{done.stderr}"
        assert done.returncode == 0, said
        return done.stdout

    def attempt(self, number: int, *arguments: str, timeout_s: float = COMMAND_S) -> tuple[int, str]:
        """A command's exit code, and all that it prints."""
        done = self._done(number, *arguments, timeout_s=timeout_s)
        return done.returncode, done.stdout + done.stderr

    def _done(self, number: int, *arguments: str, timeout_s: float, **env: str) -> "subprocess.CompletedProcess[str]":
        command = self[number].command(*arguments, env={**self.env, **env})
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)

    def start(self, number: int, *arguments: str, output: Path, **env: str) -> "subprocess.Popen[bytes]":
        """A command that runs on; it ends with its host."""
        command = self[number].command(*arguments, env={**self.env, **env})
        with output.open("wb") as file:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)

    def start_ray(self, number: int, *more: str, gpus: int) -> None:
        """A node of Ray with virtual GPUs; the first host's is the head."""
        head = ["--head", "--port=6379", "--include-dashboard=false"]
        where = head if number == 1 else [f"--address={self[1].address}:6379"]
        size = [f"--num-gpus={gpus}", "--num-cpus=8", "--resources", '{"rlix_virtual": 1}']
        command = "ray", "start", *where, *size, *more, "--object-store-memory=150000000", "--disable-usage-stats"
        for tries_left in reversed(range(START_TRIES)):
            try:
                self.run(number, *command)
            except AssertionError:  # Ray gives its own processes 30 s, which on a busy machine are few
                if not tries_left:
                    raise
                self.run(number, "ray", "stop", "--force")
            else:
                return

    # ---- the network -------------------------------------------------------------------------------------------

    def cut(self, number: int) -> None:
        """Nothing reaches a host, and nothing leaves it, until `heal`."""
        self._on_switch(f"ip link set p{number} down")

    def heal(self, number: int) -> None:
        self._on_switch(f"ip link set p{number} up")

    @contextmanager
    def apart(self, first: int, second: int) -> Iterator[None]:
        """Two hosts that reach all others, but not each other."""
        rules = "".join(
            f"add rule bridge apart f ip saddr 10.77.0.{a} ip daddr 10.77.0.{b} drop; "
            for a, b in ((first, second), (second, first))
        )
        chain = "add table bridge apart; add chain bridge apart f { type filter hook forward priority 0; }; "
        self._on_switch(f"nft '{chain}{rules}'")
        try:
            yield
        finally:
            self._on_switch("nft delete table bridge apart")

    @contextmanager
    def lossy(self, percent: int) -> Iterator[None]:
        """So many of a hundred packets between any two hosts are lost, each by chance."""
        drop = f"add rule bridge lossy f numgen random mod 100 < {percent} drop"
        chain = "add table bridge lossy; add chain bridge lossy f { type filter hook forward priority 0; }; "
        self._on_switch(f"nft '{chain}{drop}'")
        try:
            yield
        finally:
            self._on_switch("nft delete table bridge lossy")

    def _on_switch(self, command: str) -> None:
        into = ["nsenter", "-t", str(self._switch.pid), "-n", "sh", "-c", command]
        subprocess.run(into, check=True, capture_output=True, timeout=COMMAND_S)


def _namespaces(kinds: str, setup: str) -> "subprocess.Popen[str]":
    """A process in namespaces of its own that has done `setup` there and lives while this one does."""
    fork = "--fork --kill-child" if "--pid" in kinds else ""
    init = shlex.join([sys.executable, "-S", "-c", _INIT])
    process = subprocess.Popen(
        ["unshare", *kinds.split(), *fork.split(), "sh", "-ec", f"{setup}\nexec {init}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "up\n":
        raise OSError(f"no namespaces: {process.communicate(timeout=BOOT_S)[1]}")
    return process


def _child(process: "subprocess.Popen[str]") -> int:
    """The one process that `process` has started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
