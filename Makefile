# Two commands: `make demo` watches a real notebook train, `make test` proves it. Both start from a fresh clone
# with Python >= 3.11, pip and make; stamp files keep a second run from installing anything again.

PYTHON ?= python3
PYTEST_ARGS ?= -m "not gpu and not soak and not full"

VENV := .venv
COLAB := .venv-colab
KAGGLE := .venv-kaggle
DOCS := .venv-docs
INSTALL := -m pip install -qq --disable-pip-version-check -c constraints.txt

ENOUGH_PYTHON = @$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("nbaccel needs Python 3.11 or newer, and this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'

# Each of the hundreds of kernels that tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-core test-all full processors test-torch test-deepspeed format lint types unit soak coverage bench bench-merge gpu bench-gpu programs \
    public-notebooks screenshot notebooks docs address dist clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	@$(VENV)/bin/nbaccel demo

test: format lint types unit

format: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .

types: $(VENV)/.dev
	$(VENV)/bin/mypy

# In several processes beside each other, then what is timed; a handful of failed tests is tried once more: tests/suite.py.
# Which cases of each test are run here, and which by `make full` alone, is chosen in tests/selection.py.
unit: $(VENV)/.dev $(COLAB)/.stamp $(KAGGLE)/.stamp $(VENV)/.chromium
	$(VENV)/bin/python tests/suite.py $(PYTEST_ARGS)

# Tests of the core, where each folder of nbaccel/features is taken away in turn, then all: tests/core.py says which tests.
# `make test-core FEATURES="check all"` for some. `make test` has a program without any feature, `make full` one for each.
FEATURES ?=

test-core: $(VENV)/.dev
	$(VENV)/bin/python tests/core.py $(FEATURES)

# The tests with another Python, torch or front end, in an environment of its own that can be deleted afterwards:
# `make test-torch PYTHON=python3.12 TORCH=2.10.0 FRONT_END=kaggle`. Without TORCH it is the newest that pip finds for that
# Python, without FRONT_END the newest packages; a build for CUDA takes some 7 GB of disk. Less than an hour on two cores:
# launches, kernels, training, loaders, checkpoints, the notebook's part. Left out: browsers, notebooks, services of
# trackers, benchmarks, style and types of the code.
TORCH ?=
FRONT_END ?=
TORCH_ENV = .venv-torch-$(notdir $(PYTHON))-$(or $(TORCH),newest)$(FRONT_END:%=-%)
TORCH_TESTS ?= tests/train tests/launching tests/features tests/output tests/kernel tests/notebook tests/testing tests/test_private_torch.py

test-torch: $(TORCH_ENV)/.stamp
	$(TORCH_ENV)/bin/python tests/suite.py -rs -m "not gpu and not soak and not full and not browser" -k "not colab" \
	    $(TORCH_TESTS)

$(TORCH_ENV)/.stamp: pyproject.toml constraints.txt $(FRONT_END:%=constraints-%.txt)
	$(ENOUGH_PYTHON)
	rm -rf $(TORCH_ENV)
	$(PYTHON) -m venv $(TORCH_ENV)
	grep -v '^torch==' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(TORCH_ENV)/bin/python -m pip install -qq --disable-pip-version-check -c $(TORCH_ENV)/constraints.txt \
	    $(FRONT_END:%=-r constraints-%.txt) -e . 'torch$(addprefix ==,$(TORCH))' ipykernel nbclient nbformat \
	    accelerate hypothesis jupyter_client lightning omegaconf pandas peft pytest pytest-timeout pytest-xdist scikit-learn \
	    tensorboard transformers
	touch $@

# The strategy "deepspeed", which needs its package: an environment of its own over .venv, that can be deleted afterwards.
# Without it these tests are skipped. Half an hour on two cores: some build a kernel.
DEEPSPEED_ENV = .venv-deepspeed

test-deepspeed: $(DEEPSPEED_ENV)/.stamp
	PATH="$(CURDIR)/$(DEEPSPEED_ENV)/bin:$$PATH" $(DEEPSPEED_ENV)/bin/python -m pytest -rs tests/features/deepspeed

$(DEEPSPEED_ENV)/.stamp: $(VENV)/.dev
	rm -rf $(DEEPSPEED_ENV)
	$(VENV)/bin/python -m venv $(DEEPSPEED_ENV)
	$(VENV)/bin/python -c 'import sysconfig; print("import site; site.addsitedir({!r})".format(sysconfig.get_path("purelib")))' \
	    > "$$($(DEEPSPEED_ENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(DEEPSPEED_ENV)/bin/python $(INSTALL) 'setuptools>=77' wheel
	$(DEEPSPEED_ENV)/bin/python $(INSTALL) --no-build-isolation -e '.[deepspeed]'
	touch $@

# Everything that one machine without a GPU can show: `make test`, more environments and settings of what it shows, memory
# and resumption as other processors would have them, and the soak. A few hours on two cores.
test-all: test full processors soak

full: $(VENV)/.strangers $(COLAB)/.stamp $(KAGGLE)/.stamp $(DOCS)/.stamp $(VENV)/.chromium
	$(VENV)/bin/python tests/suite.py -m "full and not gpu and not soak"

# oneDNN, torch and MKL choose their kernels by the processor, and what is refused under a limit of memory, and which bits
# a sum has, differ with them. Three settings of what they look at, and an imitation of a processor whose products depend
# on the number of rows (tests/rounding.py); the processor at hand is a fifth, in `make test`. Everything that compares
# numbers runs under each (marked by tests/selection.py), then, alone, what fills the memory. torch does as it is told:
# on a processor without AVX-512 its ranks die of SIGILL, so that setting is left out there, and named.
PROCESSORS := amx avx512 avx2 sse
LACKS_AVX512 := $(if $(shell grep -m1 -ow avx512f /proc/cpuinfo 2>/dev/null),,avx512)
amx := NBACCEL_TESTS_ROUNDING=rows ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX MKL_CBWR=AUTO
avx512 := ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx512 MKL_CBWR=AUTO MALLOC_ARENA_MAX=1
avx2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2
sse := ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE MALLOC_PERTURB_=165
MEMORY_TESTS := tests/base/test_memory_limit.py tests/launching/test_out_of_memory.py tests/kernel/test_out_of_memory.py \
    tests/test_notebooks.py::test_training_goes_on_where_memory_runs_out \
    tests/test_notebooks.py::test_a_training_that_is_ended_twice_ends_like_one_that_never_was

processors: $(patsubst %,processor-%,$(filter-out $(LACKS_AVX512),$(PROCESSORS)))
	$(if $(LACKS_AVX512),@echo "NOT RUN: processor-avx512, since this processor has no AVX-512 instructions")

processor-%: $(VENV)/.dev $(COLAB)/.stamp
	$(if $(filter $*,$(LACKS_AVX512)),$(error this processor has no AVX-512 instructions: run it on one that has))
	$($*) $(VENV)/bin/python tests/suite.py -m "numbers and not timed and not gpu and not soak and not full"
	$($*) $(VENV)/bin/python tests/suite.py --alone -m "not gpu and not soak" $(MEMORY_TESTS)

# What noise or chance would have to break: hundreds of interrupts, launches and trainings in real kernels, and a
# training notebook under random faults for so many minutes: `make soak MINUTES=30`.
MINUTES ?= 5

soak: $(VENV)/.dev $(COLAB)/.stamp
	MINUTES=$(MINUTES) $(VENV)/bin/python -m pytest -m soak

# What a step, a batch, a launch... cost beside raw PyTorch, DDP, Accelerate and Fabric: `make bench ROWS=step,loader ROUNDS=5`.
ROWS ?=
ROUNDS ?= 3
BENCH_JSON ?= build/bench.json

# The row "deepspeed" needs its package, and so its environment.
BENCH_ENV = $(if $(findstring deepspeed,$(ROWS)),$(DEEPSPEED_ENV)/.stamp,$(VENV)/.dev)

bench: $(BENCH_ENV)
	@mkdir -p $(dir $(BENCH_JSON))
	PYTHONPATH=tests $(dir $(BENCH_ENV))bin/python -m benchmarks --rows '$(ROWS)' --rounds $(ROUNDS) --json $(BENCH_JSON)

# The same, and what it measured into the stored numbers, of which README and docs quote: `make bench-merge ROWS=alternatives`.
# A missed target is stored like any other.
bench-merge: $(VENV)/.dev
	@rm -f $(BENCH_JSON)
	-@$(MAKE) --no-print-directory bench
	PYTHONPATH=tests $(VENV)/bin/python -m benchmarks.merging $(BENCH_JSON) notebooks/what_it_costs.json

# On a machine with a CUDA device, by the Python that has torch for it: nothing is installed, and what is missing is named
# with the pip line that leaves torch alone. Both end with 2, at once, where there is no card. `make gpu` is the tests of
# tests/gpu, by estimate 15 minutes on a large card and 17 on two T4: `make gpu GPU_TESTS="-k nccl" GPU_PYTHON=python3.12`.
# Where a call may take so many seconds only, GPU_SECONDS has what would not fit skipped, and the table printed in time.
GPU_PYTHON ?= python3
GPU_OUT ?= $(or $(OUT),build)
GPU_TESTS ?=
GPU_SECONDS ?=
# What PYTHONPATH had comes after ours: packages that were brought along may lie there.
WITH_GPU_PYTHON = PYTHONUNBUFFERED=1 PYTHONPATH=$(CURDIR):$(CURDIR)/tests$(PYTHONPATH:%=:%) $(GPU_PYTHON)

gpu:
	@$(WITH_GPU_PYTHON) -m gpu --facts $(GPU_OUT)/gpu-facts.jsonl $(GPU_SECONDS:%=--seconds %) $(GPU_TESTS)

# The benchmark there: steps in every precision, batches on their way, first steps, saves, recovery, the planner's search.
# The steps alone take a quarter of an hour by estimate: `make bench-gpu ROWS=transfers,first,recovery,memory ROUNDS=1`.
BENCH_GPU_JSON ?= $(GPU_OUT)/bench-gpu.json

bench-gpu:
	@$(WITH_GPU_PYTHON) -m gpu.machine benchmarks
	@mkdir -p $(dir $(BENCH_GPU_JSON))
	$(WITH_GPU_PYTHON) -m benchmarks.gpu --rows '$(ROWS)' --rounds $(ROUNDS) --json $(BENCH_GPU_JSON)

# Public programs, which lie in a folder outside the repository, with Accelerate and with nbaccel, and the table of both:
# `make programs FOLDER=../programs PART=1/4 NAMES=ddpm ONLY=nbaccel`. The Python is one that has what they import.
PROGRAMS_PYTHON ?= $(VENV)/bin/python
PART ?= 1/1
NAMES ?=
ONLY ?=

programs: $(VENV)/.dev
	@test -n '$(FOLDER)' || { echo 'make programs FOLDER=...: where public programs lie, see tests/public_programs/__main__.py'; exit 2; }
	PYTHONPATH=tests $(PROGRAMS_PYTHON) -m public_programs '$(FOLDER)' --part '$(PART)' $(NAMES:%=--names '%') \
	    $(ONLY:%=--only %)

# Public notebooks, which lie in a folder outside the repository: each cell that trains with --check and then for real, in
# two ranks and plainly (MODE=run), or some with --speed and then with what it advises (MODE=speed), and the table:
# `make public-notebooks FOLDER=../others PART=1/4 NAMES=rasbt_vae`. An hour on two cores, and as much for each mode.
MODE ?= check

public-notebooks: $(VENV)/.dev
	@test -n '$(FOLDER)' || { echo 'make public-notebooks FOLDER=...: where repositories lie, see tests/public_notebooks/__main__.py'; exit 2; }
	PYTHONPATH=tests $(VENV)/bin/python -m public_notebooks '$(FOLDER)' --mode '$(MODE)' --part '$(PART)' \
	    $(NAMES:%=--names '%')

# The notebooks as they are stored: executed, with outputs that say nothing of the machine or the minute. Two minutes.
notebooks: $(VENV)/.dev
	$(VENV)/bin/python tests/stored_notebooks.py

# The site: every page, the reference from docstrings, the notebooks as they are stored, and a search. It is opened as a
# file, without a server or a network. A warning is an error. Half a minute, after its environment has been made: all
# pages are written each time, since each shows the menu.
SITE ?= build/docs
DOCTREES ?= build/doctrees

docs: $(DOCS)/.stamp
	@$(DOCS)/bin/python -m sphinx -q -W --keep-going -E -a -c docs/site -d $(DOCTREES) . $(SITE)
	@echo "$(SITE)/index.html"

# The address of the repository, once it is published, into all that names it: `make address ADDRESS=https://...`.
ADDRESS ?=

address: $(VENV)/.demo
	@$(VENV)/bin/python tests/published.py '$(ADDRESS)'

# What a release consists of: a source distribution, a wheel, and a folder for machines without internet.
DIST ?= dist

dist: $(VENV)/.dev
	$(VENV)/bin/python tests/distributions.py $(DIST)

# The picture in the README, by a real browser.
screenshot: $(VENV)/.dev $(COLAB)/.stamp $(VENV)/.chromium
	$(VENV)/bin/python -m pytest -q tests/browser/test_readme.py --basetemp=build/screenshot
	cp build/screenshot/test_*0/panel.png build/screenshot/test_*0/panel_words.txt notebooks/

coverage: $(VENV)/.dev $(COLAB)/.stamp $(KAGGLE)/.stamp $(VENV)/.chromium
	$(VENV)/bin/python -m coverage run -m pytest $(PYTEST_ARGS)
	$(VENV)/bin/python -m coverage combine --quiet
	$(VENV)/bin/python -m coverage report --skip-covered

$(VENV)/bin/python:
	$(ENOUGH_PYTHON)
	@echo "making the environment $(VENV), in this folder alone"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing nbaccel, torch and JupyterLab into $(VENV): 1.5 GB without a GPU, a minute or two, this once"
	@$(VENV)/bin/python $(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing nbaccel and what its checks need into $(VENV): some minutes, this once"
	$(VENV)/bin/python $(INSTALL) -e '.[demo,dev]'
	touch $(VENV)/.demo $@

# Packages that only other people's programs need: tests of these are skipped where they are absent, as in `make test`.
$(VENV)/.strangers: $(VENV)/.dev
	$(VENV)/bin/python $(INSTALL) -e '.[strangers]'
	touch $@

# The notebook tests also run under the front-end packages of Colab. torch, numpy and the rest are not installed
# twice: a .pth file appends the first environment, and what pip installs here comes before it.
$(COLAB)/.stamp: $(VENV)/.dev constraints-colab.txt
	rm -rf $(COLAB)
	$(VENV)/bin/python -m venv $(COLAB)
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$($(COLAB)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(COLAB)/bin/python $(INSTALL) -r constraints-colab.txt -e .
	touch $@

# Kaggle's image is built on Colab's. What differs in a kernel is ipywidgets: a folder that stands before the packages of
# Colab's environment, two seconds. Its nbconvert, which runs batches there, is not installed: notebooks run by nbclient.
$(KAGGLE)/.stamp: $(COLAB)/.stamp constraints-kaggle.txt
	rm -rf $(KAGGLE)
	$(COLAB)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target $(KAGGLE) \
	    -c constraints-kaggle.txt ipywidgets widgetsnbextension jupyterlab_widgets
	touch $@

# Sphinx, which imports the package for its reference: torch and the rest are those of the first environment.
$(DOCS)/.stamp: pyproject.toml constraints.txt | $(VENV)/.demo
	rm -rf $(DOCS)
	$(VENV)/bin/python -m venv $(DOCS)
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$($(DOCS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(DOCS)/bin/python $(INSTALL) -e '.[docs]'
	touch $@

# The browser tests drive the system's Chromium. Root on Debian gets it here, once; where it is missing those tests
# are skipped and say so, and nothing else depends on it.
$(VENV)/.chromium: $(VENV)/.dev
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        echo "installing chromium for the browser tests"; \
	        (timeout 120 apt-get update -qq; DEBIAN_FRONTEND=noninteractive \
	            timeout 300 apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core) >/dev/null 2>&1 \
	            || echo "chromium could not be installed: the browser tests will be skipped"; \
	    fi
	touch $@

clean:
	rm -rf $(VENV) $(COLAB) $(KAGGLE) $(DOCS) .venv-torch-* .venv-deepspeed build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
