"""Stages in torch, on the CPU."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: torch)")

from envplan.devices.modelled import ModelledDevice, gpu  # noqa: E402
from envplan.errors import InputError  # noqa: E402
from envplan.profiling.entry import load_entry  # noqa: E402
from envplan.profiling.measuring import wait_with  # noqa: E402
from envplan.profiling.models import (  # noqa: E402
    BERT_1_3B,
    GPT3_1_3B,
    RESNET_152,
    T5_3B,
    WIDE_RESNET_101_8,
)
from envplan.profiling.resnet import ConvolutionalModel  # noqa: E402
from envplan.profiling.timers import Timer  # noqa: E402
from envplan.profiling.torch_models import model_stages  # noqa: E402
from envplan.profiling.torch_stages import TorchStages, torch_stages  # noqa: E402
from envplan.profiling.training_job import Model, TrainingJob  # noqa: E402

torch.set_num_threads(1)  # small work, and others want the cores

SMALL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "vocabulary_size": 96,
    "sequence_length": 16,
}
HALVES = {"encoder_layers": 2, "num_layers": 2, "head_size": 8, "feed_forward_size": 64}
GPT = replace(GPT3_1_3B, name="small", **SMALL)
T5 = replace(T5_3B, name="small T5", **{**SMALL, **HALVES})
RESNET = replace(
    WIDE_RESNET_101_8, name="small", blocks=(1, 2, 1, 1), width_factor=1, image_size=32, classes=10
)
WORKLOADS: dict[str, Model] = {
    "gpt": GPT,
    "bert": replace(BERT_1_3B, **SMALL),
    "t5": T5,
    "wide-resnet": RESNET,
}


def job(model: Model, stages: int = 2, **more: Any) -> TrainingJob:
    usual = {"microbatch_size": 2, "dtype": "float32"}
    return TrainingJob(model=model, num_stages=stages, **{**usual, **more})


def small(workload: str = "gpt", model: Any = None, stages: int = 2, **more: Any) -> TorchStages:
    return torch_stages(job(model or WORKLOADS[workload], stages, **more), "cpu")


def gradients(runner: TorchStages) -> list[Any]:
    return [p.grad.clone() for p in runner.module.parameters()]


def linear(size: int) -> tuple[object, tuple[object, ...]]:
    return torch.nn.Linear(size, size), (torch.ones(3, size),)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_recomputation_changes_no_gradient(workload: str) -> None:
    kept, again = small(workload), small(workload, recompute=True)
    assert "recomputed" in again.description
    for stage in range(2):
        for runner in (kept, again):
            runner.forward(stage)
            runner.backward(stage)
            runner.backward(stage)
            runner.synchronize()
        for a, b in zip(gradients(kept), gradients(again), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_a_stage_sends_is_what_the_next_one_takes(workload: str) -> None:
    runner = small(workload, stages=4)
    for stage in range(3):
        runner.forward(stage)
        sent = [tuple(output.shape) for output in runner.outputs]
        runner.forward(stage + 1)
        taken = [tuple(one.shape) for one in runner.inputs if one.is_floating_point()]
        assert sent == taken


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_two_parts_of_a_backward_make_the_gradients_of_the_whole_again_and_again(
    workload: str, stages: int
) -> None:
    whole, split = small(workload, stages=stages), small(workload, stages=stages)
    for stage in range(stages):
        whole.forward(stage)
        split.forward(stage)
        split.backward_input(stage)
        split.backward_input(stage)
        assert all(p.grad is None for p in split.module.parameters())
        for _ in range(2):
            whole.backward(stage)
            split.backward_weight(stage)
            for expected, found in zip(gradients(whole), gradients(split), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", [GPT3_1_3B, T5_3B, WIDE_RESNET_101_8, RESNET_152])
@pytest.mark.parametrize("ranks", [1, 4])
def test_products_of_the_full_sizes_are_those_of_the_modelled_work(
    model: Model, ranks: int
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    if ranks > 1 and model in (WIDE_RESNET_101_8, RESNET_152):
        pytest.skip("not split by tensor parallelism")
    how = job(model, 4, tensor_parallel=ranks, dtype="bfloat16")
    works = how.stages(lambda work: work.flops)
    stages = model_stages(how, [work.num_layers for work in works], "meta")
    for work, stage in zip(works, stages, strict=True):
        module, inputs = stage()
        with FlopCounterMode(display=False) as counter:
            module(*inputs)
        assert counter.get_total_flops() == pytest.approx(work.whole.forward.flops, rel=1e-9)


def test_layers_of_stages_are_as_given() -> None:
    runner = small(layers=[1, 3])
    assert "2 stages of 1-3 layers" in runner.description
    with pytest.raises(InputError, match="has 5 layers on 2 stages, but small has 4 layers"):
        small(layers=[2, 3])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_products_for_weights_gradients_are_those_of_the_modelled_work(workload: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    runner = small(workload, stages=1)
    (work,) = job(WORKLOADS[workload], 1).stages(lambda work: work.flops)
    runner.forward(0)
    runner.backward_weight(0)
    with FlopCounterMode(display=False) as counter:
        runner.backward_weight(0)
    assert counter.get_total_flops() == pytest.approx(work.whole.backward_weight.flops, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(GPT3_1_3B, 1.3e9), (T5_3B, 2.9e9), (WIDE_RESNET_101_8, 1.5e9)],
)
def test_the_full_sizes_have_as_many_parameters_as_they_are_named_for(
    model: Model, parameters: float
) -> None:
    (stage,) = model_stages(job(model, dtype="bfloat16"), [len(model.units(1, 1))], "meta")
    module, _ = stage()
    found = sum(parameter.numel() for parameter in module.parameters())
    if not isinstance(model, ConvolutionalModel):
        found -= model.vocabulary_size * model.hidden_size  # published sizes count it once
    assert found == pytest.approx(parameters, rel=0.05)


def test_a_layers_parameters_are_counted_exactly() -> None:
    h, words, length = 32, 96, 16
    layer = 12 * h * h + 13 * h
    runner = [stage()[0] for stage in model_stages(job(GPT), [1, 2, 1], "cpu")]
    sizes = [sum(p.numel() for p in module.parameters()) for module in runner]
    assert sizes == [layer + (words + length) * h, 2 * layer, layer + words * h + 2 * h]


@pytest.mark.parametrize("workload", ["gpt", "bert", "t5"])
def test_a_rank_holds_its_share_of_each_product(workload: str) -> None:
    whole, shard = small(workload, stages=2), small(workload, stages=2, tensor_parallel=2)
    for stage in range(2):
        for runner in (whole, shard):
            runner.forward(stage)
            runner.backward(stage)
        assert [one.shape for one in shard.outputs] == [one.shape for one in whole.outputs]
        matrices = [
            [p.numel() for p in runner.module.parameters() if p.dim() == 2]
            for runner in (whole, shard)
        ]
        positions = {16 * 32}  # the embedding of positions is every rank's own
        assert {a / b for a, b in zip(*matrices, strict=True) if a not in positions} == {2.0}
    assert "1 of 2 tensor-parallel ranks" in shard.description


def test_recomputation_runs_each_layer_again_in_the_backward() -> None:
    for recompute, again in ((False, 0), (True, 1)):
        runner = small(stages=2, recompute=recompute)
        runner.forward(0)
        runs: list[int] = []
        runner.module.decoder.layers[0].get_submodule(
            "layer.attention" if recompute else "attention"
        ).register_forward_hook(lambda *_, runs=runs: runs.append(1))
        runner.backward(0)
        runner.backward(0)
        assert len(runs) == 2 * again


def test_the_decoder_attends_to_the_past_and_to_all_the_encoder_read() -> None:
    # Two stages of four layers: the first is the encoder, the second the decoder.
    stages = model_stages(job(T5), [2, 1, 1], "cpu")
    module, (source, tokens) = stages[1]()
    before = module(source, tokens)[0]
    tokens[:, -1] = (tokens[:, -1] + 1) % 96
    after = module(source, tokens)[0]
    assert torch.equal(after[:, :-1], before[:, :-1])
    assert not torch.equal(after[:, -1], before[:, -1])
    source[:, -1] += 1
    assert not torch.equal(module(source, tokens)[0][:, 0], after[:, 0])


@pytest.mark.parametrize("border", [0, 1, 2, 3])
def test_the_decoder_may_begin_anywhere_in_a_stage(border: int) -> None:
    layers = [1 + (stage == border) for stage in range(3)] if border < 3 else [2, 1, 1]
    model = replace(T5, encoder_layers=1 + border % 3, num_layers=3 - border % 3)
    whole = [stage() for stage in model_stages(job(model), layers, "cpu")]
    assert sum(layers) == 4
    for module, inputs in whole:
        module(*inputs)
    assert sum(module.norm is not None for module, _ in whole) == 1


def test_hidden_states_get_gradients_and_tokens_and_images_do_not() -> None:
    runner = small(stages=2)
    runner.forward(0)
    assert not runner.inputs[0].is_floating_point()
    runner.forward(1)
    runner.backward(1)
    assert runner.inputs[0].grad.shape == (2, 16, 32)
    images = small("wide-resnet", stages=2)
    images.forward(0)
    assert not images.inputs[0].requires_grad


def test_the_last_stage_ends_in_a_loss() -> None:
    runner = small(stages=2)
    runner.forward(1)
    assert runner.outputs[0].shape == ()
    bare = small(model=replace(GPT, vocabulary_size=0), stages=2)
    bare.forward(1)
    assert bare.outputs[0].shape == (2, 16, 32)


def test_gpt_attends_to_the_past_only() -> None:
    for same in (True, False):
        runner = small(model=replace(GPT, causal=same))
        runner.forward(0)
        first = runner.outputs[0][:, 0].clone()
        runner.inputs[0][:, -1] = (runner.inputs[0][:, -1] + 1) % 96
        runner.forward(0)
        assert torch.equal(runner.outputs[0][:, 0], first) is same


def test_the_description_tells_workloads_apart() -> None:
    description = small(stages=2).description
    for word in ("small training", "2 stages of ", "2 x 16 tokens", "float32", torch.__version__):
        assert word in description
    assert small(stages=4).description != description


def test_a_gpu_that_torch_cannot_use_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch can use a GPU here")
    with pytest.raises(InputError, match="cannot use the GPU"):
        TorchStages([], description="", device="cuda:0")


def test_a_stage_without_parameters_behind_its_output_is_refused() -> None:
    def counting() -> tuple[object, tuple[object, ...]]:
        return torch.nn.Identity(), (torch.arange(3),)

    runner = TorchStages([counting], description="", device="cpu")
    with pytest.raises(InputError, match="depends on its parameters"):
        runner.forward(0)


class Bare(torch.nn.Module):  # type: ignore[misc]
    """Integers times a weight of its own, and a part that gradients never pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.part = torch.nn.Identity()

    def forward(self, tokens: Any) -> Any:
        return (self.weight * self.part(tokens)).sum()


