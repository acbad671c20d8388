"""What a campaign of faults is judged by finds what it is there to find."""

from types import SimpleNamespace
from typing import Any, cast

from benchmarks.faults.campaign import RECOVERY_S, Campaign
from rlix.protocol.events import PipelineEnding

NAMES = {"job_1": "crew-2", "job_2": "script-3", "job_3": "wide", "job_4": "probe"}


def ended(*blamed: tuple[str, float, float], over: float = 1000.0) -> list[str]:
    """Who ended at 100 s without a fault, of one of every kind."""
    events = [(100.0, PipelineEnding(pipeline_id, "its program died")) for pipeline_id in NAMES]
    watcher = SimpleNamespace(events_since=lambda at: events)
    run: Any = SimpleNamespace(watcher=watcher, blamed=list(blamed), names=lambda: NAMES)
    return [line.split()[0] for line in Campaign.innocent(cast(Campaign, run), over)]


def test_who_ends_must_have_been_hit_by_a_fault_or_its_host_by_one() -> None:
    assert ended() == ["crew-2", "script-3", "wide"]
    assert ended(("2", 90.0, 95.0)) == ["script-3"]  # the one over all hosts is hit by what hits any
    assert ended(("job_2", 99.0, 99.0)) == ["crew-2"]
    assert ended(("2", 101.5, 110.0)) == ["crew-2", "script-3", "wide"]  # nothing had happened yet
    assert ended(("2", 1.0, 99.0 - RECOVERY_S)) == ["crew-2", "script-3", "wide"]  # long over
    assert ended(over=99.0) == []  # by the campaign itself
