"""Where a step's groups come from: all that sets the synchronous and the asynchronous loop apart."""

import itertools
from typing import NamedTuple, Protocol

from nanorl.loops.build import Run
from nanorl.loops.colocation import Lender
from nanorl.rollout.filters import has_spread, nothing_passed
from nanorl.types import Group
from nanorl.weight_sync.base import SyncReport

REPLACEMENT_SEED_OFFSET = 10_000_019
"""Keeps the noise of groups that replace others apart from every step's."""


class Marks(NamedTuple):
    """Seconds of time.perf_counter at the seams of a step."""

    start: float
    sampled: float
    trained: float
    end: float

    def metrics(self) -> dict[str, float]:
        """As `time/...`."""
        return {
            "time/rollout_s": self.sampled - self.start,
            "time/train_s": self.trained - self.sampled,
            "time/sync_s": self.end - self.trained,
            "time/step_s": self.end - self.start,
        }


class Source(Protocol):
    """Groups for the trainer, and the trainer's weights for the engine."""

    def take(self, step: int) -> list[Group]:
        """The groups to train on. Raises: whatever ends sampling."""
        ...

    def watch(self) -> None:
        """Called while the trainer computes. Raises: what has ended sampling meanwhile."""
        ...

    def sync(self) -> SyncReport:
        """Makes the engine hold the trainer's weights."""
        ...

    def metrics(self, marks: Marks) -> dict[str, float]:
        """What the source has to tell of the step that just ended."""
        ...


class Lockstep:
    """The synchronous source: samples when asked, by the weights of now."""

    def __init__(self, run: Run) -> None:
        """Raises: ConfigError where colocation is asked for and the engine can't give memory back."""
        self._run = run
        self._num_tokens = self._num_filtered = 0
        self._lender = Lender(run) if run.config.engine.colocate and not run.config.run.rollout_only else None

    def take(self, step: int) -> list[Group]:
        """A step's prompts as one request; dynamic sampling asks for more in the place of groups without spread."""
        groups = self._sample(step)
        self._num_tokens = sum(sample.num_sampled for group in groups for sample in group.samples)
        if self._lender:
            self._lender.lend()
        return groups

    def watch(self) -> None:
        """Nothing runs meanwhile."""

    def sync(self) -> SyncReport:
        """Nothing runs meanwhile."""
        if self._lender is None:
            return self._run.sync_weights()
        with self._lender.weights_back():
            return self._run.sync_weights()

    def metrics(self, marks: Marks) -> dict[str, float]:
        """The engine's speed, and what dynamic sampling discarded."""
        metrics = {"rollout/tokens_per_s": self._num_tokens / (marks.sampled - marks.start)}
        if self._run.config.rollout.dynamic_sampling:
            metrics["rollout/filtered_groups"] = self._num_filtered
        return metrics

    def _sample(self, step: int) -> list[Group]:
        run = self._run
        needed, cap = run.prompts_per_step, run.config.rollout.dynamic_sampling * run.prompts_per_step
        kept: list[Group] = []
        self._num_filtered = 0
        for attempt in itertools.count():
            prompts = run.prompts.next(needed - len(kept))
            groups = run.sample(prompts, step + attempt * REPLACEMENT_SEED_OFFSET)
            if not cap:
                return groups
            passed = [group for group in groups if has_spread(group)]
            kept += passed
            self._num_filtered += len(groups) - len(passed)
            if self._num_filtered >= cap and not kept:
                raise nothing_passed(self._num_filtered, groups[-1])
            if self._num_filtered >= cap or len(kept) == needed:
                break
        return kept
