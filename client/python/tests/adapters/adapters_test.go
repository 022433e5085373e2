package adapters

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
)

// TestAdapters drives each adapter through its life, and through ten thousand loads from a store that fails.
// KVD_ADAPTER_LOADS says how many otherwise.
func TestAdapters(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3")
	}
	if err := exec.Command(python, "-c", "import sys; sys.exit(sys.version_info < (3, 9))").Run(); err != nil {
		t.Skip("python3 is older than 3.9")
	}
	packages, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), python, "-B", "-W", "error", "-m", "unittest", "discover", "-b", "-v")
	cmd.Env = append(os.Environ(), "PYTHONPATH="+packages)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if ran := regexp.MustCompile(`(?m)^Ran (\d+) tests`).FindSubmatch(out); ran == nil || len(ran[1]) < 2 {
		t.Fatalf("it ran fewer than ten tests:\n%s", out)
	}
	t.Logf("%s", out)
}
