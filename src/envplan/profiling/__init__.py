"""Making stage profiles: what each stage does, and what it costs at every clock."""
