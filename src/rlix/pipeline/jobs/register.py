"""How a job gets its place in the pool: when it is launched, and again when a node of it has left."""

from typing import Any

import ray

from rlix.control.rpc import get
from rlix.node.process import this_process
from rlix.pipeline.spec.job import JobSpec
from rlix.protocol.types import ClusterName, pipeline_namespace

_CALL_TIMEOUT_S = 60.0


def register(spec: JobSpec, orchestrator: Any) -> str:
    """Registers and admits the job; returns its new pipeline id. It is forgotten should this process die before another
    one stands for it: its coordinator, or its program.

    Raises:
        SpecError: its clusters do not fit the pool.
        RlixError: the control plane cannot register it: the disk of its journal is full, say.
        WaitTimeoutError: it did not answer.
    """
    clusters = spec.clusters_in_use
    stay = [name for name, cluster in clusters.items() if name != ClusterName.ACTOR_INFER and not cluster.goes]
    prefix = "lora" if spec.multi_lora else "ft"
    pipeline_id = str(_asked(orchestrator.allocate_pipeline_id.remote(prefix), spec))
    registered = orchestrator.register_pipeline.remote(
        pipeline_id=pipeline_id,
        ray_namespace=pipeline_namespace(pipeline_id),
        cluster_tp_configs={name: cluster.unit for name, cluster in clusters.items()},
        cluster_device_mappings={name: cluster.mapping for name, cluster in clusters.items()},
        cluster_device_alternatives={name: [] for name in stay},
        name=spec.name,
        launcher=this_process(ray.get_runtime_context().get_node_id(), f"launches {spec.name}"),
    )
    _asked(registered, spec)
    _asked(orchestrator.admit_pipeline.remote(pipeline_id=pipeline_id), spec)
    return pipeline_id


def _asked(answer: Any, spec: JobSpec) -> Any:
    return get(answer, what=f"the orchestrator, which registers {spec.name}", timeout_s=_CALL_TIMEOUT_S)
