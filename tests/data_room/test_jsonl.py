"""JSONL prompts: what a line may be, and a named line number for what it may not."""

from pathlib import Path

import pytest

from nanorl.config import JsonlData
from nanorl.data import build_data
from nanorl.data.jsonl import read_jsonl
from nanorl.errors import DataError


def write(folder: Path, *lines: str) -> str:
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_texts_and_conversations_become_prompts(tmp_path: Path):
    conversation = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]'
    path = write(
        tmp_path, '{"prompt": "1+1?", "label": 2, "metadata": {"level": 1}}', "", f'{{"prompt": {conversation}}}'
    )
    first, second = read_jsonl(path)
    assert first.messages == ({"role": "user", "content": "1+1?"},)
    assert (first.label, first.metadata) == ("2", {"level": 1})
    assert [message["role"] for message in second.messages] == ["system", "user"]
    assert second.label is None
    assert second.id.endswith(":3"), "ids name the line"


@pytest.mark.parametrize(
    ("label", "text"), [('"a"', "a"), ("42", "42"), ("0.75", "0.75"), ("true", "true"), ("null", None)]
)
def test_labels_of_any_kind_become_text(tmp_path: Path, label: str, text: str | None):
    assert read_jsonl(write(tmp_path, f'{{"prompt": "q", "label": {label}}}'))[0].label == text


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "malformed"),
        ('{"label": "4"}', "prompt"),
        ('{"prompt": 5}', "int"),
        ('{"prompt": "q", "answer": "4"}', "answer"),
        ('{"prompt": []}', "role and a content"),
        ('{"prompt": ""}', "role and a content"),
        ('{"prompt": [{"role": "user"}]}', "role and a content"),
        ('{"prompt": [{"role": "assistant", "content": "hi"}]}', "assistant's"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_fault(tmp_path: Path, line: str, complaint: str):
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(DataError, match="line 2") as raised:
        read_jsonl(path)
    assert complaint in str(raised.value)
    assert path in str(raised.value)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="nowhere"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="no prompts"):
        read_jsonl(write(tmp_path, "", "  "))


def test_bytes_that_are_no_utf8_are_a_bad_line(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match="line 2"):
        read_jsonl(path)


def test_the_last_tenth_is_held_out_unless_a_file_is_named(tmp_path: Path):
    path = write(tmp_path, *[f'{{"prompt": "q{i}", "id": "{i}"}}' for i in range(30)])
    stream = build_data(JsonlData(path=path), seed=0)
    assert len(stream) == 27
    assert [p.id for p in stream.heldout(9)] == ["27", "28", "29"]
    other = tmp_path / "heldout.jsonl"
    other.write_text('{"prompt": "h"}\n')
    stream = build_data(JsonlData(path=path, heldout_path=str(other)), seed=0)
    assert len(stream) == 30
    assert [p.messages[0]["content"] for p in stream.heldout(9)] == ["h"]


def test_a_single_prompt_cant_be_split(tmp_path: Path):
    with pytest.raises(DataError, match="two are needed"):
        build_data(JsonlData(path=write(tmp_path, '{"prompt": "q"}')), seed=0)
