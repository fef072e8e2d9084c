"""Random damage to every kind of file: it is read, or refused in one line, and nothing else.

A few examples of each in `make test`; `make fuzz` goes on for as long as it is told, see
fuzz_files.py. The samples are the files of a release, and what other tools write.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan._io.tables import read_table
from envplan.check.files import check_file
from envplan.costs.rate_file import read_rate
from envplan.devices.locks import Mark
from envplan.enforce.clock_files import read_clocks
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.order_file import Order
from envplan.errors import EnvplanError
from envplan.pipeline import Pipeline
from envplan.pipeline.imports.chrome import TraceMapping, read_chrome_traces
from envplan.pipeline.imports.megatron import read_megatron_file
from envplan.pipeline.imports.torch_csv import as_torch_csv, read_torch_csv
from envplan.plan import Plan
from envplan.plan.frontier_file import FrontierFile, Row
from envplan.profile import Profile, ProfileMetadata
from envplan.profiling.huggingface import read_model
from envplan.profiling.sweep_file import SweepFile
from envplan.runtime.iteration_counts import IterationCounts
from envplan.runtime.plan_follower import IterationOutcome
from envplan.runtime.profile_parts import RankProfile
from envplan.runtime.run_log_reader import read_run_log
from envplan.runtime.status import RunStatus
from envplan.serving.apply import ServingApplied
from envplan.serving.identify.sweep_files import SweepFacts, read_sweep
from envplan.serving.plan import ServingPlan
from envplan.serving.profile import ServingProfile
from envplan.serving.trace import Trace
from envplan.simulation.cluster import read_slowdowns
from envplan.site import SitePlan, read_budget, read_jobs
from envplan.site.jobs import read_ladder
from envplan.site.signal import read_signal
from envplan.sweep import read_config
from envplan.sweep.running import open_journal
from envplan.sweep.table import read_rows, write_table
from test_imports_chrome import PYTORCH, traced

EXAMPLES = 30
RELEASED = Path(__file__).parent / "fixtures" / "v0.1"
LATER = Path(__file__).parent / "fixtures" / "v1"
NOW = Path(__file__).parent / "fixtures" / "now"
SCHEDULES = Path(__file__).parents[1] / "examples" / "schedules"
PIPELINE = Pipeline("1f1b", num_stages=2, num_microbatches=4)
SERVING = (
    b"tp,frequency,phase,size,time_s,power_w\n"
    b"2,1000,idle,0,0,90\n2,1000,prefill,512,0.1,900\n2,1000,decode,8,0.02,700\n"
)
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    b"2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)
ZEUS = (
    b"[\n  [('forward', 1740), ('backward', 1500)],\n  [('forward', 1260), ('backward', 780)],\n]\n"
)
OVERLAPS = repr(
    [[(("forward", "norm_0-none-12-1024"), ("backward", "rope_0-none-6-1024"))] * 4] * 2
).encode()
CONFIG = (
    b'{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, '
    b'"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, '
    b'"intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768, '
    b'"sliding_window": null, "num_local_experts": 8, "num_experts_per_tok": 2, '
    b'"tie_word_embeddings": false}'
)
CLOCKS = b"stage,position,frequency\n" + b"".join(
    b"%d,%d,%d\n" % (stage, position, 1740 - 60 * position)
    for stage in range(2)
    for position in range(8)
)
TARIFF = b"hour,price,carbon\n0,0.2,300\n6,0.3,250\n12,0.25,200\n"
BUDGET = b"hour,power\n0,600000\n6,550000\n12,450000\n"
SERIES = b"minute,attained,power_w\n0,1,2000\n1,0.99,2100\n"
BURSTGPT = (
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
)
MEGATRON = (
    b"model:\n  pipeline_model_parallel_size: 4\n  virtual_pipeline_model_parallel_size: 2\n"
    b"  num_layers: 32\n  pipeline_model_parallel_layout: Et*4|(tttt|)*6ttttL\n"
    b"train: {global_batch_size: 64, micro_batch_size: 2}\n"
)
SCRIPT = (
    b"PP=4\ntorchrun --nproc_per_node 8 train.py --pipeline-model-parallel-size $PP \\\n"
    b"  --num-layers 32 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 64 \\\n"
    b"  --micro-batch-size 1 --tensor-model-parallel-size 2\n"
)
ORDER = json.dumps(
    {
        "schema": "envplan/order/v1",
        "job": "a",
        "plan_sha256": "0" * 64,
        "sequence": 3,
        "from_iteration": 100,
        "rung": 2,
        "faster_rung": 1,
        "faster_share": 0.25,
        "iteration_time_s": 1.5,
        "power_w": 3000.0,
    }
).encode()
PART = json.dumps(
    {"schema": "envplan/profile-part/v1", "rank": 0, "world_size": 2, "num_stages": 2, "rows": []}
).encode()
STRAGGLERS = b"iteration,replica,slowdown\n0,1,1.2\n1,0,1\n"
MOONCAKE = (
    b'{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3]}\n'
    b'{"timestamp": 3000, "input_length": 915, "output_length": 355, "hash_ids": [0, 462]}\n'
)
SERVEGEN = b"request_id,timestamp,input_tokens,output_tokens\n0,0.5,10,20\n1,2.0,30,40\n"
VLLM = (
    b'{"date": "20260101-000000", "completed": 2, "start_times": [101.5, 100.0, 103.0],\n'
    b'"input_lens": [30, 20, 40], "output_lens": [3, 2, 0], "errors": ["", "", "timed out"]}\n'
)
SERVING_SWEEP = b"".join(
    b'{"model_id": "meta-llama/Llama-3.1-70B-Instruct", "backend": "vllm", "max_concurrency": %d, '
    b'"completed": 10, "total_input_tokens": 10240, "total_output_tokens": 10240, '
    b'"median_ttft_ms": 80.5, "median_tpot_ms": 11.8}\n' % concurrency
    for concurrency in (4, 8, 16)
)
SWEEP_IN_PROGRESS = (
    b"stage,instruction,frequency,time,energy,time_std,energy_std,samples,clock,throttle\n"
    b"0,forward,1740,0.0937,28.49,0.001,0.1,12,1740,\n"
    b"0,forward,1725,0.0939,28.43,0.001,0.1,12,1710,sw_power_cap\n"
)
STATUS = RunStatus(
    rank=0, stage=1, device=3, plan_sha256="0" * 64, clocks=True, unfollowed={"an exception": 2}
).to_json()
COUNTS = b"envplan1" + bytes([2, 0, 0, 0, 0, 0, 0, 0]) * len(IterationOutcome)
FACTS = SweepFacts(gpu="h100", tp=4, precision="fp8")


def released(name: str) -> bytes:
    return (RELEASED / name).read_bytes()


def read_overlaps(path: Path) -> Any:
    path.replace(path.with_name("scheds_1.py"))
    clocks = path.with_name("freqs_1.py")
    clocks.write_text(repr([[1740] * 8] * 2))
    return read_clocks(clocks, PIPELINE)


def read_journal(path: Path) -> Any:
    with open_journal(path) as journal:
        return journal.rows


def read_serving_profile(path: Path) -> ServingProfile:
    """With a sidecar that fits SERVING."""
    path.with_suffix(".meta.json").write_text('{"kv_tokens": {"2": 9000}}')
    return ServingProfile.read_csv(path)


def read_sweep_in_progress(path: Path) -> Any:
    """With the sidecar that the sweep began with."""
    sidecar = {"sweep": {"step": 15}, "complete": False}
    path.with_suffix(".meta.json").write_text(json.dumps(sidecar))
    with SweepFile(path, {"step": 15}, ProfileMetadata()) as file:
        return file


def read_counts(path: Path) -> Any:
    """Of iterations, as a killed run leaves them."""
    counts = IterationCounts(path)
    counts.close()
    return counts


def read_site_jobs(path: Path) -> Any:
    """With a frontier beside it."""
    shutil.copy(RELEASED / "frontier.json", path.parent)
    return read_jobs(path)


#: What each kind of file is, its suffix and what reads it.
READERS: dict[str, tuple[bytes, str, Callable[[Path], Any]]] = {
    "profile": (released("profile.csv"), ".csv", Profile.read_csv),
    "sidecar": (released("profile.meta.json"), ".json", ProfileMetadata.read_json),
    "plan": (released("plan.json"), ".json", Plan.load),
    "frequency plan": (released("run.freqplan.json"), ".json", FrequencyPlan.load),
    "frontier": (released("frontier.json"), ".json", FrontierFile.load),
    "frontier table": (
        released("frontier.csv"),
        ".csv",
        lambda file: read_table(file, Row, kind="a frontier"),
    ),
    "dag": (released("job.dag.json"), ".json", Pipeline.from_dag_file),
    "run log": (released("run.jsonl"), ".jsonl", lambda path: list(read_run_log([path]))),
    "sweep": (released("sweep.toml"), ".toml", read_config),
    "serving plan": (released("serving-plan.json"), ".json", ServingPlan.load),
    "serving clocks": (released("serving.clocks.json"), ".json", ServingApplied.load),
    "serving profile": (SERVING, ".csv", read_serving_profile),
    "Azure's trace": (AZURE, ".csv", Trace.read_csv),
    "lists of clocks": (ZEUS, ".py", lambda path: read_clocks(path, PIPELINE)),
    "Kareus's overlaps": (OVERLAPS, ".py", read_overlaps),
    "config.json of a model": (CONFIG, ".json", read_model),
    "journal of a sweep": (released("sweep.csv.journal"), "", read_journal),
    "table of clocks": (CLOCKS, ".csv", lambda path: read_clocks(path, PIPELINE)),
    "clocks of a plan": (
        released("run.freqplan.json"),
        ".json",
        lambda path: read_clocks(path, PIPELINE),
    ),
    "torch's schedule": (as_torch_csv(PIPELINE).encode(), ".csv", read_torch_csv),
    "Chrome trace": (
        json.dumps({"traceEvents": traced(PIPELINE)}).encode(),
        ".json",
        lambda path: read_chrome_traces([path], TraceMapping.of(instructions=PYTORCH)),
    ),
    "tariff": (TARIFF, ".csv", lambda path: read_rate(str(path), "price")),
    "stragglers": (STRAGGLERS, ".csv", lambda path: read_slowdowns(path, 2)),
    "sweep's table": (released("sweep.csv"), ".csv", read_rows),
    "gzipped profile": (gzip.compress(released("profile.csv")), ".csv.gz", Profile.read_csv),
    "gzipped plan": (gzip.compress(released("plan.json")), ".json", Plan.load),
    "plan for late clocks": ((LATER / "late-clocks.json").read_bytes(), ".json", Plan.load),
    "plan with a ladder": (
        (LATER / "ladder-and-straggler.json").read_bytes(),
        ".json",
        Plan.load,
    ),
    "robust plan": ((LATER / "robust.json").read_bytes(), ".json", Plan.load),
    "plan with costs": ((LATER / "costs.json").read_bytes(), ".json", Plan.load),
    "site plan": ((NOW / "site.json").read_bytes(), ".json", SitePlan.load),
    "site's jobs": ((NOW / "jobs.toml").read_bytes(), ".toml", read_site_jobs),
    "site's budget": (BUDGET, ".csv", lambda path: read_budget(str(path))),
    "order": (ORDER, ".json", Order.load),
    "part of a profile": (PART, ".json", RankProfile.load),
    "BurstGPT's trace": (BURSTGPT, ".csv", Trace.read_csv),
    "Mooncake's trace": (MOONCAKE, ".jsonl", Trace.read_csv),
    "ServeGen's trace": (SERVEGEN, ".csv", Trace.read_csv),
    "vLLM's results as a trace": (VLLM, ".json", Trace.read_csv),
    "sweep of a serving engine": (SERVING_SWEEP, ".jsonl", lambda path: read_sweep(path, FACTS)),
    "sweep in progress": (SWEEP_IN_PROGRESS, ".csv", read_sweep_in_progress),
    "signal of a site": (
        b'{"power": "612kW"}\n',
        ".json",
        lambda path: read_signal(str(path), 1e6),
    ),
    "ladder of a site": (released("run.freqplan.json"), ".json", read_ladder),
    "counts of iterations": (COUNTS, ".iterations", read_counts),
    "status of a run": (STATUS.encode(), ".json", RunStatus.load),
    "gzipped trace": (gzip.compress(AZURE), ".csv.gz", Trace.read_csv),
    "Megatron's YAML": (MEGATRON, ".yaml", lambda path: read_megatron_file(path, 8)),
    "Megatron's arguments": (SCRIPT, ".sh", lambda path: read_megatron_file(path, 8)),
    "replay over time": (SERIES, ".csv", check_file),
    "mark of a guard": (b"123 456 1200 zeusd\n", "", lambda path: Mark.parse(path.read_bytes())),
}

#: Files that `check` proves from those beside them.
CHECKED = (
    "plan.json", "frontier.json", "frontier.csv", "run.freqplan.json", "profile.csv",
    "profile.meta.json", "job.dag.json", "run.jsonl", "sweep.csv", "sweep.toml",
    "serving-plan.json", "serving.clocks.json", "site.json",
)  # fmt: skip


def lay_out(folder: Path) -> None:
    """Put these files, and those that they refer to, in a folder."""
    shutil.copytree(RELEASED, folder, dirs_exist_ok=True)
    for name in ("site.json", "jobs.toml"):
        shutil.copy(NOW / name, folder)


WEIRD = [
    *b"0 -1 -0.0 1e308 1e999 nan inf 1_000 1e-400 1.5e3 null true [] {} \" \\ ,,,, ' =1+1".split(),
    *b"9223372036854775807 -9223372036854775809 2147483648 4294967295 __import__('os')".split(),
    *(b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xd9\xa3", b"\xe2\x80\xae", b"\n\n", b"\r"),
    *(b"9" * 400, b"[" * 3000, b"(" * 300),
]


def damage(sample: bytes, random: Random) -> bytes:
    """A sample with a few bytes, words or lines replaced, taken out, doubled or put elsewhere."""
    data = sample
    for _ in range(random.randint(1, 5)):
        at = random.randint(0, len(data))
        end = min(len(data), at + random.randint(0, 12))
        match random.choice(["replace", "number", "number", "cut", "line", "bytes"]):
            case "replace":
                data = data[:at] + random.choice(WEIRD) + data[end:]
            case "number":  # a whole word from here on
                while at < len(data) and not data[at : at + 1].isalnum():
                    at += 1
                end = at
                while end < len(data) and (data[end : end + 1].isalnum() or data[end] in b".+-_"):
                    end += 1
                data = data[:at] + random.choice(WEIRD) + data[end:]
            case "cut":
                data = data[:at]
            case "line":
                lines = data.splitlines(keepends=True) or [b""]
                line = random.choice(lines)
                lines.insert(random.randint(0, len(lines)), line)
                data = b"".join(lines)
            case "bytes":
                data = data[:at] + random.randbytes(random.randint(0, 8)) + data[end:]
    return data


def damaged(sample: bytes) -> st.SearchStrategy[bytes]:
    return st.builds(damage, st.just(sample), st.randoms(use_true_random=False))


@pytest.mark.parametrize("kind", READERS)
def test_sample_is_read(kind: str, tmp_path: Path) -> None:
    sample, suffix, read = READERS[kind]
    path = tmp_path / f"file{suffix}"
    path.write_bytes(sample)
    assert read(path) is not None


def fuzz(path: Path, sample: bytes, read: Callable[[Path], Any]) -> None:
    """Read a few damaged samples."""

    @settings(max_examples=EXAMPLES)
    @given(damaged(sample))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(EnvplanError):
            read(path)

    check()


@pytest.mark.parametrize("kind", READERS)
def test_damaged_file_is_read_or_refused_in_a_line(kind: str, tmp_path: Path) -> None:
    sample, suffix, read = READERS[kind]
    fuzz(tmp_path / f"file{suffix}", sample, read)


def test_damaged_parquet_is_read_or_refused_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "sweep.parquet"
    write_table(read_rows(RELEASED / "sweep.csv"), path)
    fuzz(path, path.read_bytes(), read_rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_damaged_file_is_proved_or_refused_by_check(name: str, tmp_path: Path) -> None:
    lay_out(tmp_path)
    fuzz(tmp_path / name, (tmp_path / name).read_bytes(), check_file)
