"""An engine that dies or hangs in the middle of a run: the run's own is started again, anybody else's ends the run.

A restarted engine holds the model as it lies on the disk, so it gets the run's weights before it is asked again. A
request's noise comes from its own seed, so the embedded engine's answers are the ones that got lost, to the bit.
"""

from collections.abc import Callable
from typing import TypeVar

from nanorl.engine.client import EngineClient
from nanorl.engine.launcher import EngineProcess
from nanorl.errors import EngineError, WeightSyncError
from nanorl.loops.engine import EngineHandle
from nanorl.tracking.view import View

T = TypeVar("T")

DEATH_S = 1.0
"""An engine that broke a connection is given this long to be dead."""
HEALTH_S = 30.0
"""An engine that doesn't generate one token within this hangs; it may be in the middle of a long prefill."""


class Recovery:
    """Counts the restarts of one run's engine.

    Args:
        engine: the run's own, or anybody's.
        view: is told of each restart.
        max_restarts: how many a run may have.
    """

    def __init__(self, engine: EngineHandle, view: View, max_restarts: int) -> None:
        self.num_restarts = 0
        self._engine = engine
        self._view = view
        self._max_restarts = max_restarts

    def attempt(self, work: Callable[[], T], restore: Callable[[], None]) -> T:
        """Runs `work`; where it fails because our own engine is gone, restarts that, restores its state, tries again.

        Args:
            work: may be run any number of times.
            restore: puts a fresh engine into the state that `work` needs.

        Raises:
            EngineError, WeightSyncError: the engine is not ours, or well, or has been restarted often enough.
        """
        is_fresh = False
        while True:
            try:
                if is_fresh:
                    restore()
                    is_fresh = False
                with self._engine.blamed():
                    return work()
            except (EngineError, WeightSyncError) as error:
                self._restart(error)
                is_fresh = True

    def _restart(self, error: EngineError | WeightSyncError) -> None:
        """Starts our own engine again. Raises: the error, where that is not what would help."""
        process = self._engine.process
        if process is None or not self._max_restarts:
            raise error
        if self.num_restarts >= self._max_restarts:
            raise EngineError(
                f"{error}\nIt was started again {self.num_restarts} times: engine.max_restarts."
            ) from None
        if _is_well(process):
            raise error
        self.num_restarts += 1
        count = f"restart {self.num_restarts} of at most {self._max_restarts}"
        self._view.note(f"warning: {str(error).splitlines()[0]} Starting it again, {count}.")
        process.restart()


def _is_well(process: EngineProcess) -> bool:
    """Whether the engine still generates."""
    process.wait_for_death(DEATH_S)
    if process.poll() is not None:
        return False
    with EngineClient(process.url) as client:
        return client.is_healthy(timeout_s=HEALTH_S)
