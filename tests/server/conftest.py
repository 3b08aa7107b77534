"""A tokenizer of 200,000 tokens takes seconds to read, and so do its tables for grammars: the server's tests share them."""

import functools

import pytest

from simplellm.text import grammar
from simplellm.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", autouse=True)
def read_each_tokenizer_once() -> None:
    Tokenizer.from_file = functools.lru_cache(Tokenizer.from_file)  # type: ignore[method-assign]
    grammar.Vocabulary = functools.lru_cache(grammar.Vocabulary)  # type: ignore[misc,assignment]
