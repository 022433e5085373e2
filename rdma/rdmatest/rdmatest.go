// Package rdmatest judges providers: one named case per sentence of the contract
// in package driver. A provider's test is
//
//	func TestConformance(t *testing.T) {
//		rdmatest.Run(t, func(t *testing.T) rdmatest.Harness { ... })
//	}
//
// It leaves opening devices to the provider's test, and speed to benchmarks.
// Read [Harness], then the table in cases.go. [Env] and [Lane] are the helpers
// the cases are written with; other tests may use them too.
//
// A case that needs a capability the device does not have skips and names it.
// The skips of every Run are kept in testdata/skips.golden of the provider's package, so that a new one is a
// reviewed change. The flag -rewrite of go test updates it.
//
// An Env belongs to the test goroutine. A Lane belongs to one goroutine at a
// time, which owns its buffers under the rules of package driver.
//
// The form follows testing/fstest, golang.org/x/net/nettest and go-cloud's
// drivertest.
package rdmatest

import (
	"bytes"
	"errors"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	_ "github.com/cockroachdb/datadriven" // registers -rewrite for every golden file
	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/rdma"
)

// Harness is what one case runs on. Run asks for a fresh one per case and
// closes both devices at its end; anything else that the harness made it
// removes in t.Cleanup.
type Harness struct {
	// Passive owns the memory and listens.
	Passive *rdma.Device
	// Active dials. It may be the same Device.
	Active *rdma.Device
	// Addr is what Passive listens at; dialers use the Listener's Addr.
	Addr string
	// Drive makes progress on a provider that does nothing by itself; it is
	// called from any goroutine that waits. Nil for all others.
	Drive func()
	// Wait has lanes wait with CQ.Wait, where it is of use, instead of CQ.Ready.
	Wait bool
}

const skipsFile = "testdata/skips.golden"

// Run judges the provider that newHarness opens.
func Run(t *testing.T, newHarness func(*testing.T) Harness) {
	ran := make(map[string]string) // case -> capability it lacked, or ""
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			ran[c.name] = ""
			others := goleak.IgnoreCurrent()
			t.Cleanup(func() { // registered first, so that it runs after all others
				if !t.Failed() {
					goleak.VerifyNone(t, others)
				}
			})
			e := NewEnv(t, newHarness(t))
			for _, need := range c.needs {
				if !need.has(e.H.Active.Caps()) {
					ran[c.name] = need.name
					t.Skipf("needs %s", need.name)
				}
			}
			c.run(t, e)
		})
	}
	checkSkips(t, ran)
}

// checkSkips compares what was skipped with the golden file, which holds lines
// "test/case needs capability" of every Run in the package. Cases that -run
// excluded are not judged.
func checkSkips(t *testing.T, ran map[string]string) {
	var want []string
	b, err := os.ReadFile(skipsFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	keep := []string{}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSuffix(line, "\n")
		test, rest, _ := strings.Cut(line, "/")
		name, _, _ := strings.Cut(rest, " needs ")
		if test != t.Name() {
			keep = append(keep, line)
		} else if _, ok := ran[name]; ok {
			want = append(want, line)
		} else if len(ran) < len(cases) {
			keep = append(keep, line)
		} else {
			want = append(want, line) // no such case any more
		}
	}
	var got []string
	for name, need := range ran {
		if need != "" {
			got = append(got, t.Name()+"/"+name+" needs "+need)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if slices.Equal(got, want) {
		return
	}
	if f := flag.Lookup("rewrite"); f == nil || f.Value.String() != "true" {
		t.Errorf("%s: skipped cases differ; if intended, run with -rewrite\n got %q\nwant %q", skipsFile, got, want)
		return
	}
	all := append(keep, got...)
	slices.Sort(all)
	var out bytes.Buffer
	for _, l := range all {
		out.WriteString(l + "\n")
	}
	if err := os.MkdirAll(filepath.Dir(skipsFile), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(skipsFile, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}
