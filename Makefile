# All targets work on a fresh Debian 12 with Rust and Python. Python packages are installed in .venv only. scripts/need
# installs missing Debian packages as root, and otherwise names them.

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
TARGET  := $(or $(CARGO_TARGET_DIR),target)
DMAFILE := $(TARGET)/release/dmafile
PAGES   := $(TARGET)/release/man
SHELLS  := $(TARGET)/release/completions
PYTHON  := .venv/bin/python
PIP     := $(PYTHON) -m pip --disable-pip-version-check

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
CAPI = $(MAKE) --no-print-directory -C crates/capi ARCHIVE=$(abspath $(TARGET))/release/libdmafile_capi.a \
	PREFIX=$(PREFIX) LIBDIR=$(LIBDIR) INCLUDEDIR=$(INCLUDEDIR) DESTDIR=$(STAGE)

# make(1) splits names at spaces, so the parts would name other folders.
PLACES := DESTDIR PREFIX BINDIR LIBDIR INCLUDEDIR MANDIR BASHDIR ZSHDIR FISHDIR UNITDIR
$(foreach place,$(PLACES),$(if $(word 2,$($(place))),$(error $(place) contains a space: '$($(place))')))
$(foreach place,$(filter-out DESTDIR PREFIX,$(PLACES)),$(if $(filter /%,$($(place))),,\
	$(error $(place) is not an absolute path: '$($(place))'; only DESTDIR may be relative)))

# What is fuzzed (fuzz/README.md), and how long each. The inputs found are kept in $(FUZZ)/corpus.
FUZZED  := safetensors gguf manifest recording holder taker store mark
SECONDS ?= 8
FUZZ    := $(TARGET)/fuzz
HOST     = $(shell rustc -vV | sed -n 's/^host: //p')
# The flags of cargo-fuzz, without those that need a nightly compiler.
SANCOV  := -Cpasses=sancov-module --cfg fuzzing -Dwarnings $(addprefix -Cllvm-args=-sanitizer-coverage-, \
	level=4 inline-8bit-counters pc-table trace-compares)

# The folders that ruff, mypy and pytest check.
SCRIPTS := attacks bench demo kernel python scripts tests vm
# Of these, the folders whose tests boot virtual machines.
BOOTING := vm tests/vm kernel bench/instructions
# A virtual machine uses one CPU, so two run at a time. Tests of a file run one after the other.
VM_TESTS = $(PYTHON) -m pytest --quiet -rs --numprocesses=2 --dist=loadfile --no-loadscope-reorder

# The virtual environments of `make loaders-test`, 1.4 and 1.9 GB.
LOADERS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dmafile/loaders
LOADER_TESTS := python/tests/loaders

.PHONY: help demo test interference-test vm-test consumers-test loaders-test dropin-test loaders-contract arm64-test gpu-test gpu-kit gpu-bench fuzz fuzz-planted vm-bench bench lint docs install uninstall build built extension \
	deb deb-test wheels wheels-test crates sbom licences msrv release release-test kernel-lint kernel-test \
	need-rust need-rust-tools need-test-tools

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9 -]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build .venv/demo ## load two models into shareable memory, compare with plain read(), and compare checksums
	@echo "demo: a real model and a generated one, from disk into a memfd (under 3 minutes)"
	@scripts/need util-linux-extra command -v fincore
	@$(PYTHON) -m demo.demo --dmafile $(DMAFILE) $(ARGS)

# Prints the next step of a target, and the time so far: $(call step,the next step).
BEGAN := $(shell date +%s)
step = @s=$$(($$(date +%s) - $(BEGAN))); printf '%s: %s (after %d:%02d)\n' $@ '$1' $$((s / 60)) $$((s % 60))

test: ## lint, then run all tests, with progress
	$(call step,1/7 tools and packages)
	@$(MAKE) --no-print-directory need-rust-tools need-test-tools .venv/dev .venv/demo
	$(call step,2/7 lint)
	@$(MAKE) --no-print-directory lint
	$(call step,3/7 compiling)
	cargo test --workspace --locked --no-run
	@$(MAKE) --no-print-directory extension
	$(call step,4/7 Rust)
	cargo test --workspace --locked
	$(call step,5/7 Python of $(filter-out kernel tests vm,$(SCRIPTS)))
	$(PYTHON) -m pytest --quiet -rs --ignore=bench/instructions $(filter-out kernel tests vm,$(SCRIPTS))
	$(call step,6/7 virtual machines: $(BOOTING))
	$(VM_TESTS) $(BOOTING)
	$(call step,7/7 fuzzing)
	@if command -v c++ >/dev/null; then $(MAKE) --no-print-directory fuzz; else echo "test: no c++ compiler; fuzzing is skipped"; fi
	$(call step,all passed)

