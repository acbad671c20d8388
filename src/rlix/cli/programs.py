"""Programs that attached themselves, as jobs that can be watched and stopped."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlix.control.rpc import get
from rlix.pipeline.jobs.handle import STOPPED_BY
from rlix.protocol.errors import PipelineGoneError
from rlix.protocol.messages import ControlStatus, PipelineStatus, Progress

if TYPE_CHECKING:
    from rlix.pipeline.jobs.status import JobStatus

Ask = Callable[..., Any]
"""Calls a method of the orchestrator."""
_TIMEOUT_S = 60.0
_FIRST, _SHOWN = ("reward", "exact", "loss", "kl", "entropy", "grad_norm", "learning_rate"), 6
_LEFT = "its program ended"


class AttachedProgram:
    """It has no coordinator and no run folder of ours: what the control plane knows, and was told, is known of it."""

    run_dir: Path | None = None

    def __init__(self, pipeline: PipelineStatus, control: Callable[[], ControlStatus], ask: Ask) -> None:
        self.name = pipeline.name or pipeline.pipeline_id
        self.pipeline_id = pipeline.pipeline_id
        self._control = control
        self._ask = ask
        self._progress = pipeline.progress or Progress(0)

    def status(self) -> "JobStatus":
        """Running for as long as it is registered."""
        from rlix.pipeline.jobs.status import JobStatus

        control, why = self._control(), None
        last = self._progress
        found = [pipeline for pipeline in control.pipelines if pipeline.pipeline_id == self.pipeline_id]
        if found:
            state, phase = "running", _phase(found[0], control)
            self._progress = last = found[0].progress or last
        else:
            why = str(self._ask("why_ended", self.pipeline_id))
            state = phase = "finished" if why == _LEFT else "stopped" if why.startswith(STOPPED_BY) else "failed"
            why = None if state == "finished" else why
        return JobStatus(
            self.name,
            self.pipeline_id,
            state,
            last.step,
            last.steps,
            phase,
            reward=last.metrics.get("reward"),
            exact=last.metrics.get("exact"),
            tokens_per_s=last.metrics.get("tokens_per_s"),
            error=why,
        )

    def stop(self, why: str = STOPPED_BY) -> None:
        """Ends its process: whether there is something to save, only the program knows."""
        with contextlib.suppress(PipelineGoneError):
            self._ask("unregister_pipeline", self.pipeline_id, why)

    close = stop


def find_programs(control: Callable[[], ControlStatus], launched: set[str], ask: Ask) -> list[AttachedProgram]:
    """The pipelines that are no launched job, by their ids, in order of registration."""
    return [AttachedProgram(p, control, ask) for p in control().pipelines if p.pipeline_id not in launched]


def progress_line(progress: Progress | None) -> str:
    """ ", step 12/40, reward 0.5, loss 0.031": what a program says of itself; "" when it says nothing."""
    if progress is None:
        return ""
    names = sorted(progress.metrics, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))[
        :_SHOWN
    ]
    return "".join([f", step {progress.of}", *(f", {name} {progress.metrics[name]:.4g}" for name in names)])


def asking(orchestrator: Any) -> Ask:
    """Calls methods of this actor, within a minute."""

    def ask(method: str, *args: object) -> Any:
        ref = getattr(orchestrator, method).remote(*args)
        return get(ref, what=f"the orchestrator's {method}", timeout_s=_TIMEOUT_S)

    return ask


def _phase(pipeline: PipelineStatus, control: ControlStatus) -> str:
    if pipeline.ending:
        return f"ending: {pipeline.ending}"
    held = [s.lease.phase.name.lower() for s in control.leases if s.lease.pipeline_id == pipeline.pipeline_id]
    waiting = [f"waiting for {cluster}" for cluster in pipeline.waiting]
    return ", ".join(dict.fromkeys([*held, *waiting])) or "idle"
