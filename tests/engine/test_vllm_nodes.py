"""A replica of vLLM on two raylets of this machine, with real workers on each."""

from pathlib import Path

import pytest

from tests.control.test_lifecycle import LOCAL, run

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

TWO_NODES = """
import json, pathlib, time, ray, rlix
from rlix.engine.placement import pool_devices
from rlix.engine.train.engine import TrainEngine
from rlix.engine.weights.publication import named_weights, publish
from rlix.node.node import Node
from rlix.protocol.messages import Fence
from tests.engine.models import folder, greedy, model, qwen
from tests.engine.training_models import Policy
from tests.raylets import two_raylets
from tests.waiting import until

CONFIG, PROMPTS = qwen(hidden_size=128), [(5, 6, 7), (8, 9)]
def answers():
    sampling = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return [output.outputs[0].token_ids for output in engine.generate([list(p) for p in PROMPTS], sampling)]

def expected(plain):
    return [greedy(plain, prompt, 12) for prompt in PROMPTS]

def holders():  # by device: how many processes, and under which epoch
    return {number: [len(held.processes), held.fence.epoch] for number, held in Node("here").holders(devices).items()}

got = {}
with two_raylets(1) as address:
    rlix.init(address=address, log_level="ERROR")
    devices = pool_devices()
    path = folder(pathlib.Path(__file__).parent / "model", seed=0, config=CONFIG)
    sizes = {"tensor_parallel_size": 2, "max_model_len": 64, "max_num_seqs": 4}
    try:
        rlix.InferenceEngine(path).build(**sizes)
    except ValueError as error:
        got["refused"] = str(error)
    engine = rlix.InferenceEngine(path, executor="vllm").build(**sizes)
    got["answers"] = answers() == expected(model(0, CONFIG))
    engine.update_weights(publish(named_weights(model(4, CONFIG)).items(), 9))
    got["updated"] = answers() == expected(model(4, CONFIG))
    got["held"] = holders()
    with TrainEngine((Policy, CONFIG)).build(seed=3, devices=devices[:1]) as trainer:
        trainer.p2p_weight_sync(engine)
        trained = model(0, CONFIG)
        trained.load_state_dict(trainer.state_dict())
    got["synced"] = answers() == expected(trained)
    engine.cpu()
    got["released"] = holders()
    for epoch in 1, 2:  # a lease that follows another without a release: workers change with it
        engine.replicas.run("load", None, Fence("test", epoch, "a job"), timeout_s=300)
    got["leased"] = holders()
    (follower,) = (name for name in ray.util.list_named_actors(all_namespaces=True) if "-nodes-" in name["name"])
    ray.kill(ray.get_actor(follower["name"], follower["namespace"]))
    until(lambda: not holders(), "the replica outlived its follower")
    try:
        engine.replicas.run("report", ranks=[0], timeout_s=300)
    except rlix.protocol.errors.WorkerError as error:
        got["dead"] = str(error)
    engine.close()
    rlix.shutdown()
    print(json.dumps(got))
"""


def test_a_replica_on_two_nodes(tmp_path: Path) -> None:
    got = run(TWO_NODES, tmp_path, **LOCAL, RLIX_LOCK_DIR=str(tmp_path / "locks"))
    assert "the devices of a replica must be on one node" in got.pop("refused")
    assert "rank 0 died before it answered report()" in got.pop("dead")
    each = {"answers", "updated", "synced"}
    assert {key for key in each if got.pop(key)} == each
    # On the one node the replica, on the other its follower, and one of vLLM's workers on each.
    assert got == {
        "held": {"0": [2, 0], "1": [2, 0]},
        "released": {},
        "leased": {"0": [2, 2], "1": [2, 2]},
    }
