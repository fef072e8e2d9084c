#!/bin/sh
# Epilog= in slurm.conf. Slurm has killed all processes of the job by now, maybe also those that give
# clocks back. One that is left set is given back here; if that fails, the node is drained.
set -eu
ENVPLAN=${ENVPLAN:-/opt/envplan/bin/envplan}

"$ENVPLAN" guard --once --quiet
