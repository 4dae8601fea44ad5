"""The tokenizer of a model directory: loading it offline, telling two apart, text to ids.

One place for the rules about special tokens, because a perplexity changes when they do: nothing else in the package
calls a tokenizer on plain text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..formats.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPARED_CHARACTERS = 20_000


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a model directory, without a connection. Raises InputError when there is none that loads."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    if not any(directory.glob("tokenizer*")) and not any(directory.glob("vocab*")):
        raise InputError(str(directory), "it holds no tokenizer", "copy the model's tokenizer files into it")
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=trust_remote_code)
    except StrictDataclassError as error:  # it reads the model's configuration too
        from ..kernels.skeleton import not_understood

        raise not_understood(directory, error) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise InputError(
            str(directory), f"its tokenizer does not load ({error})", "copy the model's tokenizer files anew"
        ) from error


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what ids stand for: every token with its id, and the ids of the special ones.

    The same for a copy of the files, for another version of the library, and for a re-saved tokenizer.
    """
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> Tensor:
    """Ids (int64 [tokens]) of one text; `special` adds what the tokenizer adds by itself, such as a BOS."""
    ids = tokenizer(text, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text on its own, with the special tokens that the tokenizer adds by itself."""
    return tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]


def check_ids(ids: Iterable[Tensor], vocabulary: int) -> None:
    """Raise InputError where ids (int64, any shapes) lie outside a vocabulary of that many tokens."""
    largest = max(int(part.max()) for part in ids)
    if largest >= vocabulary:
        cause = f"it gives the id {largest}, and the model's vocabulary has {vocabulary:,} tokens"
        raise InputError("tokenizer", cause, "use the tokenizer that belongs to the model")


def check_same(mine: PreTrainedTokenizerBase, reference: PreTrainedTokenizerBase, text: str) -> None:
    """Raise InputError unless both give the same ids the same meaning and cut the beginning of `text` alike."""
    sample = text[:COMPARED_CHARACTERS]
    same = tokenizer_sha256(mine) == tokenizer_sha256(reference)
    if not same or not torch.equal(encode(mine, sample, special=False), encode(reference, sample, special=False)):
        raise InputError(
            "--reference", "its tokenizer is not the model's", "name the model that this one was made from"
        )


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its BOS token in front of a text by itself."""
    bos = bos_id(tokenizer)
    return bos is not None and encode(tokenizer, "a", special=True)[:1].tolist() == [bos]


def bos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the tokenizer's BOS token, None where it has none."""
    token = tokenizer.bos_token_id
    return token if isinstance(token, int) else None


def ids_sha256(ids: Tensor) -> str:
    """Hash of a sequence of ids, as little-endian int64."""
    return hashlib.sha256(ids.to(torch.int64).contiguous().numpy().astype("<i8").tobytes()).hexdigest()
