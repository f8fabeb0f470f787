"""Exceptions of rlsys: one class per decision on a failure.

The failure policy uses the class, never the text. The text names the problem, the place and the remedy; the user sees
it, without a traceback, when it ends the run.
"""

from __future__ import annotations

from functools import partial


class RlsysError(Exception):
    """Base of all errors of rlsys. `exit_code` is the exit status of the command line. A note says what can be resumed;
    see `full_text`."""

    exit_code = 1


class ConfigError(RlsysError):
    """An invalid configuration. The text lists every problem at once."""

    exit_code = 2


class DataError(RlsysError):
    """A data file that cannot be read, or an unusable row. The text names file and line."""

    exit_code = 2


class ModelError(RlsysError):
    """A model path that does not exist or contains no loadable model."""

    exit_code = 2


class CannotScore(RlsysError):
    """A completion that a reward function cannot score: its episode fails with this text as the reason. User functions
    may raise it too."""


class CheckpointError(RlsysError):
    """A checkpoint that could not be written or read. Earlier checkpoints are untouched."""


class ClusterError(RlsysError):
    """A local Ray cluster that did not start. The text names the folder of Ray's logs and the remedies."""


class ClusterLost(ClusterError):
    """Loss of the Ray cluster during its use: of its head, or of this node's raylet. The text names which."""


class WorkerError(RlsysError):
    """Failure of one worker in one phase. `worker` is its name, `phase` its activity."""

    is_reported = False
    """True if an event has told of the failure: code that catches the error emits no second one."""

    def __init__(self, worker: str, phase: str, detail: str) -> None:
        super().__init__(f"{worker} while {phase}: {detail}")
        self.worker, self.phase, self.detail = worker, phase, detail

    def __reduce__(self):  # noqa: ANN204  (exceptions cross process borders)
        return type(self), (self.worker, self.phase, self.detail)


class WorkerDied(WorkerError):
    """Death of the worker's process. It can be restarted; its unfinished work is reissued."""


class CollectiveFailed(WorkerDied):
    """Failure of a collective among ranks of which none is dead. It is treated as a death, once."""


class DeadlineExceeded(WorkerError):
    """A worker that did not answer in time. It is treated as dead."""


class WeightsMismatch(WorkerError):
    """A worker with other weights loaded than those published. Its tokens must not be trained."""


class PayloadLost(RlsysError):
    """Loss of the payloads of finished groups with the node that stored them. These groups are reissued."""

    def __init__(self, group_ids: tuple[int, ...]) -> None:
        groups = ", ".join(map(str, group_ids))
        super().__init__(f"the bytes of group {groups} are gone with the node that held them")
        self.group_ids = group_ids

    def __reduce__(self):  # noqa: ANN204  (exceptions cross process borders)
        return type(self), (self.group_ids,)


class GroupExpired(RlsysError):
    """A group that waited for tokens longer than `limits.group_s`. No worker is at fault: the group is issued again."""


class WorkflowError(WorkerError):
    """An exception in the user's workflow, or in code it called, such as an agent framework. It fails the episode if
    the policy has replied. Before the first reply it fails the group, which is attempted again, then dropped."""


class ToolError(RlsysError):
    """A tool or an environment that cannot go on, for a reason outside the policy, for instance a lost server. The
    episode fails, and is left out of training; others go on. User tools and environments may raise it too."""


BUSY = (408, 429, 503)
"""HTTP statuses of a server that asks to be asked later."""


class EndpointDown(RlsysError):
    """A server reached by URL that does not answer, or asks to be asked later. Its group waits for it, and no task is
    used up. User functions may raise it too. `endpoint` names the server; `is_busy`: it asks to be asked later."""

    def __init__(self, endpoint: str, detail: str, *, is_busy: bool = False) -> None:
        super().__init__(f"{endpoint} does not answer: {detail}")
        self.endpoint, self.detail, self.is_busy = endpoint, detail, is_busy

    def __reduce__(self):  # noqa: ANN204  (exceptions cross process borders)
        return partial(type(self), is_busy=self.is_busy), (self.endpoint, self.detail)


class SandboxError(RlsysError):
    """A program that this machine cannot run under the configured guards: it was not run. A setting to change."""


class TaskTooLong(WorkerError):
    """A prompt over the length limit. The task is dropped and counted."""


class NothingToTrain(RlsysError):
    """A group with too few scored episodes to give any of them an advantage. It is dropped and counted."""


class ZeroAdvantage(RlsysError):
    """Scored groups in which no trajectory has an advantage. They are dropped and counted, but nothing failed."""


class AllTruncated(ZeroAdvantage):
    """A group in which every reply was cut by length, and the algorithm leaves those out."""


class RunAborted(RlsysError):
    """End of the run by the failure policy; the text includes the last failure."""


class TrainingError(RlsysError):
    """A failed step (NaN in a loss or gradient). `update` is the failed optimizer update of the step, from 0; None
    outside any update."""

    def __init__(self, message: str, update: int | None = None) -> None:
        super().__init__(message)
        self.update = update

    def __reduce__(self):  # noqa: ANN204  (exceptions cross process borders)
        return type(self), (str(self), self.update)


class OutOfMemory(TrainingError):
    """A rank ran out of memory in a step. The other ranks wait for it, so no rank can be asked for its state."""


class NoProgress(RlsysError):
    """No progress for too long. The text lists the pending work and its place."""


NOT_SAVED = "which is not saved"
"""In the text of an `Interrupted`, behind a step that is lost."""


class Interrupted(RlsysError):
    """A stop by the user with `signal`; the current step was finished and saved."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal


def full_text(error: BaseException) -> str:
    """Return the text of an error with its notes, one a line."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def first_of(errors: BaseExceptionGroup) -> BaseException:
    """Return the first error of a group, at any depth of nesting: the one that ended the others."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
