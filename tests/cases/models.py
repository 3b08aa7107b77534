"""What cases are run with: the real vocabulary, a scripted model, a tiny one. Each is made when first asked for."""

from __future__ import annotations

import functools
from contextlib import ExitStack

from simplellm import LLM
from simplellm.text.tokenizer import Tokenizer
from tests import vocab
from tests.scripted import END_OF_TEXT, ScriptedLLM
from tests.server.harness import Served


class Models:
    """Use it in a `with` block, which stops the models at its end."""

    def __init__(self) -> None:
        self._opened = ExitStack()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """o200k, rebuilt once per machine."""
        return vocab.tokenizer()

    @functools.cached_property
    def scripted(self) -> ScriptedLLM:
        """Draws what `play` says."""
        return self._opened.enter_context(ScriptedLLM([END_OF_TEXT]))

    @functools.cached_property
    def tiny(self) -> LLM:
        """A model that runs for real: the built-in one."""
        return self._opened.enter_context(LLM(device="cpu", progress=False))

    @functools.cached_property
    def served_scripted(self) -> Served:
        """A server that answers by script."""
        llm = self._opened.enter_context(ScriptedLLM([END_OF_TEXT]))
        return self._opened.enter_context(Served(llm))

    @functools.cached_property
    def served_tiny(self) -> Served:
        """A server of the built-in model."""
        llm = self._opened.enter_context(LLM(device="cpu", progress=False, num_pages=600))
        return self._opened.enter_context(Served(llm))

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
