# Everything here works on a fresh Debian 12 with Rust and Python. Python packages go to .venv, never anywhere
# global; a missing Debian package is installed, or named, by scripts/need.

TARGET  := $(or $(CARGO_TARGET_DIR),target)
DMAFILE := $(TARGET)/release/dmafile
PYTHON  := .venv/bin/python
PIP     := $(PYTHON) -m pip --disable-pip-version-check

.PHONY: help demo test bench lint docs build need-rust need-rust-tools need-test-tools

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build .venv/demo ## load two models into shareable memory, beside plain read(), and compare checksums
	@echo "demo: a real model and a generated one, from disk into a memfd (under 3 minutes)"
	@scripts/need util-linux-extra command -v fincore
	@$(PYTHON) demo/demo.py --dmafile $(DMAFILE) $(ARGS)

test: lint need-test-tools ## lint, then run every test
	@echo "test: Rust, then the Python of attacks/, bench/, demo/ and scripts/"
	cargo test --workspace --locked
	$(PYTHON) -m pytest --quiet attacks bench demo scripts

bench: build ## measure against fio and read(): a 4 GiB file, about 10 minutes (ARGS="--rounds 5" and the like)
	@echo "bench: the speed targets on this machine, raw results in .bench/result.json"
	@scripts/need fio command -v fio
	@scripts/need util-linux-extra command -v fincore
	@python3 bench/bench.py --dmafile $(DMAFILE) $(ARGS)

lint: need-rust-tools .venv/dev ## check formatting, lints, documentation and types
	@echo "lint: rustfmt, clippy, rustdoc, ruff, mypy"
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
	$(PYTHON) -m ruff check attacks bench demo scripts
	$(PYTHON) -m ruff format --check attacks bench demo scripts
	$(PYTHON) -m mypy

docs: build ## write the man page, shell completions and API documentation under target/
	@echo "docs: the man page and completions to $(TARGET)/docs, the API to $(TARGET)/doc"
	@mkdir -p $(TARGET)/docs
	$(DMAFILE) man > $(TARGET)/docs/dmafile.1
	$(DMAFILE) completions bash > $(TARGET)/docs/dmafile.bash
	$(DMAFILE) completions zsh > $(TARGET)/docs/_dmafile
	$(DMAFILE) completions fish > $(TARGET)/docs/dmafile.fish
	cargo doc --workspace --no-deps --locked

build: need-rust
	cargo build --release --locked

need-rust:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust, see https://rustup.rs" >&2; exit 1; }
	@scripts/need build-essential command -v cc

need-rust-tools: need-rust
	@cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt || \
		{ echo "rustfmt is missing; type: rustup component add rustfmt" >&2; exit 1; }
	@cargo clippy --version >/dev/null 2>&1 || rustup component add clippy || \
		{ echo "clippy is missing; type: rustup component add clippy" >&2; exit 1; }

# Rust tests skip what they lack a tool for, except under CI=true, where nothing may go untested unnoticed.
need-test-tools:
	@scripts/need util-linux-extra command -v fincore
	@for wanted in fuse3:fusermount3 squashfs-tools:mksquashfs; do \
		scripts/need $${wanted%:*} command -v $${wanted#*:} || [ "$$CI" != true ] || exit 1; \
	done

# Debian keeps ensurepip, without which a venv has no pip, in a package of its own. A venv made without it is
# left half done, so what counts is pip.
.venv/bin/pip:
	@scripts/need python3-venv python3 -c "import ensurepip, venv"
	python3 -m venv .venv

.venv/dev: requirements-dev.txt .venv/bin/pip
	$(PIP) install --quiet --requirement requirements-dev.txt
	@touch $@

.venv/demo: demo/requirements.txt .venv/bin/pip
	$(PIP) install --quiet --no-deps --requirement demo/requirements.txt
	@touch $@
