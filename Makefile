# Builds, checks and installs Spinwire. `make help` lists the targets.
#
#   V=1            show the commands
#   CXX=           compiler (g++; clang++-14 works as well)
#   CXXFLAGS=      optimisation and debug flags; required flags are added to them
#   WERROR=        empty: warnings are not errors
#   VARIANT=       asan or tsan: build into build/asan or build/tsan with that sanitizer;
#                  unobserved: without observation of the hot path, for make count
#   SHARDS=        processes that share the tests of check, asan and tsan (1)
#   FILTER=        GoogleTest filter for check, asan and tsan; a pattern of names for test-softroce
#   SOFTROCE=off   skip the tests that need a machine with Soft-RoCE
#   PREFIX=, DESTDIR=, LIBDIR=    where to install

# ---- make itself ------------------------------------------------------------------------------

SHELL := /bin/bash
.SHELLFLAGS := -e -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all
MAKEFLAGS += --no-builtin-rules

# Uses every core. A -j on the command line overrides this; a sub-make shares its parent's jobs.
ifeq ($(MAKELEVEL),0)
  MAKEFLAGS += -j$(shell nproc)
endif

# `make clean all` must finish clean before it starts all.
ifneq ($(filter clean,$(MAKECMDGOALS)),)
  .NOTPARALLEL:
endif

ifeq ($(V),1)
  say = @:
else
  say = @printf '  %-5s %s\n' '$(1)' '$(2)'
  Q := @
endif

# ---- compilers and flags ----------------------------------------------------------------------

ifeq ($(origin CXX),default)
  CXX := g++
endif
CLANGXX ?= clang++-14
CLANG_FORMAT ?= $(shell command -v clang-format-14 || echo clang-format)
CLANG_TIDY ?= $(shell command -v clang-tidy-14 || echo clang-tidy)

# Of single targets, see TEST_OPT, TOOL_OPT and EXAMPLE_OPT.
OPT :=
WERROR ?= -Werror
WARNINGS := -Wall -Wextra -Wpedantic -Wconversion -Wshadow
# The rules of g++: its -Wconversion excludes sign conversions. C++20 allows empty variadic arguments.
CLANG_WARNINGS := -Wno-sign-conversion -Wno-gnu-zero-variadic-macro-arguments
CLANG_FLAGS := -std=c++20 $(WARNINGS) $(CLANG_WARNINGS)

# One set of objects serves both libraries. With hidden symbols, no interposition, no PLT and a fixed
# thread-local offset, position-independent code costs next to nothing, and nothing in a static program,
# where the linker relaxes it.
CODEGEN := -fPIC -fno-semantic-interposition -fno-plt -ftls-model=initial-exec \
  -fvisibility=hidden -fvisibility-inlines-hidden -fno-tree-slp-vectorize

VARIANT ?=
ifeq ($(VARIANT),)
  BUILD ?= build
  # A quarter of the time of the tools and examples, which parse a command line by templates, is for
  # variables in a debugger. Flags of the user are used as they are.
  ifeq ($(origin CXXFLAGS),undefined)
    TOOL_OPT ?= -g1
    # Examples are compiled from their sources where somebody uses them.
    EXAMPLE_OPT ?= -O0 -g1
  endif
  CXXFLAGS ?= -O2 -g
  # Optimising the tests takes longer than it saves. Lines for a debugger take a tenth of the time:
  # TEST_OPT='-O0 -g1' for those.
  TEST_OPT ?= -O0 -g0
else ifeq ($(VARIANT),unobserved)
  # What make count compares with. Its optimisation must be that of the default build.
  BUILD := build/unobserved
  CXXFLAGS ?= -O2 -g
  OBSERVATION := -DSPINWIRE_UNOBSERVED
else ifneq ($(filter asan tsan,$(VARIANT)),)
  BUILD := build/$(VARIANT)
  CXXFLAGS := -O1 -g -fno-omit-frame-pointer
  # Instrumented tests take three times as long to optimise.
  TEST_OPT ?= -O0 -g1
  ifeq ($(VARIANT),asan)
    # The other compiler, so that both compile all tests.
    CXX := $(CLANGXX)
    # The check of vptr opens a pipe, so it reports an error where a test has used up the descriptors.
    SANITIZE := -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all
  else
    # Instrumented code misleads g++'s flow warnings; the plain build checks the same sources.
    WERROR := -Wno-error
    SANITIZE := -fsanitize=thread $(if $(findstring clang,$(CXX)),,-Wno-tsan)
  endif
else
  $(error VARIANT is '$(VARIANT)'; it can be asan, tsan, unobserved or empty)
endif

# g++ takes a tenth of its time to search for garbage, of which a unit makes little.
COLLECT_LATE := --param ggc-min-heapsize=400000
BASE_FLAGS := -std=c++20 $(CXXFLAGS) $(WARNINGS) $(WERROR) \
  $(if $(findstring clang,$(CXX)),$(CLANG_WARNINGS),$(COLLECT_LATE)) $(CODEGEN) $(SANITIZE) $(OBSERVATION)
LIBS := -libverbs -lrdmacm -lhugetlbfs -lsodium -lxxhash -lfmt -lpthread

# Include paths of each part of the tree. Tools and examples have those of a user.
GTEST := /usr/src/googletest/googletest
INC_src := -Iinclude -Isrc
INC_tools := -Iinclude -Itools
INC_examples := -Iinclude
INC_preload := -Iinclude -Isrc -Itools
INC_bench := -Iinclude -Isrc -Ibench
INC_test = -Iinclude -Isrc -Itest -I$(GEN) -isystem $(GTEST)/include -isystem $(GTEST)
inc_of = $(INC_$(or $(filter preload examples,$(word 2,$(subst /, ,$(1)))),$(firstword $(subst /, ,$(1)))))

# ---- sources and targets ----------------------------------------------------------------------

OBJ := $(BUILD)/obj
BIN := $(BUILD)/bin
LIB := $(BUILD)/lib
GEN := $(BUILD)/gen

find = $(sort $(foreach d,$(wildcard $(1)),$(shell find $(d) -type f -name '$(2)')))
object = $(patsubst %.cc,$(OBJ)/%.o,$(1))
# tools/spinwire_perf.cc -> spinwire-perf
dashed = $(subst _,-,$(basename $(notdir $(1))))

# Each folder directly below src/ is compiled as one unit, with its subfolders. So the optimiser sees all
# its functions, and headers, which take most of the time, are read once. The audit stays apart, for the
# fuzzers.
LIB_APART := src/agent/audit.cc
LIB_SRC := $(filter-out $(LIB_APART),$(call find,src,*.cc))
unit_of = $(foreach d,$(patsubst %/,%,$(dir $(1))),$(if $(filter src/%,$(d)),\
  src/$(word 2,$(subst /, ,$(d))),$(d)))
