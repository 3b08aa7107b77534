"""A tokenizer of 200,000 tokens takes seconds to read: the server's tests share one per file."""

import functools

import pytest

from simplellm.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", autouse=True)
def read_each_tokenizer_once() -> None:
    Tokenizer.from_file = functools.lru_cache(Tokenizer.from_file)  # type: ignore[method-assign]
