"""Tinker's API on a pool that others use and that breaks: each learns what it learns alone.

    python -m benchmarks.tinker_pool [--steps N] [--trl] [--seed S]

Two clients, one with an adapter and one that trains every weight, first take turns on a pool with nothing else on it.
Then they train at once on a pool of four devices beside a job, and with --trl a TRL script, while between their
operations (a pass, a step) the server is killed and started again, a training worker is killed, and the scheduler.
Ends with an error unless the losses of both, and the rows of the others, are equal to the bit to those alone.
"""

import argparse
import contextlib
import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.mixed_pool import JOB, RLIX, SCRIPTS, TRL, Running, Terminal
from benchmarks.tinker_clients import Client

MODELS = ("tiny", "tiny:full")
KEY = "tml-benchmark-0123"
_START_S, _KILL_S = 300.0, 60.0
_FAULTS = ("server", "TrainWorker", "Scheduler")


class Server:
    """`rlix serve --tinker` in a terminal, at one address for as long as it lasts."""

    def __init__(self, terminal: Terminal, model: Path) -> None:
        self._terminal, self._settings = terminal, terminal.folder / "server.yaml"
        offered = {"models": {"tiny": {"path": str(model), "full": 1}}, "keys": {"me": KEY}, "state_every": 3}
        self._settings.write_text(json.dumps(offered))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.running: Running | None = None

    def start(self, *options: str) -> None:
        self.running = self._terminal.start(
            *RLIX, "serve", "--tinker", self._settings, "--port", str(self._port), *options
        )
        deadline = time.monotonic() + _START_S
        while not self._listens():
            if self.running.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{self.running.errors.read_text()[-4000:]}")
            time.sleep(0.2)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0):
            return True
        return False

    def kill(self) -> None:
        assert self.running is not None
        self.running.kill()

    def end(self) -> None:
        assert self.running is not None
        self.running.process.send_signal(signal.SIGTERM)
        self.running.process.wait(_START_S)


def titled(home: Path, title: str) -> Iterator[psutil.Process]:
    """Processes of a control plane's home that Ray calls so."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(f"ray::{title}") and process.environ().get("RLIX_HOME") == str(
                home
            ):
                yield process


class Faults:
    """One fault after each so many operations of all clients together."""

    def __init__(self, terminal: Terminal, server: Server, seed: int, every: int) -> None:
        self._home, self._server, self._every = terminal.folder / "home", server, every
        self._draw, self._lock, self._count = random.Random(seed), threading.Lock(), 0
        self.done: Counter[str] = Counter()

    def between(self) -> None:
        """Called by a client between two of its operations; the other one's may be under way."""
        with self._lock:
            self._count += 1
            if self._count % self._every:
                return
            kind = _FAULTS[self._count // self._every % len(_FAULTS)]
            if kind == "server":
                self._server.kill()
                self._server.start()
            elif found := sorted(titled(self._home, kind), key=lambda process: process.pid):
                self._draw.choice(found).kill()
            else:
                return
            self.done[kind] += 1


def learn(client: Client, steps: int, between: Callable[[], None]) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(client.run_pass())
        between()
        client.take_step()
        between()
    return losses


def alone(folder: Path, model: Path, spec: Path, steps: int, *, trl: bool) -> dict[str, Any]:
    terminal = Terminal(folder)
    server = Server(terminal, model)
    server.start("--private", "--gpus", "2")
    found: dict[str, Any] = {name: learn(Client(server.url, KEY, name), steps, lambda: None) for name in MODELS}
    server.end()
    runs = ["--runs-dir", folder / "runs"]
    terminal.run(*RLIX, "run", spec, "--json", *runs, "--private")
    if trl:
        terminal.run(sys.executable, SCRIPTS / f"{TRL}.py", model, folder / TRL, steps)
    found.update((name, terminal.rows(name)) for name in (JOB, TRL)[: 1 + trl])
    return found


def together(folder: Path, model: Path, spec: Path, steps: int, *, trl: bool, seed: int) -> tuple[dict[str, Any], str]:
    terminal, runs = Terminal(folder), ["--runs-dir", folder / "runs"]
    server, running = Server(terminal, model), []
    found: dict[str, Any] = {}
    try:
        running.append(terminal.start(*RLIX, "run", spec, "--json", *runs))
        terminal.await_pool(running[0])
        if trl:
            script = [SCRIPTS / f"{TRL}.py", "--", model, folder / TRL, steps]
            running.append(terminal.start(*RLIX, "run", "--trl", *runs, *script))
        server.start()
        faults = Faults(terminal, server, seed, every=max(1, 4 * steps // 6))

        def train(name: str) -> None:
            found[name] = learn(Client(server.url, KEY, name), steps, faults.between)

        threads = [threading.Thread(target=train, args=(name,)) for name in MODELS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in running:
            each.end()
        server.end()
    finally:
        for each in [*running, *filter(None, [server.running])]:
            each.kill()
        terminal.run(*RLIX, "down")
    found.update((name, terminal.rows(name)) for name in (JOB, TRL)[: 1 + trl])
    return found, ", ".join(f"{count} × {kind}" for kind, count in sorted(faults.done.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--trl", action="store_true", help="a TRL script, too")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from rlix.pipeline.models import write_tiny_model
    from rlix.pipeline.spec.job import load_job
    from rlix.pipeline.spec.model import TinyModel

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model, spec = write_tiny_model(TinyModel(), folder / "model", seed=0), folder / f"{JOB}.yaml"
        spec.write_text(load_job(JOB).model_copy(update={"steps": args.steps}).to_yaml())
        wanted = alone(folder / "alone", model, spec, args.steps, trl=args.trl)
        found, faults = together(folder / "pool", model, spec, args.steps, trl=args.trl, seed=args.seed)
    print(f"killed between operations: {faults}")
    for name, rows in found.items():
        print(f"{name:12} {len(rows)} steps, {sum(a == b for a, b in zip(rows, wanted[name], strict=True))} as alone")
    if found != wanted:
        raise SystemExit("they did not learn what they learn alone")


if __name__ == "__main__":
    main()
