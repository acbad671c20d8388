"""Generation with vLLM, inside the replica's process (and worker processes for tensor parallelism)."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from rlix.engine import lora
from rlix.engine.executors import vllm_abi, vllm_worker
from rlix.engine.executors.base import ExecutorOptions, Site
from rlix.engine.executors.loop import LoopExecutor
from rlix.engine.executors.vllm_arguments import engine_arguments, load_format, model_folder
from rlix.engine.executors.vllm_nodes import FurtherNodes
from rlix.engine.inference.requests import GenerationRequest, GenerationResult
from rlix.engine.life_cycle import Part
from rlix.engine.model_source import ModelSource
from rlix.engine.weights import publication
from rlix.engine.weights.buckets import dtype_name
from rlix.engine.weights.publication import PublishedAdapter, PublishedWeights, TransferError
from rlix.protocol.errors import RlixError, WeightSyncError
from rlix.protocol.messages import DeviceKind, Fence
from rlix.workers.scratch import Scratch

_KNOWN = "known answer"  # vLLM's name for the request that asks for one
_NONE = 1  # number of the adapter that changes nothing, for requests without one


@dataclass(slots=True)
class _Progress:
    """What a request has so far in this call. `vllm_id` is vLLM's name for it."""

    request: GenerationRequest
    vllm_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def take(self, tokens: Sequence[int], logprobs: Sequence[Any], version: int) -> None:
        """Note what is new in all tokens and vLLM's rows of log-probabilities so far."""
        known = len(self.tokens)
        new = list(tokens[known:])
        self.tokens += new
        self.logprobs += [row[token].logprob for row, token in zip(logprobs[known:], new, strict=True)]
        self.versions += [version] * len(new)


