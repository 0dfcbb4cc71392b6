"""The engine's names for a decoder's tensors, their shapes, and what GGUF and Hugging Face files call them.

embed, head, final_norm
layers.N.{q,k,v,o,gate,up,down}
layers.N.{attn_norm,mlp_norm}            norms on the inputs of attention and MLP
layers.N.{post_attn_norm,post_mlp_norm}  norms on their outputs (Gemma)
layers.N.{q_norm,k_norm}                 per-head norms
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from footplate.engine.weights.model_config import ModelConfig

_GGUF_TOP = {"embed": "token_embd.weight", "head": "output.weight", "final_norm": "output_norm.weight"}
_GGUF_LAYER = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "post_attn_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
_HF_TOP = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "final_norm": "model.norm.weight"}
_HF_LAYER = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
# With post norms, `post_attention_layernorm` really stands after attention; without, it is the MLP's input
# norm.
_HF_PLAIN_NORMS = {"mlp_norm": "post_attention_layernorm"}
_HF_POST_NORMS = {
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def tensor_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor the model needs, by the engine's name. A tied head has none of its own."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "q": (q_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "attn_norm": (hidden,),
        "mlp_norm": (hidden,),
    }
    if config.post_norms:
        layer |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "final_norm": (hidden,)}
    if not config.tied_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return MappingProxyType(shapes)


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """The file's name for each of the engine's names, for GGUF files."""
    return {name: _file_name(name, _GGUF_TOP, _GGUF_LAYER, "blk") for name in tensor_shapes(config)}


def hf_names(config: ModelConfig) -> dict[str, str]:
    """The file's name for each of the engine's names, for Hugging Face folders."""
    layer = _HF_LAYER | (_HF_POST_NORMS if config.post_norms else _HF_PLAIN_NORMS)
    return {name: _file_name(name, _HF_TOP, layer, "model.layers") for name in tensor_shapes(config)}


def _file_name(name: str, top: Mapping[str, str], layer: Mapping[str, str], prefix: str) -> str:
    if name in top:
        return top[name]
    _, index, part = name.split(".")
    return f"{prefix}.{index}.{layer[part]}.weight"
