"""What one step must move and compute, counted from a model's shape, and the time that takes at
least on hardware whose ceilings are known (the roofline, Williams et al., CACM 52(4), 2009).

A count is what no implementation of the exact dense model can avoid, in the dtypes given: every
weight touched is read once, KV is read and written once, each causal pair is scored once.
Activations are not counted. Memory and arithmetic may overlap perfectly, so a limit is the larger
of the two times; it is a lower bound, not a forecast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.config.model import GQAConfig, MLAConfig, ModelConfig


@dataclass(frozen=True)
class Hardware:
    """Measured ceilings of one device, or of `ranks` of them together after `times`.

    copy: TB/s of a big device-to-device copy, reads and writes both counted.
    matmul: TFLOP/s of a big matrix product in the compute dtype.
    attention: TFLOP/s of the best attention kernel known there, causal pairs only.
    """

    name: str
    copy: float
    matmul: float
    attention: float

    def times(self, ranks: int) -> Hardware:
        """`ranks` such devices with free communication."""
        return replace(
            self,
            copy=self.copy * ranks,
            matmul=self.matmul * ranks,
            attention=self.attention * ranks,
        )


#: BF16: copy of 1 GiB, matmul of 8192 cubed, and what FlashAttention-3 reaches at 64/8 heads
H200 = Hardware("NVIDIA H200", copy=4.25, matmul=686.0, attention=660.0)


@dataclass(frozen=True)
class Bytes:
    """Bytes of one number: in projections and experts, in embedding and head, in the KV cache."""

    weight: float = 2.0
    head: float = 2.0
    kv: float = 2.0

    @staticmethod
    def of(dtype: str, kv_dtype: str) -> Bytes:
        """From names such as "bfloat16"."""
        size = {"float64": 8.0, "float32": 4.0}
        weight = size.get(dtype, 2.0)
        return Bytes(weight, weight, size.get(kv_dtype, 2.0))


@dataclass(frozen=True)
class Work:
    """One step. Bytes moved and floating-point operations (a multiply-add is two).

    experts: distinct routed experts read in each MoE layer, on average; 0 for dense models.
    """

    weight_bytes: float
    kv_bytes: float
    gemm_flops: float
    attention_flops: float
    experts: float = 0.0

    def memory_seconds(self, hardware: Hardware) -> float:
        """Time to move all bytes at the copy ceiling."""
        return (self.weight_bytes + self.kv_bytes) / (hardware.copy * 1e12)

    def compute_seconds(self, hardware: Hardware) -> float:
        """Time of all arithmetic at its ceilings."""
        gemm = self.gemm_flops / (hardware.matmul * 1e12)
        return gemm + self.attention_flops / (hardware.attention * 1e12)

    def limit(self, hardware: Hardware) -> float:
        """Seconds that no implementation can go below."""
        return max(self.memory_seconds(hardware), self.compute_seconds(hardware))


@dataclass(frozen=True)
class Parameters:
    """Numbers in a model's weight matrices, summed over layers. Norms and biases are left out.

    always: read for any token (attention, dense MLPs, shared experts, routers).
    expert: one routed expert. moe_layers: layers that have them.
    head: the output head, also when it is tied.
    """

    always: int
    expert: int
    moe_layers: int
    head: int

    @staticmethod
    def of(model: ModelConfig) -> Parameters:
        """Count from the shape."""
        hidden, moe = model.hidden_size, model.moe
        routed = sum(model.moe_layers) if moe is not None else 0
        always = model.num_layers * _attention_parameters(model)
        always += (model.num_layers - routed) * 3 * hidden * model.intermediate_size
        expert = 0
        if moe is not None:
            expert = 3 * hidden * moe.intermediate
            each = 3 * hidden * moe.shared_intermediate + hidden * moe.num_experts
            always += routed * each
        return Parameters(always, expert, routed, model.vocab_size * hidden)

    def active(self, top_k: int) -> int:
        """Numbers that one token multiplies with, the head apart."""
        return self.always + self.moe_layers * top_k * self.expert


def expected_experts(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens reach when each picks `top_k` of `experts` uniformly
    and independently: `E (1 - (1 - k / E)^T)` (linearity of expectation over experts)."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def prefill(model: ModelConfig, prompt: int, sizes: Bytes, experts: float | None = None) -> Work:
    """Work of computing `prompt` tokens with nothing cached and sampling one token.

    Attention counts the causal pairs, `n (n + 1) / 2`. MLA is counted un-absorbed: latents go up
    to keys and values once, a pair costs `2 H (nope + rope + v)` (DeepSeek-V2, arXiv 2405.04434,
    2.1). The head runs for the last token only.

    Args:
        experts: distinct experts of each MoE layer where they were counted; expected ones if None.
    """
    pairs = prompt * (prompt + 1) / 2
    flops = model.num_layers * pairs * _pair_flops(model, absorbed=False)
    kv = model.num_layers * prompt * _kv_numbers(model) * sizes.kv
    return _work(model, prompt, 1, flops, kv, sizes, experts)


def decode(
    model: ModelConfig, batch: int, context: float, sizes: Bytes, experts: float | None = None
) -> Work:
    """Work of one step that gives each of `batch` sequences, `context` tokens long, one more.

    MLA is counted absorbed: a pair costs `2 H (rank + rope + rank)`, and the latents are read
    once for all heads (DeepSeek-V2, 2.1.2); the query and output sides of the absorption cost as
    many multiplications as the up-projection has weights.
    """
    flops = model.num_layers * batch * (context + 1) * _pair_flops(model, absorbed=True)
    kv = model.num_layers * batch * (context + 1) * _kv_numbers(model) * sizes.kv
    return _work(model, batch, batch, flops, kv, sizes, experts)


def _work(
    model: ModelConfig,
    tokens: int,
    sampled: int,
    attention_flops: float,
    kv_bytes: float,
    sizes: Bytes,
    experts: float | None,
) -> Work:
    """The step of `tokens` tokens of which `sampled` go through the head."""
    counted, moe = Parameters.of(model), model.moe
    if moe is None:
        experts, top_k = 0.0, 0
    else:
        top_k = moe.top_k
        if experts is None:
            experts = expected_experts(moe.num_experts, top_k, tokens)
    weights = counted.always + counted.moe_layers * experts * counted.expert
    head = counted.head + tokens * model.hidden_size  # and the rows of the embedding
    return Work(
        weight_bytes=weights * sizes.weight + head * sizes.head,
        kv_bytes=kv_bytes,
        gemm_flops=2.0 * (tokens * counted.active(top_k) + sampled * counted.head),
        attention_flops=attention_flops,
        experts=experts,
    )


def _attention_parameters(model: ModelConfig) -> int:
    """Weights of one layer's projections."""
    hidden, spec = model.hidden_size, model.attention
    if isinstance(spec, GQAConfig):
        return hidden * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    query = spec.num_heads * (spec.nope_dim + spec.rope_dim)
    down = hidden * query
    if spec.q_lora_rank is not None:
        down = spec.q_lora_rank * (hidden + query)
    up = spec.kv_lora_rank * spec.num_heads * (spec.nope_dim + spec.v_dim)
    out = spec.num_heads * spec.v_dim * hidden
    return down + hidden * (spec.kv_lora_rank + spec.rope_dim) + up + out


def _pair_flops(model: ModelConfig, *, absorbed: bool) -> float:
    """Operations of all heads of one layer for one (query, key) pair: scores and values."""
    spec = model.attention
    if isinstance(spec, MLAConfig):
        if absorbed:
            return 2.0 * spec.num_heads * (2 * spec.kv_lora_rank + spec.rope_dim)
        return 2.0 * spec.num_heads * (spec.nope_dim + spec.rope_dim + spec.v_dim)
    return 4.0 * spec.num_heads * spec.head_dim


def _kv_numbers(model: ModelConfig) -> int:
    """Numbers that one token keeps in one layer."""
    spec = model.attention
    if isinstance(spec, MLAConfig):
        return spec.kv_lora_rank + spec.rope_dim
    return 2 * spec.num_kv_heads * spec.head_dim
