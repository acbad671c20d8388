"""Makes this process a job of the pool, and every trainer that it builds one that takes leases."""

import atexit
import contextlib
import functools
import importlib.util
import json
import logging
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from rlix.control.program import Program, attach
from rlix.control.run_record import Kind, RunRecord
from rlix.integrations.leases import SCRIPT, Gate, ProgramGate, Stages
from rlix.integrations.ranks import LEAVE_TIMEOUT_S, Desk, RankGate, say_ended
from rlix.integrations.rollouts import CLUSTER, Rollouts
from rlix.integrations.script import run_as_main, set_command
from rlix.integrations.trl.attachment import INITIALIZATION, Attachment, refuse_kind
from rlix.integrations.trl.parts import parts_of
from rlix.integrations.trl.served import ServedGeneration, Start
from rlix.node.process import start_time
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError
from rlix.protocol.messages import DeviceKind, Process
from rlix.protocol.types import ClusterName

logger = logging.getLogger(__name__)

_CLUSTER = ClusterName.ACTOR_TRAIN.value
_KIND = Kind("TRL", {"reward": "reward", "tokens_total": "num_tokens", "grad_norm": "grad_norm", "loss": "loss"})
_RANKS_TIMEOUT_S = 300.0  # for all ranks to have started
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_WITH_VLLM = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of a script's processes this is."""

    rank: int
    world_size: int

    @staticmethod
    def from_env(env: Mapping[str, str]) -> "Ranks":
        """As torchrun and accelerate say it.

        Raises:
            SpecError: the ranks are spread over several nodes.
        """
        world = int(env.get("WORLD_SIZE") or 1)
        if int(env.get("LOCAL_WORLD_SIZE") or world) != world:
            raise SpecError(f"rlix.trl: the {world} ranks must be on one node; several nodes are not supported yet")
        return Ranks(int(env.get("RANK") or 0), world)


