"""What nanorl relies on, of either engine: ids and logprobs as sampled, temperature, stops, pauses, order of calls."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nanorl.engine.client import EngineClient
from nanorl.engine.generation import GenerationClient
from nanorl.engine.protocol import FLATTENED_BUCKET, SamplingParams, WeightUpdateFromTensor
from nanorl.types import Completion
from nanorl.weight_sync.bucket import FlatBucket, drop_aliases
from nanorl.weight_sync.shared_memory import SharedMemorySync
from tests.engines import EITHER_ENGINE, RunningEngine, running_engine
from tests.tiny_models import build_tiny_model

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module", params=EITHER_ENGINE)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with running_engine(request.param, build_tiny_model(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture(scope="module")
def model(engine: RunningEngine) -> PreTrainedModel:
    """The folder's weights, which the engine holds as well, whatever another test has left in it."""
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    with EngineClient(engine.url) as client:
        SharedMemorySync(client).sync(model.state_dict().items(), client.model_info().version + 1)
    return model


@pytest.fixture
def client(engine: RunningEngine, model: PreTrainedModel) -> Iterator[EngineClient]:
    with EngineClient(engine.url, timeout_s=60) as opened:
        yield opened


def sample(client: EngineClient, params: SamplingParams, n: int = 1) -> list[Completion]:
    async def run() -> list[list[Completion]]:
        async with GenerationClient(client.url, timeout_s=100) as generation:
            return await generation.generate_batch([PROMPT] * n, [params] * n)

    return [completion for group in asyncio.run(run()) for completion in group]


class Running:
    """Requests that run while the test does something to the engine."""

    def __init__(self, client: EngineClient, num_tokens: int, n: int = 1) -> None:
        self.answers: list[Completion] = []
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        self.thread = threading.Thread(target=lambda: self.answers.extend(sample(client, params, n)))
        self.thread.start()
        end = time.monotonic() + 30
        while client.queue_lengths().get("running") != n:
            assert time.monotonic() < end
            time.sleep(0.005)

    def wait(self) -> list[Completion]:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.answers


def forward_logprobs(model: PreTrainedModel, response: Sequence[int], temperature: float = 1.0) -> list[float]:
    ids = [*PROMPT, *response]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float() / temperature
    return torch.log_softmax(logits, -1)[range(len(PROMPT) - 1, len(ids) - 1), ids[len(PROMPT) :]].tolist()


def test_what_was_sampled_is_never_encoded_again(client: EngineClient, engine: RunningEngine) -> None:
    """trl 5242: ids come from the engine. Random bytes are no text: encoding what they decode to gives other ids."""
    (completion,) = sample(client, SamplingParams(max_new_tokens=24, ignore_eos=True))
    tokenizer = AutoTokenizer.from_pretrained(engine.model)
    text = tokenizer.decode(list(completion.token_ids))
    assert tokenizer.encode(text, add_special_tokens=False) != list(completion.token_ids)
    assert len(completion.token_ids) == len(completion.logprobs) == 24
    scored = client.score([[*PROMPT, *completion.token_ids]], [len(PROMPT)], 1.0)
    assert scored[0] == pytest.approx(completion.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_are_of_logits_over_temperature(
    client: EngineClient, engine: RunningEngine, model: PreTrainedModel, temperature: float
) -> None:
    """slime 557, OpenRLHF 857, trl 4873: about 1 nat off where one side forgets the temperature."""
    completions = sample(client, SamplingParams(max_new_tokens=16, temperature=temperature, ignore_eos=True), n=4)
    for completion in completions:
        expected = forward_logprobs(model, completion.token_ids, temperature)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5 if engine.is_embedded else 1e-4)
        if temperature != 1.0:
            assert completion.logprobs != pytest.approx(forward_logprobs(model, completion.token_ids), abs=1e-2)


