"""The Tinker server on a pool: real leases, workers and replicas behind it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from rlix.pipeline.requests.served import ServedModel, start_served
from rlix.protocol.messages import LeaseState
from rlix.serve.tinker.server import serving
from rlix.serve.tinker.settings import load_settings
from rlix.workers import prefork
from rlix.workers.worker import WORKER_ENVIRONMENT
from tests.serve.tinker_world import KEYS, Client, datum, log_probs_of, loss_of, samples_of, tiny

pytestmark = [pytest.mark.ray]

DATA = [datum([1, 4, 5, 6, 2]), datum([1, 9, 8, 7, 6, 5, 2])]


OWN = """
from pathlib import Path

from rlix.engine.executors.transformers import TransformersExecutor
from rlix.engine.train.fsdp2 import Fsdp2Executor

HERE = Path({folder!r})


class Generates(TransformersExecutor):
    def __init__(self, *args):
        (HERE / "generates").touch()
        super().__init__(*args)


class Trains(Fsdp2Executor):
    def __init__(self, *args):
        (HERE / "trains").touch()
        super().__init__(*args)
"""


@pytest.fixture
def served(ray_session: Any, tmp_path: Path) -> Iterator[tuple[str, ServedModel]]:
    made: SimpleQueue[ServedModel] = SimpleQueue()

    def start(spec: Any, run_dir: Path) -> ServedModel:
        pipeline = start_served(spec, run_dir, ray_session)
        made.put(pipeline)
        return pipeline

    prefork.warm(WORKER_ENVIRONMENT)
    (tmp_path / "own.py").write_text(OWN.format(folder=str(tmp_path)))
    own = {"executor": "own.py:Generates", "training_executor": "own.py:Trains"}
    model = {"path": str(tiny(tmp_path / "model")), "gpus": 2, "full": 1, **own}
    given = {"models": {"tiny": model}, "keys": KEYS, "state_every": 2}
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(given))
    settings = load_settings(tmp_path / "server.yaml")
    with serving(settings, tmp_path, start) as server:
        yield server.url, made.get(timeout=300)


def test_losses_survive_a_worker_and_replicas_answer_as_the_trainer_does(
    served: tuple[str, ServedModel], ray_session: Any, tmp_path: Path
) -> None:
    """With generation and training of the operator's own."""
    url, pipeline = served
    with httpx.Client(base_url=url, timeout=300.0) as http:
        disturbed, undisturbed = Client(http, KEYS["alice"]), Client(http, KEYS["bob"])
        disturbed.create(rank=8)
        undisturbed.create(rank=8)
        wanted = undisturbed.train(DATA, 4)
        found = disturbed.train(DATA, 3)
        found.append(loss_of(disturbed.result(disturbed.run_pass(DATA))))
        held = [
            s for s in pipeline.client.leases() if s.state is LeaseState.ACTIVE and s.lease.cluster == "actor_train"
        ]
        assert len(held) <= 1  # one that is about to be given back, at most
        os.kill(pipeline.actor.processes[0].pid, signal.SIGKILL)  # with gradients that wait for their step
        disturbed.result(disturbed.step())
        assert found == wanted
        assert disturbed.train(DATA, 2) == undisturbed.train(DATA, 2)

        whole = Client(http, KEYS["alice"])
        whole.create("tiny:full")
        losses = whole.train(DATA, 3)
        assert losses[-1] < losses[0]
        for client in (disturbed, whole):
            samples_as_it_was_trained(client)
    assert (tmp_path / "generates").exists()
    assert (tmp_path / "trains").exists()


def samples_as_it_was_trained(client: Client) -> None:
    made = client.operation("save_weights_for_sampler", sampling_session_seq_id=1)
    params = {"max_tokens": 6, "seed": 4, "stop": []}
    (answer,) = samples_of(client.sample(made["sampling_session_id"], [1, 4], sampling_params=params)).sequences
    tokens = np.frombuffer(answer.tokens, np.int32).tolist()
    passed = client.result(client.run_pass([datum([1, 4, *tokens])], forward_only=True))
    trainer = log_probs_of(passed)[0][1:]
    assert np.allclose(np.frombuffer(answer.logprobs, np.float32), trainer, atol=1e-4)
