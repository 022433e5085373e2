# Everything needs Go alone, unless it says otherwise.

GO ?= go
DOCKER ?= docker
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
FUZZTIME ?= 10s

LDFLAGS = -s -w -X main.version=$(VERSION)
# gRPC's tracing page brings a template engine, with which the linker leaves out no method of any type. HTTP/2 of net/http nobody
# uses: pages are for HTTP/1.1, and gRPC has an HTTP/2 of its own. deploy/release reads this line.
TAGS = grpcnotrace,nethttpomithttp2
# Programs that ship are compiled by a profile of themselves (docs/performance.md, Profile-guided optimisation); make profile makes it anew.
# It is no default.pgo of a command: each command and each test of one would compile all packages once more.
PROFILE = deploy/kvd.pgo
SHIPPED = $(GO) build -pgo $(PROFILE) -trimpath -ldflags '$(LDFLAGS)'
STATIC = CGO_ENABLED=0 $(SHIPPED) -tags $(TAGS)
OUT ?= bin

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## static kvd and kvctl in OUT (bin)
	$(STATIC) -o $(OUT)/ ./cmd/kvd ./cmd/kvctl

RELEASE ?= dist/release
export ARCHES ?= amd64 arm64

.PHONY: release
release: ## archives, packages, SBOMs and checksums of VERSION (v0.1.0) for linux amd64 and arm64 in dist/release
	@test '$(origin VERSION)' = 'command line' || { echo 'VERSION= the release, as v0.1.0'; exit 2; }
	deploy/release/release.sh '$(VERSION)' '$(RELEASE)'

# Of release.sh. Not what git says: an export of the tree has to give the same bytes.
.PHONY: release-programs
release-programs:
	set -e; for arch in $(ARCHES); do GOOS=linux GOARCH=$$arch $(STATIC) -buildvcs=false -o $(RELEASE)/linux_$$arch/ ./cmd/kvd ./cmd/kvctl; done

.PHONY: release-tools
release-tools:
	@for tool in debootstrap rpm ip; do command -v $$tool >/dev/null || \
		{ apt-get update && apt-get install --yes --no-install-recommends debootstrap rpm iproute2; break; }; done

.PHONY: test-release
test-release: release-tools ## a release (of ARCHES, "amd64 arm64") is made twice, and its packages are installed, upgraded and removed in a Debian of their own (as root; installs debootstrap and rpm)
	deploy/release/test.sh dist/release-test

ARM64 = ./internal/bulk ./internal/layout ./internal/mem ./rdma/shm ./index
# qemu-user does not execute an arm64 program that a test starts, keeps descriptors open that do not fit in a message, and answers
# MADV_POPULATE_WRITE as if it had been done. Of index not
# what takes minutes there: it has neither unsafe nor atomics.
ARM64_SKIP = ^Test(DialerKilledInsideVerb|StoppedInsideVerbIsUnconfirmed|ContinuedPeerIsFenced|ListenerCloseGivesUp|MemoryNodeKilled|Populate|LongWritesPopulate)$$|^TestHostileWelcome$$/^too_many_to_read$$|^Test(Move|SettleAll)|Crash

.PHONY: qemu-user
qemu-user:
	@command -v qemu-aarch64-static >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends qemu-user-static; }

.PHONY: test-arm64
test-arm64: qemu-user ## what has unsafe, atomics or assembly, as arm64 under qemu-user (Debian; as root it installs that)
	CGO_ENABLED=0 GOARCH=arm64 $(GO) test -exec qemu-aarch64-static -count 1 -short -timeout 10m -skip '$(ARM64_SKIP)' $(ARM64)

# The limit is one for each package, and of a machine that does other things, too: index, which only computes, takes half a minute alone
# and a quarter of an hour at a load of 50. A test that waits gives up much sooner (internal/testutil).
.PHONY: test
test: ## all tests
	CGO_ENABLED=0 $(GO) test -timeout 40m ./...

.PHONY: race
race: ## all tests under the race detector (needs a C compiler)
	CGO_ENABLED=1 $(GO) test -race -timeout 60m ./...

