# Developer shortcuts; `make check` is what a change must pass before it is proposed.
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
	$(PYTHON) -m pytest -m slow

# The smallest network of each family through torch's compiler: half an hour.
compiled:
	$(PYTHON) -m pytest -n 0 -m compiled

# Damaged files, kills and failing disks in numbers: takes hours.
hostile:
	HOSTILE_CASES=100000 HOSTILE_KILLS=200 HOSTILE_FAULTS=1000 $(PYTHON) -m pytest -n 0 -m slow tests/hostile

# After an option has changed: what editors know of the configuration.
schema:
	$(PYTHON) -m speakernet show-config --schema > configs/schema.json

# The site, in site/, with the page of all options; needs the extra `docs`.
docs:
	$(PYTHON) -m speakernet show-config --reference > docs/configuration.md
	$(PYTHON) -m mkdocs build --strict

demo:
	$(PYTHON) trainSpeakerNet.py --config exp01.yaml

# Lines of the package that the default tests run; what is missing is listed.
coverage:
	$(PYTHON) -m pytest --cov=speakernet --cov-report=term-missing:skip-covered --cov-fail-under=92

# Wheel and source distribution, into dist/.
dist:
	$(PYTHON) -m build
