"""Whether what is on the Hugging Face hub can be had, said at once: the hub's own client tries for half a minute."""

import socket
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, getproxies, urlopen

_TIMEOUT_S = 5.0


def check_reachable(name: str, *, data: bool = False) -> None:
    """Return unless it is certain that the hub's client would not get the model, or with `data` the data set, either.

    Raises:
        ConnectionError: it is not in the cache here, and the hub's address is unknown or refuses connections.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or (_has_data(name) if data else _has_model(name)):
        return
    if "all" in getproxies():  # the hub's client goes through that, and this one knows nothing of it
        return
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_TIMEOUT_S).close()
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, (ConnectionRefusedError, socket.gaierror)):
            what = f"not in the cache here, and {constants.ENDPOINT} cannot be reached: {reason}"
            raise ConnectionError(what) from None


def cached_model(name: str) -> Path | None:
    """The folder of the model in the hub's cache here; None where it is not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _has_model(name: str) -> bool:
    return cached_model(name) is not None


def _has_data(name: str) -> bool:
    """As the hub sent it, or as `datasets` keeps it."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = (
        Path(HF_HUB_CACHE, "datasets--" + name.replace("/", "--")),
        Path(HF_DATASETS_CACHE, name.replace("/", "___")),
    )
    return any(folder.is_dir() for folder in folders)