# Not ST1005: errors begin with the name of the field that is wrong.
.PHONY: lint
lint: ## gofmt, vet, import directions, staticcheck
	@files=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); test -z "$$files" || { echo "gofmt -w $$files"; exit 1; }
	$(GO) vet ./...
	$(GO) test -timeout 20m ./internal/lint
	$(GO) run $(STATICCHECK) -checks inherit,-ST1005 ./...

.PHONY: words
words: ## how long the sentences of the documents are
	@$(GO) test ./internal/lint -run Medians -v | grep sentences,

# It compiles as protoc does, and comes by the Go proxy.
.PHONY: generate
generate: ## code from the .proto files and the descriptions of Redis's commands
	$(GO) run ./internal/generate $$(git ls-files '*.proto' internal/redis/spec/commands.jsonl)

.PHONY: data-folder
data-folder: ## data folders of a directory, made with the kvd and kvctl in the folder BIN, for the tests of later versions: BIN=, VERSION=
	@test -n "$(BIN)" -a -n "$(VERSION)" || { echo 'BIN= a folder with kvd and kvctl, VERSION= what they are'; exit 2; }
	server/testdata/folder.sh "$(BIN)" "$(VERSION)"

GENERATED = '*.pb.go' 'internal/redis/spec/*.go'

.PHONY: generate-check
generate-check: generate ## the committed code is what make generate gives
	@test -z "$$(git status --porcelain -- $(GENERATED))" || { git diff -- $(GENERATED); echo 'generated code is not what is committed: make generate, and commit it'; exit 1; }

# go test fuzzes one target of one package at a time.
.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME (10s)
	@set -e; for pkg in $$($(GO) list ./...); do \
		for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "$$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzzminimizetime 100x -fuzztime $(FUZZTIME) $$pkg; \
		done; done

# Debian's, as the examples want it: others may lack numpy.
PYTHON ?= /usr/bin/python3
LIBKVD = dist/python/lib
LIBKVD_VERSION = $(shell sed -n 's/^VERSION = //p' client/c/Makefile)

.PHONY: libkvd-for-python
libkvd-for-python:
	$(MAKE) -s -C client/c OUT='$(CURDIR)/$(LIBKVD)' CFLAGS=-O2

.PHONY: wheel
wheel: libkvd-for-python ## the wheel of kvd for Python in dist/python, with libkvd in it (needs a C compiler and Python 3.9)
	$(PYTHON) client/python/wheel.py --library $(LIBKVD)/libkvd.so --version '$(LIBKVD_VERSION)' --out dist/python

.PHONY: python-tools
python-tools:
	@$(PYTHON) -c 'import numpy, venv, ensurepip' 2>/dev/null && command -v mypy >/dev/null || { apt-get update && \
		apt-get install --yes --no-install-recommends python3 python3-numpy python3-venv mypy; }

.PHONY: test-python
test-python: python-tools build libkvd-for-python ## the client for Python: its types, every call, faults, asyncio, tensors, the wheel (Debian; as root it installs numpy, venv and mypy; tensors want python3-torch)
	cd client/python && mypy
	KVD='$(CURDIR)/$(OUT)/kvd' KVD_LIBRARY='$(CURDIR)/$(LIBKVD)/libkvd.so' \
		timeout --signal=ABRT 15m $(PYTHON) -X dev -m unittest discover -s client/python/tests
	KVD='$(CURDIR)/$(OUT)/kvd' KVD_LIBRARY='$(CURDIR)/$(LIBKVD)/libkvd.so' PYTHONPATH=client/python \
		timeout --signal=ABRT 15m $(PYTHON) -X dev -m unittest discover -b -s client/python/tests/adapters

.PHONY: demo
demo: build ## a file tree in and out: one process, several, and a directory node killed midway
	deploy/demo.sh bin

BENCH_TOOLS = @for tool in redis-server redis-benchmark memcached; do command -v $$tool >/dev/null || \
	{ apt-get update && apt-get install --yes --no-install-recommends redis-server memcached; break; }; done
BENCH = KVD_BENCH=1 CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 60m ./bench -run

.PHONY: bench
bench: ## speed beside sync.Map, Redis and memcached, the gateway included, in one table (as root it installs those two)
	$(BENCH_TOOLS)
	$(BENCH) TestRatios

