# Everything here starts from nothing: a virtual environment is made and envplan built into it.
# After that, targets rerun at once; the extension is built again only when its sources change.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUILD_INPUTS := pyproject.toml $(wildcard csrc/*.cpp csrc/*.hpp csrc/serving/* csrc/*.pyx csrc/CMakeLists.txt)

.PHONY: demo test test-slow test-versions test-operations build-versions soak soak-watched fuzz sanitize lint format docs package wheels \
	bench profiles results results-training results-serving results-site validate compat gpu lock audit clean

# What a newcomer should see first: frontier, picture, plan, proof, on shipped measurements.
demo: $(VENV)/.installed
	@mkdir -p out
	$(BIN)/envplan frontier sosp24-a100-gpt3-xl-4stage --plot out/frontier.png -o out/frontier.csv
	$(BIN)/envplan solve sosp24-a100-gpt3-xl-4stage --slowdown 1 -o out/plan.json
	$(BIN)/envplan check out/plan.json
	$(BIN)/envplan simulate out/plan.json --trace out/timeline.json
	$(BIN)/envplan timeline out/plan.json -o out/timeline.png
	$(BIN)/envplan report out/plan.json -o out/report.html

test: $(VENV)/.installed-test
	$(BIN)/cmake -S csrc -B build/core -DENVPLAN_EXTENSION=OFF -DENVPLAN_TESTS=ON > build/core.log
	$(BIN)/cmake --build build/core >> build/core.log || { cat build/core.log; exit 1; }
	$(BIN)/ctest --test-dir build/core --output-on-failure
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# The unit tests of the core under AddressSanitizer and UndefinedBehaviorSanitizer: about a minute.
sanitize: $(VENV)/.installed-test
	$(BIN)/cmake -S csrc -B build/sanitize -DENVPLAN_EXTENSION=OFF -DENVPLAN_TESTS=ON \
		-DENVPLAN_SANITIZE=ON > build/sanitize.log
	$(BIN)/cmake --build build/sanitize >> build/sanitize.log || { cat build/sanitize.log; exit 1; }
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure --timeout 120

# Property tests on examples drawn anew, many of them, and what takes too long for `make test`.
test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow or hypothesis" --hypothesis-profile free

# Half an hour of training and of a sweep while drivers fail and processes are killed; MINUTES=1 is
# the short form.
MINUTES ?= 30
soak: $(VENV)/.installed-test
	$(BIN)/python tests/soak.py --minutes $(MINUTES)

# Two nodes of four ranks under a real Prometheus for MINUTES, as root: needs Debian's prometheus and
# prometheus-node-exporter.
soak-watched: $(VENV)/.installed-test
	$(BIN)/python tests/observed_soak.py out/soak-watched --minutes $(MINUTES)

# Random input for SECONDS: every reader of files, each input within 5 s and 1 GB; and the compiled core, which sanitizers watch, with
# libFuzzer, where Clang and its runtime are (Debian: clang and libclang-rt-14-dev).
SECONDS ?= 60
CLANG ?= clang++
fuzz: $(VENV)/.installed-test
	$(BIN)/python tests/fuzz_files.py --seconds $(SECONDS)
ifeq ($(shell command -v $(CLANG)),)
	@echo "the core is not fuzzed: there is no $(CLANG)"
else
	CXX=$(CLANG) $(BIN)/cmake -S csrc -B build/libfuzzer -DENVPLAN_EXTENSION=OFF -DENVPLAN_FUZZ=ON > build/libfuzzer.log
	$(BIN)/cmake --build build/libfuzzer >> build/libfuzzer.log || { cat build/libfuzzer.log; exit 1; }
	mkdir -p build/libfuzzer/corpus
	build/libfuzzer/fuzz_core -max_total_time=$(SECONDS) -max_len=2048 -print_final_stats=1 build/libfuzzer/corpus
