"""The tiny model's warm start: plain supervised training on demonstrations. B sequences, L tokens, N answer tokens."""

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

Progress = Callable[[int, int], None]
"""Called with (done, total) steps."""

Example = tuple[list[int], list[int]]
"""(prompt ids, answer ids)"""

MAX_THREADS = 4
"""More only get in each other's way at this size, and would change the bits from machine to machine."""


class WarmStart(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how fast."""

    steps: int = 1500
    batch_size: int = 16
    lr: float = 2.5e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup_steps: int = 20
    decay_share: float = 0.3
    """The last part of the steps, over which lr falls linearly to 5 %."""

    @property
    def num_examples(self) -> int:
        """Each is seen once."""
        return self.steps * self.batch_size


def train_on(model: Qwen3ForCausalLM, examples: Sequence[Example], plan: WarmStart, on_progress: Progress) -> None:
    """Minimises the cross entropy of the answers' tokens, in place; leaves the model in eval mode."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, MAX_THREADS))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=plan.lr, betas=plan.betas, weight_decay=plan.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, plan))
    try:
        for step in range(plan.steps):
            batch = examples[step * plan.batch_size : (step + 1) * plan.batch_size]
            answer_loss(model, *collate(batch)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            on_progress(step + 1, plan.steps)
    finally:
        torch.set_num_threads(threads)
    model.eval()


def lr_factor(step: int, plan: WarmStart) -> float:
    """Linear warm-up, constant, linear decay over the last decay_share of the steps to 5 %."""
    decay = 0.05 + 0.95 * (plan.steps - step) / (plan.decay_share * plan.steps)
    return min(1.0, (step + 1) / plan.warmup_steps, decay)


def collate(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """([B, L] ids padded on the right, [B, L-1] bool, True where the target is an answer's token).

    No attention mask is needed: a causal model's answer tokens never see the padding after them.
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask = torch.zeros(len(examples), longest - 1, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        mask[row, len(prompt) - 1 : end - 1] = True
    return ids, mask


def answer_loss(model: Qwen3ForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean negative logprob of the N answer tokens, in nats; the head sees no other position."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return functional.cross_entropy(model.lm_head(hidden[mask]), ids[:, 1:][mask])
