"""The four measured stage profiles of 175-billion-parameter models, in envplan's format."""

from __future__ import annotations

from typing import Any, Final

from envplan import Profile, ProfileMetadata
from envplan.profile import BLOCKING
from envplan.profile.sidecar import Workload
from tools.sosp24.data import GPU_NAMES, WAITING_W, read_stage_profile

__all__ = ["SOURCE", "STAGE_PROFILES", "stage_profile"]

#: What every sidecar says of where its figures come from.
SOURCE: Final[dict[str, str]] = {
    "measured_by": "the authors of Perseus (Chung et al., SOSP 2024) on real GPUs",
    "artifact": (
        "'Reducing Energy Bloat in Large Model Training', "
        "https://github.com/ml-energy/zeus, branch kronos, folder sosp24_data"
    ),
    "license": "Apache-2.0",
}

# name -> (GPU, file, model, savings of Perseus in Table 6 for 12, 24, 48 and 96 microbatches, %)
STAGE_PROFILES: Final = {
    "sosp24-a100sxm-gpt3-175b-8stage": (
        "a100sxm",
        "gpt3-175b+a100_sxm_bf16.csv",
        "GPT-3 175B",
        (15.2, 14.2, 13.6, 13.3),
    ),
    "sosp24-a40-gpt3-175b-8stage": (
        "a40",
        "gpt3-175b+a40_bf16.csv",
        "GPT-3 175B",
        (11.8, 10.2, 9.3, 8.9),
    ),
    "sosp24-a100sxm-bloom-176b-8stage": (
        "a100sxm",
        "bloom+a100_sxm_bf16.csv",
        "Bloom 176B",
        (10.5, 7.1, 5.2, 4.3),
    ),
    "sosp24-a40-bloom-176b-8stage": (
        "a40",
        "bloom+a40_bf16.csv",
        "Bloom 176B",
        (7.0, 4.5, 3.1, 2.4),
    ),
}

_MICROBATCHES: Final = (12, 24, 48, 96)
_DEFAULT: Final = 24
_TENSOR_PARALLEL: Final = 8


def stage_profile(name: str) -> Profile:
    """One of STAGE_PROFILES, with times and energies as they were measured.

    The waiting power is that of a GPU, so it goes with the rows as they are: scaling times by 10
    and energies by 10 for the whole stage, and by 8 for its GPUs, changes all energies alike.
    """
    gpu, file, model, savings = STAGE_PROFILES[name]
    waiting_w = WAITING_W[gpu.removesuffix("sxm")]
    table = read_stage_profile(file).sort_values(
        ["stage", "instruction", "frequency"], ascending=[True, False, False]
    )
    rows: list[tuple[Any, ...]] = [
        (int(stage), instruction, int(clock), float(f"{time:.9g}"), float(f"{energy:.9g}"))
        for stage, instruction, clock, time, energy in table.itertuples(index=False)
    ]
    top = int(table["frequency"].max())
    rows += [(stage, BLOCKING, top, 1.0, waiting_w) for stage in range(8)]
    extra: dict[str, Any] = {
        **SOURCE,
        "precision": "bf16",
        "blocking_power_w": waiting_w,
        "identified": {
            "time": "measured",
            "energy": "measured",
            "blocking": (
                "one measured figure for all clocks and stages, from the artifact; its row names "
                "the highest clock because a row must name one"
            ),
        },
        "scale": {
            "time": 10,
            "energy_per_gpu": 10,
            "gpus_per_stage": _TENSOR_PARALLEL,
            "note": (
                "The rows are as measured: a tenth of a stage on one of its 8 GPUs. The paper's "
                "emulation multiplies times by 10 and energies by 10 x 8. The blocking power is "
                "that of one GPU and needs no scale, so savings and slowdowns do not change."
            ),
        },
        "published": {
            "savings_percent": savings[_MICROBATCHES.index(_DEFAULT)],
            "slowdown_percent": 0.0,
            "source": "Perseus (SOSP 2024), Table 6",
            "note": f"With {_DEFAULT} microbatches, over all GPUs at maximum frequency.",
        },
        "published_savings": {
            "source": "Perseus (SOSP 2024), Table 6",
            "num_microbatches": list(_MICROBATCHES),
            "savings_percent": list(savings),
            "note": (
                "Percent of the energy of all GPUs at the maximum frequency. Perseus's fastest "
                "plan waits at the blocking power until the iteration time of that baseline."
            ),
        },
    }
    metadata = ProfileMetadata(
        gpu=GPU_NAMES[gpu],
        source="measured",
        workload=f"{model} training, 8 stages, tensor parallel 8",
        tensor_parallel=_TENSOR_PARALLEL,
        schedule="1f1b",
        num_microbatches=_DEFAULT,
        job=Workload(stages=8, gpus_per_stage=_TENSOR_PARALLEL),
        extra=extra,
    )
    return Profile.from_rows(rows, name=name, metadata=metadata)
