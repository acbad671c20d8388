"""An algorithm's job and its sampler without Ray: what is given back when, and what never starts."""

import contextlib
import threading
from collections.abc import Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from rlix.control.rollout_lease import Granted, Taken
from rlix.integrations.rllib import sampling
from rlix.integrations.rllib.learner_thread import ThreadGate
from rlix.protocol.errors import RlixError, SpecError, WaitTimeoutError

Log = list[str]


@pytest.fixture(scope="module")
def algorithms() -> Any:
    """Takes seconds to import, which only who runs these tests should pay."""
    from rlix.integrations.rllib import algorithm

    return algorithm


class Program:
    name = "job"
    client = None

    def __init__(self, log: Log) -> None:
        self._log = log

    @contextlib.contextmanager
    def phase(self, phase: Any) -> Iterator[Any]:
        self._log.append("granted")
        yield SimpleNamespace(devices=(0,))
        self._log.append("given back")

    def close(self) -> None:
        self._log.append("left the pool")


class Algorithm:
    def __init__(self, config: Any) -> None:
        self.setup("no such environment")

    def setup(self, config: Any) -> None:
        raise ValueError(config)


def test_a_job_that_fails_to_set_up_gives_its_lease_back_first(
    algorithms: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    log: Log = []

    def attach(name: str, **_: Any) -> Program:
        log.append(name)
        return Program(log)

    record = SimpleNamespace(
        did=lambda *_: None, broken=lambda error: log.append(f"broken: {error}"), close=lambda: log.append("recorded")
    )
    monkeypatch.setattr(algorithms, "attach", attach)
    monkeypatch.setattr(algorithms, "RunRecord", lambda *_: record)
    settings = algorithms.Settings("job", 1, False, tmp_path)
    leased: Any = type("PPO", (algorithms.Leased, Algorithm), {"_rlix_settings": settings})
    with pytest.raises(ValueError, match="no such environment"):
        leased({algorithms.TRIAL_INFO: SimpleNamespace(trial_id="a1")})
    assert log == ["job-a1", "granted", "broken: no such environment", "given back", "recorded", "left the pool"]


class Rollout:
    """Two bundles; from the third poll on one of them is asked back."""

    def __init__(self) -> None:
        self.leases: tuple[Any, ...] = ()
        self.given_back: list[Any] = []
        self.polls = 0

    def poll(self, wait_s: float) -> list[Any]:
        self.polls += 1
        if self.polls == 1:
            self.leases = ("a", "b")
            return [Granted("a"), Granted("b")]  # type: ignore[arg-type]
        if self.polls == 3:
            self.leases = ("a",)
            return [Taken("b", 30.0)]  # type: ignore[arg-type]
        return []

    def give_back(self, *leases: Any) -> None:
        self.given_back += leases

    def report(self, demand: int) -> None:
        pass

    def __enter__(self) -> "Rollout":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Runners:
    """Two of them; the second ends no chunk before its bundle is given back."""

    def __init__(self, rollout: Rollout, monkeypatch: pytest.MonkeyPatch, *, hangs: bool = False) -> None:
        self._rollout = rollout
        self._hangs = hangs
        self._worker_manager = self
        self.calls: list[tuple[int, int]] = []  # whose, and how many steps
        monkeypatch.setattr(sampling, "ray", SimpleNamespace(wait=self.wait, get=self.get))

    def actors(self) -> dict[int, Any]:
        def remote(id: int, call: Any) -> int:
            self.calls.append((id, call.keywords["steps"]))
            return len(self.calls) - 1

        return {
            id: SimpleNamespace(apply=SimpleNamespace(remote=lambda call, id=id: remote(id, call))) for id in (1, 2)
        }

    def wait(self, flying: list[int], timeout: float) -> tuple[list[int], list[int]]:
        slow = () if self._rollout.given_back and not self._hangs else (2,)
        ready = [call for call in flying if self.calls[call][0] not in slow][:1]
        return ready, []

    def get(self, call: int) -> tuple[list[int], str]:
        return [self.calls[call][1]], "measured"


def sampler(rollout: Rollout, clock: Any = lambda: 0.0) -> sampling.ElasticSampler:
    program: Any = SimpleNamespace(rollout=lambda cluster, demand: rollout)
    return sampling.ElasticSampler(program, "actor_infer", chunk_steps=10, clock=clock)


def test_a_bundle_goes_back_while_its_runner_ends_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout()
    runners = Runners(rollout, monkeypatch)
    episodes, metrics = sampler(rollout).sample(runners, 55)
    assert rollout.given_back == ["b"]
    assert (sum(episodes), len(metrics)) == (55, 6)
    assert [id for id, _ in runners.calls] == [1, 2, 1, 1, 1, 1]  # the second runner began no other


def test_a_runner_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout()
    ticks = iter(range(0, 100_000, 100))
    with pytest.raises(WaitTimeoutError, match=r"runners \[2\] took longer than 600 s for 10 steps"):
        sampler(rollout, lambda: float(next(ticks))).sample(Runners(rollout, monkeypatch, hangs=True), 20)


def test_whole_episodes_are_not_sampled_elastically() -> None:
    algorithm = SimpleNamespace(config=SimpleNamespace(batch_mode="complete_episodes"))
    with pytest.raises(SpecError, match="leave batch_mode as it is"):
        sampling.make_elastic(algorithm, sampler(Rollout()))


def test_what_cannot_be_leased_is_refused(algorithms: Any) -> None:
    from ray.rllib.algorithms.ppo import PPOConfig

    with pytest.raises(SpecError, match="num_gpus_per_learner would take Ray's GPUs"):
        algorithms.rllib(PPOConfig().learners(num_gpus_per_learner=1))
    with pytest.raises(SpecError, match="RLlib's old API"):
        algorithms.rllib(PPOConfig().api_stack(False, False))
    with pytest.raises(SpecError, match="such as PPOConfig"):
        algorithms.rllib({"lr": 1e-3})
    with pytest.raises(SpecError, match="a job's already"):
        algorithms.rllib(algorithms.rllib(PPOConfig()))


class LearnerThread(threading.Thread):
    """As RLlib's: it waits at the queue before the gate is there, and ends with what an update raises.

    It is the learner too, whose `update` waits, without a bound, until the batch is learnt from.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._in_queue: Any = Queue()
        self._learner_thread_in_queue = self._in_queue
        self._learner_thread = self
        self._update_method: Any = LearnerThread.learn
        self._agg_event = threading.Event()
        self._submitted_updates = 0
        self.stopped = False
        self.on_device = True
        self.learnt: list[tuple[int, bool]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def update(self, *batches: int, wait: bool = True) -> None:
        for batch in batches:
            self._learner_thread_in_queue.put(batch, block=True)
            self._submitted_updates += 1
            if wait:
                self._agg_event.wait()
                self._agg_event.clear()

    def learn(self, batch: int) -> None:
        self.goes_on.wait(300)
        if batch < 0:
            raise ValueError(batch)
        self.learnt += [(batch, self.on_device), (batch, self.on_device)]

    def run(self) -> None:
        with contextlib.suppress(ValueError):
            while (batch := self._in_queue.get()) is not None:
                self._update_method(self=self, batch=batch)
                self._agg_event.set()


def test_a_learners_thread_learns_all_it_was_given_before_the_bytes_leave_and_nothing_after() -> None:
    thread = LearnerThread()
    thread.start()
    gate = ThreadGate(thread)
    gate.close()
    for first in (1, 4):
        thread.on_device = True
        gate.open()
        thread.update(first, first + 1, first + 2, wait=False)
        gate.close()
        thread.on_device = False
    assert thread.learnt == [(batch, True) for batch in range(1, 7) for _ in range(2)]
    thread.update(7, wait=False)
    thread.stopped = True
    thread.join(300)
    assert not thread.is_alive()
    assert len(thread.learnt) == 12


@pytest.mark.parametrize("before", [(), (1, 2)])
def test_an_update_that_raises_ends_the_wait_for_it_and_is_said(before: tuple[int, ...]) -> None:
    thread = LearnerThread()
    thread.start()
    gate = ThreadGate(thread)
    thread.update(*before, -1)
    with pytest.raises(RlixError, match="learner thread failed, and ended it"):
        thread.update(3)  # which nobody would learn from
    with pytest.raises(RlixError, match="learner thread failed, and ended it"):
        gate.close()


def test_a_learners_thread_that_hangs_is_not_waited_for_for_ever() -> None:
    thread = LearnerThread()
    thread.goes_on.clear()
    thread.start()
    gate = ThreadGate(thread, drain_timeout_s=0.01)
    thread.update(1, 2, wait=False)
    with pytest.raises(WaitTimeoutError, match="has not learnt from all it was handed over"):
        gate.close()
    thread.goes_on.set()
