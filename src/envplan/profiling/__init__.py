"""Making stage profiles: what each stage does, and what it costs at every clock.

Enters: a model or a running job, and devices. Leaves: profile.csv and its sidecar.
The runtime, pictures and the command line may import it.
"""