LIB_UNITS := $(sort $(foreach s,$(LIB_SRC),$(call unit_of,$(s))))
# The slowest first.
LIB_UNITS := $(filter src/engine,$(LIB_UNITS)) $(filter-out src/engine,$(LIB_UNITS))
# The simulator is a separate library, so that other programs do not contain it.
SIM_OBJ := $(OBJ)/src/sim.o
LIB_OBJ := $(filter-out $(SIM_OBJ),$(LIB_UNITS:%=$(OBJ)/%.o)) $(call object,$(LIB_APART))
LIB_SRC += $(LIB_APART)
TOOL_SRC := $(wildcard tools/*.cc)
# Each example is a folder with all its sources; some are links to files that several examples have.
EXAMPLE_SRC := $(wildcard tools/examples/*/*.cc)
EXAMPLE_NAMES := $(patsubst tools/examples/%/CMakeLists.txt,%,$(wildcard tools/examples/*/CMakeLists.txt))
TOOL_COMMON_SRC := $(wildcard tools/common/*.cc)
TOOL_SIM_SRC := $(wildcard tools/sim/*.cc)
TOOL_DOCTOR_SRC := $(wildcard tools/doctor/*.cc)
PRELOAD_SRC := $(wildcard tools/preload/*.cc)
PROBE_SRC := $(wildcard test/preload/programs/*.cc)
SOFTROCE_SRC := $(wildcard test/softroce/programs/*.cc test/attack/programs/*.cc)
# Programs that tests of the tools start.
TARGET_SRC := $(wildcard test/tools/programs/*.cc)
BENCH_SRC := $(wildcard bench/bench.cc bench/*_bench.cc)
BENCH_COMMON_SRC := $(wildcard bench/common/*.cc)
COUNT_SRC := $(wildcard bench/count/*.cc)
# Programs that link other libraries are built where these are installed (tools/install-deps.sh --bench).
PEER_SRC := $(filter-out $(if $(wildcard /usr/include/ucp/api/ucp.h),,bench/peers/ucx.cc) \
  $(if $(wildcard /usr/include/rdma/fabric.h),,bench/peers/libfabric.cc),$(wildcard bench/peers/*.cc))
PEER_HARNESS_SRC := $(wildcard bench/peers/harness/*.cc)
# So are the folders that programs share.
SHARED_UNITS := tools/common tools/sim tools/doctor tools/preload bench/common bench/peers/harness
UNITS := $(LIB_UNITS) $(SHARED_UNITS)
UNIT_SRC := $(filter-out $(LIB_APART),$(LIB_SRC)) $(TOOL_COMMON_SRC) $(TOOL_SIM_SRC) \
  $(TOOL_DOCTOR_SRC) $(PRELOAD_SRC) \
  $(BENCH_COMMON_SRC) $(PEER_HARNESS_SRC)
# $(call sources_of,FOLDER), as its programs include them
sources_of = $(patsubst $(firstword $(subst /, ,$(1)))/%,%,$(foreach s,$(UNIT_SRC),\
  $(if $(filter $(1),$(call unit_of,$(s))),$(s))))
TEST_SRC := $(call find,test,*_test.cc)
ifeq ($(VARIANT),tsan)
  # Only suites named Threads... run under the thread sanitizer.
  TEST_SRC := $(shell grep -lE '^TEST(_F|_P)?.Threads' $(TEST_SRC))
endif
TEST_MAIN_SRC := test/test_main.cc test/heap_hooks.cc
CASE_SRC := $(wildcard test/conformance/*_cases.cc)
# The tests of a folder are compiled in units of up to 32 files: a unit reads each header and
# compiles each function of a header once, and an edit compiles one unit. A unit has the name of its
# folder and a number: engine_2.
TEST_UNIT_LIST := $(shell printf '%s\n' $(TEST_SRC) | awk -F/ '\
  { n = count[$$2]++; print $$2 "_" int(n / 32) + 1 ":" $$0 }')
TEST_UNITS := $(sort $(foreach e,$(TEST_UNIT_LIST),$(firstword $(subst :, ,$(e)))))
tests_of = $(patsubst $(1):test/%,%,$(filter $(1):%,$(TEST_UNIT_LIST)))

TOOLS := $(addprefix $(BIN)/,$(call dashed,$(TOOL_SRC)))
EXAMPLES := $(addprefix $(BIN)/,$(EXAMPLE_NAMES))
COUNTS := $(addprefix $(BIN)/count-,$(call dashed,$(COUNT_SRC)))
PEERS := $(addprefix $(BIN)/peer-,$(call dashed,$(PEER_SRC)))
PROBES := $(addprefix $(BIN)/preload-,$(call dashed,$(PROBE_SRC)))
SOFTROCE_PROGRAMS := $(addprefix $(BIN)/softroce-,$(call dashed,$(SOFTROCE_SRC)))
TARGETS := $(addprefix $(BIN)/test-,$(call dashed,$(TARGET_SRC)))
BENCH := $(if $(BENCH_SRC),$(BIN)/spinwire-bench)
TESTS := $(BIN)/spinwire-tests
CONFORMANCE := $(BIN)/verbs-conformance

VERSION := $(shell awk '$$1 ~ /define$$/ && $$2 ~ /^SPINWIRE_VERSION_[MP]/ \
  { v = v (v == "" ? "" : ".") $$3 } END { print v }' include/spinwire/version.h)
SOVERSION := $(firstword $(subst ., ,$(VERSION)))
STATIC := $(LIB)/libspinwire.a
SIM := $(LIB)/libspinwire-sim.a
SONAME := libspinwire.so.$(SOVERSION)
SHARED := $(LIB)/libspinwire.so.$(VERSION)
PRELOAD := $(LIB)/libsoftverbs-preload.so
PRELOAD_RUN := $(BIN)/softverbs-preload
NEW_PROJECT := $(BIN)/spinwire-new-project

# ---- targets ----------------------------------------------------------------------------------

.PHONY: all libs tools examples tests everything demo check-demo demo-build test test-build verify nightly test-softroce check check-folder \
  check-tests bench bench-curve report check-report report-record bench-attached peers count \
  compare-softroce sim sim-proof \
  count-record cost-counts unobserved conformance conformance-run conformance-proof tidy check-layers check-words check-secrets diagrams check-diagrams check-defects check-curve \
  man check-man docs deb check-abi abi-record check-metrics metrics-record \
  check-headers check-format lint clang clang-others format asan tsan fuzz fuzz-coverage fuzzers install \
  install-deps preload clean help FORCE

## all: libraries, tools and examples
all: libs tools examples preload
libs: $(STATIC) $(SHARED) $(SIM)
tools: $(TOOLS) $(NEW_PROJECT)
examples: $(EXAMPLES)
## preload: softverbs-preload, which runs libibverbs programs on the embedded device
preload: $(PRELOAD) $(PRELOAD_RUN)
tests: $(TESTS)
peers: $(PEERS)

## everything: all, tests, benchmarks, comparators
everything: all tests peers $(BENCH) $(COUNTS) $(PROBES) $(CONFORMANCE) \
  $(SOFTROCE_PROGRAMS) $(TARGETS)

## demo: install what is missing, build, run the demonstration
demo:
	@tools/install-deps.sh --build
	+$(Q)$(MAKE) --no-print-directory demo-build
	@tools/dev/demo.sh
## check-demo: run the demonstration, and check that each part shows its results
check-demo:
	+@MAKE='$(MAKE)' tools/dev/check_demo.py
# What the demonstration runs. A new user waits for this.
demo-build: $(addprefix $(BIN)/,spinwire-perf tour echo file-push kv-store market-feed)

## test: install what is missing, build, run the tests; ends with "N passed, N failed"
test:
	+@MAKE='$(MAKE)' tools/dev/run_tests.sh

## verify: every other check: slow tests, sanitizers, fuzzers, Soft-RoCE, counts, planted defects
verify:
	+@MAKE='$(MAKE)' tools/dev/run_verify.sh

## nightly: tests that take hours (SIM_RUNS=, KILLS=, RESTARTS=, CERTIFY_MINUTES=, SOAK_SECONDS=, FUZZ_SECONDS=, REPEATS=)
nightly:
	+@MAKE='$(MAKE)' tools/dev/run_nightly.sh

# The programs that `make test` runs.
test-build: $(TESTS) $(CONFORMANCE) $(PROBES) $(TARGETS) tools examples preload

# `make verify` runs the slow suites, `make test` the others; tsan runs the suites named Threads....
# Slow ones that are not named so: AttackBy... because some of these run on Soft-RoCE, the
# others because some of their suites are quick. The sanitizers run these.
SLOW_TOO := AttackByFlood.*:AttackByReadiness.*:Certify.*:CertifyPair.*:Tools.DoctorComparesTheRate*
SLOW := Slow*:*/Slow*:$(SLOW_TOO)
QUICK := -Slow*:*/Slow*$(if $(VARIANT),,:$(SLOW_TOO))
THREADED := Threads*:*/Threads*
TEST_TIMEOUT ?= 1200
# Of all tests on Soft-RoCE, a few of which may run twice.
SOFTROCE_TIMEOUT ?= 3000
GTEST_ARGS ?= --gtest_brief=1
# Processes that share the tests. With more than one, output appears when they have ended.
SHARDS ?= 1
# The thread sanitizer needs fixed addresses for its shadow, so address randomisation is disabled.
TEST_RUN := $(if $(filter tsan,$(VARIANT)),$(shell setarch -R true 2>/dev/null && echo setarch -R))
export ASAN_OPTIONS ?= detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS ?= print_stacktrace=1
export TSAN_OPTIONS ?= halt_on_error=1:second_deadlock_stack=1

## check: the quick tests (FILTER=Suite* for some of them, FILTER=slow) and the conformance cases
check: check-tests
	$(if $(VARIANT)$(FILTER),,@timeout -k 10 $(TEST_TIMEOUT) $(RUN_CONFORMANCE) $(GTEST_ARGS))
check-tests: $(TESTS) $(if $(VARIANT),,tools examples preload $(PROBES) $(TARGETS) $(CONFORMANCE))
	@$(if $(filter-out 1,$(SHARDS)),tools/dev/run_shards.sh $(SHARDS)) timeout -k 10 \
	  $(TEST_TIMEOUT) $(TEST_RUN) $< --gtest_filter='$(if $(filter slow,$(FILTER)),$(SLOW),$(or $(FILTER),$(QUICK)))' $(GTEST_ARGS)

# The suites of the tests in a folder, as a filter.
suites_of = $(shell sed -nE 's/^TEST(_F|_P)?.(\w+),.*/*\2.*/p' $(wildcard $(1)/*_test.cc) | sort -u | paste -sd:)
## check-folder: after an edit, the quick tests of one folder of test/ (FOLDER=agent)
check-folder: $(TESTS)
	@$(if $(wildcard test/$(or $(FOLDER),-)/*_test.cc),,$(error FOLDER='$(FOLDER)' is no folder of test/ with tests, such as FOLDER=agent))
	@tools/dev/run_shards.sh $(shell nproc) timeout -k 10 $(TEST_TIMEOUT) $(TEST_RUN) $< \
	  --gtest_filter='$(call suites_of,test/$(FOLDER))$(QUICK)' $(GTEST_ARGS)

# The program does not depend on Spinwire; it tests other devices without the preloaded library.
RUN_CONFORMANCE := $(PRELOAD_RUN) $(CONFORMANCE) --device softverbs
## conformance: test softverbs against the specification, then each case on broken devices
conformance:
	+$(Q)$(MAKE) --no-print-directory conformance-run
	+$(Q)$(MAKE) --no-print-directory conformance-proof
conformance-run: $(CONFORMANCE) preload
	@timeout -k 10 $(TEST_TIMEOUT) $(RUN_CONFORMANCE) $(GTEST_ARGS)
conformance-proof: $(CONFORMANCE) preload
	@timeout -k 10 $(TEST_TIMEOUT) $(RUN_CONFORMANCE) --prove

# No run begins later than this; 0: no limit.
SIM_SECONDS ?= 0
## sim: simulate nodes over a faulty network and check every call (SEED=, RUNS=, JOBS=)
sim: $(BIN)/spinwire-sim
	@$< --seed $(or $(SEED),1) --runs $(or $(RUNS),200) --seconds $(SIM_SECONDS) --jobs $(or $(JOBS),1)

# Links the objects of the program and the library, except for the units that it breaks.
## sim-proof: plant each defect in turn; simulations must notice it (RUNS=, DEFECTS=)
sim-proof: $(BIN)/spinwire-sim
	@COMPILE='$(CXX) $(BASE_FLAGS) $(LDFLAGS)' LINK='$(LIBS)' RUNS='$(RUNS)' SEED='$(SEED)' \
	  tools/dev/sim_proof.sh $(BUILD) $(DEFECTS)

## asan: the quick tests under the address and undefined-behaviour sanitizers
asan:
	+$(Q)$(MAKE) --no-print-directory VARIANT=asan check

## tsan: the tests that use threads, under the thread sanitizer
tsan:
	+$(Q)$(MAKE) --no-print-directory VARIANT=tsan check FILTER='$(or $(FILTER),$(THREADED))'

## test-softroce: the tests that need a real RDMA device, in a machine with Linux' Soft-RoCE
test-softroce: $(TESTS) $(CONFORMANCE) $(SOFTROCE_PROGRAMS) tools examples
	@timeout -k 10 $(SOFTROCE_TIMEOUT) test/softroce/softroce_test.sh $(BIN)

## bench: micro-benchmarks, then the comparison with other libraries (BENCH_ARGS=, PEER_ARGS=)
bench: $(BENCH) $(PEERS)
	@$(BENCH) --benchmark_min_time=0.2 $(BENCH_ARGS)
	@echo; bench/curve/run.py --bin $(BIN) --shapes --limit 40 $(PEER_ARGS)
	@echo; $(BIN)/peer-large-messages
	@echo; $(BIN)/peer-large-calls

CURVE_REPS ?= 2
CURVE_LIMIT ?= 540
## bench-curve: all sizes beside UCX, libfabric, a ring and memcpy (CURVE_REPS=, CURVE_LIMIT=, CURVE_ARGS=)
bench-curve:
	@tools/install-deps.sh --bench || echo 'bench-curve: goes on with the libraries that are there' >&2
	+$(Q)$(MAKE) --no-print-directory peers
	@bench/curve/run.py --bin $(BIN) --out $(BUILD)/curve --reps $(CURVE_REPS) --limit $(CURVE_LIMIT) \
	  $(CURVE_ARGS)

# Measures with what is installed, offline.
## report: the benchmarks as a page, build/report/index.html, in ten minutes (tools/install-deps.sh --bench; REPORT_ARGS=)
report: $(PEERS) $(COUNTS) $(BIN)/spinwire-perf $(BIN)/spinwire-sim
	@command -v python3 >/dev/null || { echo 'report: python3 is missing: run tools/install-deps.sh --bench' >&2; exit 1; }
	@bench/report/make_report.py --bin $(BIN) --out $(BUILD)/report $(REPORT_ARGS)
# Takes about 20 s of processor time.
## check-report: make a report of figures that mean nothing, and check that nothing is missing in it
check-report: $(PEERS) $(COUNTS) $(BIN)/spinwire-perf $(BIN)/spinwire-sim
	$(call say,CHECK,report)
	@bench/report/make_report.py --quick --accept-busy --limit 240 --bin $(BIN) --out $(BUILD)/report-check >/dev/null
	@bench/report/check_report.py $(BUILD)/report-check
## report-record: draw bench/summary.svg, which README shows, from the last report
report-record:
	@bench/report/make_report.py --read $(BUILD)/report/report.json --record bench/summary.svg

## bench-attached: rates and instructions of engines with and without a spinwire-stat (ATTACHED_ARGS=)
bench-attached: $(BIN)/spinwire-perf $(BIN)/spinwire-stat $(BIN)/count-message-echo
	@bench/attached/run.py --bin $(BIN) $(ATTACHED_ARGS)

## compare-softroce: against perftest, on Linux' Soft-RoCE in a machine (RUNS=, COMPARE=)
compare-softroce: $(BIN)/spinwire-perf
	@bench/softroce_compare.sh $(BIN)

# Programs that are counted with and without observation of the hot path.
COST_COUNTS := $(addprefix $(BIN)/count-,idle-poll write one-sided message-echo call)
cost-counts: $(COST_COUNTS)
unobserved:
	+$(Q)$(MAKE) --no-print-directory VARIANT=unobserved cost-counts

## count: instructions per operation, compared with bench/instructions.txt
count: $(COUNTS) unobserved
	@tools/dev/check_counts.sh $(BIN)

## count-record: write the current counts into bench/instructions.txt
count-record: $(COUNTS) unobserved
	@tools/dev/check_counts.sh --record $(BIN)

install-deps:
	@tools/install-deps.sh

## clean: remove everything that was built
clean:
	$(call say,RM,$(BUILD))
	$(Q)rm -rf $(BUILD)

## help: this list
help:
	@sed -n 's/^## \([a-z-]*\): /\1\t/p' Makefile | expand -t 15
	@echo
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

# ---- compiling --------------------------------------------------------------------------------

# Writes the text $(1) to the target only if that changes it. So dependents are rebuilt when the text
# changes, not whenever make runs. The other file has a name of its own, as two makes may run at once.
write_if_changed = @mkdir -p $(@D); new=$@.$$$$.new; printf '%s\n' $(1) >$$new; \
  if cmp -s $$new $@; then rm $$new; else mv $$new $@; fi

$(GEN)/flags: FORCE
	$(call write_if_changed,'$(CXX) $(BASE_FLAGS) $(TEST_OPT) $(TOOL_OPT) $(EXAMPLE_OPT)')
$(GEN)/link: FORCE
	$(call write_if_changed,'$(CXX) $(LDFLAGS) $(LIBS)')
# The list makes an archive depend on removed sources, too.
$(GEN)/lib.list: FORCE
	$(call write_if_changed,$(LIB_SRC))
# The test program depends on it, so that it is linked again if its last unit has no file any more.
$(GEN)/tests.list: FORCE
	$(call write_if_changed,$(TEST_UNITS))
$(TEST_UNITS:%=$(GEN)/test/%.cc): $(GEN)/test/%.cc: FORCE
	$(call write_if_changed,$(patsubst %,'#include "%"  // NOLINT',$(call tests_of,$*)))
$(GEN)/conformance.inc: FORCE
	$(call write_if_changed,$(patsubst test/%,'#include "%"',$(CASE_SRC)))

$(OBJ)/%.o: %.cc $(GEN)/flags
	$(call say,CXX,$<)
	@mkdir -p $(@D)
	$(Q)$(CXX) $(BASE_FLAGS) $(OPT) $(call inc_of,$<) -MMD -MP -c $< -o $@
# A unit includes the sources of its folder on purpose.
$(UNITS:%=$(GEN)/%.cc): $(GEN)/%.cc: FORCE
	$(call write_if_changed,$(patsubst %,'#include "%"  // NOLINT',$(call sources_of,$*)))
$(UNITS:%=$(OBJ)/%.o): $(OBJ)/%.o: $(GEN)/%.cc $(GEN)/flags
	$(call say,CXX,$*)
	@mkdir -p $(@D)
	$(Q)$(CXX) $(BASE_FLAGS) $(OPT) $(call inc_of,$*/) -MMD -MP -c $< -o $@
$(call object,$(TOOL_SRC)) $(patsubst %,$(OBJ)/tools/%.o,common sim doctor): OPT = $(TOOL_OPT)
$(call object,$(EXAMPLE_SRC)): OPT = $(EXAMPLE_OPT)

TEST_UNIT_OBJ := $(TEST_UNITS:%=$(OBJ)/test/units/%.o)
TEST_OBJ := $(call object,$(TEST_MAIN_SRC)) $(TEST_UNIT_OBJ)
$(TEST_OBJ): OPT = $(TEST_OPT)
$(TEST_UNIT_OBJ): $(OBJ)/test/units/%.o: $(GEN)/test/%.cc $(GEN)/flags
	$(call say,CXX,test/$*)
	@mkdir -p $(@D)
	$(Q)$(CXX) $(BASE_FLAGS) $(OPT) $(INC_test) -MMD -MP -c $< -o $@
CONFORMANCE_OBJ := $(OBJ)/test/conformance/conformance.o
$(CONFORMANCE_OBJ): $(GEN)/conformance.inc
$(CONFORMANCE_OBJ): OPT = $(TEST_OPT)

-include $(patsubst %.o,%.d,$(TEST_OBJ) $(CONFORMANCE_OBJ) $(LIB_OBJ) $(SIM_OBJ) $(SHARED_UNITS:%=$(OBJ)/%.o) \
  $(call object,$(TOOL_SRC) $(EXAMPLE_SRC) $(BENCH_SRC) $(COUNT_SRC) $(PEER_SRC) $(PROBE_SRC) \
  $(SOFTROCE_SRC) $(TARGET_SRC)))

# ---- linking ----------------------------------------------------------------------------------

define archive
$(call say,AR,$@)
@mkdir -p $(@D)
$(Q)rm -f $@ && ar rcs $@ $(filter %.o,$^)
endef

$(STATIC): $(LIB_OBJ) $(GEN)/lib.list
	$(archive)
# Linked before the static library, whose internal functions it uses.
$(SIM): $(SIM_OBJ) $(GEN)/lib.list
	$(archive)

# Sources that several tools or benchmarks share.
TOOL_COMMON := $(OBJ)/tools/libcommon.a
BENCH_COMMON := $(OBJ)/bench/libcommon.a
$(TOOL_COMMON): $(OBJ)/tools/common.o
	$(archive)
TOOL_SIM := $(OBJ)/tools/libsim.a
$(TOOL_SIM): $(OBJ)/tools/sim.o
	$(archive)
TOOL_DOCTOR := $(OBJ)/tools/libdoctor.a
$(TOOL_DOCTOR): $(OBJ)/tools/doctor.o
	$(archive)
$(BENCH_COMMON): $(OBJ)/bench/common.o
	$(archive)
PEER_HARNESS := $(OBJ)/bench/peers/libharness.a
$(PEER_HARNESS): $(OBJ)/bench/peers/harness.o
	$(archive)

EXPORTS := tools/dev/spinwire.map
$(SHARED): $(LIB_OBJ) $(GEN)/lib.list $(GEN)/link $(EXPORTS)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	$(Q)$(CXX) -shared $(CXXFLAGS) $(SANITIZE) $(LDFLAGS) -Wl,-soname,$(SONAME) \
	  -Wl,--version-script=$(EXPORTS) -Wl,--as-needed $(if $(SANITIZE),,-Wl,-z,defs) \
	  $(filter %.o,$^) $(LIBS) -o $@
	$(Q)ln -sf $(@F) $(LIB)/$(SONAME) && ln -sf $(SONAME) $(LIB)/libspinwire.so

# Preloaded into unmodified programs. It contains the parts of the library that it uses, exports only
# libibverbs' own names, and is linked with libibverbs.
PRELOAD_EXPORTS := tools/preload/exports.map
$(PRELOAD): $(OBJ)/tools/preload.o $(STATIC) $(GEN)/link $(PRELOAD_EXPORTS)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	$(Q)$(CXX) -shared $(CXXFLAGS) $(SANITIZE) $(LDFLAGS) -Wl,-soname,$(@F) \
	  -Wl,--version-script=$(PRELOAD_EXPORTS) $(if $(SANITIZE),,-Wl,-z,defs) \
	  $(filter %.o,$^) $(STATIC) -Wl,--no-as-needed -libverbs -Wl,--as-needed $(LIBS) -o $@

# $(call preload_script,FOLDER OF THE PROGRAM,FOLDER OF THE LIBRARY)
preload_script = sed 's|@TO_LIB@|$(shell realpath -m --relative-to='$(1)' '$(2)')|' \
  tools/softverbs_preload.sh
$(PRELOAD_RUN): tools/softverbs_preload.sh
	$(call say,GEN,$@)
	@mkdir -p $(@D)
	$(Q)$(call preload_script,$(BIN),$(LIB)) >$@ && chmod 755 $@

# $(call new_project,FOLDER OF THE PROGRAM,FOLDER OF THE TEMPLATE)
new_project = sed '/^to_template=/s|=.*|=$(shell realpath -m --relative-to='$(1)' '$(2)')|' tools/new-project
$(NEW_PROJECT): tools/new-project
	$(call say,GEN,$@)
	@mkdir -p $(@D)
	$(Q)$(call new_project,$(BIN),tools/template) >$@ && chmod 755 $@

# $(call program,NAME,SOURCES,ARCHIVES,LIBRARIES): how to link one program.
define program
$(BIN)/$(1): $(call object,$(2)) $(3) $(STATIC) $(GEN)/link
	$$(call say,LINK,$$@)
	@mkdir -p $$(@D)
	$$(Q)$$(CXX) $$(CXXFLAGS) $$(SANITIZE) $$(LDFLAGS) $$(filter %.o,$$^) $$(filter %.a,$$^) \
	  -Wl,--as-needed $(4) $$(LIBS) -o $$@

endef

$(eval $(foreach s,$(TOOL_SRC),$(call program,$(call dashed,$(s)),$(s),\
  $(if $(filter $(s),tools/spinwire_sim.cc),$(TOOL_SIM) $(SIM)) \
  $(if $(filter $(s),tools/spinwire_doctor.cc),$(TOOL_DOCTOR)) $(TOOL_COMMON))))
$(eval $(foreach e,$(EXAMPLE_NAMES),$(call program,$(e),$(wildcard tools/examples/$(e)/*.cc),\
  $(if $(filter $(e),sim-test),$(SIM)))))
$(eval $(foreach s,$(COUNT_SRC),$(call program,count-$(call dashed,$(s)),$(s),$(BENCH_COMMON))))
$(eval $(foreach s,$(SOFTROCE_SRC),$(call program,softroce-$(call dashed,$(s)),$(s))))
$(eval $(foreach s,$(TARGET_SRC),$(call program,test-$(call dashed,$(s)),$(s))))
# Debuggers show their variables.
$(call object,$(TARGET_SRC)): OPT = -O0 -g
# Test programs that use libibverbs only.
define probe
$(BIN)/preload-$(call dashed,$(1)): $(call object,$(1)) $(GEN)/link
	$$(call say,LINK,$$@)
	@mkdir -p $$(@D)
	$$(Q)$$(CXX) $$(CXXFLAGS) $$(SANITIZE) $$(LDFLAGS) $$(filter %.o,$$^) -libverbs -lpthread -o $$@

endef
$(eval $(foreach s,$(PROBE_SRC),$(call probe,$(s))))
# The conformance program also uses libibverbs only.
$(CONFORMANCE): $(CONFORMANCE_OBJ) $(GEN)/link
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	$(Q)$(CXX) $(CXXFLAGS) $(SANITIZE) $(LDFLAGS) $(filter %.o,$^) -libverbs -lpthread -o $@
# Each of these links the library that it is named for, and no other program does.
PEER_LIBS_ucx := -lucp -lucs
PEER_LIBS_libfabric := -lfabric
$(eval $(foreach s,$(PEER_SRC),$(call program,peer-$(call dashed,$(s)),$(s),\
  $(PEER_HARNESS) $(BENCH_COMMON),$(PEER_LIBS_$(basename $(notdir $(s)))))))
$(eval $(call program,spinwire-bench,$(BENCH_SRC),$(BENCH_COMMON),-lbenchmark -lbenchmark_main))
$(eval $(call program,spinwire-tests,$(TEST_MAIN_SRC),$(TEST_UNIT_OBJ) $(SIM) $(GEN)/tests.list))

# ---- fuzzing ----------------------------------------------------------------------------------

# The code that a peer's bytes reach is compiled again by clang, with fuzzer instrumentation, two
# sanitizers and coverage. The lower layers come from the ordinary library, and so does the audit, which
# instrumented would take five times as long as all else.
FUZZ_DIR := $(BUILD)/fuzz
FUZZ_SRC := $(wildcard test/fuzz/*_fuzz.cc)
FUZZED := $(addprefix src/,engine observe agent rpc control memory wire)
FUZZERS := $(patsubst test/fuzz/%_fuzz.cc,$(FUZZ_DIR)/bin/%,$(FUZZ_SRC))
FUZZ_FLAGS = $(CLANG_FLAGS) $(WERROR) -O1 -gline-tables-only -fno-omit-frame-pointer -fPIC \
  -ftls-model=initial-exec -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all \
  -fprofile-instr-generate -fcoverage-mapping
# The slowest first, so that it does not run alone at the end.
FUZZ_NAMES := $(notdir $(FUZZERS))
FUZZ_RUN = $(filter $(or $(FUZZ),%),$(filter agent,$(FUZZ_NAMES)) $(filter-out agent,$(FUZZ_NAMES)))
FUZZ_SECONDS ?= 12
export FUZZ_SECONDS

## fuzz: fuzzers of all decoders and of the agent (FUZZ_SECONDS= or FUZZ_RUNS= each, FUZZ=pattern)
fuzz: $(FUZZERS)
	@tools/dev/fuzz.sh $(FUZZ_DIR) $(FUZZ_RUN)

## fuzz-coverage: fuzz, then report the coverage of the decoders
fuzz-coverage: fuzz
	@tools/dev/fuzz.sh --coverage $(FUZZ_DIR) src/wire

fuzzers: $(FUZZERS)

$(FUZZ_DIR)/flags: FORCE
	$(call write_if_changed,'$(CLANGXX) $(FUZZ_FLAGS)')
$(FUZZ_DIR)/obj/%.o: %.cc $(FUZZ_DIR)/flags
	$(call say,FUZZ,$<)
	@mkdir -p $(@D)
	$(Q)$(CLANGXX) $(FUZZ_FLAGS) $(call inc_of,$<) -MMD -MP -c $< -o $@
FUZZ_OBJ := $(FUZZED:%=$(FUZZ_DIR)/obj/%.o)
$(FUZZ_OBJ): $(FUZZ_DIR)/obj/%.o: $(GEN)/%.cc $(FUZZ_DIR)/flags
	$(call say,FUZZ,$*)
	@mkdir -p $(@D)
	$(Q)$(CLANGXX) $(FUZZ_FLAGS) $(INC_src) -MMD -MP -c $< -o $@
$(FUZZ_DIR)/libfuzzed.a: $(FUZZ_OBJ)
	$(call say,AR,$@)
	$(Q)rm -f $@ && ar rcs $@ $^
$(FUZZ_DIR)/bin/%: $(FUZZ_DIR)/obj/test/fuzz/%_fuzz.o $(FUZZ_DIR)/libfuzzed.a $(STATIC)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	$(Q)$(CLANGXX) -fsanitize=fuzzer,address,undefined -fprofile-instr-generate $^ $(LIBS) -o $@
.SECONDARY: $(patsubst %.cc,$(FUZZ_DIR)/obj/%.o,$(FUZZ_SRC))

-include $(FUZZ_OBJ:.o=.d) $(patsubst %.cc,$(FUZZ_DIR)/obj/%.d,$(FUZZ_SRC))

# ---- checking ---------------------------------------------------------------------------------

CODE_DIRS := include src bench test tools
ALL_CODE := $(call find,$(CODE_DIRS),*.cc) $(call find,$(CODE_DIRS),*.h)

## tidy: layers, words, comparisons of secrets, public headers, format, diagrams, planted defects that apply, clang-tidy
tidy: check-layers check-words check-secrets check-headers check-format check-diagrams check-defects check-curve lint

check-layers:
	$(call say,CHECK,layers)
	@tools/dev/check_layers.sh

## check-words: find words that the glossary has retired
check-words:
	$(call say,CHECK,words)
	@tools/dev/check_words.sh

check-secrets:
	$(call say,CHECK,secrets)
	@tools/dev/check_secrets.sh

# The drawings of src/README.md. Graphviz' output depends on its version, so each drawing ends with the
# checksum of its source, which the check compares.
DIAGRAMS := $(wildcard src/diagrams/*.dot)
## diagrams: redraw src/diagrams
diagrams:
	$(Q)for f in $(DIAGRAMS); do dot -Tsvg $$f | grep -v '^<!-- Generated by' >$${f%.dot}.svg; \
	  echo "<!-- source: $$(cksum <$$f) -->" >>$${f%.dot}.svg; done
check-diagrams:
	$(call say,CHECK,diagrams)
	$(Q)for f in $(DIAGRAMS); do grep -qF "<!-- source: $$(cksum <$$f) -->" $${f%.dot}.svg || \
	  { echo "$${f%.dot}.svg is older than its source: run make diagrams" >&2; exit 1; }; done

check-headers:
	$(call say,CHECK,headers)
	@tools/dev/check_headers.sh $(WARNINGS)

check-format:
	$(call say,CHECK,format)
	$(Q)$(CLANG_FORMAT) --dry-run --Werror $(ALL_CODE)

check-curve:
	$(call say,CHECK,curve)
	$(Q)for d in curve report attached; do bench/$$d/self_test.py 2>$(BUILD)/curve.err || \
	  { cat $(BUILD)/curve.err >&2; exit 1; }; done

check-defects:
	$(call say,CHECK,defects)
	@tools/dev/sim_proof.sh --check

## format: format the sources with .clang-format
format:
	$(Q)$(CLANG_FORMAT) -i $(ALL_CODE)

# clang-tidy is slow, so a unit is checked only after its object was rebuilt, which depends on the
# headers.
define lint
$(call say,TIDY,$*)
@mkdir -p $(@D)
$(Q)$(CLANG_TIDY) --config-file=.clang-tidy --quiet $(1) -- $(CLANG_FLAGS) $(call inc_of,$*/) \
  2>$@.err || { cat $@.err >&2; exit 1; }
@touch $@
endef
LINT_UNITS := $(patsubst %,$(BUILD)/lint/%.ok,$(LIB_UNITS) tools/preload)
LINT_FILES := $(patsubst %.cc,$(BUILD)/lint/%.ok,$(LIB_APART))
lint: $(LINT_UNITS) $(LINT_FILES)
$(LINT_UNITS): $(BUILD)/lint/%.ok: $(OBJ)/%.o .clang-tidy
	$(call lint,$(GEN)/$*.cc)
$(LINT_FILES): $(BUILD)/lint/%.ok: $(OBJ)/%.o .clang-tidy
	$(call lint,$*.cc)

# Compiles every source with clang, for its warnings only. A result is up to date until a source or a
# header changes.
CLANG_SRC := $(LIB_APART) $(TOOL_SRC) $(EXAMPLE_SRC) $(BENCH_SRC) $(COUNT_SRC) $(PEER_SRC) \
  $(PROBE_SRC) $(SOFTROCE_SRC) $(TARGET_SRC) $(TEST_MAIN_SRC) test/conformance/conformance.cc
CLANG_OK := $(patsubst %.cc,$(BUILD)/clang/%.ok,$(CLANG_SRC))
CLANG_UNITS := $(UNITS:%=$(BUILD)/clang/%.ok)
CLANG_TESTS := $(TEST_UNITS:%=$(BUILD)/clang/test/units/%.ok)

## clang: all sources through the other compiler's front end
clang: $(CLANG_OK) $(CLANG_UNITS) $(CLANG_TESTS)
# The sources that asan's build does not compile.
clang-others: $(filter-out $(patsubst %.cc,$(BUILD)/clang/%.ok,$(LIB_APART) \
  test/test_main.cc),$(CLANG_OK)) $(SHARED_UNITS:%=$(BUILD)/clang/%.ok)
define clang
$(call say,CLANG,$*)
@mkdir -p $(@D)
$(Q)$(CLANGXX) $(CLANG_FLAGS) -Werror $(or $(CLANG_INC),$(call inc_of,$*/)) -fsyntax-only \
  -MMD -MP -MT $@ -MF $(@:.ok=.d) $<
@touch $@
endef
$(CLANG_UNITS): $(BUILD)/clang/%.ok: $(GEN)/%.cc Makefile
	$(clang)
$(CLANG_TESTS): CLANG_INC = $(INC_test)
$(CLANG_TESTS): $(BUILD)/clang/test/units/%.ok: $(GEN)/test/%.cc Makefile
	$(clang)
$(BUILD)/clang/%.ok: %.cc Makefile
	$(clang)
$(BUILD)/clang/test/conformance/conformance.ok: $(GEN)/conformance.inc

-include $(CLANG_OK:.ok=.d) $(CLANG_UNITS:.ok=.d) $(CLANG_TESTS:.ok=.d)

# ---- documentation ----------------------------------------------------------------------------

# Version and date of the pages are those of the newest release.
RELEASE_DATE = $(shell LC_ALL=C date -u '+%B %-d, %Y' \
  -d "$$(sed -n 's/^ -- .*>  //p' tools/debian/changelog | head -n 1)")
MAN := $(BUILD)/man
MAN_SRC := $(wildcard tools/man/*.in)
PAGES := $(MAN_SRC:tools/man/%.in=$(MAN)/%)
$(PAGES) &: $(MAN_SRC) tools/man/make_pages.py $(wildcard include/*.md) conf/default.toml \
  tools/debian/changelog $(TOOLS)
	$(call say,MAN,$(MAN))
	$(Q)tools/man/make_pages.py --bin $(BIN) --out $(MAN) --version $(VERSION) \
	  --date '$(RELEASE_DATE)'
## man: the manual pages, into build/man
man: $(PAGES)
## check-man: the pages are correct and agree with --help (tools/install-deps.sh --docs)
check-man: $(PAGES) $(PRELOAD_RUN) $(NEW_PROJECT)
	$(call say,CHECK,manual pages)
	@tools/dev/check_man.sh $(MAN) $(TOOLS) $(PRELOAD_RUN) $(NEW_PROJECT)

## docs: the API reference, into build/docs (tools/install-deps.sh --docs)
docs:
	$(call say,DOCS,$(BUILD)/docs)
	@mkdir -p $(BUILD)/docs
	$(Q)SPINWIRE_VERSION=$(VERSION) SPINWIRE_DOCS=$(BUILD)/docs doxygen tools/dev/Doxyfile

# ---- installing -------------------------------------------------------------------------------

PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR := $(PREFIX)/include
BINDIR := $(PREFIX)/bin
SHAREDIR := $(PREFIX)/share/spinwire
MANDIR := $(PREFIX)/share/man
# gdb loads a file there with the library if its own data lies below the same prefix.
GDBDIR := $(PREFIX)/share/gdb
DOCDIR ?= $(PREFIX)/share/doc/spinwire
COMPLETIONDIR := $(PREFIX)/share/bash-completion/completions
# Libraries that programs of Spinwire alone load.
PRIVATEDIR := $(LIBDIR)/spinwire
CMAKEDIR := $(LIBDIR)/cmake/Spinwire
# Relative, so that the CMake package still works if the installed tree is moved.
from_cmakedir = $(shell realpath -ms --relative-to='$(CMAKEDIR)' '$(1)')

FILL = sed -e 's|@PREFIX@|$(PREFIX)|g' -e 's|@LIBDIR@|$(LIBDIR)|g' -e 's|@VERSION@|$(VERSION)|g' \
  -e 's|@SONAME@|$(SONAME)|g' -e 's|@SHARED@|$(notdir $(SHARED))|g' -e 's|@LIBS@|$(LIBS)|g' \
  -e 's|@CMAKE_TO_LIB@|$(call from_cmakedir,$(LIBDIR))|g' \
  -e 's|@CMAKE_TO_INCLUDE@|$(call from_cmakedir,$(INCLUDEDIR))|g' \
  -e 's|@CMAKE_LIBS@|$(patsubst -l%,%,$(LIBS))|g'
TEMPLATES := tools/dev/install
# The guide links to the headers, which are beside it in the source tree only.
LINK_HEADERS = sed 's|](spinwire/|]($(shell realpath -ms --relative-to='$(DOCDIR)' '$(INCLUDEDIR)')/spinwire/|g'

## install: headers, libraries, pkg-config and CMake files, tools, pages, conf into DESTDIR/PREFIX
install: libs tools preload man
	$(call say,INST,$(DESTDIR)$(PREFIX))
	$(Q)install -d $(DESTDIR){$(INCLUDEDIR)/spinwire,$(LIBDIR)/pkgconfig,$(CMAKEDIR)} \
	  $(DESTDIR){$(BINDIR),$(SHAREDIR)/conf,$(SHAREDIR)/template,$(PRIVATEDIR),$(COMPLETIONDIR)} \
	  $(DESTDIR)$(GDBDIR)/auto-load$(LIBDIR) \
	  $(DESTDIR){$(MANDIR)/man1,$(MANDIR)/man5,$(MANDIR)/man7} $(EXAMPLE_NAMES:%=$(DESTDIR)$(DOCDIR)/examples/%)
	$(Q)install -m 644 include/spinwire/*.h $(DESTDIR)$(INCLUDEDIR)/spinwire
	$(Q)install -m 644 $(STATIC) $(SIM) $(DESTDIR)$(LIBDIR)
	$(Q)install -m 755 $(SHARED) $(DESTDIR)$(LIBDIR)
	$(Q)install -m 755 $(PRELOAD) $(DESTDIR)$(PRIVATEDIR)
	$(Q)$(call preload_script,$(BINDIR),$(PRIVATEDIR)) >$(DESTDIR)$(BINDIR)/softverbs-preload
	$(Q)chmod 755 $(DESTDIR)$(BINDIR)/softverbs-preload
	$(Q)$(call new_project,$(BINDIR),$(SHAREDIR)/template) >$(DESTDIR)$(BINDIR)/spinwire-new-project
	$(Q)chmod 755 $(DESTDIR)$(BINDIR)/spinwire-new-project
	$(Q)install -m 644 tools/template/* $(DESTDIR)$(SHAREDIR)/template
	$(Q)cp -d $(LIB)/$(SONAME) $(LIB)/libspinwire.so $(DESTDIR)$(LIBDIR)
	$(Q)for f in spinwire.pc spinwire-shared.pc spinwire-sim.pc; do \
	  $(FILL) $(TEMPLATES)/$$f.in >$(DESTDIR)$(LIBDIR)/pkgconfig/$$f; done
	$(Q)for f in SpinwireConfig.cmake SpinwireConfigVersion.cmake; do \
	  $(FILL) $(TEMPLATES)/$$f.in >$(DESTDIR)$(CMAKEDIR)/$$f; done
	$(if $(TOOLS),$(Q)install -m 755 $(TOOLS) $(DESTDIR)$(BINDIR))
	$(if $(wildcard conf/*),$(Q)install -m 644 $(wildcard conf/*) $(DESTDIR)$(SHAREDIR)/conf)
	$(Q)for s in 1 5 7; do install -m 644 $(MAN)/*.$$s $(DESTDIR)$(MANDIR)/man$$s; done
	$(Q)install -m 644 tools/gdb/spinwire.py $(DESTDIR)$(GDBDIR)
	$(Q)install -m 644 tools/gdb/spinwire.py \
	  $(DESTDIR)$(GDBDIR)/auto-load$(LIBDIR)/$(notdir $(SHARED))-gdb.py
	$(Q)for f in include/*.md; do $(LINK_HEADERS) $$f >$(DESTDIR)$(DOCDIR)/$${f##*/}; done
	$(Q)chmod 644 $(DESTDIR)$(DOCDIR)/*.md
	$(Q)for e in $(EXAMPLE_NAMES); do \
	  install -m 644 tools/examples/$$e/* $(DESTDIR)$(DOCDIR)/examples/$$e; done
	$(Q)install -m 644 tools/examples/README.md $(DESTDIR)$(DOCDIR)/examples
	$(Q)install -m 644 tools/completion.bash $(DESTDIR)$(COMPLETIONDIR)/spinwire-perf
	$(Q)for t in $(filter-out spinwire-perf,$(notdir $(TOOLS) $(NEW_PROJECT) $(PRELOAD_RUN))); do \
	  ln -sf spinwire-perf $(DESTDIR)$(COMPLETIONDIR)/$$t; done

## deb: Debian packages, into build/deb (tools/install-deps.sh --packages)
deb: libs tools preload man
	$(call say,DEB,$(BUILD)/deb)
	+@MAKE='$(MAKE)' tools/dev/make_deb.sh $(BUILD)/deb
## check-abi: no symbol has disappeared and no public type has another layout
check-abi: $(SHARED)
	$(call say,CHECK,binary interface)
	@tools/dev/check_abi.sh $(SHARED)
## check-metrics: no metric is renamed, removed or changed
check-metrics: $(BIN)/spinwire-stat
	@tools/dev/check_metrics.sh $<
## metrics-record: record the metrics of this tree
metrics-record: $(BIN)/spinwire-stat
	@tools/dev/check_metrics.sh --record $<
## abi-record: add new symbols and layouts to the record
abi-record: $(SHARED)
	@tools/dev/check_abi.sh --record $(SHARED)
