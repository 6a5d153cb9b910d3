"""Group advantages against recorded values and closed forms."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from nanorl.algo.advantages import Std, group_advantages
from nanorl.errors import ConfigError

CASES = [
    c
    for c in json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text())
    if c["what"] == "group advantage"
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['std']}-{c['rewards']}")
def test_recorded_values(case: dict) -> None:
    result = group_advantages(case["rewards"], case["std"], case.get("eps", 1e-6))
    assert result == pytest.approx(case["advantages"], abs=1e-6)


@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_against_numpy(std: Std) -> None:
    rng = random.Random(0)
    for _ in range(50):
        rewards = [rng.choice([0.0, 0.2, 1.2, rng.gauss(0, 3)]) for _ in range(rng.randint(2, 16))]
        values = np.array(rewards)
        scale = {"population": values.std() + 1e-6, "sample": values.std(ddof=1) + 1e-6, "none": 1.0}[std]
        expected = (values - values.mean()) / scale if values.max() > values.min() else np.zeros(len(values))
        assert group_advantages(rewards, std) == pytest.approx(expected.tolist(), abs=1e-9)


@pytest.mark.parametrize("value", [0.3, 0.1, 1.2, -7.7, 1e9])
def test_equal_rewards_give_exact_zeros(value: float) -> None:
    """A float32 standard deviation of six equal rewards is not 0; the guard compares max with min (pitfall 16)."""
    assert np.array([0.3] * 6, dtype=np.float32).std() != 0.0 or np.std([0.1] * 6) != 0.0  # what the guard is for
    assert group_advantages([value] * 6, "population", 1e-12) == [0.0] * 6


def test_nearly_equal_rewards_are_not_swallowed() -> None:
    advantages = group_advantages([0.3, 0.3 + 1e-12], "population", 1e-20)
    assert advantages == pytest.approx([-1.0, 1.0], abs=1e-3)


def test_a_group_of_one_is_refused() -> None:
    """OpenRLHF 182, 1250: a single sample is its own mean and never learns."""
    with pytest.raises(ConfigError, match="at least 2"):
        group_advantages([1.0])
