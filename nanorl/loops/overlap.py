"""The asynchronous source: the engine samples on while the trainer trains, within a bound on how stale samples get."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from nanorl.errors import EngineError
from nanorl.loops.build import Run
from nanorl.loops.source import Marks
from nanorl.rollout.capacity import Capacity
from nanorl.rollout.turnstile import Span, Turnstile
from nanorl.rollout.worker import RolloutWorker, Taken
from nanorl.types import Group, Prompt
from nanorl.weight_sync.base import SyncReport

FIRST_NUMBER = 1_000_003
"""Groups are numbered from done_steps times this, so that a resumed run draws other noise than before."""
LANE_STEPS = 6
"""Steps that the timeline shows."""


class Overlap:
    """A rollout worker at the run's engine, as a source of groups; a context manager."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._turnstile = Turnstile(run.rollout.sampler)
        self._rollout = replace(run.rollout, sampler=self._turnstile)
        config = run.config
        self.worker = RolloutWorker(
            collect=self._collect,
            prompts=run.prompts,
            capacity=Capacity(
                groups_per_step=run.prompts_per_step,
                max_staleness=config.overlap.max_staleness,
                steps_left=config.run.steps - run.done_steps,
            ),
            overlap=config.overlap,
            event_loop=run.event_loop,
            where=lambda: f"{self._turnstile.inside} requests at the engine, the other groups at the reward",
            first_number=run.done_steps * FIRST_NUMBER,
            max_filtered=config.rollout.dynamic_sampling * run.prompts_per_step,
        )
        self._is_started = False
        self._taken = Taken(groups=[], staleness=[], queue_depth=0, in_flight=0)
        self._trainer_lane: list[tuple[str, Span]] = []

    def __enter__(self) -> "Overlap":
        self._run.data_state = self.worker.state
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()

    def take(self, step: int) -> list[Group]:
        """The first finished groups that are young enough; begins to sample with the first call."""
        run = self._run
        if not self._is_started:
            self._is_started = True
            self.worker.start()

        def take() -> Taken:
            return self.worker.take(
                run.version, run.engine.check, lambda done, total: run.view.progress("waiting for groups", done, total)
            )

        def restore() -> None:
            run.resend_weights()
            self.worker.revive()

        self._taken = run.recovery.attempt(take, restore)
        run.check_any_valid(self._taken.groups)
        return self._taken.groups

    def watch(self) -> None:
        """Raises: what the producer died of, while the trainer computes; a lost engine can wait for the step's end."""
        with contextlib.suppress(EngineError):
            self.worker.check()

    def sync(self) -> SyncReport:
        """Syncs while requests run; they go on afterwards. Their slots are free again when this returns."""
        num_restarts = self._run.recovery.num_restarts
        with self._drained():
            report = self._run.sync_weights()
        self.worker.synced()
        if self._run.recovery.num_restarts > num_restarts:
            self.worker.revive()
        return report

    def metrics(self, marks: Marks) -> dict[str, float]:
        """Queue, staleness and idleness of the step."""
        taken = self._taken
        busy_s = sum(end - start for start, end in self._turnstile.busy(marks.start, marks.end))
        num_tokens = sum(sample.num_sampled for group in taken.groups for sample in group.samples)
        counts = Counter(taken.staleness)
        self._draw(marks)
        return {
            "rollout/tokens_per_s": num_tokens / (marks.end - marks.start),
            "rollout/queue_depth": taken.queue_depth,
            "rollout/in_flight": taken.in_flight,
            "rollout/staleness/mean": fmean(taken.staleness),
            "rollout/staleness/max": max(taken.staleness),
            **{f"rollout/staleness/groups_{k}": counts[k] for k in range(self._run.config.overlap.max_staleness + 1)},
            "rollout/stale_dropped": taken.num_dropped,
            "rollout/stale_recycled": taken.num_recycled,
            "rollout/filtered_groups": taken.num_filtered,
            "time/trainer_wait_share": (marks.sampled - marks.start) / (marks.end - marks.start),
            "time/engine_idle_share": max(0.0, 1.0 - busy_s / (marks.end - marks.start)),
        }

    async def _collect(self, prompt: Prompt, number: int) -> Group:
        run = self._run
        # Beyond 64 bits: no step of the synchronous loop draws this noise.
        (group,) = await self._rollout.collect([prompt], (1 << 64) + run.noise_seed(number), run.group_size)
        return group

    @contextlib.contextmanager
    def _drained(self) -> Iterator[None]:
        """With in_flight_update = drain no request runs within the block; otherwise nothing."""
        run = self._run
        if run.config.overlap.in_flight_update != "drain":
            yield
            return
        run.view.progress("draining the engine", 0, 0)
        with run.engine.blamed():
            run.event_loop.run(self._turnstile.drain(), run.config.engine.request_timeout_s, run.engine.check)
        try:
            yield
        finally:
            run.event_loop.run(self._turnstile.reopen(), timeout_s=10.0)

    def _draw(self, marks: Marks) -> None:
        """The last seconds as two lanes: who was at work when."""
        self._trainer_lane += [("train", (marks.sampled, marks.trained)), ("sync", (marks.trained, marks.end))]
        self._trainer_lane = self._trainer_lane[-LANE_STEPS * 2 :]
        start = self._trainer_lane[0][1][0]
        self._run.view.lanes(
            {
                "engine": [("sample", span) for span in self._turnstile.busy(start, marks.end)],
                "trainer": self._trainer_lane,
            }
        )
