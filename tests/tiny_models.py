"""Random tiny Qwen3 folders for tests: 2 layers, a real fast tokenizer, made in well under a second.

`python -m tests.tiny_models FOLDER` makes one.
"""

import sys
from pathlib import Path


def build_tokenizer_folder(folder: Path) -> int:
    """Saves a byte-level tokenizer with ChatML marks; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    symbols = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(str(folder))
    return len(symbols)


def build_tiny_model(
    folder: Path, *, tied: bool = True, seed: int = 0, hidden_size: int = 64, architecture: str = "qwen3"
) -> Path:
    """A random Qwen3 (or Llama) of 2 layers as a Hugging Face folder, fp32, peaked enough that logits differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = build_tokenizer_folder(folder)
    shape = {
        "vocab_size": vocab_size + (-vocab_size) % 64,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4 if architecture == "llama" else 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.06,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = (
        LlamaForCausalLM(LlamaConfig(**shape)) if architecture == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    )
    disable_progress_bar()  # else it depends on the test before whether a bar shows in captured output
    model.save_pretrained(str(folder))
    return folder


if __name__ == "__main__":
    build_tiny_model(Path(sys.argv[1]))
