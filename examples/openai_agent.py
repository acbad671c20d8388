"""An agent for examples/openai_agent.yaml: two turns with the job's policy, through OpenAI's client."""

from openai import OpenAI

from rlix.integrations.openai.source import Call


def play(call: Call) -> float:
    """Asks for a digit, over and over, then for the next one; the reward is the share of the answers that are right."""
    client = OpenAI(base_url=call.base_url, api_key=call.api_key)
    messages, right, said = [], 0, 0
    for digit in (call.seed % 10, (call.seed + 1) % 10):
        messages.append({"role": "user", "content": str(digit)})
        answer = client.chat.completions.create(model=call.model, messages=messages).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        right, said = right + answer.count(str(digit)), said + max(1, len(answer))
    return right / said
