"""Test sets: published ones from a local copy or from the hub, and one's own.

    name                                     local copy (--data FOLDER)          hub
    test_zh, test_en, hard   Seed-TTS-eval   zh/meta.lst, en/meta.lst,           yuekai/seed_tts_cosy2
                                             zh/hardcase.lst
    zero_shot_zh, ...        CV3-Eval        zero_shot/zh/{text, prompt_text,    yuekai/CV3-Eval
                                             prompt_wav.scp}
    a path                   one's own       JSONL (id, text, and prompt_text with prompt_audio, or neither; language
                                             if it is not zh), or a folder with meta.lst, with the Kaldi files above,
                                             or with one .jsonl file

Paths inside a list are relative to the list's folder. A set from the hub is stored once as such a JSONL with its
audio files. Utterances without a prompt of their own are spoken in a voice of the prompt bank.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .records import EvaluationError, check_id, read_jsonl, split_name, write_jsonl

SEED_TTS_LISTS = {"test_zh": "zh/meta.lst", "test_en": "en/meta.lst", "hard": "zh/hardcase.lst"}
HUB_SEED_TTS, HUB_CV3 = "yuekai/seed_tts_cosy2", "yuekai/CV3-Eval"
_CV3 = re.compile(r"zero_shot_([a-z]{2})$")
#: Marks that neither the model's training texts nor a reader's voice has: quotation marks and brackets.
_UNSPOKEN = str.maketrans("", "", "\"“”‘’()（）「」『』《》〈〉【】")


@dataclass(frozen=True)
class TestUtterance:
    """One sentence to speak.

    Attributes:
        id: unique in its set; a plain file name.
        text: what to say, as published; it is also the reference of the scoring.
        language: "zh" or "en".
        prompt_text: what the prompt recording says; "" without one.
        prompt_audio: the prompt recording; None to take one from the bank.
    """

    __test__ = False  # pytest: not a test class

    id: str
    text: str
    language: str
    prompt_text: str = ""
    prompt_audio: Path | None = None


def clean_text(text: str) -> str:
    """What the language model is given of a test text: quotation marks and brackets deleted, white space joined.

    The apostrophe inside a word stays. Nothing else changes: no numbers are spoken, no punctuation is added.

    >>> clean_text(" 他说：“《红楼梦》（上） don’t  'go'” ")
    "他说：红楼梦上 don't go"
    """
    text = re.sub(r"(?<=\w)’(?=\w)", "'", text)
    text = re.sub(r"(?<!\w)'|'(?!\w)", "", text.translate(_UNSPOKEN))
    return " ".join(text.split())


def _utterance(row: dict, where: str, folder: Path, language: str) -> TestUtterance:
    """Check one row; audio relative to ``folder``."""
    name = check_id(row.get("id"), where)
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise EvaluationError(f"{where}: 'text': found {text!r}, expected the sentence to speak")
    prompt_text, audio = row.get("prompt_text") or "", row.get("prompt_audio")
    if bool(audio) != bool(prompt_text):
        raise EvaluationError(
            f"{where}: found prompt_audio {audio!r} and prompt_text {prompt_text!r}, expected both or neither"
        )
    language = row.get("language") or language
    if language not in ("zh", "en"):
        raise EvaluationError(f"{where}: 'language': found {language!r}, expected zh or en")
    return TestUtterance(name, text.strip(), language, prompt_text.strip(), folder / audio if audio else None)


def _check_unique(rows: list[TestUtterance], where: Path) -> list[TestUtterance]:
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise EvaluationError(f"{where}: found the id {row.id!r} twice, expected every id once")
        seen.add(row.id)
    if not rows:
        raise EvaluationError(f"{where}: found no utterance, expected one at least")
    return rows


def read_own(path: str | Path, language: str) -> list[TestUtterance]:
    """Read a JSONL test set."""
    path = Path(path)
    rows = [_utterance(row, f"{path}: {row['id']!r}", path.parent, language) for row in read_jsonl(path)]
    return _check_unique(rows, path)


def read_meta_list(path: str | Path, language: str) -> list[TestUtterance]:
    """Read Seed-TTS-eval's list: ``id|prompt text|prompt audio|text``, a fifth field (true recording) is ignored.

    Raises:
        EvaluationError: a line with another number of fields.
    """
    path = Path(path)
    if not path.is_file():
        raise EvaluationError(f"{path}: no such file, expected Seed-TTS-eval's list")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        fields = line.strip().split("|")
        if len(fields) not in (4, 5):
            raise EvaluationError(f"{path} line {number}: found {len(fields)} fields, expected 4 or 5 between |")
        # Ids of the published lists may name the WAV file.
        row = {"id": fields[0].removesuffix(".wav"), "prompt_text": fields[1], "prompt_audio": fields[2]}
        rows.append(_utterance({**row, "text": fields[3]}, f"{path} line {number}", path.parent, language))
    return _check_unique(rows, path)


def _read_kaldi(path: Path) -> dict[str, str]:
    """id -> rest of the line."""
    if not path.is_file():
        raise EvaluationError(f"{path}: no such file, expected id and value in each line")
    pairs = (line.strip().split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines())
    return {pair[0]: pair[1] if len(pair) > 1 else "" for pair in pairs if pair}


def read_kaldi_folder(folder: str | Path, language: str) -> list[TestUtterance]:
    """Read CV3-Eval's folder: ``text``, ``prompt_text`` and ``prompt_wav.scp``.

    Raises:
        EvaluationError: a file is not there, or an id has no prompt.
    """
    folder = Path(folder)
    texts, prompts, audio = (_read_kaldi(folder / name) for name in ("text", "prompt_text", "prompt_wav.scp"))
    rows = []
    for name, text in texts.items():
        if name not in prompts or name not in audio:
            raise EvaluationError(f"{folder}: utterance {name!r} is not in both prompt_text and prompt_wav.scp")
        row = {"id": name, "text": text, "prompt_text": prompts[name], "prompt_audio": audio[name]}
        rows.append(_utterance(row, f"{folder}: {name!r}", folder, language))
    return _check_unique(rows, folder)


def store_hub_rows(rows: Iterable[dict], folder: Path, language: str) -> Path:
    """Write a hub set (id, target_text, prompt_text, prompt_audio as encoded bytes) as JSONL and audio files.

    Returns:
        ``<folder>/utterances.jsonl``, written last: it is there only if the set is complete.
    """
    stored = []
    for number, row in enumerate(rows, 1):
        name = check_id(str(row.get("id")), f"{folder}: hub row {number}")
        data = (row.get("prompt_audio") or {}).get("bytes")
        if not data:
            raise EvaluationError(f"{folder}: hub row {number} ({name!r}): found no bytes in 'prompt_audio'")
        audio = folder / "audio" / f"{name}.wav"  # libsndfile goes by content, not by suffix
        audio.parent.mkdir(parents=True, exist_ok=True)
        audio.write_bytes(data)
        stored.append(
            {
                "id": name,
                "text": row.get("target_text"),
                "language": language,
                "prompt_text": row.get("prompt_text"),
                "prompt_audio": f"audio/{audio.name}",
            }
        )
    path = folder / "utterances.jsonl"
    write_jsonl(path, stored)
    return path


def fetch_hub(repository: str, split: str, language: str, downloads: Path) -> Path:
    """JSONL of a hub set, downloaded once; several processes may ask at the same time.

    Raises:
        EvaluationError: the set cannot be fetched.
    """
    folder = downloads / repository.replace("/", "--") / split
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "utterances.jsonl"
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            return path
        from datasets import Audio, load_dataset

        try:
            rows = load_dataset(repository, split=split).cast_column("prompt_audio", Audio(decode=False))
        except Exception as error:  # datasets, the hub client and the network each raise their own
            raise EvaluationError(
                f"test set {split!r}: cannot be fetched from {repository}; give a local copy with --data: {error}"
            ) from error
        return store_hub_rows(rows, folder, language)


def load_test_set(
    split: str, data: str | Path | None = None, language: str = "zh", downloads: str | Path = "downloads"
) -> list[TestUtterance]:
    """Load a test set by name or path; see the module's docstring.

    Args:
        split: name of a published set, or path of one's own.
        data: local copy of a published set; None fetches it from the hub.
        language: of one's own set where its rows do not say.
        downloads: where sets from the hub are stored.

    Raises:
        EvaluationError: unknown split; files missing or malformed; ids repeated.
    """
    path = Path(split)
    if path.suffix == ".jsonl" or path.is_file():
        return read_own(path, language)
    if path.is_dir():
        if (path / "meta.lst").is_file():
            return read_meta_list(path / "meta.lst", language)
        if (path / "prompt_wav.scp").is_file():
            return read_kaldi_folder(path, language)
        lists = sorted(path.glob("*.jsonl"))
        if len(lists) != 1:
            raise EvaluationError(
                f"{path}: found {[p.name for p in lists]}, expected meta.lst, prompt_wav.scp or one .jsonl file"
            )
        return read_own(lists[0], language)
    cv3 = _CV3.match(split)
    if split not in SEED_TTS_LISTS and not cv3:
        known = ", ".join([*SEED_TTS_LISTS, "zero_shot_zh", "zero_shot_en"])
        raise EvaluationError(f"test set {split!r}: found no such file or folder, and its name is none of {known}")
    language = cv3[1] if cv3 else "en" if split.endswith("_en") else "zh"
    if data is None:
        return read_own(fetch_hub(HUB_CV3 if cv3 else HUB_SEED_TTS, split, language, Path(downloads)), language)
    if cv3:
        return read_kaldi_folder(Path(data) / "zero_shot" / language, language)
    return read_meta_list(Path(data) / SEED_TTS_LISTS[split], language)


__all__ = ["TestUtterance", "clean_text", "load_test_set", "split_name"]
