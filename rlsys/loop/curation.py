"""Curation: which tasks are rolled out, how large their groups are, and which of their episodes are trained.

One seam between the loop and everything that depends on the outcomes of earlier episodes (DART, arXiv:2509.23866):

    `on_issue`       a task that mostly succeeds gets fewer episodes                        `fewer_above`
                     a task that nearly always succeeds or fails is skipped for a while     `success_within`
                     episodes are not much longer than the longest success of their task    `length_cap`
    `on_scored`      a stored success replaces one episode of a group without a success     `stored_successes`
    `check_teaches`  a group that teaches nothing is dropped                                whatever is set
    `factors`        sources of data are drawn by what their groups teach                   `source_weights`

Its decisions use the groups that were scored, and trained or dropped, when the newest step was published. With
`max_staleness: 0` all issued groups are settled before the next step, so decisions do not depend on timing. A reissued
group keeps its first size.

The history of a task is two counts, and is in the checkpoint. Stored successes are references to payloads; a resumed
run starts without them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import ceil

from rlsys.algorithm import Algorithm
from rlsys.batch.packing import num_trained
from rlsys.config.curation_section import CurationSection, fewer
from rlsys.contracts import Replacement
from rlsys.errors import AllTruncated, NothingToTrain, PayloadLost, ZeroAdvantage
from rlsys.monitoring.events import EpisodeReplaced, Events
from rlsys.types import EpisodeMeta, Group, OutcomeKind, PolicyVersion, is_success
from rlsys.util.deviation import deviation

STD_GROUPS = 30
"""Groups over which the reward deviation of a source is averaged."""
FIRST_GROUPS = 4
"""Groups of a source before its reward deviation counts."""
MIN_EPISODES, LOOK_AGAIN = 8, 4
"""Defaults of `Curation`."""
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
    reward_std: float = 0.0
    """Standard deviation of its rewards."""
    longest_success: int = 0
    """Sampled tokens of its longest success; 0 without one."""


@dataclass(frozen=True, slots=True)
class SourceStd:
    """Mean standard deviation of the rewards in groups of a source, of which the newest weigh most."""

    reward_std: float = 0.0
    num_groups: int = 0

    def then(self, reward_std: float) -> SourceStd:
        """The deviation after one more group: a mean of the first `STD_GROUPS`, exponential from there on."""
        num = self.num_groups + 1
        return SourceStd(self.reward_std + (reward_std - self.reward_std) / min(num, STD_GROUPS), num)


@dataclass(frozen=True, slots=True)
class CurationState:
    """Task histories, as in a checkpoint."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    """By task id."""
    scored: dict[int, TallyUpdate] = field(default_factory=dict)
    """By id of a group that is not settled."""
    settled: list[TallyUpdate] = field(default_factory=list)
    """Counts of groups settled since the newest step was published."""
    source_stds: dict[str, SourceStd] = field(default_factory=dict)
    """By source of data."""


@dataclass(frozen=True, slots=True)
class _Success:
    """Best episode of a group, kept with the group's whole payload."""

    group: Group
    episode: int
    moment: int
    """Number of published steps when it was scored."""


@dataclass(frozen=True, slots=True)
class IssueRules:
    """Decisions on a new group."""

    size: int | None = None
    """Episodes, if they are fewer than the group size."""
    token_limit: int | None = None
    """Most tokens that an episode may sample; None: no limit by task."""


