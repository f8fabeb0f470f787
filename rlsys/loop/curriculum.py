"""Which tasks are worth rolling out, and how often, by what their earlier episodes came to (DART, arXiv:2509.23866).

    a task that mostly succeeds is given fewer episodes                       `fewer_above`
    one that nearly always or nearly never does is passed over for a while    `within`, `look_again`
    a stored success takes the place of one episode of a group that failed    `stored_successes`

Decisions rest on what was known when the newest step was published: on the groups that were scored, and trained or
dropped, by then. Where all that is issued is settled before the next step (`max_staleness: 0`), they depend on nobody's
speed. A group that is issued again keeps the size it was first given.

The history of a task is two counts, and is in the checkpoint. Stored successes are references to payloads, and begin
anew with a resume.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rlsys.config.curriculum_section import Rules, fewer
from rlsys.contracts import Graft
from rlsys.types import Group, PolicyVersion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tally:
    """What a task's earlier episodes came to."""

    num_successes: int
    num_episodes: int
    """Judged ones: an episode that failed for another reason than the policy's is in no rate."""
    num_passed: int = 0
    """Times the task was passed over since it was last rolled out."""

    @property
    def rate(self) -> float:
        """Success rate, 0 to 1."""
        return self.num_successes / self.num_episodes


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the scoring of one group adds to the tally of its task."""

    task_id: str
    num_successes: int
    num_episodes: int


@dataclass(frozen=True, slots=True)
class CurriculumState:
    """What a checkpoint keeps of curation."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    """By task id."""
    scored: dict[int, Judgement] = field(default_factory=dict)
    """By group_id of a group that is not settled."""
    settled: list[Judgement] = field(default_factory=list)
    """Of groups dropped since the newest step was published."""


@dataclass(frozen=True, slots=True)
class _Success:
    """The best episode of a group, kept with all of the group's payload."""

    group: Group
    episode: int
    moment: int
    """Steps that were published when it was scored."""


