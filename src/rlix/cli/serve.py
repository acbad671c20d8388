"""`rlix serve --tinker`: Tinker's API on the pool."""

import signal
import threading
from dataclasses import replace
from functools import partial

from rlix.cli.pool import private_pool, shared_pool
from rlix.cli.view import make_console
from rlix.control.init import new_pool_size
from rlix.control.settings import Settings
from rlix.protocol.errors import SpecError
from rlix.serve.tinker.settings import ServerSettings

PORT = 8642
_LOOK_S = 1.0


def serve_tinker(offered: ServerSettings, *, host: str, port: int, devices: int | None, private: bool) -> None:
    """Until Ctrl-C or SIGTERM; what was acknowledged by then is done by the next server.

    Raises:
        SpecError: a model is not there, or a package is missing.
    """
    try:
        from rlix.serve.tinker.server import serving
    except ModuleNotFoundError as error:
        raise SpecError(f"rlix serve --tinker needs {error.name}: pip install 'rlix[tinker]'") from None
    from rlix.pipeline.requests.served import start_served
    from rlix.workers import prefork
    from rlix.workers.worker import WORKER_ENVIRONMENT

    settings, console = Settings.from_env(), make_console()
    wanted = devices or new_pool_size(settings)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    pools = (
        private_pool(replace(settings), wanted) if private else shared_pool(settings, devices, new_pool_size(settings))
    )
    with pools as pool:
        prefork.warm(WORKER_ENVIRONMENT)
        start = partial(start_served, orchestrator=pool.orchestrator)
        with serving(offered, settings.home, start, host=host, port=port) as server:
            console.print(f"{pool.said}\nTinker's API is at {server.url}; models: {', '.join(server.models)}")
            for said in server.notes:
                console.print(said, highlight=False, soft_wrap=True)
            console.print("  export TINKER_BASE_URL=" + server.url, highlight=False, soft_wrap=True)
            if not offered.keys:
                (key,) = server.keys.values()
                console.print(f"  export TINKER_API_KEY={key}", highlight=False, soft_wrap=True)
            while not ended.wait(_LOOK_S):
                pool.check_alive()
            console.print("ends; what was acknowledged is done by the next server")
