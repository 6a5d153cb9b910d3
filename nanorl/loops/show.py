"""`nanorl show`: reads a step's rollouts in the terminal, every token shaded by how likely it was to the policy."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from tokenizers import Tokenizer

from nanorl.errors import CheckpointError, ConfigError
from nanorl.tracking.live import printable
from nanorl.tracking.rollouts import Decode, GroupRecord, read_rollouts, rollout_steps
from nanorl.tracking.run_folder import RunFolder, find_run
from nanorl.types import Prompt, Sample

SHADES = (
    (0.9, ""),
    (0.5, "black on #fff3b0"),
    (0.2, "black on #ffd166"),
    (0.05, "black on #f4845f"),
    (0.0, "white on #c1121f"),
)
"""Lowest probability -> style; both colors are named, so that it reads on dark and on light terminals."""

NUM_SHOWN = 3
"""Samples shown where nobody says how many: enough to see what the policy does, and they fit on a screen."""

Shown = tuple[Prompt, Sample, str]
"""A prompt, one sample of it, and the sample's decoded response."""


def show(run: str, step: int | None, worst: int | None, console: Console | None = None) -> None:
    """Prints samples of one step of a run: one each of the first groups, or with `worst` those of the lowest reward.

    Args:
        run: a run folder, the name of one in `runs/`, or `latest`.
        step: None: the last one recorded.
        worst: how many samples, in order of reward.
        console: where to; None: the terminal.

    Raises:
        CheckpointError: there is no such run or step, or its file is damaged.
    """
    if worst is not None and worst < 1:
        raise ConfigError(f"Expected --worst of at least 1, got {worst}")
    console = console or Console(highlight=False)
    folder = find_run(run)
    steps = rollout_steps(folder.rollouts)
    if not steps:
        raise CheckpointError(
            f"The run {folder.path} has no rollouts: it wrote none (tracking.rollouts=false), or ended before."
        )
    step = steps[-1] if step is None else step
    records = read_rollouts(folder.rollouts, step)
    console.print(_summary(folder.path, step, steps[-1], records))
    decode = load_decode(folder)
    if decode is None:
        console.print(Text("The model's tokenizer is not on this machine: text without shading.", style="yellow"))
    for shown in _worst(records, worst) if worst else _first(records):
        _print_sample(console, shown, decode)
    console.print(Rule(style="dim"))
    if decode and console.color_system and not console.no_color:
        console.print(_legend())


def load_decode(folder: RunFolder) -> Decode | None:
    """The tokenizer of a run's model from its tokenizer.json alone: no model, no hub, milliseconds; None: not found."""
    try:
        model_path = msgspec.json.decode(folder.versions.read_bytes(), type=dict[str, str]).get("model_path", "")
        tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    except Exception:  # noqa: BLE001 the boundary: tokenizers raises bare Exception for a missing or an unknown file
        return None
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False)


def token_texts(token_ids: Sequence[int], decode: Decode) -> list[tuple[int, str]]:
    """The text that each token adds, as (tokens it took, text): a character in several tokens comes as one piece.

    Each piece is decoded behind its predecessor, since tokenizers drop the space before a text's first word.
    """
    pieces: list[tuple[int, str]] = []
    before: list[int] = []
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        text = decode([*before, *pending])[len(decode(before)) :]
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 4:  # UTF-8 has at most four bytes a character
            continue
        pieces.append((len(pending), text))
        before, pending = pending, []
    if pending:
        pieces.append((len(pending), decode([*before, *pending])[len(decode(before)) :]))
    return pieces


def _first(records: Sequence[GroupRecord]) -> list[Shown]:
    shown = [_members(record) for record in records[:NUM_SHOWN]]
    return [next((m for m in members if m[1].is_valid), members[0]) for members in shown if members]


def _worst(records: Sequence[GroupRecord], k: int) -> list[Shown]:
    """The k of lowest reward; those without one only where nothing else is left."""
    members = [member for record in records for member in _members(record)]
    return sorted(members, key=lambda member: math.inf if member[1].reward is None else member[1].reward)[:k]


