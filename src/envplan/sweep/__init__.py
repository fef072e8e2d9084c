"""Sweeps: many plans in one go, on several processes; what is done is never done again.

Enters: a TOML file of questions. Leaves: a row for each, as CSV or Parquet.
Pictures, checks and the command line may import it.
"""

from envplan.sweep.config import SweepConfig, read_config
from envplan.sweep.running import SweepResult, run_sweep
from envplan.sweep.table import SweepRow, write_table

__all__ = ["SweepConfig", "SweepResult", "SweepRow", "read_config", "run_sweep", "write_table"]
