"""The judges of the fault campaign find what they are there for."""

from pathlib import Path

import pytest

from benchmarks.faults.light import JOBS, work_of
from benchmarks.faults.table import Fault, quantile
from benchmarks.faults.watcher import Ledger
from rlix.protocol.events import DevicesReleased, DrainStarted, LeaseGranted, LeaseReleased, PipelineEnding
from rlix.protocol.messages import Lease, LeaseState, LeaseStatus, ReleaseReason
from rlix.protocol.types import Phase


def granted(epoch: int, *devices: int) -> LeaseGranted:
    return LeaseGranted(Lease(epoch, "ft_1", "actor_train", Phase.ACTOR_TRAINING, devices))


def test_a_device_passes_on_only_from_a_lease_that_drains() -> None:
    ledger = Ledger()
    for event in (granted(1, 0), granted(2, 1), DrainStarted(1), granted(3, 0)):
        ledger.apply(event)
    assert ledger.holder == {0: 1, 1: 2}
    ledger.apply(LeaseReleased(1, ReleaseReason.SHRUNK))
    assert ledger.holder == {0: 3, 1: 2}
    assert ledger.double == []
    ledger.apply(granted(4, 1))
    assert ledger.double == ["device 1: lease 4 beside 2 and None"]


def test_a_device_that_a_gang_gave_back_early_is_free_and_no_other() -> None:
    ledger = Ledger()
    for event in (granted(1, 0, 1, 2), DevicesReleased(1, (1, 2)), granted(2, 1)):
        ledger.apply(event)
    assert (ledger.holder, ledger.double) == ({0: 1, 1: 2}, [])
    ledger.apply(LeaseReleased(1, ReleaseReason.RELEASED))
    assert (ledger.holder, ledger.double) == ({1: 2}, [])
    for event in (DevicesReleased(2, (0,)), DevicesReleased(1, (0,))):
        ledger.apply(event)
    assert ledger.double == ["lease 2 gave (0,) back, of (1,)", "lease 1 gave (0,) back, of None"]


def test_a_pipeline_that_ends_never_begins_what_it_waited_for() -> None:
    ledger = Ledger()
    other = LeaseGranted(Lease(1, "ft_2", "actor_infer", Phase.ROLLOUT, (0,), 0))
    for event in (other, DrainStarted(1), granted(2, 0), granted(3, 1), PipelineEnding("ft_1", "enough")):
        ledger.apply(event)
    ledger.apply(LeaseReleased(1, ReleaseReason.SHRUNK))
    assert (ledger.holder, ledger.draining) == ({1: 3}, {3})
    ledger.apply(LeaseGranted(Lease(4, "ft_3", "actor_train", Phase.ACTOR_TRAINING, (0,))))
    assert ledger.double == []


def test_what_ended_unread_before_the_journal_was_compacted_is_no_double_grant() -> None:
    ledger = Ledger()
    for event in (granted(1, 0, 1), granted(2, 2)):
        ledger.apply(event)
    kept = granted(3, 0).lease  # 1 was given back, and 3 granted, in rows that are gone
    ledger.resume([LeaseStatus(granted(2, 2).lease, LeaseState.DRAINING), LeaseStatus(kept, LeaseState.ACTIVE)])
    ledger.apply(granted(4, 1, 2))
    assert (ledger.holder, ledger.next, ledger.double) == ({0: 3, 2: 2}, {1: 4, 2: 4}, [])
    ledger.apply(granted(5, 0))
    assert ledger.double == ["device 0: lease 5 beside 3 and None"]


def test_an_epoch_that_does_not_grow_is_found() -> None:
    ledger = Ledger()
    for event in (granted(7, 0), LeaseReleased(7, ReleaseReason.RELEASED), granted(7, 0)):
        ledger.apply(event)
    assert ledger.double == ["epoch 7 after 7"]


@pytest.mark.parametrize(
    ("lines", "wrong", "redone"),
    [
        (["restart 0", "trajectory 0 0", "trajectory 0 1", "step 0 2"], 0, 0),
        (["restart 0", "trajectory 0 1", "restart 0", "trajectory 0 0", "trajectory 0 1", "step 0 2"], 0, 1),
        (["restart 0", "trajectory 0 1", "step 0 2"], 1, 0),
        (["restart 0", "trajectory 0 0", "trajectory 0 0", "trajectory 0 1", "step 0 2"], 1, 0),
        (["restart 0", "trajectory 0 0", "step 0 1", "trajectory 2 0", "step 2 1"], 1, 0),
    ],
)
def test_lost_doubled_and_missing_rounds_are_found(tmp_path: Path, lines: list[str], wrong: int, redone: int) -> None:
    (tmp_path / f"{next(iter(JOBS))}.ledger").write_text("\n".join(lines))
    work = work_of(tmp_path)
    assert (len(work.wrong), work.redone_trajectories) == (wrong, redone)


def test_recovery_counts_from_when_it_was_noticed() -> None:
    assert Fault("stopped", 3.0, 2.5).bare_s == 0.5
    assert quantile([5.0, 1.0, 3.0], 0.5) == 3.0
    assert quantile([float(i) for i in range(1, 201)], 0.99) == 198.0
