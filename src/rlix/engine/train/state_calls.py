"""What can be done with the weights and the state of a `TrainEngine`: publish, sync, save and load."""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, overload
from weakref import WeakSet

import torch

from rlix.engine.base import plainly
from rlix.engine.life_cycle import Residency
from rlix.engine.train.checkpoint import STATE_FILE
from rlix.engine.train.lifecycle import TrainWorkers
from rlix.engine.train.saving import SaveHandle
from rlix.engine.train.stored import safetensors_index
from rlix.engine.weights.buckets import DEFAULT_BUCKET_BYTES
from rlix.engine.weights.known_answer import KnownAnswer
from rlix.engine.weights.publication import PublishedWeights, publish, stream, tied_names
from rlix.engine.weights.sync import Channels, Trainer, Transport, WeightReceiver, WeightSyncReport, choose
from rlix.flow.workers.group import WorkerGroup
from rlix.protocol.errors import NotResidentError, WorkerError

_KNOWN_ANSWERS = 3
"""Publications of a group of workers that say what they answer: one for each way that weights come in."""


class StateCalls(TrainWorkers):
    """Whatever reads weights or state works on the devices and while the bytes wait in host memory.

    Whatever replaces them works on the devices and after `meta()`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.version = 0
        self._saves: WeakSet[SaveHandle] = WeakSet()
        self._channels: tuple[WorkerGroup, Channels] | None = None
        self._asked: tuple[WorkerGroup | None, int] = None, 0  # how often for a known answer

    def publish(self, version: int | None = None, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> PublishedWeights:
        """Store the current weights as a version (default: the last one plus 1) for inference engines to pull.

        The buckets live in Ray's object store as long as somebody holds the result and the workers live.
        """
        self._check_readable()
        version = self.version + 1 if version is None else version
        published = self._trainer().publish(version, bucket_bytes, self._epoch)
        self.version, self._publisher = version, self._workers()
        return replace(published, known=self._known_answer())

    def _known_answer(self) -> KnownAnswer | None:
        """What the weights answer, for the first few publications of each group of workers, where the bytes allow it.

        Replicas check the first ones that come in a new way; one more forward pass for each version would gain nothing.
        """
        group = self._workers()
        if self._asked[0] is not group:
            self._asked = group, 0
        if self._asked[1] >= _KNOWN_ANSWERS or self.residency is not Residency.DEVICE:
            return None
        self._asked = group, self._asked[1] + 1
        answers: list[KnownAnswer | None] = self._run("known_answer", self._epoch, timeout_s=self._timeout_s)
        return answers[0]

    def p2p_weight_sync(
        self,
        inference_engine: WeightReceiver,
        *,
        names: Collection[str] | None = None,
        transport: Transport = "auto",
        timeout_s: float = 120.0,
    ) -> WeightSyncReport:
        """Put the current weights, as a new version, into an inference engine, in place.

        Args:
            names: the tensors that have changed since the last sync to this engine, as `state_dict` names them; the
                others stay as they are there. Default: all. Not through host memory, and not with vLLM.
            transport: "host": buckets in Ray's object store, as `publish` makes them; "direct": each worker there gets
                what it needs from a rank here that holds it, in its dtype, through memory that the two share (on a
                node, or by CUDA IPC on a GPU), else in messages (NCCL between GPUs); "p2p": the same in messages only;
                "auto": "direct" on virtual GPUs, "host" on GPUs.
            timeout_s: of "direct" and "p2p": longest that one side waits for the other, bucket by bucket.

        Raises:
            ValueError: the transport cannot reach all replicas, or does not do `names`; says why.
            WeightSyncError: names, shapes or dtypes do not fit, all of which are listed; nothing was changed.
            NotResidentError: weights are not on the devices, here or there.
            WaitTimeoutError, TransferError, WorkerError: one side did not answer, or broke off. Replicas that took
                part may hold undefined weights: they refuse to generate until they are loaded again (`cuda`).
        """
        if isinstance(names, str):
            raise TypeError(f"names are several, in a list for instance, not the text {names!r}")
        self._check_readable()
        start = time.perf_counter()
        way = choose(transport, self.devices, inference_engine.receivers)
        if way is None and names is not None:
            raise ValueError('names=... is for transport "direct" or "p2p": through host memory all tensors move')
        if way is not None and transport == "auto" and names is None and self.residency is not Residency.DEVICE:
            way = None  # publishing reads what waits in host memory as well
        try:
            if way is None:
                published = self.publish()
                nbytes = sum(report.bytes for report in inference_engine.update_weights(published))
                spent = time.perf_counter() - start
                return WeightSyncReport(published.version, published.manifest, ("host",), nbytes, spent)
            self._check_resident()
            self.version += 1  # also when it fails: no two attempts have the same
            channel, nbytes = self._channels_of_group().transfer(
                inference_engine,
                self.version,
                way=way,
                transport=transport,
                only=names,
                timeout_s=timeout_s,
                epoch=self._epoch,
                known=self._known_answer(),
            )
        except WorkerError as error:
            raise plainly(error) from error.__cause__
        return WeightSyncReport(self.version, channel.manifest, channel.ways, nbytes, time.perf_counter() - start)

    def _trainer(self) -> Trainer:
        return Trainer(self.name, self.devices, partial(self._run, timeout_s=self._timeout_s))

    def _channels_of_group(self) -> Channels:
        """Channels of the workers that there are now."""
        group = self._workers()
        if self._channels is None or self._channels[0] is not group:
            self._channels = group, Channels(self._trainer())
        return self._channels[1]

    def _settle_saves(self) -> None:
        for save in list(self._saves):
            save.settle(self._timeout_s)

    def _end(self, *, graceful: bool) -> None:
        channels, self._channels = self._channels, None
        if graceful and channels is not None and channels[0] is self._group:
            channels[1].close()
        super()._end(graceful=graceful)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole weights in host memory, as `save` writes them; tied ones under each of their names."""
        self._check_readable()
        published = self._trainer().publish(self.version, DEFAULT_BUCKET_BYTES, self._epoch, as_trained=True)
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


def _absolute(folder: str | Path) -> str:
    return str(Path(folder).absolute())
