"""gpt-oss as arithmetic, and its weights from disk: checkpoint, weights, then the forward pass."""
