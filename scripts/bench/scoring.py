"""Time of scoring without recognition: 2,000 Chinese sentences, 40 % of the transcripts with errors.

    .venv/reward/bin/python scripts/bench/scoring.py

Prints seconds for the scores under all protocols, for the intervals (10,000 draws each) and for the error table.
"""

from __future__ import annotations

import argparse
import os
import random
import time

from cosyvoice.evaluation.recognise import Recognised
from cosyvoice.evaluation.scoring import error_table, score, summarise

CHARACTERS = "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面"


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=int, default=2000, help="size of the set (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    return parser


def make_set(n: int, seed: int = 0) -> tuple[dict[str, str], list[Recognised]]:
    """References with punctuation, and transcripts of which 40 % have one wrong character."""
    rng = random.Random(seed)
    references, transcripts = {}, []
    for i in range(n):
        characters = rng.choices(CHARACTERS, k=rng.randint(8, 30))
        references[f"u{i}"] = "".join(characters[:5]) + "，" + "".join(characters[5:]) + "。"
        if rng.random() < 0.4:
            characters[rng.randrange(len(characters))] = rng.choice(CHARACTERS)
        transcripts.append(Recognised(f"u{i}", "".join(characters), "ok", "", 3.0))
    return references, transcripts


def main() -> None:
    args = get_parser().parse_args()
    references, transcripts = make_set(args.utterances)
    def mark(name: str) -> tuple[str, float, float]:
        used = os.times()  # of finished child processes too
        return name, time.perf_counter(), used.user + used.system + used.children_user + used.children_system

    marks = [mark("start")]
    scored = score(references, transcripts, "zh", workers=args.workers)
    marks.append(mark("scores"))
    summary = summarise(scored)
    marks.append(mark("intervals"))
    table = error_table(scored, "zh")
    marks.append(mark("error table"))
    rows = list(zip(marks, marks[1:])) + [(marks[0], ("total", *marks[-1][1:]))]
    for (_, clock, cpu), (name, clock_after, cpu_after) in rows:
        print(f"{name:12s} {clock_after - clock:6.2f} s, {cpu_after - cpu:6.2f} s of CPU")
    print(f"{len(references)} utterances, {args.workers} processes, load {os.getloadavg()[0]:.1f} beside it")
    print(f"corpus {100 * summary['metrics']['corpus']['value']:.2f} %, {len(table)} utterances with errors")


if __name__ == "__main__":
    main()
