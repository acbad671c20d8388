"""`InferenceEngine`: a model that generates on one or more devices, used as if it were one object in this process."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

import torch
from ray.exceptions import RayError
from transformers import PretrainedConfig

from rlix.engine import placement
from rlix.engine.base import Engine, merged, named_dtype, plainly
from rlix.engine.declared import AS_IT_IS, DeclaredSpeed
from rlix.engine.executors.base import ALL_PARTS, ExecutorOptions, InferenceExecutor
from rlix.engine.executors.registry import Backend, backend
from rlix.engine.inference.prompts import Params, Prompt, PromptReader
from rlix.engine.inference.replica import Replica, ReplicaReport
from rlix.engine.inference.requests import GenerationRequest, GenerationResult, RequestOutput, TextChunk
from rlix.engine.inference.stream import text_chunks
from rlix.engine.inference.turns import OnTurn, run_here, take_turns
from rlix.engine.life_cycle import REBUILD, Life, Part, Phase, joint
from rlix.engine.model_source import ModelSource
from rlix.engine.parallel import dealt
from rlix.engine.residency import MoveReport
from rlix.engine.weights.publication import PublishedWeights, check_published
from rlix.protocol.errors import NotResidentError, RlixError, WaitTimeoutError, WorkerError
from rlix.protocol.messages import Device, Fence
from rlix.workers.group import WorkerGroup
from rlix.workers.per_rank import PerRank

logger = logging.getLogger(__name__)

_REPORT_TIMEOUT_S = 120.0  # for a replica to say what became of a call that failed
_CONCURRENT_CALLS = 1024  # of one replica; they are coroutines and cost no thread


class InferenceEngine(Engine):
    """A handle on replicas of a causal LM, each on the devices of one bundle.

    Args:
        source: a folder or hub name of a Hugging Face causal LM, or its configuration (an object or a dictionary),
            whose weights are then given by `cuda(weights=...)` or by `Replica.load`.
        executor: "transformers", "vllm", a name given to `executors.registry.register`, an `InferenceExecutor`, its
            "module:Class", or a `registry.Backend`; what holds for the answers of each is said at its class.
        name: of the workers, in logs and errors.
    """

    def __init__(
        self,
        source: str | Path | PretrainedConfig | Mapping[str, Any] | ModelSource,
        executor: str | type[InferenceExecutor] | Backend = "transformers",
        *,
        name: str = "infer",
    ) -> None:
        super().__init__(name)
        self.backend = backend(executor)
        self._given = False  # whether its weights are others than the source's own
        self.source = ModelSource.of(source)
        self._reader: PromptReader | None = None
        self._turn = itertools.count()  # of replicas to take the next stream

    def build(
        self,
        *,
        tensor_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        devices: Sequence[Device] | None = None,
        colocate_with: placement.Engines = None,
        not_colocate_with: placement.Engines = None,
        acceptable_node_ips: Sequence[str] | None = None,
        namespace: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        gpu_memory_utilization: float | None = None,
        kv_cache_bytes: int | None = None,
        dtype: str | torch.dtype = "auto",
        exact: bool | None = None,
        adapters: int = 0,
        adapter_rank: int = 0,
        declared: DeclaredSpeed = AS_IT_IS,
        executor_options: Mapping[str, Any] | None = None,
        seed: int = 0,
        load: bool = True,
        start: Literal["fork", "spawn"] | None = None,
        cpu_threads: int = 1,
        build_timeout_s: float = 300.0,
        call_timeout_s: float = 3600.0,
    ) -> Self:
        """Start one replica per bundle of `tensor_parallel_size` devices. On failure nothing is left behind.

        Args:
            data_parallel_size: replicas; default: as many as `devices` allow, else 1.
            devices: of the bundles, one after the other; default: chosen from the pool, preferring free ones.
            declared: how long work lasts on virtual GPUs (see `rlix.engine.declared`).
            executor_options: further options of the executor's own; for vLLM those of its `EngineArgs`.
            seed: key of the random streams of prompts that bring none.
            load: bring weights and KV cache onto the devices now (where the source has weights). With False nothing
                is on a device until `cuda()`, or a `load` of a replica under a lease.
            start: how workers start; default: "fork" (fast), and "spawn" for vLLM, which needs it.
            cpu_threads: of a replica on a virtual GPU.
            build_timeout_s: longest that replicas may take to start, without loading weights.
            call_timeout_s: longest that any call may take, `generate` and loading weights too; after it the call raises
                WaitTimeoutError, and `generate` ends its requests.

        The others are described at `ExecutorOptions`.

        Raises:
            ValueError: sizes and devices do not agree, no devices fit, or the model is not supported.
            DeviceBusyError: somebody else has bytes on a device; names the process and its job.
            WorkerError, WaitTimeoutError: a replica failed to start, or did not in time.
        """
        chosen = self._choose_devices(
            tensor_parallel_size,
            data_parallel_size,
            devices,
            colocate_with=colocate_with,
            not_colocate_with=not_colocate_with,
            acceptable_node_ips=acceptable_node_ips,
        )
        bundles = placement.bundles_of(chosen, tensor_parallel_size, spans=self.backend.spans)
        options = ExecutorOptions(
            tensor_parallel_size=tensor_parallel_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_bytes=kv_cache_bytes,
            dtype=dtype if dtype == "auto" else named_dtype(dtype),
            exact=exact,
            adapters=adapters,
            adapter_rank=adapter_rank,
            declared=declared,
            more=dict(executor_options or {}),
        )
        nodes = [placement.by_node(bundle) for bundle in bundles]
        self._timeout_s = call_timeout_s
        self._reader = PromptReader(self.source, max_model_len, seed)
        self._group = WorkerGroup(
            Replica,
            name=self.name,
            placements=[own for own, *_ in nodes],
            kwargs={
                "source": self.source,
                "backend": self.backend.target,
                "options": options,
                "further": PerRank([tuple(further) for _, *further in nodes]),
            },
            namespace=namespace,
            env=self.backend.environment(chosen[0].kind, cpu_threads, self.source.is_local),
            start=start or self.backend.start,
            max_concurrency=_CONCURRENT_CALLS,
            cpu_threads=cpu_threads,
            start_timeout_s=build_timeout_s,
        )
        self.devices = chosen
        try:
            if load and self.source.has_weights:
                self.cuda()
        except BaseException:  # re-raised; whatever it is, Ctrl-C too, no worker is left behind
            self.close()
            raise
        placement.occupy(self, self.devices)
        return self

    @property
    def replicas(self) -> WorkerGroup:
        """The replica actors, one rank per bundle; see `Replica` for what they can be asked."""
        return self._workers()

    def _end(self, *, graceful: bool) -> None:
        self._given = False  # those that are built next come with the source's
        super()._end(graceful=graceful)

    def _ask_workers(self) -> Life:
        return joint([self._asked(rank) for rank in range(self.replicas.world_size)])

    def _asked(self, rank: int) -> Life | str:
        """What a replica says of itself after a call that failed, once the replica is through with it."""
        try:
            (report,) = self.replicas.run("report", ranks=[rank], timeout_s=_REPORT_TIMEOUT_S)
        except (WorkerError, WaitTimeoutError) as error:
            return f"{error}; {REBUILD}"
        life: Life = report.life
        return life

    def _call(self, method: str, *args: Any) -> list[ReplicaReport]:
        """Move bytes of every replica. After a failure the replicas are asked what is so, when it is needed next."""
        self._known = False
        try:
            reports: list[ReplicaReport] = self.replicas.run(method, *args, timeout_s=self._timeout_s)
        except WorkerError as error:
            raise plainly(error) from error.__cause__
        self._life, self._known = joint([report.life for report in reports]), True
        return reports

    # ---- generation ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        request_ids: Sequence[str] | None = None,
        on_turn: OnTurn | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; the answers are in the order of the prompts.

        Args:
            prompts: one prompt or several, each a text (the source needs a tokenizer) or token ids.
            sampling_params: for all prompts, or one for each; `SamplingParams` or dictionaries of its fields, where
                `max_tokens` is accepted for `max_new_tokens`. A prompt without a seed gets a random stream of its
                own; a program that makes the same calls gets the same streams.
            request_ids: names to `abort` by; default: made up.
            on_turn: called with each answer's `Turn`; what it returns (text or tokens: a tool's output, say) is
                appended and the model goes on, None ends the answer. A plain function is called for one answer at a
                time, coroutine functions run side by side. `CompletionOutput.generated` marks the model's own tokens;
                `max_new_tokens` bounds each turn, `max_model_len` the whole.

        Raises:
            ValueError: a prompt or its parameters make no sense; names its index. Nothing was generated.
            TurnError: `on_turn` raised; names the prompt's index. The other answers were aborted.
            NotResidentError: weights or KV cache are not on the devices.
        """
        if on_turn is not None:
            return run_here(self.generate_async(prompts, sampling_params, request_ids=request_ids, on_turn=on_turn))
        requests = self._read(prompts, sampling_params, request_ids)
        ranks, shares = dealt(requests, self.replicas.world_size)
        with self._aborted_unless_complete(requests):
            results = self.replicas.run("generate", PerRank(shares), ranks=ranks, timeout_s=self._timeout_s)
        return self._answers(requests, results)

    async def generate_async(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        request_ids: Sequence[str] | None = None,
        on_turn: OnTurn | None = None,
    ) -> list[RequestOutput]:
        """`generate` for async code; concurrent calls are decoded together."""
        requests = self._read(prompts, sampling_params, request_ids)
        ranks, shares = dealt(requests, self.replicas.world_size)
        if on_turn is not None:
            return await self._take_turns(list(zip(ranks, shares, strict=True)), on_turn)
        with self._aborted_unless_complete(requests):
            results = await self.replicas.arun("generate", PerRank(shares), ranks=ranks, timeout_s=self._timeout_s)
        return self._answers(requests, results)

    @contextmanager
    def _aborted_unless_complete(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        """Whoever leaves early (cancelled, timed out, one replica of several failed) leaves nothing decoding."""
        try:
            yield
        except BaseException as error:  # raised again
            if isinstance(error, WorkerError):  # a replica may be gone, or what it has
                self._known = False
            with suppress(RlixError, RayError):
                self.replicas.call("abort", [request.id for request in requests])
            raise

    async def _take_turns(
        self, shares: Sequence[tuple[int, list[GenerationRequest]]], on_turn: OnTurn
    ) -> list[RequestOutput]:
        reader = self._reader
        assert reader is not None

        async def ask(rank: int, request: GenerationRequest) -> GenerationResult:
            (results,) = await self.replicas.arun("generate", [request], ranks=[rank], timeout_s=self._timeout_s)
            result: GenerationResult = results[0]
            return result

        given = [(rank, request) for rank, requests in shares for request in requests]
        with self._aborted_unless_complete([request for _, request in given]):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await take_turns(given, ask, on_turn, reader)
            except TimeoutError:
                raise WaitTimeoutError(
                    f"{self.name}: {len(given)} answers with on_turn were not finished within {self._timeout_s:g} s"
                ) from None

    def stream(
        self, prompt: Prompt, sampling_params: Params = None, *, request_id: str | None = None
    ) -> AsyncIterator[TextChunk]:
        """Answer one prompt piece by piece: `async for chunk in engine.stream(...)`. Leaving the loop aborts it.

        Raises as `generate_async`, and WaitTimeoutError when the next piece does not arrive.
        """
        (request,) = self._read([prompt], sampling_params, None if request_id is None else [request_id])
        assert self._reader is not None
        self.replicas.check_usable("stream")
        replica = self.replicas.handles[next(self._turn) % self.replicas.world_size]
        return text_chunks(replica, request, self._reader, self._timeout_s, self.name)

    def abort(self, request_ids: str | Sequence[str] | None = None) -> None:
        """End these requests (None: all); their `generate` returns with the tokens they have, finished by "abort"."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self.replicas.run("abort", ids, timeout_s=self._timeout_s)

    def _read(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params],
        request_ids: Sequence[str] | None,
    ) -> list[GenerationRequest]:
        self._workers()
        assert self._reader is not None
        self.life.check_serving(self.name)
        return self._reader.requests(prompts, sampling_params, request_ids)

    def _answers(
        self, requests: Sequence[GenerationRequest], results: Sequence[Sequence[GenerationResult]]
    ) -> list[RequestOutput]:
        assert self._reader is not None
        flat = [result for share in results for result in share]
        return [self._reader.output(request, result) for request, result in zip(requests, flat, strict=True)]

    # ---- weights and residency -------------------------------------------------------------------------------

    def check_weights(self, published: PublishedWeights) -> None:
        """Raise what `update_weights` would because a replica cannot take these weights; nothing is changed."""
        check_published(published)
        try:
            self.replicas.run("check_update", published, timeout_s=self._timeout_s)
        except WorkerError as error:
            self._known = False
            raise plainly(error) from error.__cause__

    def update_weights(self, published: PublishedWeights) -> tuple[ReplicaReport, ...]:
        """Replace the weights on every replica, in place; caches of what the old ones computed are dropped.

        All replicas are asked first: where one cannot take them, none does.

        Raises:
            TypeError: these are no published weights. NotResidentError: the weights are not on the devices.
            WeightSyncError: they do not fit. All replicas go on as they were.
            Anything else: they did not all arrive. The replicas concerned have failed, and say so when they are used.
        """
        self.check_weights(published)
        reports = tuple(self._call("update", published))
        self._given = True
        return reports

    def cuda(
        self, what: Literal["weights", "kv_cache"] | None = None, *, weights: PublishedWeights | None = None
    ) -> MoveReport:
        """Bring everything, or only the weights or the KV cache, onto the devices (virtual ones too).

        After `meta()` the weights come from the source's folder, unless `weights` gives published ones; where others
        than the folder's were dropped a warning says so.

        Raises:
            DeviceBusyError: somebody else has bytes on a device; names the process and its job.
        """
        if what not in (None, *ALL_PARTS):
            raise ValueError(f'an InferenceEngine has no {what!r} to move; it has "weights" and "kv_cache"')
        if weights is not None:
            check_published(weights)
        parts = ALL_PARTS if what is None else (Part(what),)
        self._workers()
        if Part.KV_CACHE in parts and Part.WEIGHTS not in {*parts, *self.life.on}:
            raise NotResidentError(f'{self.name} has no weights on its devices: call cuda("weights") first')
        dropped = self._given and weights is None and Part.WEIGHTS in parts and self.life.weights is None
        reports = self._call("load", weights, None, parts)
        if dropped:
            logger.warning(
                "%s has the weights of %s again: those it was given were dropped; to have them back, cuda(weights=...) "
                "with what publish() returned, or sync again",
                self.name,
                self.source.path,
            )
        self._given = (self._given and not dropped) or weights is not None
        return merged(report.moved for report in reports)

    def cpu(self) -> MoveReport:
        """Release the devices' memory; the weights wait in host memory, the KV cache is dropped."""
        self._workers()
        if self.life.phase is Phase.OFF:
            raise NotResidentError(f"{self.name} has no bytes to move to the host: it is on meta; call cuda() first")
        return self.release(None, keep_host=True)

    def meta(self) -> MoveReport:
        """Drop every byte on devices and host."""
        return self.release(None, keep_host=False)

    def acquire(self, lease: Fence | None, weights: PublishedWeights | None = None) -> MoveReport:
        """Bring everything onto the devices under a lease (None: the program's own account), with these weights, or
        those that it had or came with.

        Raises:
            StaleEpochError: the lease has ended for this engine, or a device has been used under a later one.
            DeviceBusyError: somebody else has bytes on a device; names the process and its job.
        """
        self._workers()
        reports = self._call("load", weights, lease)
        self._given = self._given or weights is not None
        return merged(report.moved for report in reports)

    def release(self, lease: Fence | None, *, keep_host: bool = False) -> MoveReport:
        """Free the devices' memory, and end the lease for this engine. What was generating is aborted."""
        return merged(report.moved for report in self._call("offload", lease, keep_host))
