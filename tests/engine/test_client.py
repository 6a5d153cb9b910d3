"""EngineClient and GenerationClient against running engines: the embedded one, and SGLang where there is one."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from nanorl.engine.client import EngineClient
from nanorl.engine.connection import error_message
from nanorl.engine.generation import GenerationClient
from nanorl.engine.protocol import GenerateRequest, SamplingParams, WeightUpdateFromTensor
from nanorl.errors import EngineError, WeightSyncError
from nanorl.types import Completion
from tests.engines import EITHER_ENGINE, RunningEngine, running_engine
from tests.tiny_models import build_tiny_model


@pytest.fixture(scope="module", params=EITHER_ENGINE)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with running_engine(request.param, build_tiny_model(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def client(engine: RunningEngine) -> Iterator[EngineClient]:
    with EngineClient(engine.url, timeout_s=60) as opened:
        yield opened


def sample(url: str, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        async with GenerationClient(url, timeout_s=60) as generation:
            return await generation.generate_batch(prompts, params)

    return asyncio.run(run())


@contextlib.contextmanager
def hung_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []
        threading.Thread(target=lambda: _accept_all(server, kept), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for connection in kept:
            connection.close()


def _accept_all(server: socket.socket, kept: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        while True:
            kept.append(server.accept()[0])


def test_model_info_and_protocol_generation(client: EngineClient, engine: RunningEngine) -> None:
    info = client.model_info()
    assert info.tokenizer_path == str(engine.model)  # model_path is the folder of the last update from disk, if any
    assert info.architectures == ["Qwen3ForCausalLM"]
    assert info.version >= 0
    assert client.has_weight_session
    assert "/generate" in client.routes
    assert client.server_info()["dtype"] == "float32"


def test_batch_keeps_the_order_of_prompts_and_their_samples(client: EngineClient) -> None:
    greedy = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    alone = [sample(client.url, [ids], [greedy])[0][0].token_ids for ids in ([5, 6, 7], [80, 90], [200])]
    assert len(set(alone)) == 3
    groups = sample(client.url, [[5, 6, 7], [80, 90], [200]], [msgspec.structs.replace(greedy, n=2)] * 3)
    assert [{c.token_ids for c in group} for group in groups] == [{ids} for ids in alone]
    assert all(c.finish_reason == "length" and len(c.logprobs) == 3 for group in groups for c in group)


def test_every_token_has_its_logprob_and_version(client: EngineClient, engine: RunningEngine) -> None:
    ((completion, _),) = sample(client.url, [[5, 6, 7]], [SamplingParams(max_new_tokens=8, n=2, ignore_eos=True)])
    version = client.model_info().version
    assert [span.version for span in completion.weight_versions] == [version]
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    if version == 0:
        expected = forward_logprobs(model, [5, 6, 7, *completion.token_ids], 3, 1.0)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def forward_logprobs(model: torch.nn.Module, ids: list[int], prompt_len: int, temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float() / temperature
    return torch.log_softmax(logits, -1)[range(prompt_len - 1, len(ids) - 1), ids[prompt_len:]].tolist()


def test_prefill_rescoring_equals_what_was_sampled(client: EngineClient) -> None:
    prompts = [[5, 6, 7], [80, 90]]
    groups = sample(client.url, prompts, [SamplingParams(max_new_tokens=6, ignore_eos=True)] * 2)
    sequences = [[*ids, *group[0].token_ids] for ids, group in zip(prompts, groups, strict=True)]
    scores = client.score(sequences, [3, 2], 1.0)
    for group, score in zip(groups, scores, strict=True):
        assert score == pytest.approx(group[0].logprobs, abs=1e-4)
    assert client.score([[5, 6]], [2], 1.0) == [[]]


def test_rescoring_at_another_temperature(client: EngineClient, engine: RunningEngine) -> None:
    """slime 557, OpenRLHF 857, trl 4873: SGLang would answer logprobs of temperature 1, without a word."""
    params = SamplingParams(max_new_tokens=6, temperature=0.5, ignore_eos=True)
    ((completion,),) = sample(client.url, [[5, 6, 7]], [params])
    sequence = [5, 6, 7, *completion.token_ids]
    if engine.is_embedded:
        assert client.score([sequence], [3], 0.5)[0] == pytest.approx(completion.logprobs, abs=1e-4)
    else:
        with pytest.raises(EngineError, match=r"at temperature 1 only, expected 0\.5"):
            client.score([sequence], [3], 0.5)


def test_a_bad_prompt_fails_alone(client: EngineClient) -> None:
    """prime-rl 1986, trl 3698: a prompt beyond the context is an error of its own, neither cut nor fatal to the
    batch."""
    (bad,), (good,) = sample(client.url, [[5] * 600, [5, 6]], [SamplingParams(max_new_tokens=2)] * 2)
    assert (bad.finish_reason, bad.token_ids) == ("error", ())
    assert bad.error is not None
    assert "600" in bad.error
    assert good.finish_reason in ("stop", "length")


def test_many_requests_in_flight(client: EngineClient) -> None:
    request = GenerateRequest(
        input_ids=[5, 6], sampling_params=SamplingParams(max_new_tokens=4, n=2), return_logprob=True
    )

    async def run() -> list[Completion]:
        async with GenerationClient(client.url) as generation:
            return await generation.generate([request] * 100)

    assert len(asyncio.run(run())) == 200


def test_session_refusals_carry_the_engines_message(client: EngineClient) -> None:
    with pytest.raises(WeightSyncError, match=r"end_weight_update.*no weight-update session is open"):
        client.end_weight_update()
    client.begin_weight_update()
    try:
        with pytest.raises(WeightSyncError, match="already open"):
            client.begin_weight_update()
    finally:
        client.end_weight_update()


def test_update_outside_a_session_is_refused(client: EngineClient, engine: RunningEngine) -> None:
    if not engine.is_embedded:
        pytest.skip("SGLang opens the payload before it asks for the session: a bad one would kill it")
    with pytest.raises(WeightSyncError, match="begin_weight_update"):
        client.update_from_tensor(
            WeightUpdateFromTensor(serialized_named_tensors=["AAAA"], load_format="flattened_bucket")
        )


def test_pause_holds_requests_and_continue_answers_them(client: EngineClient) -> None:
    client.pause("retract")
    answered = threading.Event()
    thread = threading.Thread(
        target=lambda: (sample(client.url, [[5, 6]], [SamplingParams(max_new_tokens=2)]), answered.set())
    )
    thread.start()
    try:
        assert not answered.wait(1.0)
    finally:
        client.continue_()
    assert answered.wait(20.0)
    thread.join()


def test_abort_answers_with_what_there_is(client: EngineClient) -> None:
    results: list[list[list[Completion]]] = []
    long = SamplingParams(max_new_tokens=400, ignore_eos=True)
    thread = threading.Thread(target=lambda: results.append(sample(client.url, [[5, 6]], [long])))
    thread.start()
    end = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < end:
        client.abort()
        time.sleep(0.02)
    thread.join()
    completion = results[0][0][0]
    assert completion.finish_reason == "abort"
    assert len(completion.logprobs) == len(completion.token_ids) < 400


def test_flush_refused_while_requests_run_names_the_queues(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang 33783, AReaL 140: bounded retries, then an error with the queue lengths."""
    monkeypatch.setattr("nanorl.engine.client.FLUSH_WAITS_S", (0.01, 0.01))
    long = SamplingParams(max_new_tokens=450, ignore_eos=True)
    thread = threading.Thread(target=lambda: sample(client.url, [[5, 6]] * 8, [long] * 8))
    thread.start()
    try:
        end = time.monotonic() + 30
        while client.queue_lengths().get("running") != 8 and time.monotonic() < end:
            time.sleep(0.01)
        client.pause("in_place")
        with pytest.raises(EngineError, match=r"refused 3 times.*8 running, 0 waiting"):
            client.flush_cache()
    finally:
        client.continue_()
        client.abort()
        thread.join()
    client.flush_cache()


