"""Schedules from elsewhere: PyTorch's CSV and objects, Megatron's configurations, recorded traces.

Each reader finds out which operations every rank runs in which order; Pipeline.from_orders then
gives them the data dependencies of a generated schedule, and refuses what could not run.
"""

from __future__ import annotations

from envplan.pipeline.imports.chrome import TraceMapping, read_chrome_traces
from envplan.pipeline.imports.megatron import layers_per_stage, read_megatron, read_megatron_file
from envplan.pipeline.imports.steps import ImportedSchedule
from envplan.pipeline.imports.torch_csv import as_torch_csv, read_torch_csv, read_torch_schedule

__all__ = [
    "ImportedSchedule",
    "TraceMapping",
    "as_torch_csv",
    "layers_per_stage",
    "read_chrome_traces",
    "read_megatron",
    "read_megatron_file",
    "read_torch_csv",
    "read_torch_schedule",
]
