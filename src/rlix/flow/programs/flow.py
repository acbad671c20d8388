"""`Flow`: parts that are started in one call: attached to the pool, measured where nothing is known, planned, and run.

class Guess(FlowWorker):
    def run(self, items): ...

class Judge(FlowWorker):
    def run(self, guesses): ...

print(Flow("guess", [Guess, Judge]).run(range(64), gpus=2))
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rlix.control.program import Program, attach
from rlix.control.run_record import Kind, RunRecord
from rlix.control.settings import Settings
from rlix.flow.planner import Mode, Plan
from rlix.flow.profiler.measure import Grid, profile
from rlix.flow.profiler.profile import Profile, halves, path_of
from rlix.flow.programs.checks import check_plan_name
from rlix.flow.programs.rollouts import Rollouts, asked
from rlix.flow.programs.running import Running
from rlix.flow.programs.wiring import Wiring
from rlix.protocol.errors import SpecError

logger = logging.getLogger(__name__)

GANG = "flow"
BATCHES = 4
"""Of a step, the smallest batch that a part is measured with unasked."""
_importing: ContextVar[bool] = ContextVar("importing", default=False)


@contextmanager
def importing() -> Iterator[None]:
    """While a flow's file is imported, no flow starts: its workers import the file, too, and would start it again."""
    token = _importing.set(True)
    try:
        yield
    finally:
        _importing.reset(token)


class Flow(Wiring):
    """`run` for one step, `start` for many. Arguments and errors as of `Wiring`."""

    def start(
        self,
        gpus: int,
        *,
        like: Sequence[Any] | None = None,
        plan: Plan | Mode | str = "auto",
        device_bytes: float | None = None,
        timeout_s: float = 600.0,
        runs_dir: Path | str | None = None,
    ) -> Running:
        """Joins the pool, or starts one, as a job with `gpus` devices, and starts every part where the plan says.

        Where no table of this kind of machine fits the parts, they are measured first, which the log says, and the
        tables are kept. `plan="collocated"` needs none: what is not known is not asked for. Closing what this returns
        leaves the pool.

        Args:
            gpus: how many devices of the pool; which ones, the pool chooses, and the flow stays there.
            like: items of a step: how many there are and what parts are measured with, where the flow does not say.
            plan: "auto" (the fastest), "collocated", "disaggregated", "hybrid", or a plan.
            device_bytes: memory of a device, which decides whose states may stay; default: as measured.
            timeout_s: of each wait for a part.
            runs_dir: where the run folder goes, which has the flow's name; default: RLIX_RUNS_DIR, else "runs".

        Raises what `rlix.attach`, `rlix.flow.profile` and `Running` raise.
        """
        if _importing.get():
            raise SpecError(f'flow {self.name} is started; move that under `if __name__ == "__main__":`')
        _show()
        flow = self.like(like)
        wanted = check_plan_name(self.name, plan)
        flow.items  # noqa: B018 (who has not said how many waits for no devices)
        job = attach(self.name, gangs={GANG: gpus}, stay=True, **asked(flow, gpus))
        record: RunRecord | None = None
        try:
            devices = job.devices(GANG)
            known = None if isinstance(plan, Plan) else kept(flow, len(devices))
            if wanted is Mode.COLLOCATED and known is None:
                plan = flow.unmeasured(len(devices))
            elif known is None and not isinstance(plan, Plan):
                logger.info("flow %s: no table fits; its parts are measured on %d device(s)", self.name, len(devices))
                known = measured(flow, job, timeout_s)
                logger.info("%s\n  kept in %s", known.describe(), path_of(Settings.from_env().home, self.name))
            runs = Path(runs_dir or os.environ.get("RLIX_RUNS_DIR") or "runs")
            record = RunRecord(job, Kind("flow", {}), runs, GANG)
            how: dict[str, Any] = {"device_bytes": device_bytes, "timeout_s": timeout_s, "record": record}
            how["rollouts"] = Rollouts(job.client, record.folder)
            running = Running(flow, devices, plan=plan, profile=known, job=job, cluster=GANG, leaves=True, **how)
        except BaseException as error:  # raised again; nobody has anything to close then
            if record is not None:
                record.broken(error)
                record.close()
            job.close()
            raise
        logger.info("flow %s: %s", self.name, running.plan.explain())
        return running

    def run(self, items: Sequence[Any], gpus: int, **how: Any) -> list[Any]:
        """One step, and what its last part made of these items; `how` and errors as of `start` and `Running.step`."""
        with self.start(gpus, like=items, **how) as running:
            return running.step(items)


def _show() -> None:
    """A script that has set up no logging is told all the same."""
    library = logging.getLogger("rlix.flow")
    if not library.hasHandlers():
        library.addHandler(logging.StreamHandler())
        library.setLevel(logging.INFO)


def kept(flow: Wiring, devices: int) -> Profile | None:
    """The tables of this kind of machine, if they fit the flow's parts and so many devices."""
    try:
        known = Profile.read(path_of(Settings.from_env().home, flow.name))
    except SpecError:
        return None
    return known if flow.fits(known, devices) else None


def measured(flow: Wiring, job: Program, timeout_s: float, grid: Grid | None = None) -> Profile:
    """Measures the parts on the job's gang, and keeps the tables."""
    devices = job.devices(GANG)
    grid = grid or Grid(halves(len(devices)), halves(flow.items, flow.items // BATCHES), repeats=1)
    found = profile(flow, devices, grid, job=job, cluster=GANG, timeout_s=timeout_s)
    found.write(path_of(Settings.from_env().home, flow.name))
    return found
