# One command each: `make demo` shows the main job, `make test` runs the tests, `make check` is what CI runs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo demo-ranks test check format lint types wheel bench soak fuzz clean

demo: $(VENV)/ready
	$(BIN)/python examples/demo.py

# Four ranks, one of which is killed; then two, then one.
demo-ranks: $(VENV)/ready
	$(BIN)/python examples/demo_ranks.py

test: $(VENV)/ready
	$(BIN)/pytest -m "not soak"

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@# Both test runs at once, as most tests wait for something; told one after the other.
	@log=$$(mktemp); $(MAKE) --no-print-directory wheel >$$log 2>&1 & wheel=$$!; \
	trap "kill $$wheel" INT TERM; \
	$(BIN)/pytest -m "not soak" -q; here=$$?; \
	wait $$wheel; there=$$?; \
	echo "Against the wheel:"; cat $$log; rm $$log; exit $$((here || there))

# The tests once more, against the built wheel in an environment that has never seen the checkout.
wheel: $(VENV)/ready
	sh tests/against_wheel.sh $(PYTHON) $(BIN)/python

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(VENV)/ready
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -q
	$(MAKE) fuzz

# Coverage-guided, for so many seconds: make fuzz FOR=3600
FOR ?= 600
fuzz: .venv-fuzz/ready
	.venv-fuzz/bin/python tests/fuzz/parsers.py -max_total_time=$(FOR)

.venv-fuzz/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/pip install --quiet --upgrade "pip>=25.1"
	.venv-fuzz/bin/pip install --quiet --constraint constraints.txt --editable . --group fuzz
	touch $@

# In an environment of its own, so that what tierstate is compared with never meets the tests.
bench: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks $(ARGS)

.venv-bench/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --upgrade "pip>=25.1"
	.venv-bench/bin/pip install --quiet --constraint constraints.txt --editable . --group bench
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tierstate needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . --group dev
	touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-fuzz .venv-swift .demo build dist *.egg-info
