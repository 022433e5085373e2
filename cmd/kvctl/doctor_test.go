package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/measure"
)

// It needs no store, and its status says whether something failed.
func TestDoctorHere(t *testing.T) {
	run := func(args ...string) result {
		var out, errs bytes.Buffer
		code := newProgram(strings.NewReader(""), &out, &errs).run(t.Context(),
			append([]string{"doctor", "--directory", "127.0.0.1:1"}, args...))
		return result{out.String(), errs.String(), code}
	}
	for _, provider := range []string{"", "shm", "tcp", "verbs"} {
		r := run("-o", "json", "--provider", provider)
		findings := decode[struct{ Findings []map[string]string }](t, r.stdout).Findings
		failed := slices.ContainsFunc(findings, func(f map[string]string) bool { return f["level"] == "fail" })
		if len(findings) < 10 || failed != (r.code == ctl.ExitNo) || !failed && r.code != ctl.ExitOK || r.stderr != "" {
			t.Errorf("--provider %q: %+v", provider, r)
		}
		ok := slices.ContainsFunc(findings, func(f map[string]string) bool {
			return f["group"] == "providers" && f["check"] == provider && f["level"] == "ok"
		})
		if provider != "" && ok == failed {
			t.Errorf("--provider %s: usable %v, status %d", provider, ok, r.code)
		}
	}
	if r := run("--provider", "sim"); r.code != ctl.ExitUsage ||
		!strings.Contains(r.stderr, "want one of shm, tcp, verbs") {
		t.Errorf("--provider sim: %+v", r)
	}
}

// serveDoctor runs kvctl doctor --serve, and gives its address and how to end it.
func serveDoctor(t *testing.T, args ...string) (addr string, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var errs bytes.Buffer
		if code := newProgram(strings.NewReader(""), w, &errs).run(ctx,
			append([]string{"doctor", "--serve", "--listen", "127.0.0.1:0"}, args...)); code != ctl.ExitOK {
			t.Errorf("doctor --serve: status %d: %s", code, &errs)
		}
		_ = w.Close()
	}()
	stop = sync.OnceFunc(func() { cancel(); <-ended })
	t.Cleanup(stop)
	line, err := bufio.NewReader(r).ReadString('\n')
	addr, ok := strings.CutPrefix(strings.TrimSpace(line), "ready: kvctl doctor --against ")
	if err != nil || !ok {
		t.Fatalf("doctor --serve says %q, %v", line, err)
	}
	return addr, stop
}

// The way to another process is measured over tcp, without an adapter.
func TestDoctorAgainst(t *testing.T) {
	addr, stop := serveDoctor(t, "--provider", "tcp")
	type report struct {
		Findings []map[string]string
		Results  []measure.Measured
	}
	run := func(args ...string) (report, result) {
		var out, errs bytes.Buffer
		code := newProgram(strings.NewReader(""), &out, &errs).run(t.Context(),
			append([]string{"doctor", "-o", "json", "--provider", "tcp", "--against", addr}, args...))
		r := result{out.String(), errs.String(), code}
		if code == ctl.ExitUsage {
			return report{}, r
		}
		all := decode[report](t, r.stdout)
		all.Findings = slices.DeleteFunc(all.Findings, func(f map[string]string) bool {
			return f["group"] != "against "+addr
		})
		return all, r
	}
	got, r := run()
	levels := map[string]string{}
	for _, f := range got.Findings {
		levels[f["check"]] = f["level"]
	}
	for _, check := range []string{"reached", "tcp WRITE_PINGPONG", "tcp READ", "tcp WRITE", "tcp CMP_AND_SWP",
		"tcp FETCH_ADD", "interface MTU"} {
		if levels[check] != "ok" {
			t.Errorf("%s: %q\n%s%s", check, levels[check], r.stdout, r.stderr)
		}
	}
	if len(got.Results) != len(measure.EndCases) || r.code != ctl.ExitOK {
		t.Errorf("%d results, status %d, want %d and %d", len(got.Results), r.code, len(measure.EndCases), ctl.ExitOK)
	}
	for _, m := range got.Results {
		if m.Provider != "tcp" || m.MedianNanos <= 0 || m.MiBPerSec <= 0 {
			t.Errorf("%+v", m)
		}
	}

	stop()
	got, r = run()
	if len(got.Findings) != 1 || got.Findings[0]["check"] != "reached" || got.Findings[0]["level"] != "fail" ||
		r.code != ctl.ExitNo {
		t.Errorf("without the other end: %+v, status %d", got.Findings, r.code)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--serve"}, "want one of them"},
		{[]string{"--listen", "127.0.0.1:1"}, "is for --serve"},
		{[]string{"--against", "192.0.2.1"}, "want TLS flags, or --insecure"},
		{[]string{"--against", ":1"}, "want HOST"},
		{[]string{"--provider", "shm"}, "within one machine"},
		{[]string{"--against", "", "--serve", "--listen", "0.0.0.0:0"}, "want TLS flags, or --insecure"},
		{[]string{"--against", "", "--serve", "--listen", "127.0.0.1"}, "want HOST:PORT"},
	} {
		if _, r := run(c.args...); r.code != ctl.ExitUsage || !strings.Contains(r.stderr, c.want) {
			t.Errorf("%v: status %d: %s; want %q", c.args, r.code, r.stderr, c.want)
		}
	}
}

// Certificates that are not there are this end's fault, and no finding about the other.
func TestDoctorAgainstNoCertificates(t *testing.T) {
	for _, args := range [][]string{{"--against", "192.0.2.1"}, {"--serve"}} {
		var out, errs bytes.Buffer
		code := newProgram(strings.NewReader(""), &out, &errs).run(t.Context(), append([]string{"doctor", "--tls-ca",
			"/nonexistent", "--tls-cert", "/nonexistent", "--tls-key", "/nonexistent"}, args...))
		if code != ctl.ExitOther || out.Len() > 0 || !strings.Contains(errs.String(), "/nonexistent") {
			t.Errorf("%v: status %d: %s%s", args, code, out.String(), errs.String())
		}
	}
}

// A stranger at the other end is told apart, and sends nobody elsewhere.
func TestDoctorAgainstStranger(t *testing.T) {
	for answer, want := range map[string]string{
		"nonsense": "no JSON of kvctl doctor", `{"version":9}`: "version 9",
		`{"version":1,"host":"h","to":["tcp,192.0.2.1:x,1,1","tcp,192.0.2.1","sim,127.0.0.1:1,1,1"]}`: "none that is wanted",
		`{"version":1,"host":"h","to":["tcp,192.0.2.1:1,0x1,0x1"]}`:                                   "127.0.0.1:1",
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, answer)
		}))
		var out, errs bytes.Buffer
		code := newProgram(strings.NewReader(""), &out, &errs).run(t.Context(), []string{"doctor", "--provider", "tcp",
			"--timeout", "5s", "--against", s.Listener.Addr().String()})
		s.Close()
		if code != ctl.ExitNo || !strings.Contains(out.String(), want) {
			t.Errorf("%s: status %d, want %q in\n%s%s", answer, code, want, out.String(), errs.String())
		}
	}
}
