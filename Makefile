# `make` prints this list. Every target is one command that also works without make.
.DEFAULT_GOAL := help
.PHONY: help setup learn lessons bench demo test coverage lint format check clean

BIN := .venv/bin

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/minivllm: pyproject.toml
	python3 -m venv .venv
	$(BIN)/pip install -e ".[course,dev]"
	@touch $@

setup: $(BIN)/minivllm  ## make .venv with the package, the tests and the linters

learn: setup  ## open the course in JupyterLab
	$(BIN)/jupyter lab --ServerApp.root_dir=. notebooks/00_tour.ipynb

lessons: setup  ## write notebooks and solutions from the lessons and run the gates
	$(BIN)/python -m course build
	$(BIN)/python -m course execute
	$(BIN)/python -m course verify

bench: setup  ## time the engine and transformers
	$(BIN)/python benchmarks/peers.py

demo: setup  ## answer eight prompts and draw what the engine did
	$(BIN)/minivllm demo

test: setup  ## the tests that a laptop runs
	$(BIN)/python -m pytest --nbval

coverage: setup  ## which lines the quick tests reach
	$(BIN)/python -m pytest tests -n 2 --cov=minivllm \
		-m "not (long or course or slow or gpu or browser)"

lint: setup  ## ruff, codespell and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

format: setup  ## repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check:  ## everything that CI runs, in an environment of its own (takes minutes)
	.ci/run

clean:  ## remove caches and build leftovers; keeps .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
