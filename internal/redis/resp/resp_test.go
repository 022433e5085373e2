package resp

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/cockroachdb/datadriven"
)

func testLimits() Limits { return Limits{Args: 1 << 20, Bulk: 64 << 20, Query: 130 << 20} }

// parse reads all commands of src, and says how it ended.
func parse(src io.Reader, l Limits) (cmds [][]string, err error) {
	d := NewReader(src, l)
	for {
		if err := d.Fill(); err != nil {
			return cmds, err
		}
		for {
			args, err := d.Next()
			if errors.Is(err, ErrIncomplete) {
				break
			}
			if err != nil {
				return cmds, err
			}
			var c []string
			for _, a := range args {
				c = append(c, string(a))
			}
			cmds = append(cmds, c)
		}
	}
}

// TestVectors reads commands (Go string escapes) and writes replies. Input that arrives byte by byte must mean the
// same.
func TestVectors(t *testing.T) {
	datadriven.RunTest(t, "testdata/commands", func(t *testing.T, d *datadriven.TestData) string {
		l := testLimits()
		if d.HasArg("unauthenticated") {
			l = Limits{Args: 10, Bulk: 16 << 10, Query: 256 << 10, Unauthenticated: true}
		}
		var in strings.Builder
		for _, line := range strings.Split(d.Input, "\n") {
			s, err := strconv.Unquote(`"` + strings.ReplaceAll(line, `"`, `\"`) + `"`)
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			in.WriteString(s)
		}
		text := in.String()
		if d.HasArg("repeat") {
			var n int
			d.ScanArgs(t, "repeat", &n)
			text = strings.Repeat(text, n)
		}
		show := func(r io.Reader) string {
			var out strings.Builder
			cmds, err := parse(r, l)
			for _, c := range cmds {
				fmt.Fprintf(&out, "%q\n", c)
			}
			if !errors.Is(err, io.EOF) {
				fmt.Fprintln(&out, err)
			}
			return out.String()
		}
		whole := show(strings.NewReader(text))
		if parts := show(iotest.OneByteReader(strings.NewReader(text))); parts != whole {
			t.Errorf("%s: byte by byte:\n%sat once:\n%s", d.Pos, parts, whole)
		}
		return whole
	})
}

// TestLongLine wants a line that is whole when it comes to be taken although it is a little
// longer than MaxLine, as in Redis, and one that has no end yet to be refused.
func TestLongLine(t *testing.T) {
	text := "PING " + strings.Repeat("a", MaxLine) + "\r\n"
	for _, c := range []struct {
		text string
		read int // bytes at a time
		want string
	}{
		{text, MaxLine / 2, "[PING]"}, {text[:len(text)-2], MaxLine / 2, "too big inline request"},
		{"PING " + strings.Repeat("a", 2*MaxLine) + "\r\n", 1 << 20, "too big inline request"},
	} {
		cmds, err := parse(&pieces{strings.NewReader(c.text), c.read}, testLimits())
		got := fmt.Sprint(err)
		if len(cmds) == 1 {
			got = fmt.Sprint(cmds[0][:1])
		}
		if !strings.HasSuffix(got, c.want) {
			t.Errorf("%d bytes, %d at a time: %s, want %s", len(c.text), c.read, got, c.want)
		}
	}
}

// pieces gives n bytes at a time.
type pieces struct {
	io.Reader
	n int
}

func (p *pieces) Read(b []byte) (int, error) { return p.Reader.Read(b[:min(len(b), p.n)]) }

