"""An environment of examples/agent_tools.yaml: arithmetic that is easier with a tool than without."""

from random import Random

from rlix.pipeline.sources.environments import Action, Instance, Message, Toolbox, ToolError, Transition, as_tool

SYSTEM = "Solve the problem. Use the tools for every step, then answer with the number alone."


def number(description: str) -> dict[str, str]:
    return {"type": "integer", "description": description}


def schema(name: str, description: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"a": number("The first number."), "b": number("The second number.")}}
    function = {"name": name, "description": description, "parameters": {**parameters, "required": ["a", "b"]}}
    return {"type": "function", "function": function}


def divide(a: int, b: int) -> int:
    if b == 0 or a % b:
        raise ToolError(f"{a} does not divide by {b}")
    return a // b


class Calculator:
    """`(a * b + c) / d`, each a whole number of at most `digits` digits; the reward is 1 for the right one.

    Every turn in which the answer is not yet given costs `turn_cost`.
    """

    tools = (
        schema("add", "Adds two numbers."),
        schema("multiply", "Multiplies two numbers."),
        schema("divide", "Divides the first number by the second, which must divide it."),
    )

    def __init__(self, instance: Instance, *, digits: int = 2, turn_cost: float = 0.0) -> None:
        self._most, self._turn_cost = 10**digits - 1, turn_cost
        functions = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b, "divide": divide}
        self._box = Toolbox({name: as_tool(function) for name, function in functions.items()}, timeout_s=5.0)
        self._right = 0

    async def reset(self, seed: int) -> tuple[Message, ...]:
        draw = Random(seed).randint
        a, b, self._right = (draw(1, self._most) for _ in range(3))
        divisor = draw(2, 9)
        c = self._right * divisor - a * b
        problem = f"What is ({a} * {b} {'+' if c >= 0 else '-'} {abs(c)}) / {divisor}?"
        return ({"role": "system", "content": SYSTEM}, {"role": "user", "content": problem})

    async def step(self, action: Action) -> Transition:
        if action.tool_calls:
            return Transition(await self._box.answers(action.tool_calls), reward=-self._turn_cost)
        right = action.text.strip().split("</think>")[-1].strip() == str(self._right)
        return Transition("", reward=float(right), done=True, exact=right)

    async def close(self) -> None:
        """Nothing is held."""
