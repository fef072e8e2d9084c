"""Megatron and DeepSpeed under frequency plans.

Small engines that call through the same names stand in for them everywhere. Where the packages
themselves are installed (pip install megatron-core deepspeed), their real pipeline schedules run
too, two gloo processes on CPUs. Megatron's code asks for memory on a GPU by name, and is given it
on the CPU.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from fake_nvml import FakeNvml, fake_nvml, wait_for
from shim_helpers import A40, Listener, assert_follows, frequency_plan, logged_lines

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

import framework_worker  # it imports torch, as do the next ones
import megatron_schedules
from envplan.enforce.freqplan import OperationKey
from envplan.runtime import Shim, deepspeed, megatron, torch
from torch_jobs import run

__all__ = ["fake_nvml"]

STAGES, MICROBATCHES, STEPS = 2, framework_worker.MICROBATCHES, framework_worker.STEPS
PIPELINES = {
    "megatron": Pipeline("1f1b", num_stages=STAGES, num_microbatches=MICROBATCHES),
    "megatron-interleaved": Pipeline(
        "interleaved", num_stages=STAGES, num_microbatches=MICROBATCHES, num_chunks=2
    ),
    "megatron-grouped": Pipeline(
        "interleaved",
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        num_chunks=2,
        microbatch_group=framework_worker.GROUP,
    ),
    "deepspeed": Pipeline("1f1b", num_stages=STAGES, num_microbatches=MICROBATCHES),
}


@pytest.mark.parametrize("task", PIPELINES)
def test_real_framework_follows_the_plan_and_computes_the_same(
    fake_nvml: FakeNvml, tmp_path: Path, task: str
) -> None:
    package = "deepspeed" if task == "deepspeed" else "megatron"
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    frequency_plan(PIPELINES[task], gpu=A40).save(tmp_path / "run.freqplan.json")
    results = run(task, tmp_path, ranks=STAGES)
    recorded = Pipeline.from_dag_file(tmp_path / "pipeline.dag.json")
    assert recorded.operations == PIPELINES[task].operations
    for rank, result in enumerate(results):
        with_shim = {**result["with"]}
        assert with_shim.pop("steps") == STEPS
        result["without"].pop("steps")
        assert with_shim == result["without"]
        *changes, last = fake_nvml.clock_changes(rank)
        assert last == 0
        # The evaluation after the first step runs at the highest clock, as all between steps may.
        iteration = frequency_plan(PIPELINES[task]).ranks[rank].frequencies
        assert_follows(changes, STEPS * [iteration])


def test_megatrons_own_ramp_up_is_followed_wherever_the_size_fits(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    if find_spec("megatron") is None:
        pytest.skip("megatron is not installed")
    plan = frequency_plan(PIPELINES["megatron"], gpu=A40)
    plan.save(tmp_path / "run.freqplan.json")
    results = run("megatron-ramp-up", tmp_path, ranks=STAGES)
    written = logged_lines(tmp_path / "run.jsonl")
    for rank, result in enumerate(results):
        sizes = result["sizes"]
        assert set(sizes) == {2, 5, MICROBATCHES}
        assert result["mismatches"] == 0
        # The evaluation is no iteration of training.
        trained = [size for step, size in enumerate(sizes) if step != framework_worker.EVALUATION]
        followed = trained.count(MICROBATCHES)
        (end,) = [line for line in written if line["event"] == "end" and line["rank"] == rank]
        assert end["iterations"] == {
            "followed": followed,
            "other number of microbatches": len(trained) - followed,
        }
        clock_of = {
            operation.key: operation.frequency_mhz for operation in plan.ranks[rank].operations
        }
        wanted = []
        for size in trained:
            pipeline = Pipeline("1f1b", num_stages=STAGES, num_microbatches=size)
            order = operations(pipeline, rank)
            wanted.append([clock_of[OperationKey(*key)] for key in order])
        *changes, last = fake_nvml.clock_changes(rank)
        assert last == 0
        assert_follows(changes, wanted)


@pytest.mark.parametrize("task", ["megatron-interleaved", "deepspeed"])
def test_real_framework_profiles_itself(fake_nvml: FakeNvml, tmp_path: Path, task: str) -> None:
    package = "deepspeed" if task == "deepspeed" else "megatron"
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    run(f"{task}-profiled", tmp_path, ranks=STAGES)
    pipeline = PIPELINES[task]
    profile = Profile.read_csv(tmp_path / "profile.csv")
    assert profile.num_stages == pipeline.num_profile_stages
    assert profile.metadata.schedule == pipeline.schedule
    assert profile.metadata.num_microbatches == MICROBATCHES
    for stage in range(profile.num_stages):
        clocks = profile.table(stage, "backward").frequency_mhz.tolist()
        assert sorted(clocks, reverse=True) == list(framework_worker.PROFILED)


class ForwardPass:
    """As deepspeed.runtime.pipe.schedule has it."""


class BackwardPass:
    """As deepspeed.runtime.pipe.schedule has it."""


class OptimizerStep:
    """As deepspeed.runtime.pipe.schedule has it."""


class InferenceSchedule(list[Any]):
    """As deepspeed.runtime.pipe.schedule has it."""


class Engine:
    """Executes instructions as deepspeed.PipelineEngine does."""

    device = SimpleNamespace(type="cpu")
    stage_id, num_stages = 0, STAGES

    def __init__(self) -> None:
        self.done: list[str] = []

    def _forward(self, buffer_id: int) -> None:
        self.done.append(f"F{buffer_id}")

    def _backward(self, buffer_id: int) -> None:
        self.done.append(f"B{buffer_id}")

    def _step(self) -> None:
        self.done.append("step")

    _INSTRUCTION_MAP: ClassVar = {
        ForwardPass: _forward,
        BackwardPass: _backward,
        OptimizerStep: _step,
    }

    def _exec_schedule(self, schedule: list[Any]) -> None:
        for instruction, arguments in schedule:
            self._INSTRUCTION_MAP[instruction].__get__(self)(**arguments)

    def train_batch(self) -> str:
        schedule: list[Any] = []
        for operation in PIPELINES["deepspeed"].operations:
            if operation.stage == self.stage_id:
                kind = ForwardPass if operation.instruction == "forward" else BackwardPass
                schedule.append((kind, {"buffer_id": operation.microbatch % 2}))
        self._exec_schedule([*schedule, (OptimizerStep, {})])
        return "loss"

    def eval_batch(self) -> str:
        self._exec_schedule(InferenceSchedule([(ForwardPass, {"buffer_id": 0})]))
        return "logits"


def operations(pipeline: Pipeline, stage: int = 0) -> list[Any]:
    mine = [op for op in pipeline.operations if op.stage == stage]
    return [(op.instruction, op.microbatch, op.chunk) for op in mine]


def test_deepspeed_engine_tells_of_every_operation_by_order() -> None:
    engine, bare, listener = Engine(), Engine(), Listener()
    steps: list[int] = []
    taken = engine.train_batch
    hooks = deepspeed.attach(listener, engine)
    hooks.after_iteration = lambda: steps.append(1)
    assert engine.train_batch() == "loss"
    assert engine.eval_batch() == "logits"
    taken()  # before the plan was followed, and all the same
    one = [*operations(PIPELINES["deepspeed"]), "step"]
    assert listener.heard == [*one, "full speed", *one]
    for call in (bare.train_batch, bare.eval_batch, bare.train_batch):
        call()
    assert engine.done == bare.done
    assert len(steps) == 2

    hooks.close()
    heard = list(listener.heard)
    engine.train_batch()
    assert listener.heard == heard
    assert vars(engine).keys() == {"done"}


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that works as megatron.core.pipeline_parallel.schedules does."""
    package = SimpleNamespace(schedules=megatron_schedules)
    monkeypatch.setitem(sys.modules, "megatron.core.pipeline_parallel", package)
    return megatron_schedules