func TestWriter(t *testing.T) {
	for _, proto := range []int{2, 3} {
		t.Run(strconv.Itoa(proto), func(t *testing.T) {
			datadriven.RunTest(t, fmt.Sprintf("testdata/replies%d", proto),
				func(t *testing.T, d *datadriven.TestData) string {
					w := Writer{Proto: proto}
					for _, line := range strings.Split(d.Input, "\n") {
						name, arg, _ := strings.Cut(line, " ")
						n, _ := strconv.Atoi(arg)
						f, _ := strconv.ParseFloat(arg, 64)
						s, err := strconv.Unquote(`"` + arg + `"`)
						if err != nil {
							t.Fatal(err)
						}
						switch name {
						case "simple":
							w.Simple(s)
						case "error":
							w.Error(s)
						case "int":
							i, _ := strconv.ParseInt(arg, 10, 64)
							w.Int(i)
						case "bulk":
							w.Bulk([]byte(s))
						case "null":
							w.Null()
						case "nullarray":
							w.NullArray()
						case "array":
							w.Array(n)
						case "map":
							w.Map(n)
						case "set":
							w.Set(n)
						case "push":
							w.Push(n)
						case "double":
							w.Double(f)
						case "bool":
							w.Bool(arg == "true")
						case "big":
							w.BigNumber(s)
						case "verbatim":
							w.Verbatim("txt", s)
						default:
							t.Fatalf("%s?", name)
						}
					}
					return strings.ReplaceAll(strings.Trim(strconv.Quote(string(w.Bytes())), `"`), `\r\n`, "\\r\\n\n")
				})
		})
	}
}

// encode is a client's side.
func encode(cmd [][]byte) []byte {
	b := fmt.Appendf(nil, "*%d\r\n", len(cmd))
	for _, a := range cmd {
		b = fmt.Appendf(b, "$%d\r\n", len(a))
		b = append(append(b, a...), '\r', '\n')
	}
	return b
}

// TestRoundTrip sends seeded commands, cut at seeded places.
func TestRoundTrip(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var want [][]string
	var wire []byte
	for range 300 {
		cmd := make([][]byte, 1+rng.IntN(6))
		var c []string
		for i := range cmd {
			size := rng.IntN(40)
			if rng.IntN(20) == 0 {
				size = rng.IntN(200_000)
			}
			cmd[i] = make([]byte, size)
			for j := range cmd[i] {
				cmd[i][j] = byte(rng.Uint32())
			}
			c = append(c, string(cmd[i]))
		}
		want = append(want, c)
		wire = append(wire, encode(cmd)...)
	}
	got, err := parse(&chopped{b: wire, rng: rng}, testLimits())
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("%d commands came back as %d others", len(want), len(got))
	}
}

type chopped struct {
	b   []byte
	rng *rand.Rand
}

func (c *chopped) Read(p []byte) (int, error) {
	if len(c.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.b[:1+c.rng.IntN(min(len(c.b), 50_000))])
	c.b = c.b[n:]
	return n, nil
}

// TestAnnouncedLength: lengths alone cost no memory.
func TestAnnouncedLength(t *testing.T) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var all []*Reader
	for range 1000 {
		d := NewReader(strings.NewReader("*1000000\r\n$67108864\r\nabc"), testLimits())
		if err := d.Fill(); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Next(); !errors.Is(err, ErrIncomplete) {
			t.Fatal(err)
		}
		all = append(all, d)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 1000*(minBuffer+4<<10) {
		t.Errorf("1000 readers of 64 MB that have not come keep %d bytes", grown)
	}
	runtime.KeepAlive(all)
}

func TestReserve(t *testing.T) {
	big := encode([][]byte{[]byte("SET"), []byte("k"), make([]byte, 1<<20)})
	held, most := 0, 0
	src := bytes.NewReader(append(bytes.Clone(big), "PING\r\n"...))
	d := NewReader(src, testLimits())
	d.Reserve = func(n int) bool { held += n; most = max(most, held); return held <= 2<<20 }
	for n := 0; n < 2; {
		if err := d.Fill(); err != nil {
			t.Fatal(err)
		}
		for {
			if _, err := d.Next(); err != nil {
				break
			}
			n++
		}
	}
	if most < 1<<20-maxBuffer {
		t.Errorf("a command of 1 MiB reserved %d bytes", most)
	}
	d.Fill()
	if held != 0 {
		t.Errorf("an idle reader holds %d bytes", held)
	}

	d = NewReader(bytes.NewReader(big), testLimits())
	d.Reserve = func(int) bool { return false }
	for {
		err := d.Fill()
		if errors.Is(err, ErrNoMemory) {
			break
		}
		if err != nil {
			t.Fatal("refused memory, and got", err)
		}
		d.Next()
	}
}

