"""Which Hugging Face families are in the corpus: `Config:Model`, built small by `hugging_face.Family`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from corpus.hugging_face import (
    VOCABULARY,
    Family,
    classes_of_text,
    images,
    labels_of_tokens,
    masked_text,
    noise,
    spans,
    tokens,
)

CAUSAL = """
AfmoeConfig:AfmoeForCausalLM ApertusConfig:ApertusForCausalLM ArceeConfig:ArceeForCausalLM
AriaTextConfig:AriaTextForCausalLM BartConfig:BartForCausalLM BeamConfig:BeamForCausalLM BertConfig:BertLMHeadModel
BertGenerationConfig:BertGenerationDecoder BigBirdConfig:BigBirdForCausalLM
BigBirdPegasusConfig:BigBirdPegasusForCausalLM BioGptConfig:BioGptForCausalLM BitNetConfig:BitNetForCausalLM
BlenderbotConfig:BlenderbotForCausalLM BlenderbotSmallConfig:BlenderbotSmallForCausalLM BloomConfig:BloomForCausalLM
CamembertConfig:CamembertForCausalLM CodeGenConfig:CodeGenForCausalLM CohereConfig:CohereForCausalLM
Cohere2Config:Cohere2ForCausalLM Cohere2MoeConfig:Cohere2MoeForCausalLM CpmAntConfig:CpmAntForCausalLM
CTRLConfig:CTRLLMHeadModel CwmConfig:CwmForCausalLM Data2VecTextConfig:Data2VecTextForCausalLM
DeepseekV4Config:DeepseekV4ForCausalLM DiffLlamaConfig:DiffLlamaForCausalLM DogeConfig:DogeForCausalLM
Dots1Config:Dots1ForCausalLM ElectraConfig:ElectraForCausalLM ErnieConfig:ErnieForCausalLM
Ernie4_5Config:Ernie4_5ForCausalLM Ernie4_5_MoeConfig:Ernie4_5_MoeForCausalLM Exaone4Config:Exaone4ForCausalLM
ExaoneMoeConfig:ExaoneMoeForCausalLM FalconConfig:FalconForCausalLM FalconH1Config:FalconH1ForCausalLM
FalconMambaConfig:FalconMambaForCausalLM FlexOlmoConfig:FlexOlmoForCausalLM FlintConfig:FlintForCausalLM
GemmaConfig:GemmaForCausalLM Gemma2Config:Gemma2ForCausalLM Gemma3TextConfig:Gemma3ForCausalLM
GlmConfig:GlmForCausalLM Glm4Config:Glm4ForCausalLM
Glm4MoeConfig:Glm4MoeForCausalLM GPT2Config:GPT2LMHeadModel GPTBigCodeConfig:GPTBigCodeForCausalLM
GPTNeoXConfig:GPTNeoXForCausalLM GPTNeoXJapaneseConfig:GPTNeoXJapaneseForCausalLM GptOssConfig:GptOssForCausalLM
GPTJConfig:GPTJForCausalLM GraniteConfig:GraniteForCausalLM GraniteSWAConfig:GraniteSWAForCausalLM
GraniteMoeConfig:GraniteMoeForCausalLM GraniteMoeSWAConfig:GraniteMoeSWAForCausalLM
GraniteMoeSharedConfig:GraniteMoeSharedForCausalLM HeliumConfig:HeliumForCausalLM HrmTextConfig:HrmTextForCausalLM
HunYuanDenseV1Config:HunYuanDenseV1ForCausalLM HunYuanMoEV1Config:HunYuanMoEV1ForCausalLM HYV3Config:HYV3ForCausalLM
HYV4Config:HYV4ForCausalLM HyperCLOVAXConfig:HyperCLOVAXForCausalLM InklingTextConfig:InklingForCausalLM
Jais2Config:Jais2ForCausalLM JetMoeConfig:JetMoeForCausalLM Kolibri1Config:Kolibri1ForCausalLM
LagunaConfig:LagunaForCausalLM Lfm2Config:Lfm2ForCausalLM LlamaConfig:LlamaForCausalLM
Llama4TextConfig:Llama4ForCausalLM MambaConfig:MambaForCausalLM MarianConfig:MarianForCausalLM
MBartConfig:MBartForCausalLM MegatronBertConfig:MegatronBertForCausalLM MellumConfig:MellumForCausalLM
MiMoV2FlashConfig:MiMoV2FlashForCausalLM MiniMaxConfig:MiniMaxForCausalLM MiniMaxM2Config:MiniMaxM2ForCausalLM
MiniMaxM3VLTextConfig:MiniMaxM3VLForCausalLM MinistralConfig:MinistralForCausalLM
Ministral3Config:Ministral3ForCausalLM MistralConfig:MistralForCausalLM MixtralConfig:MixtralForCausalLM
ModernBertDecoderConfig:ModernBertDecoderForCausalLM MoshiConfig:MoshiForCausalLM MptConfig:MptForCausalLM
MvpConfig:MvpForCausalLM NanoChatConfig:NanoChatForCausalLM NemotronConfig:NemotronForCausalLM
NemotronHConfig:NemotronHForCausalLM OlmoConfig:OlmoForCausalLM Olmo2Config:Olmo2ForCausalLM
Olmo3Config:Olmo3ForCausalLM OlmoHybridConfig:OlmoHybridForCausalLM OlmoeConfig:OlmoeForCausalLM
OpenAIGPTConfig:OpenAIGPTLMHeadModel OPTConfig:OPTForCausalLM PegasusConfig:PegasusForCausalLM
PersimmonConfig:PersimmonForCausalLM PhiConfig:PhiForCausalLM Phi3Config:Phi3ForCausalLM
PhimoeConfig:PhimoeForCausalLM PLBartConfig:PLBartForCausalLM ProphetNetConfig:ProphetNetForCausalLM
Qwen2Config:Qwen2ForCausalLM Qwen2MoeConfig:Qwen2MoeForCausalLM Qwen3Config:Qwen3ForCausalLM
Qwen3MoeConfig:Qwen3MoeForCausalLM RecurrentGemmaConfig:RecurrentGemmaForCausalLM RemBertConfig:RemBertForCausalLM
RobertaConfig:RobertaForCausalLM RobertaPreLayerNormConfig:RobertaPreLayerNormForCausalLM
RoFormerConfig:RoFormerForCausalLM RwkvConfig:RwkvForCausalLM SeedOssConfig:SeedOssForCausalLM
SmolLM3Config:SmolLM3ForCausalLM SolarOpenConfig:SolarOpenForCausalLM StableLmConfig:StableLmForCausalLM
Starcoder2Config:Starcoder2ForCausalLM TrOCRConfig:TrOCRForCausalLM VaultGemmaConfig:VaultGemmaForCausalLM
WhisperConfig:WhisperForCausalLM XGLMConfig:XGLMForCausalLM XLMConfig:XLMWithLMHeadModel
XLMRobertaConfig:XLMRobertaForCausalLM XLMRobertaXLConfig:XLMRobertaXLForCausalLM XLNetConfig:XLNetLMHeadModel
""".split()

MASKED = """
BertConfig:BertForMaskedLM BigBirdConfig:BigBirdForMaskedLM CamembertConfig:CamembertForMaskedLM
Data2VecTextConfig:Data2VecTextForMaskedLM ElectraConfig:ElectraForMaskedLM ErnieConfig:ErnieForMaskedLM
MegatronBertConfig:MegatronBertForMaskedLM RemBertConfig:RemBertForMaskedLM RobertaConfig:RobertaForMaskedLM
RobertaPreLayerNormConfig:RobertaPreLayerNormForMaskedLM RoFormerConfig:RoFormerForMaskedLM
XLMConfig:XLMWithLMHeadModel XLMRobertaConfig:XLMRobertaForMaskedLM XLMRobertaXLConfig:XLMRobertaXLForMaskedLM
AlbertConfig:AlbertForMaskedLM ConvBertConfig:ConvBertForMaskedLM DebertaConfig:DebertaForMaskedLM
DebertaV2Config:DebertaV2ForMaskedLM DistilBertConfig:DistilBertForMaskedLM EsmConfig:EsmForMaskedLM
EuroBertConfig:EuroBertForMaskedLM FlaubertConfig:FlaubertWithLMHeadModel FNetConfig:FNetForMaskedLM
GteConfig:GteForMaskedLM IBertConfig:IBertForMaskedLM JinaEmbeddingsV3Config:JinaEmbeddingsV3ForMaskedLM
LayoutLMConfig:LayoutLMForMaskedLM LongformerConfig:LongformerForMaskedLM MobileBertConfig:MobileBertForMaskedLM
ModernBertConfig:ModernBertForMaskedLM MPNetConfig:MPNetForMaskedLM MraConfig:MraForMaskedLM
NomicBertConfig:NomicBertForMaskedLM NystromformerConfig:NystromformerForMaskedLM
SqueezeBertConfig:SqueezeBertForMaskedLM TapasConfig:TapasForMaskedLM UltrabertConfig:UltrabertForMaskedLM
YosoConfig:YosoForMaskedLM
""".split()

SEQUENCE_TO_SEQUENCE = """
BartConfig:BartForConditionalGeneration BigBirdPegasusConfig:BigBirdPegasusForConditionalGeneration
BlenderbotConfig:BlenderbotForConditionalGeneration BlenderbotSmallConfig:BlenderbotSmallForConditionalGeneration
MarianConfig:MarianMTModel MBartConfig:MBartForConditionalGeneration MvpConfig:MvpForConditionalGeneration
PegasusConfig:PegasusForConditionalGeneration PLBartConfig:PLBartForConditionalGeneration
ProphetNetConfig:ProphetNetForConditionalGeneration FSMTConfig:FSMTForConditionalGeneration
LEDConfig:LEDForConditionalGeneration M2M100Config:M2M100ForConditionalGeneration
MT5Config:MT5ForConditionalGeneration
""".split()

IMAGES: dict[str, Family] = {
    "vit": Family("ViTConfig", "ViTForImageClassification", images, {"image_size": 16, "patch_size": 8}),
    "vit_msn": Family("ViTMSNConfig", "ViTMSNForImageClassification", images, {"image_size": 16, "patch_size": 8}),
    "deit": Family("DeiTConfig", "DeiTForImageClassification", images, {"image_size": 16, "patch_size": 8}),
    "beit": Family("BeitConfig", "BeitForImageClassification", images, {"image_size": 16, "patch_size": 8}),
    "dinov2": Family("Dinov2Config", "Dinov2ForImageClassification", images, {"image_size": 16, "patch_size": 8}),
    "resnet": Family(
        "ResNetConfig",
        "ResNetForImageClassification",
        images,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    "regnet": Family(
        "RegNetConfig",
        "RegNetForImageClassification",
        images,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    ),
    "convnext": Family(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        images,
        {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
    "convnextv2": Family(
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        images,
        {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
    "swin": Family(
        "SwinConfig",
        "SwinForImageClassification",
        images,
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    ),
    "swinv2": Family(
        "Swinv2Config",
        "Swinv2ForImageClassification",
        images,
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    ),
    "segformer": Family(
        "SegformerConfig",
        "SegformerForImageClassification",
        images,
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "pvt": Family(
        "PvtConfig",
        "PvtForImageClassification",
        images,
        {
            "image_size": 16,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sequence_reduction_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [4, 2],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "mobilenet_v2": Family(
        "MobileNetV2Config", "MobileNetV2ForImageClassification", images, {"depth_multiplier": 0.25}
    ),
    "poolformer": Family(
        "PoolFormerConfig",
        "PoolFormerForImageClassification",
        images,
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]},
    ),
}


def segments(i: int, model: Any) -> dict[str, Tensor]:
    """Images with a class for each pixel."""
    return {"pixel_values": noise(i, 2, 3, 32, 32), "labels": (noise(i, 2, 32, 32) > 0).long()}


def speech(i: int, model: Any) -> dict[str, Tensor]:
    """Waves and what is said in them."""
    return {"input_values": noise(i, 2, 600), "labels": tokens(i, 4)}


WAVES = {
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}


def _mel(i: int, model: Any) -> dict[str, Tensor]:
    return {"input_features": noise(i, 2, model.config.num_mel_bins, 40), "labels": tokens(i, 5)}


def _pairs(i: int, model: Any) -> dict[str, Any]:
    size = model.config.vision_config.image_size
    return {"input_ids": tokens(i), "pixel_values": noise(i, 2, 3, size, size), "return_loss": True}


def _clip() -> dict[str, Any]:
    shared = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "projection_dim": 16,
        "text_config": {**shared, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2},
        "vision_config": {**shared, "image_size": 16, "patch_size": 8},
    }


START = {"decoder_start_token_id": 0}


def with_eager_experts(model: Any) -> Any:
    """A Python loop over the experts that some token was sent to."""
    model.set_experts_implementation("eager")
    return model


OTHERS: dict[str, Family] = {
    "t5": Family("T5Config", "T5ForConditionalGeneration", changes=START),
    "mt5": Family("MT5Config", "MT5ForConditionalGeneration"),
    "umt5": Family("UMT5Config", "UMT5ForConditionalGeneration"),
    "switch_transformers": Family(
        "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", changes=START
    ),
    "led": Family("LEDConfig", "LEDForConditionalGeneration"),
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        _mel,
        {"max_source_positions": 20, "max_target_positions": 20, "num_mel_bins": 8},
    ),
    "clip": Family("CLIPConfig", "CLIPModel", _pairs, _clip()),
    "segformer_segmentation": Family(
        "SegformerConfig", "SegformerForSemanticSegmentation", segments, IMAGES["segformer"].changes
    ),
    "mixtral_with_router_loss": Family(
        "MixtralConfig", "MixtralForCausalLM", changes={"output_router_logits": True, "router_aux_loss_coef": 0.02}
    ),
    "qwen3_moe_with_router_loss": Family(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", changes={"output_router_logits": True, "router_aux_loss_coef": 0.02}
    ),
    "mixtral_with_eager_experts": Family("MixtralConfig", "MixtralForCausalLM", prepare=with_eager_experts),
    "qwen3_moe_with_eager_experts": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", prepare=with_eager_experts),
    "m2m_100_without_layer_drop": Family(
        "M2M100Config",
        "M2M100ForConditionalGeneration",
        changes={"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    ),
    "bert_classes": Family("BertConfig", "BertForSequenceClassification", classes_of_text),
    "bert_spans": Family("BertConfig", "BertForQuestionAnswering", spans),
    "bert_tokens": Family("BertConfig", "BertForTokenClassification", labels_of_tokens),
    "roberta_classes": Family("RobertaConfig", "RobertaForSequenceClassification", classes_of_text),
    "llama_classes": Family("LlamaConfig", "LlamaForSequenceClassification", classes_of_text),
    "gpt2_tokens": Family("GPT2Config", "GPT2ForTokenClassification", labels_of_tokens),
    "distilbert_spans": Family("DistilBertConfig", "DistilBertForQuestionAnswering", spans),
    "llama_padded": Family("LlamaConfig", "LlamaForCausalLM", masked_text),
    "gpt2_padded": Family("GPT2Config", "GPT2LMHeadModel", masked_text),
    "bert_padded": Family("BertConfig", "BertForMaskedLM", masked_text),
    "t5_padded": Family("T5Config", "T5ForConditionalGeneration", masked_text, START),
    "llama_bfloat16": Family("LlamaConfig", "LlamaForCausalLM", prepare=lambda model: model.to(torch.bfloat16)),
    "wav2vec2": Family("Wav2Vec2Config", "Wav2Vec2ForCTC", speech, WAVES),
    "hubert": Family("HubertConfig", "HubertForCTC", speech, WAVES),
    "wavlm": Family("WavLMConfig", "WavLMForCTC", speech, WAVES),
    "wav2vec2_with_masks": Family("Wav2Vec2Config", "Wav2Vec2ForCTC", speech, {**WAVES, "mask_time_prob": 0.2}),
}
