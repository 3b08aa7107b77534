"""The official tokenizer, and OpenAI's own renderer reading the same ranks offline."""

from __future__ import annotations

import os
from typing import Any

import pytest

from simplellm.text.tokenizer import Tokenizer
from tests import vocab


@pytest.fixture(scope="session")
def official() -> Tokenizer:
    return vocab.tokenizer()


@pytest.fixture(scope="session")
def reference_harmony() -> Any:
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(vocab.ranks_file().parent)
    import openai_harmony

    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
