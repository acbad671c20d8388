"""Models of the Tinker server whose every weight is trained: `NAME:full`, or rank 0."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serve.tinker_world import WAIT_S, Client, Server, datum, log_probs_of, loss_of, samples_of, tokens_of

DATA = [datum([1, 4, 5, 6, 2]), datum([1, 9, 8, 7, 6, 5, 2])]
PARAMS = {"max_tokens": 3}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(server: Server, base: str = "tiny:full", rank: int = 4) -> Client:
    client = server.client()
    client.create(base, rank=rank)
    return client


def test_every_weight_is_trained_saved_gone_on_from_and_sampled(tmp_path: Path) -> None:
    with Server(tmp_path, full=2, state_every=3) as server:
        client = made(server)
        info = client.post("get_info", model_id=client.model)
        assert (info["model_name"], info["is_lora"], info["lora_rank"]) == ("tiny:full", False, None)
        losses = client.train(DATA, 4)
        assert losses[-1] < losses[0]
        path = client.operation("save_weights", path="four")["path"]
        wanted = client.train(DATA, 2)
        sampler = client.operation("save_weights_for_sampler", sampling_session_seq_id=9)["sampling_session_id"]
        client.operation("save_weights_external", path="plain")
        shown = client.post("weights_info", tinker_path=path)
        assert (shown["base_model"], shown["is_lora"]) == ("tiny:full", False)

        client.operation("load_weights", path=path, optimizer=True)
        assert client.train(DATA, 2) == wanted
        client.operation("load_weights", path=path, optimizer=False)
        fresh = client.train(DATA, 2)
        assert fresh[0] == wanted[0]  # the weights
        assert fresh[1] != wanted[1]  # and new moments

        plain = server.store.find("alice", f"tinker://{client.model}/external_weights/plain").folder
        assert sorted(file.name for file in Path(plain).iterdir() if file.is_dir()) == []
        model = AutoModelForCausalLM.from_pretrained(plain)
        scored = samples_of(client.sample(sampler, [1, 4], sampling_params=PARAMS, prompt_logprobs=True))
        tokens = torch.tensor([[1, 4]])
        for _ in range(3):
            with torch.no_grad():
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        assert torch.tensor(list(memoryview(scored.sequences[0].tokens).cast("i"))).tolist() == tokens[0, 2:].tolist()
        with torch.no_grad():
            log_p = model(tokens[:, :1]).logits[0, -1].log_softmax(-1)[4]
        assert memoryview(scored.prompt_logprobs).cast("f")[1] == pytest.approx(float(log_p), abs=1e-5)
        base = client.sampler(base_model="tiny:full")
        assert samples_of(client.sample(base, [1, 4], sampling_params=PARAMS)).sequences


def test_two_models_and_an_adapter_learn_what_each_learns_alone(tmp_path: Path) -> None:
    with Server(tmp_path / "alone", full=1) as server:
        wanted = made(server, "tiny", rank=0).train(DATA, 3)
    with Server(tmp_path, full=2) as server:
        one, adapter, other = made(server), made(server, "tiny"), made(server, "tiny:full", rank=0)
        found: list[list[float]] = [[], [], []]
        for _ in range(3):
            for client, losses in zip((one, adapter, other), found, strict=True):
                losses.extend(client.train(DATA, 1))
        assert found[0] == found[2] == wanted != found[1]
        refused = server.client("bob")
        session = refused.post("create_session")["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny:full"}
        assert "no more can be" in refused.post("create_model", status=400, **body)["detail"]
        assert all(run.free.wait(WAIT_S) for run in server.wholes.values())  # devices are given back
        one.post("unload_model", model_id=one.model)
        refused.post("create_model", **body)
    assert not (tmp_path / "states" / one.model.replace(":", "_")).exists()
    assert {each["model_name"] for each in server.service.capabilities()["supported_models"]} == {"tiny", "tiny:full"}


@pytest.mark.parametrize("call", ["requested_pass", "requested_step"])
def test_servers_and_workers_that_die_change_nothing(tmp_path: Path, call: str) -> None:
    with Server(tmp_path / "whole", full=1) as server:
        wanted = made(server).train(DATA, 4)
    seen = {call: 0}

    def dies(name: str) -> bool:
        seen[name] = seen.get(name, 0) + 1
        return name == call and seen[name] in (2, 5)

    client, losses = Client(None, "tml-alice-0123"), []
    for number in range(3):
        with Server(tmp_path / "parts", full=1, state_every=2, dies=dies) as server:
            client._http = server.http
            if number == 0:
                client.create("tiny:full")
                losses.extend(client.train(DATA, 1))
                losses.append(loss_of(client.result(client.run_pass(DATA))))
            elif number == 1:
                client.result(client.step())  # of gradients that the last server had
                losses += client.train(DATA, 2)
            else:
                sampled = client.operation("save_weights_for_sampler", path="end")["path"]
                assert tokens_of(client.sample(client.sampler(model_path=sampled), [1], sampling_params=PARAMS))
                assert len(log_probs_of(client.result(client.run_pass(DATA, forward_only=True)))) == 2
    assert losses == wanted


def test_samplers_of_other_weights_wait_for_their_turn(tmp_path: Path) -> None:
    with Server(tmp_path, full=1) as server:
        client = made(server)
        first = client.operation("save_weights_for_sampler", sampling_session_seq_id=1)["sampling_session_id"]
        client.train(DATA, 3)
        second = client.operation("save_weights_for_sampler", sampling_session_seq_id=2)["sampling_session_id"]
        found = [
            tokens_of(client.sample(sampler, [1, 4], seq=seq, sampling_params=PARAMS, num_samples=2))
            for seq in range(2)
            for sampler in (first, second)
        ]
        assert found[0] == found[2] != found[1] == found[3]
        (sampling,) = [run for name, run in server.wholes.items() if name == "tinker-tiny-full"]
        assert len(sampling.served_folders) == 4


def test_weights_that_are_overwritten_are_the_ones_that_are_sampled_and_scored(tmp_path: Path) -> None:
    def said(sampler: str, seq: int) -> Any:
        return client.sample(sampler, [1, 4, 2], seq=seq, sampling_params=PARAMS, prompt_logprobs=True)

    with Server(tmp_path, full=1) as server:
        client = made(server)
        path = client.operation("save_weights_for_sampler", path="a")["path"]
        sampler = client.sampler(model_path=path)
        before = said(sampler, 0)
        client.train(DATA, 3)
        client.operation("save_weights_for_sampler", path="a", overwrite=True)
        other = client.operation("save_weights_for_sampler", path="b")["path"]
        after = said(sampler, 1)
        assert tokens_of(after) == tokens_of(said(client.sampler(model_path=other), 0)) != tokens_of(before)
        assert samples_of(after).prompt_logprobs != samples_of(before).prompt_logprobs
