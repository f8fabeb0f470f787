"""Tasks of groups: an exactly-once record of them, and their selection by the outcomes of earlier episodes.

`Ledger` knows the task of each group, and the groups that are neither consumed nor dropped. Those are reissued after a
resume, or when their payload is lost, under the same group id and so with the same sampling seeds. An interrupted run
therefore consumes the same multiset of tasks as an uninterrupted one.

`Curriculum` selects tasks (DART, arXiv:2509.23866):

    a task that mostly succeeds gets fewer episodes                           `fewer_above`
    a task that nearly always succeeds or fails is skipped for a while        `success_within`, `look_again`
    a stored success replaces one episode of a group without a success        `stored_successes`
    episodes are not much longer than the longest success of their task       `length_cap`
    sources of data are drawn by what their groups teach                      `source_weights`

Its decisions use the groups that were scored, and trained or dropped, when the newest step was published. With
`max_staleness: 0` all issued groups are settled before the next step, so decisions do not depend on timing. A reissued
group keeps its first size.

The history of a task is two counts, and is in the checkpoint. Stored successes are references to payloads; a resumed
run starts without them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, PlainSerializer

from rlsys.config.sections import CurationSection, fewer
from rlsys.contracts import Graft
from rlsys.data.task_mixture import TaskMixture
from rlsys.data.task_source import Cursor, SourceState, Tasks, TasksState
from rlsys.errors import RunAborted
from rlsys.types import Assignment, EpisodeMeta, Group, GroupKey, PolicyVersion, Task
from rlsys.util.deviation import deviation
from rlsys.util.seeds import group_seed

SIGNAL_GROUPS = 30
"""Groups over which the signal of a source is averaged."""
FIRST_GROUPS = 4
"""Groups of a source before its signal counts."""
LEAST_FACTOR = 0.1
"""Least factor of the weight of a source."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a task's earlier episodes."""

    num_successes: int
    num_episodes: int
    """Scored episodes; an episode that failed for a reason other than the policy counts in no rate."""
    num_passed: int = 0
    """Times the task was skipped since its last rollout."""
    longest_success: int = 0
    """Sampled tokens of the longest success; 0 without one."""

    @property
    def rate(self) -> float:
        """Success rate, 0 to 1."""
        return self.num_successes / self.num_episodes


@dataclass(frozen=True, slots=True)
class TallyUpdate:
    """Counts that one scored group adds to the tally of its task."""

    task_id: str
    num_successes: int
    num_episodes: int
    source: str = ""
    signal: float = 0.0
    """Standard deviation of its rewards."""
    longest_success: int = 0
    """Sampled tokens of its longest success; 0 without one."""


@dataclass(frozen=True, slots=True)
class SourceSignal:
    """Mean signal of the groups of a source, of which the newest weigh most."""

    signal: float = 0.0
    num_groups: int = 0

    def then(self, signal: float) -> SourceSignal:
        """The signal after one more group: a mean of the first `SIGNAL_GROUPS`, exponential from there on."""
        num = self.num_groups + 1
        return SourceSignal(self.signal + (signal - self.signal) / min(num, SIGNAL_GROUPS), num)


@dataclass(frozen=True, slots=True)
class CurriculumState:
    """Task histories of the curriculum, as in a checkpoint."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    """By task id."""
    scored: dict[int, TallyUpdate] = field(default_factory=dict)
    """By id of a group that is not settled."""
    settled: list[TallyUpdate] = field(default_factory=list)
    """Counts of groups settled since the newest step was published."""
    signals: dict[str, SourceSignal] = field(default_factory=dict)
    """By source of data."""


@dataclass(frozen=True, slots=True)
class _Success:
    """Best episode of a group, kept with the group's whole payload."""

    group: Group
    episode: int
    moment: int
    """Number of published steps when it was scored."""


