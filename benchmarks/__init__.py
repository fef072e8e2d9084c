"""What envplan reaches, measured: `python -m benchmarks` from a checkout with envplan installed.

(a) against lowtime, (b) against one minimum-cost-flow solve, (c) growth, (d) quality of plans.
Tables go to standard output as Markdown, progress to standard error, all raw numbers to out/bench/.
"""