consumers-test: need-rust need-test-tools extension .venv/consumers ## let third-party programs use loaded memory: llama.cpp, OpenVINO, Vulkan (250 MB, once)
	@echo "consumers-test: on this machine and in two virtual machines (5 minutes)"
	CI=true $(PYTHON) -m pytest --quiet -rs python/tests/test_paths.py python/tests/test_consumers.py \
		python/tests/test_takers.py $(ARGS)
	CONSUMERS=1 $(VM_TESTS) tests/vm/test_vulkan.py $(ARGS)

arm64-test: need-rust need-test-tools ## tests of the command, the C library and the engine on Debian's arm64 kernels, pages of 4 and 16 KiB (an hour; 250 MB, once)
	@echo "arm64-test: compiles for aarch64, then boots a machine for each test, without KVM"
	rustup target add aarch64-unknown-linux-gnu
	ARM64=1 $(VM_TESTS) tests/vm/test_arm64.py $(ARGS)

gpu-test: need-rust .venv/dev $(LOADERS)/torch/ready ## test loads into GPU memory, with a test double of the driver (100,000 schedules) and with a real one if there is one (half an hour)
	@echo "gpu-test: with the test double of the driver, in $(LOADERS)/torch"
	DMAFILE_SCHEDULES=100000 cargo test --locked -p dmafile --test through --test device --test pinned --test pool
	cargo test --locked -p dmafile --test device -- --ignored
	cargo test --locked -p dmafile-capi --test install -- a_stream a_device
	@$(PIP) install --quiet --no-deps --upgrade --target $(TARGET)/cuda nvidia-cuda-runtime==13.5.37
	cc -fsyntax-only -I$(TARGET)/cuda/nvidia/cu13/include tests/double/prototypes.c
	@rm -rf $(TARGET)/hip && mkdir -p $(TARGET)/hip && cd $(TARGET)/hip && apt-get download -qq libamdhip64-dev && \
		dpkg-deb --extract libamdhip64-dev_*.deb . || { echo "gpu-test: AMD's header is in Debian's package" \
		"libamdhip64-dev, which cannot be downloaded" >&2; exit 1; }
	cc -fsyntax-only -Wno-deprecated-declarations -I$(TARGET)/hip/usr/include tests/double/prototypes_hip.c
	@VIRTUAL_ENV=$(LOADERS)/torch .venv/bin/maturin develop --quiet --locked
	$(LOADERS)/torch/bin/python -m pytest --quiet -rs python/tests/test_cuda.py python/tests/test_torch_device.py \
		python/tests/test_torch.py python/tests/test_stream.py $(ARGS)
	@echo "gpu-test: with a real driver, and PyTorch of $${GPU_PYTHON:-python3} (GPU_PYTHON names another Python)"
	@$(PYTHON) -m scripts.gpu_kit python/dmafile $(TARGET)/gpu-test
	@$(TARGET)/gpu-test/run --check; case $$? in 0) \
		DMAFILE_GPU=real cargo test --locked -p dmafile --test device --test pinned && \
		$(TARGET)/gpu-test/run --rounds 0 --json $(TARGET)/gpu-test.json;; 3) ;; *) exit 1;; esac

# For any machine with a GPU, so it is linked like the wheels of a release.
KIT = dmafile-gpu-$(VERSION)-$(MACHINE)
MACHINE ?= $(shell uname -m)

