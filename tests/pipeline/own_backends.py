"""A user's own backends, as a job's file names them."""

from dataclasses import dataclass, replace
from pathlib import Path

from rlix.engine.executors.base import ExecutorOptions, Site
from rlix.engine.executors.registry import Backend
from rlix.engine.executors.transformers import TransformersExecutor
from rlix.engine.model_source import ModelSource
from rlix.engine.train.layout import Layout
from tests.engine.conformance.tensor_parallel import TensorParallelExecutor


class Generates(TransformersExecutor):
    @dataclass
    class Options:
        seen: str
        """A folder in which every replica leaves a file."""

    def __init__(self, source: ModelSource, options: ExecutorOptions, site: Site) -> None:
        (Path(options.more["seen"]) / site.name).touch()
        super().__init__(source, replace(options, more={}), site)


SPAWNED = Backend(Generates, start="spawn")


class Trains(TensorParallelExecutor):
    """What a cluster has as the shards of one copy are parts of each layer here."""

    @classmethod
    def arrange(cls, asked: Layout) -> Layout:
        return Layout(data=asked.data // asked.shard, tensor=asked.shard)
