package operate

import (
	"bufio"
	"bytes"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/overview"
)

// A verdict has a color and a symbol on a terminal alone, and not where NO_COLOR or a dumb one says otherwise.
func TestVerdictColors(t *testing.T) {
	for _, c := range []struct {
		name, noColor, term string
		terminal            bool
		verdict             overview.Verdict
		want                string
	}{
		{"terminal", "", "xterm", true, overview.Healthy, "\x1b[1;32m✓ healthy: a\\tb\x1b[0m"},
		{"degraded", "", "xterm", true, overview.Degraded, "\x1b[1;33m! degraded: a\\tb\x1b[0m"},
		{"lost", "", "xterm", true, overview.Lost, "\x1b[1;31m✗ lost: a\\tb\x1b[0m"},
		{"NO_COLOR", "1", "xterm", true, overview.Lost, "lost: a\\tb"},
		{"dumb", "", "dumb", true, overview.Lost, "lost: a\\tb"},
		{"no terminal", "", "xterm", false, overview.Lost, "lost: a\\tb"},
	} {
		t.Setenv("NO_COLOR", c.noColor)
		t.Setenv("TERM", c.term)
		out := &ctl.Output{Writer: bufio.NewWriter(&bytes.Buffer{}), Terminal: c.terminal}
		a := &commands{ctl.New(strings.NewReader(""), out, &bytes.Buffer{})}
		if got := a.verdictText(c.verdict, "a\tb"); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
