package measure

import (
	"bytes"
	"testing"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/doctor"
)

func TestDoctorTable(t *testing.T) {
	var out bytes.Buffer
	a := &commands{ctl.New(nil, &out, &out)}
	a.Output = "table"
	findings := []doctor.Finding{
		{Group: "one", Check: "a", Level: doctor.OK, Found: "fine"},
		{Group: "one", Check: "long", Level: doctor.Note, Found: "so", Advice: "do that"},
		{Group: "two", Check: "b", Level: doctor.Warn, Found: "bad"},
	}
	if err := a.doctor(findings, nil); err != nil {
		t.Errorf("nothing failed: %v", err)
	}
	findings = append(findings, doctor.Finding{Group: "two", Check: "c", Level: doctor.Fail, Found: "worse",
		Advice: "run"})
	out.Reset()
	if err := a.doctor(findings, nil); ctl.ExitCode(err) != ctl.ExitNo {
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
