"""An agent for examples/openai_agent.yaml: two turns with the job's policy, through OpenAI's client."""

from functools import cache

from openai import OpenAI

from rlix.integrations.openai.source import Call


@cache
def client_of(base_url: str) -> OpenAI:
    """One for all episodes: it takes 50 ms to make, most of a short episode."""
    return OpenAI(base_url=base_url, api_key="each episode has its own")


def play(call: Call) -> float:
    """Asks for a digit, over and over, then for the next one; the reward is the share of the answers that are right."""
    client = client_of(call.base_url).with_options(api_key=call.api_key)
    messages, right, said = [], 0, 0
    for digit in (call.seed % 10, (call.seed + 1) % 10):
        messages.append({"role": "user", "content": str(digit)})
        answer = client.chat.completions.create(model=call.model, messages=messages).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        right, said = right + answer.count(str(digit)), said + max(1, len(answer))
    return right / said
