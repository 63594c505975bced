# Fresh machine: `make demo`, `make test`. PYTHON chooses the interpreter (3.10 to 3.12).
PYTHON ?= python3
OVERLAY := $(shell find accelerate deepspeed transformers deepspeed_autoep -name '*.py' -o -name '*.json') deepspeed_autoep.pth setup.py README.md
PIP := -m pip --disable-pip-version-check
# DeepSpeed counts a CPU machine's devices by its sockets unless this says otherwise.
export LOCAL_SIZE ?= 8
export DS_ACCELERATOR ?= cpu
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup setup-floor demo test test-newest test-floor test-transformers-floor test-slow test-families families bench-init bench-ways bench-block bench-export bench-load bench-plan bench-memory bench-startup lint clean

setup: .venv/.overlay
setup-floor: .venv-floor/.overlay

.venv/.ready: requirements/requirements-dev.txt
.venv-floor/.ready: requirements/requirements-floor.txt
.venv/.ready .venv-floor/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) install --quiet -r $<
	touch $@

# Tests and examples run on the installed wheel, as users do.
%/.overlay: %/.ready $(OVERLAY)
	rm -rf build
	$*/bin/python $(PIP) install --quiet --no-deps --no-build-isolation --force-reinstall .
	touch $@

demo: setup
	.venv/bin/python examples/demo.py

test: test-newest test-floor test-transformers-floor

test-newest: setup
	.venv/bin/python -m pytest tests -m "not slow"

test-floor: setup-floor
	.venv-floor/bin/python -m pytest tests -m "floor and not slow"

# The newest DeepSpeed on the oldest Transformers: laid over the floor's environment.
.venv-floor/newest-deepspeed: requirements/requirements-dev.txt .venv-floor/.ready
	rm -rf $@
	.venv-floor/bin/python $(PIP) install --quiet --no-deps --target $@ $$(grep '^deepspeed==' $<)

test-transformers-floor: setup-floor .venv-floor/newest-deepspeed
	PYTHONPATH=$(CURDIR)/.venv-floor/newest-deepspeed .venv-floor/bin/python -m pytest tests -m "presets and not slow"

test-slow: setup
	.venv/bin/python -m pytest tests -m slow

# Every family, recorded for `ds_autoep families` and README.
test-families: setup
	DS_AUTOEP_RECORD_FAMILIES=1 .venv/bin/python -m pytest tests -m families
	.venv/bin/python -m deepspeed_autoep.family_matrix README.md

families: setup
	.venv/bin/python -m deepspeed_autoep.family_matrix README.md

bench-init: setup setup-floor
	.venv-floor/bin/python benchmarks/init.py
	.venv/bin/python benchmarks/init.py --ranks 2 4 8 --plot docs/init-memory.png
	.venv/bin/python benchmarks/init.py --shape qwen3-30b --ep 2

bench-ways: setup
	.venv/bin/python benchmarks/ways.py

# Needs one GPU; contenders whose package is not installed are left out.
bench-block: setup
	.venv/bin/python benchmarks/block.py

bench-export: setup
	.venv/bin/python benchmarks/export.py

bench-load: setup
	.venv/bin/python benchmarks/load.py

bench-plan: setup
	.venv/bin/python benchmarks/plan.py

bench-memory: setup
	@.venv/bin/python benchmarks/memory_table.py

bench-startup: setup
	.venv/bin/python benchmarks/startup.py

lint: setup
	.venv/bin/pre-commit run --all-files

clean:
	rm -rf .venv .venv-floor build runs *.egg-info