class Session:
    """The job that this process, or this group of ranks, is."""

    def __init__(
        self,
        name: str,
        stages: Stages,
        record: RunRecord | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        """`record` is rank 0's. `leave` is called when the process ends."""
        self._name = name
        self._record = record
        self._leave = leave
        self._built: list[weakref.ref[Any]] = []
        self.stages = stages
        self.training = False  # who is ended by a signal does not return from it
        self._used = False

    @property
    def folder(self) -> Path | None:
        """The run folder, which rank 0 writes."""
        return None if self._record is None else self._record.folder.path

    def start(self) -> None:
        """Something is about to be put on the device: not without a lease."""
        self._used = True
        if self.stages.stage in (None, SCRIPT):
            self.stages.begin(INITIALIZATION)

    def built(self, trainer: Any) -> None:
        """The trainer's bytes are on the device from now on."""
        self._built.append(weakref.ref(trainer))

    def attached(self, trainer: Any) -> Attachment:
        """The trainer's attachment; its bytes have to be on the device, under a lease, when it gets one.

        Other trainers that were built meanwhile get theirs, too: their bytes are there as well.
        """
        for each in (trainer, *filter(None, (built() for built in self._built))):
            if not hasattr(each, "_rlix"):
                on_log = None if self._record is None else self._record.step
                each._rlix = Attachment(each, parts_of(each, self._name), self.stages, on_log)
        self._built.clear()
        found: Attachment = trainer._rlix
        return found

    def broken(self, error: BaseException) -> None:
        """See `RunRecord.broken`."""
        if self._record is not None:
            self._record.broken(error)

    def close(self) -> None:
        self.stages.close()
        if self._record is not None:
            if not (self._used or self._record.is_broken):
                logger.warning("%s ended without building a trainer: it has not used the pool", self._name)
                self._used = True  # said once
            self._record.close(stopped=self.training)
        if self._leave is not None:
            with contextlib.suppress(RlixError):
                self._leave()


def install(name: str | None = None) -> Session:
    """Joins the pool and has every trainer of this process take leases. Calling it again changes nothing.

    Args:
        name: what people see; default: RLIX_JOB, else the script's name.

    Raises:
        SpecError: TRL is not installed, or the pool is too small.
        RlixError: there is no control plane and none could be started, or its devices are on another machine.
    """
    return _install(name or os.environ.get("RLIX_JOB") or Path(sys.argv[0]).stem or "trl")


@functools.cache
def _install(name: str) -> Session:
    if importlib.util.find_spec("trl") is None:  # known before there is a job
        raise SpecError("rlix.trl: TRL is not installed: pip install 'rlix[trl]'")
    ranks = Ranks.from_env(os.environ)
    store: Any = dist.FileStore(str(_meeting_place()), ranks.world_size) if ranks.world_size > 1 else None  # type: ignore[attr-defined]
    session, start_rollouts = _first(name, ranks, store) if ranks.rank == 0 else _other(name, ranks, store)
    hook(session, start_rollouts)
    return session


def _first(name: str, ranks: Ranks, store: Any) -> tuple[Session, Start]:
    program = attach(name, gangs={_CLUSTER: ranks.world_size}, rollouts={CLUSTER: None}, stay=True)
    visible = _visible(program)
    _show(visible)
    record = RunRecord(program, _KIND, Path(os.environ.get("RLIX_RUNS_DIR") or "runs"), _CLUSTER)
    gate: Gate = ProgramGate(program)
    leave = None
    if store is not None:
        store.set("devices", json.dumps(visible))
        holders = _holders(program, ranks, store)
        program.name_holders(_CLUSTER, holders)
        desk = Desk(ranks.world_size, store, ProgramGate(program))
        gate = RankGate(0, ranks.world_size, store, gate, desk)

        def leave() -> None:
            """Ends after the others; where it failed, they wait for it, and whoever started the ranks ends them."""
            desk.close(lambda rank: _is_gone(holders[rank]), 0.0 if record.is_broken else LEAVE_TIMEOUT_S)
            # Else they would be ended with the job, while they are about to end by themselves.
            program.name_holders(_CLUSTER, dict.fromkeys(range(ranks.world_size), program.client.process))

    def start_rollouts(model: str, dtype: str) -> Rollouts:
        rollouts = Rollouts(program, model, record.folder, dtype=dtype)
        atexit.register(rollouts.close)  # before the job leaves, which would end the replicas by force
        return rollouts

    session = Session(name, Stages(gate, record), record, leave)
    atexit.register(session.close)
    return session, _only_on_one_rank if ranks.world_size > 1 else once(start_rollouts)


def _is_gone(process: Process) -> bool:
    return start_time(process.pid) != process.started


def once(start: Start) -> Start:
    """The job has one rollout cluster: the replicas of two trainers would take the same devices."""
    served: list[str] = []

    def start_once(model: str, dtype: str) -> Rollouts:
        if served:
            raise SpecError(
                f"rlix.trl: a second trainer with use_vllm, of {model}: this script's replicas serve the one of "
                f"{served[0]}; give each trainer a script of its own, or leave use_vllm out of this one"
            )
        rollouts = start(model, dtype)
        served.append(model)
        return rollouts

    return start_once


def _serve(start_rollouts: Start) -> None:
    """`use_vllm=True` means the job's own replicas, for trainers that are built from now on."""
    for name in _WITH_VLLM:
        if module := sys.modules.get(name):
            module.VLLMGeneration = functools.partial(ServedGeneration, start_rollouts)  # type: ignore[attr-defined]


def _only_on_one_rank(model: str, dtype: str) -> Rollouts:
    raise SpecError("rlix.trl: use_vllm on several ranks is not supported yet")


def _other(name: str, ranks: Ranks, store: Any) -> tuple[Session, Start]:
    pid = os.getpid()
    store.set(f"process/{ranks.rank}", json.dumps([pid, start_time(pid) or 0]))
    _await(store, "devices", "rank 0 to join the pool")
    _show(json.loads(store.get("devices").decode()))
    gate = RankGate(ranks.rank, ranks.world_size, store, None)
    session = Session(name, Stages(gate), leave=functools.partial(say_ended, store, ranks.rank))
    atexit.register(session.close)
    return session, _only_on_one_rank


def _holders(program: Program, ranks: Ranks, store: Any) -> dict[int, Process]:
    """Who keeps bytes on the devices: is ended when it does not give them back."""
    mine = program.client.process
    found = {0: mine}
    for rank in range(1, ranks.world_size):
        _await(store, f"process/{rank}", f"rank {rank} to start")
        pid, started = json.loads(store.get(f"process/{rank}").decode())
        found[rank] = Process(mine.node_id, pid, started, f"{program.name}, rank {rank}")
    return found


def _await(store: Any, key: str, what: str) -> None:
    deadline = time.monotonic() + _RANKS_TIMEOUT_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"rlix.trl: waited {_RANKS_TIMEOUT_S:.0f} s for {what}")
        time.sleep(0.05)


