"""Errors that cross layers. Each message says what is wrong, where, and what to do."""


class RlixError(RuntimeError):
    """Base of every error RLix raises on purpose."""


class SpecError(RlixError, ValueError):
    """A job, workload or registration is wrong; the message names the field and the fix."""


class PlanError(RlixError):
    """A plan breaks one of the scheduler's rules. Always a bug in a planner, never a user's mistake."""


class StaleEpochError(RlixError):
    """Somebody tried to use a device under a lease that has been revoked since."""


class DeviceBusyError(RlixError):
    """A device's lock is held by somebody else; the message names the processes, their job and since when."""


class DeadlockError(RlixError):
    """Parts of one job hold what others of its parts wait for, in a circle; the message names every link."""


class WaitTimeoutError(RlixError, TimeoutError):
    """A bounded wait expired; the message says what was awaited, for how long, and on whom."""


class PipelineGoneError(RlixError):
    """The pipeline is not registered (any more)."""


class WeightSyncError(RlixError):
    """Published weights and the receiving model disagree on names, shapes or versions."""


class NotResidentError(RlixError):
    """An engine was used while its bytes were not on its device."""


class WorkerError(RlixError):
    """A worker raised or died; the message names its group and rank, `__cause__` is the original error."""
