"""`rlix.attach`: plain scripts as jobs, on a real Ray."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import rlix
from rlix.cli.programs import progress_line
from rlix.control.program import Program, _on_uncaught, attach
from rlix.control.rollout_lease import Granted, Taken
from rlix.node.device_lock import holder
from rlix.protocol.errors import DeadlockError, RlixError, SpecError
from rlix.protocol.messages import Progress
from rlix.protocol.types import Phase
from tests.control.conftest import MakeJob
from tests.control.test_pipelines import ask
from tests.waiting import until

pytestmark = pytest.mark.ray


@pytest.fixture
def program(ray_session: Any) -> Iterator[Program]:
    with attach("my script", gpus=2) as job:
        yield job


def test_a_phase_holds_the_devices_and_their_locks(
    program: Program, ray_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {device.id: device.key for device in ask(ray_session.devices.remote())}
    with program.phase(Phase.ACTOR_TRAINING) as lease:
        assert len(lease.devices) == 2
        found = [holder(keys[device]) for device in lease.devices]
        assert [record.fence.epoch for record in found if record] == [lease.epoch] * 2
        status = ask(ray_session.status.remote())
        assert [process.pid for process in status.holders[lease.epoch]] == [program.client.process.pid]
        assert [p.name for p in status.pipelines if p.pipeline_id == program.pipeline_id] == ["my script"]
        program.metrics(step=3, steps=9, loss=np.float32(0.5), reward=1, note="x", wrong=float("nan"), done=True)
        (told,) = [p.progress for p in ask(ray_session.status.remote()).pipelines if p.name == "my script"]
        assert told == Progress(3, 9, {"loss": 0.5, "reward": 1.0})
        assert progress_line(told) == ", step 3/9, reward 1, loss 0.5"
        for wrong_one in (Progress(-1), Progress(1, 0, {"a": float("nan")}), Progress(1, 0, {"a": "b"}), "5"):  # type: ignore[dict-item]
            with pytest.raises(SpecError, match=r"a progress needs|finite numbers"):
                program.client._ask("report_progress", wrong_one)
        with program.phase(Phase.CRITIC_TRAINING) as inner:
            assert set(inner.devices).isdisjoint(lease.devices)
        kept, given = lease.devices
        for wrong in ((), (given, given), lease.devices, (99,)):
            with pytest.raises(SpecError, match="a part may be given back before the phase ends, not"):
                program.give_back(lease, wrong)
        with pytest.raises(SpecError, match="give its bundle back as a whole"):
            program.give_back(replace(lease, phase=Phase.ROLLOUT), [given])
        assert all(holder(keys[device]) for device in lease.devices)  # what is refused changes nothing
        rest = program.give_back(lease, [given])
        assert (rest.devices, rest.epoch) == ((kept,), lease.epoch)
        assert [s.lease for s in program.client.leases()] == [rest]
        with monkeypatch.context() as gone:
            gone.setattr(program.client, "devices", dict)  # with their nodes
            program._locks.drop_part(lease, [kept])
        assert [holder(keys[device]) is None for device in (kept, given)] == [False, True]
    assert [holder(keys[device]) for device in lease.devices] == [None, None]


def test_a_phase_that_only_has_what_its_own_thread_holds_is_refused(ray_session: Any) -> None:
    with attach("my script", gpus=2, stay=True) as job, job.phase(Phase.ACTOR_TRAINING) as lease:
        assert len(lease.devices) == 2
        with pytest.raises(DeadlockError), job.phase(Phase.CRITIC_TRAINING):
            raise AssertionError("granted to who holds it")


def test_a_rollout_comes_and_goes(program: Program, make_job: MakeJob) -> None:
    with program.rollout(demand=100) as rollout:
        granted = []
        while len(granted) < 8:
            granted += [change.lease for change in rollout.poll(5.0) if isinstance(change, Granted)]
        assert rollout.devices == tuple(range(8))
        trainer = make_job({"actor_train": [3]})
        waiting = trainer.ask("actor_train", Phase.ACTOR_TRAINING)
        (taken,) = [change for change in rollout.poll(300.0) if isinstance(change, Taken)]
        assert taken.lease.devices == (3,)
        assert 3 not in rollout.devices
        rollout.give_back(taken.lease)
        with pytest.raises(RlixError, match="a rollout of actor_infer is open already"):
            program.rollout()
        trainer.client.release(waiting.result(300))
    assert program.client.leases() == ()


def test_wrong_sizes_and_names_are_refused(ray_session: Any) -> None:
    with pytest.raises(SpecError, match="say either gpus=8, or gangs="):
        attach("x")
    with pytest.raises(SpecError, match="say either gpus=8, or gangs="):
        attach("x", gangs={})
    with pytest.raises(SpecError, match="named as gangs and as rollouts"):
        attach("x", gangs={"a": 1}, rollouts={"a": 1})
    with pytest.raises(
        SpecError, match=r"^job 'x': cluster 'actor_train': devices: asks for 99999999 devices, and this"
    ):
        attach("x", gpus=99999999)
    with pytest.raises(SpecError, match="gangs must be a dict by cluster"):
        attach("x", gangs=["a"])  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="a job has at most 64 clusters, and 65 are named"):
        attach("x", gangs={f"g{i}": 1 for i in range(64)}, rollouts={"r": None})
    for name in ("", "two\nlines", "x" * 100_000, 3):
        with pytest.raises(SpecError, match=r"1 to 64 printable characters, got .{1,80}$"):
            attach(name, gpus=1)  # type: ignore[arg-type]
    job = attach("x", gangs={"left": 1, "right": 1})
    for phase in ("ACTOR_TRAINING", 1, None):
        with pytest.raises(SpecError, match=r"one of rlix\.Phase, as Phase\.ACTOR_TRAINING"), job.phase(phase, "left"):  # type: ignore[arg-type]
            pass
    for timeout_s in (0, -1, float("nan"), float("inf"), "x"):
        wrong: Any = timeout_s
        with (
            pytest.raises(SpecError, match="timeout_s must be seconds above 0"),
            job.phase(Phase.ACTOR_TRAINING, "left", timeout_s=wrong),
        ):
            pass
    with pytest.raises(SpecError, match=r"has 2 gangs \(left, right\): say which"), job.phase(Phase.ACTOR_TRAINING):
        pass
    job.close()


SCRIPT = """
    import sys, rlix
    from rlix import Phase
    job = rlix.attach("other script", gpus=8)
    with job.phase(Phase.ACTOR_TRAINING) as lease:
        print("holding", lease.devices, flush=True)
        sys.stdin.readline()