gpu-kit: need-rust .venv/release licences ## build one archive, in target, that tests and measures loads on a machine with a GPU, which needs only Python (for another machine: MACHINE=aarch64)
	@echo "gpu-kit: a wheel, tests, and other loaders (38 MB to download) to $(TARGET)/$(KIT).tar.gz"
	@rm -rf $(TARGET)/gpu-kit
	@[ $(MACHINE) = $$(uname -m) ] || $(call need-target,$(MACHINE))
	$(WHEEL) --target $(MACHINE)-unknown-linux-gnu --out $(TARGET)/gpu-kit
	@$(PYTHON) -m scripts.wheels $(MANYLINUX) $(TARGET)/gpu-kit/*.whl
	@$(PYTHON) -m scripts.gpu_kit --others $(MACHINE) $(TARGET)/gpu-kit/*.whl $(TARGET)/gpu-kit/$(KIT)
	tar -C $(TARGET)/gpu-kit -czf $(TARGET)/$(KIT).tar.gz $(KIT)

gpu-bench: ## on a machine with a GPU: run `make gpu-kit` if Rust is there, and in any case its archive (under 10 minutes without the build)
	@! command -v cargo >/dev/null || $(MAKE) --no-print-directory gpu-kit
	@[ -e $(TARGET)/$(KIT).tar.gz ] || { echo "gpu-bench: there is neither Rust nor $(TARGET)/$(KIT).tar.gz here:" \
		"type 'make gpu-kit' on another machine, and copy the archive" >&2; exit 1; }
	@rm -rf $(TARGET)/gpu-bench
	@mkdir -p $(TARGET)/gpu-bench
	tar -C $(TARGET)/gpu-bench -xzf $(TARGET)/$(KIT).tar.gz
	$(TARGET)/gpu-bench/$(KIT)/run --json $(TARGET)/dmafile-gpu.json $(ARGS)

# Runs $$target, built in the folder $1, from small files that are valid, or nearly.
fuzzer = TMPDIR=$(abspath $1)/tmp $1/$(HOST)/release/$$target -max_total_time=$(SECONDS) -max_len=4096 -timeout=10 -rss_limit_mb=512 \
	-print_final_stats=1 -artifact_prefix=$1/$$target- $(ARGS) $1/corpus/$$target fuzz/corpus/$$target
planted = cat fuzz/planted/*.patch | patch --quiet --strip=1

fuzz: need-rust ## fuzz the readers of files and messages, 8 seconds each (SECONDS=600 for longer)
	@echo "fuzz: an instrumented build (about a minute, once), then $(SECONDS) seconds for each of $(words $(FUZZED)) readers"
	@scripts/need build-essential command -v c++
	@$(planted) --dry-run --force || { echo "fuzz: the patches in fuzz/planted no longer apply" >&2; exit 1; }
	@RUSTFLAGS="$(SANCOV)" cargo build --release --locked --manifest-path fuzz/Cargo.toml \
		--target $(HOST) --target-dir $(FUZZ)
	@for target in $(FUZZED); do \
		rm -rf $(FUZZ)/tmp; \
		mkdir -p $(FUZZ)/tmp $(FUZZ)/corpus/$$target; \
		case $$target in safetensors | gguf) more=attacks;; *) more=;; esac; \
		$(call fuzzer,$(FUZZ)) $$more 2>$(FUZZ)/$$target.log || { tail -n 60 $(FUZZ)/$$target.log >&2; exit 1; }; \
		awk -v target=$$target '/number_of_executed_units/ { print "fuzz: " target ", " $$2 " inputs" }' $(FUZZ)/$$target.log; \
	done

fuzz-planted: need-rust ## check that each fuzz target finds a bounds error that is planted in its reader (10 minutes)
	@echo "fuzz-planted: builds a copy of the engine with the patches in fuzz/planted"
	@scripts/need build-essential command -v c++
	@rm -rf $(FUZZ)/planted/tree $(FUZZ)/planted/corpus
	@mkdir -p $(FUZZ)/planted/tree
	@cp -R --preserve=timestamps Cargo.toml Cargo.lock crates fuzz $(FUZZ)/planted/tree
	@$(planted) --directory=$(FUZZ)/planted/tree
	@RUSTFLAGS="$(SANCOV)" cargo build --release --locked --manifest-path $(FUZZ)/planted/tree/fuzz/Cargo.toml \
		--target $(HOST) --target-dir $(FUZZ)/planted
	@for target in $(FUZZED); do \
		rm -rf $(FUZZ)/planted/tmp; \
		mkdir -p $(FUZZ)/planted/tmp $(FUZZ)/planted/corpus/$$target; \
		if $(call fuzzer,$(FUZZ)/planted) 2>$(FUZZ)/planted/$$target.log || ! grep -q "panicked at" $(FUZZ)/planted/$$target.log; then \
			echo "fuzz-planted: $$target did not find it in $(SECONDS) seconds" >&2; exit 1; fi; \
		awk -v target=$$target '/number_of_executed_units/ { print "fuzz-planted: " target " found it, " $$2 " inputs" }' \
			$(FUZZ)/planted/$$target.log; \
	done
fuzz-planted: SECONDS = 120

# How many points `make interference-test` draws; there are some 200,000.
POINTS ?= 6000

interference-test: need-rust ## let a second process act between any two system calls of dmafile, at 6,000 of 200,000 points (as root; 20 minutes; another program: ARGS="--dmafile PATH")
	@echo "interference-test: $(POINTS) points in folders in /tmp; each FAULT comes with the command that shows it again"
	cargo test --quiet --locked -p dmafile-interference -- --sample $(POINTS) $(ARGS)

vm-test: need-rust need-test-tools extension ## test loads, and vm/run itself, on Debian's 6.12, 6.1 and newest kernels in QEMU
	@echo "vm-test: boots some 120 virtual machines, two at a time, without KVM (two and a half hours on two idle cores)"
	MATRIX=1 $(VM_TESTS) $(BOOTING) --durations=0 --durations-min=5 $(ARGS)

loaders-test: need-rust .venv/dev $(LOADERS)/torch/ready $(LOADERS)/vllm/ready ## test with the real PyTorch, transformers, checkpoints and vLLM (20 minutes; 1.3 GB to download, once)
	@echo "loaders-test: PyTorch and vLLM in $(LOADERS), without CUDA"
	@scripts/need iproute2 command -v ip
	@scripts/need e2fsprogs command -v /sbin/mke2fs
	@scripts/need e2fsprogs command -v /sbin/debugfs
	@for name in torch vllm; do VIRTUAL_ENV=$(LOADERS)/$$name .venv/bin/maturin develop --quiet --locked || exit 1; done
	KILLS=30 $(LOADERS)/torch/bin/python -m pytest --quiet -rs python/tests/test_torch.py python/tests/test_stream.py \
		python/tests/test_dropin_torch.py \
		$(LOADER_TESTS)/test_transformers.py $(LOADER_TESTS)/test_checkpoint.py $(LOADER_TESTS)/test_ranks.py \
		$(LOADER_TESTS)/test_docs.py $(ARGS)
	$(LOADERS)/vllm/bin/python -m pytest --quiet -rs $(LOADER_TESTS)/test_vllm.py $(ARGS)

dropin-test: need-rust .venv/dev $(LOADERS)/torch/ready ## run the test suite of safetensors with its imports changed (2 minutes; 0.3 MB to download, once)
	@echo "dropin-test: dmafile instead of safetensors, with PyTorch in $(LOADERS), without CUDA"
	@VIRTUAL_ENV=$(LOADERS)/torch .venv/bin/maturin develop --quiet --locked
	$(LOADERS)/torch/bin/python $(LOADER_TESTS)/dropin.py $(LOADERS) --quiet $(ARGS)

loaders-contract: ## check whether the newest vllm, sglang, transformers and torch still have what dmafile relies on (1 GB to download)
	python3 $(LOADER_TESTS)/contract.py $(ARGS)

$(LOADERS)/%/ready: $(LOADER_TESTS)/requirements-%.txt $(LOADER_TESTS)/cuda_stubs.py
	@scripts/need python3-venv python3 -c "import ensurepip, venv"
	@scripts/need binutils command -v readelf
	rm -rf $(@D)
	python3 -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile --requirement $<
	python3 $(LOADER_TESTS)/cuda_stubs.py $(@D)/lib/python3*/site-packages/torch/lib
	@touch $@