@pytest.mark.parametrize("no_stop_trim", [True, False])
def test_several_stop_ids_and_nothing_sampled_is_stripped(client: EngineClient, no_stop_trim: bool) -> None:
    """AReaL 846: the id that stopped it is the last one sampled, with its logprob; it need not be eos."""
    stops = list(range(100, 200))
    params = SamplingParams(max_new_tokens=60, stop_token_ids=stops, ignore_eos=False, no_stop_trim=no_stop_trim)
    completions = sample(client, params, n=8)
    ended_by = {completion.token_ids[-1] for completion in completions if completion.finish_reason == "stop"}
    assert len(ended_by) > 1
    assert ended_by <= {*stops, 2}
    for completion in completions:
        assert not {*completion.token_ids[:-1]} & {*stops, 2}
        assert len(completion.logprobs) == len(completion.token_ids)


def test_the_vocabulary_s_last_id_is_scored_like_any_other(client: EngineClient, model: PreTrainedModel) -> None:
    """SGLang names it 0 in what it returns."""
    last = model.config.vocab_size - 1
    response = (9, last, 11, last)
    scored = client.score([[*PROMPT, *response]], [len(PROMPT)], 1.0)
    assert scored[0] == pytest.approx(forward_logprobs(model, response), abs=1e-4)


def test_retracted_requests_go_on_and_finish(client: EngineClient, model: PreTrainedModel) -> None:
    running = Running(client, 120)
    client.pause("retract")
    client.flush_cache()
    client.continue_()
    (completion,) = running.wait()
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 120)
    assert completion.logprobs == pytest.approx(forward_logprobs(model, completion.token_ids), abs=1e-3)


def test_requests_paused_in_place_go_on_and_finish(client: EngineClient, model: PreTrainedModel) -> None:
    running = Running(client, 120)
    client.pause("in_place")
    time.sleep(0.3)
    assert running.thread.is_alive()
    client.continue_()
    (completion,) = running.wait()
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 120)
    assert completion.logprobs == pytest.approx(forward_logprobs(model, completion.token_ids), abs=1e-3)


def test_a_pause_that_aborts_answers_with_what_there_is(client: EngineClient) -> None:
    running = Running(client, 400)
    client.pause("abort")
    (completion,) = running.wait()
    client.continue_()
    assert completion.finish_reason == "abort"
    assert len(completion.logprobs) == len(completion.token_ids) < 400


ORDERS: dict[str, tuple[Callable[[EngineClient], None], ...]] = {
    "pause, begin, send, end, flush, continue": (
        lambda client: client.pause("retract"),
        EngineClient.begin_weight_update,
    ),
    "begin, pause, send, end, flush, continue": (
        EngineClient.begin_weight_update,
        lambda client: client.pause("retract"),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_either_order_of_pause_and_begin(
    client: EngineClient, engine: RunningEngine, model: PreTrainedModel, order: str
) -> None:
    """With requests in flight, which finish whole. SGLang's begin waits for them to end where nothing has paused it."""
    tensors = drop_aliases(model.state_dict().items())
    bucket = FlatBucket(tensors, dtype=None, device=torch.device("cpu"))
    bucket.fill(bucket.layouts[0], tensors)
    version = client.model_info().version + 1
    update = WeightUpdateFromTensor(
        serialized_named_tensors=[bucket.payload(0)],
        load_format=FLATTENED_BUCKET,
        flush_cache=False,
        weight_version=str(version),
    )
    running = Running(client, 100, n=2)
    for call in ORDERS[order]:
        call(client)
    client.update_from_tensor(update)
    client.end_weight_update()
    client.flush_cache()
    client.continue_()
    for completion in running.wait():
        assert len(completion.token_ids) == 100
        versions = [span.version for span in completion.weight_versions]
        assert versions == [version - 1, version] or (not engine.is_embedded and versions == [version - 1])
        assert completion.logprobs == pytest.approx(forward_logprobs(model, completion.token_ids), abs=1e-3)
    assert client.model_info().version == version
    bucket.close()


def test_load_tells_what_is_going_on(client: EngineClient) -> None:
    assert client.queue_lengths() == {"running": 0, "waiting": 0}
    running = Running(client, 400, n=4)
    load = client.load()
    assert load.num_running_reqs == 4
    assert client.tokens_per_s(load) is not None
    assert load.token_usage is not None
    assert 0 <= load.token_usage < 1
    client.abort()
    running.wait()


def test_health_is_more_than_an_answer(client: EngineClient) -> None:
    assert client.is_healthy(timeout_s=30)
    assert not EngineClient("http://127.0.0.1:9").is_healthy(timeout_s=1)
