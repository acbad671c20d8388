"""What can be done with the weights and the state of a `TrainEngine`: publish, sync, save and load."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal, overload
from weakref import WeakSet

import torch

from rlix.engine.base import plainly
from rlix.engine.life_cycle import Residency
from rlix.engine.train.checkpoint import STATE_FILE
from rlix.engine.train.lifecycle import TrainWorkers
from rlix.engine.train.materialize import safetensors_index
from rlix.engine.train.saving import SaveHandle
from rlix.engine.weights import sync as weight_sync
from rlix.engine.weights.buckets import DEFAULT_BUCKET_BYTES
from rlix.engine.weights.publication import PublishedWeights, publish, stream, tied_names
from rlix.engine.weights.sync import DEVICE_BUCKET_BYTES, Transport, WeightReceiver, WeightSyncReport
from rlix.protocol.errors import NotResidentError, WorkerError


class StateCalls(TrainWorkers):
    """Whatever reads weights or state works on the devices and while the bytes wait in host memory.

    Whatever replaces them works on the devices and after `meta()`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.version = 0
        self._saves: WeakSet[SaveHandle] = WeakSet()

    def publish(self, version: int | None = None, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> PublishedWeights:
        """Store the current weights as a version (default: the last one plus 1) for inference engines to pull.

        The buckets live in Ray's object store as long as somebody holds the result and the workers live.
        """
        self._check_readable()
        version = self.version + 1 if version is None else version
        published: PublishedWeights = self._run(
            "publish", version, bucket_bytes, self._epoch, timeout_s=self._timeout_s
        )[0]
        self.version = version
        return published

    def p2p_weight_sync(
        self, inference_engine: WeightReceiver, *, transport: Transport = "auto", timeout_s: float = 120.0
    ) -> WeightSyncReport:
        """Put the current weights, as a new version, into an inference engine, in place.

        Args:
            transport: "host": buckets in Ray's object store, as `publish` makes them; "ipc": CUDA IPC, for replicas on
                the GPU of training rank 0; "broadcast": NCCL, or gloo between virtual GPUs; "auto": on GPUs "ipc" for
                replicas where it can be and "broadcast" for the others, else "host".
            timeout_s: of "ipc" and "broadcast": longest that one side waits for the other, bucket by bucket.

        Raises:
            ValueError: the transport cannot reach all replicas; says why.
            WeightSyncError: names, shapes or dtypes do not fit, all of which are listed; nothing was changed.
            NotResidentError: weights are not on the devices, here or there.
            WaitTimeoutError, TransferError, WorkerError: one side did not answer, or broke off. Replicas that took
                part may hold undefined weights: they refuse to generate until they are loaded again (`cuda`).
        """
        self._check_readable()
        start = time.perf_counter()
        chosen = weight_sync.choose(transport, self.devices[0], inference_engine.receivers)
        if chosen is not None:
            self._check_resident()
        try:
            if chosen is None:
                published = self.publish()
                inference_engine.update_weights(published)
            else:
                self.version += 1  # also when it fails: no two attempts have the same
                sent = (DEVICE_BUCKET_BYTES, self._epoch)
                published = self._run("describe", self.version, *sent, timeout_s=self._timeout_s)[0]
                send = lambda meeting: self._run("send", meeting, *sent, timeout_s=self._timeout_s)
                weight_sync.transfer(published, self.devices[0], inference_engine, chosen, timeout_s, send)
        except WorkerError as error:
            raise plainly(error) from error.__cause__
        used = ("host",) if chosen is None else tuple(sorted({way for replica in chosen for way in replica}))
        return WeightSyncReport(published.version, published.manifest, used, time.perf_counter() - start)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole weights in host memory, as `save` writes them; tied ones under each of their names."""
        self._check_readable()
        how = (self.version, DEFAULT_BUCKET_BYTES, self._epoch, True)
        published = self._run("publish", *how, timeout_s=self._timeout_s)[0]
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
        self._check_fillable()
        first = tied_names(dict(state))
        given = publish(((name, state[name]) for name in first), self.version, aliases=first)
        self._run("load_state_dict", given, self._epoch, timeout_s=self._timeout_s)
        self._residency = Residency.DEVICE

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
        self._residency = Residency.DEVICE

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
        self._residency = Residency.DEVICE

    # ---- below -------------------------------------------------------------------------------------------------

    def _check_resident(self) -> None:
        self._workers()
        if self._residency is not Residency.DEVICE:
            raise NotResidentError(
                f"{self.name} was used while its bytes are on {self._residency.value}; call cuda() or acquire() first"
            )
        self.life.check_serving(self.name)

    def _check_readable(self) -> None:
        self._workers()
        if self._residency is Residency.META:
            raise NotResidentError(
                f"{self.name} has nothing to read: its bytes are on meta; bring it back with load_state(), load() or "
                "load_state_dict() first"
            )

    def _check_fillable(self) -> None:
        self._workers()
        if self._residency is Residency.HOST:
            self._check_resident()


def _absolute(folder: str | Path) -> str:
    return str(Path(folder).absolute())
