"""Generation with vLLM, inside the replica's process (and worker processes for tensor parallelism)."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from rlix.engine.executors import vllm_worker
from rlix.engine.executors.base import SOURCE_VERSION, ExecutorOptions, Part
from rlix.engine.executors.loop import LoopExecutor
from rlix.engine.inference.requests import GenerationRequest, GenerationResult
from rlix.engine.model_source import ModelSource
from rlix.engine.weights import publication
from rlix.engine.weights.channel import Ticket
from rlix.engine.weights.layout import Layout
from rlix.engine.weights.publication import PublishedWeights
from rlix.flow.scratch import Scratch
from rlix.protocol.errors import NotResidentError, WeightSyncError
from rlix.protocol.messages import DeviceKind, Fence

_MIN_VIRTUAL_KV_BYTES = 64 * 2**20
_VIRTUAL_KV_SEQUENCES = 8  # of the greatest length; the default size of a virtual GPU's KV cache
_WORKER = "rlix.engine.executors.vllm_worker.ReplicaWorker"


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
    """

    def __init__(
        self, source: ModelSource, options: ExecutorOptions, kind: DeviceKind, scratch: str | None = None
    ) -> None:
        self._scratch = scratch
        self._source, self._options, self._kind = source, options, kind
        self._config = source.load_config()
        self._max_length = options.max_model_len or int(getattr(self._config, "max_position_embeddings", 2048))
        self._engine: Any = None
        self._expected: torch.nn.Module | None = None
        self._folder: tempfile.TemporaryDirectory[str] | Scratch | None = None
        self._resident: set[Part] = set()
        self._defined = False  # whether the engine's weights are those of `version`
        self._sizes = {Part.WEIGHTS: 0, Part.KV_CACHE: 0}
        self._version = SOURCE_VERSION
        self._running: dict[int, _Progress] = {}
        super().__init__()

    @property
    def version(self) -> int:
        return self._version

    @property
    def device_bytes(self) -> int:
        return sum(self._sizes[part] for part in self._resident)

    # ---- decoding --------------------------------------------------------------------------------------------

    def _check(self, request: GenerationRequest) -> None:
        if len(self._resident) < len(Part):
            raise NotResidentError("generate() while weights or KV cache are off the device: load first")
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
        vllm_id = self._engine.add_request(str(key), prompt, params)
        self._running[key] = _Progress(request, vllm_id)

    def _step(self) -> dict[int, GenerationResult]:
        ended = {}
        for output in self._engine.step():
            key = int(output.request_id)
            progress = self._running.get(key)
            if progress is None:
                continue
            (answer,) = output.outputs
            progress.take(answer.token_ids, answer.logprobs, self._version)
            if output.finished:
                ended[key] = self._end(key, "stop" if answer.finish_reason == "stop" else "length")
        return ended

    def _drawn(self, key: int, since: int) -> tuple[list[int], list[float]]:
        progress = self._running[key]
        self._catch_up(progress)
        return progress.tokens[since:], progress.logprobs[since:]

    def _catch_up(self, progress: _Progress) -> None:
        """Take what vLLM has generated for a request that is still running."""
        state = self._engine.output_processor.request_states[progress.vllm_id]
        progress.take(state.detokenizer.output_token_ids, state.logprobs_processor.logprobs or [], self._version)

    def _cancel(self, key: int, request: GenerationRequest) -> GenerationResult:
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
            weight_version=done.versions[-1] if done.versions else self._version,
            versions=tuple(done.versions),
        )

    def _recover(self) -> None:
        for progress in self._running.values():
            self._engine.abort_request([progress.vllm_id], internal=True)
        self._running.clear()

    def share_locks(self, keys: Sequence[str], fence: Fence | None) -> None:
        if self._options.tensor_parallel_size == 1:  # vLLM runs in this process
            return
        if fence is None:
            os.environ.pop(vllm_worker.LOCK_VARIABLE, None)
        else:
            os.environ[vllm_worker.LOCK_VARIABLE] = vllm_worker.lock_setting(keys, fence)
        self._run("share_locks", lambda: None if self._engine is None else self._rpc("rlix_lock", keys, fence))

    def _shut_down(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None
        if self._folder is not None:
            self._folder.cleanup()

    # ---- weights ---------------------------------------------------------------------------------------------

    def _load(self, published: PublishedWeights | None, parts: Sequence[Part]) -> int:
        moved = 0
        if Part.WEIGHTS in parts:
            moved = self._load_weights(published)
        if Part.KV_CACHE in parts and Part.KV_CACHE not in self._resident:
            if Part.WEIGHTS not in self._resident:
                raise NotResidentError("the KV cache was asked for before the weights: load the weights first")
            self._wake(Part.KV_CACHE)
        return moved

    def _load_weights(self, published: PublishedWeights | None) -> int:
        if published is None and not self._defined and not self._source.has_weights:
            raise NotResidentError(
                "this model is a configuration without weights: publish weights and load those, or give a folder"
            )
        if published is not None:
            self._check_fit(published)
        moved = 0
        if self._engine is None:
            self._build(dummy=published is not None)
            moved = self._sizes[Part.WEIGHTS]
        elif Part.WEIGHTS not in self._resident:
            self._wake(Part.WEIGHTS)
            moved = self._sizes[Part.WEIGHTS]
        if published is not None and (not self._defined or published.version != self._version):
            moved = self._apply(published)
        elif not self._defined:
            self._rpc("rlix_reload_folder", self._source.path)
            self._version, self._defined = SOURCE_VERSION, True
        return moved

    def weight_layouts(self, offered: PublishedWeights) -> list[Layout]:
        def ask() -> list[Layout]:
            if self._engine is None:
                raise NotResidentError("weights were offered to an engine that was never loaded: load first")
            self._check_fit(offered)
            layouts: list[Layout] = self._rpc("rlix_layout", offered.manifest)
            return layouts

        return self._run("weight_layouts", ask)

    def join_channel(self, tickets: Sequence[Ticket]) -> None:
        self._run("join_channel", lambda: self._rpc("rlix_join", tickets))

    def leave_channel(self, channel: str) -> None:
        self._run("leave_channel", lambda: None if self._engine is None else self._rpc("rlix_leave", channel))

    def _update(self, published: PublishedWeights) -> int:
        if Part.WEIGHTS not in self._resident:
            raise NotResidentError("update() while the weights are off the device: load first")
        self._check_fit(published)
        return self._apply(published)

    def _apply(self, published: PublishedWeights) -> int:
        """Weights in place. Requests in flight go on, their KV cache computed anew with the new weights."""
        published.check_base(self._version)
        if published.delivery is not None and published.delivery.names is not None:
            raise WeightSyncError("vLLM loads a layer's tensors together, not some of them: sync all names")
        # Tensor-parallel workers are no Ray processes, so the buckets are pulled here; one node, so by shared memory.
        for progress in self._running.values():  # these tokens are the old weights'
            self._catch_up(progress)
        self._defined = False
        self._rpc("rlix_reload", publication.pulled(published))
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM kept a prefix cache computed with the old weights")
        self._version, self._defined = published.version, True
        return published.manifest.nbytes

    def _offload(self, keep_host: bool) -> int:
        freed = self.device_bytes
        if self._engine is not None and self._resident:
            self._engine.reset_prefix_cache()
            if self._kind is DeviceKind.CUDA:
                self._engine.sleep(level=1 if keep_host else 2)
        if not keep_host:
            self._defined = False
        self._resident.clear()
        return freed

    def _wake(self, part: Part) -> None:
        if self._kind is DeviceKind.CUDA and self._engine.is_sleeping():
            self._engine.wake_up(tags=[str(part)])
        self._resident.add(part)

    def _check_fit(self, published: PublishedWeights) -> None:
        if self._expected is None:
            with torch.device("meta"):
                self._expected = AutoModelForCausalLM.from_config(self._config)
        publication.check(self._expected, published)

    def _build(self, *, dummy: bool) -> None:
        self._folder = (
            tempfile.TemporaryDirectory(prefix="vllm-", dir=self._scratch, ignore_cleanup_errors=True)
            if self._scratch
            else Scratch("vllm")
        )
        os.environ["VLLM_RPC_BASE_PATH"] = self._folder.name  # of the sockets of tensor-parallel workers
        path = self._source.path
        if path is None:
            path = self._folder.name
            self._config.architectures = self._config.architectures or [_architecture(self._config)]
            self._config.save_pretrained(path)
        virtual = self._kind is DeviceKind.CPU
        parallel = self._options.tensor_parallel_size
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(Path(path)),
                skip_tokenizer_init=True,
                load_format="dummy" if dummy else "auto",
                dtype="float32" if virtual and self._options.dtype == "auto" else self._options.dtype,
                tensor_parallel_size=parallel,
                distributed_executor_backend="mp" if parallel > 1 else "uni",
                max_model_len=self._max_length,
                max_num_seqs=self._options.max_num_seqs,
                gpu_memory_utilization=self._options.gpu_memory_utilization,
                kv_cache_memory_bytes=self._kv_bytes(),
                enforce_eager=virtual,
                enable_sleep_mode=not virtual,
                logprobs_mode="raw_logprobs",
                # A step in flight while weights change would label its tokens with the wrong version.
                async_scheduling=False,
                worker_extension_cls=_WORKER,
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        )
        sizes: list[tuple[int, int]] = self._rpc("rlix_bytes")
        self._sizes = {Part.WEIGHTS: sum(s[0] for s in sizes), Part.KV_CACHE: sum(s[1] for s in sizes)}
        self._resident = set(Part)  # vLLM allocates its KV cache with the weights
        self._defined = not dummy
        self._version = SOURCE_VERSION

    def _kv_bytes(self) -> int | None:
        if self._options.kv_cache_bytes is not None or self._kind is DeviceKind.CUDA:
            return self._options.kv_cache_bytes
        config = self._config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * head_dim * torch.float32.itemsize
        return max(_MIN_VIRTUAL_KV_BYTES, _VIRTUAL_KV_SEQUENCES * self._max_length * per_token)

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._engine.collective_rpc(method, args=args)


def _architecture(config: Any) -> str:
    return AutoModelForCausalLM._model_mapping[type(config)].__name__


def _seed(seed: int, kept: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{kept}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
