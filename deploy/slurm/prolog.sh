#!/bin/sh
# Prolog= in slurm.conf. Gives back what an earlier job left, so that no job starts on a slow GPU.
# A prolog that fails drains its node, so a node whose clocks cannot be given back takes no job.
set -eu
ENVPLAN=${ENVPLAN:-/opt/envplan/bin/envplan}

"$ENVPLAN" guard --once --quiet