class Curriculum:
    """Task histories, stored successes, and the decisions based on them. Belongs to one ledger; does no I/O."""

    def __init__(self, rules: CurationSection | None = None) -> None:
        """Without rules, curate nothing and keep nothing."""
        self.rules = rules or CurationSection()
        self.num_smaller = 0
        """Groups with fewer episodes than the group size."""
        self.num_passed_over = 0
        """Times that a task was skipped."""
        self.num_grafted = 0
        """Groups that received a stored success."""
        self.num_too_old = 0
        """Groups without a success whose stored success is older than the staleness bound allows."""
        self._history = CurriculumState()
        self._successes: OrderedDict[str, _Success] = OrderedDict()
        """By task id, the least recently stored or used first."""
        self._moment = 0
        """Steps published in this session."""

    # ----------------------------------------------------------------------------------------------------------- issue

    def passes_over(self, task_id: str) -> bool:
        """Return True if the next task is to be skipped this time, and count it."""
        rules, tally, tallies = self.rules, self._known(task_id), self._history.tallies
        low, high = rules.success_within
        if tally is None or low <= tally.rate <= high:
            return False
        if rules.look_again and tally.num_passed >= rules.look_again:
            del tallies[task_id]
            if tally.longest_success:
                tallies[task_id] = Tally(0, 0, longest_success=tally.longest_success)
            return False
        tallies[task_id] = replace(tally, num_passed=tally.num_passed + 1)
        self.num_passed_over += 1
        return True

    def size_of(self, task_id: str, group_size: int) -> int | None:
        """Return the size of a new group if it is below `group_size`, else None. Counts smaller groups."""
        tally, bound = self._known(task_id), self.rules.fewer_above
        if tally is None or bound is None or tally.rate <= bound:
            return None
        self.num_smaller += 1
        return fewer(group_size)

    def token_limit(self, task_id: str) -> int | None:
        """Return the most tokens that an episode of a new group may sample; None: no limit by task."""
        tally, cap = self._history.tallies.get(task_id), self.rules.length_cap
        if tally is None or cap is None or not tally.longest_success:
            return None
        return ceil(cap * tally.longest_success)

    def _known(self, task_id: str) -> Tally | None:
        """Return the tally of a task if it has enough episodes, else None."""
        tally = self._history.tallies.get(task_id)
        return tally if tally is not None and tally.num_episodes >= self.rules.min_episodes else None

    # ----------------------------------------------------------------------------------------------------------- score

    def scored(self, group: Group) -> None:
        """Record the scores of an open group; they replace those of an earlier attempt."""
        rewards = group.rewards()
        if self.rules.needs_history:
            num_successes = sum(self._is_success(reward) for reward in rewards.values())
            signal = deviation(rewards.values(), is_sample=False) if len(rewards) > 1 else 0.0
            successes = (group.episodes[e] for e, reward in rewards.items() if self._is_success(reward))
            lengths = map(num_sampled, successes) if self.rules.length_cap is not None else ()
            self._history.scored[group.group_id] = TallyUpdate(
                group.task_id, num_successes, len(rewards), group.source, signal, max(lengths, default=0)
            )
        if self.rules.stored_successes and rewards:
            best = max(rewards, key=lambda episode: rewards[episode])
            if self._is_success(rewards[best]):
                self._successes[group.task_id] = _Success(replace(group, columns={}), best, self._moment)
                self._successes.move_to_end(group.task_id)
                if len(self._successes) > self.rules.stored_successes:
                    self._successes.popitem(last=False)

    def graft_for(self, group: Group, oldest_in_time: Callable[[int], PolicyVersion]) -> Graft | None:
        """Return a graft for a scored group without a success; None if it has one, or no graft is possible.

        The stored success was scored before the newest step was published. It replaces an unscored episode, or else the
        first episode with the lowest reward. At least one scored episode remains beside it. None of its tokens may be
        older than version `oldest_in_time(group_id)`, less `stored_staleness`. An older success counts as too old, and
        stays stored for other groups.
        """
        success, rewards = self._successes.get(group.task_id), group.rewards()
        if success is None or success.moment == self._moment or any(map(self._is_success, rewards.values())):
            return None
        lost = [episode for episode in range(len(group.episodes)) if episode not in rewards]
        if not rewards or (not lost and len(rewards) < 2):
            return None
        oldest = oldest_in_time(group.group_id)
        if success.group.oldest_version < oldest - self.rules.stored_staleness:
            self.num_too_old += 1
            return None
        self._successes.move_to_end(group.task_id)
        worst = lost[0] if lost else min(rewards, key=lambda episode: rewards[episode])
        return Graft(group, worst, success.group, success.episode, success.group.oldest_version < oldest)

    def lose(self, group_id: int, task_id: str) -> None:
        """Discard the scores of an open group whose payload is lost; the group is reissued."""
        self._history.scored.pop(group_id, None)
        self.forget(group_id, task_id)

    def forget(self, group_id: int, task_id: str) -> None:
        """Remove the stored success of a group whose payload is lost."""
        success = self._successes.get(task_id)
        if success is not None and success.group.group_id == group_id:
            del self._successes[task_id]

    def _is_success(self, reward: float) -> bool:
        return reward >= self.rules.success_reward

    # ---------------------------------------------------------------------------------------------------------- settle

    def settle(self, group_id: int) -> None:
        """Settle a trained or dropped group: its scores count once the next step is published."""
        if (tally_update := self._history.scored.pop(group_id, None)) is not None:
            self._history.settled.append(tally_update)

    def publish(self) -> None:
        """Add the scores of all settled groups to the tallies, when a step is published."""
        tallies = self._history.tallies
        for new in self._history.settled:
            before = tallies.get(new.task_id, Tally(0, 0))
            num_successes = before.num_successes + new.num_successes
            longest = max(before.longest_success, new.longest_success)
            num_episodes = before.num_episodes + new.num_episodes
            tallies[new.task_id] = Tally(num_successes, num_episodes, longest_success=longest)
        if self.rules.follows_signal:
            signals = self._history.signals
            for new in sorted(self._history.settled, key=lambda settled: settled.signal):  # not as they happened to end
                signals[new.source] = signals.get(new.source, SourceSignal()).then(new.signal)
        self._history.settled.clear()
        self._moment += 1

    def factors(self, sources: Iterable[str]) -> dict[str, float]:
        """Return the factors of the weights of sources: the signal of each over the largest, at least `LEAST_FACTOR`,
        so that none is lost sight of; 1 for one of fewer than `FIRST_GROUPS` groups."""
        known = {name: found for name, found in self._history.signals.items() if found.num_groups >= FIRST_GROUPS}
        largest = max((found.signal for found in known.values()), default=0.0)
        return {
            name: max(LEAST_FACTOR, known[name].signal / largest) if name in known and largest else 1.0
            for name in sources
        }

    # ----------------------------------------------------------------------------------------------- metrics and state

    def metrics(self) -> dict[str, float]:
        """Return the counters of the enabled rules, by full metric name."""
        found: dict[str, float] = {}
        if self.rules.fewer_above is not None:
            found["curation/smaller_groups"] = self.num_smaller
        if self.rules.is_selective:
            found["curation/passed_over"] = self.num_passed_over
        if self.rules.stored_successes:
            found["curation/grafted"] = self.num_grafted
            found["curation/too_old"] = self.num_too_old
            found["curation/stored"] = len(self._successes)
        return found

    def state(self) -> CurriculumState:
        """Return the state for a checkpoint."""
        return deepcopy(self._history)

    def restore(self, state: CurriculumState, finished: Collection[int]) -> None:
        """Restore `state`. Scores of groups outside `finished` are discarded, since those are rolled out again."""
        self._history = deepcopy(state) if self.rules.needs_history else CurriculumState()
        for group_id in self._history.scored.keys() - set(finished):
            del self._history.scored[group_id]


