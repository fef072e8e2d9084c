"""Stages in torch, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: torch)")

from envplan.errors import InputError  # noqa: E402
from envplan.profiling.entry import load_entry  # noqa: E402
from envplan.profiling.models import BERT_1_3B, GPT3_1_3B, T5_3B  # noqa: E402
from envplan.profiling.torch_workloads import TorchWorkload, transformer  # noqa: E402

SMALL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "vocabulary_size": 96,
    "sequence_length": 16,
}
GPT = replace(GPT3_1_3B, name="small", **SMALL)


def small(workload: str = "gpt", model: object = GPT, stages: int = 2) -> TorchWorkload:
    return transformer(
        workload,
        model,  # type: ignore[arg-type]
        num_stages=stages,
        microbatch_size=2,
        dtype="float32",
        device="cpu",
    )


def linear(size: int) -> tuple[object, tuple[object, ...]]:
    return torch.nn.Linear(size, size), (torch.ones(3, size),)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    ("workload", "model"), [("gpt", GPT), ("bert", replace(BERT_1_3B, **SMALL))]
)
def test_every_stage_runs_forward_and_backward(workload: str, model: object, stages: int) -> None:
    made = small(workload, model, stages)
    assert made.num_stages == stages
    for stage in range(stages):
        made.forward(stage)
        made.backward(stage)
        made.backward(stage)
        made.synchronize()
        assert made._module is not None
        assert all(p.grad is not None for p in made._module.parameters())


def test_a_second_backward_adds_the_same_gradients() -> None:
    made = TorchWorkload([lambda: linear(4)], description="", device="cpu")
    made.forward(0)
    made.backward(0)
    once = [p.grad.clone() for p in made._module.parameters()]  # type: ignore[union-attr]
    made.backward(0)
    for parameter, grad in zip(made._module.parameters(), once, strict=True):  # type: ignore[union-attr]
        assert torch.equal(parameter.grad, 2 * grad)


def test_hidden_states_get_gradients_and_tokens_do_not() -> None:
    made = small(stages=2)
    made.forward(0)
    assert not made._inputs[0].is_floating_point()
    made.forward(1)
    made.backward(1)
    assert made._inputs[0].grad.shape == (2, 16, 32)


def test_the_last_stage_ends_in_a_loss() -> None:
    made = small(stages=2)
    made.forward(1)
    assert made._outputs[0].shape == ()
    bare = small(model=replace(GPT, vocabulary_size=0), stages=2)
    bare.forward(1)
    assert bare._outputs[0].shape == (2, 16, 32)


def test_gpt_attends_to_the_past_only() -> None:
    for workload, same in (("gpt", True), ("bert", False)):
        made = small(workload, stages=2)
        made.forward(0)
        first = made._outputs[0][:, 0].clone()
        made._inputs[0][:, -1] = (made._inputs[0][:, -1] + 1) % 96
        made.forward(0)
        assert torch.equal(made._outputs[0][:, 0], first) is same


def test_the_description_tells_workloads_apart() -> None:
    description = small(stages=2).description
    for word in ("small training", "2 stages of ", "2 x 16 tokens", "float32", torch.__version__):
        assert word in description
    assert small(stages=4).description != description


def test_workloads_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(InputError, match="t5 can be modelled"):
        small("t5", T5_3B)


def test_a_gpu_that_torch_cannot_use_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch can use a GPU here")
    with pytest.raises(InputError, match="cannot use the GPU"):
        TorchWorkload([], description="", device="cuda:0")


def test_a_stage_that_fails_says_which_and_why() -> None:
    made = TorchWorkload(
        [lambda: linear(2), lambda: (torch.nn.Linear(3, 3), (torch.ones(2),))],
        description="",
        device="cpu",
    )
    made.forward(0)
    with pytest.raises(InputError, match="forward of stage 1 fails"):
        made.forward(1)


def test_a_stage_without_parameters_behind_its_output_is_refused() -> None:
    def counting() -> tuple[object, tuple[object, ...]]:
        return torch.nn.Identity(), (torch.arange(3),)

    made = TorchWorkload([counting], description="", device="cpu")
    with pytest.raises(InputError, match="depends on its parameters"):
        made.forward(0)


def test_out_of_memory_is_said_in_a_line() -> None:
    class Hungry(torch.nn.Module):
        def forward(self, x: object) -> object:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    made = TorchWorkload([lambda: (Hungry(), (torch.ones(2),))], description="", device="cpu")
    with pytest.raises(InputError, match="stage 0 does not fit"):
        made.forward(0)


def test_the_users_own_modules_become_a_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_stages.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return [(torch.nn.Linear(4, 8), (torch.ones(2, 4),)),\n"
        "            (torch.nn.Linear(8, 1), [torch.ones(2, 8)])]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = load_entry("own_stages:build", "cpu")
    assert made.num_stages == 2
    for stage in range(2):
        made.forward(stage)
        made.backward(stage)
    made.wait(0.001)
