"""The random generators of a process, as JSON."""

import base64
import random
from typing import Any

import numpy as np
import torch

Json = dict[str, Any]


def random_state() -> Json:
    """Of torch (on this process's first CUDA device too, if CUDA has begun here), numpy and Python.

    Asking it of a device would begin CUDA, whose context is bytes on a GPU that this process may have no lease of.
    """
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}
    state: Json = {
        "torch": _encode(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": inner},
    }
    if torch.cuda.is_initialized():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Json) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
