"""OpenAI's HTTP API over an LLM, in two processes: the front speaks HTTP, the other one owns the model (docs/server.md)."""
