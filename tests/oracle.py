"""A slow, plain gpt-oss: no cache, no batch, no pages, float64 throughout, straight from the safetensors files.

Shares nothing with simplellm but the files: the second opinion on everything the engine computes. Written from the
published description (OpenAI's reference code and model card), one token sequence at a time.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


class Oracle:
    def __init__(self, path: Path):
        self.config = json.loads((path / "config.json").read_text())
        self.tensors = {}
        for file in path.glob("*.safetensors"):
            self.tensors |= load_file(file)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name].double()

    def unpack(self, name: str) -> torch.Tensor:
        """[E, N, K]: code by code."""
        blocks, scales = self.tensors[f"{name}_blocks"].long(), self.tensors[f"{name}_scales"].double()
        codes = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2)
        values = torch.tensor(MAGNITUDES, dtype=torch.float64)[codes % 8] * (1 - 2 * (codes // 8))
        return (values * 2 ** (scales - 127)[..., None]).flatten(-2)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.get(f"{name}.weight")

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.get(f"{name}.weight").T + self.get(f"{name}.bias")

    def angles(self, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        rope, dim = self.config["rope_scaling"], self.config["head_dim"]
        base, factor = self.config["rope_theta"], rope["factor"]
        frequencies = []
        for i in range(dim // 2):
            turns = [
                dim / 2 * math.log(rope["original_max_position_embeddings"] / (beta * 2 * math.pi)) / math.log(base)
                for beta in (rope["beta_fast"], rope["beta_slow"])
            ]
            ramp = min(1.0, max(0.0, (i - turns[0]) / (turns[1] - turns[0])))
            plain = base ** (-2 * i / dim)
            frequencies.append(plain / factor * ramp + plain * (1 - ramp))
        angle = torch.arange(num, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
        concentration = 0.1 * math.log(factor) + 1
        return angle.cos() * concentration, angle.sin() * concentration

    def attention(self, x: torch.Tensor, prefix: str, windowed: bool) -> torch.Tensor:
        c, num = self.config, len(x)
        dim, heads, groups = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        cos, sin = self.angles(num)
        q, k, v = (self.linear(x, f"{prefix}.{side}_proj").view(num, -1, dim) for side in "qkv")

        def turn(y: torch.Tensor) -> torch.Tensor:
            a, b = y[..., : dim // 2], y[..., dim // 2 :]
            c, s = cos[:, None], sin[:, None]
            return torch.cat([a * c - b * s, b * c + a * s], -1)

        q, k = turn(q), turn(k)
        rows = []
        for h in range(heads):
            key, value = k[:, h // (heads // groups)], v[:, h // (heads // groups)]
            scores = q[:, h] @ key.T / math.sqrt(dim)
            ages = torch.arange(num)[:, None] - torch.arange(num)[None]  # how far back a key lies
            seen = (ages >= 0) & (ages < c["sliding_window"]) if windowed else ages >= 0
            scores = torch.where(seen, scores, -torch.inf)
            sink = self.get(f"{prefix}.sinks")[h].expand(num, 1)
            rows.append(torch.softmax(torch.cat([scores, sink], 1), 1)[:, :-1] @ value)
        return self.linear(torch.cat(rows, -1), f"{prefix}.o_proj")

    def experts(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        c = self.config
        scores = self.linear(x, f"{prefix}.router")
        gate_up, down = self.unpack(f"{prefix}.experts.gate_up_proj"), self.unpack(f"{prefix}.experts.down_proj")
        out = torch.zeros_like(x)
        for t in range(len(x)):
            best = scores[t].topk(c["num_experts_per_tok"])
            for e, weight in zip(best.indices.tolist(), torch.softmax(best.values, 0), strict=True):
                h = gate_up[e] @ x[t] + self.get(f"{prefix}.experts.gate_up_proj_bias")[e]
                gate, up = h[0::2].clamp(max=c["swiglu_limit"]), h[1::2].clamp(-c["swiglu_limit"], c["swiglu_limit"])
                a = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
                out[t] += weight * (down[e] @ a + self.get(f"{prefix}.experts.down_proj_bias")[e])
        return out

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, V] float64: at each position, for the token after it."""
        x = self.get("model.embed_tokens.weight")[tokens]
        for i, kind in enumerate(self.config["layer_types"]):
            prefix = f"model.layers.{i}"
            x = x + self.attention(self.norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attn", "sliding" in kind)
            x = x + self.experts(self.norm(x, f"{prefix}.post_attention_layernorm"), f"{prefix}.mlp")
        return self.norm(x, "model.norm") @ self.get("lm_head.weight").T

    def greedy(self, prompt: list[int], num: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]
