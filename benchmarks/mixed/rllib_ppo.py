"""An RLlib script. Arguments: where to write the log, iterations, and `plain` to leave the one line of RLix out.

A row: loss and mean return.
"""

import json
import sys
from pathlib import Path

from ray.rllib.algorithms.ppo import PPOConfig

import rlix

out, iterations, plain = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["plain"]
config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    .learners(num_learners=0)
    .training(train_batch_size_per_learner=1000, minibatch_size=250, num_epochs=6, lr=1e-3)
    .debugging(seed=1, log_level="ERROR")
)
if not plain:
    config = rlix.rllib(config, "rllib_ppo")
algorithm = config.build_algo()
rows, outside = [], []  # bytes on the device while no lease is held, by step
for _ in range(iterations):
    result = algorithm.train()
    loss = float(result["learners"]["default_policy"]["total_loss"])
    rows.append([loss, float(result["env_runners"]["episode_return_mean"])])
    if not plain:
        outside.append(algorithm._rlix.learners.device_bytes())
algorithm.stop()
out.write_text(json.dumps({"rows": rows, "outside": max(outside, default=None)}))