@pytest.mark.parametrize("name", ["megatron", "megatron-interleaved"])
@pytest.mark.parametrize("stage", range(STAGES))
def test_megatron_schedules_tell_of_every_operation(schedules: Any, name: str, stage: int) -> None:
    listener = Listener()
    order = operations(PIPELINES[name], stage)
    models = [object(), object()]
    before = dict(vars(schedules))
    hooks = megatron.attach(listener)
    iterate: Callable[..., Any] = schedules.forward_backward_pipelining_with_interleaving
    for _ in range(2):
        assert len(iterate(order=order, models=models)) == len(order) // 2
    iterate(order=order, models=models, forward_only=True)
    assert listener.heard == [*order, "step", *order, "step", "full speed"]
    hooks.close()
    assert vars(schedules) == before


def test_megatron_schedule_that_was_taken_before_is_told_of(schedules: Any) -> None:
    listener = Listener()
    taken: Callable[..., Any] = schedules.forward_backward_pipelining_with_interleaving
    hooks = megatron.attach(listener)
    taken(order=operations(PIPELINES["megatron"]), models=[object()])
    hooks.close()
    (why,) = set(listener.heard)
    assert why.startswith("missed: what get_forward_backward_func returns was taken before")


def test_megatron_that_is_missing_is_one_line(tmp_path: Path) -> None:
    if find_spec("megatron") is not None:
        pytest.skip("it is installed")
    with pytest.raises(InputError, match="pip install megatron-core"), megatron.follow("x.json"):
        pass