# What the C library and its tests are built with. Debian's libhiredis is for the benchmark alone.
NATIVE_TOOLS = @for tool in gcc make valgrind musl-gcc cmake pkg-config; do command -v $$tool >/dev/null || \
	{ apt-get update && apt-get install --yes --no-install-recommends gcc g++ make libc6-dev valgrind musl-tools cmake pkg-config; break; }; done

.PHONY: native
native: ## libkvd for C, shared and static, in client/c/build (needs a C compiler)
	$(MAKE) -C client/c

.PHONY: test-native
test-native: build ## libkvd against a broker that is killed and one that lies: gcc, musl, ASan, UBSan, TSan, valgrind (Debian; as root it installs them)
	$(NATIVE_TOOLS)
	KVD_NATIVE=$(CURDIR)/$(OUT) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 30m ./internal/nativetest

BENCH_NATIVE_TOOLS = @{ command -v gcc && command -v make && ls /usr/include/hiredis/hiredis.h && $(PYTHON) -c 'import numpy, redis'; } \
	>/dev/null 2>&1 || { apt-get update && apt-get install --yes --no-install-recommends gcc make libc6-dev libhiredis-dev \
	python3 python3-numpy python3-redis; }

.PHONY: bench-native
bench-native: ## C and Python by a broker beside hiredis, redis-py and Go, in turns, in a table (as root it installs those)
	$(BENCH_TOOLS)
	$(BENCH_NATIVE_TOOLS)
	$(BENCH) TestNative

.PHONY: hit-ratio
hit-ratio: ## hit ratio of a cache beside exact LRU and LFU and a real Redis (as root it installs that)
	$(BENCH_TOOLS)
	$(BENCH) TestHitRatio

FULL ?= 10m

.PHONY: bench-full
bench-full: ## a full cache under YCSB-B and churn for FULL (10m)
	KVD_FULL=$(FULL) $(BENCH) TestFullCache

.PHONY: bench-growth
bench-growth: ## latencies while shards split, a memory node drains, and one dies
	$(BENCH) 'TestGrowth|TestDisturbance'

.PHONY: bench-records
bench-records: ## GETs over shm among 100,000 to 15 million records (needs 8 GiB of memory)
	$(BENCH) TestRecords

.PHONY: bench-clients
bench-clients: ## queue pairs and memory that 100 and 1,000 clients take of a memory node, over shm and tcp
	$(BENCH) TestClients

.PHONY: bench-mirror
bench-mirror: ## how many GETs of a new client take one round trip, by images of the index of a million keys
	CGO_ENABLED=0 $(GO) test -count 1 -v -run TestMirrorWarms ./client -mirror-keys 1000000

.PHONY: bench-directory
bench-directory: ## what 10,000 sessions ask of a directory node on 2 processors
	$(BENCH) TestDirectoryScale

.PHONY: profile
profile: ## make the profile anew by which programs that ship are compiled (two minutes; as root it installs what make bench does)
	$(BENCH_TOOLS)
	KVD_PROFILE=$(abspath $(PROFILE)) $(BENCH) TestProfile

# All that ./bench has, so that a benchmark cannot be forgotten, but one that make test runs.
.PHONY: bench-smoke
bench-smoke: ## every benchmark once, in small, to see that it works (as root it installs what make bench and bench-native do)
	$(BENCH_TOOLS)
	$(BENCH_NATIVE_TOOLS)
	@set -e; began=$$(date +%s); export CGO_ENABLED=0 KVD_BENCH=smoke; \
	$(GO) test -count 1 -v -timeout 10m -skip TestMovesUnderLoad -bench . -benchtime 1x ./bench; \
	$(GO) test -count 1 -timeout 10m -run '^$$' -bench . -benchtime 1x \
		$$(grep -rl --include='*_test.go' '^func Benchmark' . | xargs -n 1 dirname | sort -u | grep -vx ./bench); \
	echo "bench-smoke: all of it in $$(($$(date +%s) - began)) s"

.PHONY: tools
tools: engine chromium release-tools qemu-user ## install, as root on Debian, what the other targets need and would install one after the other
	internal/compat/install.sh
	$(NATIVE_TOOLS)
	$(BENCH_NATIVE_TOOLS)
	@$(MAKE) -s python-tools
	$(VERBS_VM)/fetch.sh $(or $(KVD_VM_KERNEL),6.12) $(VERBS_ADVERSARY)
	$(if $(VERBS_IWARP),$(VERBS_VM)/siw.sh)