func TestQueryLimit(t *testing.T) {
	l := testLimits()
	l.Query = 100_000
	one := encode([][]byte{make([]byte, 30_000)})[4:] // an argument
	_, err := parse(io.MultiReader(strings.NewReader("*5\r\n"), bytes.NewReader(bytes.Repeat(one, 5))), l)
	var p *ProtocolError
	if !errors.As(err, &p) {
		t.Errorf("150 kB where 100 kB are allowed: %v", err)
	}
}

func TestParseInt(t *testing.T) {
	for _, s := range []string{"0", "1", "-1", "9223372036854775807", "-9223372036854775808"} {
		n, ok := ParseInt([]byte(s))
		if !ok || strconv.FormatInt(n, 10) != s {
			t.Errorf("%s is %d, %v", s, n, ok)
		}
	}
	for _, s := range []string{"", "-", "-0", "01", "+1", " 1", "1 ", "9223372036854775808", "-9223372036854775809",
		"18446744073709551617", "1e3", "0x1"} {
		if n, ok := ParseInt([]byte(s)); ok {
			t.Errorf("%q is %d", s, n)
		}
	}
}

// FuzzReader: whatever the bytes and their cuts, the reader neither panics nor
// returns other commands than at once, nor keeps more than it was sent.
func FuzzReader(f *testing.F) {
	for _, s := range []string{"*1\r\n$4\r\nPING\r\n", "PING\r\n", "set a \"b\\x00\" 'c'\r\n", "*2\r\n$-1\r\n",
		"*-1\r\n\r\n*0\r\nx\n", "*3\r\n$3\r\nSET\r\n$1\r\na\r\n$100\r\n"} {
		f.Add([]byte(s), uint16(3))
	}
	f.Fuzz(func(t *testing.T, b []byte, cut uint16) {
		l := Limits{Args: 100, Bulk: 1 << 20, Query: 2 << 20}
		whole, err1 := parse(bytes.NewReader(bytes.Clone(b)), l)
		at := min(int(cut), len(b))
		d := NewReader(io.MultiReader(bytes.NewReader(bytes.Clone(b[:at])), bytes.NewReader(bytes.Clone(b[at:]))), l)
		n := 0
		for {
			if err := d.Fill(); err != nil {
				if !errors.Is(err, io.EOF) || !errors.Is(err1, io.EOF) {
					t.Fatalf("%v, at once %v", err, err1)
				}
				break
			}
			if cap(d.buf) > 2*maxBuffer+2*len(b) {
				t.Fatalf("%d bytes need a buffer of %d", len(b), cap(d.buf))
			}
			args, err := d.Next()
			for ; err == nil; args, err = d.Next() {
				if n >= len(whole) || len(args) != len(whole[n]) {
					t.Fatalf("command %d: %q, at once %q", n, args, whole)
				}
				for i := range args {
					if string(args[i]) != whole[n][i] {
						t.Fatalf("command %d: %q, at once %q", n, args, whole[n])
					}
				}
				n++
			}
			if !errors.Is(err, ErrIncomplete) {
				if err1 == nil || err.Error() != err1.Error() {
					t.Fatalf("%v, at once %v", err, err1)
				}
				return
			}
		}
		if n != len(whole) {
			t.Fatalf("%d commands, at once %d", n, len(whole))
		}
	})
}

