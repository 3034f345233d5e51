"""``cosyvoice2.yaml`` read as data.

The published file is HyperPyYAML: tags name Python classes to build. Nothing is built here. Tags are
dropped, references are looked up, and the numbers that matter become dataclasses whose defaults are the
published values, so that older files that lack some of them still load.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cosyvoice.flow.config import EncoderConfig, EstimatorConfig, FlowConfig
from cosyvoice.hift.config import HiFTConfig

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingConfig:
    """Repetition-aware sampling of the language model."""

    top_p: float = 0.8
    top_k: int = 25
    win_size: int = 10
    tau_r: float = 0.1


@dataclass(frozen=True)
class FolderConfig:
    """The numbers of ``cosyvoice2.yaml``."""

    sample_rate: int = 24000
    token_frame_rate: int = 25
    token_mel_ratio: int = 2
    spk_embed_dim: int = 192
    llm_input_size: int = 896
    llm_output_size: int = 896
    speech_token_size: int = 6561
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    hift: HiFTConfig = field(default_factory=HiFTConfig)


class YamlError(ValueError):
    """A yaml that does not describe a CosyVoice2. The message names key, found and expected."""


# Switches that select a network this project does not have. Only these values may appear.
FIXED: dict[str, dict[str, Any]] = {
    "flow.encoder": {
        "normalize_before": True,
        "input_layer": "linear",
        "pos_enc_layer_type": "rel_pos_espnet",
        "selfattention_layer_type": "rel_selfattn",
        "use_cnn_module": False,
        "macaron_style": False,
    },
    "flow.decoder.cfm_params": {"solver": "euler", "t_scheduler": "cosine"},
    "flow.decoder.estimator": {"act_fn": "gelu"},
    "flow.decoder": {"n_spks": 1},
}


def read_yaml(path: str | Path) -> FolderConfig:
    """Parse a ``cosyvoice2.yaml``.

    Raises:
        YamlError: not yaml, or a value of the wrong kind; the message does not name the file.
    """
    import yaml  # here, because whoever brings a FolderConfig needs no yaml parser

    class Reference(str):
        """The text of a ``!ref``."""

    class TagFreeLoader(yaml.SafeLoader):
        """Reads every tagged node as the plain data under it."""

    def plain(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return Reference(node.value) if tag == "!ref" else node.value

    TagFreeLoader.add_multi_constructor("", plain)
    try:
        root = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=TagFreeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise YamlError(f"not readable as yaml: {error}") from error
    if not isinstance(root, dict):
        raise YamlError(f"found {type(root).__name__} at the top, expected a mapping")

    def look_up(value: Any, depth: int = 0) -> Any:
        """Replace references by what they name: one key, or a product of keys and numbers."""
        if depth > 20:
            raise YamlError("references go in a circle, expected them to end at a value")
        if isinstance(value, dict):
            return {key: look_up(item, depth) for key, item in value.items()}
        if isinstance(value, list):
            return [look_up(item, depth) for item in value]
        if not isinstance(value, Reference):
            return value
        factors = []
        for text in value.split("*"):
            text = text.strip()
            item: Any = root
            if not (text.startswith("<") and text.endswith(">")):
                item = yaml.safe_load(text)
            else:
                for part in text[1:-1].split("."):
                    item = item.get(part) if isinstance(item, dict) else None
            factors.append(look_up(item, depth + 1))
        if len(factors) == 1:
            return factors[0]
        numbers = all(isinstance(factor, int | float) for factor in factors)
        return math.prod(factors) if numbers else str(value)

    needed = [each.name for each in dataclasses.fields(FolderConfig)] + ["llm"]
    return _build({key: look_up(root[key]) for key in needed if key in root})


def _build(root: Mapping[str, Any]) -> FolderConfig:
    flow, hift, llm = (_mapping(root, key, key) for key in ("flow", "hift", "llm"))
    encoder = _mapping(flow, "encoder", "flow.encoder")
    decoder = _mapping(flow, "decoder", "flow.decoder")
    estimator = _mapping(decoder, "estimator", "flow.decoder.estimator")
    cfm = _mapping(decoder, "cfm_params", "flow.decoder.cfm_params")
    cfm = _mapping(cfm, "content", "flow.decoder.cfm_params.content") or cfm
    for where, node in {
        "flow.encoder": encoder,
        "flow.decoder": decoder,
        "flow.decoder.cfm_params": cfm,
        "flow.decoder.estimator": estimator,
    }.items():
        for key, expected in FIXED[where].items():
            if node.get(key, expected) != expected:
                raise YamlError(f"key {where}.{key}: found {node[key]!r}, expected {expected!r}")

    if "channels" in estimator:
        channels = estimator["channels"]
        if not isinstance(channels, list) or len(channels) != 1:
            raise YamlError(f"key flow.decoder.estimator.channels: found {channels!r}, expected one number")
        estimator = {**estimator, "channels": channels[0]}
    flow = {**flow, **{key: cfm[key] for key in ("inference_cfg_rate",) if key in cfm}}
    if "istft_params" in hift:
        hift = {**hift, **_mapping(hift, "istft_params", "hift.istft_params")}
    f0 = _mapping(hift, "f0_predictor", "hift.f0_predictor")
    if "cond_channels" in f0:
        hift = {**hift, "f0_channels": f0["cond_channels"]}
    llm = {key: llm[key] for key in ("speech_token_size",) if key in llm}
    sampling = _mapping(_mapping(root, "llm", "llm"), "sampling", "llm.sampling")

    config = _take(
        FolderConfig,
        {**root, **llm},
        "",
        sampling=_take(SamplingConfig, sampling, "llm.sampling."),
        flow=_take(
            FlowConfig,
            flow,
            "flow.",
            encoder=_take(EncoderConfig, encoder, "flow.encoder."),
            estimator=_take(EstimatorConfig, estimator, "flow.decoder.estimator."),
        ),
        hift=_take(HiFTConfig, hift, "hift."),
    )
    _check(config)
    return config


def _mapping(node: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The mapping under a key; empty when there is none."""
    value = node.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise YamlError(f"key {where}: found {value!r}, expected a mapping")
    return value


