# Sluice. `sudo make demo` shows it, `sudo make test` proves it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
# sudo's PATH lacks Go's default folder.
GO ?= $(or $(shell command -v go),/usr/local/go/bin/go)
VERSION ?= 0.1.0
PLATFORM := $(shell $(GO) env GOOS 2>/dev/null)-$(shell $(GO) env GOARCH 2>/dev/null)
DESTDIR ?=
PREFIX ?= /usr/local
FUZZTIME ?= 10m
PROGRAMS := fetch verify stage apply recover
# A box whose clock is before this date has no clock.
SOURCE_DATE_EPOCH ?= $(or $(shell git log -1 --format=%ct 2>/dev/null),0)
LDFLAGS := -s -w -X sluice/internal/program.Version=$(VERSION) -X sluice/internal/program.Date=$(SOURCE_DATE_EPOCH)
export CGO_ENABLED := 0

.PHONY: build pipeline check test powercut demo lint vuln fuzz bench install clean need-root

build: ## the programs, into bin/
	$(GO) build -trimpath -ldflags "$(LDFLAGS)" -o bin/ ./cmd/...

pipeline: build ## the component sluice, as a bundle in bin/
	rm -rf bin/pipeline
	mkdir -p bin/pipeline/bin bin/pipeline/units
	for p in $(PROGRAMS) sluice; do cp bin/$$p bin/pipeline/bin/; done
	cp units/sluice-* bin/pipeline/units/
	cp -r units/sysusers.d units/tmpfiles.d bin/pipeline/
	sed 's/@VERSION@/$(VERSION)/' units/manifest.json >bin/pipeline/manifest.json
	bin/sluice bundle bin/pipeline -o bin/sluice_$(VERSION)_$(PLATFORM).tar.zst

check: ## what needs neither root nor a box, in under a minute
	test/run check

test: need-root ## everything; installs what is missing
	test/run test

powercut: need-root ## the power cut at every point of every roll, on ext4 and xfs
	test/run powercut

demo: need-root ## a throwaway box that rolls itself
	test/run demo

lint: ## gofmt, vet, staticcheck, shellcheck
	test/run lint

vuln: ## known vulnerabilities of what is linked
	test/run vuln

fuzz: ## every decoder, FUZZTIME each
	FUZZTIME=$(FUZZTIME) test/run fuzz

bench: need-root ## figures, beside a peer in the same run
	test/run bench

install: pipeline ## the command, the door, the pipeline's bundle and the man pages, below DESTDIR/usr/local
	install -D -m 0755 bin/sluice $(DESTDIR)$(PREFIX)/bin/sluice
	install -D -m 0755 bin/door $(DESTDIR)$(PREFIX)/bin/door
	install -D -m 0644 bin/sluice_$(VERSION)_$(PLATFORM).tar.zst $(DESTDIR)$(PREFIX)/share/sluice/sluice_$(VERSION)_$(PLATFORM).tar.zst
	for p in docs/man/*.[18]; do install -D -m 0644 $$p $(DESTDIR)$(PREFIX)/share/man/man$${p##*.}/$${p##*/}; done

clean:
	rm -rf bin

need-root:
	@if [ "$$(id -u)" != 0 ]; then echo "needs root: sudo make $(or $(MAKECMDGOALS),test)" >&2; exit 2; fi