class Curation:
    """Task histories, stored successes, and the decisions based on them. Belongs to one ledger; does no I/O."""

    def __init__(
        self,
        rules: CurationSection | None = None,
        events: Events | None = None,
        *,
        success: float = 1.0,
        min_episodes: int = MIN_EPISODES,
        look_again: int = LOOK_AGAIN,
    ) -> None:
        """Without rules, curate nothing and keep nothing.

        An episode with a reward of `success` or more is a success. A success rate counts from `min_episodes` scored
        episodes of a task on. A task is skipped `look_again` times before it is rolled out again with its history
        cleared; 0: always.
        """
        self.rules, self.events = rules or CurationSection(), events or Events()
        self.look_again, self.success, self._min_episodes = look_again, success, min_episodes
        self.num_smaller = 0
        """Groups with fewer episodes than the group size."""
        self.num_passed_over = 0
        """Times that a task was skipped."""
        self.num_replaced = 0
        """Groups that received a stored success."""
        self.num_too_old = 0
        """Groups without a success whose stored success is older than the staleness bound allows."""
        self._history = CurationState()
        self._successes: OrderedDict[str, _Success] = OrderedDict()
        """By task id, the least recently stored or used first."""
        self._moment = 0
        """Steps published in this session."""

    # ----------------------------------------------------------------------------------------------------------- issue

    def on_issue(self, task_id: str, group_size: int) -> IssueRules | None:
        """Decide on the next task; None: it is skipped this time."""
        if self._passes_over(task_id):
            return None
        return IssueRules(self._size_of(task_id, group_size), self._token_limit(task_id))

    def _passes_over(self, task_id: str) -> bool:
        rules, tally, tallies = self.rules, self._reliable_tally(task_id), self._history.tallies
        low, high = rules.success_within
        if tally is None or low <= tally.rate <= high:
            return False
        if self.look_again and tally.num_passed >= self.look_again:
            del tallies[task_id]
            if tally.longest_success:
                tallies[task_id] = Tally(0, 0, longest_success=tally.longest_success)
            return False
        tallies[task_id] = replace(tally, num_passed=tally.num_passed + 1)
        self.num_passed_over += 1
        return True

    def _size_of(self, task_id: str, group_size: int) -> int | None:
        tally, bound = self._reliable_tally(task_id), self.rules.fewer_above
        if tally is None or bound is None or tally.rate <= bound:
            return None
        self.num_smaller += 1
        return fewer(group_size)

    def _token_limit(self, task_id: str) -> int | None:
        tally, cap = self._history.tallies.get(task_id), self.rules.length_cap
        if tally is None or cap is None or not tally.longest_success:
            return None
        return ceil(cap * tally.longest_success)

    def _reliable_tally(self, task_id: str) -> Tally | None:
        """Return the tally of a task if it has enough episodes, else None."""
        tally = self._history.tallies.get(task_id)
        return tally if tally is not None and tally.num_episodes >= self._min_episodes else None

    # ----------------------------------------------------------------------------------------------------------- score

    async def on_scored(
        self,
        group: Group,
        oldest_in_time: Callable[[int], PolicyVersion],
        replace_by: Callable[[Replacement], Awaitable[Group]],
    ) -> Group:
        """Record the scores of an open group, which replace those of an earlier attempt. Return the group to train.

        See `replacement_for`; `replace_by` lets a worker that has payloads do it. A group whose stored success is lost
        is trained as it is. Raises what `replace_by` raises.
        """
        self.record(group)
        if (replacement := self.replacement_for(group, oldest_in_time)) is None:
            return group
        donor = replacement.donor
        try:
            replaced = await replace_by(replacement)
        except PayloadLost as error:
            if donor.group_id not in error.group_ids:
                raise
            self.forget(donor.group_id, donor.task_id)
            return group
        self.num_replaced += 1
        self.events.emit(EpisodeReplaced(group.group_id, group.task_id, replacement.episode, donor.group_id))
        return replaced

    def replacement_for(self, group: Group, oldest_in_time: Callable[[int], PolicyVersion]) -> Replacement | None:
        """Return what is to be replaced in a scored group; None: nothing.

        A stored success, scored before the newest step was published, replaces an episode of a group without a success:
        an unscored one, or else the first with the lowest reward. At least one scored episode remains beside it. None
        of its tokens may be older than version `oldest_in_time(group_id)`, less `stored_staleness`. An older success
        counts as too old, and stays stored for other groups.
        """
        success, rewards = self._successes.get(group.task_id), group.rewards()
        if success is None or success.moment == self._moment or any(map(self._is_success, rewards.values())):
            return None
        lost = [episode for episode in range(len(group.episodes)) if episode not in rewards]
        if not rewards or (not lost and len(rewards) < 2):
            return None
        oldest = oldest_in_time(group.group_id) - self.rules.stored_staleness
        if success.group.oldest_version < oldest:
            self.num_too_old += 1
            return None
        self._successes.move_to_end(group.task_id)
        worst = lost[0] if lost else min(rewards, key=lambda episode: rewards[episode])
        return Replacement(group, worst, success.group, success.episode)

    def record(self, group: Group) -> None:
        """Record the scores of an open group."""
        rewards = group.rewards()
        if self.rules.needs_history:
            num_successes = sum(self._is_success(reward) for reward in rewards.values())
            reward_std = deviation(rewards.values(), is_sample=False) if len(rewards) > 1 else 0.0
            successes = (group.episodes[e] for e, reward in rewards.items() if self._is_success(reward))
            lengths = map(num_sampled, successes) if self.rules.length_cap is not None else ()
            self._history.scored[group.group_id] = TallyUpdate(
                group.task_id, num_successes, len(rewards), group.source, reward_std, max(lengths, default=0)
            )
        if self.rules.stored_successes and rewards:
            best = max(rewards, key=lambda episode: rewards[episode])
            if self._is_success(rewards[best]):
                self._successes[group.task_id] = _Success(replace(group, columns={}), best, self._moment)
                self._successes.move_to_end(group.task_id)
                if len(self._successes) > self.rules.stored_successes:
                    self._successes.popitem(last=False)

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
        return is_success(reward, self.success)

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
        if self.rules.follows_reward_std:
            source_stds = self._history.source_stds
            for new in sorted(
                self._history.settled, key=lambda settled: settled.reward_std
            ):  # not as they happened to end
                source_stds[new.source] = source_stds.get(new.source, SourceStd()).then(new.reward_std)
        self._history.settled.clear()
        self._moment += 1

    def factors(self, sources: Iterable[str]) -> dict[str, float]:
        """Return the factors of the weights of sources: the deviation of each over the largest, at least
        `LEAST_FACTOR`, so that none is lost sight of; 1 for one of fewer than `FIRST_GROUPS` groups."""
        known = {name: found for name, found in self._history.source_stds.items() if found.num_groups >= FIRST_GROUPS}
        largest = max((found.reward_std for found in known.values()), default=0.0)
        return {
            name: max(LEAST_FACTOR, known[name].reward_std / largest) if name in known and largest else 1.0
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
            found["curation/replaced"] = self.num_replaced
            found["curation/too_old"] = self.num_too_old
            found["curation/stored"] = len(self._successes)
        return found

    def state(self) -> CurationState:
        """Return the state for a checkpoint."""
        return deepcopy(self._history)

    def restore(self, state: CurationState, finished: Collection[int]) -> None:
        """Restore `state`. Scores of groups outside `finished` are discarded, since those are rolled out again."""
        self._history = deepcopy(state) if self.rules.needs_history else CurationState()
        for group_id in self._history.scored.keys() - set(finished):
            del self._history.scored[group_id]


def check_teaches(group: Group, algorithm: Algorithm) -> None:
    """Check that a scored group teaches the policy something (dynamic sampling, DAPO, arXiv:2503.14476).

    Raises `NothingToTrain` if no trained token has an advantage. Raises `ZeroAdvantage` if its rewards are all
    equal, if its policy has nothing to be compared with, or if only frozen agents or other policies sampled;
    `AllTruncated` if all is masked because it was cut by length.
    """
    name = f"group {group.group_id} (task {group.task_id})"
    if _is_silent(group):
        raise ZeroAdvantage(f"{name}: only other policies than {group.policy} spoke in it")
    if not num_trained(group, algorithm.assign(group)):
        if num_trained(group, tuple(algorithm.advantages(group))):
            raise ZeroAdvantage(f"{name}: every trajectory belongs to algorithm.frozen_agents")
        kinds = {t.outcome.kind for _, t in group.trajectories() if t.samples}
        if kinds == {OutcomeKind.TRUNCATED} and algorithm.leaves_out_truncated:
            raise AllTruncated(
                f"{name}: every reply was cut by length, and algorithm.mask_truncated leaves those out: raise "
                "rollout.max_new_tokens, or set it to false"
            )
        if group.num_trained and not _has_own_failure(group):
            raise ZeroAdvantage(f"{name}: there is nobody to compare what {group.policy} said with")
        failures = [t.outcome.reason for e in group.episodes for t in e.trajectories if t.outcome.is_failed]
        why = failures[0] if failures else "no trained token was given an advantage"
        raise NothingToTrain(f"{name}: {why}")
    if not algorithm.can_learn_from(group):
        own = {t.reward for _, t in group.trajectories() if t.reward is not None}
        rewards = sorted(own or {t.reward for _, t in group.everyone() if t.reward is not None})
        is_spread = len(rewards) > 1
        summary = f"rewards from {rewards[0]:g} to {rewards[-1]:g}" if is_spread else f"equal rewards: {rewards}"
        raise ZeroAdvantage(f"{name} has {summary}")


def num_sampled(episode: EpisodeMeta) -> int:
    """Return the tokens that the policies sampled in an episode."""
    return sum(sample.num_trained for trajectory in episode.trajectories for sample in trajectory.samples)


def _is_silent(group: Group) -> bool:
    """Return True if other policies acted in the group, and its own policy in no episode that did not fail."""
    everyone = (t for e in group.episodes if not e.is_failed for t in e.trajectories)
    spoke = {t.policy for t in everyone if t.samples or t.outcome.is_failed}
    return bool(spoke) and group.policy not in spoke


def _has_own_failure(group: Group) -> bool:
    """Return True if a failure excludes a trajectory of the group's policy from training."""
    own = [(e.trajectories[0], t) for e in group.episodes for t in e.trajectories if t.policy == group.policy]
    return any(root.outcome.is_failed or t.outcome.is_failed for root, t in own)
