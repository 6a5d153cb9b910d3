"""`nanorl show`: what the policy wrote, token by token."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nanorl.errors import CheckpointError, ConfigError
from nanorl.loops.show import load_decode, show, token_texts
from nanorl.tracking.rollouts import RolloutWriter
from nanorl.tracking.run_folder import create_run_folder
from nanorl.types import Group, Prompt, Sample, Status, VersionSpan
from tests.tracking.examples import decode, make_groups


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE as Qwen's: words carry their space, an emoji takes several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|im_end|>"])
    tokenizer.train_from_iterator(["the answer is the answer"] * 9, trainer)
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer, folder


@pytest.fixture
def run(tmp_path, tokenizer):
    """A run with steps 1 and 2, whose model's tokenizer is there."""
    bpe, model = tokenizer
    prompt = Prompt(id="riddle", messages=({"role": "user", "content": "Say it\x1b[2J"},))
    ids = tuple(bpe.encode("the answer is 🙂\nthe").ids)
    said = Sample(
        group_id="riddle",
        index=0,
        token_ids=(0, 0, *ids),
        loss_mask=(False, False, *(True,) * (len(ids) - 1), False),
        rollout_logprobs=(0.0, 0.0, *(-2.5 if i == 0 else -0.01 for i in range(len(ids) - 1)), 0.0),
        weight_versions=(VersionSpan(1, 2, len(ids) + 1),),
        status=Status.COMPLETED,
        finish_reason="stop",
        reward=0.25,
        reward_parts={"correct": 0.0, "format": 0.25},
    )
    failed = replace(said, index=1, status=Status.FAILED, reward=None, reward_parts={}, metadata={"error": "timed out"})
    with create_run_folder(str(tmp_path / "run"), "tiny", overwrite=False, model_path=model) as folder:
        writer = RolloutWriter(
            folder.rollouts, lambda ids: bpe.decode(list(ids), skip_special_tokens=False), pytest.fail
        )
        writer.write(1, make_groups(rewards=(0.5, -1.0)))
        writer.write(2, [Group(prompt=prompt, samples=(failed, said))])
        writer.close()
    return folder


def shown(run, step=None, worst=None, **options):
    console = Console(file=io.StringIO(), width=200, highlight=False, **options)
    show(str(run.path), step, worst, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_last_step_with_facts_and_text(run):
    text = shown(run)

    assert "step 2 of 2: 1 groups, 2 samples, reward 0.250 (0.250 to 0.250), 1 failed or aborted" in text
    assert "riddle #0" in text  # the graded one, not the failed one before it
    assert "reward 0.250 (correct 0, format 0.25)  advantage +0.000\nCOMPLETED (stop)  " in text
    assert "user: Say it·[2J" in text
    assert "the answer is 🙂⏎\nthe\n" in text
    assert "least likely, in nats: 't' -2.50" in text or "least likely, in nats: 'the' -2.50" in text
    assert "\x1b" not in text


def test_shades_follow_the_probability(run):
    text = shown(run, force_terminal=True, color_system="truecolor")

    first = text.split("answer")[0].rsplit("user:", 1)[1]
    assert "48;2;244;132;95m" in first  # exp(-2.5) = 8 %: 5 to 20 %
    assert "probability: " in text
    assert "probability: " not in shown(run, force_terminal=True, no_color=True)


def test_the_least_likely_tokens_take_one_line(run):
    console = Console(file=io.StringIO(), width=40, highlight=False)
    show(str(run.path), 2, None, console)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    at = next(i for i, line in enumerate(lines) if line.startswith("least likely"))
    assert lines[at].endswith("…")
    assert lines[at + 1].startswith("───")


def test_the_worst_come_in_order_of_reward(run):
    text = shown(run, step=1, worst=3)

    assert text.count("reward -1.000 (") == 3
    assert "reward 0.500 (" not in text
    assert "FAILED (stop)" in shown(run, step=2, worst=2)
    assert "timed out" in shown(run, step=2, worst=2)


def test_without_the_tokenizer_the_recorded_text_is_shown(run):
    run.versions.write_text("{}")

    text = shown(run)
    assert load_decode(run) is None
    assert "tokenizer is not on this machine" in text
    assert "the answer is 🙂\nthe\n" in text


def test_latest_is_a_run(run, monkeypatch, tmp_path):
    (tmp_path / "runs").mkdir()
    run.path.rename(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "latest").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    console = Console(file=io.StringIO(), width=100)
    show("latest", 1, None, console)
    assert "step 1 of 2: 4 groups" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_bad_input(run, tmp_path):
    with pytest.raises(CheckpointError, match="there are 1-2"):
        shown(run, step=7)
    with pytest.raises(ConfigError, match="--worst of at least 1, got 0"):
        shown(run, worst=0)
    with create_run_folder(str(tmp_path / "empty"), "tiny", overwrite=False) as empty:
        pass
    with pytest.raises(CheckpointError, match="has no rollouts"):
        shown(empty)
    with pytest.raises(CheckpointError, match="where no run is"):
        show(str(tmp_path / "nothing"), None, None)


@pytest.mark.parametrize("text", ["the answer is 4", " the", "🙂🙂 é", "", "a\n\nb<|im_end|>"])
def test_token_texts_add_up_to_the_text(tokenizer, text):
    bpe, _ = tokenizer
    ids = bpe.encode(text).ids

    pieces = token_texts(ids, lambda ids: bpe.decode(list(ids), skip_special_tokens=False))

    assert "".join(piece for _, piece in pieces) == text
    assert sum(count for count, _ in pieces) == len(ids)
    assert not any("\ufffd" in piece for _, piece in pieces)


def test_a_response_cut_inside_a_character_still_shows(tokenizer):
    bpe, _ = tokenizer
    ids = bpe.encode("a🙂").ids[:-1]
    pieces = token_texts(ids, lambda ids: bpe.decode(list(ids), skip_special_tokens=False))
    assert sum(count for count, _ in pieces) == len(ids)
    assert pieces[0] == (1, "a")


def test_one_letter_a_token():
    assert token_texts([1, 2], decode) == [(1, "\u4e01"), (1, "\u4e02")]
