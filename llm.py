"""`from llm import LLM`: simplellm's public names under a shorter one. For a checkout; not in the wheel."""

from simplellm import *  # noqa: F403
