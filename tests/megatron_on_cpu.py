"""Runs examples/megatron_pipeline.py on CPUs: what Megatron asks of a GPU is answered by stand-ins.
It is given the arguments of the example.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":
    from framework_worker import OnCpu

    torch.set_num_threads(1)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.set_device = lambda _: None
    cuda.synchronize = lambda: None
    torch.nn.Module.cuda = lambda module: module
    start: Any = dist.init_process_group
    dist.init_process_group = lambda _: start("gloo")
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import megatron_pipeline

    with OnCpu():
        megatron_pipeline.main(
            backend="modelled",
            gpu="a40",
            count=int(os.environ["WORLD_SIZE"]),
            every_request=True,
        )
