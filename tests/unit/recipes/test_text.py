from __future__ import annotations

import itertools

import pytest
import torch

from memfit.core.errors import UsageError
from memfit.integrations.recipes import corpus
from memfit.integrations.recipes.token_batches import CorpusError, TokenWindows, read_tokens


def test_the_child_process_gives_the_tokens_that_this_process_would_make() -> None:
    tokens = read_tokens(600, token_limit=30_000)
    texts = ((text, True) for text in corpus.iterate_text())
    pieces = corpus.encode_texts(corpus.build_tokenizer(600), texts, token_limit=30_000)
    expected = [number for piece in pieces for number in piece]
    assert tokens.dtype == torch.int16
    assert tokens.tolist() == expected
    assert len(expected) == 30_000


def test_a_failed_child_process_is_an_error_with_its_last_words() -> None:
    with pytest.raises(CorpusError, match=r"status 1: ValueError: a vocabulary of 5 tokens: choose from 257"):
        read_tokens(5)


def test_a_token_limit_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="give at least 1"):
        read_tokens(300, token_limit=0)


def make_windows(*, seed: int = 0, token_count: int = 100, batch_size: int = 3) -> TokenWindows:
    tokens = torch.arange(token_count, dtype=torch.int16)
    return TokenWindows(tokens=tokens, batch_size=batch_size, sequence_length=7, seed=seed)


def test_an_epoch_uses_each_token_at_most_once_as_a_target_and_misses_less_than_a_batch() -> None:
    windows = make_windows()
    assert windows.window_count == 14  # 99 targets in windows of 7
    batches = list(itertools.islice(windows, 14 // 3))
    for batch in batches:
        assert batch.shape == (3, 8)
        assert batch.dtype == torch.int64
        # The tokens count upwards from a multiple of the window's length: each window is one slice of the text.
        assert torch.equal(batch - batch[:, :1], torch.arange(8).expand(3, 8))
        assert not (batch[:, 0] % 7).any()
    targets = torch.cat([batch[:, 1:].flatten() for batch in batches])
    assert len(targets.unique()) == len(targets) == 4 * 3 * 7


def test_equal_seeds_give_equal_batches_and_others_do_not() -> None:
    first, again, other = (list(itertools.islice(make_windows(seed=seed), 10)) for seed in (5, 5, 6))
    assert all(torch.equal(left, right) for left, right in zip(first, again, strict=True))
    assert not all(torch.equal(left, right) for left, right in zip(first, other, strict=True))


def test_epochs_are_shuffled_anew_and_iteration_starts_at_the_first_batch_each_time() -> None:
    windows = make_windows()
    batches = list(itertools.islice(windows, 8))
    assert not all(torch.equal(batches[place], batches[place + 4]) for place in range(4))
    assert torch.equal(next(iter(windows)), batches[0])


def test_drawing_batches_leaves_the_users_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    list(itertools.islice(make_windows(), 8))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_too_little_text_and_empty_batches_are_refused() -> None:
    with pytest.raises(UsageError, match=r"15 tokens give 2 windows of 7 tokens, fewer than a batch of 3"):
        make_windows(token_count=15)
    with pytest.raises(UsageError, match="both must be positive"):
        make_windows(batch_size=0)


def test_a_stream_goes_on_where_it_was_left() -> None:
    windows = make_windows()
    whole = [batch.tolist() for batch in itertools.islice(windows, 20)]
    for leave_after in (0, 1, 4, 5, 13):  # an epoch has 4 batches
        first, second = iter(windows), iter(windows)
        for _ in range(leave_after):
            next(first)
        second.load_state_dict(first.state_dict())
        assert [next(second).tolist() for _ in range(20 - leave_after)] == whole[leave_after:]


def test_a_stream_refuses_the_place_of_another() -> None:
    state = iter(make_windows()).state_dict()
    with pytest.raises(UsageError, match="from seed 0, and have seed 1 here"):
        iter(make_windows(seed=1)).load_state_dict(state)
    for wrong in ({"batch": -1}, {"epoch": "0"}, {"batch": 10**9}):
        with pytest.raises(UsageError, match="cannot go on from batch"):
            iter(make_windows()).load_state_dict({**state, **wrong})
