# SPDX-License-Identifier: MIT
# make demo, make install: for use; make build, make test: for work on it; make check: before a release. Every target builds
# what is missing and can be repeated.

SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
JOBS   ?= $(shell nproc)
# llama-server's web page takes npm and minutes; a checkout that has built it keeps it
WEB_PAGE ?= $(if $(wildcard build/.web-page),ON,OFF)
MODEL  := tests/tiny_moe/model

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export CMAKE_GENERATOR := Ninja
# one name for the compiler in all builds: ccache goes by it
ifeq ($(origin CC),default)
CC := gcc
endif
ifeq ($(origin CXX),default)
CXX := g++
endif
export CC CXX
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
unexport PYTHONDONTWRITEBYTECODE # tests start the program some thousand times: it is compiled once
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := python -m pip install --quiet
# Versions and hashes of all packages but torch: requirements/ has one list per purpose, written by `make requirements`.
PINNED := $(PIP) --require-hashes --no-build-isolation
# the stock and the patched llama.cpp share most object files
CCACHE := command -v ccache >/dev/null || $(PINNED) --requirement requirements/ccache.txt || echo 'going on without ccache, which would save minutes' >&2
# A build says how far it is, and its log holds the rest.
export NINJA_STATUS := [%p] $()
PROGRESS = 2>&1 | tee build/log.txt | sed -un -e 's/^ *\[ *\([0-9]*0%\)\].*/   \1 built/p' -e '/error:/p' | stdbuf -oL uniq \
    || { tail -n 40 build/log.txt; false; }

# The llama.cpp that `stock` builds: vendor/llama.cpp-NAME.lock goes to build/stock-NAME.
LOCK ?= vendor/llama.cpp.lock

# The package is built for the CPU and, with GPU=cuda or GPU=vulkan, for that. The targets `vulkan` and `cuda` build libllama
# alone, for tests, in the same trees. `test` leaves them out: `vulkan` needs more system packages, `cuda` takes longest.
GPU ?=
ifneq ($(filter-out cuda vulkan,$(GPU)),)
$(error GPU=$(GPU) is not known: choose cuda or vulkan)
endif

# The build tree, fixed so that ctest finds the C++ tests; `stock` is upstream's llama.cpp, for comparisons.
BUILD     := build/$(or $(GPU),release)
STOCK     := build/stock$(patsubst llama.cpp%,%,$(basename $(notdir $(LOCK))))$(GPU:%=-%)

# Either the developer's installation, which has what the user's has, or the user's.
DEVELOPED := build/.installed$(GPU:%=-%)
INSTALLED := $(if $(wildcard build/.installed*),$(DEVELOPED),.venv/.pyhobbit$(GPU:%=-%))

# CMake's name of the GPU architecture: this machine's, or without a GPU 90 (Hopper)
CUDA_ARCHITECTURES ?= $(if $(shell nvidia-smi -L 2>/dev/null),native,90-real)
# flash attention, whose kernels are a third of all
CUDA_FA ?= ON
# without nvcc, or with one that has no cuBLAS, the toolkit comes from PyPI
ifneq ($(filter cuda wheel-cuda,$(GPU) $(MAKECMDGOALS)),)
HAS_TOOLKIT := $(shell nvcc -include cublas_v2.h -x cu -E /dev/null >/dev/null 2>&1 && echo yes)
TOOLKIT     := $(if $(HAS_TOOLKIT),,$(CURDIR)/build/cuda/toolkit/nvidia/cu13)
endif

# The options are also without what asks for a driver while building.
OPTIONS_vulkan := GGML_VULKAN=ON
OPTIONS_cuda   := GGML_CUDA=ON GGML_CUDA_FA=$(CUDA_FA) GGML_CUDA_NO_VMM=ON GGML_CUDA_NCCL=OFF \
    CMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES) CMAKE_INSTALL_RPATH_USE_LINK_PATH=ON \
    $(if $(TOOLKIT),CMAKE_CUDA_COMPILER=$(TOOLKIT)/bin/nvcc CUDAToolkit_ROOT=$(TOOLKIT) CMAKE_BUILD_RPATH=$(TOOLKIT)/lib)