vm-bench: need-rust .venv/dev ## count the instructions of every method of loading, in QEMU (10 minutes)
	@echo "vm-bench: one virtual machine; results in .bench (ARGS=--keep: tables in bench/results and docs)"
	@$(PYTHON) -m bench.instructions stock $(ARGS)

bench: build ## compare dmafile with read() on this machine, in about a minute; bench/README.md has longer benchmarks
	@mkdir -p .bench
	@$(DMAFILE) bench --dir=.bench $(ARGS)

lint: need-rust-tools .venv/dev ## check formatting, lints, documentation and types
	@echo "lint: rustfmt, clippy, rustdoc, ruff, mypy"
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	@cargo metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
	$(PYTHON) -m ruff check conftest.py $(SCRIPTS)
	$(PYTHON) -m ruff format --check conftest.py $(SCRIPTS)
	$(PYTHON) -m mypy

docs: build extension .venv/docs ## build the site of the documentation, the man pages and shell completions under target/
	@echo "docs: man pages and completions to $(TARGET)/docs, the site to $(TARGET)/site/index.html"
	@mkdir -p $(TARGET)/docs
	cp $(PAGES)/*.1 $(SHELLS)/* $(TARGET)/docs
	cargo doc --workspace --no-deps --locked
	rm -rf $(TARGET)/site
	$(PYTHON) -m scripts.site $(DMAFILE) $(TARGET)/doc $(abspath $(TARGET))/site

install: built ## install the command, its man pages and completions, the unit of dmafile hold and the C library (PREFIX=/usr/local DESTDIR=)
	@echo "install: under $(STAGE)$(PREFIX)"
	install -d $(addprefix $(STAGE),$(BINDIR) $(MANDIR)/man1 $(BASHDIR) $(ZSHDIR) $(FISHDIR) $(UNITDIR))
	install -m 755 $(DMAFILE) $(STAGE)$(BINDIR)/dmafile
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
	rm -f $(addprefix $(STAGE),$(BINDIR)/dmafile $(MANDIR)/man1/dmafile.1 $(MANDIR)/man1/dmafile-*.1 \
		$(BASHDIR)/dmafile $(ZSHDIR)/_dmafile $(FISHDIR)/dmafile.fish) '$(STAGE)$(UNITDIR)/$(UNIT)'
	@$(CAPI) uninstall
	@[ -n "$(DESTDIR)" ] || [ "$$(id -u)" -ne 0 ] || ldconfig

# Debian packages. Their timestamps are that of the last commit, so that each build gives the same files.
DEB = $(abspath $(TARGET))/deb
EPOCH = $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null),0)

deb: build licences ## build Debian packages of the command, the C library and the module (DKMS) in target/deb
	@scripts/need debhelper command -v dh
	@scripts/need dh-dkms command -v dh_dkms
	@echo "deb: to $(TARGET)/deb"
	@rm -rf $(DEB)
	@mkdir -p $(DEB)/dmafile
	@cp -R packaging/debian $(DEB)/dmafile/debian
	@sed -e '1,2d' -e 's/^$$/./' -e 's/^/ /' LICENSE-MIT | sed -i -e '/@MIT@/ { r /dev/stdin' -e 'd }' $(DEB)/dmafile/debian/copyright
	@sed -e 's/@VERSION@/$(VERSION)/' -e "s/@DATE@/$$(date --utc --rfc-email --date=@$(EPOCH))/" \
		packaging/debian/changelog.in > $(DEB)/dmafile/debian/changelog
	@cp CHANGELOG.md $(DEB)/dmafile/changelog
	@cp $(LICENCES) $(DEB)/dmafile
	@cp -R crates/capi/examples $(DEB)/dmafile/examples
	@cp kernel/dkms/sysusers.conf $(DEB)/dmafile/debian/dmafile-dkms.sysusers
	cd $(DEB)/dmafile && SOURCE=$(CURDIR) SOURCE_DATE_EPOCH=$(EPOCH) CARGO_TARGET_DIR=$(abspath $(TARGET)) MAKEFLAGS= MAKELEVEL= \
		dpkg-buildpackage --build=binary --no-sign --no-check-builddeps
	@rm -rf $(DEB)/dmafile

deb-test: deb ## install these packages into clean roots of Debian 12 and 13, and test them there
	@scripts/need lintian command -v lintian
	@scripts/need mmdebstrap command -v mmdebstrap
	lintian --fail-on error $(DEB)/*.changes
	packaging/test $(DEB)/*.deb

# No path of this machine goes into a binary: otherwise two machines would build different files. If several prefixes
# match, rustc uses the last.
REMAP = --remap-path-prefix=$(CURDIR)=/dmafile --remap-path-prefix=$(abspath $(TARGET))=/dmafile/target \
	--remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)/registry/src=/crates
deb wheels gpu-kit: export RUSTFLAGS := $(REMAP)
deb wheels sbom: export SOURCE_DATE_EPOCH := $(EPOCH)

# The oldest glibc with preadv2 (2.26) and statx (2.28).
MANYLINUX := manylinux_2_28
WHEELS    := $(TARGET)/wheels
MATURIN    = PATH="$(CURDIR)/.venv/bin:$$PATH" maturin
# Rust's library for another architecture: $(call need-target,ARCHITECTURE).
need-target = rustup --quiet target add $1-unknown-linux-gnu || \
	{ echo "$@: Rust's library is missing; type: rustup target add $1-unknown-linux-gnu" >&2; exit 1; }
WHEEL      = $(MATURIN) build --release --locked --zig --compatibility $(MANYLINUX)

wheels: need-rust .venv/release sbom licences ## build wheels for x86-64 and aarch64, and an sdist, in target/wheels (10 minutes)
	@echo "wheels: to $(WHEELS)"
	@$(call need-target,aarch64)
	@rm -rf $(WHEELS)
	for machine in x86_64 aarch64; do \
		$(WHEEL) --target $$machine-unknown-linux-gnu \
			--sbom-include $(SBOM)/dmafile-python-$(VERSION).cdx.json --out $(WHEELS) || exit 1; \
	done
	$(MATURIN) sdist --out $(WHEELS)
	$(PYTHON) -m scripts.wheels $(MANYLINUX) $(WHEELS)/*.whl

wheels-test: wheels ## install those wheels into clean roots of Debian 12 and 13 (aarch64: under qemu), build the sdist, use all
	@scripts/need mmdebstrap command -v mmdebstrap
	@scripts/need qemu-user-static command -v qemu-aarch64-static
	packaging/test-wheels $(WHEELS)
	CARGO_TARGET_DIR=$(abspath $(TARGET))/sdist packaging/test-sdist $(WHEELS)/dmafile-$(VERSION).tar.gz

CRATES := dmafile-sys dmafile dmafile-hold dmafile-record dmafile-pins dmafile-cli

crates: need-rust ## package the crates for crates.io in target/package, build their documentation, use the command (5 minutes)
	@echo "crates: to $(TARGET)/package"
	@rm -rf $(TARGET)/package
	cargo publish --dry-run --locked $(CRATES:%=--package=%)
	cargo package --quiet --no-verify --locked $(CRATES:%=--package=%)
	CARGO_TARGET_DIR=$(abspath $(TARGET))/crates packaging/test-crates $(CRATES:%=$(TARGET)/package/%-$(VERSION).crate)

# cargo-cyclonedx writes beside each Cargo.toml, so it gets a copy of the crates.
SBOM      := $(TARGET)/sbom
CYCLONEDX := 0.5.9
TOOLS     := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dmafile/cyclonedx-$(CYCLONEDX)

sbom: need-rust $(TOOLS)/bin/cargo-cyclonedx ## list the crates in each binary (CycloneDX), in target/sbom
	@echo "sbom: to $(SBOM)"
	@rm -rf $(SBOM)
	@mkdir -p $(SBOM)/tree
	@cp -R Cargo.toml Cargo.lock crates python $(SBOM)/tree
	@$(TOOLS)/bin/cargo-cyclonedx cyclonedx --quiet --format json --manifest-path $(SBOM)/tree/Cargo.toml
	@for part in dmafile dmafile-cli dmafile-capi dmafile-python; do \
		sed 's|$(abspath $(SBOM))/tree|/dmafile|g' $(SBOM)/tree/*/$$part.cdx.json >$(SBOM)/$$part-$(VERSION).cdx.json || exit 1; \
	done
	@rm -rf $(SBOM)/tree

