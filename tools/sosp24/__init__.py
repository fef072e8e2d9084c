"""Makes the measured `sosp24-` profiles from what the authors of Perseus (SOSP 2024) published.

    python -m tools.sosp24 [FOLDER]

data.py reads the tables in benchmarks/data/sosp24. stages.py turns the four stage profiles into
envplan's format. For the ten workloads of real runs, times.py finds how long an operation takes at
each clock, overheads.py what an iteration spends outside its operations, power.py what an
operation draws at each clock, and workloads.py puts these into a profile and its sidecar.
"""
