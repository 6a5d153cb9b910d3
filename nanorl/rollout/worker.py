"""The producer: keeps the engine sampling on the rollouts' event loop, while another thread takes finished groups."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field

from nanorl.config import OverlapConfig
from nanorl.data.prompts import PromptStream, StreamState
from nanorl.errors import EngineError
from nanorl.rollout.capacity import Capacity
from nanorl.rollout.filters import has_spread, nothing_passed
from nanorl.rollout.runner import POLL_S, EventLoopThread
from nanorl.types import Group, Prompt

Collect = Callable[[Prompt, int], Awaitable[Group]]
"""Samples and grades the group of one prompt; the number decides the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A group on its way."""

    number: int
    prompt: Prompt
    since: float
    """When it was submitted, in seconds of time.monotonic."""


@dataclass(slots=True, kw_only=True)
class Taken:
    """What a step gets, and how the producer stood."""

    groups: list[Group]
    staleness: list[int]
    """Of each group: trainer's version - oldest version of any of its tokens."""
    queue_depth: int
    """Finished groups that were waiting when the step came for them."""
    in_flight: int
    """Submitted groups that were not finished when the step left."""
    num_dropped: int = 0
    num_recycled: int = 0
    num_filtered: int = 0
    """Groups without spread that dynamic sampling discarded since the former step."""


