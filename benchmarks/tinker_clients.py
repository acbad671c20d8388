"""Throughput of several clients of the Tinker server against one: steps per second, all together.

python -m benchmarks.tinker_clients URL KEY [steps]     # of a server whose first model is small
"""

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from rlix.serve.tinker.wire import MESSAGES, Datum, Pass, pass_bytes

CLIENTS = (1, 4, 8, 32)
ROWS, LENGTH = 32, 24
AGAIN_S = 300.0


class Client:
    """A supervised loop of what Tinker's client sends. Like that, it asks again while the server is not there."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60.0)
        session = self._post("create_session")["session_id"]
        lora = {"rank": 8, "seed": 1}
        future = self._post("create_model", session_id=session, model_seq_id=0, base_model=model, lora_config=lora)
        self._model, self._seq = self._result(future)["model_id"], 0
        draw = np.random.default_rng(0)
        rows = draw.integers(4, 12, (ROWS, LENGTH + 1))
        self._data = tuple(
            Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:].astype(np.int64)}) for row in rows
        )

    def train(self, steps: int) -> None:
        """A pass and a step, sent together; then both are waited for."""
        for _ in range(steps):
            for future in (self._ask_pass(), self._ask_step()):
                self._result(future)

    def run_pass(self) -> float:
        """The loss."""
        answer = MESSAGES["ForwardBackwardOutput"]()
        answer.ParseFromString(self._result(self._ask_pass()))
        return float(answer.metrics["loss:sum"])

    def take_step(self) -> None:
        self._result(self._ask_step())

    def _ask_pass(self) -> Any:
        self._seq += 1
        given = Pass(self._model, self._seq, self._data, "cross_entropy", {}, forward_only=False)
        return self._sent("forward_backward", content=pass_bytes(given)).json()

    def _ask_step(self) -> Any:
        self._seq += 1
        return self._post("optim_step", model_id=self._model, seq_id=self._seq, adam_params={"learning_rate": 1e-3})

    def _post(self, path: str, **body: Any) -> Any:
        return self._sent(path, json=body).json()

    def _result(self, future: Any) -> Any:
        while (response := self._sent("retrieve_future", json=future)).status_code == 408:
            pass
        return response.json() if "json" in response.headers["content-type"] else response.content

    def _sent(self, path: str, **body: Any) -> httpx.Response:
        deadline = time.monotonic() + AGAIN_S
        while True:
            try:
                response = self._http.post(path, **body)
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            if response.status_code != 408:
                response.raise_for_status()
            return response


def measure(clients: Sequence[Client], steps: int) -> float:
    """Steps per second of all together."""
    threads = [threading.Thread(target=client.train, args=(steps,)) for client in clients]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(clients) * steps / (time.perf_counter() - began)


def main() -> None:
    if len(sys.argv) < 3:
        print("start `rlix serve --tinker FILE` and name its URL and a key")
        return
    url, key, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 20
    headers = {"X-API-Key": key}
    models = httpx.get(f"{url}/api/v1/get_server_capabilities", headers=headers).json()["supported_models"]
    clients = [Client(url, key, models[0]["model_name"]) for _ in range(max(CLIENTS))]
    for client in clients:
        client.train(1)  # brings its adapter to the devices
    alone = 0.0
    for count in CLIENTS:
        rate = measure(clients[:count], steps)
        alone = alone or rate
        print(f"{count} clients: {rate:.2f} steps/s, {rate / alone:.2f} x one")


if __name__ == "__main__":
    main()
