"""Small transformers models with random weights, one for each kind of attention."""

import torch
import transformers as hf

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
DECODER = TEXT | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
SEQUENCE = {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 3, "pad_token_id": 0, "eos_token_id": None}
WHISPER = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 20,
    "bos_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
# name -> (class, configuration, attentions called in one pass)
MODELS = {
    "llama": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**DECODER), 2),
    "gpt2": (
        hf.GPT2LMHeadModel,
        lambda: hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None),
        2,
    ),
    "mistral": (hf.MistralForCausalLM, lambda: hf.MistralConfig(**DECODER, sliding_window=7), 2),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        lambda: hf.Gemma2Config(**DECODER, sliding_window=7, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
        2,
    ),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        lambda: hf.Gemma3TextConfig(
            **DECODER, sliding_window=7, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
        ),
        2,
    ),
    "qwen3": (hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**DECODER), 2),
    "gpt_oss": (hf.GptOssForCausalLM, lambda: hf.GptOssConfig(**DECODER, **EXPERTS, sliding_window=7), 2),
    "bert": (hf.BertForMaskedLM, lambda: hf.BertConfig(**TEXT), 2),
    "t5": (
        hf.T5ForConditionalGeneration,
        lambda: hf.T5Config(**SEQUENCE, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        6,
    ),
    "whisper": (
        hf.WhisperForConditionalGeneration,
        lambda: hf.WhisperConfig(**SEQUENCE, **WHISPER, num_mel_bins=8, max_target_positions=64),
        6,
    ),
    "vit": (
        hf.ViTForImageClassification,
        lambda: hf.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
        ),
        2,
    ),
}
# Other layouts of the query and key weights
PLAIN = {name: value for name, value in DECODER.items() if name != "head_dim"}
LATENT = PLAIN | {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "v_head_dim": 5}
LATENT |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "experts_implementation": "eager", "moe_intermediate_size": 16}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ALIKE = {name: value for name, value in PLAIN.items() if name != "num_key_value_heads"}
LAYOUTS = {
    "olmo2": (hf.Olmo2ForCausalLM, lambda: hf.Olmo2Config(**PLAIN), 2),
    "phi3": (hf.Phi3ForCausalLM, lambda: hf.Phi3Config(**PLAIN), 2),
    "gpt_neox": (hf.GPTNeoXForCausalLM, lambda: hf.GPTNeoXConfig(**ALIKE), 2),
    "modernbert": (
        hf.ModernBertForMaskedLM,
        lambda: hf.ModernBertConfig(**ALIKE, global_attn_every_n_layers=1, cls_token_id=1, sep_token_id=2),
        2,
    ),
    "deepseek_v3": (hf.DeepseekV3ForCausalLM, lambda: hf.DeepseekV3Config(**LATENT), 2),
    "deepseek_v2": (hf.DeepseekV2ForCausalLM, lambda: hf.DeepseekV2Config(**LATENT | {"q_lora_rank": None}), 2),
}
DECODERS = ["llama", "gpt2", "mistral", "gemma2", "gemma3", "qwen3", "gpt_oss"]
EAGER_ONLY = ("gemma2", "gpt_oss")  # PyTorch's own attention has neither softcap nor sinks


def build(name, **changes):
    """A model with weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    kind, configuration, _ = MODELS[name]
    configuration = configuration()
    for key, value in changes.items():
        setattr(configuration, key, value)
    model = kind(configuration).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 0.5)
    return model


def padded(side, B=2, T=20):
    mask = torch.ones(B, T, dtype=torch.long)
    if side == "left":
        mask[1, :6] = 0
    if side == "right":
        mask[1, 13:] = 0
    return mask


def inputs_of(name, side=None):
    torch.manual_seed(1)
    tokens = torch.randint(3, 64, (2, 20))
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": tokens[:, :9]}
    given = {"input_ids": tokens} | ({} if side is None else {"attention_mask": padded(side)})
    return given | {"decoder_input_ids": tokens[:, :9]} if name == "t5" else given


def logits(model, implementation, given):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**given).logits
