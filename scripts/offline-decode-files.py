"""Recognise and score the WAV files of a test set; `--help` says how. Runs in the reward environment."""

from cosyvoice.evaluation.decode_and_score import main

if __name__ == "__main__":
    raise SystemExit(main())
