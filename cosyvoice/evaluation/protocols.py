"""The units that an error rate counts, under each protocol.

seed_tts        Seed-TTS-eval's published script: every character of zhon's Chinese and of ASCII's
                punctuation is deleted, the apostrophe excepted; Chinese is compared per character, English
                per lower-cased word. Nothing else is normalised: a digit against its reading is an error,
                and so is the case of a Latin letter in a Chinese sentence. The score is the **mean of the
                utterances' rates**.
corpus          The recipe's own: punctuation, symbols and white space out, case and width folded; characters
                for Chinese, words for English. The score is **all errors over all reference units**.
pinyin          Chinese only: the reward's normalisation (numbers spoken, simplified) and toned pinyin, pooled
                as corpus. It hears what the reward hears: read it beside the other two, not instead.
pinyin_toneless The same without tones.

Seed-TTS-eval also converts Chinese transcripts to simplified characters. The Paraformer that it uses writes
simplified ones already, so nothing is converted here; a recogniser that writes traditional ones would need
it.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable
from functools import lru_cache

from zhon.hanzi import punctuation as chinese_punctuation

from ..reward.text import drop_tones, normalise, to_pinyin

LANGUAGES = ("zh", "en")
MEAN, POOLED = "mean", "pooled"
#: How the utterances of a test set are put together.
AGGREGATE = {"seed_tts": MEAN, "corpus": POOLED, "pinyin": POOLED, "pinyin_toneless": POOLED}

#: Letters that are no Chinese characters, digits and symbols: punctuation beside them may change their reading.
#: In other texts it does not, and they may lose it before they are looked up.
_NEEDS_CONTEXT = re.compile(r"[^\W\u4e00-\u9fff]|[<>|\[\]%‰℃°$￥€£+=×÷]")

_SEED_TTS_DELETED = str.maketrans("", "", (chinese_punctuation + string.punctuation).replace("'", ""))


def seed_tts_units(text: str, language: str) -> list[str]:
    """Seed-TTS-eval's units.

    >>> seed_tts_units("你好，World!", "zh")
    ['你', '好', 'W', 'o', 'r', 'l', 'd']
    >>> seed_tts_units("It's well-known.", "en")
    ["it's", 'wellknown']
    """
    text = text.translate(_SEED_TTS_DELETED)
    return [c for c in text if not c.isspace()] if language == "zh" else text.lower().split()


def corpus_units(text: str, language: str) -> list[str]:
    """Characters or words without punctuation, symbols, case and width.

    >>> corpus_units("你好，Ｗorld！ 3%", "zh")
    ['你', '好', 'w', 'o', 'r', 'l', 'd', '3']
    >>> corpus_units("It's well-known.", "en")
    ["it's", 'well', 'known']
    """
    text = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    kept = "".join(c if unicodedata.category(c)[0] in "LNM" or c == "'" else " " for c in text)
    if language == "zh":
        return [c for c in kept if not c.isspace() and c != "'"]
    return [word.strip("'") for word in kept.split() if word.strip("'")]


@lru_cache(maxsize=65_536)  # normalisation takes milliseconds, and a right transcript repeats its reference
def _pinyin(text: str) -> tuple[str, ...]:
    return tuple(to_pinyin(normalise(text)))


def pinyin_units(text: str, language: str) -> list[str]:
    """Toned pinyin of what is heard; see ``cosyvoice.reward.text``."""
    if not _NEEDS_CONTEXT.search(text):
        text = "".join(c for c in text if c.isalpha())
    return list(_pinyin(text))


def toneless_units(text: str, language: str) -> list[str]:
    """Pinyin without tones."""
    return drop_tones(pinyin_units(text, language))


def protocols(language: str) -> dict[str, Callable[[str, str], list[str]]]:
    """Name -> units of a text, for the protocols that a language has.

    Raises:
        ValueError: a language other than zh and en.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language: found {language!r}, expected one of {', '.join(LANGUAGES)}")
    both = {"seed_tts": seed_tts_units, "corpus": corpus_units}
    return both | {"pinyin": pinyin_units, "pinyin_toneless": toneless_units} if language == "zh" else both
