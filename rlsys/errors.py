"""One exception class per decision that somebody takes on it.

The failure policy reads the class, never the text. The text names what is wrong, where, and the remedy; it is what a
user sees, without a traceback, when the run ends on it.
"""

from __future__ import annotations


class RlsysError(Exception):
    """Anything rlsys says about itself. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(RlsysError):
    """The configuration is wrong. Lists every problem at once."""

    exit_code = 2


class DataError(RlsysError):
    """A data file cannot be read or a row cannot be used. Names file and line."""

    exit_code = 2


class ModelError(RlsysError):
    """A model path does not exist or holds nothing that loads."""

    exit_code = 2


class CannotScore(RlsysError):
    """A reward function cannot judge a completion: that one fails, with this text as the reason. For users' functions
    too."""


class CheckpointError(RlsysError):
    """A checkpoint could not be written or read. What was saved before is untouched."""


class WorkerError(RlsysError):
    """Something happened to one worker while it did one thing. `worker` is its name, `phase` what it was doing."""

    def __init__(self, worker: str, phase: str, detail: str) -> None:
        super().__init__(f"{worker} while {phase}: {detail}")
        self.worker, self.phase, self.detail = worker, phase, detail

    def __reduce__(self):  # noqa: ANN204  (exceptions cross process borders)
        return type(self), (self.worker, self.phase, self.detail)


class WorkerDied(WorkerError):
    """The worker's process is gone. It can be restarted; its unfinished work is issued again."""


class DeadlineExceeded(WorkerError):
    """The worker did not answer in time. It is treated as dead."""


class WeightsMismatch(WorkerError):
    """The worker holds weights other than those published. Its tokens must not be trained."""


class PayloadLost(RlsysError):
    """The bytes of finished groups are gone with the node that held them: those groups are issued again."""

    def __init__(self, group_ids: tuple[int, ...]) -> None:
        groups = ", ".join(map(str, group_ids))
        super().__init__(f"the bytes of group {groups} are gone with the node that held them")
        self.group_ids = group_ids

    def __reduce__(self):  # noqa: ANN204  (exceptions cross process borders)
        return type(self), (self.group_ids,)


class WorkflowError(WorkerError):
    """The user's workflow, or code it called, raised. A bug to fix, not a failure to retry."""


class ToolError(RlsysError):
    """A tool or an environment cannot go on, for a reason that is not the policy's (its server is gone, for instance).
    The episode fails, and is left out of training; others go on. For users' tools and environments too."""


class SandboxError(RlsysError):
    """A program cannot be run in the guards asked for on this machine: nothing was run. A setting to change."""


class TaskTooLong(WorkerError):
    """A prompt does not fit the limit. The task is dropped and counted."""


class NothingToTrain(RlsysError):
    """Too few episodes of a group could be scored to give any of them an advantage. The group is dropped and
    counted."""


class NoSignal(RlsysError):
    """Groups were scored, and there is nothing to learn in them. They are dropped and counted, but nothing failed."""


class RunAborted(RlsysError):
    """The failure policy ended the run; the message holds the last failure."""


class TrainingError(RlsysError):
    """The step itself went wrong (NaN in a loss or gradient). `update` is the optimizer update of the step in which it
    did, from 0; None if it was in none."""

    def __init__(self, message: str, update: int | None = None) -> None:
        super().__init__(message)
        self.update = update

    def __reduce__(self):  # noqa: ANN204  (exceptions cross process borders)
        return type(self), (str(self), self.update)


class NoProgress(RlsysError):
    """Nothing moved for too long. The message holds a table of what is pending and where."""


class Interrupted(RlsysError):
    """The user asked to stop, by `signal`; the step in hand was finished and saved."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal


def first_of(errors: BaseExceptionGroup) -> BaseException:
    """The first error of a group, however deep it is nested: what ended the others."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
