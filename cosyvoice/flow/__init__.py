"""Flow matching: speech tokens to mel."""

from cosyvoice.flow.config import EncoderConfig, EstimatorConfig, FlowConfig
from cosyvoice.flow.flow import Flow
from cosyvoice.flow.solver import MAX_FRAMES, noise_table, solve, time_grid

__all__ = [
    "MAX_FRAMES",
    "EncoderConfig",
    "EstimatorConfig",
    "Flow",
    "FlowConfig",
    "noise_table",
    "solve",
    "time_grid",
]
