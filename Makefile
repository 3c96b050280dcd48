# make demo: a real pretrained model cut to a budget and checked by the clock.   make test: everything CI checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TESTED := $(VENV)/.tested

.PHONY: demo test check setup clean
setup: $(STAMP)

# The stamp is written last, so that an interrupted set-up is finished by the next run.
$(STAMP): pyproject.toml constraints.txt requirements-demo.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-demo.txt
	@touch $@

$(TESTED): $(STAMP) requirements-test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-test.txt
	@touch $@

demo: $(STAMP)
	$(BIN)/apportion fit minilm --budget "latency<=50%@ort-cpu-1t" --rungs 1 --repair-steps 100 --seed 1 -o runs/demo
	$(BIN)/apportion verify runs/demo

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks recipes
	$(BIN)/ruff format --check src tests benchmarks recipes
	$(BIN)/mypy

test: check $(TESTED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --hypothesis-profile ci --durations 15 -n 2 --dist loadfile \
		--no-loadscope-reorder tests src

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
