# Developer shortcuts; `make check` is what a change must pass before it is proposed.
PYTHON ?= python

.PHONY: check lint types test slow demo

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

demo:
	$(PYTHON) trainSpeakerNet.py --config exp01.yaml