class VllmExecutor(LoopExecutor):
    """vLLM's own engine, stepped by this executor's thread.

    What holds: greedy answers equal those of an uninterrupted run up to the rounding of different batches. A sampled
    trajectory is seeded by (its seed, the number of tokens kept when it was resumed), so a run that is interrupted at
    the same tokens repeats, but a resumed trajectory draws other numbers than an uninterrupted one: its distribution is
    the same, its tokens are not. Use executor "transformers" where sharing must be invisible to the token.

    On GPUs `offload` is vLLM's sleep: level 1 keeps weights in host memory, level 2 drops them. On a virtual GPU vLLM
    cannot release anything: `offload` refuses further work and reports no device bytes, but the process keeps its host
    memory (weights and KV cache) until the replica is closed.

    `ExecutorOptions.more` goes to vLLM's `EngineArgs`.
    """

    def __init__(self, source: ModelSource, options: ExecutorOptions, site: Site) -> None:
        vllm_abi.check()
        vllm_abi.check_options(options.more)
        self._virtual = site.kind is DeviceKind.CPU
        self._config = source.load_config()
        self._max_length = options.max_model_len or int(getattr(self._config, "max_position_embeddings", 2048))
        self._engine: Any = None
        self._expected: torch.nn.Module | None = None
        self._folder: tempfile.TemporaryDirectory[str] | Scratch | None = None
        self._sizes = {Part.WEIGHTS: 0, Part.KV_CACHE: 0}
        self._running: dict[int, _Progress] = {}
        self._numbers: dict[str, int] = {}  # of adapters, by name; one is used for one name only
        self._has_none = False
        self._ended: dict[int, GenerationResult] = {}  # while something else was asked
        self._fence: Fence | None = None
        self._nodes = FurtherNodes(source, options, site)
        super().__init__(source, options, site)

    @property
    def device_bytes(self) -> int:
        return sum(self._sizes[part] for part in self.life.on)

    # ---- decoding --------------------------------------------------------------------------------------------

    def _check(self, request: GenerationRequest) -> None:
        if request.adapter and request.adapter not in self._adapters:
            raise ValueError(
                f"request {request.id!r}: there is no adapter {request.adapter!r}; there are {sorted(self._adapters)}"
            )
        known = request.prompt_ids + request.generated_ids
        for token in (min(known), max(known)):
            if not 0 <= token < self._config.vocab_size:
                raise ValueError(f"request {request.id!r}: token {token} is not in 0..{self._config.vocab_size - 1}")
        if len(request.prompt_ids) + request.max_new_tokens > self._max_length:
            raise ValueError(
                f"request {request.id!r}: {len(request.prompt_ids)} prompt tokens and max_new_tokens="
                f"{request.max_new_tokens} exceed max_model_len={self._max_length}"
            )

    def _start(self, key: int, request: GenerationRequest) -> None:
        kept = len(request.generated_ids)
        params = SamplingParams(
            max_tokens=request.max_new_tokens - kept,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=_seed(request.seed, kept) if request.temperature > 0 else None,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # which tokens end an answer is the request's business
            logprobs=0,  # of the drawn token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # an output per step and request costs speed
        )
        prompt = {"prompt_token_ids": list(request.prompt_ids + request.generated_ids)}
        vllm_id = self._engine.add_request(str(key), prompt, params, lora_request=self._adapter_of(request))
        self._running[key] = _Progress(request, vllm_id)

    def _step(self) -> dict[int, GenerationResult]:
        ended, self._ended = self._ended, {}
        for output in self._engine.step():
            self._take(output, ended)
        return ended

    def _take(self, output: Any, ended: dict[int, GenerationResult]) -> None:
        key = int(output.request_id)
        progress = self._running.get(key)
        if progress is None:
            return
        (answer,) = output.outputs
        progress.take(answer.token_ids, answer.logprobs, self._version_of(progress.request))
        if output.finished:
            ended[key] = self._end(key, "stop" if answer.finish_reason == "stop" else "length")

    def _score(self, tokens: Sequence[int]) -> tuple[list[float], str] | None:
        """What is in flight goes on beside it; where that leaves no room it is asked another time."""
        if len(tokens) >= self._max_length or len(self._running) >= self._options.max_num_seqs:
            return None
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        none = LoRARequest("", _NONE, "none") if self._options.adapters else None
        self._engine.add_request(_KNOWN, {"prompt_token_ids": list(tokens)}, params, lora_request=none)
        answer = None
        while answer is None and self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.request_id == _KNOWN:
                    answer = output
                else:
                    self._take(output, self._ended)
        if answer is None:
            raise RlixError("vLLM did not answer when it was asked for known tokens")
        rows = zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)
        config = self._engine.vllm_config.model_config
        return [row[token].logprob for row, token in rows], config.quantization or dtype_name(config.dtype)

    def _drawn(self, key: int, since: int) -> tuple[list[int], list[float], list[int]]:
        progress = self._running[key]
        self._catch_up(progress)
        return progress.tokens[since:], progress.logprobs[since:], progress.versions[since:]

    def _in_batch(self) -> int:
        running, _ = self._engine.engine_core.engine_core.scheduler.get_request_counts()
        return int(running)

    def _catch_up(self, progress: _Progress) -> None:
        """Take what vLLM has generated for a request that is still running."""
        state = self._engine.output_processor.request_states[progress.vllm_id]
        version = self._version_of(progress.request)
        progress.take(state.detokenizer.output_token_ids, state.logprobs_processor.logprobs or [], version)

    def _cancel(self, key: int, request: GenerationRequest) -> GenerationResult:
        if (ended := self._ended.pop(key, None)) is not None:
            return ended
        self._catch_up(self._running[key])
        self._engine.abort_request([self._running[key].vllm_id], internal=True)
        return self._end(key, "abort")

    def _end(self, key: int, reason: str) -> GenerationResult:
        done = self._running.pop(key)
        return GenerationResult(
            id=done.request.id,
            token_ids=tuple(done.tokens),
            logprobs=tuple(done.logprobs),
            finished=reason != "abort",
            finish_reason=reason,
            weight_version=done.versions[-1] if done.versions else self._version_of(done.request),
            versions=tuple(done.versions),
        )

    def _version_of(self, request: GenerationRequest) -> int:
        adapter = self._adapters.get(request.adapter)
        return self.life.version if adapter is None else adapter.version

    def _recover(self) -> None:
        ids = [progress.vllm_id for progress in self._running.values()]
        self._running.clear()
        if ids:
            self._engine.abort_request(ids, internal=True)

    def share_locks(self, keys: Sequence[str], fence: Fence | None) -> None:
        if self._options.tensor_parallel_size == 1:  # vLLM runs in this process
            return
        vllm_worker.announce_locks(keys, fence)
        self._run("share_locks", lambda: self._share_locks(fence))

    def _share_locks(self, fence: Fence | None) -> None:
        self._fence = fence
        if self._engine is not None:
            self._nodes.hold(fence)
            self._rpc("rlix_lock", fence)

    def _shut_down(self) -> None:
        self._end_engine()
        if self._folder is not None:
            self._folder.cleanup()

    # ---- adapters --------------------------------------------------------------------------------------------

    def _adapter_of(self, request: GenerationRequest) -> LoRARequest | None:
        """Cached prefixes are found by name and path, so an adapter's path says which version of it this is."""
        if not self._options.adapters:
            return None
        if not request.adapter:  # rows beside others' must name one: on CPUs those that do not get another row's
            return LoRARequest("", _NONE, "none")
        weights = self._adapters[request.adapter]
        return LoRARequest(request.adapter, self._numbers[request.adapter], f"{weights.publication}@{weights.version}")

    def _serve(self, wanted: Sequence[PublishedAdapter]) -> int:
        if self._options.adapters and not self._has_none and self._engine is not None:
            self._rpc("rlix_put_no_adapter", _NONE)
            self._has_none = True
        return super()._serve(wanted)

    def _put_adapter(self, adapter: PublishedAdapter) -> int:
        """In place: what is in flight goes on with the new values, as it does when the weights are new."""
        config, tensors, room = adapter.config, adapter.tensors(), self._options.adapters
        if adapter.name not in self._adapters and len(self._adapters) >= room:
            raise WeightSyncError(
                f"vLLM was started with room for {room} adapters: build the engine"
                " with adapters=... and adapter_rank=..."
            )
        if config.rank > self._options.adapter_rank:
            raise WeightSyncError(
                f"adapter {adapter.name!r} has rank {config.rank}; vLLM was started for {self._options.adapter_rank}"
            )
        lora.check(self._meta_model(), adapter.name, config, tensors)  # vLLM leaves out what it has no layer for
        for progress in self._running.values():
            if progress.request.adapter == adapter.name:  # these tokens are the old version's
                self._catch_up(progress)
        number = self._numbers.setdefault(adapter.name, _NONE + 1 + len(self._numbers))
        said = {"r": config.rank, "lora_alpha": config.alpha, "target_modules": list(config.targets)}
        self._rpc("rlix_put_adapter", number, tensors, said)
        return sum(tensor.nbytes for tensor in tensors.values())

    def _remove_adapter(self, name: str) -> None:
        if self._engine is not None and name in self._numbers:
            self._rpc("rlix_remove_adapter", self._numbers[name])

    def _lose_adapters(self) -> None:
        self._adapters.clear()
        self._has_none = False

    # ---- bytes -----------------------------------------------------------------------------------------------

    def _check_fit(self, published: PublishedWeights) -> None:
        publication.check(self._meta_model(), published)

    def _meta_model(self) -> torch.nn.Module:
        """The model as transformers has it, without bytes."""
        if self._expected is None:
            self._expected = self._source.on_meta()
        return self._expected

    def _fill(self, published: PublishedWeights | None) -> int:
        built = self._engine is None
        if built:
            self._build(dummy=published is not None)
        else:
            self._wake(Part.WEIGHTS)
        if published is not None:
            return self._write(published)
        if not built:
            self._lose_adapters()
            self._rpc("rlix_reload_folder", self._source.path, load_format(self._options))
        return self._sizes[Part.WEIGHTS]

    def _restore(self) -> int:
        try:
            self._wake(Part.WEIGHTS)
        except Exception as error:  # some of it may be there and some not
            reason = f"vLLM did not wake up: {error}"
            self._end_engine()
            self.change(lambda life: life.failed(reason, *Part))
            raise
        return self._sizes[Part.WEIGHTS]

    def _write(self, published: PublishedWeights) -> int:
        """Requests in flight go on, their KV cache computed anew with the new weights."""
        for progress in self._running.values():  # these tokens are the old weights'
            self._catch_up(progress)
        with ExitStack() as stack:
            # Tensor-parallel workers are no Ray processes, so the buckets are pulled for them, once on each node.
            # A bucket that does not come is known before vLLM has been touched.
            try:
                ready = stack.enter_context(self._nodes.fetched(published))
            except RlixError as error:
                raise WeightSyncError(f"weights did not arrive, and nothing was changed: {error}") from error
            self._lose_adapters()  # as vLLM does when it loads weights
            try:
                ends: list[RlixError | int] = self._rpc("rlix_reload", ready, self._source)
            except Exception:  # of vLLM itself, which is not fit for another load then
                self._end_engine()
                raise
        errors = [error for error in ends if isinstance(error, RlixError)]
        if errors:
            broken = [error for error in errors if not isinstance(error, WeightSyncError)]
            if broken or len(errors) < len(ends):
                raise TransferError(f"weights reached vLLM in part: {(broken or errors)[0]}")
            raise errors[0]
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RlixError("vLLM kept a prefix cache computed with the old weights")
        return sum(moved for moved in ends if isinstance(moved, int))

    def _open_cache(self) -> None:
        self._wake(Part.KV_CACHE)

    def _leave(self, keep_host: bool) -> None:
        if self._engine is None:
            return
        try:
            self._engine.reset_prefix_cache()
            if not self._virtual:
                self._engine.sleep(level=1 if keep_host else 2)
        except Exception as error:  # asleep or not: only starting again is sure
            reason = f"vLLM did not go to sleep: {error}"
            self._end_engine()
            self.change(lambda life: life.failed(reason, *Part))
            raise

    def _drop(self) -> None:
        try:
            if self._engine is not None:
                self._recover()
                self._leave(keep_host=False)
        except Exception:  # re-raised; whatever vLLM raises, ending it releases everything
            self._end_engine()
            raise

    def _wake(self, part: Part) -> None:
        if not self._virtual and self._engine.is_sleeping():
            self._engine.wake_up(tags=[str(part)])

    def _end_engine(self) -> None:
        engine, self._engine = self._engine, None
        self._running.clear()
        self._ended.clear()
        self._lose_adapters()
        self._nodes.close()
        if engine is not None:
            engine.engine_core.shutdown()

    def _build(self, *, dummy: bool) -> None:
        if self._folder is None:
            self._folder = (
                tempfile.TemporaryDirectory(prefix="vllm-", dir=self._site.scratch, ignore_cleanup_errors=True)
                if self._site.scratch
                else Scratch("vllm")
            )
        os.environ["VLLM_RPC_BASE_PATH"] = self._folder.name  # of the sockets of tensor-parallel workers
        path = model_folder(self._source, self._config, self._folder.name)
        length = self._max_length
        arguments = engine_arguments(self._options, self._config, self._site, path, dummy=dummy, max_length=length)
        try:
            with self._nodes.starting(self._fence, dummy=dummy, max_length=length) as span:
                self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments, **span))
        except Exception:  # re-raised; where a follower failed in the end, the engine is there
            self._end_engine()
            raise
        sizes: list[tuple[int, int]] = self._rpc("rlix_bytes")
        self._sizes = {Part.WEIGHTS: sum(s[0] for s in sizes), Part.KV_CACHE: sum(s[1] for s in sizes)}
        self.change(lambda life: life.brought(*Part))  # vLLM allocates its KV cache with the weights

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._engine.collective_rpc(method, args=args)


def _seed(seed: int, kept: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{kept}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
