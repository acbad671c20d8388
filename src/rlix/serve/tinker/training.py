"""What clients ask of the models that they train on one base model, done in order, on devices that are leased for it.

What is on the engine of a model is a copy: of the state that was saved last and what was asked since, done again. So a
worker that dies, a server that dies and a model that is new are one case.
"""

import logging
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import RayError

from rlix.engine.lora import AdapterConfig
from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.types import Phase
from rlix.serve.tinker.answers import JSON, failure
from rlix.serve.tinker.fairness import FairOrder
from rlix.serve.tinker.journal import Journal
from rlix.serve.tinker.operations import FORWARD, LOAD, STEP, Work, needs_devices
from rlix.serve.tinker.records import Model, Operation, State
from rlix.serve.tinker.settings import Teams
from rlix.serve.tinker.store import write_whole

logger = logging.getLogger(__name__)

LINGER_S = 0.05
"""How long devices wait for what a client asks next: it sends a pass and a step one after the other."""
LEASE_S = 20.0
"""How long a lease goes on while there is more to do; then others of the pool have their turn."""
_AGAIN_S = 1.0
ATTEMPTS = 3
"""How often an operation is begun whose workers fail in it."""


class Backing(Protocol):
    """The engine behind a base model; `ServedModel` is one."""

    def gang(self, phase: Phase) -> Any: ...
    def add(self, name: str, config: AdapterConfig | None, seed: int) -> None: ...
    def drop(self, name: str) -> None: ...
    def save_training(self, name: str, folder: Path, *, weights: bool) -> None: ...
    def load_training(self, name: str, folder: Path, *, optimizer: bool) -> None: ...
    def rebuild(self) -> None: ...
    def waits_for(self) -> str: ...


class EngineLostError(RlixError):
    """What was on the engine is not what it should be: it is built anew."""


