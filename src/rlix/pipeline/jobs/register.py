"""How a job gets its place in the pool: when it is launched, and again when a node of it has left."""

from typing import Any

import ray

from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.types import ClusterName, pipeline_namespace

_CALL_TIMEOUT_S = 60.0


def register(spec: JobSpec, orchestrator: Any) -> str:
    """Registers and admits the job; returns its new pipeline id.

    Raises:
        SpecError: its clusters do not fit the pool.
    """
    clusters = spec.clusters_in_use
    # The engines of pipelines stay where they are built, unless a pipeline says by a range that its own can move.
    stay = [name for name, c in clusters.items() if isinstance(c.gpus, int) and name != ClusterName.ACTOR_INFER]
    prefix = "lora" if spec.multi_lora else "ft"
    pipeline_id = str(ray.get(orchestrator.allocate_pipeline_id.remote(prefix), timeout=_CALL_TIMEOUT_S))
    ray.get(
        orchestrator.register_pipeline.remote(
            pipeline_id=pipeline_id,
            ray_namespace=pipeline_namespace(pipeline_id),
            cluster_tp_configs={name: cluster.tensor_parallel for name, cluster in clusters.items()},
            cluster_device_mappings={name: cluster.mapping for name, cluster in clusters.items()},
            cluster_device_alternatives={name: [] for name in stay},
            name=spec.name,
        ),
        timeout=_CALL_TIMEOUT_S,
    )
    ray.get(orchestrator.admit_pipeline.remote(pipeline_id=pipeline_id), timeout=_CALL_TIMEOUT_S)
    return pipeline_id
