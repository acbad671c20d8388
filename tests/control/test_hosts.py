"""Which hosts lend devices, and what is said of those that do not."""

import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rlix.control.hosts import Hosts, Keys
from rlix.node.host import Software, unseen
from rlix.node.shared_folder import Token
from rlix.protocol.errors import WaitTimeoutError
from tests.control.test_discovery import node

HEAD = Software({"RLix": "1 (aa)", "Python": "3.11.2", "vLLM": "0.32.0", "PEFT": ""})
NODES: list[Any] = [
    node("a", "10.0.0.1", 1, head=True, virtual=True),
    node("b", "10.0.0.2", 2),
    node("c", "10.0.0.3", 1, virtual=True),
]
KEYS = {"a": (), "b": ("GPU-1", "GPU-2"), "c": ()}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def hosts(
    answers: dict[str, Callable[[], Software]], clock: Clock | None = None, known: dict[str, Keys] | None = None
) -> Hosts:
    def ask(node_id: str, virtual: bool) -> tuple[Keys, Software]:
        return KEYS[node_id], answers.get(node_id, lambda: HEAD)()

    return Hosts(ask, HEAD, known or {}, clock or Clock())


def without(*names: str, **other: str) -> Callable[[], Software]:
    versions = {name: version for name, version in {**HEAD.versions, **other}.items() if name not in names}
    return lambda: Software(versions)


def failing(error: Exception) -> Callable[[], Software]:
    def fail() -> Software:
        raise error

    return fail


def test_hosts_that_match_lend_their_devices() -> None:
    pool = hosts({"c": without(PEFT="0.21", TRL="1.16")})  # more than the head has
    assert pool.lending(NODES, 300.0) == KEYS
    assert pool.unfit == {}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (without(RLix="1 (bb)"), "RLix 1 (bb), on the head 1 (aa)"),
        (without(Python="3.12.1"), "Python 3.12.1, on the head 3.11.2"),
        (without("vLLM"), "vLLM is missing, on the head 0.32.0"),
        (without("vLLM", RLix="2"), "RLix 2, on the head 1 (aa); vLLM is missing, on the head 0.32.0"),
        (
            failing(RayActorError(None, "The actor died\nModuleNotFoundError: No module named 'rlix'")),
            "RLix is not there, or another version of it (ModuleNotFoundError: No module named 'rlix'); install",
        ),
        (failing(AttributeError("no lends")), "RLix is not there, or another version of it (AttributeError: no lends)"),
        (failing(WaitTimeoutError("no answer within 30 s: what node c lends")), "no answer within 30 s"),
        (failing(PermissionError(13, "Permission denied", "/opt/rlix")), "[Errno 13] Permission denied: '/opt/rlix'"),
        (failing(PackageNotFoundError("rlix")), "No package metadata was found for rlix"),
        (failing(KeyError()), "KeyError"),
    ],
)
def test_a_host_that_does_not_match_or_answer_lends_nothing_and_the_others_do(
    answer: Callable[[], Software], said: str
) -> None:
    pool = hosts({"c": answer})
    assert pool.lending(NODES, 300.0) == {"a": (), "b": KEYS["b"]}
    (note,) = pool.unfit.values()
    assert note.startswith(said)


def test_a_host_that_hangs_holds_up_no_other_one() -> None:
    answered = threading.Event()

    def late() -> Software:
        assert answered.wait(300)
        return HEAD

    pool = hosts({"c": late})
    while pool.lending(NODES) != {"a": (), "b": KEYS["b"]}:
        pass
    assert pool.unfit == {"c": "it has not answered yet"}
    answered.set()
    assert pool.lending(NODES, 300.0) == KEYS
    assert pool.unfit == {}


def test_a_host_that_failed_is_asked_again_less_and_less_often() -> None:
    clock, asked = Clock(), []

    def fail() -> Software:
        asked.append(clock.now)
        raise WaitTimeoutError("no answer")

    pool = hosts({"c": fail}, clock)
    for second in range(30):
        clock.now = float(second)
        pool.lending(NODES, 300.0)
    assert asked == [0.0, 2.0, 6.0, 14.0]


def test_a_host_of_which_ray_was_told_too_much_is_only_itself() -> None:
    nodes = [NODES[0], node("b", "10.0.0.2", 4)]
    pool = hosts({})
    assert pool.lending(nodes, 10.0) == {"a": ()}
    assert "Ray was told of 4 GPUs there, but programs may use 2 (GPU-1, GPU-2)" in pool.unfit["b"]


def test_a_host_that_lent_devices_before_goes_on_while_it_does_not_answer() -> None:
    """A manager that is started again must not take for lost whoever has not answered it yet, or is cut off."""
    answered = threading.Event()

    def late() -> Software:
        assert answered.wait(300)
        return HEAD

    pool = hosts({"b": late, "c": failing(WaitTimeoutError("no answer"))}, known=KEYS)
    assert pool.lending(NODES) == KEYS
    answered.set()
    assert pool.lending(NODES, 300.0) == KEYS
    assert pool.lending(NODES[:2], 300.0) == {"a": (), "b": KEYS["b"]}  # Ray has given it up
    assert hosts({"c": without("RLix")}, known=KEYS).lending(NODES, 300.0) == {"a": (), "b": KEYS["b"]}


def test_a_host_that_leaves_is_forgotten_with_its_note() -> None:
    pool = hosts({"c": without("RLix")})
    pool.lending(NODES, 300.0)
    assert pool.lending(NODES[:2], 300.0) == {"a": (), "b": KEYS["b"]}
    assert pool.unfit == {}


def test_what_a_host_does_not_see(tmp_path: Any) -> None:
    token, there = Token(tmp_path), str(tmp_path)
    assert unseen([str(token.path), there], token.text) == ()
    assert unseen([there, str(tmp_path / "model")], "") == (str(tmp_path / "model"),)
    token.path.write_text("another host's")
    assert unseen([str(token.path), there], token.text) == (str(token.path),)
