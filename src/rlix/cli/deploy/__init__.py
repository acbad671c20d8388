"""`rlix deploy`: files that ship with RLix for the systems it runs beside."""

from collections.abc import Mapping
from importlib.resources import files

from rlix.protocol.errors import SpecError

FILES: Mapping[str, tuple[str, str]] = {
    "prometheus": ("prometheus.yml", "a scrape configuration for the queue's /metrics"),
    "grafana": ("grafana.json", "a dashboard of these metrics, to import into Grafana"),
}
"""By name: the file, and what it is."""


def shipped(name: str) -> str:
    """The text of one of `FILES`.

    Raises:
        SpecError: there is none of that name.
    """
    if name not in FILES:
        raise SpecError(f"{name}: is no file that RLix ships with; there are {', '.join(FILES)}")
    return (files("rlix.cli.deploy") / FILES[name][0]).read_text(encoding="utf-8")
