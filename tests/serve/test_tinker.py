"""The Tinker server: the protocol as the client speaks it, and that nothing is lost, done twice or told to others."""

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from pydantic import ValidationError
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from rlix.protocol.errors import SpecError, WorkerError
from rlix.serve.tinker import training
from rlix.serve.tinker.app import Results
from rlix.serve.tinker.records import Operation
from rlix.serve.tinker.settings import ServerSettings, load_settings
from rlix.serve.tinker.wire import read_pass
from tests.pipeline import own_backends
from tests.serve.tinker_world import KEYS, WAIT_S, Client, Server, datum, log_probs_of, loss_of, samples_of, tokens_of

DATA = [datum([1, 4, 5, 6, 2]), datum([1, 9, 8, 7, 6, 5, 2])]
SAMPLE = b'{"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 4]}]}, "sampling_params": {"max_tokens": 1}}'
OTHER = [datum([1, 10, 11, 12, 2])]
# What tinker 0.38.0 sent for forward_backward of one datum with loss "ppo" and {"clip_low_threshold": 0.7}.
RECORDED = (
    "0a016d10031a640a100a0e0a0c010000000200000003000000121e0a077765696768747312130a0c000000000000803f0000803f1801220103"
    "12300a0d7461726765745f746f6b656e73121f0a180200000000000000030000000000000004000000000000001802220103220370706f2a1d"
    "0a12636c69705f6c6f775f7468726573686f6c6411666666666666e63f3a1f0a12636c69705f6c6f775f7468726573686f6c64120909666666"
    "666666e63f"
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Several that wait for each other on a busy machine take longer than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of tests that leave no trace but their own models."""
    with Server(tmp_path_factory.mktemp("server"), max_models_per_user=1000) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    client = server.client()
    client.create()
    return client


def test_a_recorded_request_is_read() -> None:
    found = read_pass(bytes.fromhex(RECORDED))
    assert (found.model, found.seq, found.loss, found.forward_only) == ("m", 3, "ppo", False)
    assert dict(found.options) == {"clip_low_threshold": 0.7}
    (only,) = found.data
    assert only.tokens.tolist() == [1, 2, 3]
    assert {name: array.tolist() for name, array in only.inputs.items()} == {
        "target_tokens": [2, 3, 4],
        "weights": [0.0, 1.0, 1.0],
    }


def test_a_model_is_made_trained_saved_and_sampled(server: Server, client: Client) -> None:
    info = client.post("get_info", model_id=client.model)
    assert info["is_lora"]
    assert info["lora_rank"] == 4
    assert info["model_data"]["tokenizer_id"].endswith("model")
    losses = client.train(DATA, 12)
    assert losses[-1] < 0.9 * losses[0]
    path = client.operation("save_weights_for_sampler", path="one")["path"]
    assert path == f"tinker://{client.model}/sampler_weights/one"
    sampler = client.sampler(model_path=path)
    assert client.ask("GET", f"samplers/{sampler}")["model_path"] == path
    params = {"max_tokens": 5, "seed": 7, "stop": []}
    first = tokens_of(client.sample(sampler, [1, 4], num_samples=3, sampling_params=params))
    assert [len(tokens) for tokens in first] == [5, 5, 5]
    assert first[0] != first[1]
    again = tokens_of(client.sample(sampler, [1, 4], seq=1, num_samples=3, sampling_params=params))
    assert again == first


def test_devices_are_given_back_while_a_client_thinks(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        for number in range(1, 3):
            client.train(DATA, 1)
            assert server.pipeline.free.wait(WAIT_S)
            assert server.pipeline.leases == number


def test_an_adapter_is_what_peft_loads(server: Server, client: Client, tmp_path: Path) -> None:
    client.train(DATA, 3)
    client.operation("save_weights_external", path="mine")
    urls = client.ask("GET", f"training_runs/{client.model}/checkpoints/external_weights/mine/external_weights_urls")
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, url in urls["urls"].items():
        (folder / name).write_bytes(server.http.get(url).content)
        assert server.http.get(url.replace("signature=", "signature=x")).status_code == 403
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(server.pipeline.folder), folder)
    ids = torch.tensor([[1, 4, 5, 6]])
    with torch.no_grad():
        log_p = model(ids).logits[0].log_softmax(-1)
    wanted = log_p.gather(1, torch.tensor([[4], [5], [6], [2]]))[:, 0]
    (found,) = log_probs_of(client.result(client.run_pass(DATA[:1], forward_only=True)))
    assert np.allclose(found, wanted.numpy(), atol=1e-5)


def test_a_model_goes_on_from_what_another_saved(server: Server, client: Client) -> None:
    client.train(DATA, 3)
    path = client.operation("save_weights", path="three")["path"]
    wanted = client.train(DATA, 3)
    other = server.client()
    other.session = other.post("create_session")["session_id"]
    body = {"session_id": other.session, "model_seq_id": 0, "path": path, "optimizer": True}
    other.model = f"{other.session}:train:0"
    assert other.result(other.post("load_weights", **body))["type"] == "load_weights"
    assert other.train(DATA, 3) == wanted
    other.operation("load_weights", path=path, optimizer=True)
    assert other.train(DATA, 3) == wanted
    other.operation("load_weights", path=path, optimizer=False)
    fresh = other.train(DATA, 3)
    assert fresh[0] == wanted[0]  # the weights
    assert fresh[1:] != wanted[1:]  # and new moments


@pytest.mark.parametrize("state_every", [1, 3])
def test_a_server_that_ends_between_any_two_operations_goes_on(tmp_path: Path, state_every: int) -> None:
    with Server(tmp_path / "whole") as server:
        undisturbed = server.client()
        undisturbed.create()
        wanted = undisturbed.train(DATA, 4)
    client = Client(None, "")
    losses: list[float] = []
    for number in range(9):
        with Server(tmp_path / "parts", state_every=state_every) as server:
            client._http, client._key = server.http, "tml-alice-0123"
            if number == 0:
                client.create()
            elif number % 2:
                losses.append(loss_of(client.result(client.run_pass(DATA))))
            else:
                client.result(client.step())
    assert losses == wanted


def test_what_was_acknowledged_is_done_by_the_next_server(tmp_path: Path) -> None:
    with Server(tmp_path / "whole") as server:
        undisturbed = server.client()
        undisturbed.create()
        wanted = undisturbed.train(DATA, 2)
    server = Server(tmp_path / "parts")
    with server.http:  # its model is never loaded
        client = server.client()
        client.session = client.post("create_session")["session_id"]
        body = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny"}
        client.model = client.result(client.post("create_model", **body, lora_config={"rank": 4, "seed": 3}))[
            "model_id"
        ]
        futures = [client.run_pass(DATA), client.step(), client.run_pass(DATA), client.step()]
    server.journal.close()
    with Server(tmp_path / "parts") as later:
        client._http = later.http
        assert [loss_of(client.result(futures[0])), loss_of(client.result(futures[2]))] == wanted


@pytest.mark.parametrize("call", ["requested_pass", "requested_step", "add_adapter", "load_adapter"])
def test_workers_that_die_change_nothing(tmp_path: Path, call: str) -> None:
    with Server(tmp_path / "whole") as server:
        undisturbed = server.client()
        undisturbed.create()
        wanted = undisturbed.train(DATA, 6)
    deaths = {"requested_pass": [2, 5], "requested_step": [2, 4], "add_adapter": [1, 2], "load_adapter": [1]}[call]
    seen = {"requested_pass": 0, call: 0}

    def dies(name: str) -> bool:
        seen[name] = seen.get(name, 0) + 1
        first = call == "load_adapter" and name == "requested_step" and seen[name] == 4
        return first or (name == call and seen[name] in deaths)

    with Server(tmp_path / "parts", dies=dies, state_every=2) as server:
        client = server.client()
        client.create()
        assert client.train(DATA, 6) == wanted
        assert server.pipeline.rebuilt >= len(deaths)


def test_an_operation_that_always_fails_ends_and_changes_nothing(tmp_path: Path) -> None:
    broken = threading.Event()
    with Server(tmp_path, dies=lambda name: name == "requested_pass" and broken.is_set()) as server:
        client = server.client()
        client.create()
        first = client.train(DATA, 1)
        broken.set()
        failed = client.result(client.run_pass(DATA))
        assert failed["category"] == "server"
        assert "3 times" in failed["error"]
        broken.clear()
        second = client.train(DATA, 1)
    with Server(tmp_path / "whole") as server:
        undisturbed = server.client()
        undisturbed.create()
        assert undisturbed.train(DATA, 2) == first + second


def test_two_clients_learn_what_each_learns_alone(tmp_path: Path) -> None:
    alone = {}
    for user, data in (("alice", DATA), ("bob", OTHER)):
        with Server(tmp_path / user) as server:
            one = server.client(user)
            one.create(rank=4 if user == "alice" else 2, train_mlp=user == "alice")
            alone[user] = one.train(data, 6)
    with Server(tmp_path / "both") as server:
        found: dict[str, list[float]] = {}
        threads = []
        for user, data in (("alice", DATA), ("bob", OTHER)):
            one = server.client(user)
            one.create(rank=4 if user == "alice" else 2, train_mlp=user == "alice")

            def train(user: str = user, one: Client = one, data: Any = data) -> None:
                found[user] = one.train(data, 6)

            threads.append(threading.Thread(target=train))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == alone


def test_a_retry_applies_nothing_twice(server: Server, client: Client) -> None:
    first = client.run_pass(DATA, seq=1)
    assert client.run_pass(DATA, seq=1) == first
    stepped = client.step(seq=2)
    before = client.result(stepped)
    assert client.step(seq=2) == stepped
    assert client.result(stepped) == before
    refused = client.post("optim_step", status=400, model_id=client.model, seq_id=2, adam_params={"learning_rate": 1.0})
    assert "a number of its own" in refused["detail"]
    once = loss_of(client.result(client.run_pass(DATA, seq=3)))
    assert once < loss_of(client.result(first))


def test_operations_wait_for_those_before_them(server: Server, client: Client) -> None:
    later = client.step(seq=2)
    operation = server.service.result("alice", later["request_id"])
    while "has not arrived" not in (said := server.service.why(operation)):
        assert "loaded" in said  # the model is
    assert "request 1" in said
    client.result(client.run_pass(DATA, seq=1))
    assert client.result(later)["type"] == "optim_step"


def test_gradients_add_up_until_a_step(server: Server, client: Client) -> None:
    passes = [client.run_pass([each]) for each in DATA]
    losses = [loss_of(client.result(each)) for each in passes]
    both = loss_of(client.result(client.run_pass(DATA, forward_only=True)))
    assert both == pytest.approx(sum(losses), rel=1e-6)
    norm = client.result(client.step(learning_rate=0.0))["metrics"]["grad_norm"]
    client.result(client.run_pass(DATA))
    assert client.result(client.step(learning_rate=0.0))["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert "no gradients" in client.result(client.step())["error"]


@pytest.mark.parametrize(
    ("data", "loss", "options", "said"),
    [
        ([datum([1, 4, 5])], "cross_entropi", {}, "did you mean 'cross_entropy'"),
        ([datum([1, 4, 5])], "stable_reinforce", {}, "refused"),
        ([datum([1, 4, 5])], "ppo", {}, "needs 'logprobs'"),
        ([datum([1, 4, 99])], "cross_entropy", {}, "token 99 is none"),
        ([datum([1] * 70)], "cross_entropy", {}, "69 tokens"),
        ([datum([1, 4], [4, 5], weights=[1.0])], "cross_entropy", {}, "shape [1]"),
        ([datum([1, 4], [4, 5], weights=[1.0, float("nan")])], "cross_entropy", {}, "not a finite number"),
        ([datum([1, 4], [4, 5], color=[1.0, 1.0])], "cross_entropy", {}, "does not take 'color'"),
        ([datum([1, 4], [4, 5])], "cross_entropy", {"beta": 1.0}, "no option 'beta'"),
        ([], "cross_entropy", {}, "there is none"),
    ],
)
def test_what_makes_no_sense_is_told_in_the_answer(
    client: Client, data: Any, loss: str, options: Any, said: str
) -> None:
    answer = client.result(client.run_pass(data, loss, options))
    assert said in answer["error"]
    assert answer["category"] == "user"
    assert loss_of(client.result(client.run_pass(DATA))) > 0  # and it goes on


def test_others_see_nothing(server: Server, client: Client) -> None:
    path = client.operation("save_weights", path="mine")["path"]
    sampler = client.sampler(base_model="tiny")
    future = client.run_pass(DATA)
    bob = server.client("bob")
    bob.create()
    bob.post("get_info", status=404, model_id=client.model)
    bob.ask("GET", f"training_runs/{client.model}", status=404)
    bob.ask("DELETE", f"training_runs/{client.model}/checkpoints/weights/mine", status=404)
    bob.ask("GET", f"samplers/{sampler}", status=404)
    bob.ask("GET", f"sessions/{client.session}", status=404)
    assert "no request" in bob.result(future)["error"]
    assert "no weights" in bob.operation("load_weights", path=path, optimizer=False)["error"]
    assert server.http.post("/api/v1/create_session", headers={"X-API-Key": "tml-nobody-123"}).status_code == 401
    assert "POST /api/v1/healthz is not served" in server.http.post("/api/v1/healthz").json()["detail"]
    assert bob.ask("GET", "checkpoints")["checkpoints"] == []


def test_a_token_stands_for_a_key(server: Server) -> None:
    client = server.client()
    jwt = client.post("auth/token")["jwt"]
    client._key = jwt
    client.create()
    client._key = jwt[:-2]
    client.ask("GET", "sessions", status=401)


def test_checkpoints_are_listed_copied_and_deleted(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        path = client.operation("save_weights", path="a", user_metadata={"step": "3"}, ttl_seconds=7200)["path"]
        assert "there already" in client.operation("save_weights", path="a")["error"]
        assert client.operation("save_weights", path="a", overwrite=True)["path"] == path
        assert "name" in client.operation("save_weights", path="../a")["error"]
        client.operation("save_weights_for_sampler", path="b")
        copied = client.post("copy_weights", source_path=path)["tinker_path"]
        listed = client.ask("GET", f"training_runs/{client.model}/checkpoints")["checkpoints"]
        assert {each["tinker_path"] for each in listed} >= {path, copied}
        assert client.post("weights_info", tinker_path=path)["lora_rank"] == 4
        kept = f"training_runs/{client.model}/checkpoints/weights/a"
        client.ask("PUT", f"{kept}/ttl", status=204, json={"ttl_seconds": None})
        (own,) = [each for each in client.ask("GET", "checkpoints")["checkpoints"] if each["tinker_path"] == path]
        assert own["expires_at"] is None
        client.ask("DELETE", kept, status=204)
        client.ask("DELETE", kept, status=404)
        assert client.post("weights_info", tinker_path=copied)["base_model"] == "tiny"
        assert "refused" in client.ask("POST", f"{kept}/publish", status=400)["detail"]
        runs = client.ask("GET", "training_runs")
        assert runs["cursor"]["total_count"] == 1
        assert runs["training_runs"][0]["last_sampler_checkpoint"]["checkpoint_type"] == "sampler"
        usage = client.ask("GET", "billing/usage/checkpoints/current")["data"][0]
        assert usage["checkpoint_count"] == 2


def test_a_sampler_keeps_its_weights_or_follows_the_newest(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        fixed = client.operation("save_weights_for_sampler", sampling_session_seq_id=5)["sampling_session_id"]
        follows = client.operation("save_weights_for_sampler", sampling_session_seq_id=6, kind="inflight")
        sampler = follows["sampling_session_id"]
        params = {"max_tokens": 3}
        client.sample(fixed, [1, 4], sampling_params=params)
        client.sample(sampler, [1, 4], sampling_params=params)
        before = dict(server.pipeline.served)
        client.train(DATA, 1)
        client.operation("save_weights_for_sampler", sampling_session_seq_id=7, kind="inflight")
        client.sample(fixed, [1, 4], seq=1, sampling_params=params)
        client.sample(sampler, [1, 4], seq=1, sampling_params=params)
        after = server.pipeline.served
        assert after.keys() == before.keys()
        assert sum(after[name] != before[name] for name in before) == 1


def test_a_sampler_of_weights_that_are_overwritten_has_what_is_there(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        path = client.operation("save_weights_for_sampler", path="a")["path"]
        sampler, asked = client.sampler(model_path=path), {"sampling_params": {"max_tokens": 2}}
        client.sample(sampler, [1, 4], **asked)
        (first,) = server.pipeline.served.values()
        client.train(DATA, 1)
        assert client.operation("save_weights_for_sampler", path="a", overwrite=True)["path"] == path
        client.sample(sampler, [1, 4], seq=1, **asked)
        assert not first.exists()
        assert len(set(server.pipeline.served.values()) - {first}) == 1


def test_only_the_newest_weights_without_a_name_are_kept(tmp_path: Path) -> None:
    with Server(tmp_path, samplers_kept=2) as server:
        client = server.client()
        client.create()
        made = [client.operation("save_weights_for_sampler", sampling_session_seq_id=number) for number in range(3)]
        params = {"max_tokens": 2}
        for each, gone in zip(made, (True, False, False), strict=True):
            answer = client.sample(each["sampling_session_id"], [1, 4], sampling_params=params)
            assert isinstance(answer, dict) == gone
            assert not gone or "samplers_kept" in answer["error"]


def test_prompts_and_answers_are_scored(server: Server, client: Client) -> None:
    client.train(DATA, 2)
    sampler = client.operation("save_weights_for_sampler", sampling_session_seq_id=1)["sampling_session_id"]
    prompt = [1, 4, 5, 6]
    (wanted,) = log_probs_of(client.result(client.run_pass([datum([*prompt, 2])], forward_only=True)))
    targets = {"data": [4, -1, 5, 7, 6, -1], "shape": [3, 2], "dtype": "int64"}
    found = samples_of(
        client.sample(
            *(sampler, prompt),
            sampling_params={"max_tokens": 2, "stop": []},
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            target_prompt_logprobs=targets,
        )
    )
    log_probs = np.frombuffer(found.prompt_logprobs, np.float32)
    assert np.isnan(log_probs[0])
    assert np.allclose(log_probs[1:], wanted[:3], atol=1e-5)
    assert (found.topk_prompt_logprobs.k, found.topk_prompt_logprobs.length) == (2, 4)
    best = np.frombuffer(found.topk_prompt_logprobs.logprobs, np.float32).reshape(4, 2)
    assert (best[0] == -99999.0).all()
    assert all(first >= second for first, second in best[1:])
    cells = np.frombuffer(found.target_prompt_logprobs.dense, np.float32).reshape(3, 2)
    assert np.allclose(cells[:, 0], wanted[:3], atol=1e-5)
    assert cells[0, 1] == cells[2, 1] == 0.0
    (only,) = found.sequences
    assert (only.topk_sampled_logprobs.k, only.topk_sampled_logprobs.length) == (3, 2)
    last = client.sample(
        sampler, prompt, seq=1, sampling_params={"max_tokens": 1}, prompt_logprobs=True, prompt_logprobs_last_n=1
    )
    assert np.isnan(np.frombuffer(samples_of(last).prompt_logprobs, np.float32)).tolist() == [True, True, True, False]


def test_texts_and_tokens_end_an_answer(server: Server, client: Client) -> None:
    sampler = client.sampler(base_model="tiny")

    def sample(seq: int, stop: Any, count: int = 60) -> Any:
        params = {"max_tokens": count, "seed": 1, "stop": stop}
        return samples_of(client.sample(sampler, [1, 4], seq=seq, sampling_params=params)).sequences[0]

    whole = np.frombuffer(sample(0, []).tokens, np.int32).tolist()
    assert len(whole) == 60
    texts = [server.pipeline.tokenizer.decode(pair) for pair in pairwise(whole)]
    wanted = next(i for i, text in enumerate(texts) if i > 3 and len(text) == 2 and text not in texts[:i])
    cut = sample(1, [texts[wanted]])
    tokens = np.frombuffer(cut.tokens, np.int32).tolist()
    assert tokens == whole[: len(tokens)]
    assert cut.stop_reason == 0
    assert len(np.frombuffer(cut.logprobs, np.float32)) == len(tokens)
    assert (
        server.pipeline.tokenizer.decode(tokens).endswith(texts[wanted]) or tokens[-1] in server.pipeline.ends.token_ids
    )
    ended = np.frombuffer(sample(2, [whole[5]]).tokens, np.int32).tolist()
    assert ended[-1] in (whole[5], *server.pipeline.ends.token_ids)
    long = client.sample(sampler, [1, 4], seq=3, sampling_params={"max_tokens": 1000, "stop": []})
    assert len(tokens_of(long)[0]) == 62  # what is left of the context


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"stop": [1, "a"]}}, "stop"),
        ({"num_samples": 0}, "num_samples"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "only text"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [99]}]}}, "none of the model's"),
        ({"prompt_alt_tokens_k": 3}, "refused"),
        ({"record_stability_info": True}, "refused"),
    ],
)
def test_a_sample_that_makes_no_sense_is_refused(client: Client, body: dict[str, Any], said: str) -> None:
    sampler = client.sampler(base_model="tiny")
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 4]}]}
    given = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, **body}
    answer = client.result(client.post("asample", **given))
    assert said in answer["error"]
    assert answer["category"] == "user"


def test_samples_that_were_asked_for_are_made_by_the_next_server(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        sampler = client.sampler(base_model="tiny")
        wanted = tokens_of(client.sample(sampler, [1, 4], sampling_params={"max_tokens": 9, "seed": 5}))
    server = Server(tmp_path)
    with server.http:
        client._http = server.http
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 4]}]}
        given = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt}
        future = client.post("asample", **given, sampling_params={"max_tokens": 9, "seed": 5})
    server.journal.close()
    with Server(tmp_path) as later:
        client._http = later.http
        assert tokens_of(client.result(future)) == wanted


def test_a_session_ends_with_its_client(tmp_path: Path) -> None:
    time = [1000.0]
    with Server(tmp_path, now=lambda: time[0], session_timeout_s=60.0) as server:
        client = server.client()
        client.create()
        path = client.operation("save_weights", path="kept")["path"]
        stuck = client.step(seq=9)  # nothing before it will come
        time[0] += 59
        client.post("session_heartbeat", session_id=client.session)
        time[0] += 59
        server.service.end_silent_sessions()
        client.post("session_heartbeat", session_id=client.session)
        time[0] += 61
        server.service.end_silent_sessions()
        assert "said nothing for 60 s" in client.result(stuck)["error"]
        client.post("session_heartbeat", status=404, session_id=client.session)
        client.post("optim_step", status=404, model_id=client.model, seq_id=2, adam_params={})
        assert client.post("weights_info", tinker_path=path)["base_model"] == "tiny"
        other = server.client()
        other.create()
        other.ask("POST", f"sessions/{other.session}/finish", status=204, json={"reason": {"type": "success"}})
        other.post("session_heartbeat", status=404, session_id=other.session)


@pytest.mark.parametrize(
    ("lora", "said"),
    [({"rank": 65}, "from 1 to 64"), ({"rank": 0}, "refused"), ({"train_mlp": False, "train_attn": False}, "head")],
)
def test_a_model_that_cannot_be_is_refused(server: Server, lora: dict[str, Any], said: str) -> None:
    client = server.client()
    session = client.post("create_session")["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    assert said in client.post("create_model", status=400, **body)["detail"]
    assert "did you mean 'tiny'" in client.post("create_model", status=400, **{**body, "base_model": "tny"})["detail"]
    muon = {**body, "lora_config": {"rank": 2}, "optimizer_config": {"type": "dimuon"}}
    assert "AdamW" in client.post("create_model", status=400, **muon)["detail"]


def test_limits_hold(tmp_path: Path) -> None:
    with Server(tmp_path, max_body_mb=0.001, max_models_per_user=1) as server:
        client = server.client()
        client.create()
        big = {"session_id": client.session, "model_seq_id": 1, "base_model": "x" * 2000}
        assert "more than 1,000 bytes" in client.post("create_model", status=400, **big)["detail"]
        small = {"session_id": client.session, "model_seq_id": 1, "base_model": "tiny"}
        assert "no more are allowed" in client.post("create_model", status=400, **small)["detail"]
        headers = {"X-API-Key": "tml-alice-0123"}
        for body in (b"[1]", b"{", b'"x"', b"\xff"):
            assert server.http.post("/api/v1/create_model", headers=headers, content=body).status_code == 400
        assert server.http.post("/api/v1/forward_backward", headers=headers, content=b"\xff\xff").status_code == 400
        assert server.http.get("/api/v1/nothing", headers=headers).status_code == 404


def test_what_a_user_may_keep_waiting_and_saved_is_bounded(tmp_path: Path) -> None:
    with Server(tmp_path / "waiting", max_waiting_mb=0.002) as server:
        client, bob = server.client(), server.client("bob")
        client.create()
        first = [client.run_pass(DATA, seq=seq) for seq in range(2, 5)]  # which wait for request 1
        body = {"model_id": client.model, "seq_id": 9, "path": "x" * 1500}
        assert "requests that wait" in client.post("save_weights", status=429, **body)["detail"]
        assert client.run_pass(DATA, seq=2) == first[0]  # it is there already
        bob.create()
        assert bob.train(DATA, 1)
        client.result(client.run_pass(DATA, seq=1))
        for future in first:
            client.result(future)
        assert "call optim_step" in client.post("save_weights", status=400, **{**body, "seq_id": 5})["detail"]
    with Server(tmp_path / "saved", max_saved_gb=1e-6) as server:
        client = server.client()
        client.create()
        path = client.operation("save_weights", path="one")["path"]
        assert "max_saved_gb" in client.operation("save_weights", path="two")["error"]
        client.ask("DELETE", f"training_runs/{client.model}/checkpoints/weights/one", status=204)
        assert client.operation("save_weights", path="two")["path"] != path


@pytest.mark.parametrize(
    ("teams", "said"), [({"a": ("alice",), "b": ("alice",)}, "twice"), ({"a": ("carol",)}, "no key"), ({}, "")]
)
def test_teams_are_of_users_with_keys(teams: dict[str, Any], said: str) -> None:
    given = {"models": {"tiny": {}}, "keys": KEYS, "teams": teams}
    if said:
        with pytest.raises(ValidationError, match=said):
            ServerSettings.model_validate(given)
    else:
        found = ServerSettings.model_validate({**given, "teams": {"vision": ("bob",)}}).teams_with({"vision": 2.0})
        assert [found.weight((found.of(user), user)[:1]) for user in ("alice", "bob")] == [1.0, 2.0]


@pytest.mark.parametrize("wrong", [None, "x", -1, 10**30, 10**400, 1e308, float("nan"), [1], {"a": 1}])
def test_no_body_costs_the_others_their_engine_or_is_asked_for_ever(
    server: Server, client: Client, wrong: object
) -> None:
    """A mistake is answered as one: a client asks again after 5xx, and failed workers are started anew for all."""
    client.result(client.run_pass(DATA))
    path = client.operation("save_weights", path="right")["path"]
    sampler, rebuilt = client.sampler(base_model="tiny"), server.pipeline.rebuilt
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 4]}]}
    bodies: dict[str, dict[str, Any]] = {
        "create_model": {"session_id": client.session, "model_seq_id": 9, "base_model": "tiny"},
        "optim_step": {"model_id": client.model, "seq_id": 0, "adam_params": {"learning_rate": 0.0}},
        "save_weights": {"model_id": client.model, "seq_id": 0, "path": "wrong"},
        "load_weights": {"model_id": client.model, "seq_id": 0, "path": path},
        "asample": {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": prompt,
            "sampling_params": {"max_tokens": 1},
        },
        "copy_weights": {"source_path": path},
        "weights_info": {"tinker_path": path},
    }
    optional = {
        "create_model": ("lora_config", "optimizer_config"),
        "save_weights": ("ttl_seconds",),
        "copy_weights": ("ttl_seconds",),
    }
    http = TestClient(server.http.app, raise_server_exceptions=False)
    futures = []
    for kind, body in bodies.items():
        for name in (*body, *optional.get(kind, ())):
            sent = {**body, **({"seq_id": client.seq + 1} if "seq_id" in body else {}), name: wrong}
            headers = {"X-API-Key": "tml-alice-0123"}
            answer = http.post(f"/api/v1/{kind}", headers=headers, content=json.dumps(sent))
            assert answer.status_code < 500, f"{kind} {name}"
            if answer.status_code == 200 and "model_id" in body and name != "seq_id":
                client.number()
                futures.append(answer.json())
        assert http.post(f"/api/v1/{kind}", headers=headers, content=json.dumps(wrong)).status_code in (200, 400, 404)
    assert [found for each in futures if (found := client.result(each)).get("category") == "server"] == []
    assert server.pipeline.rebuilt == rebuilt


def test_a_batch_that_no_host_holds_is_refused(client: Client) -> None:
    targets = np.full((1, 60_000), 4)
    answer = client.result(client.run_pass([datum([1] * 60), *[datum([1], targets)] * 20]))
    assert "are taken: send fewer at once" in answer["error"] and answer["category"] == "user"


def test_what_waits_of_a_model_that_is_unloaded_is_answered(client: Client) -> None:
    stuck = client.step(seq=9)  # nothing before it will come
    client.post("unload_model", model_id=client.model)
    assert "unloaded" in client.result(stuck)["error"]


def test_weights_that_were_saved_when_the_server_ended_are_there_and_no_mistake(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        finish = server.journal.finish

        def killed(*_: Any) -> None:
            raise OSError("killed before it was noted")

        server.journal.finish = killed  # type: ignore[method-assign, assignment]
        future = client.post("save_weights", model_id=client.model, seq_id=client.number(), path="a")
        path = f"tinker://{client.model}/weights/a"
        while server.journal.checkpoint(path) is None:
            assert not server.base.live.has_ended
        server.journal.finish = finish  # type: ignore[method-assign]
        assert client.result(future)["path"] == path
        assert "there already" in client.operation("save_weights", path="a")["error"]


def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path: Path) -> None:
    with Server(tmp_path / "whole") as server:
        undisturbed = server.client()
        undisturbed.create()
        wanted = undisturbed.train(DATA, 4)
    with Server(tmp_path / "parts", state_every=2) as server:
        client, saves = server.client(), server.pipeline.save_training
        client.create()

        def full(name: str, folder: Path, **_: bool) -> None:
            server.pipeline.save_training = saves  # type: ignore[method-assign]
            raise OSError(28, "No space left on device")

        server.pipeline.save_training = full  # type: ignore[method-assign]
        assert client.train(DATA, 4) == wanted


def test_weights_that_are_deleted_while_they_are_sampled_are_one_clients_trouble(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        path = client.operation("save_weights_for_sampler", path="b")["path"]
        sampler, generate = client.sampler(model_path=path), server.pipeline.generate

        def deleted(trajectories: Any) -> Any:
            client.ask("DELETE", f"training_runs/{client.model}/checkpoints/sampler_weights/b", status=204)
            return generate(trajectories)

        server.pipeline.generate = deleted  # type: ignore[method-assign]
        answer = client.sample(sampler, [1, 4], sampling_params={"max_tokens": 1}, prompt_logprobs=True)
        assert answer["category"] == "user"
        assert client.train(DATA, 1)


def test_workers_that_cannot_be_started_for_a_while_are_nobodys_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_AGAIN_S", 0.01)
    died: list[str] = []
    with Server(tmp_path, dies=lambda name: name == "requested_pass" and not died and not died.append(name)) as server:
        client, rebuild, tries = server.client(), server.pipeline.rebuild, iter(range(2 * training.ATTEMPTS))
        client.create()

        def no_room() -> None:
            if next(tries, None) is not None:
                raise WorkerError("there is no room")
            rebuild()

        server.pipeline.rebuild = no_room  # type: ignore[method-assign]
        assert client.train(DATA, 1)


def test_who_never_steps_gives_devices_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LEASE_S", 0.0)
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        for future in [client.run_pass(DATA) for _ in range(4)]:
            client.result(future)
        assert server.pipeline.leases >= 4


def test_who_always_has_another_prompt_to_score_keeps_nobody_from_a_turn(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        client.train(DATA, 1)  # so that there is a trainer
        trainer = server.base.live._trainer
        ended = threading.Event()

        def another() -> None:
            if not ended.is_set():
                trainer.with_devices(another)

        another()
        try:
            assert client.train(DATA, 1)
        finally:
            ended.set()


def test_scoring_ends_with_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LEASE_S", 0.0)
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
        client.train(DATA, 1)
        trainer, leases = server.base.live._trainer, []

        def score() -> None:
            leases.append(server.pipeline.leases)
            if len(leases) < 4:
                trainer.with_devices(score)

        trainer.with_devices(score)
        assert client.train(DATA, 1)
        while len(leases) < 4:
            assert not trainer.has_ended
        assert len(set(leases)) == 4


def test_a_model_that_leaves_when_its_turn_begins_costs_nobody_the_engine(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        client, read = server.client(), server.journal.operation
        client.create()
        client.result(client.run_pass(DATA))

        def leaves(id: str) -> Operation | None:
            server.journal.operation = read  # type: ignore[method-assign]
            client.post("unload_model", model_id=client.model)
            return read(id)

        server.journal.operation = leaves  # type: ignore[method-assign]
        assert "unloaded" in client.result(client.step())["error"]
        other = server.client("bob")
        other.create()
        assert other.train(DATA, 1)
        assert not server.pipeline.rebuilt


def test_a_sample_that_is_asked_for_twice_is_generated_once(server: Server, client: Client) -> None:
    sampler = client.sampler(base_model="tiny")
    server.pipeline.asked.clear()
    operation = Operation(f"{sampler}:0", sampler, 0, "sample", SAMPLE)
    server.journal.ask(operation)
    while not server.base.live.ready:
        pass
    server.base.sample(operation)
    server.base.sample(operation)
    client.result({"request_id": operation.id})
    assert len(server.pipeline.asked) == 1


def test_a_sampler_that_is_made_again_has_its_copies(client: Client) -> None:
    sampler = client.sampler(base_model="tiny")
    assert client.post("join_sampling_session", sampling_session_id=sampler)["client_counter"] == 1
    client.samplers -= 1
    assert client.sampler(base_model="tiny") == sampler
    assert client.post("join_sampling_session", sampling_session_id=sampler)["client_counter"] == 2


def test_what_is_asked_while_training_begins_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(tmp_path) as server:
        client = server.client()
        client.create()
    looked, begin = threading.Event(), threading.Event()
    start = training.Trainer.start

    def slowly(self: training.Trainer) -> None:
        start(self)
        looked.set()
        assert begin.wait(WAIT_S)

    monkeypatch.setattr(training.Trainer, "start", slowly)
    with Server(tmp_path) as server:
        client._http = server.http
        assert looked.wait(WAIT_S)
        future = client.run_pass(DATA)
        begin.set()
        assert loss_of(client.result(future)) > 0


def test_states_of_models_that_are_gone_do_not_pile_up(tmp_path: Path) -> None:
    with Server(tmp_path, state_every=1) as server:
        client = server.client()
        client.create()
        client.train(DATA, 1)
    gone = tmp_path / "states" / client.model.replace(":", "_")
    assert gone.exists()
    server = Server(tmp_path)
    with server.http:  # its model is never loaded
        server.client().post("unload_model", model_id=client.model)
    server.journal.close()
    with Server(tmp_path) as later:
        other = later.client()
        other.create()
        other.train(DATA, 1)
        assert not gone.exists()


def test_the_manual_has_every_method_of_the_client() -> None:
    """Those of tinker 0.38.0, as its classes have them."""
    known = (Path(__file__).parent / "tinker_methods.txt").read_text().split()
    page = (Path(__file__).parents[2] / "docs" / "tinker-client.md").read_text()
    listed = {line.split("`")[1] for line in page.splitlines() if re.match(r"\| `[A-Z]\w+Client\.", line)}
    assert listed == {name for name in known if not name.endswith("_async")}
    assert {name.removesuffix("_async") for name in known} == listed


@pytest.mark.parametrize("key", ["secret-key-1", "tml-1234567", "12345678"])
def test_a_key_that_cannot_be_one_is_not_shown(tmp_path: Path, key: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"models: {{tiny: {{}}}}\nkeys: {{alice: {key}}}\n")
    with pytest.raises(SpecError, match=r"keys\.alice: must be tml- and at least 8 letters") as told:
        load_settings(path)
    assert key not in str(told.value)


def test_a_folder_that_is_not_there_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (path := tmp_path / "server.yaml").write_text("models: {mine: {path: ./nosuch}}\n")
    with pytest.raises(SpecError, match=r"server\.yaml: models\.mine\.path: .*/nosuch: no such folder"):
        load_settings(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("executor: sglang", r"models\.mine\.executor: must be transformers, vllm, file\.py:name or"),
        ("executor: own_backends.py:Nobody", r"models\.mine\.executor: .*own_backends\.py.* has no 'Nobody'"),
        ("executor: own_backends.py:Generates", r"models\.mine\.executor_options\.seen: is missing"),
        ("executor_options: {exat: true}", r"models\.mine\.executor_options\.exat: unknown key; did you mean 'exact'"),
        ("training_executor: own_backends.py:Generates", r"models\.mine\.training_executor: .* not a subclass of"),
    ],
)
def test_a_backend_that_is_none_is_said_before_anything_is_loaded(tmp_path: Path, given: str, message: str) -> None:
    shutil.copy(own_backends.__file__, tmp_path)
    (path := tmp_path / "server.yaml").write_text(f"models:\n  mine: {{{given}}}\n")
    with pytest.raises(SpecError, match=message) as told:
        load_settings(path)
    assert "\n" not in str(told.value)


def test_who_waits_for_a_result_is_answered_when_the_server_ends() -> None:
    """And not cut off, which would be a traceback for each."""

    async def wait() -> None:
        results = Results()
        results.begin()
        waiting = asyncio.create_task(results.wait("a", 600.0))
        await asyncio.sleep(0)  # it waits
        results.close()
        await asyncio.wait_for(waiting, 300.0)
        await asyncio.wait_for(results.wait("b", 600.0), 300.0)

    asyncio.run(wait())
