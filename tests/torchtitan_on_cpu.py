"""Runs examples/torchtitan_train.py on CPUs: torchtitan's trainer, with stand-ins for what it asks
of a GPU. It is given the folder to work in and the arguments of the example.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.nn.attention import flex_attention

WORDS = 1000


def stand_in() -> None:
    """A device module of the CPU with a GPU's questions answered."""
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "CPU"
    cpu.current_device = lambda: 0
    cpu.device_count = lambda: 0
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**30)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda *_: {}
    barrier = dist.barrier
    dist.barrier = lambda group=None, **_: barrier(group)
    torch.compile = lambda function=None, **_: function if function else lambda f: f
    flex_attention.flex_attention = causal


def causal(q: Any, k: Any, v: Any, **how: Any) -> Any:
    """In the place of FlexAttention, which has no backward on CPUs: tokens see those before."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=how.get("enable_gqa", False)
    )
    return (out, SimpleNamespace(lse=None)) if how.get("return_aux") else out


def write_data(folder: Path) -> tuple[Path, Path]:
    """A tokenizer of numbers, and a text of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<eos>": 0, "<bos>": 1, "<unk>": 2} | {str(k): k + 3 for k in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assets, text = folder / "tokenizer", folder / "text"
    for made in (assets, text):
        made.mkdir(exist_ok=True)
    tokenizer.save(str(assets / "tokenizer.json"))
    (assets / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"})
    )
    line = json.dumps({"text": " ".join(str(k % WORDS) for k in range(5000))})
    (text / "data.json").write_text("\n".join([line] * 50))
    return assets, text


if __name__ == "__main__":
    stand_in()
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import torchtitan_train

    torchtitan_train.main(backend="modelled", gpu="a40", count=2, every_request=True)
