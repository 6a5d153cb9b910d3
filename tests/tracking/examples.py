"""Groups and reports like those of a run."""

import random
import struct
from collections.abc import Sequence

from nanorl.types import Group, Prompt, Sample, Status, StepReport, VersionSpan

PROMPT_IDS = (1, 5, 6, 7)


def float32(value: float) -> float:
    """The nearest float32, as engines answer them."""
    return struct.unpack("f", struct.pack("f", value))[0]


def make_sample(group_id: str, index: int, rng: random.Random, reward: float | None = 1.0) -> Sample:
    response = tuple(rng.randrange(256) for _ in range(rng.randint(2, 9)))
    status = Status.FAILED if reward is None else Status.COMPLETED
    return Sample(
        group_id=group_id,
        index=index,
        token_ids=PROMPT_IDS + response,
        loss_mask=(False,) * 4 + (True,) * len(response),
        rollout_logprobs=(0.0,) * 4 + tuple(float32(-rng.expovariate(1.0)) for _ in response),
        weight_versions=(VersionSpan(3, 4, 5), VersionSpan(4, 5, 4 + len(response))),
        status=status,
        finish_reason="error" if reward is None else "stop",
        reward=reward,
        reward_parts={} if reward is None else {"correct": reward, "format": 1.0},
        advantage=0.0 if reward is None else rng.gauss(0, 1) / 3,
        metadata={"cause": "timeout", "error": "took 10 s"} if reward is None else {},
    )


def make_groups(seed: int = 0, rewards: Sequence[float | None] = (0.1, 1.0, None)) -> list[Group]:
    rng = random.Random(seed)
    groups: list[Group] = []
    for row in range(4):
        prompt = Prompt(
            id=f"p{row}",
            messages=({"role": "user", "content": f"What is {row} + 1?\nQuick."},),
            label=str(row + 1),
            metadata={"level": row},
        )
        samples = tuple(make_sample(prompt.id, i, rng, reward) for i, reward in enumerate(rewards))
        groups.append(Group(prompt=prompt, samples=samples))
    return groups


def make_report(step: int, **more: float) -> StepReport:
    metrics = {
        "rollout/reward/mean": 0.1 * step,
        "rollout/correct/mean": 1 / 3,
        "train/mismatch/mean": 3.1e-7,
        "train/drift/mean": 2.5e-2,
        "rollout/tokens_per_s": 23123.4,
        "time/step_s": 0.85,
        **more,
    }
    return StepReport(step=step, weight_version=step + 1, metrics=metrics)


def decode(token_ids: Sequence[int]) -> str:
    """A text with one letter a token."""
    return "".join(chr(0x4E00 + i) for i in token_ids)
