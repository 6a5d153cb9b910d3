"""Tokens per second, against a clock that stands where the test says."""

import pytest

from nanorl.engine import meter
from nanorl.engine.meter import RateMeter


def test_the_rate_of_the_last_window_and_none_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(meter, "monotonic", lambda: now)
    counter = RateMeter()
    now = 200.0
    counter.add(1000)  # after a long wait: its window begins here
    assert counter.per_s() == 0.0
    for _ in range(25):  # 10 tokens every tenth of a second
        now += 0.1
        counter.add(10)
    assert 90 <= counter.per_s() < 1050
    for _ in range(25):
        now += 0.1
        counter.add(10)
    assert counter.per_s() == pytest.approx(100, rel=0.1)
    now += 2.5
    assert counter.per_s() == 0.0
