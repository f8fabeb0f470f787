"""Several runs that search for settings together: who goes on, from whose weights, and with which values.

`pbt` is population-based training (arXiv:1711.09846): every `every` steps all members meet; the worst take the weights,
moments and place in the data of one of the best, and change their values a little. `asha` ends a run early that is not
among the best at its step (arXiv:1810.05934, the rule that stops and never resumes). `random` only compares.

A member meets in its driver, between two steps: no process is started again.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, inf, log
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from pydantic import TypeAdapter, ValidationError

from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.types import PolicyVersion
from rlsys.util.files import write_atomically

Values: TypeAlias = dict[str, float]
"""Values of the searched keys of a configuration, e.g. `{"train.lr": 1e-5}`."""
FACTORS = (0.8, 1.2)
"""A copied value is multiplied by one of these (arXiv:1711.09846, section 4.1.1)."""
FILE = "population.json"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Decision about one member at a meeting."""

    step: int
    """Optimizer steps behind the weights."""
    member: int
    score: float | None
    """None if the member has no finite value of the metric; it is then the worst."""
    values: Values
    """Those it goes on with."""
    parent: int | None = None
    """The member whose checkpoint it goes on from; None: its own weights."""
    checkpoint: str = ""
    """That checkpoint."""
    end: str = ""
    """Reason for which its run ends here; empty if it goes on."""


_HELD = TypeAdapter(list[Meeting])


@dataclass(frozen=True, slots=True)
class Switch:
    """Change that a meeting makes to a running member."""

    end: str = ""
    """Reason to end the run; nothing else is changed then."""
    parent: str = ""
    """Name of the run whose checkpoint is loaded."""
    checkpoint: Path | None = None
    config: Config | None = None
    """Configuration from here on, of which the algorithm and `TrainedModel.retune` take the values; None: the same."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Values of the searched keys in it."""


class Meetings(Protocol):
    """Meetings of one run with the others, as its driver sees them."""

    def is_due(self, step: int) -> bool:
        """Return True if the run meets the others after this step, and has not yet."""

    async def meet(self, step: int, version: PolicyVersion, checkpoint: Path) -> Switch | None:
        """Return what changes; None: nothing. `checkpoint` is that of this step, and complete.

        Waits for all other members to reach the step (`pbt`); unblocked by the last of them reaching it, or ending.
        """


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a searched value; both ends are more than 0."""

    low: float
    high: float

    def drawn(self, generator: random.Random) -> float:
        """Draw a value, uniformly in its logarithm."""
        return exp(generator.uniform(log(self.low), log(self.high)))

    def near(self, value: float, generator: random.Random) -> float:
        """Switch a value by one of `FACTORS`, within the range."""
        return min(self.high, max(self.low, value * generator.choice(FACTORS)))


@dataclass
class Population:
    """The meetings of all members, by index."""

    num_members: int
    search: Literal["pbt", "asha", "random"]
    ranges: Mapping[str, Range]
    every: int
    """Steps between two meetings; of `asha`, up to the first one."""
    share: float
    """Share of the best, and of the worst (`pbt`); share of the runs that go on from a meeting (`asha`)."""
    is_highest_best: bool
    seed: int
    folder: Path
    """Folder for `population.json`, the meetings so far."""
    held: list[Meeting] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = random.Random(f"{self.seed} start")
        self.first = [{k: r.drawn(generator) for k, r in self.ranges.items()} for _ in range(self.num_members)]
        """Values that the members begin with."""
        self._waiting: dict[int, tuple[int, float | None, str]] = {}
        self._gone: set[int] = set()
        self._decided = asyncio.Event()

    def recall(self) -> None:
        """Read the meetings of an earlier session, if there are any. Raises `ConfigError` if they cannot be read."""
        path = self.folder / FILE
        try:
            self.held = _HELD.validate_json(path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; remove {self.folder} to begin anew") from error

    def last(self, member: int) -> Meeting | None:
        """The newest meeting of a member."""
        return next((meeting for meeting in reversed(self.held) if meeting.member == member), None)

    def values(self, member: int) -> Values:
        """The current values of a member."""
        last = self.last(member)
        return self.first[member] if last is None else last.values

    def is_due(self, member: int, step: int) -> bool:
        """Return True if a member meets after this step, and has not yet."""
        last = self.last(member)
        if self.search == "random" or step <= (last.step if last else 0):
            return False
        if self.search == "pbt":
            return step % self.every == 0
        rung = self.every
        while rung < step:
            rung = max(rung + 1, round(rung / self.share))
        return rung == step

    async def meet(self, member: int, step: int, score: float | None, checkpoint: Path) -> Meeting:
        """Return what came of the member's meeting. See `Meetings.meet`."""
        self._waiting[member] = (step, score, str(checkpoint))
        if self.search == "asha":
            self._add([self._rung(member)])
        else:
            self._decide()
        while member in self._waiting:
            self._decided.clear()
            await self._decided.wait()
        meeting = self.last(member)
        assert meeting is not None
        return meeting

    def leave(self, member: int) -> None:
        """Note that a member's run has ended: nobody waits for it."""
        self._gone.add(member)
        self._waiting.pop(member, None)
        if self.search == "pbt":
            self._decide()

    def _decide(self) -> None:
        """Decide for all members, once all that are left wait."""
        if not self._waiting or len(self._waiting) + len(self._gone) < self.num_members:
            return
        ranked = sorted(self._waiting, key=lambda member: (-self._worth(self._waiting[member][1]), member))
        num = min(max(1, round(self.share * len(ranked))), len(ranked) // 2)
        best, worst = ranked[:num], ranked[len(ranked) - num :]
        worths = {member: self._worth(self._waiting[member][1]) for member in ranked}
        held = []
        for member in sorted(ranked):
            step, score, _ = self._waiting[member]
            if member not in worst or worths[member] == worths[best[-1]]:
                held.append(Meeting(step, member, score, self.values(member)))
                continue
            generator = random.Random(f"{self.seed} {member} {step}")
            parent = generator.choice(best)
            values = {key: self.ranges[key].near(value, generator) for key, value in self.values(parent).items()}
            held.append(Meeting(step, member, score, values, parent, self._waiting[parent][2]))
        self._add(held)

    def _rung(self, member: int) -> Meeting:
        """The meeting of a member by the scores that came to this step before it, and its own."""
        step, score, _ = self._waiting[member]
        worths = [self._worth(meeting.score) for meeting in self.held if meeting.step == step]
        worths = sorted([*worths, self._worth(score)], reverse=True)
        num = max(1, int(self.share * len(worths)))
        is_over = self._worth(score) < worths[num - 1]
        end = f"its score {_shown(score)} is not among the best {num} of {len(worths)} runs at step {step}"
        return Meeting(step, member, score, self.values(member), end=end if is_over else "")

    def _worth(self, score: float | None) -> float:
        return -inf if score is None else score if self.is_highest_best else -score

    def _add(self, held: Sequence[Meeting]) -> None:
        self.held += held
        write_atomically(self.folder / FILE, json.dumps([asdict(meeting) for meeting in self.held], indent=1))
        for meeting in held:
            del self._waiting[meeting.member]
        self._decided.set()

    def lineage(self, member: int) -> list[int]:
        """The members whose weights a member's descend from, oldest first: the last is the member itself."""
        line = [member]
        for meeting in reversed(self.held):
            if meeting.member == line[0] and meeting.parent is not None:
                line.insert(0, meeting.parent)
        return line


def _shown(score: float | None) -> str:
    return "(none)" if score is None else f"{score:.4g}"
