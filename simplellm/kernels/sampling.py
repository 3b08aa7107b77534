"""sample: one token a row. Penalties, bias, masks; then temperature, min-p, top-k, top-p (vLLM's order); then the draw.

Filters keep a token by its value, so equal ones stay or go together. The draw is an exponential race: the token with the
largest z_v / T - log E_v, E_v = -log(1 - w_v), w_v from Philox 4x32-10 at (seed, position, v): no order, no state.
"""

import torch

WORD = 0xFFFFFFFF
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57  # Philox's multipliers and key increments (Salmon et al. 2011)
WEYL_A, WEYL_B = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four words of random bits for a counter of four words under a key of two. All int64 holding 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low_a, high_a = _multiply(c0, ROUND_A)
        low_b, high_b = _multiply(c2, ROUND_B)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + WEYL_A) & WORD, (k1 + WEYL_B) & WORD
    return c0, c1, c2, c3


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high words of a * b, in halves so that int64 never overflows."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)  # each below 2^48
    total = low + ((high & 0xFFFF) << 16)
    return total & WORD, (high >> 16) + (total >> 32)


def race(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """-log E [N, num_tokens] float64 (standard Gumbel): token v of row n from (seeds[n], positions[n], v) alone."""
    block = torch.arange((num_tokens + 3) // 4, device=seeds.device).expand(len(seeds), -1)
    zero = torch.zeros_like(block)
    place = positions.long()[:, None].expand_as(block)
    key = (seeds & WORD)[:, None].expand_as(block), ((seeds >> 32) & WORD)[:, None].expand_as(block)
    words = torch.stack(philox((block, place, zero, zero), key), -1).flatten(1)[:, :num_tokens]
    return -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32))


def penalise_ref(
    logits: torch.Tensor,
    counts: torch.Tensor,
    seen: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """logits [N, V] lowered for repeated tokens. counts [N, V]: times generated; seen [N, V]: in the prompt; rest [N].

    Repetition divides positive logits and multiplies negative ones, for prompt and generated tokens alike; presence and
    frequency are subtracted for generated tokens only.
    """
    factor = torch.where(seen | (counts > 0), repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def _keep(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """scaled [N, V] float64 (logits over temperature) -> which tokens may be drawn, [N, V] bool."""
    best, num_tokens = scaled.amax(-1, keepdim=True), scaled.shape[-1]
    scaled = scaled.masked_fill(scaled < best + min_p.double().log()[:, None], -torch.inf)
    ranked = scaled.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, num_tokens).clamp(max=num_tokens).long() - 1
    kth = ranked.gather(1, last[:, None])
    ranked = ranked.masked_fill(ranked < kth, -torch.inf)
    before = ranked.softmax(-1).cumsum(-1).roll(1, -1)  # the mass of all better ones
    before[:, 0] = 0
    inside = (before < top_p.double()[:, None]).sum(-1, keepdim=True).clamp(min=1)
    nucleus = ranked.gather(1, inside - 1)
    least = torch.where(top_p[:, None] < 1, torch.maximum(kth, nucleus), kth)
    return (scaled >= least) & (scaled > -torch.inf)


def sample_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """logits [N, V] f32 (forbidden tokens -inf), settings [N] -> tokens [N] int64.

    temperature 0 is greedy (the lowest id of equal ones); top_k 0, top_p 1, min_p 0 are off; `positions` is where the
    drawn token will stand. A NaN counts as -inf; a row with nothing above that draws -1.
    """
    logits = logits.masked_fill(logits.isnan(), -torch.inf)
    tokens = logits.argmax(-1)
    drawn = (temperature > 0).nonzero().flatten()
    if len(drawn):
        scaled = logits[drawn].double() / temperature[drawn].double()[:, None]
        if bool(((top_k > 0) | (top_p < 1) | (min_p > 0))[drawn].any()):
            scaled = scaled.masked_fill(~_keep(scaled, top_k[drawn], top_p[drawn], min_p[drawn]), -torch.inf)
        tokens[drawn] = (scaled + race(seeds[drawn], positions[drawn], logits.shape[1])).argmax(-1)
    return tokens.masked_fill(~(logits > -torch.inf).any(-1), -1)


def logprobs_ref(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [N, V], tokens [N] -> their log-probabilities [N], and the k best ids and log-probabilities [N, k] each."""
    all_logprobs = logits.double().log_softmax(-1)
    best, ids = all_logprobs.sort(dim=-1, descending=True, stable=True)
    return all_logprobs.gather(1, tokens[:, None]).squeeze(1).float(), ids[:, :k], best[:, :k].float()