def _take(kind: type[T], node: Mapping[str, Any], where: str, **parts: Any) -> T:
    """Fill a dataclass from the keys of the same names; ``parts`` are fields already built."""
    values = dict(parts)
    for each in dataclasses.fields(kind):
        if each.name in parts or each.name not in node:
            continue
        value = node[each.name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if each.type == "int":
            found, good, kind_name = value, whole, "a whole number"
        elif each.type == "float":
            found, good, kind_name = value, whole or isinstance(value, float), "a number"
        else:
            found, kind_name = _tuple(value), "a list of whole numbers"
            good = isinstance(found, tuple) and bool(found)
        if not good:
            raise YamlError(f"key {where}{each.name}: found {value!r}, expected {kind_name}")
        values[each.name] = found
    return kind(**values)


def _tuple(value: Any) -> Any:
    """Nested lists of whole numbers as tuples; None for anything else."""
    if not isinstance(value, list):
        return None
    items = tuple(item if type(item) is int else _tuple(item) for item in value)
    return None if None in items else items


def _check(config: FolderConfig) -> None:
    """Relations between values that the networks rely on."""
    flow, hift = config.flow, config.hift
    bins, stages = flow.output_size, len(hift.upsample_rates)
    facts = [
        ("flow.encoder.input_size", flow.encoder.input_size, flow.input_size),
        ("flow.decoder.estimator.in_channels", flow.estimator.in_channels, 4 * bins),
        ("flow.decoder.estimator.out_channels", flow.estimator.out_channels, bins),
        ("hift.in_channels", hift.in_channels, bins),
        ("hift.sampling_rate", hift.sampling_rate, config.sample_rate),
        (
            "hift samples per mel frame",
            hift.hop * config.token_frame_rate * flow.token_mel_ratio,
            config.sample_rate,
        ),
        ("flow.encoder.output_size modulo heads", flow.encoder.output_size % flow.encoder.attention_heads, 0),
        ("length of hift.upsample_kernel_sizes", len(hift.upsample_kernel_sizes), stages),
        ("length of hift.source_resblock_kernel_sizes", len(hift.source_resblock_kernel_sizes), stages),
        ("length of hift.source_resblock_dilation_sizes", len(hift.source_resblock_dilation_sizes), stages),
        (
            "length of hift.resblock_dilation_sizes",
            len(hift.resblock_dilation_sizes),
            len(hift.resblock_kernel_sizes),
        ),
    ]
    for name, found, expected in facts:
        if found != expected:
            raise YamlError(f"{name}: found {found}, expected {expected}")
