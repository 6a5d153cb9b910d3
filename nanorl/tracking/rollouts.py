"""What the policy wrote: rollouts/step-00001.jsonl, one group a line, written off the hot path and read back exactly.

A line is `{"prompt": ..., "samples": [...], "texts": [...]}` with the fields of `nanorl.types`. Floats are written with
as many digits as bring back the same bits, so a replay trains on exactly what the run trained on.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from nanorl.errors import BatchError, CheckpointError
from nanorl.tracking.background import Background, Warn
from nanorl.types import Group, Prompt, Sample

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, for people; training never reads it."""


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a rollout file."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    texts: tuple[str, ...]
    """Each sample's decoded response."""

    @property
    def group(self) -> Group:
        """The group as the loop had it."""
        return Group(prompt=self.prompt, samples=self.samples)


class Excerpt(NamedTuple):
    """One exchange for the live view."""

    prompt: str
    """The last message's text."""
    response: str
    reward: float | None


def excerpt(groups: Sequence[Group], decode: Decode) -> Excerpt | None:
    """The first graded sample; None where there is none."""
    for group in groups:
        for sample in group.valid:
            content = group.prompt.messages[-1].get("content") if group.prompt.messages else None
            return Excerpt(str(content or ""), decode(sample.token_ids[sample.response_start :]), sample.reward)
    return None


class RolloutWriter:
    """Writes each step's groups on a thread of its own. A full disk is reported once; training goes on."""

    def __init__(self, folder: Path, decode: Decode, warn: Warn) -> None:
        """`folder` is the run folder's `rollouts`."""
        folder.mkdir(exist_ok=True)
        self._folder, self._decode = folder, decode
        # A replay needs every step, so a slow disk may hold training up for a while before a step is given up.
        self._worker = Background[tuple[int, Sequence[Group]]](
            "rollouts", self._save, warn, patience_s=60.0, at_end=lambda: None
        )

    @property
    def num_failed(self) -> int:
        """Steps whose rollouts were not written."""
        return self._worker.num_failed

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Queues the groups of a step; takes no time unless 16 steps are waiting. Never raises."""
        self._worker.put((step, groups))

    def close(self) -> None:
        """Waits until everything is on the disk, a minute at most."""
        self._worker.close()

    def _save(self, item: tuple[int, Sequence[Group]]) -> None:
        step, groups = item
        path = rollout_path(self._folder, step)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                for group in groups:  # line by line, so that the interpreter lock is never held for long
                    file.write(self._line(group))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _line(self, group: Group) -> bytes:
        texts = tuple(self._decode(sample.token_ids[sample.response_start :]) for sample in group.samples)
        record = GroupRecord(prompt=group.prompt, samples=group.samples, texts=texts)
        return msgspec.json.encode(record, enc_hook=str) + b"\n"  # str: data sets bring dates and the like as metadata


def rollout_path(folder: Path, step: int) -> Path:
    """The file of one step."""
    return folder / f"step-{step:05d}.jsonl"


def rollout_steps(folder: Path) -> list[int]:
    """The steps that were recorded, in order."""
    numbers = (path.stem.removeprefix("step-") for path in folder.glob("step-*.jsonl"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_rollouts(folder: Path, step: int) -> list[GroupRecord]:
    """The groups of one step, in the order in which they trained.

    Raises:
        CheckpointError: the step was not recorded, or its file is damaged.
    """
    path = rollout_path(folder, step)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(
            f"No rollouts of step {step} in {folder}: {_available(folder) or error.strerror}."
        ) from None
    records: list[GroupRecord] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(msgspec.json.decode(line, type=GroupRecord))
        except (msgspec.DecodeError, BatchError) as error:
            raise CheckpointError(f"{path}, line {number}: expected one group of samples as JSON: {error}") from None
    return records


def truncate_rollouts(folder: Path, last_step: int) -> None:
    """Removes the rollouts after `last_step`: a run that goes on from a checkpoint samples them again."""
    for step in rollout_steps(folder):
        if step > last_step:
            rollout_path(folder, step).unlink()


def _available(folder: Path) -> str:
    """`steps 1-6, 9 are there`."""
    runs: list[list[int]] = []
    for step in rollout_steps(folder):
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    spans = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"there are {spans}" if spans else ""
