package verbstest

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

// Two ends measure the way between them over their adapters, and say that it loses packets when it does.
func TestDoctorAgainst(t *testing.T) {
	needs(t, "1")
	needsVerbs(t, "it is about adapters' counters")
	kvctl := filepath.Join(bin, "kvctl")
	s := spawn(t, "doctor", environ(), kvctl, "doctor", "--serve", "--listen", "127.0.0.1:0", "--rdma-device", nic(1))
	_, addr, ok := strings.Cut(s.line(), "--against ")
	if !ok {
		t.Fatalf("doctor --serve says no address\n%s", s.log)
	}
	against := func(status int) map[string]string {
		t.Helper()
		out, stderr, got := run(t, kvctl, "-o", "json", "--provider", "verbs", "--rdma-device", nic(0),
			"--timeout", "60s", "doctor", "--against", addr)
		if got != status {
			t.Errorf("status %d, want %d: %s%s", got, status, out, stderr)
		}
		var r struct {
			Findings []struct{ Group, Check, Level, Found, Advice string }
		}
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatalf("%v: %s%s", err, out, stderr)
		}
		levels := map[string]string{}
		for _, f := range r.Findings {
			if f.Group == "against "+addr {
				t.Logf("%s %s: %s", f.Level, f.Check, f.Found)
				levels[f.Check] = f.Level
			}
		}
		return levels
	}
	levels := against(0)
	for _, check := range []string{"verbs WRITE_PINGPONG", "verbs READ", "verbs WRITE", "verbs CMP_AND_SWP",
		"verbs FETCH_ADD", "RoCE version", "path MTU"} {
		if levels[check] != "ok" {
			t.Errorf("%s: %q", check, levels[check])
		}
	}
	mend := lose(t, 2, "0.5%")
	levels = against(0)
	if levels["counters here"] != "warn" && levels["counters there"] != "warn" {
		t.Errorf("the network loses packets: %v", levels)
	}
	mend()
}

// Registration with an adapter is measured, of pages that are there and of pages that it takes.
func TestPerfRegister(t *testing.T) {
	needs(t, "1")
	needsVerbs(t, "it is about adapters")
	out, stderr, status := run(t, filepath.Join(bin, "kvctl"), "-o", "json", "--provider", "verbs", "--rdma-device",
		nic(0), "perf", "--register=64MiB")
	var r struct {
		Registrations []struct {
			Pages    string
			Threads  int
			Register float64 `json:"register_seconds_per_gib"`
			Missing  string
		}
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil || status != 0 {
		t.Fatalf("status %d, %v: %s%s", status, err, out, stderr)
	}
	seen := map[string]bool{}
	for _, x := range r.Registrations {
		seen[x.Pages] = true
		if x.Missing == "" && x.Register <= 0 {
			t.Errorf("%+v", x)
		}
	}
	if len(seen) != 3 {
		t.Errorf("measured %v", r.Registrations)
	}
	t.Log(out)
}
