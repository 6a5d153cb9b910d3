"""Prompts into the KV cache: each distinct prompt once, in right-padded batches of similar length.

Letters: U distinct prompts of a pass, N rows, T positions, V vocabulary. Causal attention never looks to the right, so
padding there needs no mask: what it computes is stored, if at all, beyond a row's length, and overwritten before it is
ever read.
"""

import torch
from torch import Tensor

from nanorl.engine.adapter import ModelAdapter
from nanorl.engine.kv_cache import SlotCache
from nanorl.engine.sequence import EngineSequence

_SCORED_LOGITS = 1 << 24
"""The most logits in memory at once while prompts are scored."""


class Prefill:
    """Runs whole prompts through the model."""

    def __init__(self, adapter: ModelAdapter, cache: SlotCache, max_tokens: int) -> None:
        self._adapter = adapter
        self._cache = cache
        self._max_tokens = max_tokens

    def run(self, rows: list[EngineSequence], first_row: int, scored_only: list[EngineSequence]) -> Tensor:
        """Stores the prefix of rows[i] in cache row first_row + i, and scores the prompts that ask for it.

        Returns:
            [N, V] logits after the last token of each of `rows`.
        """
        prompts = _Prompts()
        source = [prompts.add(sequence) for sequence in rows]
        for sequence in scored_only:
            prompts.add(sequence)
        last: list[Tensor | None] = [None] * len(prompts.ids)
        for chunk in prompts.chunks(self._max_tokens):
            place = {prompt: i for i, prompt in enumerate(chunk)}
            members = [(place[prompt], first_row + i) for i, prompt in enumerate(source) if prompt in place]
            hidden = self._pass([prompts.ids[prompt] for prompt in chunk], members)
            for prompt, i in place.items():
                last[prompt] = hidden[i, len(prompts.ids[prompt]) - 1].clone()
                for sequence in prompts.scored[prompt]:
                    self._score(sequence, hidden[i])
        final = torch.stack([state for state in last if state is not None])
        return self._adapter.logits(final)[torch.tensor(source, dtype=torch.int64, device=final.device)]

    def _pass(self, prompts: list[list[int]], members: list[tuple[int, int]]) -> Tensor:
        """[U, T, hidden] of one forward pass; members: (place in the pass, cache row)."""
        width, device = max(map(len, prompts)), self._adapter.device
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        pairs = torch.tensor(members, dtype=torch.int64, device=device).reshape(-1, 2)
        self._cache.begin_prefill(pairs[:, 0], pairs[:, 1])
        positions = torch.arange(width, device=device).expand(len(prompts), width)
        return self._adapter.hidden(ids, positions, self._cache)

    def _score(self, sequence: EngineSequence, hidden: Tensor) -> None:
        """Fills input_logprobs: position p's logits score token p + 1; the head sees only what is asked for."""
        start, ids = sequence.score_from, sequence.prompt_ids
        if start is None or start >= len(ids):
            return
        targets = torch.tensor(ids[start + 1 :], device=hidden.device)
        states = hidden[start : len(ids) - 1]
        temperature = sequence.params.temperature or 1.0
        step = max(1, _SCORED_LOGITS // self._adapter.vocab_size)
        sequence.input_logprobs = [None]
        for part, target in zip(states.split(step), targets.split(step), strict=True):
            logprobs = torch.log_softmax(self._adapter.logits(part).float() / temperature, dim=-1)
            sequence.input_logprobs += logprobs.gather(-1, target[:, None])[:, 0].tolist()


class _Prompts:
    """The distinct prefixes of a prefill, in order of arrival."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.scored: list[list[EngineSequence]] = []
        self._index: dict[tuple[int, ...], int] = {}

    def add(self, sequence: EngineSequence) -> int:
        prefix = sequence.prefix
        index = self._index.setdefault(tuple(prefix), len(self.ids))
        is_new = index == len(self.ids)
        if is_new:
            self.ids.append(prefix)
            self.scored.append([])
        if not sequence.output_ids:
            sequence.cached_tokens = 0 if is_new else len(prefix)
            if sequence.score_from is not None:
                self.scored[index].append(sequence)
        return index

    def chunks(self, max_tokens: int) -> list[list[int]]:
        """Prompts of similar length together, at most max_tokens with their padding; a longer prompt goes alone."""
        chunks: list[list[int]] = []
        for prompt in sorted(range(len(self.ids)), key=lambda i: -len(self.ids[i])):
            if chunks and len(self.ids[chunks[-1][0]]) * (len(chunks[-1]) + 1) <= max_tokens:
                chunks[-1].append(prompt)
            else:
                chunks.append([prompt])
        return chunks
