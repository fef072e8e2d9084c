"""Command lines, and words of what they answer."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from cli_helpers import assert_refused, envplan, small_profile

#: What is typed after `envplan`, and words of the answer. Whole answers are in tests/golden, of
#: unknown commands, schedules, backends, models and files and of targets that exclude each other.
REFUSED = """
solve --nothing | --nothing
check | FILE
solve a40-gpt3-1.3b | did you mean a40-gpt3-1.3b-4stage or a40-gpt3-1.3b-8stage?
solve a40-gpt3-1.3b-4stage --schedule 1F1B | did you mean 1f1b?
solve a40-gpt3-1.3b-4stage --planner zeus | zeus_global or zeus_per_stage?
profile --model lama3-8b | did you mean llama3-8b?
profile --model llama3-8b --gpu H10O | h100
profile --backend modeled | did you mean modelled?
solve --price day.csv -o day.csv | day.csv: is an input itself
solve --dag d.json -o d.json | d.json: is an input itself
solve -o profile.meta.json | is an input itself
refine plan.json day.csv -o day.csv | day.csv: is an input itself
refine plan.json day.csv -o x.csv --profile-output x.csv | x.csv: is named for two outputs
sweep sweep.toml -o gone/s.csv | gone/s.csv: cannot be written (No such file
smooth --plot gone/s.png | gone/s.png: cannot be written (No such file
solve -o {long} | File name too long
apply -o loop | loop: cannot be written (Too many levels of symbolic links)
solve --replicas {huge} | must be at most 2147483647, not a number beyond
check empty | empty: is empty
check . | cannot be read
devices --gpu a40 | --backend modelled
frontier --plot profile.csv | --plot profile.csv | .png or .svg | other arguments go before --plot
solve --price day.csv --iterations 100000 | day.csv | lasts 1 d | --repeat-rates
apply budget.json --dp 3 | J or W | 3 GPUs | --tp | --dp
profile --backend modelled --layers 9999 -o x.csv | --layers must be 1 to 1000, not 9999
solve --robust 150 --noise 2 | --robust must be at most 99.9, not 150
frontier -m 99999999 | operations | at most
frontier --chunks 3 | 3 chunks (--vp) on 1 pipeline stage (--pp)
frontier --dag dag.json -m 3 | --dag | --microbatches | exclude
frontier --dag dag.json | dag.json | cannot be read
frontier -o profile.csv | profile.csv | itself
solve --min-energy --slowdown 9 | --min-energy | --slowdown | exclude
solve four.csv --pp 3 | 3 pipeline stages | has 4
solve four.csv --pp 2 --vp 4 | 4 chunks (--vp) | 8 model stages | has 4
solve four.csv --vp 3 | 3 chunks (--vp) | has 4
solve four.csv --pp 1 --vp 1 | 1 chunk (--vp) on 1 pipeline stage (--pp) has 1 model stage,
solve three.csv --planner magic | magic | max_frequency, zeus_global
solve three.csv --planner envpipe --target-time 9 | takes no target | --target-time
solve three.csv --planner max_frequency --min-energy | takes no target | --min-energy
solve three.csv --planner zeus_global --polish 1 | --polish | frontier
solve three.csv --reconfigure greedy | --reconfigure | envpipe
solve three.csv --planner envpipe --reconfigure fast | fast | balanced, greedy
solve three.csv --activation-slots 9 | --activation-slots | envpipe | 1f1b
solve --currency EUR | --currency goes with --price
solve --minimize money | --minimize goes with --deadline
solve --start 2026-12-01 | --start goes with --price or --carbon
solve --deadline 1d | --iterations or --tokens
solve --iterations 5 --tokens 5 | exclude each other
solve --iterations 5 --deadline 14 | --deadline must be | 14d
solve --iterations 5 --deadline 1d --slowdown 1 | exclude each other
solve --iterations 5 --deadline 1d --minimize joy | joy
solve --iterations 5 --deadline 1d --minimize carbon | --carbon
solve --iterations 5 --deadline 1d --planner zeus_global | zeus_global | --deadline
simulate --price day.csv | give --iterations
compare three.csv --straggler-time 9 --straggler-slowdown 9 | exclude each other
compare three.csv --activation-slots 3,x | --activation-slots | not x
compare three.csv --activation-slots 3,3 | 2 numbers for 3 stages
compare three.csv --schedule gpipe --activation-slots 9 | activation slots | gpipe
simulate four.json --noise 101 | --noise must be at most 100
simulate four.json --runs 3 | without noise all 3 runs are the same
simulate four.json --replicas 2000000 | replicas should be less than or equal to 1000000
simulate four.json --straggler -1.2 | --straggler must be at least 1, not -1.2
simulate four.json --straggler x:1.2 | --straggler must be a whole number
simulate four.json --straggler 9:1.2 | no replica 9 to straggle
simulate four.json --straggler 1:1.2 --straggler 1:1.3 | names replica 1 twice
simulate four.json --straggler 1.2 --straggler-trace x.csv | exclude each other
simulate four.json --straggler-trace x.csv | x.csv: cannot be read
simulate four.json --strong-scaling many | --strong-scaling must be numbers separated by commas
simulate four.json --strong-scaling 3 | does not divide by 3 replicas
simulate profile.csv | profile.csv | is a profile; simulate takes a plan
simulate four.json --trace four.json | is an input itself
apply --dp 4 | --dp 4 | --dp 2 | again with --dp 4
apply --tp 4 | 4 GPUs a stage | for 2 | tp times cp must be 2
apply --devices 0,a | --devices must be numbers separated by commas
apply --devices 1,1 | twice
apply --format yaml | envplan, zeus, csv, power-limits or job-power, not yaml
apply --clocks 100-200:10 | 1740 MHz | highest clock of the GPU is 200 MHz
apply --gpu b9000 | 'b9000' | did you mean b300 or b200
apply --gpu v100 | 1740 MHz | 1530 MHz
apply --backend amd | --backend must be nvml
apply --backend nvml --gpu a40 | leave out
apply profile.csv | profile.csv | is a profile; apply takes a plan
apply freq.json | freq.json: is not a plan | a frequency plan already | give the plan that
apply run.freqplan.json | run.freqplan.json: is not a plan | give the plan that
apply -o plan.json | plan.json | is an input itself
apply -o profile.csv | is an input itself
apply --profile none.csv | none.csv
profile --backend modelled --gpu z9 | z9 | a40
profile --backend modelled --workload llama | llama | wide-resnet
profile --backend modelled --stages 99 | 99 stages | 24
profile --backend modelled --width-factor 2 | --width-factor | gpt
profile --backend modelled --step 9999 | --step 9999
profile --backend modelled --dtype int4 | --dtype | bfloat16
profile --backend modelled --schedule zigzag | zigzag | 1f1b
profile --backend modelled --no-lock | --no-lock | nvml
profile --backend modelled --entry a:b | --entry | nvml
profile --backend modelled --workload wide-resnet --layers 60 | 50, 101 or 152
profile --backend modelled --layers-per-stage 5,7,7,4 | 23 layers on 4 stages, but GPT-3 1.3B has 24
profile --backend modelled --layers-per-stage 5,7,7,5 --pp 3 | --pp 3 and --vp 1 make 3
profile --backend modelled --layers-per-stage 5,7,12 --vp 2 | --pp 1 and --vp 2 make 2
profile --backend modelled --layers-per-stage 24,0 | must be at least 1, not 0
profile --gpu a40 | --gpu | --backend modelled
profile --backend modelled --tp 3 | --tp 3 | 16 heads
profile --backend modelled --workload t5 --tp 5 | --tp 5 | 32 heads
profile --backend modelled --workload wide-resnet --tp 2 | leave --tp
profile --split-backward --recompute | --split-backward and --recompute | solve
sweep sweep.toml --jobs 1 --ray auto | --jobs and --ray exclude each other
sweep profile.csv | profile.csv: is a profile; sweep takes a sweep's configuration
savings three.csv --pue 0.5 | pue
savings three.csv --embodied 150 | --carbon
"""

#: Questions that have no answer.
NO_ANSWER = """
solve --energy-budget 1 | least
solve --iterations 20000 --deadline 1h | 20000 iterations take at least | deadline of 1 h
"""

#: What is typed, and words of what is said; after an exclamation mark, words that are not. What
#: commands say of built-in profiles stands in tests/golden.
SAID = """
check profile.csv | profile (modelled) | 2 stages | forward, backward | 20 options | 780 | 1740
check profile.csv --json | "file": "profile.csv" | "kind": "profile" | "next": "envplan frontier
check plan.json -q | !holds
frontier --plans 2 --plot | wrote frontier.png
frontier four.csv -m 2 --plans 2 | 4 stages, 2 microbatches
frontier measured.csv | 61.5 W (from the profile) | !modelled
frontier one.csv | up to 0.0% at no slowdown
frontier a40-gpt3-1.3b-8stage --chunks 2 -m 8 --plans 2 | interleaved, 4 stages x 2 chunks
solve | !cost | !The run
solve --slowdown 4 --polish 1 | wrote plan.json
solve --price day.csv --iterations 100000 --repeat-rates | The run: 100,000 iterations
solve three.csv --planner envpipe --schedule 1f1b --json | "schedule": "1f1b"
compare three.csv --straggler-time 0.01 | it is no straggler
simulate four.json --price 0.2 | an iteration costs | USD over all GPUs | !iterations cost
apply | 1740 | not known
apply --gpu a40 | clocks from 210 to 1740 MHz of NVIDIA A40
apply --dry-run | stage 0: forward | stage 1: forward | !wrote
apply --dry-run --json | "frequency_plan": null
apply --format csv | wrote run.freqplan.csv
apply --json | "frequency_plan": "run.freqplan.json" | "world_size": 8 | !"ranks"
sweep many.toml -j 1 | failed: | and 3 more: see column error of sweep.csv
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind; no command that is refused changes one or leaves another."""
    folder = tmp_path_factory.mktemp("refused")
    small_profile().save_csv(folder / "profile.csv")
    small_profile(3, blocking=70.0, microbatches=6).save_csv(folder / "three.csv")
    small_profile(4).save_csv(folder / "four.csv")
    hours = "".join(f"{hour},0.1,300\n" for hour in range(24))
    (folder / "day.csv").write_text(f"hour,price,carbon\n{hours}")
    (folder / "sweep.toml").write_text('[grid]\nprofiles = ["profile.csv"]\n')
    (folder / "empty").write_text("\n")
    small_profile(clocks=(1740,)).save_csv(folder / "one.csv")
    small_profile(blocking=61.5, source="measured").save_csv(folder / "measured.csv")
    times = [k / 1e4 for k in range(1, 9)]
    (folder / "many.toml").write_text(
        f'[grid]\nprofiles = ["profile.csv"]\nslowdowns = [0]\ntarget_times = {times}\n'
    )
    (folder / "d.json").write_text("{}")
    (folder / "loop").symlink_to("loop")
    two = ("--gpus-per-stage", 2, "--replicas", 2, "--ladder", 3)
    four = ("--slowdown", 2, "--replicas", 4, "-o", "four.json")
    budget = ("--energy-budget", 1e6, "-o", "budget.json")
    for options in (two, four, budget):
        assert envplan("solve", "-q", *options, cwd=folder).code == 0
    shutil.copy(folder / "plan.json", folder / "two.json")
    assert envplan("apply", "-q", "-o", "freq.json", cwd=folder).code == 0
    shutil.copy(folder / "freq.json", folder / "run.freqplan.json")
    return folder


@pytest.mark.parametrize(
    ("row", "code"),
    [(row, 2) for row in REFUSED.strip().splitlines()]
    + [(row, 1) for row in NO_ANSWER.strip().splitlines()],
)
def test_a_command_that_cannot_be_done_is_refused_and_changes_no_file(
    folder: Path, row: str, code: int
) -> None:
    typed, *words = row.split(" | ")
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    typed = typed.replace("{huge}", "9" * 400).replace("{long}", "x" * 5000)
    assert_refused(envplan(*shlex.split(typed), cwd=folder), code, *words)
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.fixture(scope="module")
def workplace(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder, which commands may write to."""
    return shutil.copytree(folder, tmp_path_factory.mktemp("said") / "folder", symlinks=True)


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ((), "frontier"),
        (("--planner", "max_frequency"), "max_frequency"),
        (("--schedule", "gpipe"), "gpipe"),
        (("--price", "0.2", "--currency", "USD"), "USD"),
    ],
)
def test_an_output_may_be_called_as_a_value_that_names_no_file(
    workplace: Path, options: tuple[str, ...], output: str
) -> None:
    (workplace / output).touch()
    ran = envplan("solve", "three.csv", *options, "-o", output, cwd=workplace)
    assert (ran.code, ran.err) == (0, "")
    assert f"wrote {output}" in ran.out


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("solve --clocks freq.json -o freq.json", "freq.json"),
        ("solve --carbon day.csv -o day.csv", "day.csv"),
        ("sweep sweep.csv -o sweep.csv", "sweep.csv"),
        ("profile --model config.csv -o config.csv", "config.csv"),
        ("refine plan.json log.csv -o log.csv", "log.csv"),
        ("refine log.csv day.csv -o log.csv", "log.csv"),
        ("simulate --straggler-trace s.json --trace s.json", "s.json"),
        ("simulate --replica four.json --trace four.json", "four.json"),
        ("simulate --profile p.json --trace p.json", "p.json"),
    ],
)
def test_every_file_that_an_option_reads_is_kept(workplace: Path, line: str, file: str) -> None:
    (workplace / file).touch()
    before = (workplace / file).read_bytes()
    ran = envplan(*shlex.split(line), cwd=workplace)
    assert_refused(ran, 2, f"{file}: is an input itself")
    assert (workplace / file).read_bytes() == before


def commands() -> dict[str, list[str]]:
    """All words that each line is to say."""
    said: dict[str, list[str]] = {}
    for row in SAID.strip().splitlines():
        typed, *words = row.split(" | ")
        said.setdefault(typed, []).extend(words)
    return said


@pytest.mark.parametrize(("typed", "words"), commands().items())
def test_a_command_says_what_is_to_be_known(workplace: Path, typed: str, words: list[str]) -> None:
    (workplace / "run.freqplan.json").unlink(missing_ok=True)
    if typed.startswith(("apply", "check")):  # of two stages, replicas and GPUs a stage
        shutil.copy(workplace / "two.json", workplace / "plan.json")
    ran = envplan(*shlex.split(typed), cwd=workplace)
    assert (ran.code, ran.err) == (0, "")
    for word in words:
        assert (word.removeprefix("!") in ran.out) is not word.startswith("!"), ran.out
    assert (workplace / "run.freqplan.json").exists() == (
        "wrote run.freqplan.json" in ran.out or '"frequency_plan": "run' in ran.out
    )
