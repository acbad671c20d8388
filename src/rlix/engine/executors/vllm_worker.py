"""What RLix adds to vLLM's workers; vLLM mixes the class into its own, in each tensor-parallel worker process."""

import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from itertools import chain, islice
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids

from rlix.engine.executors import vllm_layout
from rlix.engine.model_source import ModelSource
from rlix.engine.weights import publication
from rlix.engine.weights.buckets import Manifest
from rlix.engine.weights.naming import as_stored
from rlix.engine.weights.publication import PublishedWeights, TransferError, Wanted
from rlix.node.device_lock import DeviceLocks
from rlix.protocol.errors import RlixError, WeightSyncError
from rlix.protocol.messages import Fence
from rlix.workers.worker import LOCK_TIMEOUT_S

logger = logging.getLogger(__name__)

LOCK_VARIABLE = "RLIX_VLLM_DEVICE_LOCK"
"""Tells worker processes that are still to come which devices to lock, and under which fence."""

_GRACE_S = 1.0  # for vLLM's own way to end, which leaves no shared memory behind

_locks: DeviceLocks | None = None  # of this process, where it is a worker process of its own


def announce_locks(keys: Sequence[str], fence: Fence | None) -> None:
    """Have worker processes that this one starts from now on hold these devices; None: hold none."""
    if fence is None:
        os.environ.pop(LOCK_VARIABLE, None)
    else:
        os.environ[LOCK_VARIABLE] = json.dumps([list(keys), astuple(fence)])


def _end_with(parent: Any) -> None:
    """vLLM's workers learn of their parent's end only once they have started, and not while they wait for others."""
    parent.join()
    time.sleep(_GRACE_S)
    os._exit(1)


if (_parent := multiprocessing.parent_process()) is not None and LOCK_VARIABLE in os.environ:
    # vLLM imports this before a worker touches its device, and this is the one thing of ours that it does by then.
    # This node's devices of the bundle: they pass on together, and which of them is this worker's is not known yet.
    _held_keys, _held_fence = json.loads(os.environ[LOCK_VARIABLE])
    _locks = DeviceLocks(_held_keys)
    _locks.acquire(Fence(*_held_fence), LOCK_TIMEOUT_S)
    if current_platform.is_cpu():  # of which vLLM counts one on a node, and by that tells its own workers from others
        set_assigned_physical_gpu_ids(list(range(len(_held_keys))))
    threading.Thread(target=_end_with, args=[_parent], name="parent", daemon=True).start()


@contextmanager
def _warnings_shown(model: torch.nn.Module) -> Iterator[None]:
    """What vLLM says of tensors that nobody loaded and the like, whatever it has been told to log.

    It says so of layers too that have nothing but what they computed themselves, such as rotary embeddings.
    """
    loaded = {type(layer).__name__ for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))}

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            layer = record.args[0] if isinstance(record.args, tuple) and record.args else None
            if not str(record.msg).endswith("Failed to load weights") or layer in loaded:
                logger.warning("vLLM, while it replaced weights: %s", record.getMessage())

    theirs, shown = logging.getLogger("vllm.model_executor"), Shown(logging.WARNING)
    before = theirs.level
    theirs.setLevel(logging.WARNING)
    theirs.addHandler(shown)
    try:
        yield
    finally:
        theirs.setLevel(before)
        theirs.removeHandler(shown)


