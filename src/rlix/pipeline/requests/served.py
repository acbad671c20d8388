"""A model on the pool that is trained and sampled by requests: adapters of many clients on it, or all of it for one."""

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import RayError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from rlix.control.client import JobClient
from rlix.control.rpc import get
from rlix.engine.lora import WEIGHTS_FILE, AdapterConfig
from rlix.engine.parallel import NeedParallel
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights.publication import PublishedAdapter, publish
from rlix.pipeline.batch import over_ranks
from rlix.pipeline.ends import Ends
from rlix.pipeline.jobs.register import register
from rlix.pipeline.jobs.status import JobConfig
from rlix.pipeline.lora_finetune import LoraFinetunePipeline
from rlix.pipeline.requests.losses import RequestedLoss
from rlix.pipeline.requests.module import AdamStep, requested_on_meta
from rlix.pipeline.rollout.router import Trajectory
from rlix.pipeline.spec.job import JobSpec
from rlix.pipeline.spec.section import Count, Section
from rlix.pipeline.tokenizer import load_tokenizer
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import ControlStatus
from rlix.protocol.types import NAMESPACE, ORCHESTRATOR_ACTOR_NAME, ClusterName, Phase

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_STATUS_S = 5.0


class ServedOptions(Section):
    adapters: Count = 16
    """Most adapters that replicas hold at a time; where vLLM serves them, it makes room when it starts."""
    rank: Count = 64
    """The highest rank of an adapter."""