class Curriculum:
    """Keeps histories and successes, and answers what to issue. Belongs to one ledger; does no I/O."""

    def __init__(self, rules: Rules | None = None) -> None:
        """Without rules nothing is curated, and nothing kept."""
        self.rules = rules or Rules()
        self.num_smaller = 0
        """Groups that were given fewer episodes."""
        self.num_passed_over = 0
        """Times that a task was passed over."""
        self.num_grafted = 0
        """Groups that were given a stored success."""
        self.num_too_old = 0
        """Groups that failed altogether, and whose stored success is older than the bound on staleness allows."""
        self._tallies: dict[str, Tally] = {}
        self._scored: dict[int, Judgement] = {}
        self._settled: list[Judgement] = []
        self._successes: OrderedDict[str, _Success] = OrderedDict()
        """By task id, the least recently stored or used first."""
        self._moment = 0
        """Steps published in this session."""

    # ----------------------------------------------------------------------------------------------------------- issue

    def passes_over(self, task_id: str) -> bool:
        """Is this task, whose turn it is, left out this time? Counted."""
        rules, tally = self.rules, self._known(task_id)
        low, high = rules.within
        if tally is None or low <= tally.rate <= high:
            return False
        if rules.look_again and tally.num_passed >= rules.look_again:
            del self._tallies[task_id]
            return False
        self._tallies[task_id] = replace(tally, num_passed=tally.num_passed + 1)
        self.num_passed_over += 1
        return True

    def size_of(self, task_id: str, group_size: int) -> int | None:
        """Episodes of a new group of this task if they are fewer than `group_size`; else None. Counted."""
        tally, bound = self._known(task_id), self.rules.fewer_above
        if tally is None or bound is None or tally.rate <= bound:
            return None
        self.num_smaller += 1
        return fewer(group_size)

    def _known(self, task_id: str) -> Tally | None:
        """The tally of a task whose success rate counts."""
        tally = self._tallies.get(task_id)
        return tally if tally is not None and tally.num_episodes >= self.rules.min_episodes else None

    # ----------------------------------------------------------------------------------------------------------- judge

    def scored(self, group: Group) -> None:
        """This attempt at an open group was scored. What an earlier attempt came to is forgotten."""
        rewards = _rewards(group)
        if self.rules.needs_history:
            num_successes = sum(self._is_success(reward) for reward in rewards.values())
            self._scored[group.group_id] = Judgement(group.task_id, num_successes, len(rewards))
        if self.rules.stored_successes and rewards:
            best = max(rewards, key=lambda episode: rewards[episode])
            if self._is_success(rewards[best]):
                self._store(_Success(replace(group, columns={}), best, self._moment))

    def graft_for(self, group: Group, oldest_in_time: Callable[[int], PolicyVersion]) -> Graft | None:
        """What to do about a scored group that failed altogether; None if it did not, or nothing can be done.

        The success is one that was scored before the newest step was published, and takes the place of an episode that
        could not be scored, or else of the first with the lowest reward. At least one scored episode remains beside
        it. No token may be of a version before `oldest_in_time(group_id)`: a success from a group with such a token is
        counted as too old, and left for others.
        """
        success, rewards = self._successes.get(group.task_id), _rewards(group)
        if success is None or success.moment == self._moment or any(map(self._is_success, rewards.values())):
            return None
        lost = [episode for episode in range(len(group.episodes)) if episode not in rewards]
        if not rewards or (not lost and len(rewards) < 2):
            return None
        if success.group.oldest_version < oldest_in_time(group.group_id):
            self.num_too_old += 1
            return None
        self._successes.move_to_end(group.task_id)
        worst = lost[0] if lost else min(rewards, key=lambda episode: rewards[episode])
        return Graft(group, worst, success.group, success.episode)

    def lose(self, group_id: int, task_id: str) -> None:
        """The payload of this open group is gone, and it is issued again: what it came to never counts."""
        self._scored.pop(group_id, None)
        self.forget(group_id, task_id)

    def forget(self, group_id: int, task_id: str) -> None:
        """The payload of this group is gone: its success is no longer kept."""
        success = self._successes.get(task_id)
        if success is not None and success.group.group_id == group_id:
            del self._successes[task_id]

    def _store(self, success: _Success) -> None:
        self._successes[success.group.task_id] = success
        self._successes.move_to_end(success.group.task_id)
        if len(self._successes) > self.rules.stored_successes:
            self._successes.popitem(last=False)

    def _is_success(self, reward: float) -> bool:
        return reward >= self.rules.success_reward

    # ---------------------------------------------------------------------------------------------------------- settle

    def settle(self, group_id: int) -> None:
        """This group was trained or dropped: what it came to counts from the next published step on."""
        if (judgement := self._scored.pop(group_id, None)) is not None:
            self._settled.append(judgement)

    def publish(self) -> None:
        """A step was published: decisions rest on all that is settled by now."""
        for judgement in self._settled:
            before = self._tallies.get(judgement.task_id, Tally(0, 0))
            self._tallies[judgement.task_id] = Tally(
                before.num_successes + judgement.num_successes, before.num_episodes + judgement.num_episodes
            )
        self._settled.clear()
        self._moment += 1

    # ----------------------------------------------------------------------------------------------- metrics and state

    def metrics(self) -> dict[str, float]:
        """Counters of what is switched on, by their full names."""
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
        """For the checkpoint, at one moment."""
        return CurriculumState(dict(self._tallies), dict(self._scored), list(self._settled))

    def restore(self, state: CurriculumState, finished: Collection[int]) -> None:
        """Go on from `state`; of the groups scored before, only `finished` are not rolled out again."""
        if not self.rules.needs_history:
            state = CurriculumState()
        self._tallies, self._settled = dict(state.tallies), list(state.settled)
        self._scored = {group_id: judgement for group_id, judgement in state.scored.items() if group_id in finished}


def _rewards(group: Group) -> dict[int, float]:
    """Of each episode that was scored, by its number."""
    roots = {e: episode.trajectories[0] for e, episode in enumerate(group.episodes) if not episode.is_failed}
    return {e: root.reward for e, root in roots.items() if root.reward is not None}
