package gateway

import (
	"bytes"
	"time"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

// told tells Options.Answered of a command whose reply, or the part of it that has not been sent, starts at byte start
// of w. It is small so that it is inlined: nearly always there is nobody to tell.
func (c *conn) told(cmd *command, w *resp.Writer, start int, failed bool, took time.Duration) {
	if c.g.o.Answered != nil {
		c.tellAnswered(cmd, w, start, failed, took)
	}
}

// isError reports whether the reply that starts at byte start of w is an error, as far as it has not been sent.
func isError(w *resp.Writer, start int) bool { return start < w.Len() && w.Bytes()[start] == '-' }

// tellAnswered names the database of the connection, which for SELECT is the one that it has chosen. A command with a
// reply that has been sent in parts has the error class of what is left of it.
func (c *conn) tellAnswered(cmd *command, w *resp.Writer, start int, failed bool, took time.Duration) {
	a := netsrv.Answered{Command: cmd.Name, Database: c.g.o.Databases[c.db].Name, Took: took, Client: c.remote}
	if failed {
		all := w.Bytes()
		a.Error, a.Unknown = errorClass(all[min(start, len(all)):])
	}
	c.g.o.Answered(a)
}

// errorClass is the first word of an error, which Redis means for programs; that of a reply with an error among others
// is ERR. unknown says that the command may have happened. A class has 32 letters at most.
func errorClass(reply []byte) (class string, unknown bool) {
	text, ok := bytes.CutPrefix(reply, []byte("-"))
	n := 0
	for n < len(text) && n < 32 && text[n] >= 'A' && text[n] <= 'Z' {
		n++
	}
	if !ok || n == 0 {
		return "ERR", false
	}
	return string(text[:n]), bytes.HasPrefix(text, []byte(unknownOutcome))
}
