# Two commands: `make quickstart` and `make test`. Both set up everything they need, in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export TQDM_DISABLE ?= 1

.PHONY: quickstart test lab bench notebooks clean

quickstart: $(VENV)/.user
	$(BIN)/python scripts/quickstart.py

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/jupytext --test --to py:percent notebooks/*.ipynb
	$(BIN)/python -c "from contbatch.catalog import fetch; fetch('smollm2-135m')"
	$(BIN)/python -m pytest --nbval tests notebooks

lab: $(VENV)/.user
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/cpu.py

# Run every notebook anew, write outputs and versions into it, and make the index.
notebooks: $(VENV)/.dev
	$(BIN)/python scripts/notebooks.py

# clone.pth: in the folder that the clone lies in, Python would take the clone's folder itself for the package.
$(VENV)/.user $(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[cpu,notebooks,simulation$(if $(findstring .dev,$@),$(comma)ptx$(comma)dev)]'
	$(BIN)/python -c "import sysconfig as s; from pathlib import Path as P; P(s.get_path('purelib'), 'clone.pth').write_text(str(P.cwd()))"
	touch $@

comma := ,

clean:
	rm -rf $(VENV) build *.egg-info
