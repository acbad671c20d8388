"""From what has been trained to a folder that plain transformers loads."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from rlix.engine.lora import CONFIG_FILE, AdapterConfig
from rlix.engine.train.saved_weights import saved_names, saved_weights, write_weights
from rlix.engine.weights.naming import as_stored
from rlix.node.manifest import damage
from rlix.node.run_folder import PARTIAL, checkpoints_of, newest_checkpoint
from rlix.pipeline.jobs.checkpoints import BEST
from rlix.pipeline.models import describe_model, local_model
from rlix.protocol.errors import SpecError

STATE, DESCRIPTION, ADAPTER = "state", "model", "adapter"
_OF_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def export(
    run_dir: Path, out: Path, *, step: int | Literal["best"] | None = None, dtype: str | None = None
) -> tuple[Path, Path]:
    """Write configuration, weights (safetensors) and tokenizer of a run's policy to the new folder `out`.

    Of a run that trains an adapter, the adapter as PEFT loads it; its configuration names the model that it is on.

    Args:
        step: of which checkpoint; default: the newest that is whole.
        dtype: "float32" or "bfloat16"; default: in which the job's rollouts held the weights.

    Returns:
        `out`, and the checkpoint that it came from.

    Raises:
        SpecError: there is no such run or checkpoint, it is broken, or `out` exists.
    """
    source = _checkpoint(run_dir, step)
    if (adapter := (source / ADAPTER).is_dir()) and dtype is not None:
        raise SpecError(f"{source}: is of an adapter, which stays as it was trained; leave out --dtype")
    with _new_folder(out, source) as partial:
        if adapter:
            partial.mkdir(parents=True)
            for name in _OF_ADAPTER:
                shutil.copy2(source / ADAPTER / name, partial / name)
        else:
            _write_model(source, partial, dtype)
    return out, source


def merge_adapter(adapter: Path, out: Path) -> None:
    """Write the model that a PEFT folder's adapter is on, with the adapter in its weights, and its tokenizer.

    Raises:
        SpecError: the folder does not say which model, or that is not there; `out` exists.
    """
    from peft import PeftModel

    AdapterConfig.of_folder(adapter)
    base = json.loads((adapter / CONFIG_FILE).read_text()).get("base_model_name_or_path")
    if not base:
        raise SpecError(f"{adapter / CONFIG_FILE}: does not say on which model the adapter is: base_model_name_or_path")
    with _new_folder(out, adapter) as partial:
        try:
            model = AutoModelForCausalLM.from_pretrained(base)
            folder = local_model(base)
        except (OSError, ValueError, SpecError) as error:
            raise SpecError(f"{adapter / CONFIG_FILE}: its model, {base!r}, cannot be loaded: {error}") from error
        describe_model(folder, partial, str(model.dtype).removeprefix("torch."))
        PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(partial)


@contextmanager
def _new_folder(out: Path, source: Path) -> Iterator[Path]:
    """Where to write what becomes `out` when all of it is there."""
    if out.exists():
        raise SpecError(f"{out}: exists already; name a folder that does not")
    partial = out.with_name(out.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        partial.rename(out)
    except (OSError, SafetensorError, ValueError) as error:
        raise SpecError(f"{source} cannot be exported to {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_model(source: Path, folder: Path, dtype: str | None) -> None:
    config = AutoConfig.from_pretrained(source / DESCRIPTION)
    chosen = dtype or str(config.dtype).removeprefix("torch.")
    describe_model(source / DESCRIPTION, folder, chosen)
    with torch.device("meta"):
        model = AutoModelForCausalLM._model_mapping[type(config)](config)
    weights = saved_weights(source / STATE, _names(model, source / STATE))
    write_weights(as_stored(model, weights), folder, getattr(torch, chosen))


def _names(model: torch.nn.Module, state: Path) -> list[str]:
    """Of the model's weights, tied ones once. Raises ValueError when the state is of another kind of model."""
    wanted = [name for name, _ in model.named_parameters()]
    missing, unknown = set(wanted) - set(saved_names(state)), set(saved_names(state)) - set(model.state_dict())
    if missing or unknown:
        raise ValueError(
            f"its weights are not those of a {type(model).__name__}: {', '.join(sorted(missing | unknown)[:5])}"
        )
    buffers = [name for name in model.state_dict() if name not in dict(model.named_parameters(remove_duplicate=False))]
    return [*wanted, *(name for name in buffers if name in saved_names(state))]


def _checkpoint(run_dir: Path, step: int | Literal["best"] | None) -> Path:
    folder = run_dir / "checkpoints"
    found = dict(checkpoints_of(run_dir))
    known = ", ".join(map(str, found))
    if step == BEST:
        if not (folder / BEST).exists():
            raise SpecError(
                f"{run_dir}: no checkpoint is marked as the best (it takes an evaluation); there are {known}"
            )
        chosen = (folder / BEST).resolve()
    elif step is not None:
        if step not in found:
            raise SpecError(f"{run_dir}: has no checkpoint of step {step}; there are {known}")
        chosen = found[step]
    else:
        newest, _ = newest_checkpoint(run_dir)
        assert newest is not None  # there are some, and none of them whole raises
        chosen = newest[1]
    if (what := damage(chosen)) is not None:
        raise SpecError(f"{chosen}: is broken ({what}); choose another with --step, there are {known}")
    if (chosen / ADAPTER).is_dir():
        return chosen
    if not (chosen / STATE).is_dir() or not (chosen / DESCRIPTION / "config.json").is_file():
        raise SpecError(f"{chosen}: holds no model that is known here; a pipeline of your own saves what it wants")
    return chosen
