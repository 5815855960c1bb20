# Two commands do everything: `make run` and `make test`.
PYTHON ?= python3
# Another build of torch (2.11 to 2.14), as pip wants to hear it; it may name an index of its own.
TORCH ?= torch==2.13.0
# nvrtc compiles the CUDA kernels, for tests without a GPU; leave it out beside a torch for CUDA 12.8 or 12.9,
# which wants another version.
EXTRAS ?= dev,nvrtc
MODEL ?= demo
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test check bench install clean

install: $(VENV)/installed

# torch first and alone: any looser request for it would pull in another, much larger build.
$(VENV)/installed: pyproject.toml clients/python/pyproject.toml docker/constraints.txt \
		$(wildcard engine/penstock/kernels/cpu.c engine/penstock/kernels/cpu/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c docker/constraints.txt -e '.[$(EXTRAS)]' -e clients/python
	@touch $@

run: install
	$(BIN)/penstock serve $(MODEL)

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install
	$(BIN)/python tests/bench/decode.py

clean:
	rm -rf $(VENV) build engine/*.egg-info *.egg-info engine/penstock/kernels/*.so