endif

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.hpp csrc/serving/* csrc/tests/*

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.cpp csrc/*.hpp csrc/serving/* csrc/tests/*

# The site in build/site; fails on a broken link.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site

# sdist and wheel in dist/, their digests, what they bring with them and under which licences, and a
# proof that the wheel works by itself, from an empty folder. The time of the last commit is that of
# all files in them, so whoever builds it again gets the same bytes.
package: export SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct)
package: $(VENV)/.installed-package
	rm -rf dist build/clean
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*
	cd dist && sha256sum *.tar.gz *.whl > SHA256SUMS
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet dist/*.whl
	$(BIN)/cyclonedx-py environment --output-reproducible -o dist/envplan.cdx.json build/clean
	$(BIN)/pip-licenses --python build/clean/bin/python --order license --format markdown > dist/LICENSES.md
	cd build/clean && bin/envplan frontier a40-gpt3-1.3b-4stage --plot && bin/envplan solve a40-gpt3-1.3b-4stage \
		&& bin/envplan check plan.json && bin/envplan report plan.json

# Manylinux wheels in dist/ for each Python from 3.11 to 3.14 that is here, each proved by a plan.
wheels: $(VENV)/.installed-wheels
	$(BIN)/python -m tools.wheels dist

# Takes about a quarter of an hour, most of it the peer's; BENCH=--quick for a minute.
bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks $(BENCH)

# Makes the modelled built-in profiles and the JSON Schemas anew; tests check that they are current.
profiles: $(VENV)/.installed
	$(BIN)/python -m tools.builtin_profiles profiles docs/profiles.md
	$(BIN)/python -m tools.schemas

# All pages of results.
results: results-training results-serving results-site

# Sets every planner beside the published figures on every measured workload (ten minutes), and draws
# the picture of the README.
results-training: $(VENV)/.installed
	$(BIN)/python -m benchmarks.results docs/results.md
	@mkdir -p build
	$(BIN)/envplan solve sosp24-a100-gpt3-xl-4stage --microbatches 8 --quiet -o build/overview.plan.json
	$(BIN)/envplan timeline build/overview.plan.json --quiet -o docs/overview.png

# Replays weeks of serving (most of an hour).
results-serving: $(VENV)/.installed
	$(BIN)/python -m benchmarks.serving_runs
	$(BIN)/python -m benchmarks.serving_results docs/results-serving.md
	$(BIN)/python -m benchmarks.serving_baselines
	$(BIN)/python -m benchmarks.serving_bursts

# Shares the power of a site of measured jobs (half a minute).
results-site: $(VENV)/.installed
	$(BIN)/python -m benchmarks.site_results docs/results-site.md

# Holds predictions against the published real runs: writes docs/validation.md and its pictures. The
# measured profiles themselves come from `python -m tools.sosp24`. Two minutes each.
validate: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.validate

# The oldest PyTorch that pyproject.toml allows, the newest, and the frameworks that run on CPUs, in
# environments of their own below $ENVPLAN_COMPAT, which are built once. What cannot be built, or
# not in time, is said, and is no failure.
COMPAT = -m tools.compat --only torch-oldest torch-newest frameworks bridge --minutes 30
test-versions: $(VENV)/.installed-test
	$(BIN)/python $(COMPAT) || [ $$? = 75 ]

# deploy/ on what it is written for: Debian's Slurm, two nodes of it on this machine, as root; promtool
# and Kubernetes' schemas.
test-operations: $(VENV)/.installed-test
	$(BIN)/python -m tools.compat --only operations

# These environments, ahead of the tests in them.
build-versions: $(VENV)/.installed-test
	$(BIN)/python $(COMPAT) --build || [ $$? = 75 ]

# All of these, and the page that says what worked.
compat: $(VENV)/.installed-test
	$(BIN)/python -m tools.compat docs/compatibility.md

# All that needs a GPU, in ten minutes, into docs/gpu.md; no clock is set. SET_CLOCKS=--set-clocks
# adds what sets clocks, never on a borrowed card. Without a GPU it runs against a stand-in.
gpu: $(VENV)/.installed-test
	$(BIN)/python -m tools.gpu_page docs/gpu.md $(SET_CLOCKS)

# The lock files anew, for every Python and system that envplan supports: what builds envplan, and
# what developing it takes.
UV_COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes
lock: | $(BIN)/python
	$(BIN)/python -m pip install --quiet uv
	$(UV_COMPILE) --extra yaml --group test --group docs --group package --group lint --group build \
		-o requirements/dev.txt pyproject.toml
	$(UV_COMPILE) --group pyproject.toml:build --constraint requirements/dev.txt -o requirements/build.txt

# Known faults of what the lock files name. What cannot be looked up, as where a mirror stands for the
# registry, is a failure: nothing is known of it then.
audit: | $(BIN)/python
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --strict --require-hashes --disable-pip -r requirements/build.txt -r requirements/dev.txt

clean:
	rm -rf $(VENV) build out

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# envplan is built by what requirements/build.txt names, by its hash. With LOCK=1, as in CI, all that
# is installed beside it is what requirements/dev.txt names.
$(VENV)/.installed: $(BUILD_INPUTS) requirements/build.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/build.txt
	$(if $(LOCK),$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt)
	$(BIN)/python -m pip install --quiet --no-build-isolation $(if $(LOCK),--no-deps) --editable .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(if $(LOCK),,$(BIN)/python -m pip install --quiet --group $*)
	@touch $@