@dataclass(slots=True, kw_only=True)
class RolloutWorker:
    """Submits prompts whenever a slot is free, in order; groups finish in any order.

    `start`, `take`, `synced`, `state` and `stop` belong to the trainer's thread; what happens on the event loop goes
    through the same lock.
    """

    collect: Collect
    prompts: PromptStream
    capacity: Capacity
    overlap: OverlapConfig
    event_loop: EventLoopThread
    where: Callable[[], str]
    """Says, for an error, where the groups in flight are."""
    first_number: int = 0
    max_filtered: int = 0
    """Groups without spread that a step may discard; 0: they are kept."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _flying: dict[int, Ticket] = field(default_factory=dict[int, Ticket])
    _ready: list[tuple[Ticket, Group]] = field(default_factory=list[tuple[Ticket, Group]])
    _training: list[Ticket] = field(default_factory=list[Ticket])
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set["asyncio.Task[None]"])
    _error: BaseException | None = None
    _is_stopped: bool = False
    _progress_at: float = 0.0
    _num_filtered: int = 0
    _last_filtered: Group | None = None
    _numbers: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(self.first_number)

    def start(self) -> None:
        """Begins to submit."""
        self._progress_at = time.monotonic()
        self.event_loop.start(self._submit())

    def take(self, version: int, watch: Callable[[], None], on_wait: Callable[[int, int], None]) -> Taken:
        """Waits for a step's groups and hands them over, those of the oldest weights first.

        Args:
            version: the trainer's.
            watch: called twice a second while waiting; raises where waiting has lost its point.
            on_wait: called as often with (groups that are there, groups needed).

        Raises:
            EngineError: nothing finished for `stall_timeout_s`.
            RewardError: dynamic sampling let nothing through.
            BaseException: whatever the producer died of, with its traceback.
        """
        taken = Taken(groups=[], staleness=[], queue_depth=len(self._ready), in_flight=0)
        needed = self.capacity.groups_per_step
        self._progress_at = time.monotonic()
        while True:
            with self._changed:
                self.check()
                self._sort_out(version, taken)
                # Beyond the cap nothing is replaced any more: the step has to do with what passed.
                is_all = 0 < self.max_filtered <= self._num_filtered and not self._flying
                if len(self._ready) >= needed or (is_all and self._ready):
                    self._hand_over(min(needed, len(self._ready)), version, taken)
                    return taken
                if is_all and self._last_filtered:
                    raise nothing_passed(self._num_filtered, self._last_filtered)
                self._check_progress(needed)
                on_wait(len(self._ready), needed)
                is_news = self._changed.wait(POLL_S)
            if not is_news:
                watch()

    def check(self) -> None:
        """Raises: whatever the producer died of."""
        if self._error is not None:
            raise self._error

    def synced(self) -> None:
        """The engine holds the weights that the last step trained: its slots are free."""
        with self._changed:
            self._training = []
            self._progress_at = time.monotonic()
            self.capacity.synced()
        self.event_loop.start(self._submit())

    def revive(self) -> None:
        """After the engine was lost and is back: samples what was in flight anew, under the same numbers."""
        self.event_loop.run(self._cancel(), timeout_s=10.0)
        with self._changed:
            self._error = None
            self._progress_at = time.monotonic()
        self.event_loop.start(self._resubmit())

    def state(self) -> StreamState:
        """Position of the data for a checkpoint: what is not trained on yet will be handed out again, in order."""
        with self._changed:
            tickets = [*self._training, *(ticket for ticket, _ in self._ready), *self._flying.values()]
            by_number = {ticket.number: ticket.prompt for ticket in tickets}
            return self.prompts.state_dict([by_number[number] for number in sorted(by_number)])

    def stop(self) -> None:
        """Ends what is in flight."""
        with self._changed:
            self._is_stopped = True
        self.event_loop.run(self._cancel(), timeout_s=10.0)

    async def _submit(self) -> None:
        """Fills every free slot."""
        with self._dying_loudly(), self._changed:
            while self.capacity.room and not self._is_stopped and self._error is None:
                (prompt,) = self.prompts.next(1)
                self.capacity.submit()
                ticket = Ticket(number=next(self._numbers), prompt=prompt, since=time.monotonic())
                self._flying[ticket.number] = ticket
                self._launch(ticket)

    async def _resubmit(self) -> None:
        with self._changed:
            for ticket in self._flying.values():
                self._launch(ticket)
        await self._submit()

    def _launch(self, ticket: Ticket) -> None:
        task = asyncio.get_running_loop().create_task(self._produce(ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _produce(self, ticket: Ticket) -> None:
        with self._dying_loudly():
            group = await self.collect(ticket.prompt, ticket.number)
            with self._changed:
                self._land(ticket, group)
            if self.max_filtered and self._num_filtered < self.max_filtered:
                await self._submit()

    def _land(self, ticket: Ticket, group: Group) -> None:
        """A group is finished: it waits for a step, unless dynamic sampling has no use for it."""
        del self._flying[ticket.number]
        self.capacity.finish()
        self._progress_at = time.monotonic()
        if self.max_filtered and not has_spread(group):
            self.capacity.discard()
            self._num_filtered += 1
            self._last_filtered = group
        else:
            self._ready.append((ticket, group))
        self._changed.notify_all()

    @contextlib.contextmanager
    def _dying_loudly(self) -> Generator[None, None, None]:
        """Whatever ends the producer is raised again where the groups are waited for."""
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 the boundary between the two threads
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _sort_out(self, version: int, taken: Taken) -> None:
        """Removes what got too old while it was sampled or waited."""
        stale = [item for item in self._ready if version - oldest(item[1], version) > self.overlap.max_staleness]
        if not stale:
            return
        self._ready = [item for item in self._ready if item not in stale]
        for ticket, _ in stale:
            self.capacity.discard()
            if self.overlap.stale == "recycle":
                self.prompts.put_back([ticket.prompt])
        if self.overlap.stale == "recycle":
            taken.num_recycled += len(stale)
        else:
            taken.num_dropped += len(stale)
        self.event_loop.start(self._submit())

    def _hand_over(self, number: int, version: int, taken: Taken) -> None:
        self._ready.sort(key=lambda item: (oldest(item[1], version), item[0].number))
        chosen = self._ready[:number]
        self._training = [ticket for ticket, _ in chosen]  # first: Ctrl-C between two lines must lose none
        self._ready = self._ready[number:]
        self.capacity.take(number)
        taken.groups = [group for _, group in chosen]
        taken.staleness = [version - oldest(group, version) for group in taken.groups]
        taken.in_flight = len(self._flying)
        taken.num_filtered, self._num_filtered = self._num_filtered, 0

    def _check_progress(self, needed: int) -> None:
        silence = time.monotonic() - self._progress_at
        if silence <= self.overlap.stall_timeout_s:
            return
        first = min(self._flying.values(), key=lambda ticket: ticket.since, default=None)
        since = f"; the oldest, prompt {first.prompt.id!r}, for {time.monotonic() - first.since:.0f} s" if first else ""
        raise EngineError(
            f"No group finished for {silence:.0f} s: {len(self._ready)} of {needed} are ready, {len(self._flying)} in "
            f"flight ({self.where()}{since}). Is the engine paused, or the reward hung? overlap.stall_timeout_s bounds "
            "this wait."
        )


def oldest(group: Group, version: int) -> int:
    """The oldest weights that sampled a token of a valid member; `version` where there is none."""
    versions = (sample.oldest_version for sample in group.valid)
    return min((v for v in versions if v is not None), default=version)
