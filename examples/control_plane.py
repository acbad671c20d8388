"""The control-plane protocol, step by step: what `rlix run` does for a job.

python examples/control_plane.py            # on a machine with GPUs, or with 4 virtual ones where there are none
"""

import ray

import rlix
from rlix.pipeline import PipelineCoordinator
from rlix.protocol.types import coordinator_actor_name, pipeline_namespace

job = rlix.load_job("sort_digits")
orchestrator = rlix.init(virtual_gpus=4)

# A pipeline id names one live pipeline; registration says which devices each of its clusters may use.
# A number in place of a list leaves the choice to the pool, and lets a gang move to other blocks of that size.
pipeline_id = ray.get(orchestrator.allocate_pipeline_id.remote("ft"))
ray.get(
    orchestrator.register_pipeline.remote(
        pipeline_id=pipeline_id,
        ray_namespace=pipeline_namespace(pipeline_id),
        cluster_tp_configs={"actor_train": 1, "actor_infer": 1},
        cluster_device_mappings={"actor_train": [0, 1], "actor_infer": [0, 1, 2, 3]},
    )
)
ray.get(orchestrator.admit_pipeline.remote(pipeline_id=pipeline_id))

# The coordinator is the actor that people and their programs talk to. It creates the actor that trains, which asks for
# devices, and whose end is the job's end.
coordinator = (
    ray.remote(PipelineCoordinator)
    .options(name=coordinator_actor_name(pipeline_id), namespace=pipeline_namespace(pipeline_id))
    .remote(pipeline_id=pipeline_id, pipeline_config=job)
)
pipeline = ray.get(coordinator.create_pipeline_actor.remote(pipeline_config=job))
print(ray.get(pipeline.run.remote()))
rlix.shutdown()
