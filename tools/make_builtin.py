"""Write simplellm/builtin/, the tiny checkpoint that comes with the package: `python -m tools.make_builtin`.

The official Hugging Face layout with four layers, and random weights from a fixed seed: the same bytes everywhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.make_checkpoint import Flavour, add_tokenizer, hf_config, write_checkpoint
from tools.tiny_tokenizer import tiny_tokenizer

BUILTIN = Path(__file__).resolve().parent.parent / "simplellm" / "builtin"
README = """\
# The built-in checkpoint

A gpt-oss model of four layers with **random weights**, for demonstration: it runs everywhere and says nothing sensible.
Its files have the layout of openai/gpt-oss-20b (MXFP4 experts, the rest in bf16), its vocabulary 320 tokens: bytes, a
few merges, harmony's special tokens. `python -m tools.make_builtin` writes this folder.

Licence: Apache 2.0, as the rest of the project.
"""


def main() -> None:
    shutil.rmtree(BUILTIN, ignore_errors=True)
    tokenizer = tiny_tokenizer()
    config = hf_config(
        layers=4,
        experts=8,
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=8,
        num_key_value_heads=1,
        vocab_size=len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"]),
    )
    add_tokenizer(BUILTIN, config, tokenizer)
    total = write_checkpoint(BUILTIN, config, flavour=Flavour(seed=0))
    (BUILTIN / "README.md").write_text(README, encoding="utf-8")
    print(f"{BUILTIN}: {total:,} bytes of tensors")


if __name__ == "__main__":
    main()