// FuzzWriter: a client understands every reply, and it is one.
func FuzzWriter(f *testing.F) {
	f.Add([]byte("abc\r\ndef"), int64(-7), 3)
	f.Fuzz(func(t *testing.T, b []byte, n int64, proto int) {
		w := Writer{Proto: 2 + proto&1}
		w.Array(10)
		w.Simple(string(b))
		w.Error(string(b))
		w.Int(n)
		w.Bulk(b)
		w.Null()
		w.NullArray()
		w.Double(math.Float64frombits(uint64(n)))
		w.Bool(n > 0)
		w.Map(1)
		w.Verbatim("txt", string(b))
		w.BulkString(string(b))
		w.Set(1)
		w.Int(n)
		r := bufio.NewReader(bytes.NewReader(w.Bytes()))
		if err := skipReply(r); err != nil {
			t.Fatalf("%q: %v", w.Bytes(), err)
		}
		if r.Buffered() > 0 {
			t.Fatalf("%q: %d bytes too many", w.Bytes(), r.Buffered())
		}
	})
}

// skipReply reads one reply as a client does.
func skipReply(r *bufio.Reader) error {
	line, err := r.ReadString('\n')
	if err != nil {
		return err
	}
	if len(line) < 3 || line[len(line)-2] != '\r' {
		return fmt.Errorf("line %q", line)
	}
	n, errN := strconv.Atoi(line[1 : len(line)-2])
	switch line[0] {
	case '+', '-', ':', ',', '#', '_', '(':
		return nil
	case '$', '=':
		if errN != nil || n < -1 {
			return fmt.Errorf("length %q", line)
		}
		if n < 0 {
			return nil
		}
		b := make([]byte, n+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return err
		}
		if string(b[n:]) != "\r\n" {
			return fmt.Errorf("bulk ends with %q", b[n:])
		}
		return nil
	case '*', '~', '>', '%':
		if errN != nil || n < -1 {
			return fmt.Errorf("length %q", line)
		}
		if line[0] == '%' {
			n *= 2
		}
		for range n {
			if err := skipReply(r); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("type %q", line)
}

// The short way through the line of a length agrees with the long one, for every beginning of a line.
func TestShort(t *testing.T) {
	const letters = "$*019-\r\n\x00"
	line := []byte{}
	taken := 0
	var try func()
	try = func() {
		for _, want := range "$*" {
			d := NewReader(nil, testLimits())
			d.buf, d.w = line, len(line)
			number, n := d.short(byte(want))
			if n == 0 {
				continue
			}
			taken++
			text, length, err := d.line("")
			if err != nil || text[0] != byte(want) {
				t.Fatalf("%q: %q, %v", line, text, err)
			}
			if v, ok := ParseInt(text[1:]); !ok || v != int64(number) || length != n {
				t.Fatalf("%q: %d of %d bytes, want %d, %v, of %d", line, number, n, v, ok, length)
			}
		}
		if len(line) == 7 {
			return
		}
		for i := range letters {
			line = append(line, letters[i])
			try()
			line = line[:len(line)-1]
		}
	}
	try()
	for _, whole := range []string{"$0\r\n", "*3\r\n", "$10\r\n", "$9999\r\n"} {
		d := NewReader(nil, testLimits())
		d.buf, d.w = []byte(whole), len(whole)
		if _, n := d.short(whole[0]); n != len(whole) {
			t.Errorf("%q goes the long way", whole)
		}
	}
	if taken == 0 {
		t.Error("none went the short way")
	}
}

func TestNextAllocates(t *testing.T) {
	wire := bytes.Repeat(encode([][]byte{[]byte("SET"), []byte("key"), []byte("value")}), 16)
	src := bytes.NewReader(wire)
	d := NewReader(src, testLimits())
	n := testing.AllocsPerRun(1000, func() {
		src.Reset(wire)
		if err := d.Fill(); err != nil {
			t.Fatal(err)
		}
		for {
			if _, err := d.Next(); err != nil {
				break
			}
		}
	})
	if n > 0 {
		t.Errorf("%v allocations for 16 commands", n)
	}
}

func BenchmarkNext(b *testing.B) {
	wire := bytes.Repeat(encode([][]byte{[]byte("SET"), []byte("key:000000012345"), make([]byte, 64)}), 16)
	src := bytes.NewReader(wire)
	d := NewReader(src, testLimits())
	for i := 0; i < b.N; i += 16 {
		src.Reset(wire)
		d.Fill()
		for {
			if _, err := d.Next(); err != nil {
				break
			}
		}
	}
}
