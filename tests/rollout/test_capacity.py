"""The bound on staleness as counts, under a clock that the test moves: no engine, no thread, no waiting."""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from nanorl.rollout.capacity import Capacity


@dataclass
class Simulation:
    """Groups take random times; a step takes `train_s`; time is a number that jumps from event to event."""

    capacity: Capacity
    train_s: float
    durations: random.Random
    is_fifo: bool
    now: float = 0.0
    version: int = 0
    number: int = 0
    running: list[tuple[float, int, int]] = field(default_factory=list)
    """(end, number, version at submission)."""
    ready: list[tuple[int, int]] = field(default_factory=list)
    """(number, version at submission)."""
    most: int = 0

    def submit(self) -> None:
        while self.capacity.room:
            self.capacity.submit()
            end = self.now + self.durations.expovariate(1.0)
            heapq.heappush(self.running, (end, self.number, self.version))
            self.number += 1
        out = self.capacity.in_flight + self.capacity.ready + self.capacity.training
        assert out == len(self.running) + len(self.ready) + self.capacity.training
        self.most = max(self.most, out)

    def finish_until(self, time: float) -> None:
        while self.running and self.running[0][0] <= time:
            end, number, version = heapq.heappop(self.running)
            self.now = max(self.now, end)
            self.ready.append((number, version))
            self.capacity.finish()
            self.submit()
        self.now = max(self.now, time)

    def step(self) -> list[int]:
        """Takes a step's groups and trains; returns their staleness."""
        needed = self.capacity.groups_per_step
        self.submit()
        while len(self.usable()) < needed:
            self.finish_until(self.running[0][0])
        chosen = self.usable()[:needed]
        self.ready = [item for item in self.ready if item not in chosen]
        self.capacity.take(needed)
        self.finish_until(self.now + self.train_s)
        staleness = [self.version - version for _, version in chosen]
        self.version += 1
        self.capacity.synced()
        return staleness

    def usable(self) -> list[tuple[int, int]]:
        """In order of submission, without gaps where that is asked for."""
        ready = sorted(self.ready)
        if not self.is_fifo:
            return ready
        earliest_running = min((number for _, number, _ in self.running), default=self.number)
        return [item for item in ready if item[0] < earliest_running]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("train_s", [0.05, 1.0, 20.0])
def test_in_order_the_capacity_alone_bounds_staleness(max_staleness: int, train_s: float) -> None:
    """A consumer 10 times faster and 10 times slower than the producer: at most (max_staleness + 1) x P groups are out,
    and none that is consumed in order of submission is ever older than max_staleness.
    """
    capacity = Capacity(groups_per_step=4, max_staleness=max_staleness, steps_left=200)
    simulation = Simulation(capacity, train_s, random.Random(0), is_fifo=True)
    staleness = [value for _ in range(200) for value in simulation.step()]
    assert max(staleness) <= max_staleness
    assert simulation.most == (max_staleness + 1) * 4
    assert simulation.number == 200 * 4, "nothing is sampled that no step uses"
    if train_s == 20.0:
        assert max(staleness) == max_staleness, "a slow trainer finds the queue full"


def test_out_of_order_only_overtaken_groups_get_older() -> None:
    """The first finished are used: a straggler may outlive the bound, which is why consumption checks it again."""
    capacity = Capacity(groups_per_step=4, max_staleness=1, steps_left=400)
    simulation = Simulation(capacity, 0.01, random.Random(1), is_fifo=False)
    staleness = [value for _ in range(400) for value in simulation.step()]
    assert simulation.most == 8
    assert max(staleness) > 1
    assert sum(value > 1 for value in staleness) < 0.3 * len(staleness)


def test_resumed_at_version_100_the_capacity_is_the_same() -> None:
    """AReaL 1345: counts of what is out, not of versions, so that a recovered run has no more slots than a new one."""
    capacity = Capacity(groups_per_step=3, max_staleness=2, steps_left=1000 - 100)
    assert capacity.room == 9
    for _ in range(9):
        capacity.submit()
    assert capacity.room == 0
    with pytest.raises(AssertionError, match="beyond the capacity"):
        capacity.submit()


def test_slots_come_back_with_the_sync_or_a_discard_only() -> None:
    capacity = Capacity(groups_per_step=2, max_staleness=1, steps_left=10)
    for _ in range(4):
        capacity.submit()
        capacity.finish()
    assert capacity.room == 0
    capacity.take(2)
    assert capacity.room == 0, "trained on, but the engine still holds the older weights"
    capacity.discard()
    assert capacity.room == 1
    capacity.synced()
    assert capacity.room == 3
    with pytest.raises(AssertionError, match="more than there is"):
        capacity.take(2)


def test_near_the_end_nothing_is_sampled_in_vain() -> None:
    capacity = Capacity(groups_per_step=2, max_staleness=4, steps_left=2)
    assert capacity.room == 4
    for _ in range(4):
        capacity.submit()
        capacity.finish()
    capacity.take(2)
    capacity.synced()
    assert (capacity.room, capacity.limit) == (0, 2)
