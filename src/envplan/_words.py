"""Jobs and numbers in words, as tables, pictures and pages show them."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `2 microbatches`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def job_in_words(schedule: str, stages: int, chunks: int, microbatches: int, gpus: int) -> str:
    """`interleaved, 4 stages x 2 chunks, 8 microbatches, 4 GPUs`.

    Args:
        gpus: of the whole job.
    """
    each = f" x {chunks} chunks" if chunks > 1 else ""
    return (
        f"{schedule}, {counted(stages, 'stage')}{each}, {counted(microbatches, 'microbatch')}, "
        f"{counted(gpus, 'GPU')}"
    )