class Trainer:
    """One thread that serves whoever was given least for the weight of their team, an optimizer step at a time.

    Args:
        name: of its engine, in logs. trains: whether a model is one of its own.
        work: does an operation on the engine.
        state_folder: where a model's state after an operation is kept.
        finished: told the id of an operation that has a result.
    """

    def __init__(
        self,
        name: str,
        trains: Callable[[Model], bool],
        journal: Journal,
        backing: Backing,
        work: Work,
        state_folder: Callable[[str, int], Path],
        teams: Teams,
        *,
        state_every: int,
        finished: Callable[[str], None],
    ) -> None:
        self._name, self._trains, self._journal, self._backing, self._work = name, trains, journal, backing, work
        self._state, self._every, self._finished, self._teams = state_folder, state_every, finished, teams
        self._changed = threading.Condition()
        self._asked: set[str] = set()  # models that may have something to do
        self._gone: set[str] = set()  # models that are to leave the engine
        self._chores: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._loaded: set[str] = set()
        self._steps: Counter[str] = Counter()  # of a model, since its state was saved
        self._attempts: Counter[str] = Counter()
        self._order = FairOrder(teams.weight)
        self._closing = threading.Event()
        self.doing = ""
        """What it does now, for whoever waits."""
        self.waits = False  # for devices
        self._thread = threading.Thread(target=self._live, name=f"tinker-{name}", daemon=True)

    def start(self) -> None:
        """Go on with what was asked before."""
        with self._changed:
            self._asked.update(self._journal.waiting())
            unloaded = [each.id for each in self._journal.models() if each.unloaded and self._trains(each)]
            self._gone.update(model for model in unloaded if self._state(model, 0).parent.exists())
        self._thread.start()

    def asked(self, model: str) -> None:
        """There is something to do for a model."""
        with self._changed:
            self._asked.add(model)
            self._changed.notify_all()

    def leave(self, model: str) -> None:
        """Nothing can be asked of a model any more."""
        with self._changed:
            self._gone.add(model)
            self._changed.notify_all()

    def with_devices(self, chore: Callable[[], Any]) -> "Future[Any]":
        """Have something that changes no model done beside the operations."""
        done: Future[Any] = Future()
        with self._changed:
            self._chores.append((chore, done))
            self._changed.notify_all()
        return done

    def stop(self) -> None:
        """Begin nothing more; what is under way is done again by the next one."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float = 30.0) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def why(self, model: str) -> str:
        """Why an operation of a model is not through, in a sentence."""
        row, first = self._journal.model(model), self._journal.first_queued(model)
        if row is None or first is None:
            return self.doing
        if first.seq > row.applied + 1:
            return f"request {row.applied + 1} of this client has not arrived, and they are done in order"
        if self.waits:
            return f"{self.doing}: {self._backing.waits_for()}"
        others = len(self._asked - {model})
        return f"{self.doing}; {others} other models have something to do" if others else self.doing

    # ---- the thread ------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while True:
            self.doing, self.waits = "nothing is to be done", False
            with self._changed:
                self._changed.wait_for(lambda: self._closing.is_set() or self._asked or self._chores)
                if self._closing.is_set():
                    return
            try:
                self._serve()
            except InterruptedError:  # its pipeline ends
                return
            except (RlixError, RayError, OSError) as error:  # OSError: a full disk, say
                if self._closing.is_set():
                    return
                logger.warning("%s: %s", self._name, error)
                self._rebuild()

    def _rebuild(self) -> None:
        self._loaded.clear()
        self.doing = "its training workers failed and are started anew"
        while not self._closing.is_set():
            try:
                self._backing.rebuild()
                return
            except (RlixError, RayError, OSError) as error:
                logger.warning("%s: its training workers will be started again: %s", self._name, error)
            self._closing.wait(_AGAIN_S)

    def _serve(self) -> None:
        """One lease, or what can be done without any."""
        model = self._next(held=False)
        first = None if model is None else self._ready(model)
        if model is not None and first is not None and self._needs_none(first):
            self._turn(model, None)
            return
        if first is None and not self._chores:
            return
        self.doing, self.waits = "waits for devices of the pool", True
        only_looks = first is None or first.kind == FORWARD
        with self._backing.gang(Phase.OLD_LOG_PROBS if only_looks else Phase.ACTOR_TRAINING):
            until, self.waits = time.monotonic() + LEASE_S, False
            while True:
                self._sweep()
                self._do_chores(until)
                if model is not None:
                    self._turn(model, until)
                if self._closing.is_set() or time.monotonic() >= until:
                    return
                model = self._next(held=True)
                if model is None and not self._chores:
                    return

    def _needs_none(self, operation: Operation) -> bool:
        """No devices: neither itself, nor to bring the model there first."""
        return operation.kind == LOAD or (operation.target in self._loaded and not needs_devices(operation))

    def _next(self, *, held: bool) -> str | None:
        """The model that is served next: of the owner who was given least. Waits a moment for one, if devices do."""
        deadline = time.monotonic() + LINGER_S
        while True:
            with self._changed:
                for model in [each for each in self._asked if self._ready(each) is None]:
                    self._asked.discard(model)
                if self._asked:
                    return self._order.next([self._place(model) for model in self._asked])[-1]
                if self._closing.is_set() or not held or (left := deadline - time.monotonic()) <= 0:
                    return None
                self._changed.wait(left)
                if self._chores:
                    return None

    def _ready(self, model: str) -> Operation | None:
        """What is next for a model, if it has arrived."""
        row, first = self._journal.model(model), self._journal.first_queued(model)
        if row is None or row.unloaded or not self._trains(row) or first is None or first.seq != row.applied + 1:
            return None
        return first

    def _place(self, model: str) -> tuple[str, ...]:
        """Team, user and model: who takes turns with whom."""
        row = self._journal.model(model)
        owner = "" if row is None else row.owner
        return self._teams.of(owner), owner, model

    def _turn(self, model: str, until: float | None) -> None:
        """What a model has to do, to its next optimizer step or the end of the lease; None: without devices."""
        held = until is not None
        began = time.monotonic()
        while (operation := self._ready(model)) is not None and (held or self._needs_none(operation)):
            self.doing = f"computes {operation.kind} for a model"
            self._do(model, operation.id)
            if operation.kind == STEP or (until is not None and time.monotonic() >= until):
                break
        if held:
            self._order.charge(self._place(model), time.monotonic() - began)

    def _do(self, model: str, id: str) -> None:
        """Raises EngineLostError: it failed for no fault of the client's, and is tried again."""
        operation = self._journal.operation(id)
        row = self._journal.model(model)  # after the body, which goes when the model is unloaded
        if operation is None or row is None or row.unloaded:
            return
        try:
            if operation.kind != LOAD:
                self._ensure(row)
            media, result = self._work.do(row, operation)
        except SpecError as error:
            self._end(operation, State.FAILED, *failure(str(error), "user"))
        except Exception as error:  # whatever it is that fails there, what it has left on the engine is not known
            self._attempts[operation.id] += 1
            if self._attempts[operation.id] >= ATTEMPTS:
                said = f"{operation.kind} failed {ATTEMPTS} times, and has changed nothing: {error}"
                self._end(operation, State.FAILED, *failure(said, "server"))
            raise EngineLostError(f"{operation.kind} of {model}: {error}") from error
        else:
            self._end(operation, State.DONE, media, result)
            self._note(row, operation)

    def _end(self, operation: Operation, state: State, media: str, result: bytes) -> None:
        self._attempts.pop(operation.id, None)
        self._journal.finish(operation.id, state, media or JSON, result)
        self._finished(operation.id)

    # ---- states ----------------------------------------------------------------------------------------------

    def _ensure(self, model: Model) -> None:
        """Have the engine hold the model as it is after its last operation."""
        if model.id in self._loaded:
            return
        for operation in self._journal.again(model):
            if operation.kind == LOAD:  # done when the server ended, and not noted as the model's state yet
                self._keep(model, operation.seq, self._state(model.id, operation.seq))
        model = self._journal.model(model.id) or model
        self.doing = "brings a model to the devices"
        self._backing.drop(model.id)
        self._backing.add(model.id, _config(model), int(model.config["seed"]))
        if model.folder:
            self._backing.load_training(model.id, Path(model.folder), optimizer=True)
        self._steps[model.id] = 0
        self._work.begin(model.id)
        for operation in self._journal.again(model):
            self._work.do_again(model, operation)
            self._steps[model.id] += operation.kind == STEP
        self._loaded.add(model.id)

    def _note(self, model: Model, operation: Operation) -> None:
        """Save the model's state where there are no gradients that would be lost, and it is time."""
        if operation.kind == LOAD:
            self._loaded.discard(model.id)
            self._steps[model.id] = 0
            self._keep(model, operation.seq, self._state(model.id, operation.seq))
        if operation.kind != STEP:
            return
        self._steps[model.id] += 1
        if self._steps[model.id] >= self._every:
            folder = self._state(model.id, operation.seq)
            write_whole(folder, partial(self._backing.save_training, model.id, weights=False))
            self._keep(model, operation.seq, folder)
            self._steps[model.id] = 0

    def _keep(self, model: Model, seq: int, folder: Path) -> None:
        self._journal.saved(model.id, seq, folder)
        for other in self._state(model.id, 0).parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def _sweep(self) -> None:
        with self._changed:
            gone = list(self._gone)
        for model in gone:
            self._order.forget(self._place(model))
            self._loaded.discard(model)
            self._backing.drop(model)
            shutil.rmtree(self._state(model, 0).parent, ignore_errors=True)
            with self._changed:
                self._gone.discard(model)  # as late as this: workers may die in `drop`

    def _do_chores(self, until: float) -> None:
        """Those that wait by now, one at least: whoever always has another one keeps nobody from a turn."""
        for _ in range(len(self._chores)):
            chore, done = self._chores.popleft()
            self.doing = "scores prompts"
            try:
                done.set_result(chore())
            except SpecError as error:
                done.set_exception(error)
            except Exception as error:  # as above
                done.set_exception(error)
                raise EngineLostError(f"a prompt could not be scored: {error}") from error
            if time.monotonic() >= until:
                return


def _config(model: Model) -> AdapterConfig | None:
    """Of its adapter; None: every weight of it is trained."""
    if not model.rank:
        return None
    return AdapterConfig(model.rank, float(model.config["alpha"]), targets=tuple(model.config["targets"]))
