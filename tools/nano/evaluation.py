"""Measures of a model: exact held-out bits per character, and exact-match accuracy on the task families."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .model import Model, token_losses
from .tasks import FAMILIES, TEST_LEVELS, Task, test_items

BATCH_WINDOWS = 64


def bits_per_character(model: Model, stream: Tensor, token_bytes: Tensor, sequence: int) -> float:
    """Over all tokens of `stream` but the first, each predicted from the tokens before it in its window.

    Nats are summed over every token, end-of-text included, and divided by the bytes of text that the tokens
    stand for (characters, as the text is ASCII).
    """
    targets = stream[1:]
    padding = -len(targets) % sequence
    inputs = F.pad(stream[:-1], (0, padding)).view(-1, sequence)
    targets = F.pad(targets, (0, padding), value=-1).view(-1, sequence)
    nats = torch.zeros((), dtype=torch.float64, device=stream.device)
    # Eager: evaluation has other batch shapes than training, and compiling for each would cost more than it
    # saves.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for ids, wanted in zip(inputs.split(BATCH_WINDOWS), targets.split(BATCH_WINDOWS), strict=True):
            hidden = model(ids.long()).hidden
            losses = token_losses(hidden, model.embed_tokens.weight, wanted.clamp(min=0).long())
            nats += losses[wanted >= 0].double().sum()
    return nats.item() / token_bytes[stream[1:].long()].sum().item() / math.log(2)


def teacher_forced_batches(tasks: Sequence[Task], tokenizer: Tokenizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids [B, S+1] padded with zeros, and which of the S targets [B, S] belong to the answer."""
    for start in range(0, len(tasks), BATCH_WINDOWS):
        chunk = tasks[start : start + BATCH_WINDOWS]
        prompts = [len(tokenizer.encode(task.prompt).ids) for task in chunk]
        rows = [torch.tensor(tokenizer.encode(task.text).ids) for task in chunk]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        position = torch.arange(1, ids.shape[1])
        first, after = torch.tensor(prompts)[:, None], torch.tensor([len(row) for row in rows])[:, None]
        yield ids, (position >= first) & (position < after)


def exact_match(model: Model, tasks: Sequence[Task], tokenizer: Tokenizer) -> float:
    """The share of items whose every answer token is the model's first choice given the tokens before it.

    That is when greedy decoding reproduces the worked answer, so it bounds the accuracy of final answers from
    below.
    """
    device = model.embed_tokens.weight.device
    right = 0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for ids, is_answer in teacher_forced_batches(tasks, tokenizer):
            ids, is_answer = ids.to(device), is_answer.to(device)
            hidden = model(ids[:, :-1]).hidden
            choices = F.linear(hidden, model.embed_tokens.weight.to(hidden.dtype)).argmax(-1)
            right += ((choices == ids[:, 1:]) | ~is_answer).all(1).sum().item()
    return right / len(tasks)


def task_accuracies(model: Model, tokenizer: Tokenizer, items: int) -> dict[str, float]:
    """Exact match of every family and level, under names such as "add-easy"."""
    return {
        f"{family}-{level}": exact_match(model, test_items(family, level, items), tokenizer)
        for family in FAMILIES
        for level in TEST_LEVELS
    }