.PHONY: test-compat
test-compat: ## real clients and other people's suites against the gateway (Debian; as root it installs them)
	internal/compat/install.sh
	KVD_COMPAT=1 CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 20m ./internal/compat
	KVD_COMPAT=1 CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 20m ./internal/memcached -datadriven-quiet
	KVD_COMPAT=1 CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 20m -run 'LikeRedis$$|^TestSortedSetsServed$$|^TestChannelRules$$' ./internal/gateway -datadriven-quiet

FUZZ ?=
SEED ?= 1
RUNS ?= 5000

.PHONY: fuzz-compat
fuzz-compat: ## random commands to the gateway and to the originals, whose answers are compared: from SEED on, RUNS times; FUZZ=Redis or Memcached alone
	internal/compat/install.sh
	KVD_COMPAT=1 CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 0 -run 'TestFuzz$(FUZZ)' ./internal/compat -seed $(SEED) -runs $(RUNS)

MEMORY ?= full

.PHONY: test-memory
test-memory: ## memory comes back, whoever wrote, deleted or died: ten times what a store has, in each case (MEMORY=half: less of it)
	KVD_MEMORY=$(MEMORY) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 30m ./internal/memtest

ROTATE ?= 5m

.PHONY: rotate
rotate: ## certificates, their authority and the key of tokens replaced every 10 s for ROTATE (5m), under load: nothing fails
	KVD_ROTATE=$(ROTATE) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 0 -run TestRotationSoak ./cmd/kvd

TOUR ?= 1

.PHONY: tour-mutants
tour-mutants: ## the way from empty machines of docs/tls.md needs each of its commands; TOUR=4: every fourth is left out
	KVD_TOUR=$(TOUR) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 30m -parallel 16 -run TestTourNeedsAll ./deploy

IDLE ?= 5s

.PHONY: test-idle
test-idle: ## how often idle processes wake up, and what that costs: a table
	KVD_IDLE=$(IDLE) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 20m -run TestIdle ./internal/e2e

SOAK ?= 30m

.PHONY: soak
soak: ## namespaces, sessions, scripts and subscriptions come and go for SOAK (30m): what is live in each process stays the same, in a table
	KVD_SOAK=$(SOAK) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 0 -run TestPlateau ./internal/e2e

CROWD ?= 5

.PHONY: test-crowd
test-crowd: ## 10,000 idle and 1,000 hostile connections before each listener: memory, and latency beside them in CROWD rounds, in a table; GANG="large replies" for those alone
	KVD_CROWD=$(CROWD) KVD_GANG='$(GANG)' CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 10m -run TestCrowdsInFull ./cmd/kvd

# Two memory nodes of 32 pages, and some to spare. -p 1: the tests count the machine's pages.
.PHONY: test-pages
test-pages: ## a store on huge pages, reserved as root while it runs, and one that locks its memory
	internal/e2e/pages.sh 80 env CGO_ENABLED=0 $(GO) test -count 1 -p 1 -v -timeout 20m -run 'Huge|Lock' ./internal/mem ./internal/e2e

SIM_RUNS ?= 22000
SIM_STATES ?= 15000
SIM_FIRST ?= 0
SIM_LONG ?= 220000

.PHONY: sim
sim: ## the whole store under the seeded simulator: about SIM_RUNS schedules and SIM_STATES states a scope, 10^6 schedules in each provider mode
	$(GO) test -tags kvdinvariants -count 1 -v -timeout 0 -run 'TestScenarios|TestExhaustive|TestRandom' ./internal/simtest -seed $(SIM_FIRST) -runs $(SIM_RUNS) -states $(SIM_STATES)

.PHONY: sim-long
sim-long: ## ten times as many schedules, for some hours; SIM_LONG of a scope from seed SIM_FIRST on, so that parts can be run one after the other
	$(MAKE) sim SIM_RUNS=$(SIM_LONG) SIM_STATES=150000

.PHONY: mutants
mutants: ## every deliberate mistake in the protocol is noticed
	$(GO) test -count 1 -v -timeout 60m -run 'TestMutants$$|TestPatches$$' ./internal/simtest -mutants

NEMESIS ?= 2m
NEMESIS_FLAGS ?=

