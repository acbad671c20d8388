"""Conversations are exact to the token: what was generated is never tokenized again."""

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rlix.pipeline.chat import Chat
from rlix.pipeline.samples import Answer
from rlix.pipeline.sources.environments import (
    Action,
    Instance,
    Observation,
    Toolbox,
    ToolCall,
    ToolError,
    ToolResult,
    Transition,
    as_tool,
)
from rlix.pipeline.sources.environments.episode import Outstanding, Room, play
from rlix.pipeline.sources.environments.guard import GuardedEnvironment, InProcessRunner, Limits
from rlix.pipeline.spec.source import ChatSpec
from rlix.protocol.errors import SpecError
from tests.pipeline.chat_models import byte_tokenizer, template

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def chat(name: str = "qwen2_5", *, tools: Sequence[Any] = (ADD,), **spec: Any) -> tuple[Chat, Any]:
    tokenizer = byte_tokenizer(template(name))
    return Chat(tokenizer, ChatSpec(**spec), [tokenizer.eos_token_id], tools), tokenizer


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "glm4moe", "qwen3_5_nothink"])
def test_a_tool_answer_is_what_the_template_itself_would_have_put_there(name: str) -> None:
    """Where the model's tokens are the template's own, the conversation is the template's rendering of the whole."""
    tokenizer = byte_tokenizer(template(name))
    end = tokenizer.eos_token_id
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}, {"role": "user", "content": "2 + 3?"}]
    said = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nit is"}
    heard = {"role": "tool", "name": "add", "content": "5"}
    render = lambda m, **kw: tokenizer.apply_chat_template(m, tools=[ADD], tokenize=False, **kw)
    whole = render([*messages, said, heard], add_generation_prompt=True)
    try:
        made = Chat(tokenizer, ChatSpec(), [end], [ADD])
    except SpecError as error:
        assert name == "glm4moe"
        assert "at which generation does not stop; add it to rollout.stop" in str(error)
        return
    start = made.start(messages)
    assert tokenizer.decode(list(start)) == render(messages, add_generation_prompt=True)
    at = whole.index("it is") + len("it is")
    after = made.go_on([heard], end)
    assert "<|im_end|>" + tokenizer.decode(list(after)) == whole[at:]


def test_an_answer_that_was_cut_off_is_ended_by_the_observation() -> None:
    made, tokenizer = chat()
    heard = [{"role": "tool", "name": "add", "content": "5"}]
    ended, cut = made.go_on(heard, tokenizer.eos_token_id), made.go_on(heard, tokenizer.encode("x")[0])
    assert cut == (tokenizer.eos_token_id, *ended)


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        (CALL, (ToolCall("add", '{"a": 2, "b": 3}'),)),
        (f"I will.\n{CALL}\n{CALL}", (ToolCall("add", '{"a": 2, "b": 3}'),) * 2),
        ("5", ()),
    ],
)
def test_calls_are_read_from_what_the_model_said(said: str, calls: tuple[ToolCall, ...]) -> None:
    made, tokenizer = chat()
    ids = [*tokenizer.encode(said), tokenizer.eos_token_id]
    assert made.action(ids, ()) == Action(said, tuple(ids), calls)
    assert chat(tools=())[0].action(ids, ()).tool_calls == ()


def test_a_call_that_cannot_be_read_is_something_to_tell() -> None:
    made, tokenizer = chat()
    (call,) = made.action(tokenizer.encode('<tool_call>{"name": "add", </tool_call>'), ()).tool_calls
    assert call.problem is not None
    assert "is no JSON object with name and arguments" in call.problem


def test_the_tokenizers_own_response_template_is_used() -> None:
    from trl.chat_template_utils import add_response_schema  # takes seconds, which only who runs this should pay

    tokenizer = add_response_schema(byte_tokenizer(template("qwen3")))
    made = Chat(tokenizer, ChatSpec(), [tokenizer.eos_token_id], [ADD])
    before = made.start([{"role": "user", "content": "?"}])
    (call,) = made.action([*tokenizer.encode(CALL), tokenizer.eos_token_id], before).tool_calls
    assert (call.name, json.loads(call.argument)) == ("add", {"a": 2, "b": 3})


