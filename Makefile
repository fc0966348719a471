# One command each: `make demo` shows the main job, `make quick` and `make test` run tests, `make check` is what CI runs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Most tests wait for something, so two of them share a core; a worker takes about 1 GiB of memory.
CORES   := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell [ $(CORES) -gt 4 ] && echo 8 || echo $$((2 * $(CORES))))
# A worker that crashes ends the run: in place of another one pytest-xdist 3.8 would wait for ever at the end.
BESIDE   = -n $(WORKERS) --dist loadgroup --max-worker-restart 0

# The tests start hundreds of processes, each of which would compile all of tierstate again.
unexport PYTHONDONTWRITEBYTECODE

# Python compiles what is imported, a third of what pip would compile.
PIP = --quiet --no-compile

.PHONY: demo demo-ranks quick test test-integrations test-lowest test-newest check format lint types wheel bench bench-field mutants soak fuzz reference docs lock audit clean

demo: $(VENV)/ready
	$(BIN)/python examples/demo.py

# Four ranks, one of which is killed; then two, then one.
demo-ranks: $(VENV)/ready
	$(BIN)/python examples/demo_ranks.py

# After each edit: what needs neither root nor a server and is not slow, and so waits for little.
quick: WORKERS = $(shell expr $(CORES) + 1)
quick: $(VENV)/ready
	HYPOTHESIS_PROFILE=quick $(BIN)/pytest -q $(BESIDE) -m "not (soak or slow or server or root)"

# All that this machine can run; what it cannot is skipped, and named in one line at the end.
test: $(VENV)/ready
	$(BIN)/pytest -q $(BESIDE) -m "not soak"

# The quick tests, in environments of their own: with the lowest versions that pyproject.toml allows, and with the newest
# that install. Another Python: make test-newest PYTHON=python3.13
test-lowest: .venv-lowest/ready
test-newest: .venv-newest/ready
test-lowest test-newest: WORKERS = $(CORES)
test-lowest test-newest:
	HYPOTHESIS_PROFILE=quick $(@:test-%=.venv-%)/bin/pytest -q $(BESIDE) -m "not (soak or slow or server or root)"

.venv-lowest/ready .venv-newest/ready: pyproject.toml tests/lowest_versions.py
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(PYTHON) tests/lowest_versions.py $(@D) > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --upgrade --constraint $(@D)/constraints.txt --editable . --group test
	touch $@

# With the real frameworks, in an environment of their own.
test-integrations: .venv-integrations/ready
	.venv-integrations/bin/pytest -q $(BESIDE) -m "not soak" tests/integrations

.venv-integrations/ready: pyproject.toml constraints.txt requirements/integrations.txt
	$(PYTHON) -m venv .venv-integrations
	$(call install,.venv-integrations,integrations)
	touch $@

# With fewer examples of each property than make test has, to be done in half an hour.
check: export HYPOTHESIS_PROFILE ?= ci
check:
	@# pip uses one core, so two of the environments at a time.
	@$(MAKE) --no-print-directory -j 2 $(VENV)/ready .venv-wheel/ready .venv-integrations/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@# The only tests about the checkout itself; all others run once, against the wheel.
	$(BIN)/pytest -q tests/test_architecture.py tests/test_locks.py
	$(MAKE) --no-print-directory test-integrations
	TIERSTATE_TEST_INSTALL=1 $(MAKE) --no-print-directory wheel

# All tests against the built wheel, in an environment that has never seen the checkout.
wheel: $(VENV)/ready .venv-wheel/ready
	@sh tests/against_wheel.sh .venv-wheel/bin $(BIN)/python $(BESIDE)

# What the tests need beside the wheel; and torch, which is not locked, in the version of the other environments.
.venv-wheel/ready: constraints.txt requirements/test.txt
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/pip install $(PIP) --require-hashes --no-deps --requirement requirements/test.txt
	.venv-wheel/bin/pip install $(PIP) --constraint constraints.txt torch
	touch $@

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Single changes of the code, each of which some test must notice; make mutants ARGS="--only 'posix*'" for a few.
mutants: $(VENV)/ready
	$(BIN)/python tests/mutants/run.py $(ARGS)

soak: $(VENV)/ready .venv-integrations/ready
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -q
	@# Once more, with random pauses of all threads.
	TIERSTATE_TEST_PAUSES=1 $(BIN)/pytest -q $(BESIDE) -m "not soak"
	.venv-integrations/bin/pytest -q tests/integrations
	$(MAKE) fuzz

# Coverage-guided, for so many seconds each, parsers and then whole repositories: make fuzz FOR=3600
FOR ?= 600
fuzz: .venv-fuzz/ready
	.venv-fuzz/bin/python tests/fuzz/parsers.py -max_total_time=$(FOR)
	.venv-fuzz/bin/python tests/fuzz/repositories.py -max_total_time=$(FOR)

.venv-fuzz/ready: pyproject.toml constraints.txt requirements/fuzz.txt
	$(PYTHON) -m venv .venv-fuzz
	$(call install,.venv-fuzz,fuzz)
	touch $@

# In an environment of its own, so that what tierstate is compared with never meets the tests.
bench: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks $(ARGS)

# The work of papers and of MLPerf Storage, on a folder of the disk to measure: make bench-field ARGS="--path /local"
bench-field: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks.field $(ARGS)

.venv-bench/ready: pyproject.toml constraints.txt requirements/bench.txt
	$(PYTHON) -m venv .venv-bench
	$(call install,.venv-bench,bench)
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt requirements/dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tierstate needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(call install,$(VENV),dev)
	touch $@

# All but torch by the hashes of their files; torch in the build that this machine's index has (CPU, CUDA, ROCm). One at a
# time builds in the checkout.
define install
	$(1)/bin/pip install $(PIP) --require-hashes --no-deps --requirement requirements/$(2).txt
	flock . $(1)/bin/pip install $(PIP) --constraint constraints.txt --no-build-isolation --editable .
endef

# After a change of a policy's keys or of a public name: what pages have from the code.
reference: $(VENV)/ready
	$(BIN)/python docs/site/tables.py

# The documentation as a site in build/site, strict: no link that leads to nothing, no page without a place.
docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

# It reads the docstrings from the text, so tierstate and torch are not installed there.
.venv-docs/ready: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --require-hashes --no-deps --requirement requirements/docs.txt
	touch $@

# After a change of pyproject.toml or constraints.txt: the versions of constraints.txt, with the hashes of all their files.
lock: .venv-tools/ready
	sh requirements/lock.sh .venv-tools/bin/uv

# Known vulnerabilities of what is locked. Where the database cannot be reached, it says so and is no failure.
audit:
	@$(PYTHON) requirements/audit.py

.venv-tools/ready: requirements/tools.txt
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/pip install --quiet --require-hashes --no-deps --requirement requirements/tools.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-docs .venv-fuzz .venv-integrations .venv-tools .venv-swift .venv-lowest .venv-newest .venv-wheel .demo build dist *.egg-info
