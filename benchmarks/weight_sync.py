"""A weight sync against a running SGLang, part by part, several ways in one run; the trainer's weights lie on its GPU.

recipe    a new bucket packed and serialized each time, loaded tensor by tensor (on a GPU only)
kept      one bucket kept, its handle serialized once, loaded tensor by tensor
nanorl    the kept bucket and nanorl's loader in the server (--custom-weight-loader nanorl.engine.sglang_loader.load)
one       a single small tensor: the price of the calls
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from nanorl.config import SyncConfig
from nanorl.engine.client import EngineClient
from nanorl.engine.protocol import FLATTENED_BUCKET, WeightUpdateFromTensor
from nanorl.engine.tensor_payload import FlattenedTensorMetadata, serialize_bucket
from nanorl.weight_sync.base import Stopwatch, SyncReport, paused, weight_session
from nanorl.weight_sync.bucket import FlatBucket, drop_aliases
from nanorl.weight_sync.carriers import make_sync

PARTS = ("begin_ms", "copy_ms", "serialize_ms", "send_ms", "end_ms", "total_ms", "pause_ms", "flush_ms", "continue_ms")
Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Prints a line a way, then the drift of memory over many syncs and the logprobs after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder that the server serves")
    parser.add_argument("--engine-url", default="http://127.0.0.1:30000")
    parser.add_argument("--iters", type=int, default=25)
    parser.add_argument("--soak", type=int, default=200, help="syncs over which memory must stay flat")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    with EngineClient(arguments.engine_url) as client:
        bench = Bench(client, arguments.model, device)
        bench.compare(arguments.iters)
        bench.soak(arguments.soak)


class Bench:
    """The same weights, moved by several ways in turn."""

    def __init__(self, client: EngineClient, model: str, device: torch.device) -> None:
        self.client, self.device = client, device
        self.dtype = getattr(torch, str(client.server_info()["dtype"]).removeprefix("torch."))
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=self.dtype)
        self.model = loaded.to(device).eval()
        self.tensors = drop_aliases(self.model.state_dict().items())
        self.kept = FlatBucket(self.tensors, dtype=None, device=device)
        first = next(name for name, tensor in self.tensors.items() if tensor.dim() == 1)
        self.single = FlatBucket({first: self.tensors[first]}, dtype=None, device=device)
        self.sync = make_sync(SyncConfig(), client, device, Path())
        self.version = client.model_info().version
        self.turn = 0

    def compare(self, iters: int) -> None:
        """All ways by turns, so that whatever else the machine does meets each alike."""
        ways: dict[str, Callable[[], SyncReport]] = {
            "recipe": self.recipe,
            "kept": lambda: self.send(self.kept),
            "nanorl": self.nanorl,
            "one": lambda: self.send(self.single),
        }
        if self.device.type == "cpu":
            del ways["recipe"]
        reports: dict[str, list[SyncReport]] = {name: [] for name in ways}
        for i in range(iters + 2):
            for name, way in ways.items():
                self.change()
                report = way()
                if i >= 2:
                    reports[name].append(report)
        for name, done in reports.items():
            parts = {part: round(median(getattr(report, part) for report in done), 2) for part in PARTS}
            print(name, json.dumps({**parts, "bytes": done[0].num_bytes, "tensors": done[0].num_tensors}), flush=True)
        totals = {name: median(report.total_ms for report in done) for name, done in reports.items()}
        ratios = ", ".join(f"{name} / nanorl {total / totals['nanorl']:.2f}" for name, total in totals.items())
        print(f"{ratios}; bare copy {self.bare_copy_ms():.2f} ms")

    def soak(self, rounds: int) -> None:
        """Memory before and after, and each time the logprobs of one sequence on both sides."""
        differences: list[float] = []
        before = [0]
        for i in range(rounds + 5):
            self.change()
            self.nanorl()
            if i >= 5:
                differences.append(self.difference())
            if i == 5:
                before = self.memory()
        after = self.memory()
        print(
            f"{rounds} syncs: memory {before} -> {after} MB (trainer resident, GPU of both sides); "
            f"|logprob difference| after each: mean {sum(differences) / len(differences):.4f}, "
            f"highest mean {max(differences):.4f}"
        )

    def change(self) -> None:
        """Weights that differ from the last sync's, and never wander off."""
        self.turn += 1
        factor = 1.0625 if self.turn % 2 else 1 / 1.0625
        for tensor in self.tensors.values():
            tensor.mul_(factor)

    def nanorl(self) -> SyncReport:
        """What `nanorl train` does."""
        self.version += 1
        return self.sync.sync(self.tensors.items(), self.version)

    def recipe(self) -> SyncReport:
        """As the common recipe does: pack and serialize anew."""
        watch = Stopwatch()
        with watch.lap("copy"):
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in self.tensors.values()])
            self.synchronize()
        with watch.lap("serialize"):
            payload = serialize_bucket(flat, packed_metadata(self.tensors))
        return self.update(payload, watch, flat.numel(), len(self.tensors))

    def send(self, bucket: FlatBucket) -> SyncReport:
        """A kept bucket through the server's own loader."""
        watch = Stopwatch()
        with watch.lap("copy"):
            bucket.fill(bucket.layouts[0], self.tensors)
            self.synchronize()
        with watch.lap("serialize"):
            payload = bucket.payload(0)
        return self.update(payload, watch, bucket.num_bytes, bucket.num_tensors)

    def update(self, payload: str, watch: Stopwatch, num_bytes: int, num_tensors: int) -> SyncReport:
        """The three calls under pause."""
        self.version += 1
        update = WeightUpdateFromTensor(
            serialized_named_tensors=[payload],
            load_format=FLATTENED_BUCKET,
            flush_cache=False,
            weight_version=str(self.version),
        )
        with paused(self.client, watch), weight_session(self.client, watch), watch.lap("send"):
            self.client.update_from_tensor(update)
        return watch.report(self.version, num_bytes, num_tensors)

    @torch.no_grad()
    def difference(self) -> float:
        """Mean |logprob difference| over 64 tokens, trainer against the engine's rescoring, temperature 1, in nats."""
        ids = torch.randint(0, 20_000, (80,), generator=torch.Generator().manual_seed(self.turn)).tolist()
        ids = [i % (self.model.config.vocab_size - 1) for i in ids]  # SGLang names the last id 0 in its answer
        (held,) = self.client.score([ids], [16], 1.0)
        logits = self.model(input_ids=torch.tensor([ids], device=self.device)).logits[0].float()
        own = logits.log_softmax(-1)[15:-1].gather(-1, torch.tensor(ids[16:], device=self.device)[:, None])[:, 0]
        return (own.cpu() - torch.tensor(held)).abs().mean().item()

    def synchronize(self) -> None:
        """The copy must be done when the clock stops."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def memory(self) -> list[int]:
        """[resident MB of this process, MB in use on the GPU by everybody]."""
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
        free, total = torch.cuda.mem_get_info() if self.device.type == "cuda" else (0, 0)
        return [resident >> 20, (total - free) >> 20]

    def bare_copy_ms(self) -> float:
        """One copy of as many bytes on the same device."""
        target, times = torch.empty_like(self.kept.buffer), []
        for _ in range(15):
            start = time.perf_counter()
            target.copy_(self.kept.buffer)
            self.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return median(times)


def packed_metadata(tensors: Tensors) -> Sequence[FlattenedTensorMetadata]:
    """Side by side without gaps."""
    found, start = [], 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.itemsize
        found.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + size, size))
        start += size
    return found


if __name__ == "__main__":
    main()
