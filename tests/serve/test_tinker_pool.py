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

from rlix.pipeline.requests.served import ServedModel, start_served
from rlix.protocol.messages import LeaseState
from rlix.serve.tinker.server import serving
from rlix.serve.tinker.settings import ServerSettings
from rlix.workers import prefork
from rlix.workers.worker import WORKER_ENVIRONMENT
from tests.serve.tinker_world import KEYS, Client, datum, log_probs_of, loss_of, samples_of, tiny

pytestmark = [pytest.mark.ray]

DATA = [datum([1, 4, 5, 6, 2]), datum([1, 9, 8, 7, 6, 5, 2])]


@pytest.fixture
def served(ray_session: Any, tmp_path: Path) -> Iterator[tuple[str, ServedModel]]:
    made: SimpleQueue[ServedModel] = SimpleQueue()

    def start(spec: Any, run_dir: Path) -> ServedModel:
        pipeline = start_served(spec, run_dir, ray_session)
        made.put(pipeline)
        return pipeline

    prefork.warm(WORKER_ENVIRONMENT)
    model = {"path": str(tiny(tmp_path / "model")), "gpus": 2, "full": 1}
    settings = ServerSettings.model_validate({"models": {"tiny": model}, "keys": KEYS, "state_every": 2})
    with serving(settings, tmp_path, start) as server:
        yield server.url, made.get(timeout=300)


def test_losses_survive_a_worker_and_replicas_answer_as_the_trainer_does(
    served: tuple[str, ServedModel], ray_session: Any
) -> None:
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


def samples_as_it_was_trained(client: Client) -> None:
    made = client.operation("save_weights_for_sampler", sampling_session_seq_id=1)
    params = {"max_tokens": 6, "seed": 4, "stop": []}
    (answer,) = samples_of(client.sample(made["sampling_session_id"], [1, 4], sampling_params=params)).sequences
    tokens = np.frombuffer(answer.tokens, np.int32).tolist()
    passed = client.result(client.run_pass([datum([1, 4, *tokens])], forward_only=True))
    trainer = log_probs_of(passed)[0][1:]
    assert np.allclose(np.frombuffer(answer.logprobs, np.float32), trainer, atol=1e-4)
