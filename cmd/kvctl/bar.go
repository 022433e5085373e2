package main

import (
	"time"

	"github.com/schollz/progressbar/v3"
)

// bar shows people on stderr how far a command has come. A nil one shows nothing. Its methods may be
// called concurrently.
type bar struct{ b *progressbar.ProgressBar }

// bar is nil unless stderr is a terminal, and total is only called if it is. unit names what is counted:
// "B" are bytes, with "" no number is shown. A total below 0 is unknown.
func (a *app) bar(what, unit string, total func() int64) *bar {
	if !isTerminal(a.stderr) {
		return nil
	}
	o := []progressbar.Option{progressbar.OptionSetWriter(a.stderr), progressbar.OptionSetDescription(what),
		progressbar.OptionThrottle(100 * time.Millisecond), progressbar.OptionClearOnFinish()}
	switch unit {
	case "":
	case "B":
		o = append(o, progressbar.OptionShowBytes(true))
	default:
		o = append(o, progressbar.OptionShowCount(), progressbar.OptionShowIts(), progressbar.OptionSetItsString(unit))
	}
	return &bar{progressbar.NewOptions64(total(), o...)}
}

// step adds n.
func (b *bar) step(n int) {
	if b != nil {
		_ = b.b.Add(n) // its errors are stderr's
	}
}

// set says how far it is, of a total that may have changed.
func (b *bar) set(what string, done, total int64) {
	b.b.Describe(what)
	b.b.ChangeMax64(total)
	_ = b.b.Set64(done)
}

// end takes the bar away.
func (b *bar) end() {
	if b != nil {
		_ = b.b.Finish()
	}
}
