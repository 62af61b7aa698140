"""Groups that end without any executor: a collector whose episodes a test scripts."""

from __future__ import annotations

from rose_hpc.rollout.groups import Group, TurnRecord
from rose_hpc.rollout.trajectories import State, Trajectory


def play(group: Group, index: int, reward: float | None, versions: tuple[int, ...] = (0, 0), turns: int = 1) -> None:
    """Take one trajectory to its end: so many turns, each of these versions' tokens; without a reward it fails."""
    trajectory = group.trajectories[index]
    trajectory.open([1, 2])
    for turn in range(turns):
        _sample(trajectory, turn, versions)
        group.turns.append(TurnRecord(index, turn, "engine-0", "dedicated", 1.0, 2.0, 5, 0, len(versions), versions[-1]))
        if turn + 1 < turns:
            trajectory.observed([3])
    if reward is None:
        trajectory.fail("it broke\n  got: nothing")
    else:
        trajectory.finish(reward, reward > 0)
    group.end_s[index] = 100.0 + index


def _sample(trajectory: Trajectory, turn: int, versions: tuple[int, ...]) -> None:
    trajectory.start_turn("engine-0", trajectory.next_request_id())
    trajectory.turn_sampled([10 + turn] * len(versions), [-0.25 - turn] * len(versions), versions)


class ScriptedCollector:
    """Groups end when `end(serial)` says so, or at once when `auto(group)` plays them. started: every group, in order."""

    def __init__(self, auto=None):
        self.auto, self.started, self.over, self.closed = auto, [], [], False

    @property
    def running(self):
        """Groups that have not ended."""
        return [g for g in self.started if not g.is_over]

    def start(self, groups):
        for group in groups:
            self.started.append(group)
            if self.auto is not None and not group.is_over:
                self.auto(group)
            if group.is_over:
                self.over.append(group)

    def end(self, group, rewards, versions=(0, 0)):
        """Play what is left of a group."""
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            if trajectory.state is State.CREATED:
                play(group, trajectory.index, reward, versions)
        self.over.append(group)

    async def ended(self):
        assert self.over, "the sampler waits, but nothing has ended"
        return self.over.pop(0)

    def ended_already(self):
        over, self.over = self.over, []
        return over

    async def close(self):
        self.closed = True
