package memcached_test

import (
	"bufio"
	"io"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/memcached"
)

// TestSame plays testdata/same: our answers and memcached's are one text. With KVD_COMPAT=1, memcached itself has to give
// them, too (and -rewrite then writes what it says). See player for the commands.
func TestSame(t *testing.T) {
	t.Run("kvd", func(t *testing.T) {
		if os.Getenv("KVD_COMPAT") == "1" && datadrivenRewrites() {
			t.Skip("rewriting what memcached says")
		}
		play(t, "testdata/same", func(t *testing.T) string {
			addr, _ := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{})})
			return addr
		})
	})
	t.Run("memcached", func(t *testing.T) {
		if os.Getenv("KVD_COMPAT") != "1" {
			t.Skip("needs memcached 1.6 installed: set KVD_COMPAT=1")
		}
		play(t, "testdata/same", func(t *testing.T) string { return startMemcached(t) })
	})
}

func datadrivenRewrites() bool {
	for _, a := range os.Args {
		if a == "-rewrite" || a == "--rewrite" || a == "-rewrite=true" {
			return true
		}
	}
	return false
}

func play(t *testing.T, dir string, start func(*testing.T) (addr string)) {
	datadriven.Walk(t, dir, func(t *testing.T, path string) {
		p := &player{addr: start(t), ordinals: make(map[string]int)}
		t.Cleanup(p.hangUp)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return p.play(t, d) })
	})
}

// player says what a file tells it to, and makes the answers of two servers comparable: cas uniques are numbered in the
// order in which they are first seen, so that $2 in a command stands for the second, and $ for the last.
//
//	talk    lines of text, each answered before the next is said; | stands for a line's end, # for a hundred k
//	bin     binary requests, a line each; see request
//
// Both have a connection of their own, which lasts until the server ends it.
type player struct {
	addr     string
	text     *line
	binary   *line
	seen     []string       // cas uniques
	ordinals map[string]int // of seen, from 1
	last     string         // of seen
}

type line struct {
	net.Conn
	r *bufio.Reader
}

func (p *player) dial(t *testing.T) *line {
	c, err := net.Dial("tcp", p.addr)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return &line{c, bufio.NewReader(c)}
}

func (p *player) hangUp() {
	for _, l := range []**line{&p.text, &p.binary} {
		if *l != nil {
			(*l).Close()
			*l = nil
		}
	}
}

func (p *player) play(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "talk":
		return p.talk(t, d.Input)
	case "bin":
		return p.bin(t, d.Input)
	}
	return "unknown command " + d.Cmd
}

// ordinal is how a cas unique is written.
func (p *player) ordinal(cas string) string {
	if cas == "0" {
		return cas
	}
	if _, ok := p.ordinals[cas]; !ok {
		p.seen = append(p.seen, cas)
		p.ordinals[cas] = len(p.seen)
	}
	p.last = cas
	return "$" + strconv.Itoa(p.ordinals[cas])
}

var placeholder = regexp.MustCompile(`\$(\d*)`)

// fill puts cas uniques into what is said.
func (p *player) fill(t *testing.T, say string) string {
	return placeholder.ReplaceAllStringFunc(say, func(s string) string {
		if s == "$" {
			return p.last
		}
		n, _ := strconv.Atoi(s[1:])
		if n < 1 || n > len(p.seen) {
			t.Fatalf("%q: no such cas unique has been seen", say)
		}
		return p.seen[n-1]
	})
}

var casOf = regexp.MustCompile(`(?m)^(VALUE \S+ \d+ \d+ |(?:HD|VA|EX|NS|NF|EN)\b.* c|ME .* cas=)(\d+)`)

func (p *player) talk(t *testing.T, lines string) string {
	var out strings.Builder
	for say := range strings.SplitSeq(lines, "\n") {
		if p.text == nil {
			p.text = p.dial(t)
		}
		said := p.fill(t, strings.NewReplacer("#", strings.Repeat("k", 100), "|", "\r\n").Replace(say))
		io.WriteString(p.text, said+"\r\nmn\r\n") //nolint:errcheck // reading tells
		answer := ""
		for {
			s, err := p.text.r.ReadString('\n')
			if s == "MN\r\n" {
				break
			}
			answer += strings.ReplaceAll(s, "\r\n", "\n")
			if err != nil {
				answer += "(closed)\n"
				p.text.Close()
				p.text = nil
				break
			}
		}
		if answer == "" {
			answer = "(nothing)\n"
		}
		out.WriteString(casOf.ReplaceAllStringFunc(strings.ReplaceAll(answer, strings.Repeat("k", 100), "#"), func(s string) string {
			m := casOf.FindStringSubmatch(s)
			return m[1] + p.ordinal(m[2])
		}))
	}
	return out.String()
}

func (p *player) bin(t *testing.T, say string) string { t.Fatal("not yet"); return "" }
