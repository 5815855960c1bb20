"""Families by the names of architectures in config.json: another family is another line. A family's module is
imported when a model of it is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.model.family import Family

#: Architectures that write text -> module and class, in the package penstock.
FAMILIES = {
    "ApertusForCausalLM": "model.families.dense.apertus:Apertus",
    "ArceeForCausalLM": "model.families.dense.llama_relatives:Arcee",
    "BailingHybridForCausalLM": "model.families.hybrid.ling:Ling3",
    "BambaForCausalLM": "model.families.hybrid.mamba:Bamba",
    "BartForConditionalGeneration": "model.families.bart:BART",
    "BioGptForCausalLM": "model.families.gpt.xglm:BioGPT",
    "BloomForCausalLM": "model.families.gpt.bloom:Bloom",
    "CTRLLMHeadModel": "model.families.gpt.ctrl:CTRL",
    "CodeGenForCausalLM": "model.families.gpt.gptj:CodeGen",
    "Cohere2ForCausalLM": "model.families.dense.cohere:Cohere2",
    "CohereForCausalLM": "model.families.dense.cohere:Cohere",
    "CpmAntForCausalLM": "cpm.ant:CPMAnt",
    "CwmForCausalLM": "model.families.dense.llama_relatives:Cwm",
    "DeepseekV2ForCausalLM": "model.families.deepseek:DeepseekV2",
    "DeepseekV3ForCausalLM": "model.families.deepseek:DeepseekV3",
    "DeepseekV32ForCausalLM": "model.families.deepseek:DeepseekV32",
    "DeepseekV4ForCausalLM": "model.families.deepseek_v4:DeepseekV4",
    "Dots1ForCausalLM": "model.families.sigmoid_mixtures:Dots1",
    "EVAModel": "cpm.eva:EVA",
    "Ernie4_5ForCausalLM": "model.families.dense.llama_relatives:Ernie45",
    "Ernie4_5_ForCausalLM": "model.families.dense.llama_relatives:Ernie45",
    "Ernie4_5_MoeForCausalLM": "model.families.mixture_relatives:Ernie45Moe",
    "Exaone4ForCausalLM": "model.families.dense.llama_relatives:Exaone4",
    "FalconForCausalLM": "model.families.gpt.falcon:Falcon",
    "FalconH1ForCausalLM": "model.families.hybrid.mamba:FalconH1",
    "GPT2LMHeadModel": "model.families.gpt.gpt2:GPT2",
    "GPTBigCodeForCausalLM": "model.families.gpt.gpt2:GPTBigCode",
    "GPTJForCausalLM": "model.families.gpt.gptj:GPTJ",
    "GPTNeoForCausalLM": "model.families.gpt.gpt_neo:GPTNeo",
    "GPTNeoXForCausalLM": "model.families.gpt.gpt_neox:GPTNeoX",
    "GPTNeoXJapaneseForCausalLM": "model.families.gpt.gpt_neox:GPTNeoXJapanese",
    "Gemma2ForCausalLM": "model.families.gemma.gemma:Gemma2",
    "Gemma3ForCausalLM": "model.families.gemma.gemma:Gemma3",
    "Gemma3nForCausalLM": "model.families.gemma.gemma3n:Gemma3n",
    "Gemma4ForCausalLM": "model.families.gemma.gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "model.families.gemma.gemma4:Gemma4Unified",
    "GemmaForCausalLM": "model.families.gemma.gemma:Gemma",
    "Glm4ForCausalLM": "model.families.dense.glm:Glm4",
    "Glm4MoeForCausalLM": "model.families.sigmoid_mixtures:Glm4Moe",
    "GlmMoeDsaForCausalLM": "model.families.deepseek:GlmMoeDsa",
    "GlmForCausalLM": "model.families.dense.glm:Glm",
    "GptOssForCausalLM": "model.families.gpt_oss:GptOss",
    "GraniteForCausalLM": "model.families.dense.llama_relatives:Granite",
    "GraniteMoeForCausalLM": "model.families.mixture_relatives:GraniteMoe",
    "GraniteMoeHybridForCausalLM": "model.families.hybrid.mamba:GraniteHybrid",
    "HYV3ForCausalLM": "model.families.sigmoid_mixtures:HYV3",
    "HeliumForCausalLM": "model.families.dense.llama_relatives:Helium",
    "HunYuanDenseV1ForCausalLM": "model.families.dense.llama_relatives:HunYuanDense",
    "HunYuanMoEV1ForCausalLM": "model.families.mixture_relatives:HunYuanMoe",
    "InternLM3ForCausalLM": "model.families.dense.llama_relatives:InternLM3",
    "Jais2ForCausalLM": "model.families.gpt.starcoder2:Jais2",
    "KimiLinearForCausalLM": "model.families.hybrid.kimi:KimiLinear",
    "LagunaForCausalLM": "model.families.laguna:Laguna",
    "Lfm2ForCausalLM": "model.families.hybrid.lfm2:LFM2",
    "Lfm2MoeForCausalLM": "model.families.hybrid.lfm2:LFM2Moe",
    "Llama4ForCausalLM": "model.families.llama4:Llama4",
    "LlamaForCausalLM": "model.families.llama:Llama",
    "MPTForCausalLM": "model.families.gpt.mpt:MPT",
    "MT5ForConditionalGeneration": "model.families.t5:MT5",
    "MiniCPM3ForCausalLM": "model.families.minicpm:MiniCPM3",
    "MiniCPMForCausalLM": "model.families.minicpm:MiniCPM",
    "MiniMaxM2ForCausalLM": "model.families.sigmoid_mixtures:MiniMaxM2",
    "Ministral3ForCausalLM": "model.families.dense.llama_relatives:Ministral3",
    "MinistralForCausalLM": "model.families.dense.llama_relatives:Ministral",
    "Mistral4ForCausalLM": "model.families.deepseek:Mistral4",
    "MistralForCausalLM": "model.families.llama:Mistral",
    "MixtralForCausalLM": "model.families.mixtures:Mixtral",
    "MptForCausalLM": "model.families.gpt.mpt:MPT",
    "MuseGlimmerForCausalLM": "model.families.gemma.muse_glimmer:MuseGlimmer",
    "NemotronForCausalLM": "model.families.gpt.starcoder2:Nemotron",
    "NemotronHForCausalLM": "model.families.hybrid.nemotron_h:NemotronH",
    "OPTForCausalLM": "model.families.gpt.opt:OPT",
    "Olmo2ForCausalLM": "model.families.dense.olmo:Olmo2",
    "Olmo3ForCausalLM": "model.families.dense.olmo:Olmo3",
    "OlmoForCausalLM": "model.families.dense.olmo:Olmo",
    "OlmoHybridForCausalLM": "model.families.hybrid.olmo:OlmoHybrid",
    "OlmoeForCausalLM": "model.families.mixtures:OLMoE",
    "OpenAIGPTLMHeadModel": "model.families.gpt.gpt2:OpenAIGPT",
    "PersimmonForCausalLM": "model.families.gpt.phi:Persimmon",
    "Phi3ForCausalLM": "model.families.dense.phi3:Phi3",
    "PhiForCausalLM": "model.families.gpt.phi:Phi",
    "PhiMoEForCausalLM": "model.families.mixtures:PhiMoe",
    "PhimoeForCausalLM": "model.families.mixtures:PhiMoe",
    "Qwen2ForCausalLM": "model.families.llama:Qwen2",
    "Qwen2MoeForCausalLM": "model.families.mixtures:Qwen2Moe",
    "Qwen3ForCausalLM": "model.families.llama:Qwen3",
    "Qwen3MoeForCausalLM": "model.families.mixtures:Qwen3Moe",
    "Qwen3NextForCausalLM": "model.families.hybrid.qwen:Qwen3Next",
    "Qwen3_5ForCausalLM": "model.families.hybrid.qwen:Qwen35",
    "Qwen3_5MoeForCausalLM": "model.families.hybrid.qwen:Qwen35Moe",
    "SeedOssForCausalLM": "model.families.dense.llama_relatives:SeedOss",
    "SmolLM3ForCausalLM": "model.families.dense.llama_relatives:SmolLM3",
    "SolarOpenForCausalLM": "model.families.sigmoid_mixtures:SolarOpen",
    "StableLmForCausalLM": "model.families.gpt.stablelm:StableLM",
    "Starcoder2ForCausalLM": "model.families.gpt.starcoder2:Starcoder2",
    "T5ForConditionalGeneration": "model.families.t5:T5",
    "VaultGemmaForCausalLM": "model.families.gemma.gemma:VaultGemma",
    "XGLMForCausalLM": "model.families.gpt.xglm:XGLM",
}
#: Architectures of encoders, which have a vector or a score for a text.
ENCODERS = {
    "BertModel": "model.families.bert:BERT",
    "BertForSequenceClassification": "model.families.bert:BERT",
    "BertForMaskedLM": "model.families.bert:BERT",
    "XLMRobertaModel": "model.families.bert:RoBERTa",
    "XLMRobertaForSequenceClassification": "model.families.bert:RoBERTa",
    "XLMRobertaForMaskedLM": "model.families.bert:RoBERTa",
    "RobertaModel": "model.families.bert:RoBERTa",
    "RobertaForSequenceClassification": "model.families.bert:RoBERTa",
    "RobertaForMaskedLM": "model.families.bert:RoBERTa",
}
#: The family of models that no other family computes.
THROUGH_TRANSFORMERS = "model.through_transformers.family:ThroughTransformers"
#: By model_type: what to take in place of a model that is not computed.
NEAREST = {
    "falcon_mamba": "tiiuae/Falcon-H1-7B-Instruct",
    "glm5_next": "zai-org/GLM-4.5-Air",
    "jamba": "ibm-granite/granite-4.0-h-small",
    "kimi_k3": "moonshotai/Kimi-K2.6",
    "lfm3": "LiquidAI/LFM2-2.6B, its predecessor",
    "mamba": "ibm-granite/granite-4.0-h-tiny",
    "mamba2": "ibm-granite/granite-4.0-h-tiny",
    "qwen4_exp": "Qwen/Qwen3.8-27B or Qwen/Qwen3.6-35B-A3B",
    "qwen4_exp_text": "Qwen/Qwen3.8-27B or Qwen/Qwen3.6-35B-A3B",
    "recurrent_gemma": "google/gemma-3-4b-it",
    "zamba2": "ibm-granite/granite-4.0-h-tiny",
    "zaya": "Qwen/Qwen3.6-35B-A3B",
}
#: Architectures of EAGLE-3 heads: of SGLang's and SpecForge's folders, vLLM's, and speculators'.
EAGLE3_HEADS = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
#: The architecture of DFlash heads, in z-lab's folders.
DFLASH = "DFlashDraftModel"


def known_family(names: Iterable[str], table: Mapping[str, str] = FAMILIES) -> type[Family] | None:
    """The family of the first of an architecture's names that the table has."""
    place = next((table[name] for name in names if name in table), None)
    return None if place is None else family_at(place)


def family_at(place: str) -> type[Family]:
    """The family of a table's place, such as "model.families.llama:Llama"."""
    found: type[Family] = resolve_name(f"penstock.{place}")
    return found


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head. Folders of EAGLE's authors name Llama's architecture,
    and have a vocabulary of drafts."""
    names = config.get("architectures")
    named = isinstance(names, list) and any(name in EAGLE3_HEADS for name in names)
    return named or config.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in config


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a DFlash head."""
    names = config.get("architectures")
    return "dflash_config" in config or (isinstance(names, list) and DFLASH in names)
