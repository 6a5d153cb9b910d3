"""A tokenizer small enough to be read: 256 bytes, five merges, four marks, and a template that keeps everything."""

from pathlib import Path
from typing import cast

from nanorl.tokens.drift import Tokenizer

CHATML = (Path(__file__).parents[1] / "data" / "templates" / "chatml.jinja").read_text(encoding="utf-8")
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ċ", "Ġ")]  # the last: a newline and a space


def build_small_tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    symbols = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    core = Core(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
    return cast("Tokenizer", fast)
