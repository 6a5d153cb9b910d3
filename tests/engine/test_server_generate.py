"""/generate over HTTP: tokens and logprobs are the model's, whatever else is in the batch."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.engine.embedded import Served, generate_body, sampled, serve

PROMPT = [1, 40, 50, 60, 70]


def reference_logprobs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    """Of the response's tokens, by one plain forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()


def random_prompts(num: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(rng.randrange(low, high))] for _ in range(num)]


def test_answer_has_sglangs_form(engine: Served) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=4, temperature=0, rid="mine")
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (5, 4, 0)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert meta["input_token_logprobs"] == []
    assert all(len(entry) == 3 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert isinstance(answer["text"], str)


def test_list_forms(engine: Served) -> None:
    assert isinstance(engine.generate(PROMPT, max_new_tokens=1), dict)
    assert len(engine.generate([PROMPT], max_new_tokens=1)) == 1
    grouped = engine.generate([PROMPT, PROMPT[:3]], max_new_tokens=1, n=2, rid=["a", "b"])
    assert [a["meta_info"]["prompt_tokens"] for a in grouped] == [5, 5, 3, 3]
    assert [a["meta_info"]["id"] for a in grouped] == ["a_0", "a_1", "b_0", "b_1"]


def test_sampling_params_per_prompt(engine: Served) -> None:
    body = generate_body([PROMPT, PROMPT], temperature=0) | {
        "sampling_params": [{"max_new_tokens": 2, "temperature": 0}, {"max_new_tokens": 3, "temperature": 0}]
    }
    assert [len(a["output_ids"]) for a in engine.ok("/generate", body)] == [2, 3]


def test_greedy_is_the_models_argmax(engine: Served, tiny_model: Any) -> None:
    ids, logprobs = sampled(engine.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True))
    expected = list(PROMPT)
    for _ in range(12):
        with torch.no_grad():
            expected.append(int(tiny_model(input_ids=torch.tensor([expected])).logits[0, -1].argmax()))
    assert ids == expected[5:]
    assert logprobs == pytest.approx(reference_logprobs(tiny_model, PROMPT, ids), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_are_of_logits_over_temperature(engine: Served, tiny_model: Any, temperature: float) -> None:
    """slime 557, trl 4873: temperature on one side only is about 1 nat off."""
    prompts = random_prompts(6, 2, 30)
    answers = engine.generate(prompts, max_new_tokens=20, temperature=temperature, n=3, ignore_eos=True)
    for i, answer in enumerate(answers):
        ids, logprobs = sampled(answer)
        assert len(ids) == 20
        assert logprobs == pytest.approx(reference_logprobs(tiny_model, prompts[i // 3], ids, temperature), abs=1e-5)


def test_padded_batch_equals_each_alone(engine: Served) -> None:
    """SkyRL 747, slime 1809: other logits in a padded batch than alone."""
    prompts = random_prompts(12, 1, 60, seed=1)
    together = engine.generate(prompts, max_new_tokens=16, temperature=0, ignore_eos=True)
    for prompt, answer in zip(prompts, together, strict=True):
        alone = sampled(engine.generate(prompt, max_new_tokens=16, temperature=0, ignore_eos=True))
        ids, logprobs = sampled(answer)
        assert ids == alone[0]
        assert logprobs == pytest.approx(alone[1], abs=1e-5)


def test_a_group_equals_its_members_alone(engine: Served) -> None:
    """The prompt is prefilled once; sample i of n is the request with seed + i."""
    group = engine.generate(PROMPT, max_new_tokens=10, n=4, sampling_seed=100, ignore_eos=True)
    assert [a["meta_info"]["cached_tokens"] for a in group] == [0, 5, 5, 5]
    for i, answer in enumerate(group):
        alone = engine.generate(PROMPT, max_new_tokens=10, sampling_seed=100 + i, ignore_eos=True)
        assert sampled(answer)[0] == sampled(alone)[0]
        assert sampled(answer)[1] == pytest.approx(sampled(alone)[1], abs=1e-5)
    assert len({tuple(a["output_ids"]) for a in group}) == 4


def test_seed_decides_whatever_the_neighbours(engine: Served) -> None:
    alone = engine.generate(PROMPT, max_new_tokens=24, sampling_seed=7, ignore_eos=True)
    others = [engine.generate_later(p, max_new_tokens=40, ignore_eos=True) for p in random_prompts(8, 5, 50, seed=2)]
    engine.wait_tokens()
    among = engine.generate(PROMPT, max_new_tokens=24, sampling_seed=7, ignore_eos=True)
    for other in others:
        other.result()
    assert among["output_ids"] == alone["output_ids"]


def test_without_a_seed_answers_differ(engine: Served) -> None:
    first, second = (engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True) for _ in range(2))
    assert first["output_ids"] != second["output_ids"]


def test_same_batch_gives_same_bits(engine: Served) -> None:
    """Contract 9: a step's prompts as one batch request repeat exactly."""
    prompts = random_prompts(10, 3, 40, seed=3)
    runs = [engine.generate(prompts, max_new_tokens=16, n=4, sampling_seed=11) for _ in range(2)]
    bits = [[(a["output_ids"], a["meta_info"]["output_token_logprobs"]) for a in run] for run in runs]
    assert bits[0] == bits[1]


def test_kv_memory_is_reused_cleanly(tiny_folder: Path) -> None:
    """A second wave runs in rows that the first has used, longer and shorter ones."""
    waves = [random_prompts(9, low, high, seed=low) for low, high in ((30, 60), (1, 5), (10, 90))]
    with serve(tiny_folder, "--max-running-requests", "4", "--max-total-tokens", "512") as small:
        for prompts in waves:
            answers = small.generate(prompts, max_new_tokens=12, temperature=0, ignore_eos=True)
            for prompt, answer in zip(prompts, answers, strict=True):
                alone = small.generate(prompt, max_new_tokens=12, temperature=0, ignore_eos=True)
                assert answer["output_ids"] == alone["output_ids"]


def test_stop_id_ends_and_stays(engine: Served) -> None:
    """AReaL 846: nothing that was sampled is stripped from the ids; several stop ids work."""
    free, _ = sampled(engine.generate(PROMPT, max_new_tokens=12, sampling_seed=3, ignore_eos=True))
    stop = free[4]
    assert stop not in free[:4]
    answer = engine.generate(PROMPT, max_new_tokens=12, sampling_seed=3, stop_token_ids=[319, stop, 318])
    assert sampled(answer)[0] == free[:5]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_models_own_stop_id(engine: Served) -> None:
    """Ends at <|im_end|> (id 2) unless ignore_eos says so."""
    runs = engine.generate(PROMPT, max_new_tokens=200, n=16, sampling_seed=0)
    stopped = [a for a in runs if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert stopped
    for answer in stopped:
        assert answer["output_ids"].index(2) == len(answer["output_ids"]) - 1
        assert answer["meta_info"]["finish_reason"]["matched"] == 2
    ignoring = engine.generate(PROMPT, max_new_tokens=200, n=16, sampling_seed=0, ignore_eos=True)
    assert all(len(a["output_ids"]) == 200 for a in ignoring)
    assert any(2 in a["output_ids"] for a in ignoring)


def test_stop_string(engine: Served, tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    free = next(
        a
        for seed in range(200)
        if len(set((a := engine.generate(PROMPT, max_new_tokens=8, sampling_seed=seed, ignore_eos=True))["text"])) > 5
        and "\ufffd" not in a["text"]
        and a["text"].isprintable()
    )
    seed = next(
        s
        for s in range(200)
        if engine.generate(PROMPT, max_new_tokens=8, sampling_seed=s, ignore_eos=True)["output_ids"]
        == free["output_ids"]
    )
    stop = free["text"][2:4]
    answer = engine.generate(PROMPT, max_new_tokens=8, sampling_seed=seed, ignore_eos=True, stop=["nowhere", stop])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == free["text"][: free["text"].index(stop)]
    ids, logprobs = sampled(answer)
    assert ids == free["output_ids"][: len(ids)]
    assert tokenizer.decode(ids).endswith(stop)
    assert len(logprobs) == len(ids)


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_truncation_to_one_token_is_greedy(engine: Served, sampling: dict[str, Any]) -> None:
    greedy = engine.generate(PROMPT, max_new_tokens=10, temperature=0, ignore_eos=True)
    narrow = engine.generate(PROMPT, max_new_tokens=10, temperature=1.0, ignore_eos=True, **sampling)
    assert narrow["output_ids"] == greedy["output_ids"]
    # Logprobs stay those of the whole vocabulary.
    assert sampled(narrow)[1] == pytest.approx(sampled(greedy)[1], abs=1e-6)


def test_scoring_a_finished_sequence(engine: Served) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=20, temperature=0.7, sampling_seed=5, ignore_eos=True)
    ids, logprobs = sampled(answer)
    body = generate_body(PROMPT + ids, max_new_tokens=0, temperature=0.7) | {"logprob_start_len": len(PROMPT) - 1}
    scored = engine.ok("/generate", body)
    entries = scored["meta_info"]["input_token_logprobs"]
    assert entries[0] == [None, PROMPT[-1], None]
    assert [entry[1] for entry in entries[1:]] == ids
    assert [entry[0] for entry in entries[1:]] == pytest.approx(logprobs, abs=1e-5)
    assert scored["output_ids"] == []
    assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_scoring_beside_generation(engine: Served, tiny_model: Any) -> None:
    prompts = random_prompts(5, 8, 40, seed=4)
    body = generate_body(prompts, max_new_tokens=3, n=2) | {"logprob_start_len": 0}
    for i, answer in enumerate(engine.ok("/generate", body)):
        prompt = prompts[i // 2]
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == prompt
        expected = reference_logprobs(tiny_model, prompt[:1], prompt[1:])
        assert [entry[0] for entry in entries[1:]] == pytest.approx(expected, abs=1e-5)


def test_stream_adds_up_to_the_answer(engine: Served) -> None:
    body = generate_body(PROMPT, max_new_tokens=6, sampling_seed=9, ignore_eos=True)
    whole = engine.ok("/generate", body)
    response = requests.post(engine.url + "/generate", json=body | {"stream": True}, timeout=30, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_stream_of_a_group_says_which(engine: Served) -> None:
    body = generate_body([PROMPT, PROMPT[:2]], max_new_tokens=2, ignore_eos=True) | {"stream": True}
    text = requests.post(engine.url + "/generate", json=body, timeout=30).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    assert sorted(chunk["index"] for chunk in chunks) == [0, 0, 1, 1]


def test_more_rows_than_fit_wait(tiny_folder: Path) -> None:
    with serve(tiny_folder, "--max-running-requests", "3", "--max-total-tokens", "96") as small:
        answers = small.generate([PROMPT] * 4, max_new_tokens=20, n=3, temperature=0, ignore_eos=True)
        assert len({tuple(a["output_ids"]) for a in answers}) == 1
        assert len(answers) == 12
        refused = small.call("/generate", generate_body(PROMPT, max_new_tokens=100))
    assert refused.status_code == 400
    assert "never fit" in refused.json()["error"]["message"]


REFUSED = [
    (generate_body([]), "cannot be empty"),
    (generate_body([[1], []]), "cannot be empty"),
    (generate_body([1, [2]]), "mixture"),
    (generate_body([1, 100_000]), "must be in [0"),
    (generate_body([-1]), "must be in [0"),
    (generate_body(PROMPT, max_new_tokens=5000), "maximum context length of 512"),
    (generate_body(PROMPT * 200, max_new_tokens=1), "longer than the model's context"),
    (generate_body(PROMPT, temperature=-1), "temperature"),
    (generate_body(PROMPT, top_p=0), "top_p"),
    (generate_body(PROMPT, top_k=0), "top_k"),
    (generate_body(PROMPT, min_p=2), "min_p"),
    (generate_body(PROMPT, n=0), "n must"),
    (generate_body(PROMPT, max_new_tokens=-1), "max_new_tokens"),
    (generate_body(PROMPT, sampling_seed=1 << 64), "sampling_seed"),
    (generate_body(PROMPT, max_new_token=1), "max_new_token"),
    (generate_body([PROMPT, PROMPT]) | {"sampling_params": [{}]}, "2 prompts"),
    (generate_body(PROMPT) | {"logprob_start_len": 6}, "logprob_start_len"),
    (generate_body(None), "text or input_ids"),
    (generate_body(PROMPT) | {"text": "a"}, "text or input_ids"),
    (generate_body(PROMPT) | {"inputids": []}, "inputids"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_mistakes_are_refused(engine: Served, body: dict[str, Any], message: str) -> None:
    response = engine.call("/generate", body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        generate_body(PROMPT, regex="a+"),
        generate_body(PROMPT, frequency_penalty=0.1),
        generate_body(PROMPT) | {"top_logprobs_num": 2},
        generate_body(PROMPT) | {"return_routed_experts": True},
        generate_body(PROMPT) | {"lora_path": "x"},
    ],
)
def test_what_only_sglang_does_is_501(engine: Served, body: dict[str, Any]) -> None:
    response = engine.call("/generate", body)
    assert response.status_code == 501
    assert "SGLang" in response.json()["error"]["message"]


def test_not_json(engine: Served) -> None:
    response = requests.post(engine.url + "/generate", data=b"{", timeout=10)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
