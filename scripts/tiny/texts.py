"""Draw the sentences of the tiny world: templates and free strings of characters, split without overlap."""

from __future__ import annotations

import argparse
import json
import random

from pypinyin import Style, lazy_pinyin
from settings import CHARACTERS, FREE_LENGTH, FREE_SHARE, SEED, SPLITS, SYLLABLES, WORK

SUBJECTS = ["我", "你", "他", "老师", "家人", "老人", "国人", "师生"]
TIMES = ["今天", "明天", "昨天", "今晚", "明早", "昨晚", ""]
VERBS = ["看", "听", "说", "写", "买", "卖", "吃", "喝", "爱", "想", "有", "问"]
MOVES = ["来", "去", "走", "跑", "坐", "站", "飞"]
ADJECTIVES = ["红", "白", "黑", "蓝", "绿", "新", "旧", "高", "老", "快", "慢", ""]
OBJECTS = ["书", "花", "鱼", "鸟", "树", "草", "马", "牛", "羊", "狗", "猫", "车", "茶", "水", "饭", "电话", "门"]
PLACES = ["山下", "家", "门下", "树下", "水下", "车下", "国家"]
MODALS = ["也", "能", "想", "爱", "也能", "也想", ""]


def template(rng: random.Random) -> str:
    """One sentence of the form subject, time, verb, object and the like."""
    subject, time, verb, move = (rng.choice(x) for x in (SUBJECTS, TIMES, VERBS, MOVES))
    adjective, thing, place, modal = (rng.choice(x) for x in (ADJECTIVES, OBJECTS, PLACES, MODALS))
    return rng.choice([
        subject + time + modal + verb + adjective + thing,
        time + subject + modal + verb + thing,
        adjective + thing + "在" + place + move,
        subject + time + "在" + place + verb + thing,
        subject + "是" + adjective + rng.choice(["人", "老师", "生人"]),
        subject + time + modal + move + place,
    ])


def free_string(rng: random.Random) -> str:
    """Characters in any order: what the recognisers cannot guess from context."""
    return "".join(rng.choices(CHARACTERS, k=rng.randint(*FREE_LENGTH)))


def acceptable(text: str) -> bool:
    """3-10 characters, no two equal or third-tone neighbours, and pypinyin reads each as the table says.

    Two third tones in a row are left out because sandhi would make the written and the spoken tone differ; equal
    neighbours because reduplication is a reading of its own in pypinyin's phrases.
    """
    if not 3 <= len(text) <= 10:
        return False
    tones = [SYLLABLES[c][-1] for c in text]
    if any(a == b == "3" for a, b in zip(tones, tones[1:])) or any(a == b for a, b in zip(text, text[1:])):
        return False
    read = lazy_pinyin(text, style=Style.TONE3, neutral_tone_with_five=True, tone_sandhi=True)
    return [r.replace("ü", "v") for r in read] == [SYLLABLES[c] for c in text]


def draw(seed: int = SEED) -> dict[str, list[str]]:
    """Sentences of every split, no sentence twice."""
    rng = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, list[str]] = {}
    for name, size in SPLITS.items():
        splits[name] = []
        while len(splits[name]) < size:
            text = free_string(rng) if rng.random() < FREE_SHARE else template(rng)
            if text not in seen and acceptable(text):
                seen.add(text)
                splits[name].append(text)
    return splits


def get_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=__doc__)


def main() -> None:
    get_parser().parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    splits = draw()
    (WORK / "texts.json").write_text(json.dumps(splits, ensure_ascii=False, indent=0), encoding="utf-8")
    for name, texts in splits.items():
        print(name, len(texts), sum(map(len, texts)) / len(texts), texts[:6])


if __name__ == "__main__":
    main()
