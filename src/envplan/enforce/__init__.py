"""From a plan to what every rank of a job sets its clock to, and the files that say so."""
