"""The life cycle of an executor: what becomes of it when bytes move, and when a move breaks off."""

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rlix.engine.executors.base import ExecutorOptions, InferenceExecutor, Site
from rlix.engine.life_cycle import SOURCE, Part, Phase, WeightsId
from rlix.engine.lora import AdapterConfig
from rlix.engine.model_source import ModelSource
from rlix.engine.time_limits import folder_bytes
from rlix.engine.weights.known_answer import KnownAnswer
from rlix.engine.weights.publication import PublishedAdapter, PublishedWeights
from rlix.protocol.errors import NotResidentError, RlixError, WeightSyncError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class MovingExecutor(InferenceExecutor):
    """Keeps the life cycle. Subclasses say how bytes move, and run what moves them while nothing is decoded."""

    def __init__(self, source: ModelSource, options: ExecutorOptions, site: Site) -> None:
        super().__init__(source, options, site)
        self._adapters: dict[str, WeightsId] = {}  # on top of the weights, by name
        self._adapter_configs: dict[str, AdapterConfig] = {}
        self._refused: dict[str, str] = {}  # adapters that cannot be served here, and why
        self._to_check: tuple[str, KnownAnswer] | None = None  # how the weights came, and what they answer
        self._checked: set[tuple[str, str]] = set()  # ways that they came, and the trainer's processes

    def _adapter_versions(self) -> dict[str, int]:
        return {name: weights.version for name, weights in self._adapters.items()}

    # ---- what a backend does: bytes --------------------------------------------------------------------------

    def _check_takes(self, published: PublishedWeights) -> None:
        """Raise WeightSyncError when the model cannot have these weights."""
        self._source.check_takes_published()
        self._check_fit(published)

    @abstractmethod
    def _check_fit(self, published: PublishedWeights) -> None:
        """Raise WeightSyncError when these weights do not fit the model."""

    @abstractmethod
    def _fill(self, published: PublishedWeights | None) -> int:
        """From no weights at all to whole ones on the devices, published or the source's own; the bytes moved."""

    @abstractmethod
    def _restore(self) -> int:
        """Weights from host memory to the devices. When it raises they are where they were."""

    @abstractmethod
    def _write(self, published: PublishedWeights) -> int:
        """Overwrite the weights on the devices, and forget whatever was computed with the old ones.

        A WeightSyncError says that nothing was changed; after any other error the weights are undefined.
        """

    @abstractmethod
    def _open_cache(self) -> None:
        """Bring the KV cache, empty, beside weights that are on the devices."""

    @abstractmethod
    def _leave(self, keep_host: bool) -> None:
        """Release the devices' memory.

        When it raises, the cache is gone, and the weights are as they were unless the life says that they are lost.
        """

    @abstractmethod
    def _drop(self) -> None:
        """Release everything, whatever state it is in."""

    def _score(self, tokens: Sequence[int]) -> tuple[list[float], str] | None:
        """Log-probabilities of all tokens but the first, without adapters, and the dtype that the model computes in.

        None: not now, or never.
        """
        return None

    def _put_adapter(self, adapter: PublishedAdapter) -> int:
        """Bring an adapter, or another version of it in place, beside weights that are on the devices; the bytes.

        A WeightSyncError or ValueError says that it does not fit, and harms no other adapter.
        """
        raise WeightSyncError(f"{type(self).__name__} serves no LoRA adapters, so {adapter.name!r} has no place")

    def _remove_adapter(self, name: str) -> None:
        """Take an adapter off again, or what there is of it."""

    # ---- what runs it ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _in_flight(self) -> int:
        """Requests that are being generated."""

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """End them with this error."""

    @abstractmethod
    def _run(self, name: str, action: Callable[[], T], size: int = 0) -> T:
        """Run between two steps and return the result; bounded, the later the more bytes are to come."""

    # ---- InferenceExecutor -----------------------------------------------------------------------------------

    def load(self, published: PublishedWeights | None, parts: Sequence[Part]) -> int:
        size = folder_bytes(self._source.path) if published is None else published.manifest.nbytes
        return self._run("load", lambda: self._load(published, parts), size)

    def check_update(self, published: PublishedWeights) -> None:
        self._run("check_update", lambda: self._check_update(published))

    def _check_update(self, published: PublishedWeights) -> None:
        self.life.check_part(Part.WEIGHTS)
        self._check_takes(published)

    def update(self, published: PublishedWeights) -> int:
        def action() -> int:
            self._check_update(published)
            moved = self._overwrite(published)
            self._check_answer()
            return moved

        return self._run("update", action, published.manifest.nbytes)

    def offload(self, *, keep_host: bool) -> int:
        return self._run("offload", lambda: self._offload(keep_host))

    # ---- on the thread: bytes --------------------------------------------------------------------------------

    def _load(self, published: PublishedWeights | None, parts: Sequence[Part]) -> int:
        moved = 0
        if Part.WEIGHTS in parts:
            moved = self._load_weights(published)
        if Part.KV_CACHE in parts and Part.KV_CACHE not in self.life.on:
            self.life.brought(Part.KV_CACHE)  # which refuses without weights
            with self._failing("there is no KV cache", Part.KV_CACHE):
                self._open_cache()
        self.change(lambda life: life.brought(*parts))
        self._check_answer()
        return moved

    def _expect(self, way: str, published: PublishedWeights | None) -> None:
        """What the weights that are coming answer, unless some that came this way have been seen to be right."""
        known = None if published is None else published.known
        wanted = known is not None and (way, known.trainer) not in self._checked
        self._to_check = (way, known) if known is not None and wanted else None

    def _check_answer(self) -> None:
        """As soon as it can answer. Raises RlixError when the weights are not laid out right, and drops them."""
        if self._to_check is None or self.life.phase is not Phase.SERVING:
            return
        way, known = self._to_check
        if (found := self._score(known.tokens)) is None:
            return
        self._to_check = None
        try:
            known.check(*found, self.life.version)
        except RlixError as error:
            self._break(error, f"the weights were laid out wrongly: {error}", *Part)
            raise
        self._checked.add((way, known.trainer))

    def _load_weights(self, published: PublishedWeights | None) -> int:
        if published is None and self.life.weights is None and not self._source.has_weights:
            raise NotResidentError(
                "this model is a configuration without weights: publish weights and load those, or give a folder"
            )
        if published is not None:
            self._check_takes(published)
        if self.life.weights is None:
            return self._load_from_nothing(published)
        moved = 0
        if Part.WEIGHTS not in self.life.on:
            with self._failing("the weights did not come back from host memory"):
                moved = self._restore()
            self.change(lambda life: life.brought(Part.WEIGHTS))
        if published is not None and published.id != self.life.weights:
            moved += self._overwrite(published)
        return moved

    def _load_from_nothing(self, published: PublishedWeights | None) -> int:
        self._expect("loaded", published)
        try:
            moved = self._fill(published)
            moved += self._serve(() if published is None else published.adapters)
        except Exception as error:  # whatever a backend raises, the life says what is lost
            refused = isinstance(error, WeightSyncError)
            self._break(error, f"loading weights failed: {error}", *Part)
            if refused:
                self.change(lambda life: life.released(keep_host=False))
            raise
        self.change(lambda life: life.brought(Part.WEIGHTS).filled(SOURCE if published is None else published.id))
        return moved

    def _serve(self, wanted: Sequence[PublishedAdapter]) -> int:
        """Have these adapters and no others; what is there already stays.

        One that does not fit is left out: whoever asks for it is told why, and the others are served.
        """
        configs = {adapter.name: adapter.config for adapter in wanted}
        for name in list(self._adapters):
            if self._adapter_configs[name] != configs.get(name):  # not wanted, or another one of that name
                self._forget_adapter(name)
        moved, self._refused = 0, {}
        for adapter in wanted:
            if self._adapters.get(adapter.name) == adapter.weights.id:
                continue
            try:
                moved += self._put_adapter(adapter)
            except (WeightSyncError, ValueError) as error:
                logger.warning("adapter %r cannot be served: %s", adapter.name, error)
                self._forget_adapter(adapter.name)
                self._refused[adapter.name] = str(error)
            else:
                self._adapters[adapter.name] = adapter.weights.id
                self._adapter_configs[adapter.name] = adapter.config
        return moved

    def _forget_adapter(self, name: str) -> None:
        self._remove_adapter(name)
        self._adapters.pop(name, None)

    def _drop_adapters(self) -> None:
        """They leave the devices with the weights."""
        self._serve(())

    def _overwrite(self, published: PublishedWeights) -> int:
        before = self.life.weights
        self.change(lambda life: life.overwriting())
        try:
            moved = 0
            if before is None or before.publication != published.publication:
                self._expect("written", published)
                moved = self._write(published)
            moved += self._serve(published.adapters)
        except WeightSyncError:
            if before is not None:
                self.change(lambda life: life.filled(before))
            raise
        except Exception as error:  # whatever a backend raises, the life says what is lost
            self._break(error, f"an update of the weights broke off: {error}", *Part)
            raise
        self.change(lambda life: life.filled(published.id))
        return moved

    def _offload(self, keep_host: bool) -> int:
        if self._in_flight:
            raise RlixError(f"offload() while {self._in_flight} requests are being generated: abort them first")
        freed = self.device_bytes
        keep = keep_host and self.life.weights is not None
        with self._failing("releasing the devices' memory failed", Part.KV_CACHE):
            if not keep:
                self._drop_adapters()
            self._leave(keep)
        self.change(lambda life: life.released(keep_host=keep))
        return freed

    @contextlib.contextmanager
    def _failing(self, reason: str, *lost: Part) -> Iterator[None]:
        """Whatever a backend raises, the life says what is lost, unless the backend has said more already."""
        before = self.life.failure
        try:
            yield
        except Exception as error:  # re-raised; a backend may raise anything
            said = f"{reason}: {error}"
            self.change(lambda life: life if life.failure != before else life.failed(said, *lost))
            raise

    def _break(self, error: Exception, reason: str, *lost: Part) -> None:
        """A transition broke off: nothing in flight goes on, and what is lost is dropped."""
        self._fail(error)
        try:
            self._drop()
        except Exception:  # what is left is undefined, which the life says anyhow
            logger.exception("what was left of a failed executor could not be dropped")
        self.change(lambda life: life.failed(reason, *lost))
