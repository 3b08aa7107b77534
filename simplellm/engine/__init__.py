"""Which tokens run next, where their KV lives. The scheduler and what it needs import no torch."""
