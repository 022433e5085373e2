package memcached_test

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/memcached"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestSame plays testdata/same: our answers and memcached's are one text. With KVD_COMPAT=1, memcached itself has to
// give them, too (and -rewrite then writes what it says). See player for the commands.
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
//	bin     binary requests, a line each; see request. With touches, which change the cas unique here alone, it is not shown
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
	c.SetDeadline(time.Now().Add(testutil.Limit))
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
		was := player{seen: slices.Clone(p.seen), ordinals: maps.Clone(p.ordinals), last: p.last}
		got := p.bin(t, d.Input)
		if d.HasArg("touches") {
			p.seen, p.ordinals, p.last = was.seen, was.ordinals, was.last
			got = casAny.ReplaceAllString(got, "cas=*")
		}
		return strings.ReplaceAll(got, memcached.Version, "1.6.18")
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

var casAny = regexp.MustCompile(`cas=\$\d+`)

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
		out.WriteString(casOf.ReplaceAllStringFunc(strings.ReplaceAll(answer, strings.Repeat("k", 100), "#"),
			func(s string) string {
				m := casOf.FindStringSubmatch(s)
				return m[1] + p.ordinal(m[2])
			}))
	}
	return out.String()
}

// opcodeOf has opcodes by name; q behind one is the quiet one.
var opcodeOf = map[string]byte{"get": 0, "set": 1, "add": 2, "replace": 3, "delete": 4, "incr": 5, "decr": 6, "quit": 7,
	"flush": 8, "getq": 9, "noop": 10,
	"version": 11, "getk": 12, "getkq": 13, "append": 14, "prepend": 15, "stat": 16, "setq": 17, "addq": 18,
	"replaceq": 19, "deleteq": 20,
	"incrq": 21, "decrq": 22, "quitq": 23, "flushq": 24, "appendq": 25, "prependq": 26, "verbosity": 27, "touch": 28,
	"gat": 29, "gatq": 30,
	"saslmechs": 32, "saslauth": 33, "saslstep": 34, "gatk": 35, "gatkq": 36}

// request makes a binary request of a line: an opcode, by name or number, and FIELD=VALUE of k (the key; \s is a
// space), v (the value), c (cas), o (the opaque), f, e (flags, exptime; their order is the extras'), d, i (delta,
// initial), b (a body length that is not true), n (a key length likewise), x (extras in hex). # stands for a hundred k.
func request(t testing.TB, say string) []byte {
	t.Helper()
	words := strings.Fields(strings.ReplaceAll(say, "#", strings.Repeat("k", 100)))
	op, known := opcodeOf[words[0]]
	if !known {
		n, err := strconv.ParseUint(words[0], 0, 8)
		if err != nil {
			t.Fatalf("%q: no such opcode", say)
		}
		op = byte(n)
	}
	h := make([]byte, 24)
	h[0], h[1] = 0x80, op
	var key, value string
	var ext []byte
	body, keyLen := -1, -1
	for _, w := range words[1:] {
		name, v, _ := strings.Cut(w, "=")
		n, _ := strconv.ParseUint(v, 0, 64)
		switch name {
		case "k":
			key = strings.ReplaceAll(v, `\s`, " ")
		case "v":
			value = strings.ReplaceAll(v, `\0`, "\x00")
		case "c":
			binary.BigEndian.PutUint64(h[16:], n)
		case "o":
			binary.BigEndian.PutUint32(h[12:], uint32(n))
		case "f", "e":
			ext = binary.BigEndian.AppendUint32(ext, uint32(n))
		case "d", "i":
			ext = binary.BigEndian.AppendUint64(ext, n)
		case "b":
			body = int(n)
		case "n":
			keyLen = int(n)
		case "x":
			x, err := hex.DecodeString(v)
			if err != nil {
				t.Fatal(err)
			}
			ext = append(ext, x...)
		default:
			t.Fatalf("%q: %q?", say, w)
		}
	}
	if keyLen < 0 {
		keyLen = len(key)
	}
	if body < 0 {
		body = len(key) + len(value) + len(ext)
	}
	binary.BigEndian.PutUint16(h[2:], uint16(keyLen))
	h[4] = byte(len(ext))
	binary.BigEndian.PutUint32(h[8:], uint32(body))
	return slices.Concat(h, ext, []byte(key), []byte(value))
}

// sentinel is the opaque of the noop behind every request.
const sentinel = 0xfffffffe

func (p *player) bin(t *testing.T, lines string) string {
	var out strings.Builder
	for say := range strings.SplitSeq(lines, "\n") {
		if p.binary == nil {
			p.binary = p.dial(t)
		}
		both := slices.Concat(request(t, p.fill(t, say)), request(t, fmt.Sprint("noop o=", sentinel)))
		p.binary.Write(both) //nolint:errcheck // reading tells
		answer := ""
		for {
			s, end, err := p.response()
			if end {
				break
			}
			if answer += s; err != nil {
				answer += "(closed)\n"
				p.binary.Close()
				p.binary = nil
				break
			}
		}
		if answer == "" {
			answer = "(nothing)\n"
		}
		out.WriteString(strings.ReplaceAll(answer, strings.Repeat("k", 100), "#"))
	}
	return out.String()
}

