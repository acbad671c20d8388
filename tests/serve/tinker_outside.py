"""Tinker's own client against a server: `python tinker_outside.py` in an environment that has tinker and not RLix.

`make tinker` runs it. The server is that of TINKER_BASE_URL and TINKER_API_KEY; its first model is used.
"""

import sys
import urllib.request

import tinker
from tinker import types

SEQUENCE = [1, 4, 5, 6, 7, 2]


def tensor(values: list, kind: str = "float32") -> types.TensorData:
    return types.TensorData(data=values, dtype=kind, shape=[len(values)])


def datum(**inputs: types.TensorData) -> types.Datum:
    given = {"target_tokens": tensor(SEQUENCE[1:], "int64"), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(SEQUENCE[:-1]), loss_fn_inputs=given)


def refused(call, said: str) -> None:
    try:
        call().result()
    except Exception as error:  # noqa: BLE001 - whatever kind the client makes of it
        assert said in str(error), error
    else:
        raise AssertionError(f"it was to be refused: {said}")


def train(service: tinker.ServiceClient, name: str) -> None:
    client = service.create_lora_training_client(name, rank=8, seed=1, user_metadata={"who": "outside"}).result()
    assert client.get_info().lora_rank == 8
    assert client.get_tokenizer() is not None
    count = len(SEQUENCE) - 1
    plain = datum(weights=tensor([0.0, *[1.0] * (count - 1)]))
    before = client.forward([plain], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    scored = datum(logprobs=tensor(list(before)), advantages=tensor([0.0, 0.0, 1.0, -1.0, 0.5]))
    adam = types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
    for loss in ("importance_sampling", "ppo", "cispo", "gspo", "dro"):
        passed, stepped = client.forward_backward([scored] * 3, loss), client.optim_step(adam)
        assert "loss:sum" in passed.result().metrics
        assert stepped.result().metrics["grad_norm"] >= 0  # 0 where all is clipped
    refused(lambda: client.forward_backward([scored], "stable_reinforce"), "refused")
    first = client.forward_backward([plain], "cross_entropy").result().metrics["loss:sum"]
    client.optim_step(adam).result()
    assert client.forward([plain], "cross_entropy").result().metrics["loss:sum"] < first
    try:
        import torch
    except ImportError:
        sys.stdout.write("no torch here: forward_backward_custom is left out\n")
    else:
        custom = client.forward_backward_custom(
            [plain], lambda _, logprobs: (-torch.stack(logprobs).sum(), {"mine:sum": 1.0})
        )
        assert custom.result().metrics["mine:sum"] == 1.0
        client.optim_step(adam).result()
    states(service, client, plain)
    samples(service, client, name)
    rest(service, client)


def whole(service: tinker.ServiceClient, name: str) -> None:
    """A model every weight of which is trained."""
    client = service.create_lora_training_client(name).result()
    assert client.get_info().model_name == name
    assert not client.get_info().is_lora
    plain = datum(weights=tensor([1.0] * (len(SEQUENCE) - 1)))
    adam = types.AdamParams(learning_rate=1e-3)
    losses = []
    for _ in range(3):
        passed, stepped = client.forward_backward([plain], "cross_entropy"), client.optim_step(adam)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    assert losses[2] < losses[0]
    path = client.save_state("three").result().path
    wanted = client.forward_backward([plain], "cross_entropy").result().metrics
    client.load_state_with_optimizer(path).result()
    assert client.forward_backward([plain], "cross_entropy").result().metrics == wanted
    params = types.SamplingParams(max_tokens=3, seed=3)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(SEQUENCE[:3])
    assert sampler.sample(prompt, 2, params).result().sequences[0].tokens
    assert len(sampler.compute_logprobs(prompt).result()) == 3


def states(service: tinker.ServiceClient, client: tinker.TrainingClient, plain: types.Datum) -> None:
    path = client.save_state("one", user_metadata={"a": "b"}).result().path
    wanted = client.forward_backward([plain], "cross_entropy").result().metrics
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert again.forward_backward([plain], "cross_entropy").result().metrics == wanted
    fresh = service.create_training_client_from_state(path).result()
    assert fresh.forward([plain], "cross_entropy").result().metrics == wanted
    client.load_state_with_optimizer(path).result()
    assert client.forward_backward([plain], "cross_entropy").result().metrics == wanted
    refused(lambda: client.save_state("one"), "there already")


def samples(service: tinker.ServiceClient, client: tinker.TrainingClient, name: str) -> None:
    prompt, params = types.ModelInput.from_ints(SEQUENCE[:3]), types.SamplingParams(max_tokens=4, seed=3)
    path = client.save_weights_for_sampler("sampled").result().path
    named, base = (
        service.create_sampling_client(path).result(),
        service.create_sampling_client(base_model=name).result(),
    )
    fixed = client.save_weights_and_get_sampling_client().result()
    newest = client.save_weights_and_get_sampling_client(kind="inflight").result()
    answers = [each.sample(prompt, 2, params).result().sequences[0].tokens for each in (named, fixed, newest)]
    assert answers[0] == answers[1] == answers[2]
    assert base.get_base_model() == name
    assert len(base.compute_logprobs(prompt).result()) == 3
    whole = fixed.sample(
        prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2
    )
    assert whole.result().topk_prompt_logprobs[1][0][1] >= whole.result().topk_prompt_logprobs[1][1][1]
    assert whole.result().sequences[0].topk_logprobs is not None
    refused(lambda: fixed.sample(prompt, 1, params, prompt_alt_tokens_k=2), "refused")
    import pickle

    copy = pickle.loads(pickle.dumps(fixed))
    assert copy.sample(prompt, 2, params).result().sequences[0].tokens == answers[0]


def rest(service: tinker.ServiceClient, client: tinker.TrainingClient) -> None:
    asks, run = tinker.RestClient(), client.model_id
    assert asks.whoami().result().user_urn
    assert asks.get_training_run(run).result().lora_rank == 8
    assert asks.list_training_runs().result().cursor.total_count >= 1
    path = client.save_weights_external("files").result().path
    urls = asks.get_external_weights_urls(path).result().urls
    assert len(urllib.request.urlopen(urls["adapter_model.safetensors"]).read()) > 1000
    kept = f"tinker://{run}/weights/one"
    copied = asks.copy_weights(kept, "any").result()
    asks.set_checkpoint_ttl_from_tinker_path(kept, 7200).result()
    asks.delete_checkpoint_from_tinker_path(kept).result()
    paths = {each.tinker_path for each in asks.list_checkpoints(run).result().checkpoints}
    assert kept not in paths
    assert copied in paths
    assert asks.get_weights_info_by_tinker_path(copied).result().lora_rank == 8
    assert asks.list_user_checkpoints().result().checkpoints
    session = service.holder.get_session_id()
    assert session in asks.list_sessions().result().sessions
    assert run in asks.get_session(session).result().training_run_ids
    asks.assign_session_project(session, "mine").result()
    sampler = asks.get_session(session).result().sampler_ids[0]
    assert asks.get_sampler(sampler).result().sampler_id == sampler
    assert tinker.AdminClient().get_current_checkpoint_storage_usage().result().data[0].checkpoint_count
    refused(lambda: asks.publish_checkpoint_from_tinker_path(copied), "refused")
    refused(lambda: asks.export_session_trace(session), "refused")
    refused(lambda: tinker.AdminClient().get_audit_log(), "refused")


def main() -> None:
    offered = tinker.RestClient().get_server_capabilities().result().supported_models
    name = offered[0].model_name
    assert name is not None
    with tinker.ServiceClient() as service:
        train(service, name)
        if f"{name}:full" in {model.model_name for model in offered}:
            whole(service, f"{name}:full")
    sys.stdout.write("all of the client works as docs/tinker-client.md says\n")


if __name__ == "__main__":
    sys.exit(main())
