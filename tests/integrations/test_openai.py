"""The endpoint: conversations to the token, whole answers or none, and a job whose samples are an OpenAI client's."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlix.integrations.openai import endpoint
from rlix.integrations.openai.conversation import ChatFormat, Conversation, RequestError
from rlix.integrations.openai.episodes import Episode, Episodes, Policy
from rlix.integrations.openai.server import make_app
from rlix.integrations.openai.source import endpoint_of
from rlix.pipeline.ends import Ends
from rlix.pipeline.rollout.router import Sampling, Trajectory
from rlix.pipeline.samples import Answer
from rlix.pipeline.spec.job import load_job
from rlix.pipeline.spec.source import ChatSpec
from rlix.pipeline.tokenizer import character_tokenizer
from rlix.protocol.errors import RlixError, SpecError
from rlix.protocol.messages import Demand
from tests.pipeline.in_process import InProcess
from tests.pipeline.rollout_world import Weights, World

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' }}{{ m.content or '' }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TOKENIZER = character_tokenizer('0123456789abcdefghijklmnopqrstuvwxyz<>_{}": ,/')
END = int(TOKENIZER.eos_token_id)
TOKENIZER.chat_template = TEMPLATE
CHAT = ChatFormat(TOKENIZER, ChatSpec(), [END])
LOOK = {"type": "function", "function": {"name": "look", "parameters": {}}}


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def answer(token_ids: tuple[int, ...]) -> Answer:
    return Answer(token_ids, (-0.5,) * len(token_ids), (0,) * len(token_ids))


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_what_was_generated_is_kept_token_by_token() -> None:
    conversation = Conversation(CHAT)
    first = [said("user", "hi")]
    heard = conversation.heard(first, ())
    assert heard.read == ids("<u>hi<a>")
    conversation.answered(heard, answer((*ids("ok"), END)), said("assistant", "ok"))
    more = [*first, {"role": "assistant", "content": "ok", "refusal": None}, said("user", "go")]
    conversation.heard(more, ())  # which is not answered, and made again
    heard = conversation.heard(more, ())
    assert heard.read == ids("<u>go<a>")  # the end token was generated, and is not read again
    conversation.answered(heard, answer(ids("no")), said("assistant", "no"))  # cut off: it has no end token
    heard = conversation.heard([*more, said("assistant", "no"), said("user", "x")], ())
    assert heard.read == (END, *ids("<u>x<a>"))
    assert conversation.token_ids == (*ids("<u>hi<a>ok"), END, *ids("<u>go<a>no"))
    assert heard.prompt_ids == (*conversation.token_ids, *heard.read)


def test_asking_again_replaces_the_answer_and_a_changed_past_begins_anew() -> None:
    conversation = Conversation(CHAT)
    first = [said("user", "hi")]
    for text in ("a", "b"):  # the client did not get the first
        conversation.answered(conversation.heard(first, ()), answer(ids(text)), said("assistant", text))
    assert conversation.token_ids == ids("<u>hi<a>b")
    more = [*first, said("assistant", "b"), said("user", "go")]
    conversation.answered(conversation.heard(more, ()), answer(ids("c")), said("assistant", "c"))
    heard = conversation.heard([said("user", "ho")], ())
    assert (heard.turns, heard.read) == ((), ids("<u>ho<a>"))
    conversation.answered(heard, answer(ids("d")), said("assistant", "d"))
    assert conversation.token_ids == ids("<u>ho<a>d")


def test_tool_calls_are_taken_out_of_the_text_and_recognised_when_they_come_back() -> None:
    text = 'so <tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'
    reply = CHAT.reply((*ids(text), END), (), [LOOK], "e/0")
    (call,) = reply["tool_calls"]
    assert (reply["content"], call["function"]) == ("so", {"name": "look", "arguments": '{"at": 3}'})
    assert CHAT.reply(ids(text), (), (), "e/0") == said("assistant", text)
    conversation = Conversation(CHAT)
    conversation.answered(conversation.heard([said("user", "hi")], ()), answer((*ids("generated"), END)), reply)
    again = {**reply, "tool_calls": [{**call, "function": {"name": "look", "arguments": '{"at":3}'}}]}
    heard = conversation.heard([said("user", "hi"), again, {**said("tool", "7"), "tool_call_id": call["id"]}], ())
    assert heard.prompt_ids == (*ids("<u>hi<a>generated"), END, *ids("<t>7<a>"))
    with pytest.raises(RequestError, match="only text"):
        conversation.heard([{"role": "user", "content": [{"type": "image_url"}]}], ())


# ---- the endpoint ----------------------------------------------------------------------------------------------------


def policy(length: int, generate: Callable[[int, Trajectory], "Future[Trajectory]"]) -> Policy:
    return Policy(0, Sampling(max_new_tokens=length), 200, Ends(TOKENIZER, Path("/nowhere")), CHAT, generate)


class Endpoint:
    """The app over a rollout whose replicas a test moves by hand."""

    def __init__(self, length: int = 8) -> None:
        self.world = World(2)
        self.world.manager.publish(Weights(0))  # type: ignore[arg-type]
        self.world.grant(0)
        self.world.settle()
        self.episodes = Episodes("key")
        self.policy = policy(length, self.generate)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app("job", self.episodes)), base_url="http://job/v1"
        )

    def generate(self, step: int, trajectory: Trajectory) -> "Future[Trajectory]":
        return self.world.manager.submit(step, [trajectory])[0]

    async def ask(self, episode: Episode, **body: Any) -> "asyncio.Task[httpx.Response]":
        """A request that a replica has begun to answer."""
        messages = {"model": "job", "messages": [said("user", "hi")], **body}
        headers = {"Authorization": f"Bearer {self.episodes.key_of(episode)}"}
        task = asyncio.ensure_future(self.client.post("/chat/completions", json=messages, headers=headers))
        while not self.world.manager._inbox.qsize():
            await asyncio.sleep(0)
        self.world.manager.handle_posted()
        return task

    def generated(self, count: int) -> None:
        """The replica reports so many tokens."""
        for call in list(self.world.calls):
            self.world.finish(call, [count] if call.method == "collect" else None)
        self.world.manager.handle_posted()


def run(play: Callable[[Endpoint], Awaitable[None]]) -> None:
    async def played() -> None:
        endpoint = Endpoint()
        async with endpoint.client:
            await play(endpoint)

    asyncio.run(played())


def test_a_pool_that_shrinks_in_the_middle_of_an_answer_gives_the_whole_one() -> None:
    async def play(endpoint: Endpoint) -> None:
        episode = endpoint.episodes.open(endpoint.policy, 0, "e/0/0", "e/0", waiting=False)
        task = await endpoint.ask(episode, logprobs=True)
        endpoint.generated(3)
        endpoint.world.ask_back(0)
        endpoint.world.settle()
        assert not endpoint.world.held
        assert not task.done()  # three tokens are no answer
        endpoint.world.grant(1)
        endpoint.world.settle()
        choice = (await task).json()["choices"][0]
        assert choice["token_ids"] == list(range(8))  # none twice, none missing
        assert (choice["finish_reason"], len(choice["logprobs"]["content"])) == ("length", 8)
        assert episode.conversation.token_ids == (*ids("<u>hi<a>"), *range(8))

    run(play)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_given_up_is_an_error_and_no_short_answer(stream: bool) -> None:
    async def play(endpoint: Endpoint) -> None:
        episode = endpoint.episodes.open(endpoint.policy, 0, "e/0/0", "e/0", waiting=False)
        task = await endpoint.ask(episode, stream=stream)
        endpoint.generated(3)
        endpoint.world.manager.abandon(RlixError("enough"))
        endpoint.world.settle()
        response = await task
        if stream:
            assert '"type": "aborted"' in response.text
            assert "[DONE]" not in response.text
        else:
            assert (response.status_code, response.json()["error"]["type"]) == (503, "aborted")
        assert episode.conversation.turns == ()

    run(play)


def test_a_stream_carries_the_same_answer_piece_by_piece() -> None:
    async def play(endpoint: Endpoint) -> None:
        task = await endpoint.ask(
            endpoint.episodes.open(endpoint.policy, 0, "e/0/0", "e/0", waiting=False),
            stream=True,
            stream_options={"include_usage": True},
        )
        endpoint.world.settle()
        lines = [line.removeprefix("data: ") for line in (await task).text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        *events, usage = [json.loads(line) for line in lines[:-1]]
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 8)
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["delta"]["content"] for choice in choices) == CHAT.decode(list(range(8)))
        assert (choices[-1]["finish_reason"], choices[-1]["token_ids"]) == ("length", list(range(8)))

    run(play)


def test_agents_from_outside_take_episodes_and_post_rewards() -> None:
    async def play(endpoint: Endpoint) -> None:
        opened = endpoint.episodes.open(endpoint.policy, 0, "e/0/0", "e/0", waiting=True)
        refused = await endpoint.client.post("/episodes", headers={"Authorization": "Bearer wrong"})
        assert refused.status_code == 401
        key = {"Authorization": "Bearer key"}
        wrong = await endpoint.client.post("/episodes", json={"rows": {"train": 0}}, headers=key)
        assert "rows must be an object with the number of rows" in wrong.json()["error"]["message"]
        rows = {"train": 10, "evaluation": 3}
        taken = (await endpoint.client.post("/episodes", json={"rows": rows}, headers=key)).json()
        assert (taken["id"], taken["task"], taken["seed"]) == ("e/0/0", "e/0", opened.seed)
        assert taken["row"] == opened.place.row(10), "every epoch is a shuffle of all rows"
        task = await endpoint.ask(opened)
        endpoint.world.settle()
        await task
        headers = {"Authorization": f"Bearer {taken['api_key']}"}
        assert (await endpoint.client.post("/reward", json={"reward": 0.5}, headers=headers)).status_code == 200
        sample = opened.done.result()
        assert (sample.reward, sample.counts, sample.generated) == (0.5, True, 8)
        late = await endpoint.client.post("/reward", json={"reward": 1.0}, headers=headers)
        assert "no episode of this key is open" in late.json()["error"]["message"]

    run(play)


def test_who_gives_up_asking_for_an_episode_takes_none() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def sent(message: Any) -> None: ...

    async def play(endpoint: Endpoint) -> None:
        opened = endpoint.episodes.open(endpoint.policy, 0, "e/0/0", "e/0", waiting=True)
        headers = [(b"authorization", b"Bearer key")]
        scope = {"type": "http", "method": "POST", "path": "/v1/episodes", "query_string": b"", "headers": headers}
        await make_app("job", endpoint.episodes)(scope, gone, sent)
        assert endpoint.episodes.take() is opened

    run(play)


def test_an_answer_that_nobody_waits_for_any_more_is_not_learnt_from() -> None:
    async def play(endpoint: Endpoint) -> None:
        episode = endpoint.episodes.open(endpoint.policy, 0, "e/0/0", "e/0", waiting=False)
        slow = await endpoint.ask(episode, max_tokens=8)
        again = await endpoint.ask(episode, max_tokens=2)  # the client's second try: it has given up the first
        endpoint.world.settle()
        kept = (await again).json()["choices"][0]
        assert (await slow).json()["choices"][0]["token_ids"] == list(range(8))
        (turn,) = episode.conversation.turns
        assert list(turn.answer.token_ids) == kept["token_ids"] == [0, 1]

    run(play)


@pytest.mark.parametrize(
    ("wrong", "said_why"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"seed": 1}, "seed"),
        ({"max_tokens": -1}, "max_tokens must be"),
        ({"messages": ["hi"]}, "messages must be"),
        ({"messages": [said("user", "a" * 300)]}, "maximum context length is 200 tokens"),
        ({"messages": [said("user", "hi"), {"content": "no role"}]}, "with a role each"),
        ({"messages": []}, "with a role each"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"n": "many"}, 'n "many" is not supported'),
        ({"model": "gpt"}, "the model here is 'job'"),
    ],
)
def test_what_cannot_be_done_is_the_clients_error(wrong: dict[str, Any], said_why: str) -> None:
    async def play(endpoint: Endpoint) -> None:
        episode = endpoint.episodes.open(endpoint.policy, 0, "e/0/0", "e/0", waiting=False)
        headers = {"Authorization": f"Bearer {endpoint.episodes.key_of(episode)}"}
        body = {"messages": [said("user", "hi")], **wrong}
        response = await endpoint.client.post("/chat/completions", json=body, headers=headers)
        error = response.json()["error"]
        codes = {"context": (400, "context_length_exceeded"), "model here": (404, "model_not_found")}
        expected = next((c for word, c in codes.items() if word in said_why), (400, "invalid_request_error"))
        assert (response.status_code, error["code"], said_why in error["message"]) == (*expected, True), error

    run(play)


def test_prompts_that_would_be_a_replicas_fault_and_unknown_paths_are_refused() -> None:
    async def play(endpoint: Endpoint) -> None:
        episode = endpoint.episodes.open(endpoint.policy, 0, "e/0/0", "e/0", waiting=False)
        headers = {"Authorization": f"Bearer {endpoint.episodes.key_of(episode)}"}
        for prompt in ("", [], ["hi"], [len(TOKENIZER)], [-1], [True]):
            response = await endpoint.client.post("/completions", json={"prompt": prompt}, headers=headers)
            assert (response.status_code, "prompt must be" in response.text) == (400, True), prompt
        missing = await endpoint.client.post("/completions", json={}, headers=headers)
        assert "prompt is missing" in missing.text
        assert "is not JSON" in (await endpoint.client.post("/reward", content="{", headers=headers)).text
        unknown = await endpoint.client.post("/responses", json={}, headers=headers)
        assert (unknown.status_code, "chat/completions" in unknown.json()["error"]["message"]) == (404, True)

    run(play)


def test_a_reward_that_is_no_number_is_refused_and_leaves_the_episode_open() -> None:
    async def play(endpoint: Endpoint) -> None:
        episode = endpoint.episodes.open(endpoint.policy, 0, "e/0/0", "e/0", waiting=False)
        headers = {"Authorization": f"Bearer {endpoint.episodes.key_of(episode)}"}
        response = await endpoint.client.post("/reward", content='{"reward": NaN}', headers=headers)
        assert (response.status_code, episode.done.done()) == (400, False)
        assert "must be a finite number" in response.json()["error"]["message"]

    run(play)


def test_an_episodes_key_opens_that_episode_and_nothing_else() -> None:
    async def play(endpoint: Endpoint) -> None:
        episode, other = (endpoint.episodes.open(endpoint.policy, 0, f"e/0/{k}", "e/0", waiting=True) for k in (0, 1))
        key = endpoint.episodes.key_of(episode)
        assert endpoint.episodes.of_key(key) is episode
        assert not endpoint.episodes.known(key.replace(episode.id, other.id))
        assert not endpoint.episodes.known(f"key/{other.id}")
        taken = await endpoint.client.post("/episodes", headers={"Authorization": f"Bearer {key}"})
        assert taken.status_code == 401

    run(play)


def test_an_episode_whose_player_died_ends_as_failed() -> None:
    async def play() -> None:
        now = 0.0
        episodes = Episodes("key", clock=lambda: now)
        asked = policy(8, lambda *_: Future())
        taken, waiting = (episodes.open(asked, 0, f"e/0/{k}", "e/0", waiting=True) for k in (0, 1))
        now = 100.0
        episodes.expire(10.0)
        assert episodes.take() is taken  # to stand in the queue is no failure
        now = 110.0
        episodes.expire(10.0)
        assert not taken.done.done()
        now = 111.0
        episodes.expire(10.0)
        assert (taken.done.result().failed, taken.done.result().counts) == (True, False)
        assert "no reward within 10 s" in str(taken.done.result().error)
        assert not waiting.done.done()

    asyncio.run(play())


# ---- a job -----------------------------------------------------------------------------------------------------------

JOB = """
name: agents
steps: 1
model: {{alphabet: "0123456789abcdefghijklmnopqrstuvwxyz<>"}}
source: {{openai: "agent.py:play", chat: {{template: template.jinja}}}}
rollout: {{prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 6}}
clusters: {{actor_train: {{gpus: 1}}}}
"""
AGENT = """
from openai import OpenAI