class ServedAdapters(LoraFinetunePipeline):
    """Adapters on one model. One thread asks for passes and steps, within `gang`; any thread submits trajectories."""

    Options = ServedOptions

    def __init__(self, pipeline_id: str, config: JobConfig, client: JobClient | None = None) -> None:
        super().__init__(pipeline_id, config, client)
        self.log_thread = f"served-{config.spec.name}"
        self.ready = threading.Event()

    @property
    def adapter_room(self) -> tuple[int, int]:  # type: ignore[override]
        options = cast(ServedOptions, self.options)
        return options.adapters, options.rank

    # ---- its life --------------------------------------------------------------------------------------------

    def setup(self) -> None:
        self.reference = self.critic = None
        self.model_path = self.local_model()
        self.tokenizer = load_tokenizer(self.model_path)
        self.ends = Ends(self.tokenizer, self.model_path)
        found = AutoConfig.from_pretrained(self.model_path).get_text_config()
        self.vocabulary, self.context = int(found.vocab_size), int(found.max_position_embeddings)
        self.pad_id = int(self.tokenizer.pad_token_id)
        self._start_engines()

    def initialize(self) -> None:
        with self.gang(Phase.ACTOR_TRAINING):
            self.serve_base()

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

    def _policy_engine(self, name: ClusterName, path: Path) -> TrainEngine:
        return self.build_train_engine(name, requested_on_meta(path), path, self.spec.optimizer)

    # ---- training --------------------------------------------------------------------------------------------

    @contextmanager
    def gang(self, phase: Phase) -> Iterator[None]:
        """The devices, with the engine on them, for as long as the block lasts."""
        with self.phase(ClusterName.ACTOR_TRAIN, phase, self.actor):
            yield
        self.note_phase("waiting for requests")

    def add(self, name: str, config: AdapterConfig, seed: int) -> None:
        self.actor.add_adapter(name, config, self.spec.optimizer, 1, seed)

    def has(self, name: str) -> bool:
        return name in self.actor.adapters()

    def drop(self, name: str) -> None:
        if self.has(name):
            self.actor.remove_adapter(name)

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

    def score_prompt(self, name: str | None, batch: Mapping[str, Tensor], several: int) -> dict[str, Tensor]:
        """As `RequestedModule.requested_scores`; None: of the model without an adapter."""
        answer: dict[str, Tensor] = self.actor.requested_scores(
            NeedParallel(batch), several, None if name is None else self._named(name)
        )
        return answer

    def save_training(self, name: str, folder: Path) -> None:
        """A folder that PEFT loads, with what training goes on from. Takes no device."""
        self.actor.read("save_adapter", name, folder, str(self.base_path))

    def load_training(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """As it was saved; without `optimizer` only the weights. Gradients are dropped."""
        self.actor.load_adapter(name, folder, self.spec.optimizer, 1, goes_on=optimizer)
        self.actor.forget_gradients(name)

    def rebuild(self) -> None:
        """A new engine, with the model and nothing on it."""
        logger.warning("%s: its training workers are started anew", self.spec.name)
        with suppress(RlixError):
            self.actor.close()
        self.actor = self._policy_engine(ClusterName.ACTOR_TRAIN, self.model_path)
        with self.gang(Phase.ACTOR_TRAINING):
            self.served.serve_again(self.actor.publish(0))

    def waits_for(self) -> str:
        """Who is in the way of what it waits for, in words."""
        try:
            asked = ray.get_actor(ORCHESTRATOR_ACTOR_NAME, NAMESPACE).status.remote()
            status: ControlStatus = get(asked, what="the pool's status", timeout_s=_STATUS_S)
        except (RlixError, RayError, ValueError) as error:
            return f"the pool does not answer ({type(error).__name__})"
        behind = [each.behind for each in status.waiting if each.pipeline_id == self.pipeline_id]
        return "; ".join(behind) or "they are on their way"

    @property
    def ranks(self) -> int:
        """Parts that a batch is split into."""
        return len(self.actor.devices)

    def _named(self, name: str) -> str | None:
        return name

    # ---- sampling --------------------------------------------------------------------------------------------

    def offer(self, name: str, folder: Path, version: int) -> None:
        """Have replicas serve the adapter in a folder under this name. Takes no device."""
        named = sorted(load_file(folder / WEIGHTS_FILE).items())
        weights = publish(iter(named), version, put=np.array)
        self.served.put(PublishedAdapter(name, AdapterConfig.of_folder(folder), weights))

    def withdraw(self, name: str) -> None:
        """Nothing is asked of it any more."""
        self.served.drop(name)

    def generate(self, trajectories: Sequence[Trajectory]) -> "Future[list[Trajectory]]":
        return _together(self.served.rollouts.submit(0, trajectories))


def _together(asked: "Sequence[Future[Trajectory]]") -> "Future[list[Trajectory]]":
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
    model: Mapping[str, Any],
    rollout: Mapping[str, Any],
    clusters: Mapping[str, Any],
    options: Mapping[str, Any],
    micro_batch_tokens: int,
    seed: int,
) -> JobSpec:
    """A served model as a job."""
    return JobSpec.model_validate(
        {
            "name": name,
            "seed": seed,
            "steps": 1,
            "pipeline": {"name": f"{ServedAdapters.__module__}:{ServedAdapters.__name__}", "options": dict(options)},
            "model": dict(model),
            "lora": {},
            "rollout": {"max_new_tokens": 1, **rollout},
            "training": {"micro_batch_tokens": micro_batch_tokens},
            "clusters": dict(clusters),
        }
    )


def start_served(spec: JobSpec, run_dir: Path, orchestrator: Any) -> ServedAdapters:
    """Registers it, and has it build in the background: `ready` is set when it can be asked.

    This process is its program: the pool takes everything back when it ends.
    """
    pipeline_id = register(spec, orchestrator)
    pipeline = ServedAdapters(pipeline_id, JobConfig(spec, run_dir))
    pipeline.client.join(spec.name)
    threading.Thread(target=_live, args=(pipeline,), name=pipeline.log_thread, daemon=True).start()
    return pipeline


def _live(pipeline: ServedAdapters) -> None:
    try:
        pipeline.run()
    except Exception:  # noqa: BLE001 - its status and its log say what it was; who waits for it is told
        logger.warning("%s failed: %s", pipeline.spec.name, pipeline.status().error)
    finally:
        pipeline.client.unregister("its server stopped serving it")
