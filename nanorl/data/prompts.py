"""An endless, seeded stream of prompts with a position that can be saved: what every data source hands to the loop."""

import random
from collections import deque
from collections.abc import Sequence
from hashlib import sha256
from typing import TypedDict

from nanorl.errors import CheckpointError, DataError
from nanorl.types import Prompt


class StreamState(TypedDict):
    """Where a stream stands, as JSON; the order of an epoch follows from seed and epoch alone."""

    seed: int
    epoch: int
    position: int
    """Prompts of this epoch that were already handed out."""
    fingerprint: str
    """Hash of the prompts' ids: a position means nothing in other data."""
    returned: list[str]
    """Ids of prompts that were handed out and came back unused: they come first."""


class PromptStream:
    """Hands out prompts epoch after epoch, reshuffled each time.

    Within an epoch every prompt comes exactly once. A request that crosses the end of an epoch is filled from the next
    one, so a prompt may appear twice in a step there.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, heldout: Sequence[Prompt] = ()) -> None:
        """Raises: DataError where there is no prompt, or where an id appears twice or on both sides."""
        if not prompts:
            raise DataError("A prompt stream needs at least one prompt, got none")
        ids = [prompt.id for prompt in (*prompts, *heldout)]
        if len(set(ids)) != len(ids):
            twice = next(name for i, name in enumerate(ids) if name in ids[:i])
            raise DataError(f"Prompt ids must be unique over training and held-out prompts, {twice!r} appears twice")
        self._prompts = tuple(prompts)
        self._heldout = tuple(heldout)
        self._seed = seed
        self._returned: deque[Prompt] = deque()
        self._fingerprint = sha256("\n".join(prompt.id for prompt in prompts).encode()).hexdigest()[:16]
        self._begin_epoch(0, 0)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._prompts)

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts: those that came back, then the stream's."""
        taken = [self._returned.popleft() for _ in range(min(n, len(self._returned)))]
        while len(taken) < n:
            if self._position == len(self._prompts):
                self._begin_epoch(self._epoch + 1, 0)
            indices = self._order[self._position : self._position + n - len(taken)]
            self._position += len(indices)
            taken += [self._prompts[i] for i in indices]
        return taken

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Prompts that nothing was made of: they come before the stream's own, in this order."""
        self._returned.extend(prompts)

    def heldout(self, n: int) -> list[Prompt]:
        """The first n held-out prompts, fewer where there are fewer; the same ones every time."""
        return list(self._heldout[:n])

    def state_dict(self, unused: Sequence[Prompt] = ()) -> StreamState:
        """The position, to be saved with a checkpoint; `unused` were handed out and will come first after a resume."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self._fingerprint,
            "returned": [prompt.id for prompt in (*unused, *self._returned)],
        }

    def load_state_dict(self, state: StreamState) -> None:
        """Goes on exactly where the state was taken, with the state's seed.

        Raises:
            CheckpointError: the state was taken over other prompts.
        """
        if state["fingerprint"] != self._fingerprint or not 0 <= state["position"] <= len(self._prompts):
            raise CheckpointError(
                f"The saved data position belongs to other prompts (fingerprint {state['fingerprint']}, this data has "
                f"{self._fingerprint}). Resume with the data that the run was started with."
            )
        by_id = {prompt.id: prompt for prompt in self._prompts}
        self._returned = deque(by_id[name] for name in state["returned"])
        self._seed = state["seed"]
        self._begin_epoch(state["epoch"], state["position"])

    def _begin_epoch(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