def num_sampled(episode: EpisodeMeta) -> int:
    """Return the tokens that the policies sampled in an episode."""
    return sum(sample.num_trained for trajectory in episode.trajectories for sample in trajectory.samples)


@dataclass(frozen=True, slots=True)
class TaskDraw:
    """Draw of a task from the source, and the decisions of curation on its group."""

    task_id: str
    cursor: Cursor
    """Position of the task in the source, to draw it again."""
    size: int | None = None
    """Episodes, if curation gave it fewer than the group size; a reissued group keeps its size."""
    token_limit: int | None = None
    """Most tokens that an episode may sample, if curation limits it; a reissued group keeps its limit."""


def _from_rows(rows: Any) -> dict[Any, Any]:  # noqa: ANN401  (the parsed JSON of any file)
    """Return the rows of a checkpoint by their `group_id`."""
    try:
        draws = {row["group_id"]: row for row in rows}
    except (TypeError, LookupError) as error:
        raise ValueError(f"the pending groups are not rows with a group_id: {error!r}") from error
    if len(draws) < len(rows):
        raise ValueError("a pending group is listed twice")
    return draws


def _to_rows(draws: dict[int, TaskDraw]) -> list[dict[str, Any]]:
    return [{"group_id": group_id, **asdict(draw)} for group_id, draw in draws.items()]


TaskDraws: TypeAlias = Annotated[dict[int, TaskDraw], BeforeValidator(_from_rows), PlainSerializer(_to_rows)]
"""Draws by group id; in a checkpoint, rows that begin with their `group_id`."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Ledger state in a checkpoint."""

    fingerprint: str
    """Hash of the task source: a cursor is valid only for the same data."""
    cursor: Cursor
    next_group_id: int
    num_consumed: int
    pending: TaskDraws
    """Draws of issued groups that are neither consumed nor dropped, oldest first."""
    curation: CurriculumState = field(default_factory=CurriculumState)
    """Empty in checkpoints older than this key."""
    sources: dict[str, SourceState] = field(default_factory=dict)
    """By name, if there are several; `fingerprint` and `cursor` are then empty."""