// response reads a response, and says whether it is the sentinel's.
func (p *player) response() (s string, end bool, err error) {
	h := make([]byte, 24)
	if _, err := io.ReadFull(p.binary.r, h); err != nil {
		return "", false, err
	}
	ext, key := int(h[4]), int(binary.BigEndian.Uint16(h[2:]))
	body := make([]byte, binary.BigEndian.Uint32(h[8:]))
	if _, err := io.ReadFull(p.binary.r, body); err != nil {
		return "", false, err
	}
	opaque := binary.BigEndian.Uint32(h[12:])
	if opaque == sentinel && h[1] == opcodeOf["noop"] {
		return "", true, nil
	}
	cas := strconv.FormatUint(binary.BigEndian.Uint64(h[16:]), 10)
	s = fmt.Sprintf("%#02x op=%#02x status=%#02x type=%d cas=%s opaque=%d", h[0], h[1], binary.BigEndian.Uint16(h[6:]),
		h[5], p.ordinal(cas), opaque)
	if ext > 0 {
		s += fmt.Sprintf(" ext=%x", body[:ext])
	}
	if key > 0 {
		s += fmt.Sprintf(" key=%q", body[ext:ext+key])
	}
	if v := body[ext+key:]; len(v) > 0 {
		s += fmt.Sprintf(" value=%q", v)
	}
	return s + "\n", false, nil
}

// Random binary requests get the same answers here and from memcached.
func TestBinarySameAsMemcached(t *testing.T) {
	if os.Getenv("KVD_COMPAT") != "1" {
		t.Skip("needs memcached 1.6 installed: set KVD_COMPAT=1")
	}
	addr, _ := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{})})
	ours, theirs := &player{addr: addr, ordinals: make(map[string]int)},
		&player{addr: startMemcached(t), ordinals: make(map[string]int)}
	defer ours.hangUp()
	defer theirs.hangUp()
	ask := func(p *player, say string) string {
		got := casAny.ReplaceAllString(p.bin(t, say), "cas=*") // touches change it here
		p.seen, p.ordinals = nil, make(map[string]int)
		return got
	}
	steps := 20_000
	if testing.Short() {
		steps = 2000
	}
	for seed := range uint64(2) {
		rng := rand.New(rand.NewPCG(seed, 9))
		ask(ours, "set k=a v=x f=0 e=0") // for $
		ask(theirs, "set k=a v=x f=0 e=0")
		for i := range steps {
			say := binarySentence(rng)
			if x, y := ask(ours, say), ask(theirs, say); x != y {
				t.Fatalf("seed %d step %d: %q\nhere      %s\nmemcached %s", seed, i, say, x, y)
			}
		}
	}
}

// binarySentence is a request, mostly a good one. Numbers have keys of their own, since memcached pads them, and stay
// below 2⁶³; see sentence.
func binarySentence(rng *rand.Rand) string {
	pick := func(s ...string) string { return s[rng.IntN(len(s))] }
	key := func() string { return " k=" + pick("a", "b", "c", "d\xff") }
	num := func() string { return " k=" + pick("n1", "n2") }
	exp := func() string { return " e=" + pick("0", "0", "0", "1000", "2592001", "0xffffffff") }
	cas := func() string { return pick("", "", "", " c=$", " c=$", " c=1") }
	value := func() string { return " v=" + strings.Repeat(pick("x", "y"), rng.IntN(100)) }
	q := func(s string) string { return s + pick("", "", "q") }
	say := ""
	switch rng.IntN(14) {
	case 0, 1, 2:
		say = pick("get", "getq", "getk", "getkq") + key()
	case 3, 4:
		say = q("set") + key() + value() + " f=" + pick("0", "7", "0xffffffff") + exp() + cas()
	case 5:
		say = q(pick("add", "replace")) + key() + value() + " f=1" + exp() + cas()
	case 6, 7:
		say = q(pick("append", "prepend")) + key() + value() + cas()
	case 8:
		say = q("delete") + pick(key(), num()) + cas()
	case 9, 10:
		say = q(pick("incr", "decr")) + pick(num()+" d="+pick("0", "1", "100")+" i="+pick("5", "1000")+exp()+cas(),
			key()+" d=1 i=1 e=0xffffffff")
	case 11:
		say = pick("touch", "gat", "gatq", "gatk", "gatkq") + key() + exp()
	case 12:
		say = pick("noop", "stat k=reset", "stat k=no", "saslmechs", "flush", "flush e=0", "flushq", "0x40"+value(),
			"quit", "quitq")
	default: // wrong: one part too many
		say = pick("get", "set", "incr", "noop", "version", "delete", "gat", "append") + key() +
			pick("", " x=00", " v=x", " x=0000000000")
	}
	return say + fmt.Sprint(" o=", rng.Uint32N(1000))
}
