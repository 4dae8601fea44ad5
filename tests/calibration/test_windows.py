"""Calibration windows: exact length, no overlap, one seed one choice, nothing silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compress_llm.calibration.sources import Corpus
from compress_llm.calibration.windows import calibration_windows
from compress_llm.formats.errors import InputError

TEMPLATE = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}"


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def chat(*contents: str) -> Corpus:
    return Corpus("c", "", [[{"role": "user", "content": content}] for content in contents], "chat")


def test_text_is_cut_into_exact_windows_without_overlap(word_tokenizer: Callable) -> None:
    corpus = Corpus("c", "", [words(*range(20))])
    windows = calibration_windows(corpus, word_tokenizer(), num_samples=3, seq_len=4, seed=0)
    assert windows.ids.shape == (3, 4)
    assert windows.ids.dtype == torch.int64
    assert (windows.keep, windows.tokens, windows.warnings) == (None, 12, ())
    starts = windows.ids[:, 0].tolist()
    assert all(row.tolist() == list(range(row[0], row[0] + 4)) and (row[0] - 3) % 4 == 0 for row in windows.ids)
    assert starts == sorted(set(starts))


def test_the_seed_alone_picks(word_tokenizer: Callable) -> None:
    corpus = Corpus("c", "", [words(*(range(20)), *range(20), *range(20))])
    made = [calibration_windows(corpus, word_tokenizer(), 5, 3, seed).ids.tolist() for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_each_document_is_tokenised_on_its_own_with_its_bos(word_tokenizer: Callable) -> None:
    corpus = Corpus("c", "", [words(1, 2), words(1, 2), words(1, 2)])
    windows = calibration_windows(corpus, word_tokenizer(bos=True), 3, 3, 0)
    assert windows.ids.tolist() == [[0, 4, 5]] * 3


def test_lines_are_one_document(word_tokenizer: Callable) -> None:
    corpus = Corpus("c", "", [words(1) + "\n", words(2) + "\n", words(3)], "line")
    assert calibration_windows(corpus, word_tokenizer(bos=True), 1, 4, 0).ids.tolist() == [[0, 4, 5, 6]]


def test_a_large_corpus_is_read_no_further_than_needed(word_tokenizer: Callable) -> None:
    tokenizer = word_tokenizer()
    corpus = Corpus("c", "", [words(index % 20) for index in range(1000)])
    seen = 0

    class Counting:
        bos_token_id = tokenizer.bos_token_id

        def __call__(self, texts: list[str], **rest: object) -> object:
            nonlocal seen
            seen += len(texts)
            return tokenizer(texts, **rest)

    windows = calibration_windows(corpus, Counting(), 10, 10, 0)
    assert windows.ids.shape == (10, 10)
    assert 100 <= seen < 150
    assert windows.ids.flatten().tolist() != [3 + index % 20 for index in range(100)]


def test_a_long_document_is_taken_in_pieces_of_whole_lines(word_tokenizer: Callable) -> None:
    line = words(*range(20)) + "\n"
    corpus = Corpus("c", "", [line * 2000])
    windows = calibration_windows(corpus, word_tokenizer(), 50, 20, 0)
    assert windows.ids.tolist() == [list(range(3, 23))] * 50
    everything = calibration_windows(corpus, word_tokenizer(), 2001, 20, 0)
    assert everything.ids.shape == (2000, 20)


def test_fewer_windows_than_asked_for_is_said(word_tokenizer: Callable) -> None:
    windows = calibration_windows(Corpus("c", "", [words(*range(10))]), word_tokenizer(), 8, 4, 0)
    assert windows.ids.shape == (2, 4)
    assert "only 2 windows" in windows.warnings[0]
    short = calibration_windows(chat("w1"), with_template(word_tokenizer()), 8, 4, 0)
    assert "only 1 windows" in short.warnings[0]


def test_too_little_text_says_how_many_windows_there_are(word_tokenizer: Callable) -> None:
    with pytest.raises(InputError, match="10 tokens, which makes 0 windows"):
        calibration_windows(Corpus("c", "", [words(*range(10))]), word_tokenizer(), 8, 11, 0)


@pytest.mark.parametrize(("flag", "samples", "length"), [("--num-samples", 0, 4), ("--seq-len", 4, 0)])
def test_sizes_are_positive(word_tokenizer: Callable, flag: str, samples: int, length: int) -> None:
    with pytest.raises(InputError, match=flag):
        calibration_windows(Corpus("c", "", ["w1"]), word_tokenizer(), samples, length, 0)


def with_template(tokenizer: object, template: str = TEMPLATE) -> object:
    tokenizer.chat_template = template
    return tokenizer


def test_conversations_are_windows_of_their_own_with_one_bos(word_tokenizer: Callable) -> None:
    tokenizer = with_template(word_tokenizer(bos=True))
    windows = calibration_windows(chat(words(1, 2, 3, 4, 5), words(6), words(7, 8)), tokenizer, 3, 4, 0)
    assert windows.ids.tolist() == [[0, 4, 5, 6], [0, 9, 1, 1], [0, 10, 11, 1]]
    assert windows.keep is not None
    assert windows.keep.tolist() == [[True] * 4, [True, True, False, False], [True, True, True, False]]
    assert windows.tokens == 9


def test_conversations_of_one_length_need_no_mask(word_tokenizer: Callable) -> None:
    windows = calibration_windows(chat(words(1), words(2)), with_template(word_tokenizer()), 2, 100, 0)
    assert windows.ids.shape == (2, 2)
    assert windows.keep is None


def test_a_tokenizer_without_a_template_is_refused(word_tokenizer: Callable) -> None:
    with pytest.raises(InputError, match="no chat template"):
        calibration_windows(chat("w1"), word_tokenizer(), 1, 4, 0)


def test_what_the_template_refuses_names_the_conversation(word_tokenizer: Callable) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="conversation 1.*roles must alternate"):
        calibration_windows(chat("w1"), with_template(word_tokenizer(), template), 1, 4, 0)


def test_empty_conversations_make_no_windows(word_tokenizer: Callable) -> None:
    with pytest.raises(InputError, match="0 windows"):
        calibration_windows(chat(""), with_template(word_tokenizer(), "{{ '' }}"), 1, 4, 0)