# It runs for seconds: optimising it would take longer.
$(TOOLS)/bin/cargo-cyclonedx:
	cargo install --quiet --debug --locked --root $(TOOLS) cargo-cyclonedx@$(CYCLONEDX)

# At the root, where pyproject.toml takes LICENSE-* from: a wheel and an sdist have it too.
LICENCES      := LICENSE-THIRD-PARTY
ABOUT_VERSION := 0.9.3
ABOUT         := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dmafile/about-$(ABOUT_VERSION)

licences: need-rust $(ABOUT)/bin/cargo-about ## collect the licences of the crates in the binaries, in LICENSE-THIRD-PARTY
	@cargo fetch --quiet --locked
	@python3 -m scripts.licences $(ABOUT)/bin/cargo-about $(LICENCES)

# Without optimisation it would run for minutes.
$(ABOUT)/bin/cargo-about:
	cargo install --quiet --locked --root $(ABOUT) --features cli cargo-about@$(ABOUT_VERSION)

RELEASE = $(abspath $(TARGET))/release-files

release: ## build all packages of the last commit, with source, SBOMs, licences and checksums, in target/release-files (half an hour)
	@[ -z "$$(git status --porcelain)" ] || { echo "release: commit or remove first:" >&2; git status --short >&2; exit 1; }
	@echo "release: to $(RELEASE)"
	@rm -rf $(RELEASE)
	@for part in deb wheels crates; do $(MAKE) --no-print-directory $$part || exit 1; done
	@mkdir -p $(RELEASE)
	@cp $(DEB)/*.deb $(WHEELS)/* $(CRATES:%=$(TARGET)/package/%-$(VERSION).crate) $(SBOM)/*.json $(LICENCES) $(RELEASE)
	@git archive --prefix=dmafile-$(VERSION)/ --output=$(RELEASE)/dmafile-source-$(VERSION).tar.gz HEAD
	@cd $(RELEASE) && sha256sum * >SHA256SUMS && cat SHA256SUMS

release-test: release deb-test wheels-test ## install the packages of a release and use them, build it again in another folder, and compare (an hour)
	@rm -rf $(TARGET)/again
	git clone --quiet . $(TARGET)/again
	@ln -s $(CURDIR)/.venv $(TARGET)/again
	$(MAKE) --no-print-directory -C $(TARGET)/again CARGO_TARGET_DIR=target release
	cmp $(RELEASE)/SHA256SUMS $(TARGET)/again/target/release-files/SHA256SUMS

# The kernel part has a Makefile of its own: kernel/README.md.
kernel-lint kernel-test: ## check or test the kernel code; `make -C kernel` lists its other targets
	@$(MAKE) --no-print-directory -C kernel $(@:kernel-%=%)

build: need-rust
	cargo build --release --locked
	@mkdir -p $(PAGES) $(SHELLS)
	@rm -f $(PAGES)/*.1
	@$(DMAFILE) man $(PAGES)
	@$(DMAFILE) completions bash > $(SHELLS)/dmafile.bash
	@$(DMAFILE) completions zsh > $(SHELLS)/_dmafile
	@$(DMAFILE) completions fish > $(SHELLS)/dmafile.fish
	@$(CAPI) all

# `sudo make install` after `make build` builds nothing: root rarely has Rust, and files of root in target/ would break
# the user's next build.
built:
	@if [ -e $(SHELLS)/dmafile.fish ] && [ -e $(TARGET)/release/c/libdmafile.so ] && \
		{ [ ! -O $(DMAFILE) ] || ! command -v cargo >/dev/null; }; then exit 0; fi; \
	$(MAKE) --no-print-directory build

# Installs the Python package in .venv (editable), from the crates that `cargo test` has built.
extension: need-rust .venv/dev
	VIRTUAL_ENV=.venv .venv/bin/maturin develop --quiet --locked

MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

msrv: need-rust ## check that the workspace compiles with the oldest Rust that Cargo.toml names
	rustup toolchain install --profile minimal $(MSRV)
	cargo +$(MSRV) check --workspace --all-targets --locked --target-dir $(TARGET)/msrv

need-rust:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust, see https://rustup.rs" >&2; exit 1; }
	@scripts/need build-essential command -v cc

need-rust-tools: need-rust
	@cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt || \
		{ echo "rustfmt is missing; type: rustup component add rustfmt" >&2; exit 1; }
	@cargo clippy --version >/dev/null 2>&1 || rustup component add clippy || \
		{ echo "clippy is missing; type: rustup component add clippy" >&2; exit 1; }

# Rust tests are skipped if a tool is missing. With CI=true a missing tool is an error.
need-test-tools:
	@scripts/need util-linux-extra command -v fincore
	@for wanted in build-essential:c++ fuse3:fusermount3 fuse2fs:fuse2fs squashfs-tools:mksquashfs pkg-config:pkg-config valgrind:valgrind \
		systemd:systemd-socket-activate qemu-system-x86:qemu-system-x86_64 kmod:/sbin/modprobe busybox-static:busybox file:file \
		xfsprogs:/sbin/mkfs.xfs btrfs-progs:/sbin/mkfs.btrfs f2fs-tools:/sbin/mkfs.f2fs dmsetup:/sbin/dmsetup; do \
		scripts/need $${wanted%:*} command -v $${wanted#*:} || [ "$$CI" != true ] || exit 1; \
	done
	@scripts/need libc6-dbg valgrind --quiet true || [ "$$CI" != true ]

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
