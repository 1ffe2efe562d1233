# terapipe: `make` lists what there is to do.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.DEFAULT_GOAL := help
.PHONY: help demo test lab lint bench verify-all clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

# Everything is installed here; torch is pinned, so that no unwanted build is fetched.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev,export]'
	touch $(READY)

demo: $(READY)  ## the main job, end to end: table, runs/demo/summary.json, runs/demo/report.html
	$(BIN)/terapipe demo

test: $(READY)  ## every test, notebooks included, with coverage of the child processes too
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -m "not full" tests
	$(BIN)/coverage combine -q
	$(BIN)/coverage report
	$(BIN)/python -m pytest -q --nbval-lax --nbval-current-env notebooks

lab: $(READY)  ## open JupyterLab at the tour
	$(BIN)/jupyter lab notebooks/00_tour.ipynb

lint: $(READY)  ## style, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## speed, as ratios measured side by side
	for file in benchmarks/*.py; do $(BIN)/python $$file || exit 1; done

verify-all: $(READY)  ## exactness over the full product of cases
	$(BIN)/python -m pytest -q -m full tests

clean:  ## remove what make made, runs too
	rm -rf $(VENV) runs .coverage*
