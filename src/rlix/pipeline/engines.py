"""What a job has on devices: the engine that trains its policy, those beside it, and replicas that generate."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlix.engine.inference.engine import InferenceEngine
from rlix.engine.train.engine import TrainEngine
from rlix.pipeline.base import Pipeline
from rlix.pipeline.models import prepare_model
from rlix.pipeline.rollout.adapters import Served
from rlix.pipeline.rollout.bundle_feed import started
from rlix.pipeline.rollout.none import NoRollouts
from rlix.pipeline.spec.executor import build_arguments
from rlix.pipeline.spec.named import shipped_or_own
from rlix.pipeline.spec.training import OptimizerSpec
from rlix.pipeline.training.module import OptimizedModule
from rlix.pipeline.training.parameter_groups import check_patterns
from rlix.pipeline.training.policy import policy_on_meta
from rlix.protocol.errors import RlixError
from rlix.protocol.messages import Cluster
from rlix.protocol.types import ClusterName, Phase


class Engines:
    """Of one job, built under its leases and left in host memory.

    Args:
        job: whose devices they are on, in its phases.
        adapters: how many adapters replicas serve at most, and the highest rank of them; None: they serve the model.
        on_meta: the policy's module, of a model's folder.
    """

    actor: TrainEngine
    rollouts: Any
    """A `RolloutManager`; `NoRollouts` where the policy generates nothing."""
    served: Served | None = None
    """What replicas serve, where that are adapters."""

    def __init__(
        self,
        job: Pipeline,
        adapters: tuple[int, int] | None = None,
        on_meta: Callable[[Path], OptimizedModule] = policy_on_meta,
    ) -> None:
        self._job, self.adapters, self._on_meta = job, adapters, on_meta
        self._built: list[TrainEngine] = []
        self.start_path = job.folder.path / "reference"
        warm = adapters is not None and self.start_path.is_dir()  # a run that goes on has it as its warm-up left it
        own = job.folder.path / "model"
        self.model_path = self.start_path if warm else prepare_model(job.spec.model, own, job.spec.seed)

    def keep_start(self) -> None:
        """Write the policy, as reinforcement learning finds it, where a resumed run finds it, too."""
        self.actor.save(self.start_path)

    def serve_base(self) -> None:
        """Publish what all adapters are on."""
        if self.served is not None:
            self.served.serve(self.actor.publish(0))

    def start(self) -> None:
        """Build the policy's engine, and replicas if it generates."""
        if not self._job.spec.generates:
            self.actor, self.rollouts = self.policy(ClusterName.ACTOR_TRAIN, self.model_path), NoRollouts()
            return
        with ThreadPoolExecutor(1) as background:  # replica processes start while the train engine is built
            replicas = background.submit(self._start_replicas)
            try:
                self.actor = self.policy(ClusterName.ACTOR_TRAIN, self.model_path)
            finally:
                self._replicas = replicas.result()
        job = self._job
        cluster = job.registration.cluster(ClusterName.ACTOR_INFER)
        slots = job.spec.rollout.max_num_seqs
        self.rollouts, self._bundles = started(self._replicas, cluster, job.client, slots, job.folder)
        self.served = None if self.adapters is None else Served(self.rollouts)

    def rebuild(self) -> None:
        """A new engine of the policy, with the model and nothing on it."""
        with suppress(RlixError):
            self.actor.close()
        self._built = [engine for engine in self._built if engine is not self.actor]
        self.actor = self.policy(ClusterName.ACTOR_TRAIN, self.model_path)

    def policy(self, name: ClusterName, path: Path) -> TrainEngine:
        """An engine of the policy's kind."""
        module, optimizer = self._on_meta(path), self._job.spec.optimizer
        check_patterns([name for name, _ in module.named_parameters()], optimizer)
        return self.build(name, module, path, optimizer)

    def build(self, name: ClusterName, module: OptimizedModule, path: Path, optimizer: OptimizerSpec) -> TrainEngine:
        """Build on the cluster's devices, under a lease, and leave the bytes in host memory."""
        job, spec = self._job, self._job.spec
        cluster, dtype = job.registration.cluster(name), spec.model.dtype
        frozen = name is ClusterName.REFERENCE or (self.adapters is not None and spec.warmup is None)
        with job.phase(name, Phase.INITIALIZATION) as lease:
            shards, sequence = self._sizes(cluster, len(lease.devices))
            engine = TrainEngine(module, shipped_or_own(spec.training.executor))
            self._built.append(engine)
            engine.build(
                shard=shards,
                sequence_parallel_size=sequence,
                devices=job.devices_of(lease.devices),
                namespace=job.registration.ray_namespace,
                seed=spec.seed,
                dtype=dtype if frozen and name is not ClusterName.CRITIC else "float32",
                compute_dtype=dtype,
                weights_path=path,
                lease=job.client.fence(lease),
                name_holders=lambda processes: job.client.name_holders(name, processes),
                build_timeout_s=spec.training.start_timeout_s,
                call_timeout_s=spec.training.timeout_s,
            )
            engine.configure_optimizer(optimizer, spec.training, spec.updates, dtype)
            engine.declare_speed(spec.speed)
            engine.release(lease.epoch)
        return engine

    @property
    def base_path(self) -> Path:
        """The model that adapters are on, as plain transformers loads it."""
        return self.start_path if self.start_path.is_dir() else self.model_path

    def close(self) -> None:
        for part in ("_bundles", "rollouts", "_replicas"):
            if (found := getattr(self, part, None)) is not None:
                found.close()
        for engine in self._built:
            engine.close()

    def _start_replicas(self) -> InferenceEngine:
        job, rollout = self._job, self._job.spec.rollout
        cluster = job.registration.cluster(ClusterName.ACTOR_INFER)
        room, rank = self.adapters or (0, 0)
        engine = InferenceEngine(str(self.model_path), shipped_or_own(rollout.executor))
        engine.build(
            tensor_parallel_size=cluster.tensor_parallel_size,
            devices=job.devices_of(cluster.devices),
            namespace=job.registration.ray_namespace,
            dtype=job.spec.model.dtype,
            max_num_seqs=rollout.max_num_seqs,
            adapters=room,
            adapter_rank=rank,
            declared=job.spec.speed,
            **build_arguments(rollout.executor, rollout.executor_options),
            load=False,  # nothing may be on a device before there is a lease for it
        )
        return engine

    def _sizes(self, cluster: Cluster, devices: int) -> tuple[int, int]:
        """Devices that hold one copy of the weights: all, unless the job says otherwise, or who registered it by a
        number of its own; and those that compute on a sequence together."""
        said = self._job.spec.clusters_in_use.get(cluster.name)
        shards = devices if said is None else said.copy_of(devices)
        if cluster.tensor_parallel_size > 1:
            shards = cluster.tensor_parallel_size
        return shards, 1 if said is None else said.together