def test_nobody_listens() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/model_info: nothing listens there"):
        EngineClient("http://127.0.0.1:9").model_info()
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/generate: no answer in 4 tries"):
        sample("http://127.0.0.1:9", [[5]], [SamplingParams()])


def test_hung_engine_is_an_error_within_the_timeout() -> None:
    """slime 1632, miles 868: a hung engine must not hang the run."""
    with hung_server() as url:
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"no answer within 0\.5 s"):
            EngineClient(url, timeout_s=0.5).model_info()

        async def run() -> None:
            async with GenerationClient(url, timeout_s=0.5) as generation:
                await generation.generate_batch([[5]], [SamplingParams()])

        with pytest.raises(EngineError, match=r"no answer within 0\.5 s"):
            asyncio.run(run())
        assert time.monotonic() - start < 5.0


def test_wait_ready_stops_as_soon_as_the_engine_is_dead() -> None:
    def dead() -> None:
        raise EngineError("the child died")

    with pytest.raises(EngineError, match="the child died"):
        EngineClient("http://127.0.0.1:9").wait_ready(60.0, alive=dead)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"success": false, "message": "no session"}', "no session"),
        (b'{"detail": "not found"}', "not found"),
        (b"Flush cache failed.\n", "Flush cache failed."),
        (b"[1]", "[1]"),
        (b"", "an empty body"),
        (
            b"<!DOCTYPE html>\n<html><style>p {}</style><title>404</title>\n<body>Not &lt;found&gt;</body></html>",
            "404 Not <found>",
        ),
        (b"word " * 100, "word " * 39 + "..."),
    ],
)
def test_error_messages_of_every_form(body: bytes, message: str) -> None:
    assert error_message(body) == message