"""


ENDING = """
    import os, signal, sys, rlix
    from rlix import Phase
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job = rlix.attach("ending", gpus=1)
    held = job.phase(Phase.INITIALIZATION)  # and never given back
    held.__enter__()
    rollout = job.rollout(demand=1)
    while not rollout.poll(5.0):
        pass
"""
ENDS = {
    "": 0, "raise ValueError('no')": 1, "sys.exit(3)": 3, "os._exit(4)": 4, "os.kill(os.getpid(), signal.SIGINT)": 130,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
}  # fmt: skip


@contextlib.contextmanager
def start(folder: Path, script: str = SCRIPT) -> Iterator["subprocess.Popen[str]"]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    environment = {name: value for name, value in os.environ.items() if name.startswith(("RAY_", "RLIX_", "HOME"))}
    environment |= {"PYTHONPATH": str(Path(rlix.__file__).parent.parent), "PATH": "/usr/bin:/bin"}
    environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    command = [sys.executable, str(path)]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment, text=True, **streams) as running:  # type: ignore[call-overload]
        try:
            yield running
        finally:
            running.kill()


def test_ctrl_c_in_the_queue_is_one_line(make_job: MakeJob, ray_session: Any, tmp_path: Path) -> None:
    with (
        make_job({"actor_train": [0]}).client.phase("actor_train", Phase.ACTOR_TRAINING, timeout_s=300),
        start(tmp_path) as script,
    ):
        while not any(wait.cluster == "actor_train" for wait in ask(ray_session.status.remote()).waiting):
            assert script.poll() is None
        script.send_signal(signal.SIGINT)
        said = script.communicate(timeout=300)[1]
    assert "rlix: stopped by Ctrl-C while waiting for actor_train (ACTOR_TRAINING)" in said.splitlines()
    assert "Traceback" not in said
    assert script.returncode == 130


def test_ctrl_c_is_the_exit_code_wherever_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[type[BaseException]] = []
    for error in (KeyboardInterrupt(), KeyboardInterrupt("stopped by Ctrl-C while waiting"), ValueError("no")):
        try:
            _on_uncaught(lambda kind, *_: told.append(kind), type(error), error, None)
        except SystemExit as end:
            assert (end.code, type(error)) == (130, KeyboardInterrupt)
    assert told == [KeyboardInterrupt, ValueError]
    assert capsys.readouterr().err == "rlix: stopped by Ctrl-C while waiting\n"


def test_a_script_that_ends_with_a_lease_is_not_killed_for_it(ray_session: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as running:
        folders = [tmp_path / str(number) for number in range(len(ENDS))]
        for folder in folders:
            folder.mkdir()
        scripts = [
            running.enter_context(start(folder, f"{ENDING}    {end}\n"))
            for folder, end in zip(folders, ENDS, strict=True)
        ]
        said = [script.communicate(timeout=300)[1] for script in scripts]
    assert [script.returncode for script in scripts] == list(ENDS.values()), said
    assert ["Traceback" in each for each in said] == [False, True, False, False, True, False]
    assert "SIGTERM" not in said[-1]  # Ray's page with a stack
    until(
        lambda: "ending" not in [p.name for p in ask(ray_session.status.remote()).pipelines],
        "the pool still has a job whose script has ended",
    )
    killed = [ending.why for ending in ask(ray_session.status.remote()).endings if ending.job == "ending"]
    assert len(killed) == 2, killed  # by its own `os._exit`, and by the signal


def test_a_script_that_is_killed_leaves_nothing_behind(make_job: MakeJob, ray_session: Any, tmp_path: Path) -> None:
    """One that returns is in `tests/integrations/test_trl_script.py`."""
    with start(tmp_path) as script:
        assert script.stdout is not None
        assert "holding (0, 1, 2, 3, 4, 5, 6, 7)" in script.stdout.readline()
        waiting = make_job({"actor_train": [0]}).ask("actor_train", Phase.ACTOR_TRAINING)
        script.kill()
        assert waiting.result(300).devices == (0,)
        assert script.wait(300) == -signal.SIGKILL
    assert "other script" not in [p.name for p in ask(ray_session.status.remote()).pipelines if not p.ending]


def test_a_thread_that_should_read_a_rollouts_changes_may_not_wait_for_a_gang(program: Program) -> None:
    with program.rollout(demand=100) as rollout:
        while not rollout.devices:
            rollout.poll(5.0)
        with pytest.raises(DeadlockError, match="while nobody reads the changes of actor_infer, which holds devices"):
            program.phase(Phase.ACTOR_TRAINING).__enter__()
