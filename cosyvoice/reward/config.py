"""What the reward is made of: an immutable configuration, read from the command line of the server."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from cosyvoice.reward.curves import CURVES
from cosyvoice.reward.record import COMPONENT_NAMES

FUSIONS = ("linear", "harmonic", "gate")
#: Components that need a model's output beside the transcript: measured only if the weights name them.
COSTLY = frozenset({"similarity", "nll"})


@dataclass(frozen=True)
class RewardConfig:
    """Settings of the reward; the defaults are the original recipe's ``1 - tanh(3 WER)`` over toned pinyin.

    Attributes:
        weights: (component, weight) pairs. Weight 0 watches a component without rewarding it.
        fusion: "linear" (weighted mean), "harmonic" (weighted harmonic mean) or "gate" (product of powers).
        curve: name in ``curves.CURVES``, error rate -> reward of the pinyin component.
        tone: "toned", "toneless" or "mix:A", A * toned + (1 - A) * toneless error rate.
        erhua: "keep" or "fold".
        seconds_per_syllable: expected speech time per syllable, pauses left out. 0.193 is Mandarin read
            aloud, 5.18 syllables/s (Pellegrino, Coupe and Marsico, Language 87(3), 2011, table 1).
        duration_tolerance: factor, above or below the expectation, up to which the duration is right.
        duration_limit: factor at which the duration component has fallen to 0.
        max_loop_tokens: tokens that a pattern may go on repeating (25 = one second).
        pause_bound: seconds of silence inside the utterance above which punctuation must ask for it.
        no_end_scale: factor on the score of an utterance that did not stop by itself.
    """

    weights: tuple[tuple[str, float], ...] = (("pinyin", 1.0),)
    fusion: str = "linear"
    curve: str = "tanh"
    tone: str = "toned"
    erhua: str = "keep"
    seconds_per_syllable: float = 0.193
    duration_tolerance: float = 1.3
    duration_limit: float = 2.5
    max_loop_tokens: int = 25
    pause_bound: float = 0.5
    no_end_scale: float = 0.0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.weights]
        for name, weight in self.weights:
            if name not in COMPONENT_NAMES:
                raise ValueError(f"reward weight {name!r}: expected one of {', '.join(COMPONENT_NAMES)}")
            if not 0.0 <= weight < float("inf"):
                raise ValueError(f"reward weight {name}={weight}: expected a number from 0 up")
        if len(set(names)) != len(names):
            raise ValueError(f"reward weights {', '.join(names)}: a component is named twice")
        if not any(weight > 0 for _, weight in self.weights):
            raise ValueError("reward weights: all are 0, expected at least one above 0")
        for name, allowed in (("fusion", FUSIONS), ("curve", tuple(CURVES)), ("erhua", ("keep", "fold"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        _toned_share(self.tone)
        if self.seconds_per_syllable <= 0 or self.pause_bound <= 0 or self.max_loop_tokens < 1:
            raise ValueError("seconds_per_syllable, pause_bound and max_loop_tokens: expected values above 0")
        if not 1.0 <= self.duration_tolerance < self.duration_limit:
            raise ValueError(
                f"duration_tolerance {self.duration_tolerance}, duration_limit {self.duration_limit}: "
                "expected 1 <= tolerance < limit"
            )
        if not 0.0 <= self.no_end_scale <= 1.0:
            raise ValueError(f"no_end_scale {self.no_end_scale}: expected a number from 0 to 1")

    @property
    def toned_share(self) -> float:
        """Share of the toned error rate in the pinyin component."""
        return _toned_share(self.tone)

    def measures(self, component: str) -> bool:
        """True if the worker has to obtain what this component needs (embeddings, log-likelihoods)."""
        return component not in COSTLY or component in dict(self.weights)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RewardConfig:
        """Take the options that :func:`add_reward_options` added."""
        return cls(**{item.name: getattr(args, f"reward_{item.name}") for item in fields(cls)})


def parse_weights(text: str) -> tuple[tuple[str, float], ...]:
    """``"pinyin=1,duration=0.2"`` -> (("pinyin", 1.0), ("duration", 0.2))."""
    weights = []
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            weights.append((name.strip(), float(value)))
        except ValueError:
            raise ValueError(f"reward weights {text!r}: found {part!r}, expected NAME=NUMBER") from None
    return tuple(weights)


def _toned_share(tone: str) -> float:
    if tone in ("toned", "toneless"):
        return 1.0 if tone == "toned" else 0.0
    kind, _, share = tone.partition(":")
    try:
        value = float(share) if kind == "mix" else -1.0
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"tone {tone!r}: expected toned, toneless or mix:A with A from 0 to 1")
    return value


def _weights_option(text: str) -> tuple[tuple[str, float], ...]:
    try:
        return RewardConfig(weights=parse_weights(text)).weights
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _tone_option(text: str) -> str:
    try:
        return RewardConfig(tone=text).tone
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_reward_options(parser: argparse.ArgumentParser) -> None:
    """Add the reward's options to a command line; read them with :meth:`RewardConfig.from_args`."""
    default = RewardConfig()
    group = parser.add_argument_group("reward")

    def add(flag: str, name: str, help: str, **kwargs) -> None:
        value = getattr(default, name)
        help += " (default: %(default)s)"
        group.add_argument(flag, dest=f"reward_{name}", default=value, help=help, **kwargs)

    group.add_argument(
        "--reward-weights",
        type=_weights_option,
        default="pinyin=1",  # a string, so that the help shows it as it is typed
        metavar="NAME=WEIGHT,...",
        help=f"components of the reward among {', '.join(COMPONENT_NAMES)}; weight 0 only watches one; "
        f"{' and '.join(sorted(COSTLY))} cost a model's time and are measured only if named "
        "(default: %(default)s)",
    )
    add("--fusion", "fusion", choices=FUSIONS, help="mean, harmonic mean or product of powers, weighted")
    add("--curve", "curve", choices=tuple(CURVES), help="error rate to reward: cosyvoice/reward/curves.py")
    add("--tone", "tone", type=_tone_option, metavar="toned|toneless|mix:A", help="error rate to reward")
    add("--erhua", "erhua", choices=("keep", "fold"), help="count 儿 as a syllable or drop it, on both sides")
    numbers = (
        ("seconds_per_syllable", "expected speech time per syllable, pauses left out"),
        ("duration_tolerance", "factor around the expected duration that is still right"),
        ("duration_limit", "factor around the expected duration at which the duration component is 0"),
        ("max_loop_tokens", "speech tokens, 25 a second, for which a pattern may go on repeating"),
        ("pause_bound", "seconds of silence above which punctuation must ask for it"),
        ("no_end_scale", "factor on the score of an utterance that did not stop by itself"),
    )
    for name, text in numbers:
        add("--" + name.replace("_", "-"), name, text, type=type(getattr(default, name)), metavar="X")
