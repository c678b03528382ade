# Developer shortcuts; a change must pass `make check` before it is proposed.
PYTHON ?= python

.PHONY: check lint types test slow compiled hostile demo coverage dist docs schema

check: lint types test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m '(slow or needs) and not compiled'

# The smallest network of each family through torch's compiler: half an hour.
compiled:
	$(PYTHON) -m pytest -n 0 -m compiled

# Many damaged files, kills and failing disks: takes hours.
hostile:
	HOSTILE_CASES=100000 HOSTILE_KILLS=200 HOSTILE_FAULTS=1000 $(PYTHON) -m pytest -n 0 -m slow tests/hostile

# The schema by which editors check configurations; run it after changing an option.
schema:
	$(PYTHON) -m speakernet show-config --schema > configs/schema.json

# The site, in site/, with generated pages (docs/site.py); needs the extra `docs`, and two minutes for a notebook.
docs:
	$(PYTHON) -m mkdocs build --strict

demo:
	$(PYTHON) trainSpeakerNet.py --config exp01.yaml

# Line coverage of the package by the default tests; uncovered lines are listed.
coverage:
	$(PYTHON) -m pytest --cov=speakernet --cov-report=term-missing:skip-covered --cov-fail-under=92

# Wheel and source distribution, into dist/.
dist:
	$(PYTHON) -m build
