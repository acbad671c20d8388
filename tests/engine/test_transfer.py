"""Members of one transfer, each on a thread of this process; on a GPU also in processes of their own."""

import ast
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from rlix.engine.executors.base import ALL_PARTS, ExecutorOptions, Site
from rlix.engine.executors.transformers import TransformersExecutor
from rlix.engine.inference.requests import GenerationRequest
from rlix.engine.life_cycle import SOURCE_VERSION
from rlix.engine.model_source import ModelSource
from rlix.engine.weights import transfer
from rlix.engine.weights.buckets import layout, pack_stream
from rlix.engine.weights.publication import PublishedWeights, named_weights
from rlix.engine.weights.transfer import FAILED, Receiver, Rendezvous, Sender, TransferError, open_store
from rlix.protocol.errors import NotResidentError, WaitTimeoutError, WeightSyncError
from rlix.protocol.messages import DeviceKind
from tests.engine.models import folder, greedy, model

CPU = torch.device("cpu")
WAIT_S = 30.0
BUCKETS = [torch.arange(size, dtype=torch.uint8) for size in (7, 200, 64)]


@pytest.fixture
def store() -> Any:
    return open_store("127.0.0.1", 0, WAIT_S, server=True)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def rendezvous(store: Any, *transports: Any, timeout_s: float = WAIT_S) -> Rendezvous:
    return Rendezvous("infer", "127.0.0.1", store.port, transports, timeout_s)


def send(meeting: Rendezvous, device: torch.device = CPU) -> None:
    with Sender(meeting, device) as sender:
        for bucket in BUCKETS:
            sender.send(bucket.to(device))
        sender.finish()


def receive(meeting: Rendezvous, device: torch.device = CPU) -> list[list[int]]:
    with Receiver(meeting, device) as receiver:
        received = [receiver.receive(len(bucket)) for bucket in BUCKETS]
        receiver.finish()
    return [bucket.tolist() for bucket in received]


def everyone(threads: ThreadPoolExecutor, meeting: Rendezvous, act: Callable[..., Any] = receive) -> list[Future[Any]]:
    places = [(replica, worker) for replica, row in enumerate(meeting.transports) for worker in range(len(row))]
    return [threads.submit(act, meeting.at(*place)) for place in places]


@pytest.fixture
def bytes_for_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a handle on GPU memory, its contents: everything around them is as on a GPU."""
    monkeypatch.setattr(transfer, "share", lambda data: repr(data.tolist()))
    monkeypatch.setattr(
        transfer, "opened", lambda handle, _: torch.tensor(ast.literal_eval(handle.decode()), dtype=torch.uint8)
    )


@pytest.mark.usefixtures("bytes_for_handles")
@pytest.mark.parametrize(
    "transports", [(("broadcast",),), (("broadcast", "broadcast"), ("broadcast",)), (("ipc",), ("broadcast", "ipc"))]
)
def test_every_receiver_gets_every_bucket(store: Any, threads: ThreadPoolExecutor, transports: Any) -> None:
    meeting = rendezvous(store, *transports)
    receiving = everyone(threads, meeting)
    threads.submit(send, meeting).result(WAIT_S)
    assert all(future.result(WAIT_S) == [bucket.tolist() for bucket in BUCKETS] for future in receiving)


def test_nobody_begins_before_all_are_there_and_everyone_learns_who_failed(
    store: Any, threads: ThreadPoolExecutor
) -> None:
    meeting = rendezvous(store, ("broadcast",), ("broadcast",))
    waiting = [threads.submit(send, meeting), threads.submit(receive, meeting)]
    store.set(FAILED, "replica 1 refused")
    for future in waiting:
        with pytest.raises(WeightSyncError, match="nothing was changed: replica 1 refused"):
            future.result(WAIT_S)


def test_a_member_that_does_not_come_is_named(store: Any, threads: ThreadPoolExecutor) -> None:
    meeting = rendezvous(store, ("broadcast",), ("broadcast", "broadcast"), timeout_s=0.2)
    late = threads.submit(receive, meeting.at(1, 0))
    with pytest.raises(WaitTimeoutError, match=r"training rank 0; infer, replica 0; infer, replica 1, worker 1 to say"):
        late.result(WAIT_S)


@pytest.mark.usefixtures("bytes_for_handles")
@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_a_receiver_that_leaves_in_the_middle_is_an_error_for_all(
    store: Any, threads: ThreadPoolExecutor, transport: Any
) -> None:
    meeting = rendezvous(store, (transport,), ("broadcast",), timeout_s=2.0)

    def leave() -> None:
        with Receiver(meeting.at(0, 0), CPU) as receiver:
            receiver.receive(len(BUCKETS[0]))
            raise KeyError("out of memory")

    leaving, staying = threads.submit(leave), threads.submit(receive, meeting.at(1, 0))
    with pytest.raises((TransferError, WaitTimeoutError), match="training rank 0"):
        threads.submit(send, meeting).result(WAIT_S)
    with pytest.raises(KeyError):
        leaving.result(WAIT_S)
    with pytest.raises(TransferError, match=r"infer, replica 1 could not receive bucket \d \(timeout 2 s\)"):
        staying.result(WAIT_S)


def test_a_replica_drops_weights_that_arrived_in_part(store: Any, threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    request = GenerationRequest("r", (3, 4, 5), 8, temperature=0.0)
    executor = TransformersExecutor(ModelSource.of(folder(tmp_path, 0)), ExecutorOptions(), Site(DeviceKind.CPU))
    executor.load(None, ALL_PARTS)
    meeting, named = rendezvous(store, ("broadcast",)), named_weights(model(1))
    updating = threads.submit(executor.update, PublishedWeights(5, layout(named.items(), 2**14), rendezvous=meeting))
    with pytest.raises(KeyError), Sender(meeting, CPU) as sender:
        sender.send(next(pack_stream(named.items(), 2**14)).data)
        raise KeyError("the trainer ends")
    with pytest.raises(TransferError, match="infer, replica 0 could not receive bucket 1"):
        updating.result(WAIT_S)
    with pytest.raises(NotResidentError):
        executor.submit([request]).result(WAIT_S)
    executor.load(None, ALL_PARTS)
    (result,) = executor.submit([request]).result(WAIT_S)
    assert (result.token_ids, result.weight_version) == (greedy(model(0), (3, 4, 5), 8), SOURCE_VERSION)
    executor.close()


def _receive_in_a_process(meeting: Rendezvous, results: Any) -> None:
    results.put(receive(meeting, torch.device("cuda", 0)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_processes_on_one_gpu_share_its_memory(store: Any, threads: ThreadPoolExecutor) -> None:
    meeting = rendezvous(store, ("ipc",), timeout_s=60.0)
    context = get_context("spawn")
    results = context.Queue()
    process = context.Process(target=partial(_receive_in_a_process, meeting, results), daemon=True)
    process.start()
    send(meeting, torch.device("cuda", 0))
    assert results.get(timeout=60.0) == [bucket.tolist() for bucket in BUCKETS]
    process.join(60.0)