.PHONY: nemesis
nemesis: ## faults over real processes in network namespaces for NEMESIS (2m), as root; NEMESIS_FLAGS="-kills 50", -restarts
	@command -v ip >/dev/null && command -v iptables >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends iproute2 iptables; }
	KVD_NEMESIS=$(NEMESIS) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 0 -run 'TestNemesis$$' ./internal/nemesis $(NEMESIS_FLAGS)

NEMESIS_MEMORY ?= 10m

.PHONY: nemesis-memory
nemesis-memory: ## writers, deleters and kills for NEMESIS_MEMORY (10m), as root: memory comes back
	@command -v ip >/dev/null && command -v iptables >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends iproute2 iptables; }
	KVD_NEMESIS_MEMORY=$(NEMESIS_MEMORY) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 0 -run 'TestNemesisMemory$$' ./internal/nemesis $(NEMESIS_FLAGS)

NEMESIS_STATES ?= 30s

.PHONY: nemesis-states
nemesis-states: ## frozen for NEMESIS_STATES (30s), full and read-only disks, a loss of power, a restart of everything, as root
	@command -v ip >/dev/null && command -v iptables >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends iproute2 iptables; }
	KVD_NEMESIS_STATES=$(NEMESIS_STATES) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 0 -run 'TestNemesisStates$$' ./internal/nemesis $(NEMESIS_FLAGS)

BYTES ?= 10000000

.PHONY: test-bytes
test-bytes: ## BYTES (10,000,000) GETs of four tenants in one memory, beside kills and stops: nobody sees another's bytes
	KVD_BYTES=$(BYTES) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 0 -run 'TestBytes$$' ./internal/e2e

UPGRADE ?= 50000
.PHONY: upgrade
upgrade: ## every process of a store replaced by one of another version, under load on UPGRADE (50000) records
	KVD_UPGRADE_RECORDS=$(UPGRADE) CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 10m -run 'TestUpgrade$$' ./internal/e2e

.PHONY: nemesis-ci
nemesis-ci: ## a few minutes of every kind of nemesis
	$(MAKE) nemesis NEMESIS=15s
	$(MAKE) nemesis NEMESIS=10s NEMESIS_FLAGS="-provider shm"
	$(MAKE) nemesis NEMESIS_FLAGS="-kills 3"
	$(MAKE) nemesis NEMESIS_FLAGS="-stops 1"
	$(MAKE) nemesis NEMESIS=10s NEMESIS_FLAGS="-restarts -replicas 1 -provider tcp"
	$(MAKE) nemesis NEMESIS=10s NEMESIS_FLAGS="-restarts -replicas 1 -provider shm"
	$(MAKE) nemesis NEMESIS_FLAGS="-restarts -replicas 1 -control"
	$(MAKE) nemesis-states NEMESIS_STATES=7s
	$(MAKE) nemesis NEMESIS_FLAGS="-zombies 8 -provider tcp"
	$(MAKE) nemesis NEMESIS_FLAGS="-zombies 8 -provider shm"
	$(MAKE) nemesis NEMESIS_FLAGS="-zombies 6 -restarts -provider shm"
	$(MAKE) nemesis-memory NEMESIS_MEMORY=15s

.PHONY: image-context
image-context: build
	rm -rf dist/image
	mkdir -p dist/image/data
	cp bin/kvd bin/kvctl dist/image/

.PHONY: image
image: image-context ## the container image kvd:latest (needs an engine)
	$(DOCKER) build --tag kvd:latest --build-arg VERSION='$(VERSION)' --build-arg REVISION="$$(git rev-parse HEAD)" --file deploy/Dockerfile dist/image

.PHONY: test-helm
test-helm: ## the chart, rendered with each file of values, as Kubernetes and kvd read it
	$(GO) -C deploy/helm/render test -count 1 -timeout 10m ./...

# Not in the gate: without a build cache the first run compiles Kubernetes, which takes some 15 minutes of a processor and 5 GB of disk.
.PHONY: test-helm-live
test-helm-live: ## the chart installed, upgraded and removed in a control plane of Kubernetes, which it builds (15 minutes of a processor at first; not in CI)
	CGO_ENABLED=0 $(GO) -C deploy/helm/live test -count 1 -v -timeout 60m ./...