@dataclass
class Ledger:
    """Draws the tasks of groups, and counts each of them once."""

    source: Tasks
    group_size: int
    seed: int
    curation: Curriculum = field(default_factory=Curriculum)
    """Decides which tasks are issued, and the sizes of their groups."""
    next_group_id: int = 0
    num_consumed: int = 0
    open: dict[int, TaskDraw] = field(default_factory=dict)
    """By id of an issued group that is neither settled nor to be reissued."""
    _again: list[tuple[int, TaskDraw]] = field(default_factory=list)
    """Heap of groups to reissue, by group id."""

    def issue(self, version: PolicyVersion) -> Assignment:
        """Return the next assignment: lost groups and open groups of an earlier session first, oldest first, then new
        tasks. Each is a first attempt; the queue counts the later ones.

        Raises `RunAborted` if curation leaves no task to issue.
        """
        if self._again:
            group_id, draw = heapq.heappop(self._again)
        else:
            cursor, task = self._draw()
            size = self.curation.size_of(task.id, self.group_size)
            group_id, draw = self.next_group_id, TaskDraw(task.id, cursor, size, self.curation.token_limit(task.id))
            self.next_group_id += 1
        self.open[group_id] = draw
        return self.assignment(GroupKey(group_id, 1), draw, version)

    def assignment(self, key: GroupKey, draw: TaskDraw, version: PolicyVersion) -> Assignment:
        """Return the assignment for a permit of `version`."""
        task, seed = self.source.at(draw.cursor), group_seed(self.seed, key.group_id)
        size, limit = draw.size or self.group_size, draw.token_limit
        return Assignment(key, task, size, version, seed, token_limit=limit)

    def _draw(self) -> tuple[Cursor, Task]:
        """Draw the next task that curation does not skip; return its position and the task. Raises `RunAborted`.

        An epoch may begin anywhere in these draws, so every task comes up at least `look_again` + 1 times. Only with
        `look_again` 0 can all tasks be skipped every time.
        """
        for _ in range((self.curation.rules.look_again + 2) * len(self.source)):
            cursor = self.source.cursor
            task = self.source.next()
            if not self.curation.passes_over(task.id):
                return cursor, task
        low, high = self.curation.rules.success_within
        raise RunAborted(
            f"the success rate of every task ({len(self.source)} of them) is below {low:g} or above {high:g}, so that "
            "curation.success_within leaves none to roll out: the policy has learned them all, or they are beyond it. "
            "Take tasks of another difficulty, widen curation.success_within, or set curation.look_again above 0"
        )

    def again(self, group_id: int) -> None:
        """Queue a group whose payload is lost for reissue. Raises `KeyError` if it is not open."""
        draw = self.open.pop(group_id)
        self.curation.lose(group_id, draw.task_id)
        heapq.heappush(self._again, (group_id, draw))

    def consume(self, group_ids: Iterable[int]) -> None:
        """Record groups as trained and published. Raises `KeyError` for a group that is not open."""
        for group_id in group_ids:
            self.drop(group_id)
            self.num_consumed += 1
        self.curation.publish()
        self._weigh()

    def _weigh(self) -> None:
        """Let the weights of the sources follow what they teach, if the rules say so."""
        if self.curation.rules.follows_signal and isinstance(self.source, TaskMixture):
            self.source.multiply(self.curation.factors(self.source.shares))

    def propose(self, episodes: Iterable[EpisodeMeta]) -> None:
        """Add the tasks that trained episodes propose to the source of proposed tasks, if there is one."""
        if isinstance(self.source, TaskMixture):
            for episode in episodes:
                for row in episode.proposals:
                    self.source.propose(row)

    def metrics(self) -> dict[str, float]:
        """Return the figures of curation, by full metric name."""
        found = self.curation.metrics()
        if isinstance(self.source, TaskMixture) and (num := self.source.num_proposed) is not None:
            found["curation/proposed"] = num
        if self.curation.rules.follows_signal and isinstance(self.source, TaskMixture):
            found |= {f"curation/share/{name}": share for name, share in self.source.shares.items()}
        return found

    def drop(self, group_id: int) -> None:
        """Settle a group that was trained or dropped. Raises `KeyError` if it is not open."""
        del self.open[group_id]
        self.curation.settle(group_id)

    def state(self) -> LedgerState:
        """Return the state for a checkpoint."""
        pending, tasks = sorted([*self.open.items(), *self._again]), self.source.state()
        return LedgerState(
            tasks.fingerprint,
            tasks.cursor,
            self.next_group_id,
            self.num_consumed,
            dict(pending),
            self.curation.state(),
            dict(tasks.sources),
        )

    def restore(self, state: LedgerState, finished: Collection[int]) -> list[str]:
        """Restore `state`: the groups `finished` are in the queue again, all other open ones will be reissued.

        Returns what has changed in the tasks since. Raises `DataError` if they are others.
        """
        notes = self.source.restore(TasksState(state.fingerprint, state.cursor, state.sources))
        self.next_group_id, self.num_consumed = state.next_group_id, state.num_consumed
        self.open = {group_id: draw for group_id, draw in state.pending.items() if group_id in finished}
        self.curation.restore(state.curation, finished)
        self._weigh()
        self._again = [each for each in state.pending.items() if each[0] not in finished]  # sorted, so a heap
        return notes
