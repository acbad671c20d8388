"""Whether a model on the Hugging Face hub can be had, said at once: the hub's own client tries for half a minute."""

import ssl
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

_TIMEOUT_S = 5.0


def check_reachable(model: str) -> None:
    """Return when the model is in the hub's cache here, or somebody answers who may have it.

    Raises:
        ConnectionError: neither is so.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_TIMEOUT_S).close()
    except HTTPError:
        return  # whatever it says, it is there
    except (URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # the hub's client may know certificates that this one does not
            return
        raise ConnectionError(f"not in the cache here, and {constants.ENDPOINT} cannot be reached: {reason}") from error
