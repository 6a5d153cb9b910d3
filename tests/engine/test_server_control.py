"""Pausing, aborting, flushing and state over HTTP."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import requests

from tests.engine.embedded import Served, generate_body, sampled

PROMPT = [1, 40, 50, 60, 70]
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True, "sampling_seed": 1}


@pytest.fixture(autouse=True)
def running_again(engine: Served) -> Iterator[None]:
    """A test that fails while the engine is paused must not take the others with it."""
    yield
    engine.ok("/continue_generation", {})
    engine.ok("/abort_request", {"abort_all": True})


def pause(engine: Served, mode: str) -> None:
    assert engine.ok("/pause_generation", {"mode": mode})["status"] == "ok"


def resume(engine: Served) -> None:
    assert engine.ok("/continue_generation", {})["status"] == "ok"


def test_abort_answers_with_what_there_is(engine: Served) -> None:
    pending = engine.generate_later(PROMPT, rid="gone", **LONG)
    engine.wait_tokens()
    assert engine.call("/abort_request", {"rid": "gone"}).status_code == 200
    answer = pending.result(10)
    ids, _ = sampled(answer)
    assert 3 <= len(ids) < 400
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": len(ids)}]


def test_abort_leaves_others_alone(engine: Served) -> None:
    free = engine.generate(PROMPT, **LONG)
    kept = engine.generate_later(PROMPT, rid="kept", **LONG)
    gone = engine.generate_later(PROMPT, rid="gone", n=3, **LONG)
    engine.wait_tokens(20)
    engine.ok("/abort_request", {"rid": "gone"})
    assert [a["meta_info"]["finish_reason"]["type"] for a in gone.result(10)] == ["abort"] * 3
    assert kept.result(20)["output_ids"] == free["output_ids"]


def test_abort_of_nobody_and_of_all(engine: Served) -> None:
    assert engine.call("/abort_request", {"rid": "nobody"}).status_code == 200
    pending = [engine.generate_later(PROMPT, **LONG) for _ in range(3)]
    engine.wait_tokens()
    while any(not p.done() for p in pending):
        engine.ok("/abort_request", {"abort_all": True})
        time.sleep(0.02)
    assert {p.result()["meta_info"]["finish_reason"]["type"] for p in pending} == {"abort"}


def test_default_pause_aborts(engine: Served) -> None:
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens()
    engine.ok("/pause_generation", {})
    assert pending.result(10)["meta_info"]["finish_reason"]["type"] == "abort"


def test_requests_wait_while_paused(engine: Served) -> None:
    pause(engine, "abort")
    pending = engine.generate_later(PROMPT, max_new_tokens=3)
    engine.wait_queued(1)
    assert engine.call("/flush_cache", {}).status_code == 200  # waiting requests hold no KV
    time.sleep(0.1)
    assert not pending.done()
    resume(engine)
    assert pending.result(10)["meta_info"]["completion_tokens"] == 3


def test_retract_goes_on_where_it_was(engine: Served) -> None:
    """The same tokens as without the pause: noise counts tokens, not steps."""
    whole = engine.generate(PROMPT, **LONG)
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens(10)
    pause(engine, "retract")
    assert engine.call("/flush_cache", {}).status_code == 200
    info = engine.ok("/server_info", method="GET")
    assert (info["num_running_reqs"], info["num_waiting_reqs"], info["paused"]) == (0, 1, "retract")
    resume(engine)
    answer = pending.result(20)
    assert answer["output_ids"] == whole["output_ids"]
    assert sampled(answer)[1] == pytest.approx(sampled(whole)[1], abs=1e-5)
    assert answer["meta_info"]["num_retractions"] == 1


def test_retract_keeps_the_order_of_arrival(engine: Served) -> None:
    pending = [engine.generate_later(PROMPT, rid=f"r{i}", max_new_tokens=100, ignore_eos=True) for i in range(3)]
    while len(engine.engine.core.batch) < 3:
        time.sleep(0.002)
    before = sorted(engine.engine.core.batch.sequences, key=lambda s: s.arrival)
    pause(engine, "retract")
    late = engine.generate_later(PROMPT, max_new_tokens=1)
    engine.wait_queued(4)
    assert list(engine.engine.core.waiting)[:3] == before
    resume(engine)
    assert all(p.result(20) for p in [*pending, late])


def test_in_place_keeps_rows_and_refuses_a_flush(engine: Served) -> None:
    whole = engine.generate(PROMPT, **LONG)
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens(10)
    pause(engine, "in_place")
    refused = engine.call("/flush_cache", {})
    assert refused.status_code == 400
    assert "1 requests are running" in refused.text
    resume(engine)
    answer = pending.result(20)
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["meta_info"]["num_retractions"] == 0


def test_flush(engine: Served) -> None:
    """sglang 33783, AReaL 140: refused while requests run, with how many."""
    assert engine.call("/flush_cache", method="GET").status_code == 200
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens()
    assert engine.call("/flush_cache", {}).status_code == 400
    pending.result(20)
    assert engine.call("/flush_cache", {}).status_code == 200


def test_versions_by_name_only(engine: Served) -> None:
    whole = engine.generate(PROMPT, **LONG)
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens(10)
    answer = engine.ok("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
    assert answer == {"success": True, "message": "Weight version updated to 7", "new_version": "7"}
    done = pending.result(20)
    first, second = done["meta_info"]["weight_versions"]
    assert (first["version"], first["start"]) == ("default", 0)
    assert (second["version"], second["start"], second["end"]) == ("7", first["end"], 400)
    assert done["meta_info"]["weight_version"] == "7"
    assert done["output_ids"] == whole["output_ids"]
    engine.ok("/update_weight_version", {"new_version": "default"})


def test_version_call_aborts_by_default(engine: Served) -> None:
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens()
    engine.ok("/update_weight_version", {"new_version": "default"})
    assert pending.result(10)["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_client_that_leaves_ends_its_request(engine: Served) -> None:
    body = generate_body(PROMPT, **LONG)
    for stream in (False, True):
        payload = msgspec.json.encode(body | {"stream": stream})
        with socket.create_connection(("127.0.0.1", int(engine.url.rsplit(":", 1)[1]))) as client:
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
            client.sendall(head.encode() + payload)
            engine.wait_tokens()
        end = time.monotonic() + 10
        while engine.engine.core.batch.sequences:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert not engine.engine._open


def test_state_routes(engine: Served, tiny_folder: Path) -> None:
    info = engine.ok("/model_info", method="GET")
    assert info["model_path"] == info["served_model_name"] == info["tokenizer_path"] == str(tiny_folder)
    assert (info["weight_version"], info["is_generation"], info["model_type"]) == ("default", True, "qwen3")
    server = engine.ok("/server_info", method="GET")
    assert server["dtype"] == "float32"
    assert server["device"] == "cpu"
    assert server["parameters"]["model.norm.weight"] == {"shape": [64], "dtype": "float32"}
    assert server["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    (model,) = engine.ok("/v1/models", method="GET")["data"]
    assert (model["id"], model["max_model_len"]) == (str(tiny_folder), 512)
    (load,) = engine.ok("/v1/loads", method="GET")["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (0, 0, 0.0)
    assert load["max_total_num_tokens"] == server["max_total_num_tokens"]
    assert engine.call("/health", method="GET").status_code == 200
    assert "/begin_weight_update" in engine.ok("/openapi.json", method="GET")["paths"]


def test_health_answers_while_paused_and_busy(engine: Served) -> None:
    pending = engine.generate_later(PROMPT, **LONG)
    engine.wait_tokens()
    assert engine.call("/health", method="GET").status_code == 200
    pause(engine, "in_place")
    assert engine.call("/health", method="GET").status_code == 200
    resume(engine)
    pending.result(20)


@pytest.mark.parametrize(
    "path", ["/release_memory_occupation", "/resume_memory_occupation", "/init_weights_update_group", "/v1/completions"]
)
def test_routes_of_sglang_alone_are_501(engine: Served, path: str) -> None:
    response = engine.call(path, {})
    assert response.status_code == 501
    assert path in response.json()["error"]["message"]
    assert path not in engine.ok("/openapi.json", method="GET")["paths"]


def test_bad_pause_mode(engine: Served) -> None:
    assert engine.call("/pause_generation", {"mode": "softly"}).status_code == 400
    assert engine.engine.core.paused is None


def test_calls_without_a_body(engine: Served) -> None:
    assert requests.post(engine.url + "/continue_generation", timeout=10).status_code == 200
    assert requests.post(engine.url + "/flush_cache", timeout=10).status_code == 200


class TestChat:
    BODY: ClassVar[dict[str, Any]] = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
    }

    def test_answers_as_generate_does(self, engine: Served, tiny_folder: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
        prompt = tokenizer.apply_chat_template(self.BODY["messages"], add_generation_prompt=True, return_dict=False)
        direct = engine.generate(list(prompt), max_new_tokens=5, temperature=0)
        chat = engine.ok("/v1/chat/completions", self.BODY)
        (choice,) = chat["choices"]
        assert choice["message"] == {"role": "assistant", "content": direct["text"]}
        assert choice["finish_reason"] == "length"
        assert [t["logprob"] for t in choice["logprobs"]["content"]] == pytest.approx(sampled(direct)[1], abs=1e-6)
        assert chat["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 5,
            "total_tokens": len(prompt) + 5,
        }

    def test_stream_adds_up(self, engine: Served) -> None:
        whole = engine.ok("/v1/chat/completions", self.BODY)["choices"][0]["message"]["content"]
        text = requests.post(
            engine.url + "/v1/chat/completions", json=self.BODY | {"stream": True}, timeout=30
        ).content.decode()
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [msgspec.json.decode(event) for event in events[:-1]]
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == whole
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"

    def test_refusals(self, engine: Served) -> None:
        assert engine.call("/v1/chat/completions", {"messages": "hi"}).status_code == 400
        assert engine.call("/v1/chat/completions", self.BODY | {"tools": []}).status_code == 501
        assert engine.call("/v1/chat/completions", self.BODY | {"top_logprobs": 2}).status_code == 501
