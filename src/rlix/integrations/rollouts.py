"""Elastic replicas of a model that a program of its own trains: generation for trainers that have none like it."""

import contextlib
import threading
from collections.abc import Sequence

import torch

from rlix.control.program import Program
from rlix.engine.inference.engine import InferenceEngine
from rlix.engine.weights.publication import named_weights, publish, tied_names
from rlix.node.run_folder import RunFolder
from rlix.pipeline.rollout.bundle_feed import BundleFeed
from rlix.pipeline.rollout.rollout import RolloutManager
from rlix.pipeline.rollout.router import Router, Sampling, Trajectory
from rlix.pipeline.seeds import stream_seed
from rlix.protocol.types import ClusterName

CLUSTER = ClusterName.ACTOR_INFER.value
_SLOTS = 64  # sequences that one replica generates at a time
_TIMEOUT_S = 3600.0  # of one `generate`


class Rollouts:
    """Replicas come and go with the bundles of the job's elastic cluster; every answer is whole.

    Args:
        program: attached with `rollouts={"actor_infer": ...}`.
        model: a Hugging Face causal LM: a folder, or a name on the hub.
    """

    def __init__(self, program: Program, model: str, folder: RunFolder, *, dtype: str) -> None:
        cluster = program.registration.cluster(CLUSTER)
        devices = program.client.devices()
        self._version, self._calls = 0, 0  # of which weights, and of `generate` with them
        self.stop = threading.Event()
        self._engine = InferenceEngine(model, executor="transformers")
        self._engine.build(
            tensor_parallel_size=cluster.tensor_parallel_size,
            devices=tuple(devices[id] for id in cluster.devices),
            namespace=program.registration.ray_namespace,
            dtype=dtype,
            max_num_seqs=_SLOTS,
            load=False,  # nothing may be on a device before there is a lease for it
        )
        self._feed = BundleFeed(program.client, CLUSTER)
        router = Router(len(cluster.bundles), _SLOTS)
        self._manager = RolloutManager(
            cluster, replicas=self._engine.replicas, router=router, client=self._feed, folder=folder
        )
        self._feed.feed(self._manager)

    def publish(self, module: torch.nn.Module, version: int) -> None:
        """What replicas generate with from now on; the weights are read while this runs."""
        named = named_weights(module)
        aliases = tied_names(named)
        tensors = ((name, named[name].detach()) for name in aliases)
        self._manager.publish(publish(tensors, version, aliases=aliases))
        if version != self._version:
            self._version, self._calls = version, 0

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Trajectory]:
        """One whole answer to each prompt, in their order. The same prompts in the same call get different ones.

        Its randomness comes from `seed`, the weights' version and how many calls there were with it: a run that goes on
        from a checkpoint draws what it would have drawn.

        Raises:
            WaitTimeoutError: it took too long. RolloutError: replicas keep failing.
        """
        self._calls += 1
        ids = [f"generate/{self._version}/{self._calls}/{index}" for index in range(len(prompts))]
        trajectories = [
            Trajectory(id, tuple(prompt), stream_seed(seed, id), sampling)
            for id, prompt in zip(ids, prompts, strict=True)
        ]
        return self._manager.generate(self._version, trajectories, _TIMEOUT_S, self.stop)

    def close(self) -> None:
        self.stop.set()
        with contextlib.ExitStack() as closing:  # each of them, whatever one raises; the last first
            for part in (self._engine, self._manager, self._feed):
                closing.callback(part.close)
