"""A model on the pool that is trained and sampled by requests: adapters of many clients on it, or all of it for one."""

import itertools
import logging
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayError
from torch import Tensor
from transformers import AutoConfig

from rlix.control.client import JobClient
from rlix.control.rpc import get
from rlix.engine.lora import AdapterConfig
from rlix.engine.parallel import NeedParallel
from rlix.engine.train.engine import TrainEngine
from rlix.pipeline.base import Pipeline
from rlix.pipeline.batch import over_ranks
from rlix.pipeline.ends import Ends
from rlix.pipeline.engines import Engines
from rlix.pipeline.jobs.coordinator import resolve_pipeline
from rlix.pipeline.jobs.register import register
from rlix.pipeline.jobs.status import JobConfig
from rlix.pipeline.requests.losses import RequestedLoss
from rlix.pipeline.requests.module import AdamStep, requested_on_meta
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import ControlStatus
from rlix.protocol.types import NAMESPACE, ORCHESTRATOR_ACTOR_NAME, ClusterName, Phase

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_STATUS_S = 5.0


class ServedModel(Pipeline):
    """One thread asks for passes and steps, within `gang`, each for a model by its name; any thread submits
    trajectories, with the name in `adapter` that their weights are offered under."""

    on_adapters = False
    """Whether adapters are trained and served, not the model itself."""
    adapter_room: tuple[int, int] | None = None
    """How many replicas serve at most, and of which rank."""

    def __init__(self, pipeline_id: str, config: JobConfig, client: JobClient | None = None) -> None:
        super().__init__(pipeline_id, config, client)
        self.log_thread = f"served-{config.spec.name}"
        self.ready = threading.Event()

    # ---- its life --------------------------------------------------------------------------------------------

    def setup(self) -> None:
        self.engines = Engines(self, self.adapter_room, requested_on_meta)
        self.model_path = self.engines.model_path
        self.tokenizer = load_tokenizer(self.model_path)
        self.ends = Ends(self.tokenizer, self.model_path)
        found = AutoConfig.from_pretrained(self.model_path).get_text_config()
        self.vocabulary, self.context = int(found.vocab_size), int(found.max_position_embeddings)
        self.pad_id = int(self.tokenizer.pad_token_id)
        self.engines.start()

    def _train(self, first: int) -> str:
        self._event("job", event="first_step", detail=None)
        self._update(state="running", phase="waiting for requests")
        self.ready.set()
        while not self.stop_requested.wait(_LOOK_S):
            self._write_lease_events()
        return "stopped"

    def step(self, step: int) -> Mapping[str, float]:
        raise NotImplementedError("a served model takes its steps when it is asked to")

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def actor(self) -> TrainEngine:
        return self.engines.actor

    @property
    def rollouts(self) -> Any:
        return self.engines.rollouts

    def teardown(self) -> None:
        if (engines := getattr(self, "engines", None)) is not None:
            engines.close()

    def expect_gpu_s(self, left: float) -> None:
        self.rollouts.expect_gpu_s(left)

    def rebuild(self) -> None:
        """A new engine, with the model as it is offered and nothing on it."""
        logger.warning("%s: its training workers are started anew", self.spec.name)
        self.engines.rebuild()

    def waits_for(self) -> str:
        """Who is in the way of what it waits for, in words."""
        try:
            asked = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, NAMESPACE).status.remote()
            status: ControlStatus = get(asked, what="the pool's status", timeout_s=_STATUS_S)
        except (RlixError, RayError, ValueError) as error:
            return f"the pool does not answer ({type(error).__name__})"
        behind = [each.behind for each in status.waiting if each.pipeline_id == self.pipeline_id]
        return "; ".join(behind) or "they are on their way"

    # ---- training --------------------------------------------------------------------------------------------

    @contextmanager
    def gang(self, phase: Phase) -> Iterator[None]:
        """The devices, with the engine on them, for as long as the block lasts."""
        with self.phase(ClusterName.ACTOR_TRAIN, phase, self.actor):
            yield
        self.note_phase("waiting for requests")

    @abstractmethod
    def add(self, name: str, config: AdapterConfig | None, seed: int) -> None:
        """Have the engine hold the model, as it is before its first step. `config`: of an adapter; None: all of it."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Hold it no longer, if it is there."""

    def run_pass(
        self, name: str, batch: Mapping[str, Tensor], loss: RequestedLoss, *, backward: bool
    ) -> tuple[Tensor, float]:
        """Log-probabilities of the targets, and the loss."""
        rows: Any = batch
        answer = self.actor.requested_pass(over_ranks(rows), loss, self._named(name), backward=backward)
        losses = answer["loss"]
        return answer["log_probs"], float(sum(losses) if isinstance(losses, list) else losses)

    def take_step(self, name: str, adam: AdamStep) -> dict[str, float]:
        metrics: dict[str, float] = self.actor.requested_step(adam, self._named(name))
        return metrics

    @abstractmethod
    def save_training(self, name: str, folder: Path, *, weights: bool = True, optimizer: bool = True) -> None:
        """The weights as other programs load them, and what training goes on from, or one of both at least. Takes no
        device."""

    @abstractmethod
    def load_training(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """As it was saved; without `optimizer` only the weights. Gradients are dropped."""

    @property
    def ranks(self) -> int:
        """Parts that a batch is split into."""
        return len(self.actor.devices)

    @abstractmethod
    def _named(self, name: str | None) -> str | None:
        """The adapter on the engine that is the model of this name; None: the engine's own weights are."""

    # ---- sampling --------------------------------------------------------------------------------------------

    @abstractmethod
    def scoring(self, folder: Path | None) -> AbstractContextManager[str | None]:
        """Within the block, which is within `gang`, what `score_prompt` calls the weights in a folder; None: the model
        as it is offered."""

    def score_prompt(self, name: str | None, batch: Mapping[str, Tensor], several: int) -> dict[str, Tensor]:
        """As `RequestedModule.requested_scores`."""
        answer: dict[str, Tensor] = self.actor.requested_scores(NeedParallel(batch), several, self._named(name))
        return answer

    @abstractmethod
    def offer(self, name: str, folder: Path, version: int) -> None:
        """Have replicas serve the weights in a folder under this name. Takes no device."""

    @abstractmethod
    def withdraw(self, name: str) -> None:
        """Nothing is asked of it any more."""

    @abstractmethod
    def generate(self, trajectories: Sequence[Trajectory]) -> "Future[list[Trajectory]]":
        """All of them, of one name; "" is the model as it is offered."""


def together(asked: "Sequence[Future[Trajectory]]") -> "Future[list[Trajectory]]":
    """All of them, in order, or what the first of them raised, when all have ended."""
    done: Future[list[Trajectory]] = Future()
    left = itertools.count(len(asked) - 1, -1)

    def ended(_: "Future[Trajectory]") -> None:
        if next(left):
            return
        errors = [error for each in asked if (error := each.exception()) is not None]
        if errors:
            done.set_exception(errors[0])
        else:
            done.set_result([each.result() for each in asked])

    for each in asked:
        each.add_done_callback(ended)
    return done


def served_job(
    name: str,
    pipeline: type[ServedModel],
    *,
    model: Mapping[str, Any],
    rollout: Mapping[str, Any] | None,
    clusters: Mapping[str, Any],
    options: Mapping[str, Any],
    training: Mapping[str, Any],
    seed: int,
) -> JobSpec:
    """A served model as a job. `rollout`: None where nothing is sampled."""
    given: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "steps": 1,
        "pipeline": {"name": f"{pipeline.__module__}:{pipeline.__name__}", "options": dict(options)},
        "model": dict(model),
        "rollout": {"max_new_tokens": 1, **(rollout or {})},
        "training": dict(training),
        "clusters": dict(clusters),
    }
    if pipeline.on_adapters:
        given["lora"] = {}
    if rollout is None:  # it learns from what is given; from what, its requests say
        given |= {"source": {"conversations": {"path": "requests"}}, "algorithm": {"name": "sft"}}
        given["rollout"]["samples_per_prompt"] = 1
    return JobSpec.model_validate(given)


def start_served(spec: JobSpec, run_dir: Path, orchestrator: Any) -> ServedModel:
    """Registers it, and has it build in the background: `ready` is set when it can be asked.

    This process is its program: the pool takes everything back when it ends.
    """
    pipeline_id = register(spec, orchestrator)
    pipeline = cast(type[ServedModel], resolve_pipeline(spec))(pipeline_id, JobConfig(spec, run_dir))
    pipeline.client.join(spec.name)
    threading.Thread(target=_live, args=(pipeline,), name=pipeline.log_thread, daemon=True).start()
    return pipeline


def _live(pipeline: ServedModel) -> None:
    try:
        pipeline.run()
    except Exception:  # noqa: BLE001 - its status and its log say what it was; who waits for it is told
        logger.warning("%s failed: %s", pipeline.spec.name, pipeline.status().error)
    finally:
        pipeline.client.unregister("its server stopped serving it")
