package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/devstore"
)

type erased struct {
	Deleted int
	Seconds float64
}

func TestFlush(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	const n = 3000
	var lines strings.Builder
	for i := range n {
		fmt.Fprintf(&lines, "%s%d\tv\n", []string{"a:", "b:"}[i%2], i)
	}
	e.must(lines.String(), "pipe")
	e.must("", "namespace", "create", "other", "--bytes", "16MiB")
	e.must("", "--namespace", "other", "put", "k", "v")

	if got := decode[erased](t, e.must("", "-o", "json", "del", "--prefix", "a:")); got.Deleted != n/2 {
		t.Errorf("del --prefix: %+v", got)
	}
	if got := strings.Fields(e.must("", "scan", "--limit", "0")); len(got) != n/2 || !strings.HasPrefix(got[0], "b:") {
		t.Errorf("left: %d keys, %.40q", len(got), got)
	}
	if got := decode[erased](t, e.must("", "-o", "json", "del", "--prefix", "a:")); got.Deleted != 0 {
		t.Errorf("del --prefix of nothing: %+v", got)
	}
	// Without a terminal to ask on, it wants to be told.
	if r := e.run("default\n", "flush"); r.code != ctl.ExitUsage || !strings.Contains(r.stderr,
		`namespace "default"`) ||
		!strings.Contains(r.stderr, "--yes") {
		t.Errorf("%+v", r)
	}
	x := e.terminal(t.TempDir(), "flush")
	x.expect(`every key of namespace "default". Type its name to go on: `)
	x.types("defualt\r")
	x.expect("nothing was deleted")
	x.exits(ctl.ExitNo)
	if got := strings.Fields(e.must("", "scan", "--limit", "0")); len(got) != n/2 {
		t.Fatalf("%d keys left", len(got))
	}
	x = e.terminal(t.TempDir(), "flush")
	x.expect("Type its name to go on: ")
	x.types("default\r")
	x.expect("flush ") // the progress bar
	x.expect("Deleted")
	x.exits(ctl.ExitOK)
	if got := e.must("", "scan"); got != "" {
		t.Errorf("left: %q", got)
	}
	if got := e.must("", "--namespace", "other", "get", "k"); got != "v" {
		t.Errorf("another namespace: %q", got)
	}
	if got := decode[erased](t, e.must("", "-o", "json", "--namespace", "other", "flush", "--yes")); got.Deleted != 1 {
		t.Errorf("%+v", got)
	}
}

// The output of scan names the same keys to mget and del, whatever is in them.
func TestScanRoundTrips(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	keys := []string{"plain", "with space ", " lead", "new\nline", "cr\r", "\x00\xff\xfe", `"quoted"`, `"`, `\`,
		"tab\t", "\u2028", "é", "\u0301", "\ufffd",
		"-dash", strings.Repeat("\x01", client.MaxKeyLen), strings.Repeat("\U000e0001", client.MaxKeyLen/4)}
	for _, k := range keys {
		e.must("v", "put", "--", k)
	}
	for _, flags := range [][]string{nil, {"--hex"}} {
		listed := e.must("", append(flags, "scan", "--limit", "0")...)
		out := e.must(listed, append(flags, "mget", "-o", "json")...)
		if got := strings.Count(out, `"found":true`); got != len(keys) {
			t.Errorf("mget %v: %d of %d keys found", flags, got, len(keys))
		}
	}
	e.must(e.must("", "scan", "--limit", "0"), "del")
	if left := e.must("", "scan"); left != "" {
		t.Errorf("left: %.200q", left)
	}
	if r := e.run("good\n\"bad\n", "del"); r.code != ctl.ExitUsage || !strings.Contains(r.stderr, `line 2: "bad`) {
		t.Errorf("%+v", r)
	}
}

// Versions lie above 2^53, so JSON has them as strings: jq and its like would round them.
func TestVersionsInJSON(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 128 << 20, Providers: []string{"shm"}})
	version := regexp.MustCompile(`"version":"(\d+)"`)
	all := ""
	for _, line := range []string{"put k v", "get k", "mget k", "scan", "scan --long"} {
		out := e.must("", append([]string{"-o", "json"}, strings.Fields(line)...)...)
		m := version.FindStringSubmatch(out)
		if m == nil {
			t.Fatalf("%s: %s", line, out)
		}
		var v map[string]any
		if err := json.Unmarshal([]byte(out), &v); err != nil || v["version"] != m[1] {
			t.Errorf("%s: %v, %v", line, v, err)
		}
		if all == "" {
			all = m[1]
		} else if m[1] != all {
			t.Errorf("%s: version %s, put said %s", line, m[1], all)
		}
	}
	if n, err := strconv.ParseUint(all, 10, 64); err != nil || n <= 1<<53 {
		t.Errorf("version %s, %v", all, err)
	}
	if out := e.must("", "-o", "json", "cas", "k", all, "w"); !version.MatchString(out) {
		t.Errorf("cas: %s", out)
	}
	// The output of get can be loaded again, also in the form in which it was a number.
	for _, v := range []string{`"` + all + `"`, all} {
		if out := e.must(`{"key":"k","value":"x","version":`+v+`}`, "-o", "json", "pipe"); !strings.Contains(
			out, `"ok":1`) {
			t.Errorf("pipe: %s", out)
		}
	}
}
