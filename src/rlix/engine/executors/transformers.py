"""Generation with any Hugging Face causal LM, in one process and without further dependencies."""

from collections import deque
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rlix.engine import lora
from rlix.engine.executors.base import DEFAULT_SHARE, ExecutorOptions, Site
from rlix.engine.executors.batched_decoder import BatchedDecoder
from rlix.engine.executors.decoder import Decoder, DecoderLimits
from rlix.engine.executors.exact_decoder import ExactDecoder
from rlix.engine.executors.loop import LoopExecutor
from rlix.engine.inference.requests import GenerationRequest, GenerationResult
from rlix.engine.life_cycle import Part
from rlix.engine.lora import AdapterConfig
from rlix.engine.model_source import ModelSource
from rlix.engine.movers import mover_for
from rlix.engine.residency import ResidentSet
from rlix.engine.weights import publication
from rlix.engine.weights.buckets import dtype_name
from rlix.engine.weights.publication import PublishedAdapter, PublishedWeights
from rlix.protocol.messages import DeviceKind

_VIRTUAL_KV_BYTES = 2**30
_SMALL_MODEL = 16 * 2**20  # parameters; below, a forward costs its dispatch, above, its arithmetic


class TransformersExecutor(LoopExecutor):
    """Decodes all concurrent calls together, one token each per step, on a thread that owns the model.

    Exact (`ExecutorOptions.exact`): a trajectory's tokens and log-probabilities do not depend on what it is batched
    with, on interruptions or on which replica goes on with it (see `exact_decoder`). On the CPU this holds to the bit,
    between replicas with the same weights, dtype and number of threads; on a GPU it depends on the kernels (it held on
    an H200 in float32 and bfloat16), and for mixture-of-experts models it does not.

    Not exact: ordinary batched decoding (see `batched_decoder`). The random draws of a trajectory are the same however
    it is batched or interrupted, but probabilities differ by rounding, so that in the end a token may differ.

    With `tensor_parallel_size` above 1 the whole model is on the bundle's first device; use vLLM to split one.
    """

    def __init__(self, source: ModelSource, options: ExecutorOptions, site: Site) -> None:
        if options.more:
            raise ValueError(f'executor="transformers" has no further options, got {sorted(options.more)}')
        self._device = torch.device("cuda" if site.kind is DeviceKind.CUDA else "cpu")
        self._exact = self._device.type != "cuda" if options.exact is None else options.exact
        self._config = source.load_config()
        _check_supported(self._config)
        self._model: PreTrainedModel | None = None
        self._expected: PreTrainedModel | None = None
        self._resident: ResidentSet | None = None
        self._adapter_layers: dict[str, AdapterConfig] = {}  # that the model has, with bytes or without
        self._decoder: Decoder | None = None
        self._waiting: deque[tuple[int, GenerationRequest]] = deque()
        self._rows: dict[int, int] = {}  # row of the decoder -> key of the loop
        super().__init__(source, options, site)

    @property
    def device_bytes(self) -> int:
        held = self._resident.device_bytes if self._resident else 0
        return held + (self._decoder.cache_bytes if self._decoder else 0)

    # ---- decoding --------------------------------------------------------------------------------------------

    def _check(self, request: GenerationRequest) -> None:
        assert self._decoder is not None
        self._decoder.adapter_versions = self._adapter_versions()
        self._decoder.check(request)

    def _start(self, key: int, request: GenerationRequest) -> None:
        self._waiting.append((key, request))

    def _step(self) -> dict[int, GenerationResult]:
        assert self._decoder is not None
        while self._waiting:
            key, request = self._waiting[0]
            row = self._decoder.admit(request)
            if row is None:
                break
            self._rows[row] = key
            self._waiting.popleft()
        self._decoder.adapter_versions = self._adapter_versions()
        return {self._rows.pop(row): result for row, result in self._decoder.step(self.life.version).items()}

    def _drawn(self, key: int, since: int) -> tuple[list[int], list[float], list[int]]:
        row = next((row for row, held in self._rows.items() if held == key), None)
        if row is None or self._decoder is None:
            return [], [], []
        return self._decoder.drawn(row, since)

    def _in_batch(self) -> int:
        return len(self._rows)

    def _cancel(self, key: int, request: GenerationRequest) -> GenerationResult:
        assert self._decoder is not None
        for row, held in self._rows.items():
            if held == key:
                del self._rows[row]
                return self._decoder.release(row, "abort", self.life.version)
        self._waiting.remove((key, request))
        return GenerationResult(request.id, (), (), False, "abort", self.life.version)

    def _recover(self) -> None:
        self._forget()
        self._open_cache()

    def _forget(self) -> None:
        self._rows.clear()
        self._waiting.clear()
        self._decoder = None

    # ---- bytes -----------------------------------------------------------------------------------------------

    def _check_fit(self, published: PublishedWeights) -> None:
        if self._expected is None:
            self._expected = self._source.on_meta()
        publication.check(self._expected, published)

    def _fill(self, published: PublishedWeights | None) -> int:
        if published is None:
            self._build(weights=True)
            return self._weight_bytes()
        if self._resident is None:
            self._build(weights=False)
            return self._write(published)
        with self._resident.filling():
            return self._write(published)

    def _restore(self) -> int:
        assert self._resident is not None
        return self._resident.to_device().bytes

    def _write(self, published: PublishedWeights) -> int:
        assert self._model is not None
        moved = publication.apply(self._model, published)
        if self._decoder is not None:
            self._decoder.forget_prompts()
        return moved

    @torch.no_grad()
    def _score(self, tokens: Sequence[int]) -> tuple[list[float], str] | None:
        if self._model is None or self._adapter_layers:
            return None
        ids = torch.tensor([tokens], device=self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist(), dtype_name(self._model.dtype)

    def _put_adapter(self, adapter: PublishedAdapter) -> int:
        assert self._model is not None
        tensors = adapter.tensors()
        if self._adapter_layers.get(adapter.name) != adapter.config:
            self._remove_adapter(adapter.name)
            lora.add(self._model, adapter.name, adapter.config)
            self._adapter_layers[adapter.name] = adapter.config
            self._model.eval()
        lora.fill(self._model, adapter.name, tensors)
        if self._decoder is not None:
            self._decoder.forget_prompts()
        return sum(tensor.nbytes for tensor in tensors.values())

    def _remove_adapter(self, name: str) -> None:
        assert self._model is not None
        lora.remove(self._model, name)
        self._adapter_layers.pop(name, None)

    def _serve(self, wanted: Sequence[PublishedAdapter]) -> int:
        for name in self._adapter_layers.keys() - {adapter.name for adapter in wanted}:
            self._forget_adapter(name)
        return super()._serve(wanted)

    def _drop_adapters(self) -> None:
        """Their layers stay, without bytes: it takes PEFT far longer to make them than it takes to fill them."""
        self._adapters.clear()

    def _open_cache(self) -> None:
        self._decoder = self._new_decoder()

    def _leave(self, keep_host: bool) -> None:
        self._forget()
        if self._resident is not None:
            if not keep_host:
                self._resident.to_meta()
                return
            try:
                self._resident.to_host()
            finally:
                if lost := self._resident.life.failure:
                    self.change(lambda life: life.failed(lost, *Part))

    def _drop(self) -> None:
        self._forget()
        self._serve(())
        if self._resident is not None:
            self._resident.to_meta()

    def _build(self, *, weights: bool) -> None:
        model = self._source.build(self._dtype(), weights=weights).to(self._device)
        self._model = model
        # Persistent tensors only: what is computed from the configuration (rotary frequencies) is small and stays.
        self._resident = ResidentSet(
            "inference model",
            lambda: model.state_dict(keep_vars=True).values(),
            self._device,
            mover=mover_for(self._device),
        )

    def _new_decoder(self) -> Decoder:
        assert self._model is not None
        small = sum(p.numel() for p in self._model.parameters()) < _SMALL_MODEL
        limits = DecoderLimits(self._options.max_num_seqs, self._max_length(), self._kv_bytes())
        decoder: Decoder
        if self._exact:
            tile = 256 if self._device.type == "cuda" else 128 if small else 32
            decoder = ExactDecoder(self._model, self._device, limits, tile_tokens=tile)
        else:
            decoder = BatchedDecoder(self._model, self._device, limits)
        decoder.warm_up()
        return decoder

    def _max_length(self) -> int:
        return self._options.max_model_len or int(getattr(self._config, "max_position_embeddings", 2048))

    def _kv_bytes(self) -> int:
        if self._options.kv_cache_bytes is not None:
            return self._options.kv_cache_bytes
        if self._device.type == "cuda":
            return kv_budget(
                *torch.cuda.mem_get_info(self._device), self._weight_bytes(), self._options.gpu_memory_utilization
            )
        return _VIRTUAL_KV_BYTES

    def _weight_bytes(self) -> int:
        return self._resident.device_bytes if self._resident else 0

    def _dtype(self) -> torch.dtype:
        if self._options.dtype != "auto":
            dtype: torch.dtype = getattr(torch, self._options.dtype)
            return dtype
        configured = getattr(self._config, "dtype", None)
        on_gpu = self._device.type == "cuda" and isinstance(configured, torch.dtype)
        return configured if on_gpu and configured is not None else torch.float32


def kv_budget(free: int, total: int, weights: int, utilization: float | None) -> int:
    """Bytes for the KV cache of weights that are on a GPU: what is free, whatever else has the rest, is the most."""
    wanted = int(free * DEFAULT_SHARE) if utilization is None else int(total * utilization) - weights
    return max(0, min(wanted, free))


def _check_supported(config: PretrainedConfig) -> None:
    """Raises ValueError for models whose layers do not all attend to the whole prefix."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if kinds or (sliding and not getattr(config, "layer_types", None)):
        raise ValueError(
            f"{config.model_type} has {', '.join(sorted(kinds)) or 'sliding_attention'} layers, which "
            'executor="transformers" does not decode; use executor="vllm"'
        )
