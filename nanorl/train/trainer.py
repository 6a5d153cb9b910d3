"""One step of policy gradient: samples in, moved weights and numbers out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from nanorl.algo.corrections import BehaviourWeights, masked, ratio_of, truncated
from nanorl.algo.losses import masked_log_ratio, policy_loss, token_weights
from nanorl.config import AlgoConfig, TrainConfig
from nanorl.errors import ConfigError
from nanorl.train.batch import Batch, micro_batches
from nanorl.train.measures import Loss, Sums, measure, step_metrics
from nanorl.train.model import Policy
from nanorl.types import Sample

Progress = Callable[[int, int], None]
"""Called with (done, all) samples."""


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """What one optimizer step sees."""

    samples: Sequence[Sample]
    """All of them: they count in every denominator."""
    batches: list[Batch]
    """Those with an advantage, cut to size."""


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

    def step(
        self,
        samples: Sequence[Sample],
        on_progress: Progress = lambda done, total: None,
        version: int | None = None,
    ) -> dict[str, float]:
        """One pass over the samples in `num_minibatches` optimizer steps.

        Samples must be graded and carry their advantage. Those with advantage 0 count in every denominator but are not
        computed: their gradient is 0. A minibatch without any other makes no optimizer step.

        Args:
            samples: of the step.
            on_progress: hears how far it is.
            version: the weight version that the trainer holds: tokens of others show no mismatch, only drift. None: all
                tokens are of the trainer's own.

        Returns:
            `train/...` metrics, see docs/metrics.md.
        """
        samples = [s for s in samples if s.is_valid and s.num_sampled]
        order = [samples[i] for i in torch.randperm(len(samples), generator=self.generator).tolist()]
        bounds = [len(order) * k // self.num_minibatches for k in range(self.num_minibatches + 1)]
        minibatches = [self._prepare(order[start:end]) for start, end in pairwise(bounds)]
        if self.algo.correction != "none":
            # The first minibatch needs no pass of its own: the weights have not moved yet when it is scored.
            minibatches[1:] = [self._with_old_logprobs(minibatch) for minibatch in minibatches[1:]]
        totals = Sums()
        for start, minibatch in zip(bounds, minibatches, strict=False):
            on_progress(start, len(order))
            self._minibatch(minibatch, totals, version)
        on_progress(len(order), len(order))
        return step_metrics(totals) | {"train/lr": self.learning_rate}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer by its Hugging Face name; tied ones come under each of their names."""
        yield from self.policy.model.state_dict().items()

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step: rises linearly over `warmup_steps`, constant after that."""
        return (self.train.lr or 0.0) * min(1.0, (self.num_updates + 1) / max(1, self.train.warmup_steps))

    def _prepare(self, samples: Sequence[Sample]) -> _Minibatch:
        useful = [sample for sample in samples if sample.advantage != 0.0]
        return _Minibatch(samples, list(micro_batches(useful, self.train.micro_batch_tokens)))

    @torch.no_grad()
    def _with_old_logprobs(self, minibatch: _Minibatch) -> _Minibatch:
        """Scores by the weights of now, before any of the step's updates: the proximal policy."""
        moved = (batch.to(self.policy.device) for batch in minibatch.batches)
        scored = [replace(batch, old_logprobs=self.policy.score(batch).logprobs) for batch in moved]
        return _Minibatch(minibatch.samples, scored)

    def _minibatch(self, minibatch: _Minibatch, totals: Sums, version: int | None) -> None:
        """Gradient of one minibatch, then one optimizer step, unless there is nothing to learn or it isn't finite."""
        samples = minibatch.samples
        num_tokens = sum(sample.num_sampled for sample in samples)
        if not minibatch.batches:
            totals.add(empty=1)
            return
        sums = Sums()
        sums.add(real=sum(len(sample.token_ids) - 1 for sample in samples if sample.advantage != 0.0))
        for micro in minibatch.batches:
            batch = micro.to(self.policy.device)
            weights = token_weights(
                batch.loss_mask, self.algo.reduction, num_tokens, len(samples), self.constant_length
            )
            result = self.loss(batch)
            loss = (result.policy.loss * weights).sum()
            loss.backward()
            measure(batch, result, version, sums)
            sums.add(pg_loss=loss.detach())
        self._optimize(sums, samples, totals, is_first=not totals.values.get("updates"))

    def loss(self, batch: Batch) -> Loss:
        """The forward pass: clipped loss against the policy that sampled or, decoupled, against the proximal one."""
        scores = self.policy.score(batch)
        behaviour, anchor = None, batch.rollout_logprobs
        if self.algo.correction != "none":
            anchor = scores.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            behaviour = self._behaviour_weights(
                masked_log_ratio(anchor, batch.rollout_logprobs, batch.loss_mask), batch.loss_mask
            )
        result = policy_loss(
            masked_log_ratio(scores.logprobs, anchor, batch.loss_mask),
            batch.advantages,
            batch.loss_mask,
            clip_low=self.algo.clip_low,
            clip_high=self.algo.clip_high,
            dual_clip=self.algo.dual_clip,
        )
        if behaviour:
            result = replace(result, loss=result.loss * behaviour.weights)
        return Loss(scores, result, behaviour)

    def _behaviour_weights(self, log_ratio: Tensor, mask: Tensor) -> BehaviourWeights:
        """The correction that the config names; log_ratio is proximal over behaviour."""
        algo = self.algo
        is_mis = algo.correction == "mis"
        ratio = ratio_of(log_ratio, mask, (algo.correction_level or "sequence") if is_mis else "token")
        cap = algo.tis_cap or 2.0
        if algo.correction == "tis" or algo.correction_mode == "truncate":
            return truncated(ratio, mask, cap)
        low = algo.mask_low if algo.mask_low is not None else 0.0 if is_mis else 0.5
        return masked(ratio, mask, low, cap)

    def _optimize(self, sums: Sums, samples: Sequence[Sample], totals: Sums, *, is_first: bool) -> None:
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.train.max_grad_norm))
        if isfinite(grad_norm) and isfinite(sums.values["pg_loss"]):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate
            self.optimizer.step()
            self.num_updates += 1
            totals.add(updates=1, grad_norm=grad_norm, **sums.values)
            if is_first:  # the weights were still those that sampled: only here is the difference a mismatch
                totals.values |= {f"mismatch_{k}": v for k, v in sums.values.items() if k.startswith("own_")}
            totals.values |= {f"drift_{k}": v for k, v in sums.values.items()}
        else:
            totals.add(nonfinite=1)
            self._dump(samples)
        self.optimizer.zero_grad(set_to_none=True)

    def _dump(self, samples: Sequence[Sample]) -> None:
        """Writes the samples of a minibatch that broke, one JSON object a line, for `is it the data or the weights`."""
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        path = self.dump_dir / f"nonfinite-{len(list(self.dump_dir.glob('nonfinite-*'))):04d}.jsonl"
        path.write_bytes(b"\n".join(msgspec.json.encode(sample) for sample in samples) + b"\n")
