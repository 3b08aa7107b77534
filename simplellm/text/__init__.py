"""Tokens <-> text <-> harmony messages. Knows nothing of engines; imports only the vocabulary (errors, config)."""
