"""What can be done with the weights and the state of a `TrainEngine`: publish, sync, save and load."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, overload
from weakref import WeakSet

import ray
import torch

from rlix.engine.life_cycle import Residency
from rlix.engine.train.checkpoint import STATE_FILE
from rlix.engine.train.lifecycle import TrainWorkers
from rlix.engine.train.saving import SaveHandle
from rlix.engine.train.stored import safetensors_index
from rlix.engine.weights.buckets import DEFAULT_BUCKET_BYTES, Manifest
from rlix.engine.weights.publication import PublishedWeights, joined, publish, stream, tied_names
from rlix.engine.weights.shards import shares
from rlix.protocol.errors import NotResidentError, WeightSyncError
from rlix.workers.group import WorkerGroup
from rlix.workers.per_rank import PerRank

logger = logging.getLogger(__name__)

_KNOWN_ANSWERS = 3
"""Publications of a group of workers that say what they answer: one for each way that weights come in."""


class WeightReceiver(Protocol):
    """What a sync needs of an inference engine."""

    name: str

    def check_weights(self, published: PublishedWeights) -> None: ...

    def update_weights(self, published: PublishedWeights) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    """What a sync moved. `nbytes` were read by all replicas together; `seconds` are those of the whole call."""

    version: int
    manifest: Manifest
    nbytes: int
    seconds: float


class StateCalls(TrainWorkers):
    """Whatever reads weights or state works on the devices and while the bytes wait in host memory.

    Whatever replaces them works on the devices and after `meta()`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.version = 0
        self._saves: WeakSet[SaveHandle] = WeakSet()
        self._asked: tuple[WorkerGroup | None, int] = None, 0  # how often for a known answer

    def publish(self, version: int | None = None, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> PublishedWeights:
        """Store the current weights as a version (default: the last one plus 1) for inference engines to pull.

        The buckets live in Ray's object store as long as somebody holds the result and the workers live.
        """
        published = self._store(self.version + 1 if version is None else version, bucket_bytes)
        self.version = published.version
        return published

    def p2p_weight_sync(self, inference_engine: WeightReceiver) -> WeightSyncReport:
        """Put the current weights, as a new version, into all replicas of an inference engine, in place.

        Each rank here stores what it holds, and each worker there reads what it needs, as of what `publish` returns.

        Raises:
            WeightSyncError: names, shapes or dtypes do not fit, all of which are listed; nothing was changed.
            NotResidentError: weights are not on the devices, here or there; nothing was changed.
            WaitTimeoutError, TransferError, WorkerError: one side did not answer, or broke off. Replicas that took
                part may hold undefined weights: they refuse to generate until they are loaded again (`cuda`).
        """
        start = time.perf_counter()
        published = self._store(self.version + 1)
        inference_engine.check_weights(published)  # which one that is refused leaves free
        self.version = published.version
        nbytes = sum(report.bytes for report in inference_engine.update_weights(published))
        if nbytes or not published.manifest.nbytes:
            return WeightSyncReport(published.version, published.manifest, nbytes, time.perf_counter() - start)
        raise WeightSyncError(
            f"{inference_engine.name} was sent weight version {published.version} and reports that no byte moved: its "
            "executor's `update` has to replace the weights, and to return how many bytes it copied"
        )

    def _store(
        self, version: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES, *, as_trained: bool = False
    ) -> PublishedWeights:
        """Every rank stores a share of what it holds."""
        self._check_readable()
        layout = self._layout
        mine = PerRank(shares(self._run("held_weights", as_trained, timeout_s=self._timeout_s, split_for=layout)))
        ask = not as_trained and self._asks()
        group = self._workers()
        stored = self._run(
            "publish",
            version,
            bucket_bytes,
            mine,
            self._epoch,
            as_trained,
            ask,
            timeout_s=self._timeout_s,
            split_for=layout,
        )
        self._publisher = group
        published = joined(stored)
        if ask and self._asked[1] == 1:
            say_what_spills(self.name, published.manifest.nbytes, ray.nodes())
        return published

    def _asks(self) -> bool:
        """Whether weights are published with what they answer: the first few of each group of workers.

        Replicas check the first ones that come in a new way; one more forward pass for each version would gain nothing.
        """
        group = self._workers()
        if self._asked[0] is not group:
            self._asked = group, 0
        if self._asked[1] >= _KNOWN_ANSWERS or self.residency is not Residency.DEVICE:
            return False
        self._asked = group, self._asked[1] + 1
        return True

    def _settle_saves(self) -> None:
        for save in list(self._saves):
            save.settle(self._timeout_s)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole weights in host memory, as `save` writes them; tied ones under each of their names."""
        published = self._store(self.version, as_trained=True)
        copies = ((entry.names, tensor.clone()) for entry, tensor in stream(published))
        return {name: tensor for names, tensor in copies for name in names}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take whole weights, and nothing else, by the names that `state_dict` gives them, on any number of ranks.

        Of tied weights one name is enough. As with `load`: names go through the module's `import_name`, adapters
        begin as nothing, and optimizers keep their state, except after `meta()`. The bytes pass through Ray's object
        store, which must have room for all of them.

        Raises:
            WeightSyncError: lists every missing, unknown and mis-shaped name; nothing was changed.
            NotResidentError: the engine's bytes wait in host memory: bring them back with `cuda()` first.
        """
        if wrong := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
            raise TypeError(f"no tensors in the state given: {', '.join(wrong)}")
        self._check_fillable()
        first = tied_names(dict(state))
        given = publish(((name, state[name]) for name in first), self.version, aliases=first)
        self._run("load_state_dict", given, self._epoch, timeout_s=self._timeout_s)
        self._moved(Residency.DEVICE)

    def save(self, folder: str | Path) -> None:
        """Write safetensors, config and tokenizer (where known): loads in plain transformers."""
        self._check_readable()
        self._run("save", _absolute(folder), self._epoch, timeout_s=self._timeout_s)

    def load(self, folder: str | Path) -> None:
        """Take weights, and nothing else, from a Hugging Face folder of safetensors, as `build(weights_path=...)` does.

        Optimizers keep their state, except after `meta()`, which dropped it: then they begin anew.

        Raises:
            FileNotFoundError: no weights in `folder`.
            WeightSyncError: they do not fit the module; nothing was changed.
            NotResidentError: as `load_state_dict`.
        """
        self._check_fillable()
        safetensors_index(Path(folder))
        self._run("load", _absolute(folder), self._epoch, timeout_s=self._timeout_s)
        self._moved(Residency.DEVICE)

    @overload
    def save_state(self, folder: str | Path, *, asynchronous: Literal[False] = False) -> None: ...
    @overload
    def save_state(self, folder: str | Path, *, asynchronous: Literal[True]) -> SaveHandle: ...
    def save_state(self, folder: str | Path, *, asynchronous: bool = False) -> SaveHandle | None:
        """Write all that training resumes from; the folder appears complete or not at all.

        With `asynchronous` it is copied to host memory and written in the background: training and moves may go on at
        once. A save that starts while another is being written waits for that one.
        """
        self._check_readable()
        if not asynchronous:
            self._run("save_state", _absolute(folder), self._epoch, timeout_s=self._timeout_s)
            return None
        numbers = self._run("start_save", _absolute(folder), self._epoch, timeout_s=self._timeout_s)
        results = partial(self._workers().run, "save_result", numbers[0], timeout_s=self._timeout_s)
        handle = SaveHandle(self.name, Path(folder).absolute(), results)
        self._saves.add(handle)
        return handle

    def load_state(self, folder: str | Path) -> None:
        """Take a saved state back, whatever the number of ranks it was saved on.

        Raises:
            FileNotFoundError: there is no complete state in `folder`.
            NotResidentError: as `load_state_dict`.
        """
        self._check_fillable()
        if not (Path(folder) / STATE_FILE).is_file():
            raise FileNotFoundError(f"no training state in {folder}: {STATE_FILE} is missing")
        self._run("load_state", _absolute(folder), self._epoch, timeout_s=self._timeout_s)
        self._moved(Residency.DEVICE)

    # ---- below -------------------------------------------------------------------------------------------------

    def _check_resident(self) -> None:
        self._workers()
        if (where := self.residency) is not Residency.DEVICE:
            way = "load_state(), load() or load_state_dict()" if where is Residency.META else "cuda() or acquire()"
            raise NotResidentError(f"{self.name} was used while its bytes are on {where.value}; call {way} first")
        self.life.check_serving(self.name)

    def _check_readable(self) -> None:
        self._workers()
        if self.residency is Residency.META:
            raise NotResidentError(
                f"{self.name} has nothing to read: its bytes are on meta; bring it back with load_state(), load() or "
                "load_state_dict() first"
            )

    def _check_fillable(self) -> None:
        self._workers()
        if self.residency is Residency.HOST:
            self._check_resident()


def say_what_spills(who: str, nbytes: int, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Ray writes what its store on a node has no room for to that node's disk, and reads it from there."""
    for node in nodes:
        room = int(node["Resources"].get("object_store_memory", 0))
        if node["Alive"] and room < nbytes:
            logger.warning(
                "%s publishes %.1f GB of weights, and Ray's object store on %s holds %.1f GB: what is more goes by way "
                "of its disk; start Ray there with a greater --object-store-memory, which takes room in /dev/shm",
                who,
                nbytes / 1e9,
                node["NodeManagerAddress"],
                room / 1e9,
            )


def _absolute(folder: str | Path) -> str:
    return str(Path(folder).absolute())