@pytest.mark.parametrize("part", ["backward_input", "backward_weight"])
def test_a_stage_that_passes_no_gradients_on_cannot_be_split(part: str) -> None:
    runner = TorchStages([lambda: (Bare(), (torch.arange(3),))], description="", device="cpu")
    runner.forward(0)
    with pytest.raises(InputError, match="its backward has one part only"):
        getattr(runner, part)(0)


def test_waiting_is_spinning_unless_there_are_peers() -> None:
    runner = TorchStages([], description="", device="cpu")
    assert runner.waiting is None
    assert runner.timer is None  # the host's clock times a CPU

    class TwoProcesses:
        description = "of two processes"
        asked: list[float] = []  # noqa: RUF012

        def wait(self, seconds: float) -> None:
            self.asked.append(seconds)

    runner.peers = TwoProcesses()  # type: ignore[assignment]
    runner.wait(0.25)
    assert TwoProcesses.asked == [0.25]
    assert runner.waiting == "of two processes"


def test_without_a_second_gpu_that_answers_it_spins_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there are two GPUs here")
    runner = small(stages=2)
    runner.timer = Timer(time.monotonic)  # as if it ran on a GPU
    device = ModelledDevice(gpu("a40"), 0, time.monotonic_ns)
    with ExitStack() as stack:
        wait_with(runner, device, [device], stack)
    assert runner.peers is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot wait for each other" in said
    assert "idle spinning" in said


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
    runner = load_entry("own_stages:build", "cpu")
    assert runner.num_stages == 2
    for stage in range(2):
        runner.forward(stage)
        runner.backward(stage)
    runner.wait(0.001)
