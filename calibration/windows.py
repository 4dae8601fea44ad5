"""Calibration text as token windows: what flows through the model while it is compressed.

Text is one stream of tokens cut into windows of equal length; a conversation is a window of its own, written with the
model's chat template, because that is how the model will meet it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..formats.errors import InputError
from .sources import Conversation, Corpus
from .tokenizer import encode_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 16
_PIECE = 32_768
"""Characters that are tokenised together: a long document is read no further than the windows need."""


@dataclass(frozen=True)
class Windows:
    """Token windows.

    `ids` int64 [windows, length]; `keep` bool of the same shape, False on padding (right side only), or None when
    there is none; `tokens` the number of ids that are not padding; `warnings` what the user should be told.
    """

    ids: Tensor
    keep: Tensor | None
    tokens: int
    warnings: tuple[str, ...] = ()


def calibration_windows(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, num_samples: int, seq_len: int, seed: int
) -> Windows:
    """`num_samples` windows of at most `seq_len` tokens, picked by `seed` without overlap.

    Text: documents (long ones in pieces of whole lines) in seeded order, each with the special tokens that the
    tokenizer adds by itself, joined to one stream, cut into windows of exactly `seq_len`. Conversations: one a
    window, cut at `seq_len`, padded on the right to the longest that was picked. Fewer windows than asked for is a
    warning; none is an InputError.
    """
    for flag, value in (("--num-samples", num_samples), ("--seq-len", seq_len)):
        if value < 1:
            raise InputError(f"{flag} {value}", "it must be at least 1", "give a positive number")
    pick = torch.Generator().manual_seed(seed)
    if corpus.unit == "chat":
        conversations = [row for row in corpus.rows if not isinstance(row, str)]
        windows = _chat_windows(conversations, tokenizer, num_samples, seq_len, pick)
    else:
        windows = _text_windows(corpus, tokenizer, num_samples, seq_len, pick)
    found = windows.ids.shape[0]
    if found >= num_samples:
        return windows
    warning = f"--num-samples {num_samples}: {corpus.name} makes only {found} windows of {seq_len} tokens; all are used"
    return Windows(windows.ids, windows.keep, windows.tokens, (*windows.warnings, warning))


def _text_windows(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, num_samples: int, seq_len: int, pick: torch.Generator
) -> Windows:
    stream: list[int] = []
    for ids in _shuffled_ids(corpus.documents(), tokenizer, pick):
        stream.extend(ids)
        if len(stream) >= num_samples * seq_len:
            break
    available = len(stream) // seq_len
    if available == 0:
        raise InputError(
            f"--seq-len {seq_len}",
            f"{corpus.name} has {len(stream):,} tokens, which makes 0 windows",
            f"give more text or a --seq-len of at most {len(stream)}",
        )
    tiles = torch.tensor(stream[: available * seq_len], dtype=torch.int64).view(available, seq_len)
    chosen = torch.randperm(available, generator=pick)[:num_samples].sort().values
    return Windows(tiles[chosen], None, chosen.numel() * seq_len)


def _shuffled_ids(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, pick: torch.Generator
) -> Iterator[list[int]]:
    """Ids of each piece in seeded order, tokenised in batches so that a large corpus is read no further than asked."""
    pieces = [piece for document in documents for piece in _pieces(document)]
    order = torch.randperm(len(pieces), generator=pick).tolist()
    for start in range(0, len(order), _BATCH):
        yield from encode_all(tokenizer, [pieces[index] for index in order[start : start + _BATCH]])


def _pieces(document: str) -> Iterator[str]:
    """The document in pieces of whole lines, each of about `_PIECE` characters; a short document is one piece."""
    start = 0
    while start < len(document):
        end = document.find("\n", start + _PIECE)
        end = len(document) if end < 0 else end + 1
        yield document[start:end]
        start = end


def _chat_windows(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    num_samples: int,
    seq_len: int,
    pick: torch.Generator,
) -> Windows:
    order = torch.randperm(len(conversations), generator=pick)[:num_samples].sort().values.tolist()
    rows = [_templated(tokenizer, conversations[index], index + 1)[:seq_len] for index in order]
    length = max(map(len, rows))
    if length == 0:
        raise InputError("chat template", "it makes 0 windows: every conversation is empty", "correct the rows")
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(token, int)), 0)
    ids = torch.full((len(rows), length), pad, dtype=torch.int64)
    keep = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        keep[index, : len(row)] = True
    return Windows(ids, None if bool(keep.all()) else keep, int(keep.sum()))


def _templated(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, number: int) -> list[int]:
    """Ids of one conversation. The template writes the BOS itself, so the tokenizer adds none."""
    from jinja2 import TemplateError

    messages: list[dict[str, Any]] = [dict(message) for message in conversation]
    if not tokenizer.chat_template:
        raise InputError("`messages` rows", "the model's tokenizer has no chat template", "give rows with `text`")
    try:
        encoded: Any = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    except (TemplateError, TypeError, KeyError) as error:
        raise InputError(
            f"conversation {number}", f"the model's chat template refuses it ({error})", "correct the row"
        ) from error
    return list(encoded["input_ids"])
