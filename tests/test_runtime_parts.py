"""Parts at module boundaries: what a shim asks for and a profiler measures, by torch's hooks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from envplan.enforce.freqplan import ClockedOperation
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from envplan.runtime import Profiler, Shim
from envplan.runtime.parts import hook_parts
from fake_nvml import FakeNvml, fake_nvml
from shim_helpers import A40, frequency_plan
from test_shim import set_clocks, wait_until_set

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

__all__ = ["fake_nvml"]

SECONDS = {"attention": 0.002, "mlp": 0.004}


class Sleeps(torch.autograd.Function):  # type: ignore[misc, name-defined, unused-ignore]
    """Takes a while forwards, and twice as long backwards."""

    @staticmethod
    def forward(ctx: Any, x: Any, seconds: float) -> Any:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Block(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.seconds = seconds

    def forward(self, x: Any) -> Any:
        return Sleeps.apply(self.linear(x), self.seconds)


def model() -> Any:
    return torch.nn.ModuleDict({name: Block(seconds) for name, seconds in SECONDS.items()})


def run_forward(layers: Any, x: Any, *, recompute: bool = False) -> Any:
    for layer in layers.values():
        if recompute:
            from torch.utils.checkpoint import checkpoint

            # Without what imports the compiler, for seconds.
            x = checkpoint.__wrapped__(layer, x, use_reentrant=False)
        else:
            x = layer(x)
    return x


def run_step(listener: Any, layers: Any, microbatches: int, *, recompute: bool = False) -> None:
    for microbatch in range(microbatches):
        listener.begin("forward", microbatch)
        out = run_forward(layers, torch.ones(2, 4, requires_grad=True), recompute=recompute)
        listener.end("forward", microbatch)
        listener.begin("backward", microbatch)
        out.sum().backward()
        listener.end("backward", microbatch)
    listener.step()


def plan_by_parts() -> Any:
    plan = frequency_plan(Pipeline("1f1b", 1, 2), gpu=A40)
    forward, backward = "@attention=1740 @mlp=1020", "@mlp=780 @attention=1500"
    rank = plan.ranks[0].model_copy(
        update={
            "operations": [
                ClockedOperation(name, microbatch, 0, 1740 if name == "forward" else 780)
                for microbatch in (0, 1)
                for name in ("forward", "backward")
            ],
            "configs": [forward, backward] * 2,
        }
    )
    made = plan.model_copy(update={"ranks": [rank]})
    made.check()
    return made


@pytest.mark.parametrize("recompute", [False, True])
def test_every_part_gets_its_clock_as_it_begins(
    fake_nvml: FakeNvml, tmp_path: Path, recompute: bool
) -> None:
    layers = model()
    shim = Shim(plan_by_parts(), rank=0, world_size=1, every_request=True, log=None)
    with shim, hook_parts(shim, layers):
        for _ in range(2):
            run_step(shim, layers, 2, recompute=recompute)
        wait_until_set(shim)
        assert shim.mismatches == 0
    # After an iteration comes the highest clock, or the next one's first: the same here.
    assert set_clocks(fake_nvml) == [*([1740, 1020, 780, 1500] * 4), 1740]
    run_step(shim, layers, 2)  # all hooks are gone, so nothing is told
    assert not any(
        module._forward_pre_hooks or module._backward_pre_hooks for module in layers.modules()
    )


def test_a_clock_is_asked_for_so_long_after_its_part_begins(fake_nvml: FakeNvml) -> None:
    plan = plan_by_parts()
    rank = plan.ranks[0]
    configs = ["@attention=1740 @attention=1020+1500000ns", "@mlp=780 @mlp=1500+9000000ns"] * 2
    plan = plan.model_copy(update={"ranks": [rank.model_copy(update={"configs": configs})]})
    plan.check()
    with Shim(plan, rank=0, world_size=1, every_request=True, log=None) as shim:
        for microbatch in (0, 1):
            for instruction, part in (("forward", "attention"), ("backward", "mlp")):
                shim.begin(instruction, microbatch)
                shim.part(part, backward=instruction == "backward")
                time.sleep(0.02)
                shim.end(instruction, microbatch)
        shim.step()
        wait_until_set(shim)
    assert set_clocks(fake_nvml) == [*([1740, 1020, 780, 1500] * 2), 1740]


def test_between_operations_the_config_is_that_of_the_next_one(fake_nvml: FakeNvml) -> None:
    plan = plan_by_parts()
    configs = ["@attention=1740/tall @mlp=1020/wide", "@mlp=780/flat @attention=1500"] * 2
    rank = plan.ranks[0].model_copy(update={"configs": configs})
    plan = plan.model_copy(update={"ranks": [rank]})
    with Shim(plan, rank=0, world_size=1, log=None) as shim:
        assert shim.config == "tall"
        shim.begin("forward", 0)
        shim.part("mlp", backward=False)
        assert shim.config == "wide"
        shim.end("forward", 0)
        assert shim.config == "flat"


def test_a_part_that_is_no_module_is_refused(fake_nvml: FakeNvml) -> None:
    with (
        Shim(plan_by_parts(), rank=0, world_size=1, log=None) as shim,
        pytest.raises(InputError, match="no module attention"),
        hook_parts(shim, torch.nn.ModuleDict({"norm": Block(0.0)})),
    ):
        raise AssertionError


def test_wrapped_models_keep_the_names_of_their_modules() -> None:
    class Wrapper(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    class Names:
        part_names = ("mlp", "attention")

        def part(self, name: str, *, backward: bool) -> None:
            heard.append(name)

    heard: list[str] = []
    layers = model()
    with hook_parts(Names(), [Wrapper(Wrapper(layers))]):
        run_forward(layers, torch.ones(2, 4))
    assert heard == ["attention", "mlp"]


def test_a_job_is_profiled_by_parts(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    layers = model()
    profiler = Profiler(
        tmp_path / "profile.csv",
        num_stages=1,
        rank=0,
        world_size=1,
        frequencies=(1740, 1260),
        warm_up=1,
        iterations_per_frequency=2,
        parts=("att*", "mlp"),
    )
    with profiler, hook_parts(profiler, layers):
        while not profiler.done:
            run_step(profiler, layers, 4)
    profile = Profile.read_csv(tmp_path / "profile.csv")
    assert profile.has_parts
    for instruction, factor, names in (
        ("forward", 1, ("attention", "mlp")),
        ("backward", 2, ("mlp", "attention")),
    ):
        parts = profile.table(0, instruction).parts
        assert parts.names == names
        assert parts.frequency_mhz.tolist() == [1260, 1740]
        assert (parts.time_ns >= [factor * SECONDS[name] * 1e9 for name in names]).all()
