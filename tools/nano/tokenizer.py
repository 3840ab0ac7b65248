"""A byte-level BPE in which digits stay single, so that arithmetic and copying see every digit."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

# A digit; a clitic; a word or a run of punctuation with one space before it; white space.
PIECES = r"\p{N}|'(?:[sdmt]|ll|ve|re)(?!\p{L})| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Every turn is its content alone, because the model is a continuer of text: a prompt line and then the
# answer.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """How many bytes of text each token stands for; none for the end-of-text token."""
    sizes = [0] * tokenizer.get_vocab_size()
    for token, token_id in tokenizer.get_vocab().items():
        sizes[token_id] = len(token)  # byte-level tokens are spelled with one symbol per byte
    sizes[END_OF_TEXT_ID] = 0
    return sizes


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json and tokenizer_config.json as Hugging Face transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
