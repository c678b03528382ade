# Developer shortcuts; `make check` is what a change must pass before it is proposed.
PYTHON ?= python

.PHONY: check lint types test slow compiled hostile demo

check: lint types test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m slow

# The smallest network of each family through torch's compiler: half an hour.
compiled:
	$(PYTHON) -m pytest -n 0 -m compiled

# Some hours; goes on where it was stopped.
hostile:
	$(PYTHON) tests/hostile/run.py

demo:
	$(PYTHON) trainSpeakerNet.py --config exp01.yaml
