package ctl

import (
	"time"

	"github.com/schollz/progressbar/v3"
)

// Bar shows people on stderr how far a command has come. A nil one shows nothing. Its methods may be
// called concurrently.
type Bar struct{ b *progressbar.ProgressBar }

// Bar is nil unless stderr is a terminal, and total is only called if it is. unit names what is counted:
// "B" are bytes, with "" no number is shown. A total below 0 is unknown.
func (a *App) Bar(what, unit string, total func() int64) *Bar {
	if !IsTerminal(a.Stderr) {
		return nil
	}
	o := []progressbar.Option{progressbar.OptionSetWriter(a.Stderr), progressbar.OptionSetDescription(what),
		progressbar.OptionThrottle(100 * time.Millisecond), progressbar.OptionClearOnFinish()}
	switch unit {
	case "":
	case "B":
		o = append(o, progressbar.OptionShowBytes(true))
	default:
		o = append(o, progressbar.OptionShowCount(), progressbar.OptionShowIts(), progressbar.OptionSetItsString(unit))
	}
	return &Bar{progressbar.NewOptions64(total(), o...)}
}

// Step adds n.
func (b *Bar) Step(n int) {
	if b != nil {
		_ = b.b.Add(n) // its errors are stderr's
	}
}

// set says how far it is, of a total that may have changed.
func (b *Bar) set(what string, done, total int64) {
	b.b.Describe(what)
	b.b.ChangeMax64(total)
	_ = b.b.Set64(done)
}

// End takes the bar away.
func (b *Bar) End() {
	if b != nil {
		_ = b.b.Finish()
	}
}
