"""Saving and restoring a training module: weights for others, and everything needed to go on bit by bit.

`save_weights` writes what plain transformers loads: safetensors and config. `save_state` writes what training resumes
from: tensors (weights and optimizer) through PyTorch distributed checkpoint in its safetensors format, each rank its
shards, and the rest (learning rates, schedulers, random generators) as JSON. Nothing is pickled. Folders appear whole
or not at all: they are written under a temporary name and renamed.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlix.engine.residency import local_tensor
from rlix.engine.train.adapters import tensors_of
from rlix.engine.train.optimizers import optimizers, schedulers
from rlix.engine.train.parts import Parts
from rlix.engine.train.random_state import random_state, set_random_state
from rlix.engine.train.stored import INDEX_FILE, WEIGHTS_FILE
from rlix.engine.train.together import WholeWriter, agreed, check_shared
from rlix.engine.weights.gather import whole_tensors
from rlix.engine.weights.naming import as_stored
from rlix.nn import BaseTrainModule
from rlix.node.durable import sync, sync_folder

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
FORMAT = 1
SHARD_BYTES = 4 * 2**30
"""Largest safetensors file that `save_weights` writes, unless one tensor is larger."""

GATHER_BYTES = 64 * 2**20

Json = dict[str, Any]
_WHOLE = Parts()


def temporary(folder: Path) -> Path:
    """Where the contents of `folder` are written before they are complete; the same on every rank."""
    return folder.with_name(f".{folder.name}.partial")


def _begin(folder: Path) -> None:
    """Make room for what will take the place of `folder`.

    Raises:
        FileExistsError: what is there is no save, and would be lost.
    """
    saved = any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE, STATE_FILE))
    if folder.exists() and not saved and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is no earlier save, and a save would replace it: name another folder")
    shutil.rmtree(temporary(folder), ignore_errors=True)
    temporary(folder).mkdir(parents=True)


def publish_folder(folder: Path) -> None:
    """Make a completely written temporary folder the real one, replacing an older one."""
    partial, old = temporary(folder), folder.with_name(f".{folder.name}.old")
    sync_folder(partial)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


# ---- weights for others ------------------------------------------------------------------------------------------


def save_weights(module: BaseTrainModule, folder: Path, tokenizer_path: str | None, parts: Parts = _WHOLE) -> None:
    """Gather the weights and write safetensors, config and tokenizer. All ranks call it; rank 0 writes."""
    partial = temporary(folder)
    writer, failed = None, None
    with agreed():
        if module.rank == 0:
            _begin(folder)
            writer = ShardWriter(partial)
    for name, tensor in as_stored(module, whole_tensors(tensors_of(parts.exports(module)), GATHER_BYTES)):
        if writer is not None and failed is None:
            try:
                writer.add(name, tensor.cpu().contiguous())
            except (OSError, SafetensorError) as error:  # raised below: the other ranks still hand in their shards
                failed = error
    with agreed():
        if failed is not None:
            raise failed
        if writer is not None:
            writer.close()
            _save_config(module, partial, tokenizer_path)
            publish_folder(folder)


class ShardWriter:
    """Writes tensors into safetensors files of bounded size, with Hugging Face's index when there are several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def close(self) -> None:
        self._flush()
        count = len(self._shards)
        if count == 1:
            (self._folder / _shard_name(0, 0)).rename(self._folder / WEIGHTS_FILE)
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            final = _shard_name(index, count)
            (self._folder / _shard_name(index, 0)).rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index_json = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index_json, indent=2))

    def _flush(self) -> None:
        save_file(self._pending, self._folder / _shard_name(len(self._shards), 0), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._bytes = {}, 0


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _save_config(module: BaseTrainModule, folder: Path, tokenizer_path: str | None) -> None:
    config: Any = getattr(module, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
        written = folder / "config.json"
        values = json.loads(written.read_text())
        # The user's subclass is not known to transformers; the model class it extends is.
        bases = (c for c in type(module).__mro__ if c.__module__.startswith("transformers.models."))
        known = next((base.__name__ for base in bases), None)
        if known is not None:
            values["architectures"] = [known]
        values["dtype"] = str(next(module.parameters()).dtype).removeprefix("torch.")
        written.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
    if tokenizer_path is not None:
        for pattern in ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_*"):
            for file in Path(tokenizer_path).glob(pattern):
                shutil.copy2(file, folder / file.name)


# ---- everything needed to go on ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's part of a training state, as of one moment. `shared` is what rank 0 writes for all."""

    rank: int
    tensors: dict[str, torch.Tensor]
    random_state: str
    shared: str


def capture(module: BaseTrainModule, *, copy: bool, parts: Parts = _WHOLE) -> Snapshot:
    """The state as it is now. With `copy` it has host memory of its own, so that training may go on at once."""
    tensors = _tensors(module, parts)
    if copy:
        tensors = {name: _copied(tensor) for name, tensor in tensors.items()}
    shared = {
        "format": FORMAT,
        "world_size": module.context.world_size,
        "optimizers": {name: _optimizer_state(module, optimizer) for name, optimizer in optimizers(module).items()},
        "schedulers": {name: scheduler.state_dict() for name, scheduler in schedulers(module).items()},
        "training_state": module.training_state(),
    }
    return Snapshot(module.rank, tensors, json.dumps(random_state()), json.dumps(shared))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory of its own; torch's stager refuses empty shards of what waits there."""
    local = local_tensor(tensor)
    copy = torch.empty(local.shape, dtype=local.dtype).copy_(local)
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy


def write_state(snapshot: Snapshot, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write what `capture` took. All ranks call it; in a background thread with a `group` of its own."""
    partial = temporary(folder)
    with agreed(group):
        if snapshot.rank == 0:
            _begin(folder)
    check_shared(partial, snapshot.rank, group)
    with quiet_dcp():
        save(
            snapshot.tensors,
            storage_writer=WholeWriter(str(partial), save_distributed=True),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    with agreed(group):
        (partial / f"rng_{snapshot.rank}.json").write_text(snapshot.random_state)
        if snapshot.rank == 0:
            (partial / STATE_FILE).write_text(snapshot.shared)
    with agreed(group):
        if snapshot.rank == 0:
            publish_folder(folder)


def save_state(module: BaseTrainModule, folder: Path, parts: Parts = _WHOLE) -> None:
    """Write weights, optimizers, schedulers, random generators and `training_state()`. All ranks call it."""
    write_state(capture(module, copy=False, parts=parts), folder)


def load_state(module: BaseTrainModule, folder: Path, parts: Parts = _WHOLE) -> None:
    """Take a saved state back, on any number of ranks. All ranks call it.

    With as many ranks as saved it, the next step equals that of the uninterrupted run to the bit. With another number
    the random generators of ranks that have no saved state start from rank 0's, offset by their rank.

    Raises:
        FileNotFoundError: no complete state at `folder`.
        ValueError: the state's format, optimizers or parameters do not fit the module.
    """
    if not (folder / STATE_FILE).is_file():
        raise FileNotFoundError(f"no training state in {folder}: {STATE_FILE} is missing")

    def read(tensors: dict[str, torch.Tensor]) -> None:
        reader = HuggingFaceStorageReader(str(folder))
        with quiet_dcp():
            load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())

    restore(module, f"training state in {folder}", json.loads((folder / STATE_FILE).read_text()), read, parts)
    own = folder / f"rng_{module.rank}.json"
    set_random_state(json.loads((own if own.is_file() else folder / "rng_0.json").read_text()))
    if not own.is_file():
        torch.manual_seed(torch.initial_seed() + module.rank)


def restore(
    module: BaseTrainModule, what: str, state: Json, read: Callable[[dict[str, torch.Tensor]], None], parts: Parts
) -> None:
    """Take back what `capture` took; `read` fills the tensors it is given by name. `what` names the state in errors.

    Raises:
        ValueError: the state's format or optimizers do not fit the module, which is unchanged then.
    """
    if state["format"] != FORMAT:
        raise ValueError(f"{what} has format {state['format']}; this version reads {FORMAT}")
    if set(optimizers(module)) != set(state["optimizers"]):
        raise ValueError(
            f"{what} has optimizers {sorted(state['optimizers'])}, the module has {sorted(optimizers(module))}; create "
            "the same ones in on_weights_materialized, or in a method marked rlix.nn.configures"
        )
    module.zero_grad(set_to_none=True)  # pending gradients would keep torch from making room for optimizer state
    for name, optimizer in optimizers(module).items():
        _prepare(module, optimizer, state["optimizers"][name])
    read(_tensors(module, parts))
    for name, optimizer in optimizers(module).items():
        _set_options(optimizer, state["optimizers"][name]["groups"])
    for name, scheduler in schedulers(module).items():
        scheduler.load_state_dict(state["schedulers"][name])
    module.load_training_state(state["training_state"])


def _tensors(module: BaseTrainModule, parts: Parts) -> dict[str, torch.Tensor]:
    """Every tensor of the state by a name that does not depend on the layout; they share the module's memory.

    Tied ones are there once, under the first of their names: a file of safetensors refuses to hold them twice.
    """
    once = {id(tensor): (name, tensor) for name, tensor in reversed(parts.named(module).items())}
    tensors = {f"model.{name}": tensor for name, tensor in reversed(once.values())}
    for name, optimizer in optimizers(module).items():
        for parameter, tensor in _stepped(module, optimizer).items():
            for key, value in optimizer.state[tensor].items():
                if not isinstance(value, torch.Tensor):
                    continue
                # A scalar (AdamW's step) goes as one element: the format reads slices, and scalars have none.
                whole = parts.part(tensor, value) if value.shape == tensor.shape else value
                tensors[f"optimizer.{name}.{parameter}.{key}"] = whole.reshape(1) if value.dim() == 0 else whole
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _stepped(module: BaseTrainModule, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The module's parameters that the optimizer has state of, by name."""
    return {name: value for name, value in module.named_parameters() if optimizer.state.get(value)}


def _optimizer_state(module: BaseTrainModule, optimizer: Optimizer) -> Json:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    parameters = list(_stepped(module, optimizer))
    return {"stepped": bool(parameters), "parameters": parameters, "groups": [_jsonable(group) for group in groups]}


def _prepare(module: BaseTrainModule, optimizer: Optimizer, saved: Json) -> None:
    """Give an optimizer state of the right shapes to load into, or none at all.

    Asked for the state of one that never stepped, torch fills it by a step at a learning rate of zero.
    """
    if not saved["stepped"]:
        optimizer.state.clear()
        return
    wanted = set(saved.get("parameters", _stepped(module, optimizer)))
    if not optimizer.state or wanted - set(_stepped(module, optimizer)):
        optimizer.state.clear()
        with _learning(optimizer):
            get_optimizer_state_dict(module, optimizer)
    if "parameters" in saved:
        for name, parameter in _stepped(module, optimizer).items():
            if name not in wanted:
                del optimizer.state[parameter]


@contextmanager
def _learning(optimizer: Optimizer) -> Iterator[None]:
    """Its parameters are trained within the block, those too that are not in use, as of an adapter among others."""
    frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _set_options(optimizer: Optimizer, groups: list[Json]) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"saved with {len(groups)} parameter groups, the optimizer has {len(optimizer.param_groups)}")
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _jsonable(group: Json) -> Json:
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}


def quiet_dcp() -> warnings.catch_warnings:
    """Distributed checkpoint warns that it runs in one process, which is what one rank asks of it."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
