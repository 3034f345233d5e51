"""Every number of the tiny world in one place: characters, voices, splits, sizes, seeds and steps."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("TINY_WORK", ROOT / "exp" / "tiny_world"))  # some 2 GB, not in git
ASSETS = ROOT / "assets" / "cosyvoice2-tiny"

SEED = 20

# One character per toned syllable, so that a syllable error is a character error and a recogniser can write hanzi
# without a language model. None of them is a polyphone in the sense of pypinyin's phrases in this domain, none is
# changed by number normalisation or erhua, and 不 and 一 (their tone moves) are left out. The reading is what
# espeak-ng is asked to speak; tests compare it with pypinyin.
SYLLABLES: dict[str, str] = {
    "我": "wo3", "你": "ni3", "他": "ta1", "人": "ren2", "天": "tian1", "下": "xia4", "国": "guo2", "家": "jia1",
    "生": "sheng1", "老": "lao3", "师": "shi1", "今": "jin1", "明": "ming2", "昨": "zuo2", "晚": "wan3",
    "早": "zao3", "水": "shui3", "火": "huo3", "山": "shan1", "风": "feng1", "雨": "yu3", "花": "hua1",
    "草": "cao3", "树": "shu4", "鸟": "niao3", "鱼": "yu2", "马": "ma3", "牛": "niu2", "羊": "yang2", "狗": "gou3",
    "猫": "mao1", "红": "hong2", "白": "bai2", "黑": "hei1", "蓝": "lan2", "绿": "lv4", "高": "gao1", "吃": "chi1",
    "喝": "he1", "看": "kan4", "听": "ting1", "说": "shuo1", "写": "xie3", "买": "mai3", "卖": "mai4", "来": "lai2",
    "去": "qu4", "走": "zou3", "跑": "pao3", "坐": "zuo4", "站": "zhan4", "飞": "fei1", "饭": "fan4", "茶": "cha2",
    "车": "che1", "书": "shu1", "门": "men2", "快": "kuai4", "慢": "man4", "新": "xin1", "旧": "jiu4", "也": "ye3",
    "爱": "ai4", "想": "xiang3", "能": "neng2", "问": "wen4", "有": "you3", "是": "shi4", "在": "zai4",
    "电": "dian4", "话": "hua4",
}
CHARACTERS = list(SYLLABLES)

# espeak-ng: variant of the voice `cmn-latn-pinyin` and pitch (0..99). The decoder knows the first three; the
# held-out recogniser also hears the others.
VOICES: dict[str, tuple[str, int]] = {
    "f2": ("f2", 55), "m3": ("m3", 75), "m1": ("m1", 85), "f3": ("f3", 60), "m2": ("m2", 70),
}
DECODER_VOICES = ("f2", "m3", "m1")
CANONICAL_VOICE = "f2"  # what the speech tokens are supervised with, whoever speaks
JUDGE_VOICES = ("f2", "m3", "m1", "f3", "m2")
SPEED_WPM = (180, 225)

# name -> number of sentences; no sentence is in two of them; "more" is for the language model alone, which learned the
# 4,200 of "main" by heart before it spoke well
SPLITS = {"main": 4200, "judge": 1800, "rl": 2000, "dev": 150, "test": 360, "prompt": 45,
          "more": 6000}
SPOKEN = {"main": DECODER_VOICES, "judge": JUDGE_VOICES, "dev": DECODER_VOICES, "test": DECODER_VOICES,
          "prompt": DECODER_VOICES, "more": DECODER_VOICES}
FREE_SHARE = 0.6
FREE_LENGTH = (3, 8)

SAMPLE_RATE = 24000
TOKEN_SAMPLES = 960

TOKENIZER = {"width": 96, "blocks": 3, "decoder_blocks": 1, "steps": 1400, "warm": 300, "batch": 24, "rate": 3e-3,
             "ctc": 0.15}
RECOGNISER = {"width": 128, "linear_units": 384, "blocks": 4, "steps": 700, "batch": 32, "rate": 2e-3}

# `cosyvoice.hift.HiFTConfig` and `cosyvoice.flow.FlowConfig` at tiny size; package.py writes them into cosyvoice2.yaml
HIFT_CONFIG = {"base_channels": 96, "f0_channels": 64, "upsample_rates": (8, 5), "upsample_kernel_sizes": (16, 11),
               "n_fft": 48, "hop_len": 12, "resblock_kernel_sizes": (3, 7),
               "resblock_dilation_sizes": ((1, 3), (1, 3)), "source_resblock_kernel_sizes": (3, 3),
               "source_resblock_dilation_sizes": ((1,), (1,))}
HIFT = {"steps": 2400, "batch": 8, "frames": 24, "rate": 1.5e-3}
SPEAKER = {"width": 48, "steps": 400, "utterances": 900}

FLOW_CONFIG = {"input_size": 64,
               "encoder": {"input_size": 64, "output_size": 96, "attention_heads": 3, "linear_units": 256,
                           "num_blocks": 2, "num_up_blocks": 1},
               "estimator": {"channels": 96, "attention_head_dim": 32, "num_heads": 3, "n_blocks": 1,
                             "num_mid_blocks": 2}}
FLOW = {"steps": 1700, "batch": 8, "prompted": 0.35, "rate": 2e-3, "dropout": 0.2, "prompt_tokens": 32}

LLM = {"splits": ("main", "more"), "text_rows": 512, "width": 128, "mlp": 384, "layers": 4, "heads": 4, "kv_heads": 2,
       "steps": 1300, "batch": 32, "rate": 1.5e-3, "keep_every": 50, "unseen_bias": -15.0, "shipped_step": 1100}
PROMPTS_PER_VOICE = 3
EULER_STEPS = 3
JUDGE = {"width": 112, "kernel": 5, "blocks": 6, "steps": 1500, "batch": 24, "rate": 2e-3}
