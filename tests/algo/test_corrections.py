"""Behaviour weights against recorded values and closed forms."""

import json
import math
from pathlib import Path

import pytest
import torch

from nanorl.algo.corrections import ess_share, masked, ratio_of, truncated
from nanorl.config_load import load_config
from nanorl.errors import BatchError, ConfigError

CASES = json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text())
NAN = math.nan


def test_recorded_tis_and_icepop_weights() -> None:
    (tis,) = [c for c in CASES if c["what"] == "tis weights"]
    (icepop,) = [c for c in CASES if c["what"] == "icepop weights"]
    ratios = torch.tensor([tis["ratios"]], dtype=torch.float64)
    mask = torch.ones_like(ratios, dtype=torch.bool)
    got = truncated(ratio_of(ratios.log(), mask, "token"), mask, tis["cap"])
    assert got.weights[0].tolist() == pytest.approx(tis["weights"])
    assert got.is_clipped.tolist() == [[False, False, False, True]]
    ratios = torch.tensor([icepop["ratios"]], dtype=torch.float64)
    got = masked(ratio_of(ratios.log(), mask, "token"), mask, icepop["low"], icepop["high"])
    assert got.weights[0].tolist() == pytest.approx(icepop["weights"])
    assert got.is_clipped.tolist() == [[True, False, False, True]]


def test_sequence_is_the_product_and_geometric_its_root() -> None:
    """Over sampled tokens only; what stands at masked ones is never read."""
    deltas = torch.tensor([[NAN, 0.5, -0.2, 0.3], [0.1, NAN, NAN, NAN]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True], [True, False, False, False]])
    deltas = torch.where(mask, deltas, 0.0)
    sequence = ratio_of(deltas, mask, "sequence")
    geometric = ratio_of(deltas, mask, "geometric")
    assert sequence[0].tolist() == pytest.approx([math.exp(0.6)] * 4)
    assert geometric[0].tolist() == pytest.approx([math.exp(0.2)] * 4)
    assert sequence[1].tolist() == geometric[1].tolist() == pytest.approx([math.exp(0.1)] * 4)
    weights = masked(sequence, mask, 0.0, 1.5).weights
    assert weights[0].tolist() == [0.0] * 4  # exp(0.6) = 1.82 is beyond: the whole sequence goes
    assert weights[1].tolist() == pytest.approx([math.exp(0.1), 0.0, 0.0, 0.0])
    assert truncated(sequence, mask, 1.5).weights[0].tolist() == pytest.approx([0.0, 1.5, 1.5, 1.5])


def test_a_long_sequence_stays_finite_and_an_empty_row_is_zero() -> None:
    """Slime's and miles' users: 1,000 tokens of +1 nat are exp(1000)."""
    mask = torch.tensor([[True] * 1000, [False] * 1000])
    ratio = ratio_of(torch.where(mask, 1.0, 0.0), mask, "sequence")
    result = truncated(ratio, mask, 2.0)
    assert torch.isfinite(ratio).all()
    assert result.weights[0].unique().tolist() == [2.0]
    assert result.weights[1].abs().sum() == 0
    assert not result.is_clipped[1].any()


def test_weights_have_no_gradient() -> None:
    delta = torch.tensor([[0.3, 0.9]], requires_grad=True)
    mask = torch.tensor([[True, True]])
    assert not truncated(ratio_of(delta, mask, "token"), mask, 2.0).weights.requires_grad
    assert not masked(ratio_of(delta, mask, "geometric"), mask, 0.5, 2.0).weights.requires_grad


def test_truncated_weights_are_unbiased_until_the_cap_binds() -> None:
    """sum over q of min(p/q, cap) * f equals sum over p of f as long as no ratio is above the cap."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.4, 0.4, 0.2]])
    f, mask = torch.tensor([[1.0, -2.0, 5.0]]), torch.tensor([[True, True, True]])
    ratio = ratio_of((p / q).log(), mask, "token")
    assert (q * truncated(ratio, mask, 2.0).weights * f).sum().item() == pytest.approx((p * f).sum().item(), abs=1e-6)
    assert (q * truncated(ratio, mask, 1.1).weights * f).sum().item() != pytest.approx((p * f).sum().item(), abs=1e-3)


def test_ess() -> None:
    assert ess_share(6.0, 12.0, 3) == 1.0  # 2, 2, 2
    assert ess_share(3.0, 9.0, 3) == pytest.approx(1 / 3)  # 3, 0, 0
    assert ess_share(0.0, 0.0, 3) == 0.0


def test_shapes_must_agree() -> None:
    with pytest.raises(BatchError, match="one shape"):
        ratio_of(torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool), "token")


@pytest.mark.parametrize(
    "sets",
    [
        ["algo.tis_cap=3"],
        ["algo.correction=tis", "algo.correction_level=sequence"],
        ["algo.correction=icepop", "algo.correction_mode=truncate"],
        ["algo.correction=tis", "algo.mask_low=0.1"],
        ["algo.correction=mis", "algo.correction_mode=truncate", "algo.mask_low=0.1"],
    ],
)
def test_a_setting_without_effect_is_refused(sets: list[str]) -> None:
    with pytest.raises(ConfigError, match="algo"):
        load_config(None, sets)
