"""An algorithm of one's own, in one class: learn from the best samples of each group (RAFT, arXiv:2304.06767).

The step below is all there is to write. Elastic rollouts that survive preemption and dying replicas, leases, weight
publication, checkpoints, resuming, the run folder and the report come with the base class.

    python examples/custom_pipeline.py [RUNS_FOLDER]
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import rlix
from rlix.pipeline import Trainer
from rlix.pipeline.algorithms import groups_with_spread


class BestOfGroup(Trainer):
    """Raise the likelihood of every group's best samples; a group whose samples are all as good teaches nothing."""

    def step(self, step: int) -> Mapping[str, float]:
        samples = self.sample(step)  # on whatever devices the job has at the moment
        batch = self.scored(samples)

        rewards = self.algorithm.rewards(samples).view(-1, samples.group_size)
        best = rewards == rewards.amax(dim=1, keepdim=True)
        taught = groups_with_spread(rewards.flatten(), samples.group_size)
        batch["advantages"] = (best & taught.unsqueeze(1)).float().flatten()

        metrics = self.train(step, batch)  # under a lease for the training devices; publishes the new weights
        return metrics | samples.metrics() | {"taught": float(taught.float().mean())}


if __name__ == "__main__":
    spec = rlix.load_job(Path(__file__).with_suffix(".yaml"))
    rlix.init(virtual_gpus=4)
    (job,) = rlix.launch([spec], Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
    print(job.wait(timeout_s=600))
    job.close()
    rlix.shutdown()