class TestTemplates:
    def test_that_drop_thoughts_are_refused_or_overruled(self) -> None:
        said = [{"role": "user", "content": "and now?"}]
        made, tokenizer = chat("qwen3")  # a tool's answer leaves thoughts where they are, a user's message does not
        with pytest.raises(SpecError, match=r"drops what it thought in earlier turns when a user message follows"):
            made.go_on(said, tokenizer.eos_token_id)
        kept, _ = chat("qwen3", history="keep")
        after = tokenizer.decode(list(kept.go_on(said, tokenizer.eos_token_id)))
        assert after == "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"

    def test_options_and_files(self, tmp_path: Any) -> None:
        made, tokenizer = chat("qwen3", options={"enable_thinking": False})
        text = tokenizer.decode(list(made.start([{"role": "user", "content": "?"}])))
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}>")
        made, tokenizer = chat("qwen3", template=str(tmp_path / "own.jinja"))
        assert tokenizer.decode(list(made.start([{"role": "user", "content": "?"}]))) == "?<|im_end|>>"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "the model's tokenizer has none"),
            ("{{ raise_exception('no tools') }}", "does not render messages of user, assistant, tool: no tools"),
            ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "changes what the model said"),
            (
                "{% for m in messages %}{{ m.content }}#{% endfor %}",
                "ends a turn with '#', at which generation does not",
            ),
        ],
    )
    def test_that_cannot_be_used(self, text: str | None, message: str) -> None:
        tokenizer = byte_tokenizer(text)
        with pytest.raises(SpecError, match=message):
            Chat(tokenizer, ChatSpec(history="keep"), [tokenizer.eos_token_id], [ADD])


class Sum:
    tools = (ADD,)

    def __init__(self, instance: Instance) -> None:
        self._box = Toolbox({"add": as_tool(lambda a, b: a + b)}, timeout_s=300.0)

    async def reset(self, seed: int) -> Observation:
        return ({"role": "user", "content": "2 + 3?"},)

    async def step(self, action: Action) -> Transition:
        if action.tool_calls:
            return Transition(await self._box.answers(action.tool_calls))
        return Transition("", reward=float(action.text == "5"), done=True, exact=action.text == "5")

    async def close(self) -> None: ...


def test_an_episode_with_a_tool_keeps_every_token_that_was_generated() -> None:
    made, tokenizer = chat()
    end = tokenizer.eos_token_id

    class Codec:
        def encode(self, observation: Any, before: Sequence[int]) -> tuple[int, ...]:
            return made.go_on(observation, before[-1]) if before else made.start(observation)

        def action(self, token_ids: Sequence[int], before: Sequence[int]) -> Action:
            return made.action(token_ids, before)

    said = {0: [*tokenizer.encode(CALL), end], 1: [*tokenizer.encode("5"), end]}

    async def policy(id: str, tokens: tuple[int, ...], limit: int) -> Answer:
        ids = tuple(said[int(id.rpartition("/")[2])])
        return Answer(ids, (-1.0,) * len(ids), (0,) * len(ids))

    async def main() -> Any:
        environment = GuardedEnvironment(InProcessRunner(Sum), Instance("t", 0), Limits(), lambda: 0.0)
        return await play("t", 7, environment, policy, Codec(), Room(4, 200, 4000), Outstanding())

    episode = asyncio.run(main())
    assert (episode.reward, episode.exact, len(episode.turns)) == (1.0, True, 2)
    learnt = [id for id, own in zip(episode.token_ids, episode.from_policy, strict=True) if own]
    assert learnt == said[0] + said[1]
    messages = [
        {"role": "user", "content": "2 + 3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
        },
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tools=[ADD], tokenize=False)
    assert tokenizer.decode(list(episode.token_ids)) == rendered.removesuffix("\n")


def test_functions_as_tools() -> None:
    async def half(number: float) -> float:
        return number / 2

    async def main() -> list[str]:
        box = Toolbox({"half": as_tool(half)}, timeout_s=300.0)
        calls = [ToolCall("half", '{"number": 3}'), ToolCall("half", '{"nr": 3}'), ToolCall("", "x", "unreadable")]
        return [message["content"] for message in await box.answers(calls)]

    assert asyncio.run(main()) == ["1.5", "missing a required argument: 'number'", "unreadable"]


def test_a_plain_function_that_hangs_is_told_in_time() -> None:
    released = threading.Event()

    async def main() -> tuple[ToolResult, ToolResult]:
        box = Toolbox({"hang": as_tool(released.wait)}, timeout_s=0.05)
        late = await box.call(ToolCall("hang", '{"timeout": 60}'))
        released.set()
        return late, await Toolbox({"hang": as_tool(released.wait)}, timeout_s=300).call(ToolCall("hang", "{}"))

    late, there = asyncio.run(main())
    assert (late.ok, late.text) == (False, "hang did not answer within 0.05 s")
    assert there.text == "true"


def test_arguments_that_do_not_fit_are_the_tools_error() -> None:
    async def half(number: float) -> float:
        return number / 2

    with pytest.raises(ToolError):
        asyncio.run(as_tool(half)("{}"))  # type: ignore[arg-type]
