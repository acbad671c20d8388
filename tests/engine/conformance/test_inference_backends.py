"""Every backend that ships runs through the suite of the contract."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlix import InferenceEngine
from rlix.engine.executors.base import InferenceExecutor
from rlix.engine.executors.loop import LoopExecutor
from rlix.engine.executors.registry import Backend, backend, register
from rlix.engine.executors.transformers import TransformersExecutor
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import DeviceKind
from tests.engine.models import qwen
from tests.waiting import PROGRAM_S

SUITE = Path(__file__).with_name("inference_suite.py")


def conforms(name: str, *further: Path, **environment: str) -> None:
    """In a process of its own: a backend may change what it likes in it."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, (SUITE, *further))],
        env={**os.environ, **environment, "RLIX_CONFORMANCE": name},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_transformers_conforms() -> None:
    conforms("transformers")


@pytest.mark.vllm
def test_vllm_conforms() -> None:
    conforms("vllm", SUITE.with_name("vllm_suite.py"), **backend("vllm").environment(DeviceKind.CPU, 1, True))


class Mine(TransformersExecutor):
    """A backend that no file of RLix knows."""


def test_a_new_backend_edits_no_file() -> None:
    assert backend(f"{__name__}:Mine").load() is Mine
    register("mine", Backend(f"{__name__}:Mine"))
    assert InferenceEngine(qwen(), executor="mine").backend.load() is Mine
    assert issubclass(LoopExecutor, InferenceExecutor)
    with pytest.raises(ValueError, match=r"unknown executor 'tgi'.*transformers, vllm"):
        InferenceEngine(qwen(), executor="tgi")
    with pytest.raises(ValueError, match="without a colon"):
        register("a:b", Backend("a:b"))
    for target in ("rlix.nowhere:Mine", f"{__name__}:Nobody"):
        with pytest.raises(RlixError, match="must be module:Class"):
            InferenceEngine(qwen(), executor=target)
    with pytest.raises(RlixError, match=r"is no rlix\.engine\.executors\.base\.InferenceExecutor"):
        InferenceEngine(qwen(), executor="pathlib:Path")