def test_deepspeeds_example_trains_under_its_plan(tmp_path: Path) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    pipeline = Pipeline("1f1b", num_stages=4, num_microbatches=8)
    frequency_plan(pipeline, gpu=A40).save(tmp_path / "run.freqplan.json")
    example = Path(__file__).parents[1] / "examples" / "deepspeed_pipeline.py"
    done = launched(example, 4, "--steps", "3", "--backend", "modelled", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 0: loss" in done.stdout
    assert "mismatches" not in done.stdout


def test_megatrons_example_trains_interleaved_under_its_plan(tmp_path: Path) -> None:
    if find_spec("megatron") is None:
        pytest.skip("megatron is not installed")
    pipeline = Pipeline("interleaved", 8, 16, num_chunks=4, microbatch_group=8)
    frequency_plan(pipeline, gpu=A40).save(tmp_path / "run.freqplan.json")
    shape = ["--vp", "4", "--microbatches", "16", "--microbatch-group", "8"]
    done = launched("megatron_on_cpu.py", 8, "--steps", "2", *shape, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 0: loss" in done.stdout
    assert "mismatches" not in done.stdout
    lines = logged_lines(tmp_path / "run.jsonl")
    asked = {line["asked"] for line in lines if line["event"] == "step"}
    assert asked == {len(pipeline.operations) // 8}


def launched(
    script: str | Path, ranks: int, *arguments: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run a script of ours, or beside these tests, on so many ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launch, f"--nproc-per-node={ranks}", str(Path(__file__).parent / script), *arguments],
        cwd=cwd,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("package", ["deepspeed", "megatron"])
def test_example_without_its_package_says_so_in_one_line(package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    example = Path(__file__).parents[1] / "examples" / f"{package}_pipeline.py"
    with pytest.raises(SystemExit, match=r"^[^\n]*: pip install [^\n]*$"):
        runpy.run_path(str(example))


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_ramp_up_of_the_batch_size_is_followed_wherever_the_size_fits(
    schedules: Any, fake_nvml: FakeNvml, tmp_path: Path, stage: int
) -> None:
    plan = frequency_plan(PIPELINES["megatron"])
    clock_of = {
        operation.key: operation.frequency_mhz for operation in plan.ranks[stage].operations
    }
    shim = Shim(plan, rank=stage, world_size=STAGES, every_request=True, log=tmp_path / "run.jsonl")
    wanted: list[list[int]] = []
    with shim, megatron.attach(shim):
        iterate = schedules.forward_backward_pipelining_without_interleaving
        for num_microbatches in (2, 2, 4, 4, MICROBATCHES, MICROBATCHES, MICROBATCHES):
            pipeline = Pipeline("1f1b", num_stages=STAGES, num_microbatches=num_microbatches)
            order = operations(pipeline, stage)
            iterate(order=order, models=[object()])
            wanted.append([clock_of[OperationKey(*key)] for key in order])
            wait_for(lambda: fake_nvml.locked(stage) == 1740)  # the optimizer runs
            time.sleep(0.2)
    assert shim.mismatches == 0
    *changes, last = fake_nvml.clock_changes(stage)
    assert last == 0
    assert_follows(changes, wanted)
    lines = logged_lines(tmp_path / "run.jsonl")
    assert lines[-1]["iterations"] == {"other number of microbatches": 4, "followed": 3}
    assert [line["step"] for line in lines if line["event"] == "step"] == [4, 5, 6]


@pytest.mark.parametrize(
    ("enter", "words"),
    [
        (lambda: torch.follow("run.freqplan.json", None), "a Schedule1F1B, and not None"),
        (lambda: deepspeed.follow("run.freqplan.json", object()), "and not a object"),
        (lambda: megatron.follow("run.freqplan.json", 3), "leave out the second argument, a int"),
    ],
)
def test_wrong_objects_get_a_sentence(schedules: Any, enter: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError) as raised, enter():
        pass
    assert words in str(raised.value)


def test_a_plan_that_is_none_gets_a_sentence() -> None:
    with pytest.raises(InputError, match=r"must be a frequency plan .* and not a NoneType"):
        Shim(None, rank=0)  # type: ignore[arg-type]


class OverlapFB:
    """As torch's _ComputationType has it."""

    name = "OVERLAP_F_B"


def test_a_function_that_runs_two_operations_at_once_is_told_of() -> None:
    listener = Listener()
    ran: list[str] = []
    schedule = SimpleNamespace(
        _stages=[],
        _has_backward=True,
        step=lambda: ran.append("step"),
        _comp_type_to_function_map={OverlapFB(): print},
    )
    hooks = torch.attach(listener, schedule)
    schedule.step()
    hooks.close()
    assert ran == ["step"]
    assert "forward and backward at once" in listener.heard[0]


def test_operations_that_a_cuda_graph_captures_are_told_of_once_and_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    is_capturing = True
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: is_capturing)
    ran: list[int] = []
    stage = SimpleNamespace(
        stage_index=0,
        forward_one_chunk=ran.append,
        backward_one_chunk=ran.append,
        backward_weight_one_chunk=ran.append,
    )

    def step() -> None:
        for microbatch in range(2):
            stage.forward_one_chunk(microbatch)

    schedule = SimpleNamespace(_stages=[stage], _has_backward=True, step=step)
    listener = Listener()
    with torch.attach(listener, schedule):
        schedule.step()
        captured, listener.heard = listener.heard, []
        is_capturing = False
        schedule.step()
    assert ran == [0, 1, 0, 1]
    *said, last = captured
    assert all("captured in a CUDA graph" in line for line in said)
    assert "--training.disable_cuda_graphs" in said[0]
    assert last == "step"
    assert listener.heard == [("forward", 0, 0), ("forward", 1, 0), "step"]
