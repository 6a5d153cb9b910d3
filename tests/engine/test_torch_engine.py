"""The engine without HTTP: how often it runs the model, and how it lays out its memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanorl.engine.adapter import ModelAdapter, find_stop_ids, load_model
from nanorl.engine.core import EngineCore, EngineLimits
from nanorl.engine.kv_cache import SlotCache
from nanorl.engine.protocol import SamplingParams
from nanorl.engine.sequence import EngineSequence, Request
from nanorl.errors import ModelError
from nanorl.tokens.chat import load_tokenizer

CPU = torch.device("cpu")


class Passes(ModelAdapter):
    """Counts the shapes of forward passes."""

    shapes: list[tuple[int, int]]

    def hidden(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.__dict__.setdefault("shapes", []).append(tuple(input_ids.shape))
        return super().hidden(input_ids, *args, **kwargs)


@pytest.fixture
def adapter(tiny_folder: Path) -> Passes:
    adapter = Passes(load_model(str(tiny_folder), CPU, torch.float32).model)
    adapter.shapes.clear()
    return adapter


def make_core(adapter: ModelAdapter, tokenizer: Any = None, **limits: int) -> EngineCore:
    sizes = {"context_length": 512, "max_total_tokens": 4096, "max_running_requests": 64, **limits}
    return EngineCore(adapter, tokenizer, EngineLimits(**sizes))


def make_request(prompts: list[list[int]], n: int = 1, **sampling: Any) -> Request:
    request = Request(on_done=lambda _request, _error: None)
    params = SamplingParams(n=n, **sampling)
    request.sequences = [
        EngineSequence(rid=f"{p}-{i}", prompt_ids=prompt, params=params, seed=i, request=request)
        for p, prompt in enumerate(prompts)
        for i in range(n)
    ]
    return request


def finish(core: EngineCore, *requests: Request) -> None:
    for _ in range(10_000):
        if not any(request.num_open for request in requests):
            return
        core.step()
    raise AssertionError("never done")


def test_a_prompt_is_prefilled_once_for_its_group(adapter: Passes) -> None:
    core = make_core(adapter)
    request = make_request([[5, 6, 7], [8, 9]], n=8, max_new_tokens=4)
    core.submit(request)
    finish(core, request)
    assert adapter.shapes == [(2, 3), (16, 1), (16, 1), (16, 1)]


def test_work_follows_ragged_lengths(adapter: Passes) -> None:
    """Finished rows cost nothing: every pass is over exactly the rows that still run."""
    core = make_core(adapter)
    requests = [make_request([[5, 6, 7]], max_new_tokens=length) for length in (2, 5, 5, 9)]
    for request in requests:
        core.submit(request)
    finish(core, *requests)
    assert [rows for rows, width in adapter.shapes if width == 1] == [4, 3, 3, 3, 1, 1, 1, 1]


def test_requests_join_between_tokens(adapter: Passes) -> None:
    core = make_core(adapter)
    first, second = make_request([[5, 6]], max_new_tokens=9), make_request([[7]], max_new_tokens=2)
    core.submit(first)
    core.step()
    core.step()
    core.submit(second)
    finish(core, second)
    assert first.num_open == 1
    finish(core, first)
    assert (2, 1) in adapter.shapes


def test_rows_close_up_when_one_in_the_middle_is_aborted_between_steps(adapter: Passes) -> None:
    """Also where a long budget has made the rows' tensors grow inside of a step."""
    alone = make_request([[5, 6]], max_new_tokens=400, ignore_eos=True)
    core = make_core(adapter)
    core.submit(alone)
    finish(core, alone)
    core = make_core(adapter)
    kept, gone = (make_request([[5, 6]], max_new_tokens=400, ignore_eos=True) for _ in range(2))
    gone.sequences[0].rid = "gone"
    core.submit(gone)
    core.submit(kept)
    core.step()
    core.step()
    core.abort("gone")
    assert (gone.num_open, kept.num_open) == (0, 1)
    finish(core, kept)
    assert kept.sequences[0].output_ids == alone.sequences[0].output_ids


def test_prefill_batches_keep_to_their_budget(adapter: Passes) -> None:
    core = make_core(adapter, max_prefill_tokens=100)
    request = make_request([[5] * length + [i] for i, length in enumerate((60, 3, 40, 4, 90, 200))], max_new_tokens=1)
    core.submit(request)
    finish(core, request)
    prefills = [rows * width for rows, width in adapter.shapes]
    assert all(tokens <= 100 or rows == 1 for tokens, (rows, _) in zip(prefills, adapter.shapes, strict=True))
    assert sum(rows for rows, _ in adapter.shapes) == 6


def test_rows_that_do_not_fit_wait_in_order(adapter: Passes) -> None:
    core = make_core(adapter, max_total_tokens=64, max_running_requests=8)
    order: list[str] = []
    requests = [make_request([[5] * 10], max_new_tokens=6) for _ in range(7)]
    for i, request in enumerate(requests):
        request.on_done = lambda _request, _error, i=i: order.append(str(i))
        core.submit(request)
    most = 0
    while any(request.num_open for request in requests):
        core.step()
        most = max(most, len(core.batch))
    assert most == 4  # 64 positions, 16 a row
    assert order == [str(i) for i in range(7)]


