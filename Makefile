# Everything here works on a fresh Debian 12 with Rust and Python. Python packages go to .venv, never anywhere
# global; a missing Debian package is installed, or named, by scripts/need.

TARGET  := $(or $(CARGO_TARGET_DIR),target)
DMAFILE := $(TARGET)/release/dmafile
PYTHON  := .venv/bin/python
PIP     := $(PYTHON) -m pip --disable-pip-version-check

# Where `make install` puts things, in the words of the GNU standards; DESTDIR goes before, for packages.
PREFIX      ?= /usr/local
BINDIR      ?= $(PREFIX)/bin
LIBDIR      ?= $(PREFIX)/lib
INCLUDEDIR  ?= $(PREFIX)/include
MANDIR      ?= $(PREFIX)/share/man
DESTDIR     ?=
CAPI = $(MAKE) --no-print-directory -C capi ARCHIVE=$(abspath $(TARGET))/release/libdmafile_capi.a \
	PREFIX=$(PREFIX) LIBDIR=$(LIBDIR) INCLUDEDIR=$(INCLUDEDIR) DESTDIR=$(DESTDIR)

# What ruff, mypy and pytest look at.
SCRIPTS := bench demo python scripts

.PHONY: help demo test bench lint docs install uninstall build built extension need-rust need-rust-tools need-test-tools

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build .venv/demo ## load two models into shareable memory, beside plain read(), and compare checksums
	@echo "demo: a real model and a generated one, from disk into a memfd (under 3 minutes)"
	@scripts/need util-linux-extra command -v fincore
	@$(PYTHON) demo/demo.py --dmafile $(DMAFILE) $(ARGS)

test: lint need-test-tools .venv/demo ## lint, then run every test
	@echo "test: Rust, then the Python of $(SCRIPTS)"
	cargo test --workspace --locked
	@$(MAKE) --no-print-directory extension
	$(PYTHON) -m pytest --quiet -rs $(SCRIPTS)

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
	$(PYTHON) -m ruff check $(SCRIPTS)
	$(PYTHON) -m ruff format --check $(SCRIPTS)
	$(PYTHON) -m mypy

docs: build ## write the man page, shell completions and API documentation under target/
	@echo "docs: the man page and completions to $(TARGET)/docs, the API to $(TARGET)/doc"
	@mkdir -p $(TARGET)/docs
	$(DMAFILE) man > $(TARGET)/docs/dmafile.1
	$(DMAFILE) completions bash > $(TARGET)/docs/dmafile.bash
	$(DMAFILE) completions zsh > $(TARGET)/docs/_dmafile
	$(DMAFILE) completions fish > $(TARGET)/docs/dmafile.fish
	cargo doc --workspace --no-deps --locked

install: built ## install the command, its manual and the C library (PREFIX=/usr/local DESTDIR=)
	@echo "install: under $(DESTDIR)$(PREFIX)"
	install -d $(DESTDIR)$(BINDIR) $(DESTDIR)$(MANDIR)/man1
	install -m 755 $(DMAFILE) $(DESTDIR)$(BINDIR)/dmafile
	@$(DMAFILE) man > $(TARGET)/release/dmafile.1
	install -m 644 $(TARGET)/release/dmafile.1 $(DESTDIR)$(MANDIR)/man1/dmafile.1
	@$(CAPI) install
	@[ -n "$(DESTDIR)" ] || [ "$$(id -u)" -ne 0 ] || ldconfig

uninstall: ## remove what `make install` put there (the same PREFIX and DESTDIR)
	@echo "uninstall: from $(DESTDIR)$(PREFIX)"
	rm -f $(DESTDIR)$(BINDIR)/dmafile $(DESTDIR)$(MANDIR)/man1/dmafile.1
	@$(CAPI) uninstall
	@[ -n "$(DESTDIR)" ] || [ "$$(id -u)" -ne 0 ] || ldconfig

build: need-rust
	cargo build --release --locked

# `sudo make install` after `make build` needs no Rust, which is rarely in root's PATH.
built:
	@command -v cargo >/dev/null || [ ! -x $(DMAFILE) ] || exit 0; $(MAKE) --no-print-directory build

# The Python package, as an editable install in .venv, of the crates that `cargo test` has built.
extension: need-rust .venv/dev
	VIRTUAL_ENV=.venv .venv/bin/maturin develop --quiet

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
	@for wanted in fuse3:fusermount3 squashfs-tools:mksquashfs pkg-config:pkg-config valgrind:valgrind; do \
		scripts/need $${wanted%:*} command -v $${wanted#*:} || [ "$$CI" != true ] || exit 1; \
	done
	@scripts/need libc6-dbg valgrind --quiet true || [ "$$CI" != true ]

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
