"""One step of policy gradient: samples in, moved weights and numbers out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from nanorl.algo.losses import PolicyLoss, kl_k3, masked_log_ratio, policy_loss, token_weights
from nanorl.config import AlgoConfig, TrainConfig
from nanorl.errors import ConfigError
from nanorl.train.batch import Batch, micro_batches
from nanorl.train.model import Policy, TokenScores
from nanorl.types import Sample

Progress = Callable[[int, int], None]
"""Called with (done, all) samples."""


@dataclass(slots=True)
class _Sums:
    """Running sums over a minibatch or a step; numbers, not tensors."""

    values: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + float(value)

    def peak(self, name: str, value: Tensor | float) -> None:
        self.values[name] = max(self.values.get(name, 0.0), float(value))

    def mean(self, name: str, count: str) -> float:
        return self.values.get(name, 0.0) / max(self.values.get(count, 0.0), 1.0)


class Trainer:
    """Owns the policy's weights, the optimizer and the seeded order of minibatches."""

    def __init__(self, policy: Policy, train: TrainConfig, algo: AlgoConfig, seed: int, dump_dir: Path) -> None:
        """`dump_dir` gets the samples of any step whose loss or gradient was not finite.

        Raises:
            ConfigError: the configuration still has open fields.
        """
        if train.lr is None or train.num_minibatches is None or algo.constant_length is None:
            raise ConfigError(
                "The trainer needs lr, num_minibatches and constant_length: resolve the config with a preset"
            )
        self.policy = policy
        self.train, self.algo = train, algo
        self.dump_dir = dump_dir
        self.constant_length = algo.constant_length
        self.num_minibatches = train.num_minibatches
        self.parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, fused=True
        )
        self.num_updates = 0
        """Optimizer steps made so far: the position in the warm-up."""
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, samples: Sequence[Sample], on_progress: Progress = lambda done, total: None) -> dict[str, float]:
        """One pass over the samples in `num_minibatches` optimizer steps.

        Samples must be graded and carry their advantage. Those with advantage 0 count in every denominator but are not
        computed: their gradient is 0. A minibatch without any other makes no optimizer step.

        Returns:
            `train/...` metrics, see docs/metrics.md.
        """
        samples = [s for s in samples if s.is_valid and s.num_sampled]
        order = [samples[i] for i in torch.randperm(len(samples), generator=self.generator).tolist()]
        bounds = [len(order) * k // self.num_minibatches for k in range(self.num_minibatches + 1)]
        totals = _Sums()
        for start, end in pairwise(bounds):
            on_progress(start, len(order))
            self._minibatch(order[start:end], totals)
        on_progress(len(order), len(order))
        return self._metrics(totals)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer by its Hugging Face name; tied ones come under each of their names."""
        yield from self.policy.model.state_dict().items()

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step: rises linearly over `warmup_steps`, constant after that."""
        return (self.train.lr or 0.0) * min(1.0, (self.num_updates + 1) / max(1, self.train.warmup_steps))

    def _minibatch(self, samples: Sequence[Sample], totals: _Sums) -> None:
        """Gradient of one minibatch, then one optimizer step, unless there is nothing to learn or it isn't finite."""
        num_tokens = sum(sample.num_sampled for sample in samples)
        useful = [sample for sample in samples if sample.advantage != 0.0]
        if not useful:
            totals.add(empty=1)
            return
        sums = _Sums()
        sums.add(real=sum(len(sample.token_ids) - 1 for sample in useful))
        for micro in micro_batches(useful, self.train.micro_batch_tokens):
            batch = micro.to(self.policy.device)
            weights = token_weights(
                batch.loss_mask, self.algo.reduction, num_tokens, len(samples), self.constant_length
            )
            scores, result = self.loss(batch)
            loss = (result.loss * weights).sum()
            loss.backward()
            _measure(batch, scores, result, sums)
            sums.add(pg_loss=loss.detach())
        self._optimize(sums, samples, totals, is_first=not totals.values.get("updates"))

    def loss(self, batch: Batch) -> tuple[TokenScores, PolicyLoss]:
        """The forward pass: scores of a micro-batch and the clipped loss against the behaviour policy."""
        scores = self.policy.score(batch)
        log_ratio = masked_log_ratio(scores.logprobs, batch.rollout_logprobs, batch.loss_mask)
        result = policy_loss(
            log_ratio,
            batch.advantages,
            batch.loss_mask,
            clip_low=self.algo.clip_low,
            clip_high=self.algo.clip_high,
            dual_clip=self.algo.dual_clip,
        )
        return scores, result

    def _optimize(self, sums: _Sums, samples: Sequence[Sample], totals: _Sums, *, is_first: bool) -> None:
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.train.max_grad_norm))
        if isfinite(grad_norm) and isfinite(sums.values["pg_loss"]):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate
            self.optimizer.step()
            self.num_updates += 1
            totals.add(updates=1, grad_norm=grad_norm, **sums.values)
            if is_first:  # the weights were still those that sampled: only here is the difference a mismatch
                totals.values |= {f"mismatch_{k}": v for k, v in sums.values.items()}
            totals.values |= {f"drift_{k}": v for k, v in sums.values.items()}
        else:
            totals.add(nonfinite=1)
            self._dump(samples)
        self.optimizer.zero_grad(set_to_none=True)

    def _metrics(self, totals: _Sums) -> dict[str, float]:
        return {
            "train/pg_loss": totals.mean("pg_loss", "updates"),
            "train/grad_norm": totals.mean("grad_norm", "updates"),
            "train/clip_fraction": totals.mean("clipped", "tokens"),
            "train/entropy": totals.mean("entropy", "tokens"),
            "train/ratio": totals.mean("ratio", "tokens"),
            "train/mismatch/mean": totals.mean("mismatch_abs_delta", "mismatch_tokens"),
            "train/mismatch/max": totals.values.get("mismatch_max_delta", 0.0),
            "train/mismatch_kl": totals.mean("mismatch_kl", "mismatch_tokens"),
            "train/drift/mean": totals.mean("drift_abs_delta", "drift_tokens"),
            "train/padding_share": 1.0 - totals.mean("real", "width"),
            "train/num_tokens": totals.values.get("tokens", 0.0),
            "train/updates": totals.values.get("updates", 0.0),
            "train/empty_minibatches": totals.values.get("empty", 0.0),
            "train/nonfinite_minibatches": totals.values.get("nonfinite", 0.0),
            "train/lr": self.learning_rate,
        }

    def _dump(self, samples: Sequence[Sample]) -> None:
        """Writes the samples of a minibatch that broke, one JSON object a line, for `is it the data or the weights`."""
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        path = self.dump_dir / f"nonfinite-{len(list(self.dump_dir.glob('nonfinite-*'))):04d}.jsonl"
        path.write_bytes(b"\n".join(msgspec.json.encode(sample) for sample in samples) + b"\n")


@torch.no_grad()
def _measure(batch: Batch, scores: TokenScores, result: PolicyLoss, sums: _Sums) -> None:
    """Adds what one micro-batch shows, each summed over its sampled tokens."""
    delta = masked_log_ratio(scores.logprobs, batch.rollout_logprobs, batch.loss_mask)
    sums.add(
        tokens=batch.num_tokens,
        abs_delta=delta.abs().sum(),
        kl=kl_k3(delta).sum(),
        clipped=result.is_clipped.sum(),
        entropy=scores.entropy.sum(),
        ratio=(result.ratio * batch.loss_mask).sum(),
        width=batch.input_ids.numel(),
    )
    sums.peak("max_delta", delta.abs().max())
