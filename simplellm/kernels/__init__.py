"""One function per op of the model. The `_ref` twins define them; they run wherever torch does.

A twin computes in float64 and rounds where the model rounds, to the dtype of its activations: float32, or bfloat16. So a
result does not depend on how a batch was cut: float64 sums differ between shapes in bits that the rounding removes.
"""

from simplellm.kernels.attention import attention_ref as attention
from simplellm.kernels.linear import linear_ref as linear
from simplellm.kernels.lm_head import lm_head_ref as lm_head
from simplellm.kernels.moe import experts_ref as experts
from simplellm.kernels.norm import rmsnorm_ref as rmsnorm
from simplellm.kernels.rope import rope_append_ref as rope_append
from simplellm.kernels.rope import rope_table
from simplellm.kernels.router import router_ref as router
from simplellm.kernels.sampling import logprobs_ref as logprobs
from simplellm.kernels.sampling import penalise_ref as penalise
from simplellm.kernels.sampling import sample_ref as sample

__all__ = [
    "attention",
    "experts",
    "linear",
    "lm_head",
    "logprobs",
    "penalise",
    "rmsnorm",
    "rope_append",
    "rope_table",
    "router",
    "sample",
]
