package compat

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestFuzzMemcached asks the gateway and a memcached the same random commands, text and meta.
// Unlike TestSameAsMemcached of internal/memcached it meets a store, makes up wrong lines, too,
// and tells of a difference by the shortest sequence that shows it.
func TestFuzzMemcached(t *testing.T) {
	l := open(t)
	list, err := loadReviewed("memcached")
	must(t, err)
	f := &fuzzer{dialect: memcachedDialect{}, ours: l.ours().memcached, theirs: l.reference().memcached, list: list}
	f.differs(t, "Memcached", 600)
}

// keyPrefix begins the keys of a sequence. Each session has another of the same length instead,
// so that nothing need be emptied: flush_all would work on what comes within the same second, too.
const keyPrefix = "fuzz-keys."

// memcachedDialect has steps of a line, and maybe the value behind it. $CAS in a line is the last
// version that the server told.
type memcachedDialect struct{}

// Numbers have keys of their own, since memcached pads them with spaces.
func (memcachedDialect) sequence(rng *rand.Rand) []step {
	m := &maker{Rand: rng}
	var steps []step
	for range 40 {
		steps = append(steps, m.memcached(keyPrefix))
	}
	return steps
}

func (m *maker) memcached(prefix string) step {
	key := func() string {
		return m.usual([]string{prefix + "a", prefix + "b", prefix + "c"}, prefix+"ä",
			prefix+strings.Repeat("k", 250-len(prefix)), prefix+strings.Repeat("k", 251-len(prefix)))
	}
	number := func() string { return prefix + m.pick("n1", "n2") }
	expiry := func() string {
		return m.usual([]string{"0", "0", "1000"}, "-1", "9000", "2591999", "4000000000", "x", "")
	}
	value := func() string { return strings.Repeat(m.pick("x", "y", "\x00", "é"), m.IntN(100)) }
	var line, v string
	hasValue := false
	switch m.IntN(14) {
	case 0:
		line = m.pick("get ", "gets ") + key() + m.pick("", " "+key())
	case 1:
		line = m.pick("gat ", "gats ") + expiry() + " " + key()
	case 2, 3:
		v, hasValue = value(), true
		line = fmt.Sprintf("%s %s %s %s %d%s", m.pick("set", "set", "add", "replace", "append", "prepend"), key(),
			m.usual([]string{"0", "7"}, "4294967295", "-1", "x"), expiry(), len(v), m.pick("", "", " noreply"))
	case 4:
		v, hasValue = value(), true
		line = fmt.Sprintf("cas %s 0 %s %d %s", key(), expiry(), len(v), m.usual([]string{"$CAS"}, "99", "x", ""))
	case 5:
		line = "delete " + key() + m.usual([]string{""}, " 0", " 5", " noreply")
	case 6:
		v, hasValue = m.pick("1", "99", "0"), true
		line = fmt.Sprintf("set %s 0 0 %d", number(), len(v))
	case 7:
		line = m.pick("incr ", "decr ") + number() + " " + m.usual([]string{"1", "5", "100"}, "-1", "x",
			"18446744073709551615", "")
	case 8:
		line = "touch " + key() + " " + expiry()
	case 9, 10:
		line = "mg " + key() + m.flags("ckOqsvft", "TNRE")
	case 11, 12:
		v, hasValue = value(), true
		line = fmt.Sprintf("ms %s %d%s", key(), len(v), m.flags("ckOqTFM", "CIbs"))
	default:
		line = m.pick("md "+key()+m.flags("kOq", "CIT"), "ma "+number()+m.flags("kOqtcvDMNJ", "CT"), "me "+prefix+"no")
	}
	if m.IntN(25) == 0 { // a word less, or more
		if words := strings.Fields(line); m.IntN(2) == 0 && len(words) > 1 {
			line = strings.Join(words[:len(words)-1], " ")
		} else {
			line += m.pick(" x", " 0", " noreply")
		}
	}
	if hasValue {
		return step{line, v}
	}
	return step{line}
}

