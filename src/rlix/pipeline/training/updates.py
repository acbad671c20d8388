"""The optimizer steps on a step's samples: what every way to train shares."""

from collections.abc import Callable

from rlix.pipeline.algorithms.base import Algorithm
from rlix.pipeline.batch import PolicyBatch, shuffled_parts
from rlix.pipeline.seeds import stream_seed
from rlix.pipeline.spec.algorithm import AlgorithmSpec


def updates(
    batch: PolicyBatch,
    algorithm: Algorithm,
    spec: AlgorithmSpec,
    seed: int,
    step: int,
    train: Callable[[PolicyBatch, float], dict[str, float]],
) -> list[dict[str, float]]:
    """The metrics of each: `train` takes a minibatch and what the sum of its losses is divided by.

    Minibatches are equal parts of the batch in an order drawn from the seed, without those that teach nothing.
    """
    return [
        train(part, algorithm.denominator(part["mask"]))
        for epoch in range(spec.epochs)
        for part in shuffled_parts(batch, spec.minibatches, stream_seed(seed, "minibatches", step, epoch))
        if part["mask"].any()
    ]
