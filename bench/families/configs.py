"""Tiny configurations by family: the data of `python -m bench.families`.

    Each has every kind of layer of its family, and thresholds (windows, chunks,
        top-k) below the measured rows' 95 tokens. To add a
family, add a line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_V = 256
_S: dict[str, Any] = {
    "vocab_size": _V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_NO_HEAD_DIM = {key: value for key, value in _S.items() if key != "head_dim"}
_WINDOW = {**_S, "sliding_window": 24}
_MIXED = {**_WINDOW, "num_hidden_layers": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}  # fmt: skip
_DEEPSEEK = {**_NO_HEAD_DIM, **_ROUTED, **_LATENT}
_INDEX = {"index_topk": 20, "index_n_heads": 2, "index_head_dim": 16}
_LINEAR = {
    "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
_SCALED = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
}  # fmt: skip
_GEMMA = {**_WINDOW, "num_hidden_layers": 6, "query_pre_attn_scalar": 16}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": _V}
_GPT2 = {
    "vocab_size": _V, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OLD = {"vocab_size": _V, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """A configuration, by transformers' `model_type`."""

    model_type: str
    sizes: dict[str, Any] = field(default_factory=lambda: _S)
    max_model_len: int | None = None
    """`[model] max_model_len`, for positions that depend on it."""


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {**_S, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


FAMILIES: dict[str, Family] = {
    # Dense.
    "llama": Family("llama"),
    "llama3-rope": Family("llama", _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32)),
    "llama-dynamic-ntk": Family("llama", _rope("dynamic", factor=4.0), max_model_len=256),
    "mistral": Family("mistral", _S | {"sliding_window": None}),
    "mistral-window": Family("mistral", _WINDOW),
    "ministral": Family("ministral", _WINDOW),
    "ministral3": Family("ministral3", _S),
    "qwen2": Family("qwen2"),
    "qwen2-window": Family("qwen2", _WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": Family("qwen3"),
    "qwen3-tied": Family("qwen3", _S | {"tie_word_embeddings": True}),
    "qwen3-yarn": Family("qwen3", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "gemma2": Family("gemma2", _MIXED | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 40.0}),
    "gemma3_text": Family("gemma3_text", _GEMMA),
    "gemma3n_text": Family("gemma3n_text", _WINDOW | _PER_LAYER | {"num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "laurel_rank": 8, "layer_types": ["sliding_attention", "full_attention"] * 3}),
    "gemma4_text": Family("gemma4_text", _WINDOW | _PER_LAYER | {"num_hidden_layers": 6, "global_head_dim": 16}),
    "vaultgemma": Family("vaultgemma", _MIXED | {"query_pre_attn_scalar": 16}),
    "phi": Family("phi"),
    "phi3": Family("phi3", _WINDOW),
    "phi3-longrope": Family("phi3", _S | {"original_max_position_embeddings": 32, "rope_parameters": _LONGROPE},
        max_model_len=256),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", _MIXED),
    "granite": Family("granite", _S | _SCALED),
    "granite_swa": Family("granite_swa", _WINDOW),
    "cohere": Family("cohere", _S | {"logit_scale": 0.25}),
    "cohere2": Family("cohere2", _MIXED | {"logit_scale": 0.25}),
    "starcoder2": Family("starcoder2", _WINDOW),
    "exaone4": Family("exaone4", _MIXED | {"sliding_window_pattern": 4}),
    "smollm3": Family("smollm3", _WINDOW | {"use_sliding_window": True}),
    "glm4": Family("glm4"),
    "cwm": Family("cwm", _MIXED),
    "seed_oss": Family("seed_oss"),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense"),
    "nemotron": Family("nemotron"),
    "stablelm": Family("stablelm"),
    "persimmon": Family("persimmon"),
    "arcee": Family("arcee"),
    "apertus": Family("apertus"),
    "internlm3": Family("internlm3"),
    "nanochat": Family("nanochat"),
    "diffllama": Family("diffllama"),
    "minicpm3": Family("minicpm3", _NO_HEAD_DIM | _LATENT),
    "youtu": Family("youtu", _NO_HEAD_DIM | _LATENT),
    "modernbert-decoder": Family("modernbert-decoder", _S | {"local_attention": 24}),
    "gpt2": Family("gpt2", _GPT2),
    "gpt2-inverse-layer-scale": Family("gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-reorder-upcast": Family("gpt2", _GPT2 | {"reorder_and_upcast_attn": True}),
    "gpt_bigcode": Family("gpt_bigcode", _GPT2),
    "gpt_neo": Family("gpt_neo", {"vocab_size": _V, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
        "window_size": 24, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 256,
        "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neox": Family("gpt_neox"),
    "gptj": Family("gptj", _GPT2 | {"rotary_dim": 8}),
    "opt": Family("opt", _OLD | {"ffn_dim": 96, "max_position_embeddings": 256, "word_embed_proj_dim": 64}),
    "xglm": Family("xglm", {"vocab_size": _V, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96,
        "max_position_embeddings": 256}),
    "bloom": Family("bloom", {"vocab_size": _V, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "mpt": Family("mpt", {"vocab_size": _V, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}),
    "falcon": Family("falcon", _OLD | {"alibi": False}),
    "falcon-alibi": Family("falcon", _OLD | {"alibi": True}),
    # Mixtures of experts.
    "qwen2_moe": Family("qwen2_moe", _S | _EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1}),
    "qwen2_moe-window": Family("qwen2_moe", _WINDOW | _EXPERTS | {"shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3_moe": Family("qwen3_moe", _S | _EXPERTS | {"decoder_sparse_step": 1, "norm_topk_prob": True}),
    "mixtral": Family("mixtral", _WINDOW | _LOCAL),
    "deepseek_v2": Family("deepseek_v2", _DEEPSEEK),
    "deepseek_v3": Family("deepseek_v3", _DEEPSEEK),
    "kimi": Family("deepseek_v3", _DEEPSEEK | {"q_lora_rank": None}),
    "glm4_moe": Family("glm4_moe", _S | _ROUTED),
    "glm4_moe_lite": Family("glm4_moe_lite", _DEEPSEEK | {"n_group": 1}),
    "gpt_oss": Family("gpt_oss", _MIXED | _LOCAL | {"intermediate_size": 32}),
    "minimax_m2": Family("minimax_m2", _S | _LOCAL),
    "granitemoe": Family("granitemoe", _S | _SCALED | _LOCAL),
    "phimoe": Family("phimoe", _WINDOW | _LOCAL),
    "olmoe": Family("olmoe", _S | _EXPERTS),
    "ernie4_5_moe": Family("ernie4_5_moe", _S | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "dots1": Family("dots1", _WINDOW | _ROUTED | {"n_group": 1}),
    "exaone_moe": Family("exaone_moe", _MIXED | _EXPERTS),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", _S | {"num_experts": 4, "moe_topk": 2}),
    "mimo_v2_flash": Family("mimo_v2_flash", _MIXED | {"n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32}),
    "cohere2_moe": Family("cohere2_moe", _MIXED),
    "afmoe": Family("afmoe", _MIXED | _EXPERTS | {"num_dense_layers": 1}),
    "solar_open": Family("solar_open", _S | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "mellum": Family("mellum", _WINDOW),
    "laguna": Family("laguna", _WINDOW | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "hy_v3": Family("hy_v3", _S | _EXPERTS),
    "longcat_flash": Family("longcat_flash", _NO_HEAD_DIM | _LATENT | {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 2,
        "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "head_dim": 8}),
    "dbrx": Family("dbrx", {"vocab_size": _V, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}),
    "llama4_text": Family("llama4_text", _S | {"num_hidden_layers": 4, "attention_chunk_size": 24,
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0]}),
    # Sparse and linear attention, and hybrids.
    "deepseek_v32": Family("deepseek_v32", _DEEPSEEK | _INDEX),
    "deepseek_v4": Family("deepseek_v4", _WINDOW | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 16}),
    "glm_moe_dsa": Family("glm_moe_dsa", _DEEPSEEK | _INDEX | {"n_group": 1}),
    "doge": Family("doge", _WINDOW),
    "qwen3_next": Family("qwen3_next", _S | _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_5_text": Family("qwen3_5_text", _S | _LINEAR),
    "kimi_linear": Family("kimi_linear", _NO_HEAD_DIM | {"num_experts": 4, "num_experts_per_token": 2,
        "moe_intermediate_size": 32, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 24, "linear_num_heads": 2, "linear_head_dim": 16}),
    "lfm2": Family("lfm2", _S | {"layer_types": ["conv", "full_attention"]}),
    "minimax": Family("minimax", _S | _LOCAL),
    "jamba": Family("jamba"),
    "bamba": Family("bamba"),
    "falcon_h1": Family("falcon_h1"),
    "zamba2": Family("zamba2"),
    # Models that also see, trained on text.
    "gemma3": Family("gemma3", {"text_config": _GEMMA, "vision_config": _TOWER, "mm_tokens_per_image": 4,
        "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252}),
    "gemma4": Family("gemma4", {"text_config": _WINDOW | _PER_LAYER | {"num_hidden_layers": 6, "global_head_dim": 16},
        "vision_config": _TOWER | {"num_key_value_heads": 2}, "audio_config": None}),
    "mistral3": Family("mistral3", {"text_config": _S | {"model_type": "mistral"},
        "vision_config": _TOWER | {"model_type": "pixtral"}, "image_token_index": 250}),
}  # fmt: skip
