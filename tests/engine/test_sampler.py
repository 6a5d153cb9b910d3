"""The sampler against closed forms: distribution, truncation, noise."""

import math

import pytest
import torch

from nanorl.engine.sampler import SamplingRows, _invert, mix64, sample, uniform

DRAWS = 20_000


def rows(num: int, **settings: float) -> SamplingRows:
    """`num` rows that differ in their seed only."""
    seeds = torch.arange(num)
    temperature, top_p, min_p = (
        settings.get(name, default) for name, default in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0))
    )
    return SamplingRows(
        key=mix64(seeds),
        counter=torch.zeros(num, dtype=torch.int64),
        temperature=torch.full((num,), temperature or 1.0),
        greedy=torch.full((num,), temperature == 0.0),
        top_p=torch.full((num,), top_p),
        top_k=torch.full((num,), int(settings.get("top_k", 1 << 40))),
        min_p=torch.full((num,), min_p),
        any_greedy=temperature == 0.0,
        any_truncated="top_k" in settings or top_p < 1.0 or min_p > 0.0,
    )


def frequencies(logits: torch.Tensor, settings: SamplingRows) -> torch.Tensor:
    tokens, _ = sample(logits.expand(DRAWS, -1), settings)
    return torch.bincount(tokens, minlength=len(logits)) / DRAWS


LOGITS = torch.log(torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1]))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.4, 0.0, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 0.0, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 0.0, 3 / 7, 0.0, 0.0]),
        ({"top_p": 0.6}, [4 / 7, 0.0, 3 / 7, 0.0, 0.0]),
        ({"top_p": 0.75}, [4 / 9, 0.0, 3 / 9, 2 / 9, 0.0]),
        ({"min_p": 0.45}, [4 / 9, 0.0, 3 / 9, 2 / 9, 0.0]),
        # top-p counts within what top-k left: 0.4 of 0.9 is 0.444.
        ({"top_k": 3, "top_p": 0.44}, [1.0, 0.0, 0.0, 0.0, 0.0]),
        ({"temperature": 0.0}, [1.0, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_distribution(settings: dict[str, float], expected: list[float]) -> None:
    observed = frequencies(LOGITS, rows(DRAWS, **settings))
    assert observed.tolist() == pytest.approx(expected, abs=4 * math.sqrt(0.25 / DRAWS))
    # What has no probability is never drawn, not even rarely.
    assert not observed[torch.tensor(expected) == 0.0].any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_are_of_the_whole_vocabulary(temperature: float) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tokens, logprobs = sample(logits, rows(50, temperature=temperature, top_k=3))
    expected = (logits.double() / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected, atol=1e-6)


def test_greedy_logprobs_are_of_the_plain_logits() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits, rows(4, temperature=0.0))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logprobs, logits.log_softmax(-1).max(-1).values)


def test_neighbours_do_not_matter() -> None:
    logits = torch.randn(16, 100, generator=torch.Generator().manual_seed(0))
    settings = rows(16)
    together, _ = sample(logits, settings)
    for row in (0, 7, 15):
        alone = rows(16)
        for name in ("key", "counter", "temperature", "greedy", "top_p", "top_k", "min_p"):
            setattr(alone, name, getattr(settings, name)[row : row + 1])
        assert sample(logits[row : row + 1], alone)[0].item() == together[row]


def test_extremes_of_the_noise() -> None:
    """The first and the last token with any weight, never one beyond."""
    weights = torch.tensor([[0.0, 0.1, 0.0, 0.9, 0.0]], dtype=torch.float64).expand(2, -1).cumsum(-1)
    assert _invert(weights, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)).tolist() == [1, 3]
    tiny = torch.full((1, 150_000), 1e-12, dtype=torch.float64).cumsum(-1)
    assert _invert(tiny, torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)).item() == 149_999


def test_broken_logits_give_nan_and_no_crash() -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = float("nan")
    tokens, logprobs = sample(logits, rows(2))
    assert logprobs[0] == pytest.approx(-math.log(5))
    assert logprobs[1].isnan()
    assert 0 <= int(tokens[1]) < 5


def test_noise_is_uniform_and_independent() -> None:
    keys = mix64(torch.arange(4096))
    noise = torch.stack([uniform(keys, torch.full_like(keys, counter)) for counter in range(64)])
    assert noise.dtype == torch.float64
    assert float(noise.min()) >= 0.0
    assert float(noise.max()) < 1.0
    counts = torch.histc(noise.float(), bins=100, min=0.0, max=1.0)
    expected = noise.numel() / 100
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 150  # 99 degrees of freedom: 99.9 % lie below 148
    for shifted in (noise[:, 1:] - noise[:, :-1].roll(0), noise[1:] - noise[:-1]):
        assert abs(float(shifted.mean())) < 0.005  # neither neighbouring seeds nor neighbouring tokens lean
    flat = noise - 0.5
    assert abs(float((flat[:, 1:] * flat[:, :-1]).mean())) < 1e-3
    assert abs(float((flat[1:] * flat[:-1]).mean())) < 1e-3
    assert len(noise.unique()) == noise.numel()


def test_mix64_is_splitmix64() -> None:
    """Known outputs of the generator seeded with 0 and 1234567 (its state after one step, mixed)."""
    golden = 0x9E3779B97F4A7C15
    for seed, first in ((0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317)):
        state = (seed + golden) % (1 << 64)
        signed = state - (1 << 64) if state >= 1 << 63 else state
        assert int(mix64(torch.tensor(signed))) % (1 << 64) == first
