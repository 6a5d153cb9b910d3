"""Where a step goes when it is done: the trackers, the rollouts on disk, the view."""

from collections.abc import Sequence

import msgspec

from nanorl.config import Config
from nanorl.tokens.chat import ChatFormat
from nanorl.tracking.rollouts import RolloutWriter, excerpt
from nanorl.tracking.run_folder import RunFolder
from nanorl.tracking.trackers import open_trackers
from nanorl.tracking.view import View
from nanorl.types import Group, StepReport


class Recorder:
    """All sinks of one run as one. A sink that fails never stops training."""

    def __init__(self, config: Config, folder: RunFolder, chat: ChatFormat, view: View) -> None:
        """Raises: TrackerError where a backend can't be started."""
        self._view, self._chat, self._steps = view, chat, config.run.steps
        self._folder, self._is_latest = folder, False
        self._trackers = open_trackers(config.tracking, folder.path, msgspec.to_builtins(config), view.note)
        keeps = config.tracking.rollouts
        self._rollouts = RolloutWriter(folder.rollouts, chat.decode, view.note) if keeps else None

    def log(self, report: StepReport, groups: Sequence[Group]) -> None:
        """One finished step and the groups that it trained on."""
        if self._rollouts:
            self._rollouts.write(report.step, groups)
        self._trackers.log(report)
        if not self._is_latest:  # a start that fails must not hide the run before it
            self._folder.point_latest()
            self._is_latest = True
        self._view.sample(excerpt(groups, self._chat.decode))
        self._view.step(report, self._steps)

    def close(self) -> None:
        """Waits until everything is written."""
        if self._rollouts:
            self._rollouts.close()
        self._trackers.close()
