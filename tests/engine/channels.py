"""A channel from a trainer of one rank to one executor, all in this process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from rlix.engine import placement
from rlix.engine.executors.base import InferenceExecutor
from rlix.engine.weights import channel, streams
from rlix.engine.weights.channel import Ticket
from rlix.engine.weights.layout import Layout
from rlix.engine.weights.publication import PublishedWeights
from rlix.engine.weights.shards import pieces_of, whole_layout
from rlix.engine.weights.sync import Channel, Trainer
from rlix.protocol.errors import WeightSyncError
from rlix.protocol.messages import Device, DeviceKind

CPU = torch.device("cpu")
WAIT_S = 60.0


def device(number: int) -> Device:
    return Device(number, "node", "203.0.113.9", number, DeviceKind.CPU)


class OneRank:
    """A trainer's methods, for a rank that has a whole model."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        self.fail_at = ""  # the tensor at which it breaks off
        self.refusal = ""  # why it does not begin

    def __call__(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self, method)(*args)]

    def weight_layout(self, as_trained: bool) -> tuple[Layout, dict[str, tuple[str, ...]]]:
        return whole_layout(self.state), {}

    def join_channel(self, tickets: Any) -> None:
        channel.join(tickets.values[0], CPU)

    def leave_channel(self, name: str) -> None:
        channel.leave(name)

    def send_weights(self, delivery: channel.Delivery, epoch: int | None) -> None:
        delivery = delivery.sent_by(0)
        with channel.answering(delivery):
            if self.refusal:
                raise WeightSyncError(self.refusal)
        streams.send(delivery, [(name, partial(self._pieces, name)) for name in self.state])

    def _pieces(self, name: str) -> streams.Held:
        if name == self.fail_at:
            raise KeyError("the trainer ends")
        return [(piece, self.state[name]) for piece in pieces_of(self.state[name], name)]


class OneReplica:
    """An inference engine's methods, for one executor with one worker; `error` is what its last update raised."""

    name, processes, receivers = "infer", {}, ((device(1),),)

    def __init__(self, executor: InferenceExecutor) -> None:
        self.executor = executor
        self.leave_channel = executor.leave_channel
        self.error: Exception | None = None

    def weight_layouts(self, offered: PublishedWeights) -> list[list[Layout]]:
        return [self.executor.weight_layouts(offered)]

    def join_channel(self, tickets: Sequence[Sequence[Ticket]]) -> None:
        self.executor.join_channel(tickets[0])

    def update_weights(self, published: PublishedWeights) -> None:
        try:
            self.executor.update(published.received_by(replica=0))
        except Exception as error:
            self.error = error
            raise


def to_executor(
    monkeypatch: pytest.MonkeyPatch, rank: OneRank, replica: OneReplica, bucket_bytes: int = 2**14
) -> Channel:
    """An open channel, with buckets small enough that a model needs several."""
    monkeypatch.setattr(placement, "common_address", lambda _: "127.0.0.1")  # without Ray
    return Channel(Trainer("train", [device(0)], rank), replica, lambda *_: "shm", WAIT_S, bucket_bytes)