def test_a_long_request_changes_the_layout_under_running_rows(adapter: Passes) -> None:
    short, long = make_request([[5, 6, 7]], max_new_tokens=12), make_request([[8] * 50], max_new_tokens=40)
    alone = make_core(adapter)
    for request in (make_request([[5, 6, 7]], max_new_tokens=12), make_request([[8] * 50], max_new_tokens=40)):
        alone.submit(request)
        finish(alone, request)
        expected = short if len(request.sequences[0].prompt_ids) == 3 else long
        expected.sequences[0].rid = str(request.sequences[0].output_ids)
    core = make_core(adapter, max_total_tokens=256)
    core.submit(short)
    for _ in range(4):
        core.step()
    before = core._cache.row_length
    core.submit(long)
    core.step()
    assert core._cache.row_length > before
    finish(core, short, long)
    for request in (short, long):
        assert str(request.sequences[0].output_ids) == request.sequences[0].rid


def test_cache_rows_move_and_change_length() -> None:
    from nanorl.engine.adapter import LayerShape

    cache = SlotCache([LayerShape(2, 8, 6)] * 2, 48, CPU, torch.float32)
    cache.set_row_length(8, 0, 0)
    keys = torch.arange(3 * 2 * 5 * 4, dtype=torch.float32).reshape(3, 2, 5, 4)  # [U, H, T, D]
    values = keys[..., :3].clone()
    cache.begin_prefill(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
    for layer in range(2):
        cache.update(keys + layer, values + layer, layer)
    cache.set_row_length(12, 3, 5)
    cache.move_rows(torch.tensor([2]), torch.tensor([0]), 5)
    new = torch.full((2, 2, 1, 4), 100.0)
    for layer in range(2):
        cache.begin_decode(torch.tensor([5, 3]), 6)
        held, held_values = cache.update(new, new[..., :3], layer)
        assert held.shape == (2, 2, 6, 4)
        assert torch.equal(held[0, :, :5], keys[2] + layer)
        assert torch.equal(held[1, :, :3], keys[1, :, :3] + layer)
        assert (held[0, :, 5] == 100).all()
        assert (held[1, :, 3] == 100).all()
        assert torch.equal(held_values[0, :, :5], values[2] + layer)


def test_retraction_takes_tokens_out_of_the_tensors(adapter: Passes) -> None:
    core = make_core(adapter)
    request = make_request([[5, 6, 7]], n=3, max_new_tokens=8)
    core.submit(request)
    for _ in range(4):
        core.step()
    core.pause("retract")
    assert [len(s.output_ids) for s in request.sequences] == [4, 4, 4]
    assert not core.has_work
    core.set_version("1")
    core.resume()
    finish(core, request)
    for sequence in request.sequences:
        assert [(s.version, s.start, s.end) for s in sequence.spans] == [("default", 0, 4), ("1", 4, 8)]
        assert len(sequence.output_logprobs) == 8


def test_other_architectures() -> None:
    """Adapters find body, head and cache shapes by trying; what can't work is refused by name."""
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        MistralConfig,
        MistralForCausalLM,
    )

    tiny: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    builds: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
        "sliding": lambda: MistralForCausalLM(MistralConfig(**tiny, **heads, sliding_window=8)),
        "capped": lambda: Gemma2ForCausalLM(Gemma2Config(**tiny, **heads, layer_types=["full_attention"] * 2)),
    }
    adapter = ModelAdapter(builds["gpt2"]())
    core = make_core(adapter, context_length=128)
    request = make_request([[5, 6, 7], [8]], n=2, max_new_tokens=10, temperature=0.0)
    core.submit(request)
    finish(core, request)
    for sequence in request.sequences:
        whole = adapter.run_alone(sequence.prompt_ids + sequence.output_ids).log_softmax(-1)
        picked = whole[len(sequence.prompt_ids) - 1 : -1].max(-1)
        assert picked.indices.tolist() == sequence.output_ids
        assert picked.values.tolist() == pytest.approx(sequence.output_logprobs, abs=1e-5)
    with pytest.raises(ModelError, match="MistralForCausalLM has layers other than full attention"):
        ModelAdapter(builds["sliding"]())
    with pytest.raises(ModelError, match="Gemma2ForCausalLM changes its logits"):
        ModelAdapter(builds["capped"]())


def test_folders_that_are_no_models(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match="Expected a causal language model"):
        load_model(str(tmp_path), CPU, torch.float32)
    with pytest.raises(ModelError, match="Expected a tokenizer"):
        load_tokenizer(str(tmp_path))
    tokenizer = load_tokenizer(str(tiny_folder))
    assert find_stop_ids(str(tiny_folder), load_model(str(tiny_folder), CPU, torch.float32).config, tokenizer) == (2,)
