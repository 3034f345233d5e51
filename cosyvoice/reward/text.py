"""One normalisation and one pinyin for references and transcripts, in the reward and in the evaluation.

    text --markup off, wetext--> spoken form, lower case, no punctuation --pypinyin--> units to compare

Numbers are read in Chinese, also between Latin words, as the recogniser does under ``language="zh"``.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

#: Chinese characters, extension planes included; 〇 is a digit to Unicode and a character to readers.
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\u3007"
_HAN_RUN = re.compile(f"[{_HAN}]+")
#: A run of Chinese characters, of letters (with their accents) or of digits.
_RUN = re.compile(rf"[{_HAN}]+|\d+|(?:(?![{_HAN}])[^\W\d_][\u0300-\u036f]*)+")
#: Control tokens `<|...|>`, and CosyVoice's markup: [breath], <strong>, </laughter>.
_MARKUP = re.compile(r"<\|[^|<>]*\|>|\[[a-zA-Z_-]{2,}\]|</?[a-zA-Z]+>")
_SYLLABLE = re.compile(r"[a-zê]+[1-5]")
_VOWELS = re.compile(r"[aeiouyàáâäãåèéêëìíîïòóôöõùúûüýÿ]+")

# Numbers that wetext 0.1.8 reads wrongly, rewritten before it sees them.
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")  # 1,234 -> 一两百三十四
_ORDINAL = re.compile(r"第(\d+)")  # 第2名 -> 第两名
_FRACTION = re.compile(r"(?<![\d/])\d+/\d+(?![\d/])")  # 约3/4 -> 四分之约三
_HYPHEN = re.compile(r"(?<=[A-Za-z])-(?=\d)")  # GPT-4 -> GPT负四
#: It deletes punctuation without a trace: "yes,no" would become one word. Abbreviations (U.S.) stay one.
_GLUE = re.compile(r"(?<=[A-Za-z])[,;:!?/_&+，；：！？、。](?=[A-Za-z])")


@lru_cache(maxsize=2)
def _wetext(remove_erhua: bool):
    """The text normaliser, built once per process: reading its transducers takes half a second."""
    from wetext import Normalizer

    return Normalizer(
        lang="zh",
        operator="tn",
        remove_erhua=remove_erhua,
        remove_interjections=False,
        remove_puncts=True,
        full_to_half=True,
        traditional_to_simple=True,
    )


def normalise(text: str) -> str:
    """Turn a text into what is heard: numbers spoken, simplified characters, lower case, no punctuation.

    Erhua and interjections stay. Control tokens, emoji and symbols go. White space is left between
    Latin words only. Idempotent.

    >>> normalise("我打开 WiFi，花了１００元！")
    '我打开wifi花了一百元'
    """
    text = _MARKUP.sub(" ", text)
    text = unicodedata.normalize("NFC", text)
    if any(character.isdigit() for character in text):
        text = _speak_numbers(text)
    text = _GLUE.sub(" ", text)
    text = _wetext(remove_erhua=False).normalize(text).lower()  # no digit is left: cheap
    text = "".join(character if _is_spoken(character) else " " for character in text)
    return " ".join(text.split()) if not _HAN_RUN.search(text) else _tighten(text)


def _speak_numbers(text: str) -> str:
    """Spell numbers, dates, money and units out, and leave the punctuation."""
    spoken = _wetext(remove_erhua=False).normalize
    # Full-width digits would hide from the patterns; wetext folds the rest of the forms.
    text = "".join(chr(ord(c) - 0xFEE0) if "\uff10" <= c <= "\uff19" else c for c in text)
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = _ORDINAL.sub(lambda match: "第" + spoken(match[1]), text)
    text = _FRACTION.sub(lambda match: spoken(match[0]), text)
    return spoken(_HYPHEN.sub(" ", text), remove_puncts=False)


def _is_spoken(character: str) -> bool:
    """Letters, digits and accents; neither symbols, emoji nor the selectors that come with emoji."""
    kind = unicodedata.category(character)
    return kind[0] in "LN" or (kind in ("Mn", "Mc") and not "\ufe00" <= character <= "\ufe0f")


def _tighten(text: str) -> str:
    """Drop white space that touches a Chinese character: recognisers put it in freely."""
    return re.sub(rf"(?<=[{_HAN}])\s+|\s+(?=[{_HAN}])", "", " ".join(text.split()))


def fold_erhua(text: str) -> str:
    """Drop the 儿 that only colours the syllable before it (哪儿 -> 哪), keep it in 儿子, 女儿 and the like.

    The word list is wetext's own.
    """
    return _tighten(_wetext(remove_erhua=True).normalize(text)) if "儿" in text else text


def to_pinyin(text: str, erhua: str = "keep") -> list[str]:
    """Units to compare: toned pinyin (5 is the neutral tone) and Latin words.

    Tone sandhi is applied (你好 -> ni2 hao3), so that a transcript is judged by sound, not by characters.
    A run of Latin letters or digits is split into words. A character of unknown reading stands for itself.

    Args:
        text: a normalised text.
        erhua: "keep" counts 儿 as a syllable, "fold" drops it where it only colours the one before.

    Raises:
        ValueError: another value of ``erhua``.

    >>> to_pinyin("他在哪儿用wifi")
    ['ta1', 'zai4', 'na3', 'er2', 'yong4', 'wifi']
    """
    if erhua not in ("keep", "fold"):
        raise ValueError(f"erhua {erhua!r}: expected 'keep' or 'fold'")
    if erhua == "fold":
        text = fold_erhua(text)
    units: list[str] = []
    for run in _RUN.findall(text):
        units += _syllables(run) if _HAN_RUN.match(run) else [run]
    return units


@lru_cache(maxsize=65536)
def _syllables(run: str) -> tuple[str, ...]:
    """Toned pinyin of a run of Chinese characters. Cached: a right transcript repeats its reference."""
    from pypinyin import Style, lazy_pinyin

    syllables = lazy_pinyin(
        run, style=Style.TONE3, tone_sandhi=True, neutral_tone_with_five=True, errors=list
    )
    # pypinyin hands a character that it does not know back with a tone behind it
    return tuple(unit if _SYLLABLE.fullmatch(unit) else unit.rstrip("12345") for unit in syllables)


def drop_tones(units: list[str]) -> list[str]:
    """Toned pinyin -> toneless. Latin words hold no digits, so they stay as they are."""
    return [unit[:-1] if _SYLLABLE.fullmatch(unit) else unit for unit in units]


def characters(text: str) -> list[str]:
    """Units of the character error rate: every character of a normalised text, white space left out."""
    return [character for character in text if not character.isspace()]


def count_syllables(units: list[str]) -> int:
    """Syllables of a list of units: one per pinyin syllable; vowel groups of a Latin word, at least one.

    A Latin word without a vowel (``tts``) is spelt out, a syllable per letter.
    """
    total = 0
    for unit in units:
        if _SYLLABLE.fullmatch(unit) or _HAN_RUN.fullmatch(unit):
            total += 1
        else:
            total += len(_VOWELS.findall(unit)) or len(unit)
    return total
