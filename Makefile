# All targets work on a fresh Debian 12 with Rust and Python. Python packages are installed in .venv only. scripts/need
# installs missing Debian packages as root, and otherwise names them.

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
TARGET  := $(or $(CARGO_TARGET_DIR),target)
DMAFILE := $(TARGET)/release/dmafile
PAGES   := $(TARGET)/release/man
SHELLS  := $(TARGET)/release/completions
PYTHON  := .venv/bin/python
PIP     := $(PYTHON) -m pip --disable-pip-version-check
MAKEFLAGS += --no-print-directory

# Where `make install` installs, by the variables of the GNU coding standards; DESTDIR is a prefix for packages.
PREFIX      ?= /usr/local
BINDIR      ?= $(PREFIX)/bin
LIBDIR      ?= $(PREFIX)/lib
INCLUDEDIR  ?= $(PREFIX)/include
MANDIR      ?= $(PREFIX)/share/man
# Completions, where each shell looks for them below /usr/local.
BASHDIR     ?= $(PREFIX)/share/bash-completion/completions
ZSHDIR      ?= $(PREFIX)/share/zsh/site-functions
FISHDIR     ?= $(PREFIX)/share/fish/vendor_completions.d
# Service units; systemd reads them below /usr and /usr/local.
UNITDIR     ?= $(PREFIX)/lib/systemd/system
DESTDIR     ?=
UNIT        := dmafile-hold@.service
# As an absolute path, because the C library's make runs in another folder.
STAGE = $(if $(DESTDIR),$(abspath $(DESTDIR)))
CAPI = $(MAKE) -C crates/capi ARCHIVE=$(abspath $(TARGET))/release/libdmafile_capi.a \
	PREFIX=$(PREFIX) LIBDIR=$(LIBDIR) INCLUDEDIR=$(INCLUDEDIR) DESTDIR=$(STAGE)

# make(1) splits names at spaces, so the parts would name other folders.
PLACES := DESTDIR PREFIX BINDIR LIBDIR INCLUDEDIR MANDIR BASHDIR ZSHDIR FISHDIR UNITDIR
$(foreach place,$(PLACES),$(if $(word 2,$($(place))),$(error $(place) contains a space: '$($(place))')))
$(foreach place,$(filter-out DESTDIR PREFIX,$(PLACES)),$(if $(filter /%,$($(place))),,\
	$(error $(place) is not an absolute path: '$($(place))'; only DESTDIR may be relative)))

# The folders that ruff, mypy and pytest check.
SCRIPTS := tests attacks bench demo kernel python scripts vm
# A virtual machine uses one CPU, so two run at a time. Tests of a file run one after the other.
PYTEST   = $(PYTHON) -m pytest --quiet -rs --numprocesses=2 --dist=loadfile --no-loadscope-reorder

# What the command and the Python package have only if asked.
WITH := --features dmafile-cli/bpf,dmafile-cli/remote,dmafile-python/remote

# The Rust tests of `make test`: all but those that take longest. `make test-all PARTS=rust` runs all.
SLOW_TESTS := these_tests_run_with_a_real_driver holes_are_zero_at_every_position unusual_blocks \
	every_method_kind_and_mode_loads_every_range every_method_loads_shards memory_is_at_most_a_small_multiple \
	only_the_given_part_of_a_memfd a_killed_recorder the_documented_reader a_torn_tail saving_in_place_changes_only \
	a_kill_leaves the_next_save_removes_what_a_kill_left memory_is_a_small_multiple_of_the_header \
	truncation_loads_the_whole_file_or_is_an_error a_user_who_receives_nothing misbehaving_clients \
	windows_may_begin_and_end_at_any_byte a_refused_call_has_a_substitute a_killed_load_leaves \
	a_low_limit_on_address_space

.PHONY: help demo build remote install uninstall test lint test-all fuzz kernel-lint kernel-test bench gpu-kit gpu-bench docs \
	deb wheels crates release built compiled extension need-rust need-rust-tools need-test-tools

help: ## this list
	@awk -F ':.*## ' '/^## / { printf "\n%s\n", substr($$0, 4) } \
		/^[a-z0-9 -]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

## Use it

demo: build .venv/demo ## load two models into shareable memory, beside read(), and compare checksums (3 minutes)
	@scripts/need util-linux-extra command -v fincore
	@$(PYTHON) -m demo.demo --dmafile $(DMAFILE) $(ARGS)