def _members(record: GroupRecord) -> list[Shown]:
    return [(record.prompt, sample, text) for sample, text in zip(record.samples, record.texts, strict=True)]


def _summary(path: Path, step: int, last: int, records: Sequence[GroupRecord]) -> Text:
    samples = [sample for record in records for sample in record.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    text = Text.assemble((str(path), "bold"), f"  step {step} of {last}: {len(records)} groups, {len(samples)} samples")
    if rewards:
        text.append(f", reward {fmean(rewards):.3f} ({min(rewards):.3f} to {max(rewards):.3f})")
    num_masked = sum(not sample.is_valid for sample in samples)
    return text.append(f", {num_masked} failed or aborted", "red") if num_masked else text


def _print_sample(console: Console, shown: Shown, decode: Decode | None) -> None:
    prompt, sample, text = shown
    console.print(Rule(Text(f"{printable(prompt.id)} #{sample.index}", style="bold"), align="left", style="dim"))
    console.print(_facts(sample))
    for message in prompt.messages:
        console.print(Text(printable(f"{message.get('role')}: {message.get('content')}"), style="dim"))
    pieces = token_texts(sample.token_ids[sample.response_start :], decode) if decode else []
    console.print(_shaded(sample, pieces) if pieces else Text(printable(text)))
    if pieces:
        console.print(_least_likely(sample, pieces), no_wrap=True, overflow="ellipsis")


def _facts(sample: Sample) -> Text:
    reward = "none" if sample.reward is None else f"{sample.reward:.3f}"
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.reward_parts.items())
    logprobs = [p for p, sampled in zip(sample.rollout_logprobs, sample.loss_mask, strict=True) if sampled]
    versions = sorted({span.version for span in sample.weight_versions})
    graded = f"reward {reward}" + (f" ({parts})" if parts else "") + f"  advantage {sample.advantage:+.3f}"
    facts = [
        f"{sample.status} ({sample.finish_reason})",
        f"{len(logprobs)} tokens",
        f"weights {', '.join(f'v{version}' for version in versions) or '-'}",
        f"mean logprob {fmean(logprobs):.3f}" if logprobs else "nothing sampled",
        str(sample.metadata.get("error", "")),
    ]
    return Text(printable(f"{graded}\n{'  '.join(filter(None, facts))}"), style="cyan")


def _shaded(sample: Sample, pieces: Sequence[tuple[int, str]]) -> Text:
    """Sampled tokens on their shade; what the environment said between them dim."""
    text, position = Text(), sample.response_start
    for num_tokens, piece in pieces:
        logprob = sum(sample.rollout_logprobs[position : position + num_tokens])
        style = _shade(logprob) if sample.loss_mask[position] else "dim italic"
        text.append(printable(piece).replace("\n", "⏎\n"), style)
        position += num_tokens
    return text


def _shade(logprob: float) -> str:
    return next(style for floor, style in SHADES if math.exp(min(logprob, 0.0)) >= floor)


def _least_likely(sample: Sample, pieces: Sequence[tuple[int, str]]) -> Text:
    """The five least likely pieces: readable without colors."""
    position, found = sample.response_start, list[tuple[float, str]]()
    for num_tokens, piece in pieces:
        if sample.loss_mask[position]:
            found.append((sum(sample.rollout_logprobs[position : position + num_tokens]), piece))
        position += num_tokens
    worst = "  ".join(f"{piece!r} {logprob:.2f}" for logprob, piece in sorted(found)[:5])
    return Text(f"least likely, in nats: {worst}", style="dim")


def _legend() -> Text:
    text = Text("probability: ", style="dim")
    for (floor, style), ceiling in zip(SHADES, ("", "90", "50", "20", "5"), strict=True):
        text.append(f" below {ceiling} % " if ceiling else f" from {floor * 100:.0f} % ", style)
    return text
