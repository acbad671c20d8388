"""What workers can say to each other: the messages half of `Worker`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from rlix.protocol.errors import WorkerError

if TYPE_CHECKING:
    from rlix.flow.channels.codec import Parcel
    from rlix.flow.messages.mailbox import Home, Mailbox, Member

MAIL = "mail"
"""Concurrency group of what brings messages: it is answered whatever the worker does."""
DEFAULT_TIMEOUT_S = 300.0


class Peer:
    """Messages go to workers by name, `group:rank`, of any group that the same program started in the same Ray
    namespace.

    Of one sender, reader and tag they arrive in order and once. What a worker had not read goes with its process. These
    methods block: a coroutine calls them in a thread.
    """

    ctx: "Member"
    cuda_ipc: bool = False
    """Override with True to let tensors on a GPU go to workers on the same GPU without leaving it. Such a message is
    bytes on that GPU until it is read and dropped: both must hold the device so long. Not yet tried on a GPU."""
    _mailbox: "Mailbox | None" = None

    def send(self, value: object, to: str, *, tag: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Put any object, tensors and arrays in it however deep, into a worker's mailbox. Does not wait for its reader.

        Raises:
            WorkerError: the worker has died.
            WaitTimeoutError: it is not there, did not take it within `timeout_s`, or cannot be reached for the moment;
                it is not known then whether it has it, or still will.
            OSError: shared memory is full.
        """
        self._rlix_mail().send(value, [to], tag, timeout_s)

    def broadcast(
        self, value: object, to: Sequence[str], *, tag: str = "", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """`send` to several; bytes in shared memory are written once for all workers of a node."""
        self._rlix_mail().send(value, [to] if isinstance(to, str) else to, tag, timeout_s)

    def recv(self, sender: str, *, tag: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """The oldest message of a worker that was not read yet. Tensors are this worker's own, and may be written to.

        Raises:
            WorkerError: the sender, which had been heard of, died, and what it had sent has been read.
            WaitTimeoutError: nothing came within `timeout_s`.
        """
        return self._rlix_mail().receive(sender, tag, timeout_s)

    def send_batch(self, batch: Any, to: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Called by every rank of this group with its rows: all of them together, in order, are shared out to `to`.

        A batch is a list, a tensor, an array, or a dict of them. Raises what `send` and `recv` raise, and ValueError.
        """
        if not to:
            raise ValueError(f"{self.ctx.group}: `send_batch` needs somebody to send to, and `to` is empty")
        from rlix.flow.messages.batches import cut, rows, spans

        tag = f"rows for {', '.join(to)}"
        others = {rank: f"{self.ctx.group}:{rank}" for rank in range(self.ctx.world_size) if rank != self.ctx.rank}
        sent = self._rlix_mail().batches
        sent[tag] += 1
        said = {self.ctx.rank: (sent[tag], rows(batch))}
        self.broadcast(said[self.ctx.rank], list(others.values()), tag=tag, timeout_s=timeout_s)
        said |= {rank: self.recv(other, tag=tag, timeout_s=timeout_s) for rank, other in others.items()}
        number = sent[tag] = max(n for n, _ in said.values())  # a rank that was started again counts from its first
        shares = spans([said[rank][1] for rank in range(self.ctx.world_size)], self.ctx.rank, len(to))
        for reader, (start, stop) in zip(to, shares, strict=True):
            self.send((number, cut(batch, start, stop)), reader, tag="batch", timeout_s=timeout_s)

    def recv_batch(self, senders: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Its share of what `senders`, all ranks of a group in order, share out.

        Raises what `recv` raises, and WorkerError where their shares are not of the same batch, as after a call that
        ended half-way: the groups must be started again. ValueError: they are of different kinds.
        """
        from rlix.flow.messages.batches import join

        got = {sender: self.recv(sender, tag="batch", timeout_s=timeout_s) for sender in senders}
        numbers = {sender: number for sender, (number, _) in got.items()}
        if len(set(numbers.values())) > 1:
            raise WorkerError(
                f"{self.ctx.group}:{self.ctx.rank}: the shares that came are of different batches ({numbers}), for "
                "a call before this one ended half-way: start the groups again"
            )
        return join([share for _, share in got.values()])

    @ray.method(concurrency_group=MAIL)
    def _rlix_deliver(self, sender: str, tag: str, parcel: "Parcel") -> None:
        self._rlix_mail().deliver(sender, tag, parcel)

    @ray.method(concurrency_group=MAIL)
    def _rlix_home(self) -> "Home":
        return self._rlix_mail().home

    def _rlix_mail(self) -> "Mailbox":
        from rlix.flow.messages.mailbox import Mailbox, making

        with making:  # when it is first needed, by whichever thread
            if self._mailbox is None:
                self._mailbox = Mailbox.of(self.ctx, cuda_ipc=self.cuda_ipc)
            return self._mailbox