def play(call):
    client = OpenAI(base_url=call.base_url, api_key=call.api_key)
    messages = [{"role": "user", "content": str(call.seed % 10)}]
    first = client.chat.completions.create(model=call.model, messages=messages).choices[0].message
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
    parts = client.chat.completions.create(model=call.model, messages=messages, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    if call.sample.endswith("1/1"):
        raise ValueError("this one broke")
    return float(len(text))

play.rows = ["what an agent keeps is its own business"]
"""


PLAYED = {"train": 0, "evaluation": 0}


def play_from_outside(job: str, episodes: int) -> None:
    """Whoever has the job's key: whatever is open, of either split; the first of an episode's two answers is left."""
    base_url, key = endpoint_of(job)
    with httpx.Client(base_url=base_url, timeout=300) as client:
        for _ in range(episodes):
            while (found := client.post("/episodes", headers={"Authorization": f"Bearer {key}"})).status_code == 503:
                pass
            episode = found.json()
            own = {"Authorization": f"Bearer {episode['api_key']}"}
            for text in ("one", "two"):
                client.post(
                    "/chat/completions", json={"messages": [said("user", text)]}, headers=own
                ).raise_for_status()
            client.post("/reward", json={"reward": 1.0}, headers=own).raise_for_status()
            PLAYED[episode["split"]] += 1


def test_an_evaluation_has_episodes_of_its_own_at_the_jobs_endpoint(tmp_path: Path, rlix_home: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = JOB.format().replace('openai: "agent.py:play"', f"openai: {{name: external, port: {port}}}")
    (tmp_path / "job.yaml").write_text(text + "evaluation: {every: 1, prompts: 3}\n")
    job = InProcess(load_job(tmp_path / "job.yaml"), tmp_path / "run")
    job.setup()
    player = threading.Thread(target=play_from_outside, args=("agents", 2 * 2 + 3), daemon=True)
    player.start()
    try:
        job.initialize()
        metrics = {**job.step(0), **job._evaluated(1)}
    finally:
        job.teardown()
    player.join(timeout=300)
    assert PLAYED == {"train": 4, "evaluation": 3}
    assert (metrics["trajectories"], metrics["eval/trajectories"], metrics["eval/reward"]) == (4, 3, 1)
    assert (metrics["agent_abandoned"], metrics["turns"]) == (4, 1)  # what was said first is not learnt
    assert not (rlix_home / "endpoints" / "agents.json").exists()


def test_a_name_is_of_one_endpoint_that_others_look_for(rlix_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs it is the job's and theirs; functions of the job's own are told where theirs is."""
    monkeypatch.setattr(endpoint, "_TAKEN_S", 0.0)
    jobs = dict[str, dict[str, Any]](own={}, first={}, second={}, run={})
    own = endpoint.Endpoint.join(jobs["own"], "agents", 0, from_outside=False)
    with pytest.raises(RlixError, match="no job 'agents'"):
        endpoint_of("agents")
    first = endpoint.Endpoint.join(jobs["first"], "agents", 0, from_outside=True)
    run = endpoint.Endpoint.join(jobs["run"], "several/agents", 0, from_outside=True)
    with pytest.raises(SpecError, match="another job 'agents' has its endpoint"):
        endpoint.Endpoint.join(jobs["second"], "agents", 0, from_outside=True)
    own.leave(jobs["own"])
    assert endpoint_of("agents") == (first.base_url, first.episodes.key)
    assert endpoint_of("several/agents") == (run.base_url, run.episodes.key)
    first.leave(jobs["first"])
    run.leave(jobs["run"])
    assert [path for path in (rlix_home / "endpoints").rglob("*") if path.is_file()] == []


@pytest.fixture
def job(tmp_path: Path, rlix_home: Path) -> Iterator[InProcess]:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "job.yaml").write_text(JOB.format())
    yield InProcess(load_job(tmp_path / "job.yaml"), tmp_path / "run")


def test_a_job_learns_from_what_an_openai_client_did(job: InProcess) -> None:
    (metrics,) = job.run_steps()
    assert (metrics["trajectories"], metrics["turns"], metrics["agent_failed"]) == (4.0, 2.0, 1.0)
    assert metrics["reward"] > 0
    assert job.rollouts.expected == Demand(0, 0)  # or it would keep devices while it trains