def _meeting_place() -> Path:
    """A file that the ranks of one launch share: those with the same parent, of the same try."""
    parent = os.getppid()
    launch = f"{parent}-{start_time(parent)}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Path(tempfile.gettempdir()) / f"rlix-ranks-{os.getuid()}-{launch}"


def _visible(program: Program) -> list[str]:
    """What the ranks may see of the node's GPUs; empty: their devices are virtual."""
    devices = program.client.devices()
    mine = [devices[id] for id in program.registration.cluster(_CLUSTER).devices]
    if away := sorted({d.node_ip for d in mine if d.node_id != program.client.process.node_id}):
        program.close()
        raise RlixError(f"{program.name} was placed on {', '.join(away)}, and a TRL script runs where it was started")
    return [device.key for device in mine if device.kind is DeviceKind.CUDA]


def _show(visible: Sequence[str]) -> None:
    """Before CUDA starts, which from then on takes a lease first."""
    if not visible:
        return
    if torch.cuda.is_initialized():
        raise RlixError("import rlix.trl before anything uses CUDA: as the script's first line")
    os.environ[_VISIBLE] = ",".join(visible)


def hook(session: Session, start_rollouts: Start) -> None:
    """From now on trainers take leases of `session`: wraps methods of transformers' `Trainer`, for this process."""
    torch.cuda._lazy_call(session.start)  # when CUDA starts, which is before the first byte
    init, train = Trainer.__init__, Trainer.train

    @functools.wraps(init)
    def leased_init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        refuse_kind(type(self))
        _serve(start_rollouts)  # TRL, which takes seconds to import, is there by now
        session.start()
        init(self, *args, **kwargs)
        session.built(self)

    @functools.wraps(train)
    def leased_train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        session.training = True
        found = session.attached(self).train(functools.partial(train, self), *args, **kwargs)
        session.training = False
        return found

    Trainer.__init__, Trainer.train = leased_init, leased_train
    for method in ("evaluate", "predict"):
        setattr(Trainer, method, _after_start(session, getattr(Trainer, method)))


def _after_start(session: Session, inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def outer(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        session.attached(self)
        if session.stages.stage == INITIALIZATION and not self.is_in_train:
            session.stages.end()
        return inner(self, *args, **kwargs)

    return outer


def main(argv: Sequence[str]) -> None:
    """`python -m rlix.trl SCRIPT [ARGS]`: runs the script, unchanged, as a job of the pool."""
    if not argv:
        raise SystemExit("usage: python -m rlix.trl SCRIPT [ARGS...]")
    if not Path(argv[0]).is_file():  # known before there is a job
        raise SystemExit(f"rlix.trl: no such script: {argv[0]}")
    set_command(argv)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("rlix: joining the control plane, or starting one ...\n")
    try:
        session = install()
    except RlixError as error:  # nothing of the script has run: a traceback would say nothing of it
        sys.stderr.write(f"rlix: {error}\n")
        sys.exit(2 if isinstance(error, SpecError) else 1)
    if session.folder is not None:
        sys.stderr.write(f"rlix: {session.folder.name} is a job of the pool; run folder: {session.folder}\n")
    run_as_main(argv[0], ended=session.broken)
