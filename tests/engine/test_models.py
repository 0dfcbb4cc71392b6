"""Real and synthetic models against plain formulas: windows, angles, untouched memory, types."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from footplate.engine.config import EngineConfig
from footplate.engine.errors import LoadError
from footplate.engine.layers.rope import cos_sin_table
from footplate.engine.loader import load_model
from footplate.engine.types import EngineRequest
from footplate.engine.weights.model_config import ModelConfig
from footplate.engine.weights.rope_config import RopeConfig
from footplate.engine.weights.weight_source import open_model
from tests.engine.answers import greedy, run, run_one
from tests.engine.conftest import GEMMA3, SMOLLM2, MakeEngine, golden_cases

CPU = torch.device("cpu")


# --- memory nobody wrote --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "dtype"),
    [(SMOLLM2, "float32"), (SMOLLM2, "auto"), (SMOLLM2, "bfloat16"), (GEMMA3, "float32"), (GEMMA3, "auto")],
)
def test_unwritten_slots_never_enter_an_answer(make_engine: MakeEngine, source: str, dtype: str) -> None:
    """The pool is full of NaN; lengths around a block's edge leave slots of the last block unwritten."""
    # FAULTS a63 and a80
    core = make_engine(source, dtype)
    requests = [
        EngineRequest(f"r{n}", [100 + i for i in range(n)], greedy(3, logprobs=5)) for n in (1, 15, 16, 17)
    ]
    answers = run(core, *requests)
    for request in requests:
        answer = answers[request.request_id, 0]
        assert len(answer.token_ids) == 3
        for entry in answer.logprobs:
            assert math.isfinite(entry.logprob) and all(math.isfinite(p) for _, p in entry.top)


def test_a_reused_block_shows_nothing_of_its_last_owner(make_engine: MakeEngine) -> None:
    core = make_engine(SMOLLM2, "auto", kv_cache_gib=2.5 * 16 * 23040 / 2**30, prefix_caching=False)
    assert core.stats().kv_blocks_total == 2
    fresh = run_one(core, [100, 101, 102], greedy(6, logprobs=1))
    run_one(core, list(range(200, 230)), greedy(2))  # fills every slot
    assert run_one(core, [100, 101, 102], greedy(6, logprobs=1)).logprobs == fresh.logprobs


# --- a dense reference ----------------------------------------------------------------------------------


