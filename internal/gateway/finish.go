package gateway

import (
	"time"

	"github.com/kvd-project/kvd/internal/redis/admin"
	"github.com/kvd-project/kvd/internal/redis/spec"
)

// ended is a command that has been performed, or refused, and whose reply has been written to batch.w.
type ended struct {
	cmd *command
	// args are the command's, or with nameless what follows its name; nil: it was refused before it began.
	args        [][]byte
	start, errs int           // where the reply starts, if none of it has been sent, and w.Errors before it
	took        time.Duration // until now, since the command came
	nameless    bool
	refused     bool // SLOWLOG leaves it out
	shown       bool // MONITOR has seen it, or nobody looks
	streamed    bool // a part of its reply has gone out, which cannot be taken back
	inExec      bool // its reply is one of EXEC's
}

// words are the arguments with the command's name, of which no more than most need be there, and how many there are.
func (x *ended) words(most int) (args [][]byte, n int) {
	if !x.nameless {
		return x.args, len(x.args)
	}
	return append([][]byte{[]byte(x.cmd.Name)}, x.args[:min(len(x.args), most)]...), 1 + len(x.args)
}

// finish is the end of every command, however it was performed: metrics, SLOWLOG, MONITOR and Options.Answered hear of
// it, and its reply is sent, kept for those behind it, or taken back (CLIENT REPLY). An error is that of sending, and
// ends the connection. A caller that has finished some commands calls countAlike.
func (b *batch) finish(x *ended) error {
	c, w := b.c, &b.w
	errs := w.Errors - x.errs
	b.count(x, errs)
	if c.g.slow.Notes(x.took) && !x.refused && !x.cmd.Has(spec.FlagSkipSlowlog) {
		args, n := x.words(admin.MaxSlowArgs)
		c.logSlow(x.cmd, args, n, x.took)
	}
	if !x.shown && x.args != nil && c.shows(x.cmd) {
		args, n := x.words(len(x.args))
		c.showCommand(x.cmd, args, n, c.db)
	}
	c.told(x.cmd, w, x.start, errs > 0, x.took)
	switch {
	case !x.inExec:
		return c.replied(w, x.start, x.streamed)
	case c.mute():
		w.Truncate(x.start) // EXEC's reply as a whole goes nowhere
	case w.Len() > sendFrom:
		return c.push(w, 0)
	}
	return nil
}

// count counts a command whose reply has so many errors. EXEC has not failed if only commands of its transaction did,
// which have been counted before. Commands that follow each other, are alike and went well are counted at once.
func (b *batch) count(x *ended, errs int) {
	g, a := b.c.g, &b.alike
	if errs == 0 {
		if a.cmd != x.cmd || a.took != x.took {
			b.countAlike()
			a.cmd, a.took = x.cmd, x.took
		}
		a.n++
		return
	}
	failed := x.cmd.batch == nil || isError(&b.w, x.start)
	if failed {
		g.noteErrors(&b.w, x.start, errs)
	}
	g.m.noteCommands(x.cmd, 1, failed, x.took)
	if x.args == nil {
		g.m.commands[x.cmd.ID].rejected.Add(1)
	}
}

// countAlike counts what count has not.
func (b *batch) countAlike() {
	b.c.g.m.noteCommands(b.alike.cmd, b.alike.n, false, b.alike.took)
	b.alike.cmd, b.alike.n = nil, 0
}