TIME_vulkan := 10 to 20 minutes on two cores
TIME_cuda   := one to two hours on two cores, ten minutes on 16

CMAKE_FILES    := CMakeLists.txt $(wildcard cmake/*.cmake cmake/site-packages/*) vendor/unpack.py vendor/llama.cpp.lock
NATIVE_SOURCES := $(shell find ggml_ext llama_ext patches tests/cpp tests/mechanisms tests/modelled_device -type f -not -name '*.py*') pyhobbit/native/build.py
CXX_SOURCES    := $(filter %.cpp %.h,$(NATIVE_SOURCES))

.PHONY: install build test demo package wheel wheel-cuda try-wheel wheel-test wheel-stock wheel-bits wheel-ctest image-test stock ik vulkan cuda sanitize mechanisms check release fuzz ctest quick lint thread-safety clean requirements sbom
.DELETE_ON_ERROR:

install: $(INSTALLED)
	@echo 'pyhobbit is installed: . .venv/bin/activate, and then: pyhobbit --help'
	@$(if $(filter OFF,$(WEB_PAGE)),echo 'The server is without its web page: make install WEB_PAGE=ON adds it by npm in three minutes')

build: $(DEVELOPED)

test: # stock is built while pip is at work; one more test than processors runs, since tests wait, too
	@$(MAKE) --no-print-directory --jobs=2 .venv/.dependencies stock && $(MAKE) --no-print-directory ctest
	pytest --numprocesses=$$(($(JOBS) + 1)) --maxprocesses=4 --dist=loadfile --no-loadscope-reorder --durations=20 --durations-min=5

# Everything that reads all code or needs a build of its own; after `test`, before a release.
check: lint sanitize try-wheel package sbom

# --- for use

# The user's build and the developer's lie in one tree, so that the second one only adds tests. Editable, so that Python
# finds it in this folder too, whose pyhobbit/ has no libraries.
EDITABLE = mkdir -p build; python -m pip install --verbose --no-build-isolation --no-deps --editable . --config-settings=build-dir=$(BUILD) \
    --config-settings=cmake.define.HOBBIT_WEB_PAGE=$(WEB_PAGE) $(OPTIONS_$(GPU):%=--config-settings=cmake.define.%)
SOURCES := $(CMAKE_FILES) $(NATIVE_SOURCES) pyproject.toml $(GPU:%=build/%/.tools) $(if $(filter ON,$(WEB_PAGE)),build/.web-page)

# Neither torch nor what tests need. npm's downloads for the web page, 0.7 GB, are deleted.
.venv/.pyhobbit$(GPU:%=-%): $(SOURCES)
	@echo '== pyhobbit: this takes $(or $(TIME_$(GPU)),some 5 minutes on two cores) and 0.8 GB of disk, 0.3 GB of it in .venv'
	.ci/deps install
	$(PYTHON) -m venv .venv
	$(PINNED) --requirement requirements/build.txt
	$(PINNED) --requirement requirements/use.txt
	@$(CCACHE)
	@$(EDITABLE) $(PROGRESS)
	rm -rf build/*/vendor/llama.cpp/tools/ui/ui-src/node_modules
	rm -f .venv/.pyhobbit*
	touch $@

build/.web-page:
	@command -v npm >/dev/null || { echo 'the web page needs npm: apt-get install npm' >&2; false; }
	mkdir -p $(@D)
	touch $@

# --- environment

.venv/.tools: .ci/deps requirements/build.txt requirements/tools.txt
	.ci/deps
	$(PYTHON) -m venv .venv
	$(PINNED) --requirement requirements/build.txt --requirement requirements/tools.txt
	@$(CCACHE)
	touch $@

# llama-cpp-python comes from the file that vendor/unpack.py has verified, without a native build of its own. Torch has a
# version but no hash: an index with a CPU build of that version saves gigabytes of CUDA libraries.
.venv/.dependencies: .venv/.tools vendor/llama.cpp.lock requirements/test.txt
	@echo '== Python dependencies'
	CMAKE_ARGS=-DLLAMA_BUILD=OFF $(PIP) --no-build-isolation --no-deps "$$(python vendor/unpack.py --print-sdist)"
	$(PINNED) --requirement requirements/test.txt
	$(PIP) torch==2.13.0
	touch $@

# --- builds

# .venv has one build at a time, so the file of any other one goes.
$(DEVELOPED): .venv/.dependencies $(SOURCES)
	@echo '== pyhobbit: libraries and programs$(GPU:%=, for %)'
	@$(EDITABLE) --config-settings=install.strip=false --config-settings=cmake.define.HOBBIT_BUILD_TESTS=$(if $(GPU),OFF,ON) $(PROGRESS)
	rm -f build/.installed*
	touch $@

stock: $(STOCK)/.built

$(STOCK)/.built: .venv/.tools vendor/unpack.py $(LOCK) cmake/llama-options.cmake cmake/stock/CMakeLists.txt \
    $(GPU:%=build/%/.tools)
	@echo '== llama.cpp without our patches'
	python vendor/unpack.py --lock $(LOCK) --stock $(STOCK)/vendor/llama.cpp
	ln -sf ../../cmake/stock/CMakeLists.txt $(STOCK) # beside the sources: unity builds then name them as ours do
	cmake --fresh -S $(STOCK) -B $(STOCK)/build/release -DHOBBIT_LOCK=$(abspath $(LOCK)) $(OPTIONS_$(GPU):%=-D%)
	cmake --build $(STOCK)/build/release $(if $(GPU),--target llama --target llama-common) $(PROGRESS)
	ln -sfn build/release/bin $(STOCK)/bin
	touch $@

# ik_llama.cpp for arms of bench.compare: its package, with libraries compiled for this processor in place of the wheel's
IK = build/ik/ik_llama_cpp_python-$(shell sed -n 's/^ik-llama-cpp-python==\([^ ]*\).*/\1/p' requirements/ik.txt)
ik: .venv/.tools
	$(PINNED) --no-deps --upgrade --target build/ik --requirement requirements/ik.txt
	pip download --quiet --require-hashes --no-deps --no-build-isolation --no-binary ik-llama-cpp-python --dest build/ik --requirement requirements/ik.txt
	tar -xf $(IK).tar.gz -C build/ik
	cmake -S $(IK)/vendor/ik_llama.cpp -B $(IK)/build -DGGML_IQK_FA_ALL_QUANTS=OFF -DCMAKE_CXX_FLAGS=-w
	cmake --build $(IK)/build --target llama $(PROGRESS)
	cp $(IK)/build/src/libllama.so $(IK)/build/ggml/src/libggml.so build/ik/ik_llama_cpp/lib

vulkan cuda: %: build/%/.built

build/vulkan/.built build/cuda/.built: build/%/.built: build/%/.tools .venv/.dependencies $(CMAKE_FILES) $(NATIVE_SOURCES)
	@echo '== libllama for $*'
	cmake -S . -B build/$* $(OPTIONS_$*:%=-D%) -DHOBBIT_WEB_PAGE=OFF
	cmake --build build/$* --target llama $(PROGRESS)
	touch $@

build/vulkan/.tools: .ci/deps
	.ci/deps install vulkan
	mkdir -p $(@D)
	touch $@

# The links are those that NVIDIA's own packages have.
build/cuda/.tools: cmake/cuda-toolkit.txt
	.ci/deps install
	mkdir -p $(@D)
ifneq ($(TOOLKIT),)
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade --no-deps --target $(@D)/toolkit --requirement cmake/cuda-toolkit.txt
	ln -sfn lib $(TOOLKIT)/lib64
	ln -sf libcudart.so.13 $(TOOLKIT)/lib/libcudart.so
	ln -sf libcublas.so.13 $(TOOLKIT)/lib/libcublas.so
endif
	touch $@

# --- checks

define STYLE
	ruff check --quiet --output-format concise
	ruff format --quiet --check
	python docs/check_layers.py
	python docs/openings.py
	python docs/check_budget.py
endef

# mypy reads what a build wrote, whether or not that is up to date
lint: thread-safety .venv/.dependencies $(if $(wildcard build/.installed*),,$(DEVELOPED))
	@echo '== lint'
	$(STYLE)
	python -m mypy
	clang-format --dry-run --Werror $(CXX_SOURCES)

# Locks of the C++ code, by clang's analysis of base/thread-annotations.h: all sources that include an annotated header.
THREAD_SAFETY := clang++ -std=c++17 -fsyntax-only -Wthread-safety -Werror -DHOBBIT_BUILD -Iggml_ext/include -Iggml_ext/src \
    -isystem vendor/llama.cpp/ggml/include -isystem vendor/llama.cpp/ggml/src
thread-safety: .venv/.tools $(if $(wildcard vendor/llama.cpp),,$(DEVELOPED))
	@echo '== thread safety'
	@headers=$$(cd ggml_ext/src && grep -rl thread-annotations.h --include='*.h' . | sed 's|^./||' | paste -sd'|'); \
	grep -rlE "include \"(base/thread-annotations.h|$$headers)\"" --include='*.cpp' ggml_ext/src | \
	    xargs --max-procs=$(JOBS) --max-args=1 $(THREAD_SAFETY)

CTEST_OPTIONS := --parallel $(JOBS) --output-on-failure --no-tests=error

ctest quick: export OMP_WAIT_POLICY := passive
ctest: $(DEVELOPED)
	@echo '== C++ tests'
	ctest --test-dir $(BUILD) $(CTEST_OPTIONS)

# A minute on two cores after a build: lint without mypy and clang, C++ tests without devices, Python tests without models.
# tests/cpp/CMakeLists.txt and the markers in pyproject.toml say which tests are quick. clang-format reads changed files.
QUICK_BASE := $(shell git merge-base HEAD main 2>/dev/null || echo HEAD)
quick: $(DEVELOPED)
	$(STYLE)
	{ git diff --name-only --diff-filter=d $(QUICK_BASE); git ls-files --others --exclude-standard; } | sort -u | \
	    grep -E '^(ggml_ext|llama_ext|patches|tests/cpp)/.*\.(cpp|h)$$' | xargs --no-run-if-empty clang-format --dry-run --Werror
	ctest --test-dir $(BUILD) --parallel $(JOBS) --quiet --output-on-failure --no-tests=error --label-exclude slow
	pytest --quiet -m 'not slow and not model' --numprocesses=$(JOBS) --maxprocesses=4

# Removes each mechanism in a copy of the last commit, and adds parts as folders; runs the tests there.
mechanisms: $(DEVELOPED) stock
	tests/mechanisms/remove.sh
	tests/mechanisms/add.sh

sanitize: build/asan/.passed build/tsan/.passed

build/asan/.passed: SANITIZER := address,undefined
build/tsan/.passed: SANITIZER := thread

# without OpenMP, whose run-time library is not instrumented; without address randomisation, which TSan may not bear;
# with allocations that fail as they do outside, which tests ask for
build/asan/.passed build/tsan/.passed: export ASAN_OPTIONS := allocator_may_return_null=1
build/asan/.passed build/tsan/.passed: export TSAN_OPTIONS := allocator_may_return_null=1
build/asan/.passed build/tsan/.passed: export UBSAN_OPTIONS := print_stacktrace=1

build/%/.passed: .venv/.tools $(CMAKE_FILES) $(NATIVE_SOURCES)
	@echo '== C++ tests with -fsanitize=$(SANITIZER)'
	cmake -S . -B build/$* -DCMAKE_BUILD_TYPE=Debug -DHOBBIT_BUILD_TESTS=ON -DHOBBIT_SANITIZE=$(SANITIZER) \
	    -DGGML_OPENMP=OFF -DGGML_LLAMAFILE=OFF -DGGML_CPU_REPACK=OFF
	cmake --build build/$* $(PROGRESS)
	setarch --addr-no-randomize ctest --test-dir build/$* $(CTEST_OPTIONS)
	touch $@

# Damaged files that reach new code, by libFuzzer: needs clang and its run-time library. Inputs are kept in build/fuzz/inputs.
FUZZ_SECONDS := 600
fuzz: .venv/.tools
	CC=clang CXX=clang++ cmake -S . -B build/fuzz -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHOBBIT_BUILD_TESTS=ON \
	    -DHOBBIT_SANITIZE=fuzzer-no-link,address,undefined -DGGML_OPENMP=OFF -DGGML_LLAMAFILE=OFF -DGGML_CPU_REPACK=OFF
	cmake --build build/fuzz --target fuzz-files
	mkdir -p build/fuzz/inputs
	build/fuzz/bin/fuzz-files -max_total_time=$(FUZZ_SECONDS) -max_len=65536 -timeout=20 -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/ build/fuzz/inputs

# The wheel, from a source distribution, in an environment without anything else. Minutes, so not part of `test`.
package: PACKAGE := build/package
package: .venv/.tools
	@echo '== source distribution, wheel, and an installation of it'
	rm -rf $(PACKAGE)
	python -m build --no-isolation --outdir $(PACKAGE) --config-setting=cmake.define.HOBBIT_WEB_PAGE=$(WEB_PAGE) $(PROGRESS)
	python -m venv $(PACKAGE)/venv
	$(PACKAGE)/venv/bin/$(PINNED) --requirement requirements/use.txt
	$(PACKAGE)/venv/bin/$(PIP) --no-index $(PACKAGE)/pyhobbit-*.whl
	python tests/package/try_wheel.py $(PACKAGE)/venv

# One wheel for every Linux on x86-64 that is not older than Debian 11, in dist/; with ARCH=aarch64 one for that, by Debian's
# cross compiler. The kernels for the processor are chosen when it starts, and on x86-64 the Vulkan backend is loaded where a
# driver is. docs/wheel.md says why it is built so.
MACHINE       := $(shell uname -m)
ARCH          ?= $(MACHINE)
CROSS         := $(filter-out $(MACHINE),$(ARCH))
WHEEL         := build/wheel$(CROSS:%=-%)
SYSROOT       := build/sysroot$(CROSS:%=-%)
WHEEL_TAG     := manylinux_2_31_$(ARCH)
TOOLCHAIN     := CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/wheel.cmake HOBBIT_SYSROOT=$(CURDIR)/$(SYSROOT) $(CROSS:%=HOBBIT_CROSS=%)
VARIANTS      := GGML_NATIVE=OFF GGML_BACKEND_DL=ON GGML_CPU_ALL_VARIANTS=ON
# the tables of the build for this machine: those for another one cannot be loaded here
TABLES        ?= build/release/bin/libhobbit-tables.so
WHEEL_OPTIONS := $(TOOLCHAIN) $(VARIANTS) HOBBIT_WEB_PAGE=$(WEB_PAGE) \
    $(if $(CROSS),HOBBIT_NATIVE_TABLES=$(abspath $(TABLES)),GGML_VULKAN=ON)
WHEEL_TOOLS   := $(if $(CROSS),build/.tools-$(CROSS),build/vulkan/.tools)
ifneq ($(CROSS),)
$(WHEEL)/.built wheel-ctest: $(if $(filter file,$(origin TABLES)),$(DEVELOPED))
endif
wheel: $(WHEEL)/.built

$(WHEEL)/.built: .venv/.tools $(WHEEL_TOOLS) $(SYSROOT)/.made $(CMAKE_FILES) $(NATIVE_SOURCES) pyproject.toml \
    $(shell find pyhobbit convert -name '*.py')
	@echo '== the wheel'
	rm -rf dist/*_$(ARCH).whl $(WHEEL)/plain
	$(CROSS:%=_PYTHON_HOST_PLATFORM=linux-%) python -m build --wheel --no-isolation --outdir $(WHEEL)/plain --config-setting=build-dir=$(WHEEL) \
	    $(WHEEL_OPTIONS:%=--config-setting=cmake.define.%) $(PROGRESS)
	auditwheel repair --plat $(if $(CROSS),auto,$(WHEEL_TAG)) --only-plat --exclude libvulkan.so.1 --wheel-dir dist $(WHEEL)/plain/*.whl
	test -e dist/*-$(WHEEL_TAG).whl # auditwheel knows tags of this processor alone, so for another it finds the tag itself
	touch $@

$(SYSROOT)/.made: deploy/sysroot $(WHEEL_TOOLS)
	deploy/sysroot $(@D) $(CROSS)
	touch $@

build/.tools-aarch64: .ci/deps
	.ci/deps install aarch64
	mkdir -p $(@D)
	touch $@

# The CUDA backend as a wheel of its own, for CUDA_ARCHITECTURES: one library that the first wheel loads. NVIDIA's wheels, which
# lie beside pyhobbit, bring what it links to.
CUDA_WHEEL := build/wheel-cuda-$(CUDA_ARCHITECTURES)-fa-$(CUDA_FA)
wheel-cuda: $(CUDA_WHEEL)/.built

$(CUDA_WHEEL)/.built: .venv/.tools build/cuda/.tools $(SYSROOT)/.made $(CMAKE_FILES) $(NATIVE_SOURCES) deploy/cuda/pyproject.toml deploy/cuda/CMakeLists.txt
	@echo '== the wheel of the CUDA backend'
	rm -rf dist/cuda $(CUDA_WHEEL)/plain
	cmake -S . -B $(CUDA_WHEEL) $(TOOLCHAIN:%=-D%) $(VARIANTS:%=-D%) $(OPTIONS_cuda:%=-D%) -DHOBBIT_WEB_PAGE=OFF
	cmake --build $(CUDA_WHEEL) --target ggml-cuda
	mkdir $(CUDA_WHEEL)/plain
	strip -o $(CUDA_WHEEL)/plain/libggml-cuda.so $(CUDA_WHEEL)/bin/libggml-cuda.so
	patchelf --set-rpath '$$ORIGIN:$$ORIGIN/../../nvidia/cu13/lib' $(CUDA_WHEEL)/plain/libggml-cuda.so
	python -m build --wheel --no-isolation --outdir $(CUDA_WHEEL)/plain deploy/cuda \
	    --config-setting=cmake.define.LIBRARY=$(abspath $(CUDA_WHEEL))/plain/libggml-cuda.so
	auditwheel repair --plat $(WHEEL_TAG) --only-plat --exclude libggml-base.so --exclude 'libcu*' --wheel-dir dist/cuda $(CUDA_WHEEL)/plain/*.whl
	touch $@

# Installs it in an environment without anything else, and tries it.
try-wheel: $(WHEEL)/.built
	rm -rf $(WHEEL)/venv
	python -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/$(PINNED) --requirement requirements/use.txt
	$(WHEEL)/venv/bin/$(PIP) --no-index dist/pyhobbit-*_$(ARCH).whl
	python tests/package/try_wheel.py $(WHEEL)/venv

# Tries it in fresh installations of Debian, and in odd places: docs/wheel.md has the table. Needs root, for chroot.
wheel-test: $(WHEEL)/.built
	python tests/package/chroots.py dist/pyhobbit-*_$(ARCH).whl $(SUITES)

# The C++ tests for another processor, by qemu-user, with pages of PAGES bytes.
PAGES ?= 4096 16384 65536
wheel-ctest: export QEMU_CPU ?= max,sve-max-vq=2
wheel-ctest: .venv/.tools $(SYSROOT)/.made
	$(if $(CROSS),,$(error these tests are for another processor: give ARCH=aarch64))
	cmake -S . -B build/ctest-$(CROSS) $(TOOLCHAIN:%=-D%) -DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.6-a+dotprod+fp16+sve+i8mm+sve2 \
	    -DHOBBIT_NATIVE_TABLES=$(abspath $(TABLES)) -DHOBBIT_WEB_PAGE=OFF -DHOBBIT_BUILD_TESTS=ON
	cmake --build build/ctest-$(CROSS) --target ggml_ext/hobbit-tests/all
	for size in $(PAGES); do QEMU_PAGESIZE=$$size ctest --test-dir build/ctest-$(CROSS) $(CTEST_OPTIONS) --timeout 1200 || exit 1; done

# Makes the image of deploy/Dockerfile without docker, and starts its server.
image-test: $(WHEEL)/.built
	python tests/package/image.py dist/pyhobbit-*_$(ARCH).whl

# Compares the wheel with a stock llama.cpp of the same options, with each kind of kernels in KINDS; for another processor
# in a Debian for it, as wheel-test.
KINDS ?= $(if $(CROSS),armv8.0_1 armv8.2_2 armv8.6_1,zen4 haswell x64)
wheel-bits: $(WHEEL)/.built $(WHEEL)/stock/.built build/stock/.built
ifeq ($(CROSS),)
	python tests/package/variants.py dist/pyhobbit-*_$(ARCH).whl $(WHEEL)/stock/bin $(KINDS)
else
	python tests/package/chroots.py dist/pyhobbit-*_$(ARCH).whl bookworm --bits $(KINDS) $(if $(SELECT),--select '$(SELECT)')
endif

wheel-stock: $(WHEEL)/stock/.built
$(WHEEL)/stock/.built: .venv/.tools vendor/unpack.py $(LOCK) cmake/llama-options.cmake cmake/stock/CMakeLists.txt $(SYSROOT)/.made
	python vendor/unpack.py --lock $(LOCK) --stock $(@D)/vendor/llama.cpp
	mkdir -p $(@D)/build
	ln -sfn $(abspath $(SYSROOT)) $(@D)/$(SYSROOT) # at the distance that it has from the wheel's tree, for ccache
	cmake -S cmake/stock -B $(@D)/build/release -DHOBBIT_LOCK=$(abspath $(LOCK)) $(TOOLCHAIN:%=-D%) $(VARIANTS:%=-D%) \
	    -DHOBBIT_SYSROOT=$(abspath $(@D)/$(SYSROOT))
	cmake --build $(@D)/build/release --target llama
	ln -sfn build/release/bin $(@D)/bin
	touch $@

# --- supply chain

# Writes the lists anew. Versions that they have stay where they can: remove a list to move to the newest.
RESOLVE := uv pip compile pyproject.toml --quiet --universal --python-version 3.10 --generate-hashes --no-header
requirements: .venv/.tools
	$(RESOLVE) --extra test --group build --group tools --group beside-torch --output-file requirements/test.txt
	for list in build ccache tools; do \
	    $(RESOLVE:pyproject.toml=) --group $$list --constraint requirements/test.txt --output-file requirements/$$list.txt; done
	$(RESOLVE) --constraint requirements/test.txt --output-file requirements/use.txt
	$(RESOLVE:pyproject.toml=) --group ik --no-deps --output-file requirements/ik.txt

# dist/ with what a release consists of, from a commit; RELEASE_ARCHS="x86_64 aarch64" makes a wheel for each.
release: build/.web-page
	deploy/release $(or $(RELEASE_ARCHS),$(MACHINE))

# A list of the packages in a user's installation, in CycloneDX's form. NOTICE lists the parts of the built package.
sbom: .venv/.tools
	mkdir -p build
	cyclonedx-py requirements --pyproject pyproject.toml --mc-type library requirements/use.txt --output-file build/sbom.json

# --- demonstration

# with real weights, where the network has them
demo: build/demo/tiny.gguf
	python tests/carved_moe/demo.py $(<D) $<

build/demo/tiny.gguf: $(INSTALLED) $(wildcard $(MODEL)/*) $(MODEL)/../to_gguf.py $(wildcard convert/*.py)
	@echo '== conversion'
	mkdir -p $(@D)
	python $(MODEL)/../to_gguf.py $(@D)/tiny-f16.gguf
	pyhobbit convert --low q4_0 $(@D)/tiny-f16.gguf -o $@ --force

clean:
	rm -rf build .venv $(filter-out %.lock,$(wildcard vendor/llama.cpp*))
