"""Where a training module's weights come from when its configuration says it."""

from pathlib import Path
from typing import Any

from rlix.engine.train.stored import safetensors_index

_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def weights_folder(module: str, configuration: tuple[Any, ...], weights_path: str | Path | None) -> str | None:
    """The folder of safetensors to train from: `weights_path`, else the one a configuration was loaded from.

    Args:
        module: the module's name, in errors.
        configuration: the module's arguments, of which transformers' configurations may know where
            they come from: those that `AutoConfig` loaded do, those that a class of their own loaded do not.

    Raises:
        FileNotFoundError: there are none.
    """
    named = next((name for name in map(_origin, configuration) if name), None)
    if weights_path is None and named is None:
        return None
    folder = Path(weights_path) if weights_path is not None else _local(module, named or "")
    try:
        safetensors_index(folder)
    except FileNotFoundError as error:
        if weights_path is not None:
            raise
        raise FileNotFoundError(
            f"the configuration of {module} comes from {named}, where no weights are ({error}); pass weights_path=..., "
            "or random_weights=True to train from scratch"
        ) from None
    return str(folder.resolve())


def _origin(argument: Any) -> str | None:
    name = getattr(argument, "_name_or_path", None)
    return str(name) if isinstance(name, str | Path) and str(name) else None


def _local(module: str, named: str) -> Path:
    """The folder of a model by its path or hub name, downloaded where it is not here yet."""
    if Path(named).is_dir():
        return Path(named)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(named, allow_patterns=list(_FILES)))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(
            f"the configuration of {module} comes from {named}, which is no folder here and could not be had from the "
            f"hub ({error}); pass weights_path=..., or random_weights=True to train from scratch"
        ) from error
