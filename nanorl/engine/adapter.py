"""A Hugging Face causal language model as the engine drives it: body, head, cache argument, layer shapes.

Everything is found out by trying the model on a few tokens, not from lists of names.
"""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from nanorl.errors import ModelError
from nanorl.models.load import load_causal_lm


class LayerShape(NamedTuple):
    """What one layer caches for a token."""

    num_heads: int
    key_width: int
    """num_heads x head size of the keys."""
    value_width: int


class ModelAdapter:
    """The model, split into body (hidden states) and head (logits).

    Raises:
        ModelError: the model is none that the engine can run, by name and reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.device = model.device
        self.dtype = model.dtype
        self._name = type(model).__name__
        body, head = model.base_model, model.get_output_embeddings()
        if body is model or not isinstance(head, nn.Module):
            raise ModelError(
                f"{self._name} has no separate body and head: expected a decoder with a language-model head"
            )
        self._body, self._head = body, head
        # transformers 5.24 renamed the argument, and models outside its tree may keep the old name.
        self._cache_argument = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
        self._vocab_size = int(self.run_alone([0]).shape[-1])
        self.layer_shapes = self._probe()

    @property
    def vocab_size(self) -> int:
        """V: how many logits the head gives."""
        return self._vocab_size

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, cache: Cache, attention_mask: Tensor | None = None
    ) -> Tensor:
        """[B, T] ids -> [B, T, hidden]. Without a mask the model makes its own causal one."""
        return self._body(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=True,
            **{self._cache_argument: cache},
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V]."""
        return self._head(hidden)

    def run_alone(self, token_ids: list[int]) -> Tensor:
        """[T, V] logits of one sequence, without a cache."""
        return self.model(input_ids=torch.tensor([token_ids], device=self.device), use_cache=False).logits[0]

    @torch.inference_mode()
    def _probe(self) -> list[LayerShape]:
        """Runs three tokens: is head(body(x)) the whole model, and what does each layer cache?"""
        ids = torch.arange(3, device=self.device).unsqueeze(0)
        cache = DynamicCache(config=self.config)
        hidden = self.hidden(ids, ids, cache)
        if not torch.equal(self.logits(hidden)[0], self.run_alone([0, 1, 2])):
            raise ModelError(
                f"{self._name} changes its logits after the head (scaling or capping), which the embedded engine "
                "can't do. Use SGLang for it."
            )
        for layer in cache.layers:
            if type(layer) is not DynamicLayer:
                raise ModelError(
                    f"{self._name} has layers other than full attention ({type(layer).__name__}), which the embedded "
                    "engine can't cache. Use SGLang for it."
                )
        return [_shape(layer) for layer in cache.layers]


def _shape(layer: Any) -> LayerShape:
    _, num_heads, _, key_size = layer.keys.shape
    return LayerShape(num_heads, num_heads * key_size, num_heads * layer.values.shape[-1])


def load_model(path: str, device: torch.device, dtype: torch.dtype) -> ModelAdapter:
    """Loads a Hugging Face folder or id.

    Raises:
        ModelError: no causal language model there that transformers can load and the engine can run.
    """
    model = load_causal_lm(path, dtype)
    return ModelAdapter(model.to(device))  # pyright: ignore[reportArgumentType] transformers' annotation has no device


def find_stop_ids(path: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a generation: the generation config's, else the config's, and the tokenizer's end of sequence."""
    found: Any = None
    if (Path(path) / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(path).eos_token_id
    if found is None:
        found = getattr(config, "eos_token_id", None)
    ids: set[int] = set(found if isinstance(found, list) else [] if found is None else [found])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))
