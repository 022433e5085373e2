package ctl

import (
	"bytes"
	"testing"
)

func TestPrintTable(t *testing.T) {
	var out bytes.Buffer
	a := New(nil, &out, nil)
	a.PrintTable(Row{"Name", "N"}, []Row{{"a", 1}, {"b", "22.5"}, {"c", "-"}})
	want := " Name     N\n────────────\n a        1\n b     22.5\n c        -\n"
	if out.String() != want {
		t.Errorf("%q\nwant %q", out.String(), want)
	}
}
