"""The tiny model: half a million parameters, built here by a short warm start, so that any machine runs the real thing.

It is an ordinary Hugging Face folder of the Qwen3 architecture with a real fast tokenizer. It imports torch.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from nanorl.models.cache import build_once, cache_folder
from nanorl.models.demonstrations import Demonstration, draw_demonstrations
from nanorl.models.tokenizer import EOS_ID, PAD_ID, train_tokenizer
from nanorl.models.warm_start import Progress, WarmStart, train_on

BUILD_VERSION = 1
"""Part of the cache key: raise it when code changes what a recipe builds."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the network."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    tied: bool = True
    """Whether the output head is the embedding."""
    vocab_size: int = 512
    """Asked of the tokenizer; the arithmetic's texts need fewer."""
    max_length: int = 1024


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the model's bits; its hash names the cached folder."""

    shape: Shape = Shape()
    warm_start: WarmStart | None = WarmStart()
    """None: random weights."""
    seed: int = 0


TOKENIZER_EXAMPLES = 3000

TINY_RECIPE = Recipe()
RANDOM = Recipe(warm_start=None)


def ensure_tiny(recipe: Recipe = TINY_RECIPE, on_progress: Progress = lambda *_: None) -> Path:
    """The cached folder of a recipe's model, built first where it is missing.

    Raises:
        ModelError: the cache can't be written.
    """
    key = sha256(msgspec.json.encode((BUILD_VERSION, recipe))).hexdigest()[:12]
    name = "tiny" if recipe.warm_start else "tiny-random"
    return build_once(
        cache_folder() / "models" / f"{name}-{key}", lambda folder: build_tiny(folder, recipe, on_progress)
    )


def build_tiny(folder: Path, recipe: Recipe, on_progress: Progress = lambda *_: None) -> None:
    """Builds the model into a folder: the same bits for the same recipe, on the same machine.

    Args:
        folder: where config, weights, tokenizer and generation config go.
        recipe: shape, warm start and seed.
        on_progress: called with (done, total) warm-start steps.
    """
    num_examples = recipe.warm_start.num_examples if recipe.warm_start else 0
    demonstrations = draw_demonstrations(max(num_examples, TOKENIZER_EXAMPLES), recipe.seed)
    tokenizer = train_recipe_tokenizer(recipe, demonstrations)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Qwen3ForCausalLM(_config(recipe.shape, len(tokenizer)))
    if recipe.warm_start:
        train_on(model, encode(tokenizer, demonstrations[:num_examples]), recipe.warm_start, on_progress)
    save(folder, model, tokenizer)


def train_recipe_tokenizer(recipe: Recipe, demonstrations: Sequence[Demonstration]) -> PreTrainedTokenizerFast:
    """Learns from the parts that are encoded apart, so that no token spans two of them."""
    texts = [
        text
        for d in demonstrations[:TOKENIZER_EXAMPLES]
        for text in (f"user\n{d.question}", "\n", "assistant\n", d.answer)
    ]
    return train_tokenizer(texts, recipe.shape.vocab_size, recipe.shape.max_length)


def build_random(folder: Path, seed: int = 0, *, tied: bool = True) -> Path:
    """A model of the same kind with random weights, in a second: for tests and soak runs."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny(
        folder, Recipe(shape=Shape(hidden_size=64, intermediate_size=128, tied=tied), warm_start=None, seed=seed)
    )
    return folder


def encode(
    tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[Demonstration]
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids as the chat template renders them, answer ids with the stop token) of each demonstration.

    The two are encoded apart, as in RL, where the answer is sampled after the prompt's last token.
    """
    stop = tokenizer.convert_ids_to_tokens(EOS_ID)
    prompts = {d.question: _render(tokenizer, d.question) for d in demonstrations}
    answers = {d.answer: f"{d.answer}{stop}" for d in demonstrations}
    prompt_ids, answer_ids = (
        dict(zip(texts, tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"], strict=True))
        for texts in (prompts, answers)
    )
    return [(prompt_ids[d.question], answer_ids[d.answer]) for d in demonstrations]


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes an ordinary Hugging Face folder: what AutoModelForCausalLM, AutoTokenizer and SGLang load."""
    model.generation_config = GenerationConfig(
        eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=True, temperature=1.0
    )
    disable_progress_bar()  # of transformers: one file in a millisecond, in the middle of our own progress
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(shape: Shape, vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.max_length,
        initializer_range=0.06,  # the default 0.02 is for models a hundred times wider, and starts this one slowly
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        dtype="float32",
    )


def _render(tokenizer: PreTrainedTokenizerFast, content: str) -> str:
    messages = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
