# Fresh machine: `make demo`, `make test`. PYTHON chooses the interpreter (3.10 to 3.12).
PYTHON ?= python3
OVERLAY := $(shell find deepspeed deepspeed_autoep -name '*.py') deepspeed_autoep.pth setup.py README.md
PIP := -m pip --disable-pip-version-check
export LOCAL_SIZE ?= 8  # lets several ranks run on one CPU socket
export DS_ACCELERATOR ?= cpu
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup setup-floor demo test test-newest test-floor test-slow lint clean

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

test: test-newest test-floor

test-newest: setup
	.venv/bin/python -m pytest tests -m "not slow"

test-floor: setup-floor
	.venv-floor/bin/python -m pytest tests -m "floor and not slow"

test-slow: setup
	.venv/bin/python -m pytest tests -m slow

lint: setup
	.venv/bin/pre-commit run --all-files

clean:
	rm -rf .venv .venv-floor build runs *.egg-info
