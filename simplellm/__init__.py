"""SimpleLLM: inference for gpt-oss-20b and gpt-oss-120b. `LLM` is the door; importing this touches neither torch nor CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simplellm.errors import CheckpointError, EngineError, OptionError, RequestError, SimpleLLMError

if TYPE_CHECKING:
    from simplellm.api import LLM
    from simplellm.generation import Choice, Chunk, Generation, Output, Stream
    from simplellm.request import Logprob

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "Choice",
    "Chunk",
    "EngineError",
    "Generation",
    "Logprob",
    "OptionError",
    "Output",
    "RequestError",
    "SimpleLLMError",
    "Stream",
]

_HOMES = {"LLM": "api", "Logprob": "request"} | dict.fromkeys(
    ("Choice", "Chunk", "Generation", "Output", "Stream"), "generation"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'simplellm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"simplellm.{_HOMES[name]}"), name)
