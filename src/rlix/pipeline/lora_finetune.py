"""The pipeline that ships, training a LoRA adapter on a policy that stays as it is."""

from pathlib import Path
from typing import cast

import torch

from rlix.engine.lora import AdapterConfig
from rlix.engine.train.saving import SaveHandle
from rlix.engine.weights.publication import PublishedAdapter
from rlix.pipeline.batch import PolicyBatch, over_ranks, tokens_of
from rlix.pipeline.full_finetune import FullFinetunePipeline
from rlix.pipeline.rollout.adapters import AdapterRollouts, Served
from rlix.pipeline.spec.lora import LoraSpec
from rlix.protocol.types import ClusterName, Phase


class LoraFinetunePipeline(FullFinetunePipeline):
    """Source × schedule × algorithm as always; one adapter learns, and only it goes to the replicas and to disk."""

    adapter: str = "policy"

    @property
    def adapter_room(self) -> tuple[int, int]:  # type: ignore[override]
        return 1, adapter_config(self.spec.lora or LoraSpec()).rank

    def weights(self, version: int) -> PublishedAdapter:
        return cast(PublishedAdapter, self.actor.read("publish_adapter", self.adapter, version))

    def reference_log_probs(self, batch: PolicyBatch) -> torch.Tensor:
        """Under the teacher, or the model without its adapter, which no second engine is needed for."""
        if self.reference is not None:
            return super().reference_log_probs(batch)
        tokens = over_ranks(tokens_of(batch))
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.REFERENCE_LOG_PROBS, self.actor):
            return cast(torch.Tensor, self.actor.log_probs(tokens, self.spec.rollout.temperature))

    # ---- its life --------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        self.warm_up()
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            if self.spec.warmup is not None or self.needs.critic is not None:
                self.actor.save(self.reference_path)
            self.serve_base()
            self.attach(self.outside)
        self._build_others()

    def save(self, path: Path) -> list[SaveHandle]:
        """The adapter as PEFT has it, with its optimizer's state beside it."""
        self.actor.read("save_adapter", self.adapter, path / "adapter", str(self.base_path))
        return self._save_states({path / "critic": self.critic})

    def load(self, path: Path, step: int) -> None:
        with self.phase(ClusterName.ACTOR_TRAIN, Phase.ACTOR_TRAINING, self.actor):
            self.serve_base()
            self.attach(path / "adapter", step)
        self._build_others()
        self._load_critic(path)

    def attach(self, folder: Path | None, step: int | None = None) -> None:
        """Put the adapter on the model and have the replicas serve it: new, with the values in `folder`, or as it was
        saved there after `step` steps, optimizer and all."""
        config, spec = adapter_config(self.spec.lora or LoraSpec()), self.spec
        self.actor.add_adapter(self.adapter, config, spec.optimizer, spec.updates, spec.seed)
        if folder is not None:
            self.actor.load_adapter(self.adapter, folder, spec.optimizer, spec.updates, goes_on=step is not None)
        self.publish(step or 0)

    def serve_base(self) -> None:
        """Publish what all adapters are on, once."""
        if not self.spec.generates:
            return
        self.served.serve(self.actor.publish(0))

    @property
    def outside(self) -> Path | None:
        """The folder of an adapter from elsewhere that this one goes on from."""
        path = None if self.spec.lora is None else self.spec.lora.path
        return None if path is None else Path(path)

    @property
    def base_path(self) -> Path:
        """The model that the adapter is on, as plain transformers loads it."""
        return self.reference_path if self.reference_path.is_dir() else self.model_path

    def local_model(self) -> Path:
        """A run that goes on finds the model as its warm-up left it."""
        return self.reference_path if self.reference_path.is_dir() else super().local_model()

    # ---- engines ---------------------------------------------------------------------------------------------

    def _start_engines(self) -> None:
        super()._start_engines()
        if not self.spec.generates:
            return
        self.served = Served(self.rollouts)
        self.rollouts = AdapterRollouts(self.served, self.adapter)


def adapter_config(spec: LoraSpec) -> AdapterConfig:
    if spec.path is not None:
        return AdapterConfig.of_folder(Path(spec.path))
    alpha = 2.0 * spec.rank if spec.alpha is None else spec.alpha
    return AdapterConfig(spec.rank, alpha, spec.dropout, spec.targets)
