"""Shared fixtures: a tiny checkpoint, loaders, and the rule that tests marked `gpu` run only where a Hopper GPU is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from simplellm.model.checkpoint import load_config
from simplellm.model.gpt_oss import GptOss
from simplellm.model.layers import arrange
from simplellm.model.weights import load_weights
from tests.checkpoints import make, tiny_tokenizer

torch.set_num_threads(1)  # tiny tensors gain nothing from more, and test processes share the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four layers with a byte-level tokenizer."""
    tokenizer = tiny_tokenizer()
    vocab = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    return make(tmp_path_factory.mktemp("tiny"), vocab=vocab, tokenizer=tokenizer)


def load_model(path: Path, dtype: torch.dtype = torch.float32, max_context: int = 1024, device: str = "cpu") -> GptOss:
    config = load_config(path)
    weights = load_weights(path, config, device=device, progress=False, arrange=partial(arrange, dtype=dtype))
    return GptOss(config, weights, dtype, max_context)


@pytest.fixture(scope="session")
def load() -> Callable[..., GptOss]:
    return load_model
