"""Perplexity protocols: a number without one means nothing, so each is a row of a table.

A row says how rows of a corpus become one text, which special tokens it gets, how the tokens are cut into windows and
which of them are scored. The evaluator only ever sees windows; a new protocol is a new row, at most with a new cut.

`wikitext2-*` is the protocol of the GPTQ, SparseGPT and AWQ papers, whose windows have 2,048 or 4,096 tokens.
`hf-stride` is the evaluation script of HQQ, with the weight of its first window. `llama.cpp-512` is `llama-perplexity`:
the second half of each chunk is scored, and where the tokenizer adds a BOS, one replaces the first token of each chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ..formats.errors import InputError, nearest
from .sources import Corpus
from .tokenizer import adds_bos, bos_id, encode, ids_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Bos = Literal["none", "once", "window"]
BOS_POLICIES: tuple[Bos, ...] = ("none", "once", "window")
DEFAULT_WINDOW = 1024
# SHA-256 of WikiText-2's raw test split, rows joined as the papers join them.
WIKITEXT2_TEST = "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"


class Span(NamedTuple):
    """Tokens `start:stop` of the text are one window, of which the last `scored` are predicted.

    `weight` is what the window's mean counts in the mean over windows; where it equals `scored` the result is the mean
    over predicted tokens.
    """

    start: int
    stop: int
    scored: int
    weight: float


@dataclass(frozen=True)
class Window:
    """What one forward pass sees: `ids` int64 [length], whose last `scored` are targets; `weight` as in `Span`."""

    ids: Tensor
    scored: int
    weight: float


@dataclass(frozen=True)
class Cut:
    """A text cut into windows under a protocol, with everything that a result must say about it (`record`)."""

    windows: list[Window]
    record: dict[str, str | int | bool | None]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Protocol:
    """A row of the table.

    `text` gives a corpus as one string, and what it put between the rows; `spans` cuts a number of tokens into windows.
    `bos`: `none` adds no special tokens; `once` what the tokenizer adds to a text by itself; `window` a BOS in front of
    each window, inside its length, or in place of its first token with `bos_replaces`. `context` leading tokens of a
    window are never scored. `stride` None is the window's length. `free` names what the user may set; `text_sha256` is
    the text that the name promises.
    """

    name: str
    text: Callable[[Corpus], tuple[str, str]]
    spans: Callable[[int, Protocol], Iterator[Span]]
    window: int = DEFAULT_WINDOW
    stride: int | None = None
    bos: Bos = "once"
    tail: Literal["dropped", "scored"] = "dropped"
    context: int = 0
    bos_replaces: bool = False
    free: frozenset[str] = frozenset({"bos"})
    text_sha256: str | None = None

    @property
    def step(self) -> int:
        """Tokens of text from one window to the next."""
        return min(self.stride or self.window, self.window - self.front)

    @property
    def front(self) -> int:
        """Places of a window that a BOS in front of it takes."""
        return int(self.bos == "window" and not self.bos_replaces)

    def cut(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> Cut:
        """The windows of `corpus`. Raises InputError when it is too short for one, or a BOS is asked of no BOS."""
        text, join = self.text(corpus)
        row = self._with_tokenizer(tokenizer)
        ids = encode(tokenizer, text, special=row.bos == "once" or (row.bos == "window" and row.bos_replaces))
        bos = bos_id(tokenizer) if row.bos == "window" else None
        windows = [_window(ids, span, bos, row.bos_replaces) for span in row.spans(len(ids), row)]
        if not windows:
            raise InputError(
                f"--protocol {self.name}",
                f"{corpus.name} has {len(ids):,} tokens, too few for one window of {row.window:,}",
                "give more text, or --protocol plain with a smaller --window",
            )
        text_sha256 = hashlib.sha256(text.encode()).hexdigest()
        record = {**row._record(tokenizer, ids), "join": join, "text_sha256": text_sha256}
        return Cut(windows, record, tuple(row._doubts(text_sha256)))

    def _with_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Protocol:
        """The row with what only the tokenizer knows filled in."""
        if self.bos_replaces and not adds_bos(tokenizer):
            return replace(self, bos="none")
        if self.bos == "window" and bos_id(tokenizer) is None:
            raise InputError("--bos window", "the model's tokenizer has no BOS token", "use --bos none")
        return self

    def _record(self, tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> dict[str, str | int | bool | None]:
        leads = self.bos == "window" or (self.bos == "once" and ids[:1].tolist() == [bos_id(tokenizer)])
        return {
            "name": self.name,
            "window": self.window,
            "stride": self.stride or self.window,
            "bos": self.bos,
            "bos_token_id": bos_id(tokenizer) if leads else None,
            "context": self.context,
            "tail": self.tail,
            "text_tokens": len(ids),
            "ids_sha256": ids_sha256(ids),
        }

    def _doubts(self, text_sha256: str) -> Iterator[str]:
        if self.text_sha256 not in (None, text_sha256):
            yield f"{self.name}: the text is not WikiText-2's test split; do not compare the figure with papers"


def _window(ids: Tensor, span: Span, bos: int | None, replaces: bool) -> Window:
    piece = ids[span.start : span.stop]
    if bos is not None:
        piece = torch.cat([torch.tensor([bos]), piece[1:] if replaces else piece])
    return Window(piece, span.scored, span.weight)


def _tiles(tokens: int, row: Protocol) -> Iterator[Span]:
    """Windows that start every `step` tokens; each scores what no earlier one did, given at least one token before.

    A BOS in front of the window is such a token: the first token of the text is then scored as well.
    """
    length = row.window - row.front
    done = 0
    for start in range(0, tokens, row.step):
        stop = min(start + length, tokens)
        scored = min(stop - done, stop - start + row.front - 1) - row.context
        if scored > 0 and (stop - start == length or row.tail == "scored"):
            yield Span(start, stop, scored, scored)
        done = stop
        if stop == tokens:
            return


def _ends(tokens: int, row: Protocol) -> Iterator[Span]:
    """Windows that end every `step` tokens and reach back up to `window`; the first weighs its unscored token too."""
    for start in range(0, tokens, row.step):
        stop = min(start + row.step, tokens)
        begin = max(start + row.step - (row.window - row.front), 0)
        scored = min(stop - start, stop - begin + row.front - 1)
        if scored > 0:
            yield Span(begin, stop, scored, stop - start)


def _as_it_stands(corpus: Corpus) -> tuple[str, str]:
    return corpus.text(), corpus.separator


def _wikitext_rows(corpus: Corpus) -> tuple[str, str]:
    """Rows joined by two newlines: a line keeps its own newline, a row of white space is the empty string."""
    join = "\n\n"
    return join.join(row if row.strip() else "" for row in corpus.strings()), join


def _without_last_newline(corpus: Corpus) -> tuple[str, str]:
    return corpus.text().removesuffix("\n"), corpus.separator


def _wikitext2(window: int) -> Protocol:
    return Protocol(f"wikitext2-{window}", _wikitext_rows, _tiles, window=window, text_sha256=WIKITEXT2_TEST)


_FREE = frozenset({"window", "stride", "bos"})
PROTOCOLS: dict[str, Protocol] = {
    row.name: row
    for row in (
        _wikitext2(1024),
        _wikitext2(2048),
        _wikitext2(4096),
        Protocol("plain", _as_it_stands, _tiles, bos="none", tail="scored", free=_FREE),
        Protocol("hf-stride", _wikitext_rows, _ends, window=1024, stride=512, tail="scored", free=_FREE),
        Protocol(
            "llama.cpp-512",
            _without_last_newline,
            _tiles,
            window=512,
            bos="window",
            context=256,
            bos_replaces=True,
            free=frozenset(),
        ),
    )
}


def protocol(
    name: str,
    window: int | None = None,
    stride: int | None = None,
    bos: Bos | None = None,
    longest: int | None = None,
) -> Protocol:
    """The protocol called `name` with what the user set on top, for a model whose context is `longest` tokens.

    What is left to default shrinks to fit `longest`. Raises InputError for an unknown name (nearest named), for a
    setting that the protocol's name fixes, for a window longer than the model's context, and for numbers that make no
    windows.
    """
    if name not in PROTOCOLS:
        raise InputError(f"--protocol {name}", "no protocol has this name", nearest(name, PROTOCOLS))
    row = PROTOCOLS[name]
    for flag, value, fixed in (("window", window, row.window), ("stride", stride, row.step), ("bos", bos, row.bos)):
        if value is not None and flag not in row.free and value != fixed:
            raise InputError(f"--{flag} {value}", f"protocol {name} fixes it at {fixed}", "use --protocol plain")
    if window is not None and window < 2:
        raise InputError(f"--window {window}", "a window needs a token and one to predict", "use 2 or more")
    if window is None and longest is not None and "window" in row.free:
        window = min(row.window, longest)
    row = replace(row, window=window or row.window, bos=bos or row.bos)
    usual = None if row.stride is None else min(row.stride, row.window)
    row = replace(row, stride=usual if stride is None else stride)
    if row.stride is not None and not 1 <= row.stride <= row.window:
        raise InputError(f"--stride {row.stride}", f"it must lie between 1 and the window, {row.window}", "change one")
    if longest is not None and row.window > longest:
        raise InputError(
            f"--window {row.window}" if "window" in row.free else f"--protocol {name}",
            f"the model's context is {longest} tokens (max_position_embeddings)",
            f"use --protocol plain with a --window of at most {longest}",
        )
    return row
