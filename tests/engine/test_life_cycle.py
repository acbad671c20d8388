"""The one life cycle against a simpler model of it: a table of what each phase allows, and bytes that are counted."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlix.engine.life_cycle import (
    INFERENCE_PARTS,
    SOURCE,
    TRAINING_PARTS,
    Life,
    Part,
    Phase,
    Residency,
    WeightsId,
    joint,
    training,
)
from rlix.protocol.errors import NotResidentError, RlixError, StaleEpochError

WEIGHTS, CACHE = Part.WEIGHTS, Part.KV_CACHE
ONE, TWO = WeightsId(1, "a"), WeightsId(2, "a")


def refused(error: type[RlixError], match: str) -> Any:
    return pytest.raises(error, match=match)


def test_the_life_of_a_replica() -> None:
    life = Life().enter(3)
    with refused(NotResidentError, "is off, without kv_cache and weights.*call cuda"):
        life.check_serving()
    life = life.brought(WEIGHTS)
    assert life.phase is Phase.PARTIAL
    life = life.brought(CACHE)
    assert life.phase is Phase.RESIDENT
    life.check_accepting()
    with refused(NotResidentError, "no whole weights.*update them"):
        life.check_serving()
    life = life.filled(ONE)
    life.check_serving()
    assert (life.phase, life.version, life.residency) == (Phase.SERVING, 1, Residency.DEVICE)
    life = life.drain(3)
    with refused(NotResidentError, "draining"):
        life.check_accepting()
    with refused(NotResidentError, "while epoch 3 drains"):
        life.enter(4)
    away = life.released(keep_host=True)
    assert (away.phase, away.version, away.residency) == (Phase.HOST, 1, Residency.HOST)
    assert away.brought(WEIGHTS).brought(CACHE).phase is Phase.SERVING
    gone = life.released(keep_host=False)
    assert (gone.phase, gone.weights, gone.residency) == (Phase.OFF, None, Residency.META)


def test_a_lease_that_was_given_back_never_comes_again_and_a_late_end_ends_no_newer_one() -> None:
    life = Life().enter(3).drain(3).released(keep_host=False)
    with refused(StaleEpochError, "epoch 3 refused: it has ended"):
        life.enter(3)
    assert life.enter(4).epoch == 4
    with refused(StaleEpochError, "epoch 7 holds"):
        Life().enter(7).drain(6)
    with refused(StaleEpochError, "it has ended"):  # the end arrived before the beginning
        Life().drain(5).released(keep_host=False).enter(5)


def test_weights_are_nobodys_from_the_first_byte_that_replaces_them_to_the_last() -> None:
    life = Life().brought(*Part).filled(ONE)
    half = life.overwriting()
    assert (half.phase, half.weights) == (Phase.RESIDENT, None)
    broken = half.failed("bucket 3 did not come", *Part)
    assert (broken.phase, broken.weights, broken.on) == (Phase.FAILED, None, frozenset())
    with refused(NotResidentError, r"is failed.*\(bucket 3 did not come\): call cuda"):
        broken.check_serving()
    assert broken.drain().released(keep_host=True).phase is Phase.OFF  # nothing whole to keep
    assert broken.brought(*Part).filled(TWO).phase is Phase.SERVING


def test_a_failure_that_spares_the_weights_keeps_them() -> None:
    broken = Life().brought(*Part).filled(ONE).failed("no room for the cache", CACHE)
    assert (broken.phase, broken.weights, broken.on) == (Phase.FAILED, ONE, {WEIGHTS})
    assert broken.brought(CACHE).phase is Phase.SERVING
    assert broken.drain().released(keep_host=True).phase is Phase.HOST


def test_a_trainer_has_one_part() -> None:
    assert training(resident=True).phase is Phase.SERVING
    assert training(resident=False).brought(WEIGHTS).phase is Phase.RESIDENT
    assert training(resident=True).released(keep_host=True).brought(WEIGHTS).weights == SOURCE


def test_several_used_as_one_agree_or_fail() -> None:
    serving = Life().brought(*Part).filled(ONE)
    assert joint([serving, serving]) == serving
    for others, why in [
        ([serving.drain().released(keep_host=True)], "replica 0 is serving; replica 1 is host"),
        ([serving.filled(TWO)], r"weights differ \(replica 0 version 1, replica 1 version 2\)"),
        (["does not answer"], "replica 1: does not answer"),
        ([serving, serving.failed("out of memory", WEIGHTS)], "replica 2: out of memory"),
    ]:
        together = joint([serving, *others])
        assert (together.phase, together.residency) == (Phase.FAILED, Residency.DEVICE)
        with refused(NotResidentError, why):
            together.check_serving()
    assert joint([serving, serving.filled(WeightsId(1, "another trainer"))]).phase is Phase.FAILED


class Machine(RuleBasedStateMachine):
    """What a life says against what was done: where the bytes are, whose weights, which leases have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = INFERENCE_PARTS
        self.life = Life()
        self.on: set[Part] = set()
        self.written: WeightsId | None = None  # whose bytes the weights are; None: nobody's, or several's
        self.newest_end = 0
        self.draining = self.broken = False

    @rule(epoch=st.integers(0, 6))
    def enter(self, epoch: int) -> None:
        allowed = not (0 < epoch <= self.newest_end or epoch < self.life.epoch or self.draining)
        try:
            self.life = self.life.enter(epoch)
        except (StaleEpochError, NotResidentError):
            assert not allowed
        else:
            assert allowed

    @rule(epoch=st.integers(0, 6))
    def drain(self, epoch: int) -> None:
        if epoch < self.life.epoch:
            with pytest.raises(StaleEpochError):
                self.life.drain(epoch)
            return
        self.life = self.life.drain(epoch)
        self.draining, self.newest_end = True, max(self.newest_end, epoch)

    @rule(part=st.sampled_from(Part))
    def bring(self, part: Part) -> None:
        if part is CACHE and WEIGHTS not in self.on:
            with pytest.raises(NotResidentError, match="load the weights first"):
                self.life.brought(part)
            return
        self.life = self.life.brought(part)
        self.on.add(part)
        self.broken = self.broken and not (self.on == self.whole and self.written is not None)

    @precondition(lambda self: WEIGHTS in self.on)
    @rule()
    def overwrite(self) -> None:
        self.life, self.written = self.life.overwriting(), None

    @precondition(lambda self: WEIGHTS in self.on)
    @rule(version=st.integers(1, 3), trainer=st.sampled_from("ab"))
    def fill(self, version: int, trainer: str) -> None:
        self.written = WeightsId(version, trainer)
        self.life, self.broken = self.life.filled(self.written), False

    @rule(lost=st.sets(st.sampled_from(Part)))
    def fail(self, lost: set[Part]) -> None:
        self.life = self.life.failed("broke off", *lost)
        self.on = set() if WEIGHTS in lost else self.on - lost
        self.written = None if WEIGHTS in lost else self.written
        self.draining, self.broken = False, True

    @rule(keep_host=st.booleans())
    def release(self, keep_host: bool) -> None:
        self.life = self.life.released(keep_host=keep_host)
        self.on, self.draining, self.broken = set(), False, False
        self.written = self.written if keep_host else None

    @invariant()
    def it_says_what_is(self) -> None:
        life = self.life
        assert (life.on, life.weights, life.ended) == (self.on, self.written, self.newest_end)
        assert (life.phase is Phase.DRAINING) == self.draining
        assert (life.phase is Phase.FAILED) == (self.broken and not self.draining)

    @invariant()
    def it_serves_whole_weights_or_nothing(self) -> None:
        able = self.on == self.whole and self.written is not None and not self.draining and not self.broken
        assert (self.life.phase is Phase.SERVING) == able
        if able:
            self.life.check_serving()
            return
        with pytest.raises(NotResidentError, match=r"cuda\(\)"):
            self.life.check_serving()

    @invariant()
    def from_everywhere_there_is_a_way_on(self) -> None:
        life = self.life.released(keep_host=False) if self.draining else self.life
        assert life.brought(*life.whole).filled(ONE).phase is Phase.SERVING
        assert life.drain(life.epoch).released(keep_host=False).phase is Phase.OFF


class TrainingMachine(Machine):
    """The same with one part."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = TRAINING_PARTS
        self.life = Life(TRAINING_PARTS)

    @precondition(lambda self: False)
    @rule(part=st.sampled_from(Part))
    def bring(self, part: Part) -> None:
        raise AssertionError("a trainer has no such part")

    @rule()
    def bring_all(self) -> None:
        Machine.bring(self, WEIGHTS)


TestInference = Machine.TestCase
TestTraining = TrainingMachine.TestCase
TestInference.settings = TestTraining.settings = settings(max_examples=60, stateful_step_count=25)
