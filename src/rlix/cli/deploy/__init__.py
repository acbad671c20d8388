"""`rlix deploy`: files that ship with RLix for the systems it runs beside."""

from collections.abc import Mapping
from importlib.resources import files

from rlix.protocol.errors import SpecError

FILES: Mapping[str, tuple[str, str]] = {
    "systemd": ("rlix.service", "the queue as a service of systemd"),
    "systemd-jobs": ("rlix-jobs.service", "and its jobs: into the queue when the machine goes down, on when it is up"),
    "dockerfile": ("Dockerfile", "a container with the queue and what jobs need, from the wheel"),
    "kuberay": ("kuberay.yaml", "the queue on a KubeRay cluster, with a volume, a service and a network policy"),
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
