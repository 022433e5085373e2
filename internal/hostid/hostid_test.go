package hostid

import (
	"os"
	"os/exec"
	"testing"
)

// Another process of this machine finds the same name; nothing equals unknown.
func TestID(t *testing.T) {
	if os.Getenv("HOSTID_CHILD") != "" {
		os.Stdout.WriteString(ID() + "\n")
		os.Exit(0)
	}
	c := exec.Command(os.Args[0], "-test.run=^TestID$")
	c.Env = append(os.Environ(), "HOSTID_CHILD=1")
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	if ID() == "" || string(out) != ID()+"\n" {
		t.Errorf("ID here %q, in a child %q", ID(), out)
	}
	if Same("", "") || Same("a", "b") || !Same("a", "a") {
		t.Error("Same is wrong about the empty or different names")
	}
}
