"""torchtitan's own trainer under a frequency plan, by the recipe in examples; two gloo processes.

What torchtitan asks of a GPU is answered by stand-ins, see torchtitan_on_cpu.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from envplan.pipeline import Pipeline
from shim_helpers import A40, frequency_plan, logged_lines

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

STEPS, MICROBATCHES = 3, 4


def test_the_recipe_follows_the_plan(tmp_path: Path) -> None:
    from importlib.metadata import version

    from torchtitan_on_cpu import write_data

    pipeline = Pipeline("interleaved", 2, MICROBATCHES, num_chunks=2)
    frequency_plan(pipeline, gpu=A40).save(tmp_path / "run.freqplan.json")
    assets, text = write_data(tmp_path)
    options = {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
        "training.local_batch_size": MICROBATCHES,
        "training.seq_len": 32,
        "training.steps": STEPS,
        "training.mixed_precision_param": "float32",
    }
    if version("torchtitan").startswith("0.2"):
        options |= {"model.name": "llama3", "model.flavor": "debugmodel"}
        options |= {"model.hf_assets_path": assets, "training.dataset_path": text}
        flags = []
    else:
        options |= {"module": "llama3", "config": "llama3_debugmodel", "hf_assets_path": assets}
        options |= {"dataloader.dataset_path": text}
        flags = ["--training.disable_cuda_graphs", "--validator.no-enable"]
    named = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    script = Path(__file__).with_name("torchtitan_on_cpu.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, str(script), *named, *flags],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = logged_lines(tmp_path / "run.jsonl")
    steps = [line for line in lines if line["event"] == "step"]
    assert sorted((line["rank"], line["step"]) for line in steps) == [
        (rank, step) for rank in (0, 1) for step in range(STEPS)
    ]
    assert {line["mismatches"] for line in steps} == {0}
    assert {line["asked"] for line in steps} == {len(pipeline.operations) // 2}
