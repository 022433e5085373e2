package compat

import (
	"bytes"
	"errors"
	"io"
	"net"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestWire sends bytes that are no, or hardly, Redis's protocol to the gateway and to a
// redis-server, which answer the same bytes before they close the connection or its end comes.
// Redis leaves a connection open whose reply to a wrong command is turned off and reads nothing
// of it any more; the gateway closes it. That is not compared: the client ends each connection.
func TestWire(t *testing.T) {
	l := open(t)
	line := func(n int) string { return "PING " + strings.Repeat("a", n-5) }
	for name, say := range map[string]string{
		"empty lines":     "\r\n\n \r\n\t\r\nPING\r\n",
		"empty commands":  "*0\r\n*-1\r\n*-10\r\nPING\r\n",
		"no name":         "*1\r\n$0\r\n\r\nPING\r\n",
		"no name, inline": "\"\"\r\nPING\r\n",
		"a name with NUL": "*1\r\n$5\r\nPI\x00NG\r\nPING\r\n",
		"quotes": "SET wire \"a\\x41\\n\"\r\nGET wire\r\nSET wire 'a\\'b'\r\nGET " +
			"wire\r\n",
		"quotes that do not end":                "PING \"a\r\nPING\r\n",
		"quotes before a letter":                "PING \"a\"b\r\nPING\r\n",
		"a line that begins with NUL":           "\x00\r\nPING\r\n",
		"a line with NUL":                       "PING a\x00b\r\nPING\r\n",
		"a line with NUL, and much more":        "PING a\x00b\r\n" + strings.Repeat("PING\r\n", 20_000),
		"a number of arguments with NUL":        "*1\x00\r\n$4\r\nPING\r\n",
		"a length with NUL":                     "*1\r\n$4\x00\r\nPING\r\n",
		"a number of arguments with a letter":   "*1x\r\n$4\r\nPING\r\n",
		"a number of arguments with a space":    "*1 \r\n$4\r\nPING\r\n",
		"a number of arguments after a space":   "* 1\r\n$4\r\nPING\r\n",
		"a number of arguments with a zero":     "*01\r\n$4\r\nPING\r\n",
		"a number of arguments with a plus":     "*+1\r\n$4\r\nPING\r\n",
		"no number of arguments":                "*\r\nPING\r\n",
		"more arguments than there can be":      "*2147483648\r\n",
		"a length with a letter":                "*1\r\n$4x\r\nPING\r\n",
		"a length with a zero":                  "*1\r\n$04\r\nPING\r\n",
		"no length":                             "*1\r\n$\r\nPING\r\n",
		"a length below 0":                      "*1\r\n$-1\r\nPING\r\n",
		"another byte instead of a length":      "*2\r\n$4\r\nPING\r\n:1\r\n",
		"other bytes behind an argument":        "*1\r\n$4\r\nPINGxx*1\r\n$4\r\nPING\r\n",
		"another byte behind CR":                "*1\rX$4\rYPING\r\n",
		"a long line":                           line(65_530) + "\r\nPING\r\n",
		"a line at the limit":                   line(65_536),
		"a line above the limit":                line(65_537),
		"a line far above the limit":            line(200_000) + "\r\nPING\r\n",
		"a number of arguments above the limit": "*" + strings.Repeat("1", 65_540),
		"a length above the limit":              "*1\r\n$" + strings.Repeat("1", 65_540),
		"skip, then no command":                 "CLIENT REPLY SKIP\r\n*x\r\n",
		"skip, then a wrong line":               "CLIENT REPLY SKIP\r\nPING \"a\r\nPING\r\n",
		"skip and a command, then no command":   "CLIENT REPLY SKIP\r\nPING\r\n*x\r\n",
		"off, then no command":                  "CLIENT REPLY OFF\r\n*x\r\nCLIENT REPLY ON\r\nPING\r\n",
		"off, then a wrong line":                "CLIENT REPLY OFF\r\nPING 'a\r\nPING\r\n",
		"off, then a long line":                 "CLIENT REPLY OFF\r\n" + line(100_000),
		"skip, then unknown":                    "CLIENT REPLY SKIP\r\nfoo\r\nPING\r\n",
		"skip twice":                            "CLIENT REPLY SKIP\r\nCLIENT REPLY SKIP\r\nPING\r\nPING\r\n",
		"skip, then off": "CLIENT REPLY SKIP\r\nCLIENT REPLY OFF\r\nPING\r\nCLIENT REPLY " +
			"ON\r\nPING\r\n",
		"skip, then on":               "CLIENT REPLY SKIP\r\nCLIENT REPLY ON\r\nPING\r\n",
		"skip, then nothing":          "CLIENT REPLY SKIP\r\n\r\nPING\r\nPING\r\n",
		"skip, then an empty command": "CLIENT REPLY SKIP\r\n*0\r\nPING\r\nPING\r\n",
		"nothing, then skip":          "\r\nCLIENT REPLY SKIP\r\nPING\r\nPING\r\n",
		"off, reset":                  "CLIENT REPLY OFF\r\nRESET\r\nPING\r\n",
		"wrong replies":               "CLIENT REPLY foo\r\nCLIENT REPLY\r\nCLIENT REPLY ON x\r\n",
		"skip in a transaction":       "MULTI\r\nCLIENT REPLY SKIP\r\nPING\r\nEXEC\r\nPING\r\n",
		"skip, then a transaction":    "CLIENT REPLY SKIP\r\nMULTI\r\nPING\r\nEXEC\r\n",
		"HELLO in a transaction": "MULTI\r\nHELLO 3\r\nCONFIG GET appendonly\r\nEXEC\r\nCONFIG GET " +
			"appendonly\r\n",
		"a wrong HELLO in a transaction": "MULTI\r\nHELLO 4\r\nHELLO x\r\nHELLO 3 foo\r\nPING\r\nEXEC\r\n",
		"AUTH in a transaction":          "MULTI\r\nAUTH nobody wrong\r\nPING\r\nEXEC\r\nAUTH a b c d\r\n",
		"RESET in a transaction":         "MULTI\r\nPING\r\nRESET\r\nPING\r\nEXEC\r\n",
		"QUIT in a transaction":          "MULTI\r\nPING\r\nQUIT\r\nPING\r\n",
		"a wrong EXEC":                   "MULTI\r\nPING\r\nEXEC x\r\nPING\r\nEXEC\r\n",
		"a wrong EXEC alone":             "EXEC x\r\nPING\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			ours, theirs := saidTo(t, l.ours().redis, say), saidTo(t, l.reference().redis, say)
			if ours != theirs {
				t.Errorf("sent %.300q\n got %.300q\nwant %.300q", say, ours, theirs)
			}
		})
	}
}

var (
	helloID      = regexp.MustCompile(`(\$2\r\nid\r\n):\d+`)
	helloVersion = regexp.MustCompile(`(\$7\r\nversion\r\n)\$\d+\r\n[\d.]+`)
)

// saidTo sends everything at once, ends its half of the connection, and returns what the server
// says until it ends the other, without what is another number each time.
func saidTo(t *testing.T, addr, say string) string {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	must(t, err)
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(patience)))
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = io.WriteString(c, say) // it may close the connection before the end
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	got := new(bytes.Buffer)
	if _, err := io.Copy(got, c); err != nil && !errors.Is(err, syscall.ECONNRESET) { // of what it did not read
		t.Fatalf("%v after %.300q", err, got)
	}
	<-sent
	return helloVersion.ReplaceAllString(helloID.ReplaceAllString(got.String(), "$1:ID"), "$1 VERSION")
}
