"""Whether a model on the Hugging Face hub can be had, said at once: the hub's own client tries for half a minute."""

import socket
from http.client import HTTPException
from urllib.request import Request, getproxies, urlopen

_TIMEOUT_S = 5.0


def check_reachable(model: str) -> None:
    """Return unless it is certain that the hub's client would not get the model either.

    Raises:
        ConnectionError: the model is not in the cache here, and the hub's address is unknown or refuses connections.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    if "all" in getproxies():  # the hub's client goes through that, and this one knows nothing of it
        return
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_TIMEOUT_S).close()
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, (ConnectionRefusedError, socket.gaierror)):
            what = f"not in the cache here, and {constants.ENDPOINT} cannot be reached: {reason}"
            raise ConnectionError(what) from error
