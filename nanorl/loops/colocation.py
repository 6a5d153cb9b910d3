"""One GPU for both: the engine's weights and KV cache give their memory to the trainer while it trains."""

import contextlib
from collections.abc import Iterator

from nanorl.errors import ConfigError
from nanorl.loops.build import Run


class Lender:
    """Releases and resumes the engine's memory around a training step.

    Released weights are lost, not kept elsewhere: the sync that follows brings all of them anyway. They come back
    before it, the KV cache after it.
    """

    def __init__(self, run: Run) -> None:
        """Raises: ConfigError where the engine was not started for it."""
        if not run.client.can_release_memory:
            raise ConfigError(
                f"engine.colocate: {run.engine.description} can't give its memory back. Expected an SGLang that was "
                "started with --enable-memory-saver, as nanorl starts its own; leave engine.colocate out otherwise."
            )
        self._run = run
        self._restarts = 0

    def lend(self) -> None:
        """After sampling, when no request runs."""
        self._restarts = self._run.recovery.num_restarts
        with self._run.engine.blamed():
            self._run.client.release_memory("kv_cache", "weights")

    @contextlib.contextmanager
    def weights_back(self) -> Iterator[None]:
        """The block updates the weights."""
        client = self._run.client
        with self._run.engine.blamed():
            client.resume_memory("weights")
        yield
        if self._run.recovery.num_restarts == self._restarts:  # an engine that was started anew has all its memory
            client.resume_memory("kv_cache")