// flags are a few of the usual ones, and seldom one of the others.
func (m *maker) flags(usual, others string) (s string) {
	for range m.IntN(4) {
		f := usual[m.IntN(len(usual))]
		if m.IntN(10) == 0 {
			f = others[m.IntN(len(others))]
		}
		if strings.Contains(s, " "+string(rune(f))) {
			continue
		}
		s += " " + string(rune(f))
		switch f {
		case 'O':
			s += m.usual([]string{"123", "abc"}, "", strings.Repeat("o", 40))
		case 'T', 'N':
			s += m.usual([]string{"0", "1000"}, "-1", "x")
		case 'R': // far from what there is left, which changes each second
			s += m.usual([]string{"0", "30", "3000"}, "-1", "x")
		case 'C', 'E':
			s += m.usual([]string{"$CAS"}, "1", "x")
		case 'F':
			s += m.usual([]string{"0", "5"}, "x")
		case 'D', 'J':
			s += m.usual([]string{"1", "7", "1000"}, "x")
		case 'M':
			s += m.usual([]string{"S", "I", "A", "P", "R", "E", "D"}, "X", "")
		}
	}
	return s
}

func (memcachedDialect) variants() int { return 1 }

func (memcachedDialect) show(s step) string {
	return strings.TrimSpace(strings.Join(s, " ⏎ "))
}

func (memcachedDialect) alike(_ []step, replies []reply, theirs reply) bool {
	return replies[len(replies)-1].String() == theirs.String()
}

func (memcachedDialect) begin(addr string, _ int) (session, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &memcachedSession{c, bufio.NewReader(c), "1", fmt.Sprintf("%09d.", sessions.Add(1))}, nil
}

var sessions atomic.Int64 // so far, for their prefixes

type memcachedSession struct {
	net.Conn
	in          *bufio.Reader
	cas, prefix string
}

var (
	casOfGets = regexp.MustCompile(`(?m)^(VALUE \S+ \d+ \d+) (\d+)`)
	casOfMeta = regexp.MustCompile(`(?m)^((?:HD|VA \d+|NS|EX|NF)\b.*? )c(\d+)`)
	// newVersion: of these commands the gateway makes a new version, and memcached none.
	newVersion = regexp.MustCompile(`^(touch|gats?|m. .* [TNR]) ?`)
	leftLong   = regexp.MustCompile(`(?m)^((?:HD|VA \d+).*? )t\d{3,}`)
)

// ask sends the no-op behind the command, whose answer is the end of the command's. Versions and
// times are taken out.
func (s *memcachedSession) ask(cmd step) reply {
	var say strings.Builder
	say.WriteString(strings.NewReplacer("$CAS", s.cas, keyPrefix, s.prefix).Replace(cmd[0]) + "\r\n")
	if len(cmd) > 1 {
		say.WriteString(cmd[1] + "\r\n")
	}
	say.WriteString("mn\r\n")
	err := s.SetDeadline(time.Now().Add(answerTime))
	if _, err2 := io.WriteString(s, say.String()); err == nil {
		err = err2
	}
	var b bytes.Buffer
	for err == nil {
		var line string
		if line, err = s.in.ReadString('\n'); line == "MN\r\n" {
			r := s.read(strings.ReplaceAll(b.String(), s.prefix, keyPrefix))
			if newVersion.MatchString(cmd[0]) {
				s.cas = "1"
			}
			return r
		}
		b.WriteString(line)
	}
	return reply{kind: '!', text: cmp.Or(b.String(), errNoAnswer.Error()+": "+err.Error())}
}

func (s *memcachedSession) read(text string) reply {
	for _, m := range casOfGets.FindAllStringSubmatch(text, -1) {
		s.cas = m[2]
	}
	for _, m := range casOfMeta.FindAllStringSubmatch(text, -1) {
		s.cas = m[2]
	}
	text = casOfGets.ReplaceAllString(text, "$1 CAS")
	text = casOfMeta.ReplaceAllStringFunc(text, func(m string) string {
		at := strings.LastIndex(m, " c") + 2
		if n, err := strconv.ParseUint(m[at:], 10, 64); err == nil && n > 0 {
			return m[:at] + "CAS"
		}
		return m // of nothing
	})
	text = leftLong.ReplaceAllString(text, "${1}tLONG")
	kind := byte('$')
	if strings.Contains(text, "ERROR") {
		kind = '-'
	}
	return reply{kind: kind, text: text}
}