class DenseGemma:
    """Gemma 3 over a whole sequence at once: no cache, no blocks, masks as matrices."""

    def __init__(self, loaded: Any) -> None:
        self.config: ModelConfig = loaded.model_config
        self.tensor = open_model(loaded.source)[1].tensor
        self.embed = self.tensor("embed")

    def logprobs(self, token_ids: list[int], positions: list[int]) -> torch.Tensor:
        """Log-probabilities of what follows each position, [P, V]."""
        config = self.config
        x = self.embed[token_ids] * config.embed_scale
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}."
            out = self.attention(prefix, layer, self.norm(x, prefix + "attn_norm"))
            x = x + self.norm(out, prefix + "post_attn_norm")
            h = self.norm(x, prefix + "mlp_norm")
            gate = functional.gelu(h @ self.tensor(prefix + "gate").T, approximate="tanh")
            out = (gate * (h @ self.tensor(prefix + "up").T)) @ self.tensor(prefix + "down").T
            x = x + self.norm(out, prefix + "post_mlp_norm")
        return (self.norm(x[positions], "final_norm") @ self.embed.T).log_softmax(dim=-1)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps) * self.tensor(name)

    def attention(self, prefix: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        config, count = self.config, len(x)

        def heads(name: str, number: int) -> torch.Tensor:
            return (x @ self.tensor(prefix + name).T).view(count, number, config.head_dim).transpose(0, 1)

        q = self.rotate(self.norm(heads("q", config.num_heads), prefix + "q_norm"), layer)
        k = self.rotate(self.norm(heads("k", config.num_kv_heads), prefix + "k_norm"), layer)
        group = config.num_heads // config.num_kv_heads
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * config.attention_scale
        distance = torch.arange(count)[:, None] - torch.arange(count)
        seen = distance >= 0
        if config.layer_windows[layer]:
            seen &= distance < config.layer_windows[layer]
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
        out = weights @ heads("v", config.num_kv_heads).repeat_interleave(group, 0)
        return out.transpose(0, 1).reshape(count, -1) @ self.tensor(prefix + "o").T

    def rotate(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        theta = 10_000.0 if self.config.layer_windows[layer] else 1_000_000.0  # Gemma 3's two bases
        half = self.config.head_dim // 2
        angles = torch.arange(x.shape[1]).double()[:, None] * theta ** (-torch.arange(half).double() / half)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def test_gemmas_sliding_window_agrees_with_a_dense_run(
    make_engine: MakeEngine, models: Callable[[str, str], Any]
) -> None:
    """Past the window of 512, prompt in chunks, then decoding: the same numbers as masks over the whole."""
    pool = [token for case in golden_cases("gemma3-270m") for token in case["prompt_ids"]]
    prompt = (pool * (610 // len(pool) + 1))[:610]
    loaded = models(GEMMA3, "float32")
    assert max(loaded.model_config.layer_windows) == 512
    core = make_engine(GEMMA3, max_num_batched_tokens=200)
    answer = run_one(core, prompt, greedy(3, logprobs=5))
    known = prompt + answer.token_ids
    with torch.inference_mode():
        wanted = DenseGemma(loaded).logprobs(known, [609, 610, 611])
    for row, entry in zip(wanted, answer.logprobs, strict=True):
        for token, logprob in [(entry.token_id, entry.logprob), *entry.top]:
            assert logprob == pytest.approx(float(row[token]), abs=2e-3)


# --- rotary angles --------------------------------------------------------------------------------------


def model_config(rope: RopeConfig, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        num_layers=1,
        hidden_size=head_dim,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=64,
        vocab_size=10,
        max_position=100_000,
        norm_eps=1e-5,
        rope=rope,
        layer_windows=(0,),
        tied_embeddings=True,
        activation="silu",
        attention_scale=1.0,
    )


def frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)


def llama3(theta: float, head_dim: int) -> torch.Tensor:
    """Llama 3.1's bands, as vectors: factor 8, low 1, high 4, trained on 8192 tokens."""
    plain = frequencies(theta, head_dim)
    turns = 8192 * plain / (2 * math.pi)
    smooth = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return smooth * plain + (1 - smooth) * plain / 8


def yarn(theta: float, head_dim: int) -> torch.Tensor:
    """YaRN with factor 4 over 4096 trained tokens, beta 32 and 1: blended between whole pair numbers."""
    plain = frequencies(theta, head_dim)

    def pair(turns: float) -> float:
        return head_dim * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(pair(32)), math.ceil(pair(1))
    stretched = ((torch.arange(head_dim // 2).double() - low) / (high - low)).clamp(0, 1)
    return plain / 4 * stretched + plain * (1 - stretched)


@pytest.mark.parametrize(
    ("rope", "formula", "warmth"),
    [
        (RopeConfig(theta=500.0), frequencies, 1.0),
        (RopeConfig(theta=500.0, kind="linear", factor=3.0), lambda t, d: frequencies(t, d) / 3, 1.0),
        (
            RopeConfig(
                theta=5e5,
                kind="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position=8192,
            ),
            llama3,
            1.0,
        ),
        (
            RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_position=4096, attention_factor=1.25),
            yarn,
            1.25,
        ),
    ],
)
def test_angle_tables_follow_their_formula(
    rope: RopeConfig, formula: Callable[[float, int], torch.Tensor], warmth: float
) -> None:
    """FAULTS a71."""
    for head_dim in (64, 128):
        table = cos_sin_table(model_config(rope, head_dim), 20_000, CPU, local=False)
        late = torch.tensor([0, 1, 77, 8191, 19_999])  # late positions too: float32 products lose turns
        angles = late.double()[:, None] * formula(rope.theta, head_dim)
        wanted = torch.cat((angles.cos(), angles.sin()), dim=1) * warmth
        torch.testing.assert_close(table[late], wanted.float(), atol=2e-6, rtol=0)


def test_local_layers_have_their_own_unscaled_base() -> None:
    rope = RopeConfig(theta=1e6, kind="linear", factor=8.0, local_theta=10_000.0)
    plain = cos_sin_table(model_config(RopeConfig(theta=10_000.0)), 50, CPU, local=False)
    assert torch.equal(cos_sin_table(model_config(rope), 50, CPU, local=True), plain)


# --- types and weights ----------------------------------------------------------------------------------


def test_float16_is_refused_for_gemma(models: Callable[[str, str], Any]) -> None:
    """FAULTS a73."""
    source = f"gguf:{models(GEMMA3, 'float32').source.path}"
    with pytest.raises(LoadError, match="float16 overflows"):
        load_model(source, EngineConfig(dtype="float16"))


def test_a_tied_head_is_the_embedding(models: Callable[[str, str], Any]) -> None:
    """FAULTS a67: SmolLM2's file has no output matrix: logits are products with the embedding's rows."""
    decoder = models(SMOLLM2, "float32").decoder
    hidden = torch.randn(2, decoder.config.hidden_size)
    normed = functional.rms_norm(
        hidden, hidden.shape[-1:], decoder._final_norm.float(), decoder.config.norm_eps
    )
    rows = decoder._embed(torch.arange(50, dtype=torch.int32))
    with torch.inference_mode():
        torch.testing.assert_close(decoder.logits(hidden)[:, :50], normed @ rows.T, atol=1e-3, rtol=1e-4)
