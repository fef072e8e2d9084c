"""Tables for benchmarks: noisy ones, where no two stages tie, and ones of equal stages."""

from __future__ import annotations

import numpy as np

from envplan.profile import Profile
from envplan.profiling.modelled import modelled_profile
from envplan.profiling.models import model_of, named_model
from envplan.profiling.training_job import TrainingJob
from envplan.units import ENERGY_UNITS_PER_J

H100, GPT, BLOOM = "H100 64 x 5120", "A100 GPT-3 175B", "A100 Bloom 176B"
LLAMA, DEEPSEEK = "Llama-3 405B", "DeepSeek-V3"


def equal_stages(name: str) -> Profile:
    """A profile of equal stages but for the ends: H100 is modelled, GPT and BLOOM measured."""
    if name == H100:
        model = model_of("gpt", layers=64, hidden_size=5120)
        job = TrainingJob(model=model, num_stages=16, num_microbatches=512)
        return modelled_profile(job, "h100-sxm", name=name)
    measured = {GPT: "gpt3-175b", BLOOM: "bloom-176b"}[name]
    return Profile.builtin(f"sosp24-a100sxm-{measured}-8stage")


def large_job(name: str) -> Profile:
    """A modelled profile of a model as it was published, on H100, with its stages and chunks."""
    jobs = {
        LLAMA: TrainingJob(
            model=named_model("llama3-405b"),
            num_stages=16,
            chunks=7,
            num_microbatches=16,
            tensor_parallel=8,
            schedule="interleaved",
        ),
        DEEPSEEK: TrainingJob(
            model=named_model("deepseek-v3"),
            num_stages=16,
            chunks=2,
            num_microbatches=64,
            split_backward=True,
            schedule="dualpipe-v",
        ),
    }
    return modelled_profile(jobs[name], "h100-sxm", name=name)


def noisy_profile(num_stages: int, *, noise: float = 0.002, seed: int = 0) -> Profile:
    """The modelled A40 GPT-3 profile with seeded relative noise on every time and energy.

    Stages beyond eight repeat the inner ones of the eight-stage profile; the last stays the last.
    """
    modelled = Profile.builtin(f"a40-gpt3-1.3b-{4 if num_stages <= 4 else 8}stage")
    if num_stages > 4:
        last = modelled.num_stages - 1
        of = [min(s, 1 + (s - 1) % (last - 1)) for s in range(num_stages - 1)] + [last]
    else:
        of = [*range(num_stages - 1), 3]
    rng = np.random.default_rng(seed)
    rows = []
    for stage, source in enumerate(of):
        for instruction in ("forward", "backward"):
            table = modelled.table(source, instruction)
            for k in np.argsort(-table.frequency_mhz, kind="stable"):
                time = table.time_ns[k] * 1e-9 * (1 + rng.normal(0, noise))
                energy = table.energy_10fj[k] / ENERGY_UNITS_PER_J * (1 + rng.normal(0, noise))
                rows.append(
                    (
                        stage,
                        instruction,
                        int(table.frequency_mhz[k]),
                        round(time, 9),
                        round(energy, 6),
                    )
                )
    return Profile.from_rows(rows, name=f"noisy-a40-{num_stages}stage")
