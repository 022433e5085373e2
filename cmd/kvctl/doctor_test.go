package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/doctor"
)

func TestDoctorTable(t *testing.T) {
	var out bytes.Buffer
	a := newApp(nil, &out, &out)
	a.output = "table"
	findings := []doctor.Finding{
		{Group: "one", Check: "a", Level: doctor.OK, Found: "fine"},
		{Group: "one", Check: "long", Level: doctor.Note, Found: "so", Advice: "do that"},
		{Group: "two", Check: "b", Level: doctor.Warn, Found: "bad"},
	}
	if err := a.doctor(findings); err != nil {
		t.Errorf("nothing failed: %v", err)
	}
	findings = append(findings, doctor.Finding{Group: "two", Check: "c", Level: doctor.Fail, Found: "worse",
		Advice: "run"})
	out.Reset()
	if err := a.doctor(findings); exitCode(err) != exitNo {
		t.Errorf("something failed: %v", err)
	}
	const want = `one
  ok    a     fine
  note  long  so
              -> do that

two
  warn  b     bad
  FAIL  c     worse
              -> run

1 ok, 1 note, 1 warn, 1 FAIL
`
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
}

// It needs no store, and its status says whether something failed.
func TestDoctorHere(t *testing.T) {
	run := func(args ...string) result {
		var out, errs bytes.Buffer
		code := newApp(strings.NewReader(""), &out, &errs).run(t.Context(),
			append([]string{"doctor", "--directory", "127.0.0.1:1"}, args...))
		return result{out.String(), errs.String(), code}
	}
	for _, provider := range []string{"", "shm", "tcp", "verbs"} {
		r := run("-o", "json", "--provider", provider)
		findings := decode[struct{ Findings []map[string]string }](t, r.stdout).Findings
		failed := slices.ContainsFunc(findings, func(f map[string]string) bool { return f["level"] == "fail" })
		if len(findings) < 10 || failed != (r.code == exitNo) || !failed && r.code != exitOK || r.stderr != "" {
			t.Errorf("--provider %q: %+v", provider, r)
		}
		ok := slices.ContainsFunc(findings, func(f map[string]string) bool {
			return f["group"] == "providers" && f["check"] == provider && f["level"] == "ok"
		})
		if provider != "" && ok == failed {
			t.Errorf("--provider %s: usable %v, status %d", provider, ok, r.code)
		}
	}
	if r := run("--provider", "sim"); r.code != exitUsage ||
		!strings.Contains(r.stderr, "want one of shm, tcp, verbs") {
		t.Errorf("--provider sim: %+v", r)
	}
}
