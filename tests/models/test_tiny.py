"""The tiny model: an ordinary Hugging Face folder, the same bits from the same recipe."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from nanorl.data.arithmetic import ArithmeticTask
from nanorl.models.demonstrations import draw_demonstrations
from nanorl.models.presets import check_folder
from nanorl.models.tiny import Recipe, Shape, build_random, build_tiny, encode, ensure_tiny, train_recipe_tokenizer
from nanorl.models.warm_start import WarmStart, answer_loss, collate, lr_factor, train_on
from nanorl.rewards.rules import grade_arithmetic
from nanorl.tokens.chat import load_chat

SHORT = Recipe(shape=Shape(hidden_size=64, intermediate_size=128), warm_start=WarmStart(steps=6))
EXAMPLES = [([5, 6, 7], [8, 9]), ([5, 6], [8, 9, 10, 2])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder, SHORT)
    return folder


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.06,
    )
    return Qwen3ForCausalLM(config)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_same_recipe_gives_the_same_bits_and_another_seed_others(folder: Path, tmp_path: Path):
    torch.manual_seed(12345)  # whatever the process drew before must not matter
    before = torch.random.get_rng_state()
    build_tiny(tmp_path / "again", SHORT)
    assert torch.equal(torch.random.get_rng_state(), before), "nor what it draws after"
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes(), file
    build_random(tmp_path / "a", seed=0)
    build_random(tmp_path / "b", seed=1)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "b" / "model.safetensors").read_bytes()


def test_transformers_loads_the_folder_and_generates(folder: Path):
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    ids = torch.tensor([load_chat(folder).render(ArithmeticTask(0).next(1)[0].messages)])
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]
    check_folder(folder)


def test_a_saved_and_reloaded_tokenizer_gives_the_same_ids(folder: Path):
    """AutoTokenizer replaces some models' tokenizers by their family's own, which splits numbers, without any error."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    demonstrations = draw_demonstrations(SHORT.warm_start.num_examples if SHORT.warm_start else 0, SHORT.seed)
    texts = [d.answer for d in demonstrations] + [d.question for d in demonstrations]
    original = train_recipe_tokenizer(SHORT, draw_demonstrations(3000, SHORT.seed))
    for text in [*texts, "Hello, world! 漢字 \n\n <|im_end|>", "x2y 10000 007"]:
        assert tokenizer.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False)
    assert tokenizer.encode("57", add_special_tokens=False) == tokenizer.encode("= 57.", add_special_tokens=False)[1:2]


def test_warm_start_prompts_are_what_the_rollout_renders(folder: Path):
    chat = load_chat(folder)
    prompt = ArithmeticTask(0).next(1)[0]
    demonstrations = [d for d in draw_demonstrations(20000, 0) if d.question == prompt.messages[0]["content"]]
    assert demonstrations
    for prompt_ids, answer_ids in encode(AutoTokenizer.from_pretrained(folder), demonstrations):
        assert prompt_ids == chat.render(prompt.messages)
        assert answer_ids[-1] == chat.stop_token_ids[0] == 2
        assert 2 not in answer_ids[:-1]


def test_examples_are_short(folder: Path):
    """25 tokens on average is what makes warm start and rollouts cheap."""
    examples = encode(AutoTokenizer.from_pretrained(folder), draw_demonstrations(500, 0))
    assert sum(len(prompt) + len(answer) for prompt, answer in examples) / 500 < 27


def test_the_loss_sees_exactly_the_answers_tokens(model: Qwen3ForCausalLM):
    ids, mask = collate(EXAMPLES)
    assert ids.tolist() == [[5, 6, 7, 8, 9, 0], [5, 6, 8, 9, 10, 2]]
    assert mask.long().tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]
    alone = [_answer_logprobs(model, prompt, answer) for prompt, answer in EXAMPLES]
    expected = -sum(sum(row) for row in alone) / 6
    assert answer_loss(model, ids, mask).item() == pytest.approx(expected, abs=1e-5)


def test_training_lowers_the_loss_and_reports_every_step(model: Qwen3ForCausalLM):
    plan = WarmStart(steps=40, batch_size=2, warmup_steps=4, lr=1e-2)
    seen: list[tuple[int, int]] = []
    before = answer_loss(model, *collate(EXAMPLES)).item()
    threads = torch.get_num_threads()
    train_on(model, EXAMPLES * 40, plan, lambda done, total: seen.append((done, total)))
    assert answer_loss(model, *collate(EXAMPLES)).item() < 0.2 * before
    assert seen == [(step, 40) for step in range(1, 41)]
    assert torch.get_num_threads() == threads
    assert not model.training


def test_the_learning_rate_warms_up_and_decays_to_a_twentieth():
    plan = WarmStart(steps=1800)
    assert lr_factor(0, plan) == pytest.approx(1 / 20)
    assert lr_factor(19, plan) == lr_factor(1000, plan) == 1.0
    assert 0.5 < lr_factor(1530, plan) < 0.6
    assert lr_factor(1799, plan) == pytest.approx(0.05, abs=0.002)


@pytest.mark.parametrize("tied", [True, False])
def test_random_models_are_tied_or_not_after_loading(tmp_path: Path, tied: bool):
    model = load(build_random(tmp_path / "model", seed=3, tied=tied))
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert 259 < model.config.vocab_size < 512
    assert model.config.num_hidden_layers == 2


def test_the_cache_has_a_folder_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = ensure_tiny(SHORT)
    built = (first / "model.safetensors").stat().st_mtime_ns
    assert first.is_relative_to(tmp_path / "nanorl" / "models")
    assert ensure_tiny(SHORT) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == built
    assert ensure_tiny(Recipe(shape=SHORT.shape, warm_start=SHORT.warm_start, seed=1)) != first


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_recipe_starts_where_there_is_something_to_improve():
    """Held-out at temperature 1: accuracy about 0.3, format about 0.5, greedy accuracy about 0. Uses the cache."""
    folder = ensure_tiny()
    sampled, greedy = _accuracy_and_format(folder, do_sample=True), _accuracy_and_format(folder, do_sample=False)
    assert 0.2 < sampled[0] < 0.4
    assert 0.45 < sampled[1] < 0.7
    assert greedy[0] < 0.1


def _accuracy_and_format(folder: Path, *, do_sample: bool) -> tuple[float, float]:
    model, chat = load(folder), load_chat(folder)
    torch.manual_seed(0)
    totals = [0.0, 0.0]
    prompts = ArithmeticTask(0).heldout(205)
    by_length: dict[int, list[tuple[int, list[int]]]] = {}  # generate() pads; equal lengths need none
    for i, prompt in enumerate(prompts):
        ids = chat.render(prompt.messages)
        by_length.setdefault(len(ids), []).append((i, ids))
    for length, rows in by_length.items():
        inputs = torch.tensor([ids for _, ids in rows])
        output = model.generate(inputs, max_new_tokens=40, do_sample=do_sample, top_k=0, top_p=1.0)
        for (i, _), ids in zip(rows, output[:, length:].tolist(), strict=True):
            stopped = 2 in ids
            text = chat.decode(ids[: ids.index(2) + 1] if stopped else ids)
            parts = grade_arithmetic(prompts[i], text, "stop" if stopped else "length").parts
            totals[0] += parts["correct"]
            totals[1] += parts["format"]
    return totals[0] / len(prompts), totals[1] / len(prompts)


def _answer_logprobs(model: Qwen3ForCausalLM, prompt: list[int], answer: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]
