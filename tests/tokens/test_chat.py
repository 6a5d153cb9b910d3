"""Messages to ids and back, through real fast tokenizers."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from nanorl.errors import ModelError, TokenizationError
from nanorl.tokens.chat import ChatFormat, load_chat, load_tokenizer
from tests.tiny_models import build_tokenizer_folder

SHARED = Path(__file__).parents[2] / ".." / "shared" / "tokenizers"
QUESTION = ({"role": "user", "content": "What is (6 * 9) + 3?"},)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer_folder(folder)
    return folder


@pytest.fixture
def chat(folder: Path) -> ChatFormat:
    return load_chat(folder)


def test_a_rendered_prompt_is_a_plain_list_of_ids(folder: Path, chat: ChatFormat):
    """transformers 41626: version 5 answers a dict from apply_chat_template, version 4 a list."""
    ids = chat.render(QUESTION)
    assert type(ids) is list
    assert all(type(i) is int for i in ids)
    theirs: Any = load_tokenizer(folder).apply_chat_template([dict(QUESTION[0])], add_generation_prompt=True)
    assert ids == (theirs if isinstance(theirs, list) else theirs["input_ids"])
    assert chat.decode(ids) == "<|im_start|>user\nWhat is (6 * 9) + 3?<|im_end|>\n<|im_start|>assistant\n"


def test_the_generation_prompt_is_optional(chat: ChatFormat):
    with_prompt, without = chat.render(QUESTION), chat.render(QUESTION, add_generation_prompt=False)
    assert with_prompt[: len(without)] == without
    assert chat.decode(with_prompt[len(without) :]) == "<|im_start|>assistant\n"


def test_a_template_that_writes_bos_gives_exactly_one(folder: Path):
    """sglang 888, vllm 27515: template text tokenised again with special tokens has two."""
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "<|endoftext|>" + tokenizer.chat_template
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    text = tokenizer.apply_chat_template([dict(QUESTION[0])], tokenize=False)
    assert tokenizer.encode(text)[:2] == [0, 0], "this tokenizer does add its own"
    assert ChatFormat(tokenizer).render(QUESTION).count(0) == 1


def test_stop_ids_are_eos_the_end_of_turn_and_those_of_the_generation_config(folder: Path, tmp_path: Path):
    """AReaL 846: several ids may end a turn."""
    tokenizer = load_tokenizer(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path)
    assert load_chat(tmp_path).stop_token_ids == (0, 2), "eos, and what the template writes after a turn"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9]}')
    assert load_chat(tmp_path).stop_token_ids == (0, 2, 7, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load_chat(tmp_path).stop_token_ids == (0, 2, 5)


def test_decoding_drops_the_final_stop_token_and_nothing_else(chat: ChatFormat):
    ids = chat.encode("a<|im_end|>b<|im_start|><|im_end|>")
    assert chat.decode(ids) == "a<|im_end|>b<|im_start|>"
    assert chat.decode(ids, keep_stop=True) == "a<|im_end|>b<|im_start|><|im_end|>"
    assert chat.decode(ids, skip_special_tokens=True) == "ab"
    assert chat.decode([]) == ""


@pytest.mark.parametrize(
    "text", ["<answer>57</answer>", " leading and  double spaces ", "don 't , ok ?", "naïve 漢字 🙂\n"]
)
def test_text_survives_encode_and_decode(chat: ChatFormat, text: str):
    assert chat.decode(chat.encode(text)) == text


def test_tools_reach_the_template(folder: Path):
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + tokenizer.chat_template
    chat = ChatFormat(tokenizer)
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    assert chat.decode(chat.render(QUESTION, tools)).startswith("[add]<|im_start|>user")
    assert chat.decode(chat.render(QUESTION)).startswith("<|im_start|>user")


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[5].content.strip() }}", "UndefinedError"),
    ],
)
def test_a_template_that_refuses_is_a_named_error(folder: Path, template: str, complaint: str):
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    with pytest.raises(TokenizationError, match=complaint) as raised:
        ChatFormat(tokenizer).render(QUESTION)
    assert "roles: user" in str(raised.value)


def test_a_folder_without_tokenizer_template_or_stop_token_is_a_model_error(folder: Path, tmp_path: Path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        ChatFormat(tokenizer)
    tokenizer.chat_template, tokenizer.eos_token = "{{ messages[-1].content }}", None
    with pytest.raises(ModelError, match="end-of-turn"):
        ChatFormat(tokenizer)


def test_64_threads_share_a_tokenizer_whose_padding_changes(folder: Path):
    """prime-rl 1999: "Already borrowed" from a fast tokenizer used by many threads."""
    chat = load_chat(folder)
    expected = chat.render(QUESTION)
    barrier = threading.Barrier(64)

    def call(index: int) -> bool:
        barrier.wait()
        same = True
        for i in range(10):
            if index % 8 == 0:  # as a user of the same object would, through the same door
                with chat._lock:
                    chat._tokenizer(["a", "long text"], padding="max_length", max_length=8 + i, truncation=True)
            same &= chat.render(QUESTION) == expected and chat.decode(expected).endswith("assistant\n")
        return same

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(call, range(64)))


def _prompt_cases(name: str) -> list[tuple[dict[str, Any], list[int]]]:
    """(case, ids of its first prompt) of a real tokenizer's ground truth."""
    cases = json.loads((SHARED / f"cases-{name}.json").read_text(encoding="utf-8"))
    tito = cases["templates"]["chat_template.jinja"]["tito"]
    return [(case, case["steps"][0]["ids"]) for case in tito if "steps" in case]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real tokenizers' ground truth is not here")
@pytest.mark.parametrize(("name", "stop_ids"), [("smollm2", (2,)), ("qwen3", (151645,))])
def test_real_templates_render_to_the_ground_truth(name: str, stop_ids: tuple[int, ...]):
    chat = load_chat(SHARED / name)
    assert chat.stop_token_ids == stop_ids
    cases = _prompt_cases(name)
    assert len(cases) >= 8
    for case, ids in cases:
        first_answer = next(i for i, message in enumerate(case["messages"]) if message["role"] == "assistant")
        assert chat.render(case["messages"][:first_answer], case["tools"]) == ids, case["id"]
