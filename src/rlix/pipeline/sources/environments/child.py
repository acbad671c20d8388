"""The process behind `SubprocessRunner`: builds environments and calls them, as told by lines of JSON on its input."""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import IO, Any

from rlix.pipeline.sources.environments.base import Action, Environment, Instance, ToolCall, checked, observed
from rlix.pipeline.sources.place import Place
from rlix.pipeline.spec.named import import_object, own_traceback, where_raised


async def answer(request: dict[str, Any], environment: Environment | None) -> tuple[dict[str, Any], Environment]:
    method = request["method"]
    if method == "make":
        if environment is not None:
            await environment.close()
        factory: Any = import_object(request["factory"])
        given = request["instance"]
        instance = Instance(**{**given, "place": Place(**given["place"])})
        return {}, factory(instance, **request["options"])
    assert environment is not None, "the first request must be 'make'"
    if method == "reset":
        return {"observation": observed("reset", await environment.reset(request["seed"]))}, environment
    calls = tuple(ToolCall(**call) for call in request["tool_calls"])
    transition = await environment.step(Action(request["text"], tuple(request["token_ids"]), calls))
    return asdict(checked(transition)), environment


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer until the input ends."""
    environment: Environment | None = None
    with asyncio.Runner() as runner:
        for line in requests:
            try:
                reply, environment = runner.run(answer(json.loads(line), environment))
                text = json.dumps(reply)
            except Exception as error:  # noqa: BLE001 - the other side raises it
                text = json.dumps({"error": where_raised(error), "trace": own_traceback(error)})
            answers.write(text + "\n")
            answers.flush()


if __name__ == "__main__":
    private = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an environment prints must not get among the answers
    serve(sys.stdin, private)
