"""Interrupted samples go on from their own tokens, on the real embedded engine."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from nanorl.config import AlgoConfig, RolloutConfig
from nanorl.engine.client import EngineClient
from nanorl.engine.generation import GenerationClient
from nanorl.engine.protocol import SamplingParams, WeightUpdateFromDisk
from nanorl.rewards.hub import InProcessGrader
from nanorl.rollout.single_turn import SingleTurn
from nanorl.tokens.chat import load_chat
from nanorl.types import Completion, Group, Prompt, Status, VersionSpan
from tests.engines import RunningEngine, running_engine
from tests.tiny_models import build_tiny_model

BUDGET = 100


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    model = build_tiny_model(tmp_path_factory.mktemp("models") / "m")
    with running_engine("embedded", model) as running:
        yield running


def test_completions_join_with_their_versions() -> None:
    first = Completion(
        token_ids=(5, 6), logprobs=(-0.1, -0.2), weight_versions=(VersionSpan(3, 0, 2),), finish_reason="abort"
    )
    rest = Completion(
        token_ids=(7, 2),
        logprobs=(-0.3, -0.4),
        weight_versions=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)),
        finish_reason="stop",
    )
    whole = first.followed_by(rest)
    assert whole.token_ids == (5, 6, 7, 2)
    assert whole.logprobs == (-0.1, -0.2, -0.3, -0.4)
    assert whole.weight_versions == ((3, 0, 2), (3, 2, 3), (4, 3, 4))
    assert whole.finish_reason == "stop"


async def cut_in_the_middle(
    rollout: SingleTurn, client: EngineClient, prompts: list[Prompt], version: int
) -> list[Group]:
    """Aborts everything after a moment, and puts other weights in before the continuations come."""
    collecting = asyncio.create_task(rollout.collect(prompts, seed=7, group_size=4))

    def swap() -> None:
        while not client.queue_lengths().get("running"):
            time.sleep(0.001)
        time.sleep(0.05)
        client.pause("abort")
        client.begin_weight_update()
        client.update_from_disk(
            WeightUpdateFromDisk(model_path=client.model_info().model_path, weight_version=str(version))
        )
        client.end_weight_update()
        client.flush_cache()
        client.continue_()

    await asyncio.to_thread(swap)
    return await collecting


def test_an_aborted_sample_goes_on_from_its_own_tokens(engine: RunningEngine) -> None:
    """Nothing sampled is lost: the budget counts from the first token, the prefix keeps its version, and
    rescoring the whole gives the logprobs of both parts (the update put the same weights in under a new version).
    """
    chat = load_chat(str(engine.model))
    asked: list[SamplingParams] = []

    class Watched(GenerationClient):
        async def generate_batch(self, prompt_ids, sampling):
            asked.extend(sampling)
            return await super().generate_batch(prompt_ids, sampling)

    with EngineClient(engine.url) as client:
        sampler = Watched(engine.url)
        rollout = SingleTurn(
            sampler=sampler,
            chat=chat,
            grader=InProcessGrader(lambda prompt, text, finish_reason: float(len(text) % 2)),
            rollout=RolloutConfig(max_new_tokens=BUDGET),
            algo=AlgoConfig(),
            temperature=1.0,
            context_length=256,
        )
        prompts = [Prompt(id=f"p{i}", messages=({"role": "user", "content": f"{i} + {i}?"},)) for i in range(8)]

        async def work() -> list[Group]:
            try:
                return await cut_in_the_middle(rollout, client, prompts, version=5)
            finally:
                await sampler.aclose()

        groups = asyncio.run(work())
        samples = [sample for group in groups for sample in group.samples]
        spanning = [s for s in samples if len({span.version for span in s.weight_versions}) == 2]
        assert spanning, "the abort came too early or too late"
        assert all(s.status in (Status.COMPLETED, Status.TRUNCATED) for s in samples)
        assert all(s.num_sampled <= BUDGET for s in samples)
        assert all(s.num_sampled == BUDGET for s in samples if s.status is Status.TRUNCATED)
        continued = [params.max_new_tokens for params in asked[len(prompts) :]]
        assert continued
        assert all(0 < budget < BUDGET for budget in continued), "the budget that is left, not a new one"
        for sample in spanning[:6]:
            (scored,) = client.score([sample.token_ids], [sample.response_start], 1.0)
            assert scored == pytest.approx(list(sample.rollout_logprobs[sample.response_start :]), abs=1e-4)
