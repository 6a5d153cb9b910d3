"""How fast an engine samples, for people who watch it."""

from time import monotonic

WINDOW_S = 1.0


class RateMeter:
    """Tokens per second over the last full window in which something was counted; 0 once nothing has been for two."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._count = 0
        self._start = self._last = monotonic()

    def add(self, count: int) -> None:
        """Counts. For one thread; any other may ask for the rate."""
        now = monotonic()
        if now - self._last > WINDOW_S:  # it was idle: what it does now starts now
            self._start, self._count = now, 0
        elif now - self._start > WINDOW_S:
            self._rate = self._count / (now - self._start)
            self._start, self._count = now, 0
        self._count += count
        self._last = now

    def per_s(self) -> float:
        """The rate."""
        return self._rate if monotonic() - self._last < 2 * WINDOW_S else 0.0
