"""Stage profiles: what every operation costs at every frequency, read and checked once.

A profile is a CSV file with one row per option,

    stage,instruction,frequency,time,energy        int, str, MHz, s, J (per GPU, per operation)

the format that Zeus's pipeline frequency optimizer reads, so that its files work unchanged.
Optional columns are `config` (a free label of a second setting), `part` (rows of a part of the
operation; order of first appearance is order of execution), `time_std`, `energy_std` and
`samples`; other columns are ignored. Rows whose instruction is `blocking` give the power of a GPU
that waits for a neighbour. A sidecar NAME.meta.json beside NAME.csv may say where it comes from.

Times and energies become integers (ns, 10 fJ) here, and everything after this module trusts them.

Enters: a profile's files. Leaves: tables of options, their cost curves, the pipeline of the job.
Imports pipeline/ only; everything from replay/ on may import it.
"""

from envplan.clocks import ClockRequest, parse_clock_requests
from envplan.profile.clock_latency import ClockLatency, SwitchLatency
from envplan.profile.composition import ByParts, PartRun, compose_options, part_runs
from envplan.profile.curve import CostCurve, cost_curve
from envplan.profile.derived import Adjustments
from envplan.profile.instructions import (
    BLOCKING,
    DEFAULT_BLOCKING_POWER_W,
    INCLUDES_RECOMPUTATION,
)
from envplan.profile.model import Profile, builtin_paths, builtin_profiles
from envplan.profile.options import Option, OptionTable
from envplan.profile.part_costs import ClockSetting, ExactCost, OperationKey, PartCosts
from envplan.profile.reading import RAW_COLUMNS, ProfileRow
from envplan.profile.sidecar import ProfileMetadata

__all__ = [
    "BLOCKING",
    "DEFAULT_BLOCKING_POWER_W",
    "INCLUDES_RECOMPUTATION",
    "RAW_COLUMNS",
    "Adjustments",
    "ByParts",
    "ClockLatency",
    "ClockRequest",
    "ClockSetting",
    "CostCurve",
    "ExactCost",
    "OperationKey",
    "Option",
    "OptionTable",
    "PartCosts",
    "PartRun",
    "Profile",
    "ProfileMetadata",
    "ProfileRow",
    "SwitchLatency",
    "builtin_paths",
    "builtin_profiles",
    "compose_options",
    "cost_curve",
    "parse_clock_requests",
    "part_runs",
]