class ReplicaWorker:
    """A worker extension (`worker_extension_cls`)."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]
    rank: int
    _wanted: tuple[dict[str, Any], Wanted] | None = None
    _trained: torch.nn.Module | None = None

    def rlix_lock(self, fence: Fence | None) -> None:
        """Lock the devices that this process was started with; None: let them go."""
        assert _locks is not None
        if fence is None:
            _locks.release()
        else:
            _locks.acquire(fence, LOCK_TIMEOUT_S)

    def _needed(self, offered: Manifest, source: ModelSource) -> Wanted:
        """What this worker reads of a trainer's tensors."""
        tensors = {entry.name: (entry.shape, entry.dtype) for entry in offered.entries}
        if self._wanted is None or self._wanted[0] != tensors:
            expected = vllm_layout.meta_model(self.model_runner.vllm_config)
            self._wanted = tensors, vllm_layout.needed(expected, offered.entries, self._trained_as(source))
        return self._wanted[1]

    def _trained_as(self, source: ModelSource) -> torch.nn.Module:
        """The model as transformers has it, without bytes: whose tensors arrive."""
        if self._trained is None:
            self._trained = source.on_meta()
        return self._trained

    def rlix_reload(self, by_node: Sequence[PublishedWeights], source: ModelSource) -> RlixError | int:
        """Replace the weights in place, with vLLM's post-processing of a load. Buckets must be on this node by now.

        vLLM's loaders cut this worker's part out of whole tensors and leave the rest unread. So only that part is read
        of what is published; it comes to lie in a tensor of the whole's shape that is otherwise undefined.

        Returns the bytes that were read, or what went wrong, because errors do not pass between vLLM's processes with
        their types: a WeightSyncError when nothing was changed, else one that leaves the weights undefined, but vLLM
        fit for others.
        """
        published = by_node[self.vllm_config.parallel_config.node_rank]
        wanted = None
        if self.vllm_config.parallel_config.world_size > 1:
            wanted = self._needed(published.manifest, source)
        moved = published.manifest.nbytes if wanted is None else publication.needed_bytes(published, wanted)
        arriving = publication.stream(published, wanted=wanted)
        named = ((entry.name, tensor) for entry, tensor in arriving)
        try:
            first = list(islice(named, 1))  # whoever refuses does so now, before vLLM takes its layers apart
        except RlixError as error:
            return error
        try:
            self._reload(weights_iterator=as_stored(self._trained_as(source), chain(first, named)))
        except RlixError as error:
            from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

            # Or the next load would count this one's tensors too, and drop those that come after a layer looks full.
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)
            return error if not isinstance(error, WeightSyncError) else TransferError(str(error))
        return moved

    def rlix_reload_folder(self, path: str, load_format: str) -> None:
        """Replace the weights in place by a folder's, also where the engine was started without any."""
        self.vllm_config.load_config.load_format = load_format
        self._reload(weights_path=path)

    def _reload(self, **of: Any) -> None:
        """As vLLM does it, also of experts on a CPU: those it lays out for its kernel only when it makes that."""
        if current_platform.is_cpu():
            for layer in self.model_runner.get_model().modules():
                if getattr(method := getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                    method.moe_kernel = None  # type: ignore[union-attr]
        with _warnings_shown(self.model_runner.get_model()):
            self.reload_weights(**of)

    def rlix_put_adapter(self, number: int, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        """Have a LoRA adapter under this number, in place of what is there."""
        worker = self.model_runner.lora_manager
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(worker.lora_config)
        adapter = LoRAModel.from_lora_tensors(
            number,
            {name: tensor.clone() for name, tensor in tensors.items()},  # vLLM scales them where they are
            helper,
            device="cpu",
            dtype=worker.lora_config.lora_dtype,
            model_vocab_size=worker.vocab_size,
        )
        manager = worker._adapter_manager
        manager.remove_adapter(number)
        manager.add_adapter(adapter)
        manager.activate_adapter(number)

    def rlix_put_no_adapter(self, number: int) -> None:
        """Have one under this number that changes nothing."""
        worker = self.model_runner.lora_manager
        manager = worker._adapter_manager
        manager.remove_adapter(number)
        manager.add_adapter(manager.create_dummy_lora(number, 1, worker.embedding_modules))  # of zeros
        manager.activate_adapter(number)

    def rlix_remove_adapter(self, number: int) -> None:
        self.model_runner.lora_manager._adapter_manager.remove_adapter(number)

    def rlix_bytes(self) -> tuple[int, int]:
        """Bytes of weights and of KV cache in this worker."""
        held = sum(parameter.nbytes for parameter in self.model_runner.get_model().parameters())
        return held, sum(_nbytes(cache) for cache in self.model_runner.kv_caches)


def _nbytes(cache: Any) -> int:
    return sum(map(_nbytes, cache)) if isinstance(cache, list | tuple) else int(cache.nbytes)
