"""All families that write text: another family is another line."""

from __future__ import annotations

from penstock.model.families.bart import BART
from penstock.model.families.cpmant import CPMAnt
from penstock.model.families.deepseek import DeepseekV2, DeepseekV3
from penstock.model.families.dense.apertus import Apertus
from penstock.model.families.dense.cohere import Cohere, Cohere2
from penstock.model.families.dense.glm import Glm, Glm4
from penstock.model.families.dense.llama_relatives import (
    Arcee,
    Cwm,
    Ernie45,
    Exaone4,
    Granite,
    Helium,
    HunYuanDense,
    InternLM3,
    Ministral,
    Ministral3,
    SeedOss,
    SmolLM3,
)
from penstock.model.families.dense.olmo import Olmo, Olmo2, Olmo3
from penstock.model.families.dense.phi3 import Phi3
from penstock.model.families.gemma.gemma import Gemma, Gemma2, Gemma3, VaultGemma
from penstock.model.families.gemma.gemma3n import Gemma3n
from penstock.model.families.gemma.gemma4 import Gemma4, Gemma4Unified
from penstock.model.families.gpt.bloom import Bloom
from penstock.model.families.gpt.ctrl import CTRL
from penstock.model.families.gpt.falcon import Falcon
from penstock.model.families.gpt.gpt2 import GPT2, GPTBigCode, OpenAIGPT
from penstock.model.families.gpt.gpt_neo import GPTNeo
from penstock.model.families.gpt.gpt_neox import GPTNeoX, GPTNeoXJapanese
from penstock.model.families.gpt.gptj import GPTJ, CodeGen
from penstock.model.families.gpt.mpt import MPT
from penstock.model.families.gpt.opt import OPT
from penstock.model.families.gpt.phi import Persimmon, Phi
from penstock.model.families.gpt.stablelm import StableLM
from penstock.model.families.gpt.starcoder2 import Jais2, Nemotron, Starcoder2
from penstock.model.families.gpt.xglm import XGLM, BioGPT
from penstock.model.families.gpt_oss import GptOss
from penstock.model.families.hybrid.lfm2 import LFM2, LFM2Moe
from penstock.model.families.hybrid.mamba import Bamba, FalconH1, GraniteHybrid
from penstock.model.families.hybrid.nemotron_h import NemotronH
from penstock.model.families.hybrid.qwen import Qwen3Next, Qwen35, Qwen35Moe
from penstock.model.families.llama import Llama, Mistral, Qwen2, Qwen3
from penstock.model.families.llama4 import Llama4
from penstock.model.families.minicpm import MiniCPM, MiniCPM3
from penstock.model.families.mixture_relatives import Ernie45Moe, GraniteMoe, HunYuanMoe
from penstock.model.families.mixtures import Mixtral, OLMoE, PhiMoe, Qwen2Moe, Qwen3Moe
from penstock.model.families.sigmoid_mixtures import Dots1, Glm4Moe, MiniMaxM2
from penstock.model.families.t5 import EVA, MT5, T5
from penstock.model.family import Family

FAMILIES: tuple[type[Family], ...] = (
    Apertus,
    Arcee,
    Bamba,
    BART,
    BioGPT,
    Bloom,
    CodeGen,
    Cohere,
    Cohere2,
    CPMAnt,
    CTRL,
    Cwm,
    Dots1,
    Ernie45,
    Ernie45Moe,
    EVA,
    Exaone4,
    DeepseekV2,
    DeepseekV3,
    Falcon,
    FalconH1,
    Gemma,
    Gemma2,
    Gemma3,
    Gemma3n,
    Gemma4,
    Gemma4Unified,
    Glm,
    Glm4,
    Glm4Moe,
    GPT2,
    GPTBigCode,
    GPTJ,
    GPTNeo,
    GPTNeoX,
    GPTNeoXJapanese,
    GptOss,
    Granite,
    GraniteHybrid,
    GraniteMoe,
    Helium,
    HunYuanDense,
    HunYuanMoe,
    InternLM3,
    Jais2,
    LFM2,
    LFM2Moe,
    Llama,
    Llama4,
    MiniCPM,
    MiniCPM3,
    MiniMaxM2,
    Ministral,
    Ministral3,
    Mistral,
    Mixtral,
    MPT,
    MT5,
    Nemotron,
    NemotronH,
    Olmo,
    Olmo2,
    Olmo3,
    OLMoE,
    OpenAIGPT,
    OPT,
    Persimmon,
    Phi,
    Phi3,
    PhiMoe,
    Qwen2,
    Qwen2Moe,
    Qwen3,
    Qwen3Moe,
    Qwen3Next,
    Qwen35,
    Qwen35Moe,
    SeedOss,
    SmolLM3,
    StableLM,
    Starcoder2,
    T5,
    VaultGemma,
    XGLM,
)
