# SPDX-License-Identifier: Apache-2.0
# The commands people need, on top of CMakePresets.json. `make help` lists them.
PREFIX ?= /usr/local
JOBS ?= 2
PRESET := cpu-release

.DEFAULT_GOAL := help
.PHONY: help demo build test install eval format tidy clean

help:  ## prints this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*##/  make \1\t/' | expand -t 18

demo:  ## builds, fetches a small model and answers a question about a long text
	@tools/demo.sh

build:  ## installs what is missing and builds the program spin
	@tools/install_deps.sh build
	@test -f build/$(PRESET)/CMakeCache.txt || cmake --preset $(PRESET) -DSPIN_TESTS=OFF
	cmake --build --preset $(PRESET) --target spin -j $(JOBS)

test:  ## installs what is missing, builds everything and runs the tests
	@tools/install_deps.sh test
	cmake --preset $(PRESET) -DSPIN_TESTS=ON
	cmake --build --preset $(PRESET) -j $(JOBS)
	ctest --preset unit

install: build  ## copies spin to PREFIX/bin (PREFIX=/usr/local)
	cmake --install build/$(PRESET) --prefix $(PREFIX)

eval: build  ## the long checks: all retrieval prompts, SmolLM2 against its reference
	tools/eval_ruler.py
	tools/check_smollm2.sh

format:  ## formats all C++ files (clang-format 14)
	tools/check_format.sh --fix

tidy:  ## clang-tidy 14 over all sources
	JOBS=$(JOBS) tools/check_tidy.sh

clean:  ## removes what was built; keeps fetched models and virtual environments
	rm -rf build/cpu-* build/cuda-* build/fuzz build/bench build/ci