.PHONY: build-otel
build-otel: ## kvd with OpenTelemetry's SDK, for the setting otlp of a gateway, in bin/otel/
	CGO_ENABLED=0 $(SHIPPED) -tags otel,$(TAGS) -o bin/otel/ ./cmd/kvd

# That of kvd is in ./cmd/kvd, but for the tag.
.PHONY: test-otel
test-otel: ## spans and metrics of OpenTelemetry: of the client library, and the build of kvd with them
	CGO_ENABLED=0 $(GO) vet -tags otel ./cmd/kvd
	$(GO) -C client/otelkvd vet ./...
	CGO_ENABLED=0 $(GO) -C client/otelkvd test -count 1 -timeout 5m ./...

.PHONY: engine
engine:
	@command -v docker >/dev/null && { docker info >/dev/null 2>&1 || command -v dockerd >/dev/null; } || \
		{ apt-get update && apt-get install --yes --no-install-recommends docker.io; }

.PHONY: test-deploy
test-deploy: image-context engine ## the image under a real engine (as root it installs and starts one), and a unit under a real systemd
	KVD_TEST_ENGINE=1 $(GO) test -count 1 -v -timeout 20m -run 'TestEngine|TestSystemd' ./deploy

# The provider verbs needs cgo and the headers of libibverbs and librdmacm, but not the libraries.
# Where the headers are not installed, they come with the virtual machine's parts.
VERBS_VM = rdma/verbs/testvm
export KVD_VM_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvd-vm
VERBS_HEADERS = $(if $(and $(wildcard /usr/include/infiniband/verbs.h),$(wildcard /usr/include/rdma/rdma_cma.h)),,$(KVD_VM_DIR)/sysroot/usr/include)
VERBS_ENV = CGO_ENABLED=1 $(if $(VERBS_HEADERS),CGO_CFLAGS='-O2 -g -I$(VERBS_HEADERS)')

.PHONY: verbs-headers
verbs-headers:
	$(if $(VERBS_HEADERS),$(VERBS_VM)/fetch.sh sysroot)

.PHONY: build-verbs
build-verbs: verbs-headers ## kvd and kvctl with RDMA adapters in bin/verbs/ (needs a C compiler)
	$(VERBS_ENV) $(SHIPPED) -tags verbs,$(TAGS) -o bin/verbs/ ./cmd/kvd ./cmd/kvctl

# The other packages are the same with cgo and the tag.
.PHONY: lint-verbs
lint-verbs: verbs-headers
	$(VERBS_ENV) $(GO) vet -tags verbs ./rdma/verbs ./internal/verbstest ./internal/providers

# KVD_VM_KERNEL chooses the kernel that decides; VERBS_ADVERSARY is an older one, whose
# atomics are worse than the specification allows, for the provider alone. Empty: none.
VERBS_ADVERSARY ?= 6.1
VERBS_SELFTEST ?= 1
# The parts over siw, which is compiled for them. Empty: none.
VERBS_IWARP ?= 1
VERBS_RUN = $(VERBS_VM)/run.sh -t 1500 -m 3072

.PHONY: test-verbs
test-verbs: lint-verbs build-verbs ## the provider and the store over Soft-RoCE in a virtual machine (Debian; as root it installs QEMU)
	@if [ '$(VERBS_SELFTEST)' != 0 ]; then echo $(VERBS_VM)/selftest.sh; $(VERBS_VM)/selftest.sh; fi
	rm -rf dist/verbs
	mkdir -p dist/verbs
	cp bin/verbs/kvd bin/verbs/kvctl $(VERBS_VM)/guest-tests.sh dist/verbs/
	if [ -e rdma/verbs/testdata ]; then cp -r rdma/verbs/testdata dist/verbs/; fi
	$(VERBS_ENV) $(GO) test -c -tags verbs -o dist/verbs/verbs.test ./rdma/verbs
	$(VERBS_ENV) $(GO) test -c -tags verbs -o dist/verbs/verbstest.test ./internal/verbstest
	$(VERBS_ENV) $(GO) test -c -tags verbs -o dist/verbs/client.test ./client
	@failed=0; run() { echo "$(VERBS_RUN) $$*"; $(VERBS_RUN) "$$@" || failed=1; }; \
	run -n 4 dist/verbs 'sh guest-tests.sh provider store client cm cm-store'; \
	$(if $(VERBS_IWARP),run -s -n 4 dist/verbs 'sh guest-tests.sh iwarp iwarp-store';) \
	run -n 0 -a rdma_libs=none dist/verbs 'sh guest-tests.sh nohardware'; \
	$(if $(VERBS_ADVERSARY),run -n 4 -k $(VERBS_ADVERSARY) dist/verbs 'sh guest-tests.sh provider';) \
	if [ $$failed = 0 ]; then echo 'test-verbs: PASS'; else echo 'test-verbs: FAIL'; fi; exit $$failed

