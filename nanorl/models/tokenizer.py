"""The tiny models' tokenizer: byte-level BPE with ChatML marks, a real fast tokenizer in 0.1 s."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, IM_START, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, EOS_ID = 0, 2

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    r"""A tokenizer for any text, short on texts like these: at most vocab_size ids, 256 bytes and 3 marks among them.

    Only numbers are split off (`\d+`): a whole number is one token wherever it stands, and everything between two
    numbers can become one as well. An example then has 25 tokens instead of the 35 that GPT-2's splitting gives, which
    makes warm start and RL faster by as much.

    To be used with `model_type` qwen3: AutoTokenizer puts Qwen2's own tokenizer in the place of a saved one where the
    model is a qwen2, which splits numbers into digits and ruins the model without any error.
    """
    tokenizer = Tokenizer(models.BPE())
    numbers = pre_tokenizers.Split(Regex(r"\d+"), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([numbers, as_bytes])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, IM_START, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[IM_START],
        model_max_length=max_length,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