build: need-rust ## build the command, its man pages and completions, and the C library (FEATURES=dmafile-cli/bpf: `pins --record`)
	cargo build --release --locked $(FEATURES:%=--features %)
	@mkdir -p $(PAGES) $(SHELLS)
	@rm -f $(PAGES)/*.1
	@$(DMAFILE) man $(PAGES)
	@$(DMAFILE) completions bash > $(SHELLS)/dmafile.bash
	@$(DMAFILE) completions zsh > $(SHELLS)/_dmafile
	@$(DMAFILE) completions fish > $(SHELLS)/dmafile.fish
	@$(CAPI) all

remote: need-rust ## build dmafile-remote, with which the command loads from URLs; `make install` then installs it, too
	cargo build --release --locked --package dmafile-cli --features remote --bin dmafile-remote

install: built ## install these, and the unit of dmafile hold (PREFIX=/usr/local DESTDIR=)
	@echo "install: under $(STAGE)$(PREFIX)"
	install -d $(addprefix $(STAGE),$(BINDIR) $(MANDIR)/man1 $(BASHDIR) $(ZSHDIR) $(FISHDIR) $(UNITDIR))
	install -m 755 $(DMAFILE) $(STAGE)$(BINDIR)/dmafile
	[ ! -e $(DMAFILE)-remote ] || install -m 755 $(DMAFILE)-remote $(STAGE)$(BINDIR)/dmafile-remote
	install -m 644 $(PAGES)/*.1 $(STAGE)$(MANDIR)/man1
	install -m 644 $(SHELLS)/dmafile.bash $(STAGE)$(BASHDIR)/dmafile
	install -m 644 $(SHELLS)/_dmafile $(STAGE)$(ZSHDIR)/_dmafile
	install -m 644 $(SHELLS)/dmafile.fish $(STAGE)$(FISHDIR)/dmafile.fish
	sed 's|@BINDIR@|$(BINDIR)|' 'crates/cli/systemd/$(UNIT).in' > '$(STAGE)$(UNITDIR)/$(UNIT)'
	chmod 644 '$(STAGE)$(UNITDIR)/$(UNIT)'
	@$(CAPI) install
	@[ -n "$(DESTDIR)" ] || [ "$$(id -u)" -ne 0 ] || ldconfig

uninstall: ## remove what `make install` installed (same PREFIX and DESTDIR)
	@echo "uninstall: from $(STAGE)$(PREFIX)"
	rm -f $(addprefix $(STAGE),$(BINDIR)/dmafile $(BINDIR)/dmafile-remote $(MANDIR)/man1/dmafile.1 $(MANDIR)/man1/dmafile-*.1 \
		$(BASHDIR)/dmafile $(ZSHDIR)/_dmafile $(FISHDIR)/dmafile.fish) '$(STAGE)$(UNITDIR)/$(UNIT)'
	@$(CAPI) uninstall
	@[ -n "$(DESTDIR)" ] || [ "$$(id -u)" -ne 0 ] || ldconfig

## Test it

# Prints the next step, and the time so far: $(call step,the next step).
BEGAN := $(shell date +%s)
step = @s=$$(($$(date +%s) - $(BEGAN))); printf '%s: %s (after %d:%02d)\n' $@ '$1' $$((s / 60)) $$((s % 60))

test: ## lint, and the tests of every part that take least (8 minutes on two idle CPUs, from a fresh clone)
	$(call step,1/5 tools and packages)
	@$(MAKE) need-rust-tools need-test-tools .venv/dev .venv/demo
	$(call step,2/5 lint)
	@$(MAKE) lint
	$(call step,3/5 compiling)
	@$(MAKE) compiled
	$(call step,4/5 Rust)
	QUICK=1 cargo test --workspace $(WITH) --locked -- $(SLOW_TESTS:%=--skip %)
	$(call step,5/5 Python, C, and a virtual machine: $(SCRIPTS))
	$(PYTEST) -m "not slow" $(SCRIPTS)
	$(call step,all passed)

lint: need-rust-tools .venv/dev ## check formatting, lints and types
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	@cargo metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null
	cargo clippy --workspace $(WITH) --all-targets --locked -- -D warnings
	$(PYTHON) -m ruff check conftest.py $(SCRIPTS)
	$(PYTHON) -m ruff format --check conftest.py $(SCRIPTS)
	$(PYTHON) -m mypy

test-all: need-rust ## all other tests, each with the time that it takes (PARTS=list names them; PARTS="fuzz docs" runs these)
	@python3 -m scripts.parts $(PARTS)

fuzz: need-rust ## fuzz the readers of files and messages, 8 seconds each (SECONDS=600 for longer)
	@fuzz/run $(ARGS)

kernel-lint kernel-test: ## check or test the kernel code; `make -C kernel` lists its other targets
	@$(MAKE) -C kernel $(@:kernel-%=%)

## Measure it

bench: build ## compare dmafile with read() on this machine, in about a minute (bench/README.md has more)
	@mkdir -p .bench
	@$(DMAFILE) bench --dir=.bench $(ARGS)

gpu-kit: ## build one archive that tests and measures loads on a machine with a GPU and Python (MACHINE=aarch64 for another)
	@$(MAKE) -f packaging/Makefile kit

gpu-bench: ## on a machine with a GPU: build this archive if Rust is there, and run it (10 minutes without the build)
	@$(MAKE) -f packaging/Makefile kit-bench

## Publish it

docs: build extension .venv/docs ## build the site of the documentation, the man pages and completions under target/
	@mkdir -p $(TARGET)/docs
	cp $(PAGES)/*.1 $(SHELLS)/* $(TARGET)/docs
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
	rm -rf $(TARGET)/site
	$(PYTHON) -m scripts.site $(DMAFILE) $(TARGET)/doc $(abspath $(TARGET))/site

release: ## build all packages of the last commit, with source, SBOMs, licences and checksums (half an hour)
	@$(MAKE) -f packaging/Makefile release

deb wheels crates: ## build one kind of package (`make -f packaging/Makefile` lists the parts)
	@$(MAKE) -f packaging/Makefile $@

# What the targets above need.

# `sudo make install` after `make build` builds nothing: root rarely has Rust, and files of root in target/ would break
# the user's next build.
built:
	@if [ -e $(SHELLS)/dmafile.fish ] && [ -e $(TARGET)/release/c/libdmafile.so ] && \
		{ [ ! -O $(DMAFILE) ] || ! command -v cargo >/dev/null; }; then exit 0; fi; \
	$(MAKE) build

# Compiles what `make test` runs, and installs the Python package with the extension that this has built. `maturin
# develop` would compile all crates again, with other features of their dependencies.
compiled: need-rust .venv/dev
	cargo build --profile test --workspace $(WITH) --locked --lib --bins --tests
	@install -m 755 $(TARGET)/debug/lib_dmafile.so python/dmafile/_dmafile.abi3.so
	@echo '$(CURDIR)/python' > "$$($(PYTHON) -c 'import site; print(site.getsitepackages()[0])')/dmafile.pth"
	@printf '#!%s\nfrom dmafile.__main__ import main\n\nraise SystemExit(main())\n' '$(CURDIR)/$(PYTHON)' > .venv/bin/dmafile
	@chmod 755 .venv/bin/dmafile

# Installs the Python package in .venv (editable).
extension: need-rust .venv/dev
	VIRTUAL_ENV=.venv .venv/bin/maturin develop --quiet --locked --features remote

need-rust:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust, see https://rustup.rs" >&2; exit 1; }
	@scripts/need build-essential command -v cc

need-rust-tools: need-rust
	@cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt || \
		{ echo "rustfmt is missing; type: rustup component add rustfmt" >&2; exit 1; }
	@cargo clippy --version >/dev/null 2>&1 || rustup component add clippy || \
		{ echo "clippy is missing; type: rustup component add clippy" >&2; exit 1; }
	@scripts/need clang command -v clang

# Tests are skipped if a tool is missing. With CI=true a missing tool is an error.
need-test-tools:
	@scripts/need util-linux-extra command -v fincore
	@for wanted in fuse3:fusermount3 fuse2fs:fuse2fs squashfs-tools:mksquashfs pkg-config:pkg-config \
		systemd:systemd-socket-activate qemu-system-x86:qemu-system-x86_64 kmod:/sbin/modprobe busybox-static:busybox \
		file:file; do \
		scripts/need $${wanted%:*} command -v $${wanted#*:} || [ "$$CI" != true ] || exit 1; \
	done

# On Debian ensurepip is in a separate package; without it a venv is created without pip. So the target is pip.
.venv/bin/pip:
	@scripts/need python3-venv python3 -c "import ensurepip, venv"
	python3 -m venv .venv

.venv/dev: requirements-dev.txt .venv/bin/pip
	$(PIP) install --quiet --requirement requirements-dev.txt
	@touch $@

.venv/docs: requirements-docs.txt .venv/bin/pip
	$(PIP) install --quiet --requirement requirements-docs.txt
	@touch $@

.venv/release: requirements-release.txt requirements-dev.txt .venv/bin/pip
	$(PIP) install --quiet --requirement requirements-release.txt
	@touch $@

.venv/consumers: requirements-consumers.txt .venv/dev
	$(PIP) install --quiet --no-deps --requirement requirements-consumers.txt
	@touch $@

.venv/demo: demo/requirements.txt .venv/bin/pip
	$(PIP) install --quiet --no-deps --only-binary=:all: --require-hashes --requirement demo/requirements.txt
	@touch $@