# CONNECTIONS are those to a memory node, one time after the other. The emulated machine did not keep 10,000.
CONNECTIONS ?= 100,1000

.PHONY: count-verbs
count-verbs: build-verbs ## queue pairs and memory of 100 and 1,000 connections over Soft-RoCE, in the virtual machine (CONNECTIONS chooses others)
	mkdir -p dist/count
	cp bin/verbs/kvd bin/verbs/kvctl dist/count/
	$(VERBS_ENV) $(GO) test -c -tags verbs -o dist/count/verbstest.test ./internal/verbstest
	$(VERBS_VM)/run.sh -n 4 -t 3600 -m 4096 dist/count 'ulimit -Hn 65536; ulimit -n 65536; KVD_BIN=/share KVD_VERBS=1 \
		KVD_VERBS_CONNECTIONS=$(CONNECTIONS) ./verbstest.test -test.v -test.timeout 50m -test.run TestQueuePairs$$'

.PHONY: perf-verbs
perf-verbs: build-verbs ## kvctl perf beside perftest over Soft-RoCE, in turns, in the virtual machine (an idle host)
	mkdir -p dist/perf
	cp bin/verbs/kvctl $(VERBS_VM)/perf-ratio.sh dist/perf/
	$(VERBS_VM)/run.sh -n 2 -t 1800 dist/perf "ITERS=1000 ROUNDS=5 sh perf-ratio.sh ./kvctl 'env GOMAXPROCS=1 ./kvctl' \
		'env GODEBUG=asyncpreemptoff=1 ./kvctl' 'taskset 1 ./kvctl'"

.PHONY: test-tenants
test-tenants: build ## one tenant after another's memory, over tcp between real processes
	KVD_VERBS=1 KVD_VERBS_PROVIDER=tcp KVD_BIN=$(CURDIR)/bin CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 5m -run 'TestSecurityMatrix|TestTenants|TestTokens' ./internal/verbstest

.PHONY: chromium
chromium: ## install Debian's Chromium, for the console's tests (root)
	@command -v chromium >/dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; }

.PHONY: test-console
test-console: chromium ## see the page of a daemon in headless Chromium
	KVD_CHROMIUM=$${KVD_CHROMIUM:-$$(command -v chromium)} CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 5m -run 'TestPage|TestPictures' ./cmd/kvd
	@set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; KVD_SCREENSHOTS="$$dir" KVD_CONSOLE_SMOKE=1 KVD_CONSOLE_COST=$${KVD_CHROMIUM:-$$(command -v chromium)} \
		KVD_CHROMIUM=$${KVD_CHROMIUM:-$$(command -v chromium)} CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 5m -run 'TestScreenshots|TestConsoleCost' ./cmd/kvd

.PHONY: console-cost
console-cost: chromium ## what the page of a large store that changes 20 times a second takes of a processor, in the browser and in the process
	KVD_CONSOLE_COST=$${KVD_CHROMIUM:-$$(command -v chromium)} CGO_ENABLED=0 $(GO) test -count 1 -v -timeout 5m -run TestConsoleCost -bench BenchmarkPage ./cmd/kvd

.PHONY: screenshots
screenshots: chromium ## make docs/console/*.png: the page of simulated stores
	mkdir -p docs/console
	KVD_SCREENSHOTS=$(CURDIR)/docs/console KVD_CHROMIUM=$${KVD_CHROMIUM:-$$(command -v chromium)} CGO_ENABLED=0 $(GO) test -count 1 -timeout 5m -run TestScreenshots ./cmd/kvd

.PHONY: clean
clean: ## remove what make made
	rm -rf bin dist
