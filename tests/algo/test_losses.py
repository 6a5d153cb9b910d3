"""The policy loss against recorded values, closed forms, and inputs that break naive code."""

import json
from pathlib import Path

import pytest
import torch

from nanorl.algo.losses import Reduction, kl_k1, kl_k2, kl_k3, masked_log_ratio, policy_loss, token_weights
from nanorl.errors import BatchError

CASES = json.loads((Path(__file__).parents[1] / "data" / "algorithms.json").read_text())


def row(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


@pytest.mark.parametrize("case", [c for c in CASES if c["what"] == "policy loss per token"])
def test_recorded_loss(case: dict) -> None:
    result = policy_loss(
        row(case["rho"]).log(),
        row(case["advantage"]),
        torch.tensor([[True]]),
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        dual_clip=case["dual_clip"],
    )
    assert result.loss.item() == pytest.approx(case["loss"], abs=1e-9)


def test_recorded_kl_estimators() -> None:
    (case,) = [c for c in CASES if c["what"] == "kl estimators"]
    log_ratio = (row(case["p_ref"]) / row(case["p"])).log()
    for name, estimator in {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}.items():
        assert estimator(log_ratio).item() == pytest.approx(case[name], abs=1e-6)


def test_k3_is_unbiased_and_never_negative() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    assert (p * kl_k3((q / p).log())).sum().item() == pytest.approx(exact.item(), abs=1e-12)
    assert kl_k3(torch.linspace(-5, 5, 101)).min() >= 0


@pytest.mark.parametrize("case", [c for c in CASES if c["what"] == "reduction"])
@pytest.mark.parametrize("reduction", ["token", "sample"])
def test_recorded_reductions(case: dict, reduction: Reduction) -> None:
    width = max(len(losses) for losses in case["losses"])
    losses = torch.tensor([[*ls, *[7.0] * (width - len(ls))] for ls in case["losses"]])
    mask = torch.tensor([[i < len(ls) for i in range(width)] for ls in case["losses"]])
    weights = token_weights(mask, reduction, int(mask.sum()), len(mask), constant_length=10)
    assert (losses * weights).sum().item() == pytest.approx(case[f"{reduction}_mean"])


def test_constant_reduction_divides_by_the_length_given() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    weights = token_weights(mask, "constant", 3, 2, constant_length=10)
    assert (torch.ones(2, 3) * weights).sum().item() == pytest.approx(3 / 20)


def test_empty_step_has_zero_weights() -> None:
    """OpenRLHF 182: everything masked must not become 0/0."""
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for reduction in ("token", "sample", "constant"):
        assert token_weights(mask, reduction, 0, 0, 10).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 200.0, -200.0])
@pytest.mark.parametrize("side", ["train", "behaviour"])
def test_masked_garbage_and_huge_differences_stay_finite(bad: float, side: str) -> None:
    """miles 1363, SkyRL 1635: NaN at a masked position, or a difference of 200, must not reach loss or gradient."""
    train = row(-1.0, bad if side == "train" else -2.0, -0.5).requires_grad_()
    behaviour = row(-1.1, bad if side == "behaviour" else -2.0, -0.4)
    mask = torch.tensor([[True, False, True]])
    result = policy_loss(
        masked_log_ratio(train, behaviour, mask), row(1.0, bad, -1.0), mask, clip_low=0.2, clip_high=0.2
    )
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert train.grad is not None
    assert train.grad[0, 1] == 0
    assert train.grad.isfinite().all()
    assert train.grad[0, 0] != 0


@pytest.mark.parametrize("difference", [200.0, -200.0, 1e30])
def test_unmasked_difference_of_200_is_finite(difference: float) -> None:
    train = row(difference).requires_grad_()
    mask = torch.tensor([[True]])
    result = policy_loss(masked_log_ratio(train, row(0.0), mask), row(-1.0), mask, clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert train.grad is not None
    assert train.grad.isfinite().all()


def test_gradient_in_the_trust_region_is_minus_advantage_and_zero_outside() -> None:
    """d loss / d logprob = -rho A where unclipped, exactly 0 where clipping won."""
    log_ratio = row(0.1, 0.5, -0.1, -0.5).requires_grad_()
    advantages = row(1.0, 1.0, -1.0, -1.0)
    mask = torch.ones(1, 4, dtype=torch.bool)
    result = policy_loss(log_ratio, advantages, mask, clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    ratio = log_ratio.detach().exp()
    assert log_ratio.grad is not None
    assert log_ratio.grad[0].tolist() == pytest.approx([-ratio[0, 0].item(), 0.0, ratio[0, 2].item(), 0.0])
    assert result.is_clipped.tolist() == [[False, True, False, True]]


def test_gradcheck_in_float64() -> None:
    train = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    behaviour, advantages = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)

    def loss(x: torch.Tensor) -> torch.Tensor:
        log_ratio = masked_log_ratio(x, behaviour, mask)
        return policy_loss(log_ratio, advantages, mask, clip_low=0.2, clip_high=0.3, dual_clip=3.0).loss.sum()

    assert torch.autograd.gradcheck(loss, (train,))


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(BatchError, match="one shape"):
        masked_log_ratio(torch.zeros(1, 3), torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool))
