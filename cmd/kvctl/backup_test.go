package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/bulk"
	"github.com/kvd-project/kvd/internal/redis/collection"
)

// backup dumps the first end to a file, as a person does.
func (e *ends) backup(flags ...string) (file string) {
	e.t.Helper()
	file = filepath.Join(e.t.TempDir(), "backup.jsonl")
	if err := os.WriteFile(file, []byte(e.must("", append(flags, "scan", "--long", "-o", "json")...)), 0o600); err !=
		nil {
		e.t.Fatal(err)
	}
	return file
}

// collections are values of every type, as gateways store them.
func collections(t *testing.T) map[client.Type][]byte {
	t.Helper()
	h, _, err := collection.Hash(nil).SetAll([][]byte{[]byte("f"), []byte("v"), {0xff, 0}, []byte("\xfe")})
	if err != nil {
		t.Fatal(err)
	}
	set, _, err := collection.Set(nil).AddAll([][]byte{[]byte("7"), []byte("9")})
	if err != nil {
		t.Fatal(err)
	}
	list, err := collection.ListSplice(nil, collection.ListStart, collection.ListStart, 0, []byte("a"), []byte("b\xff"))
	if err != nil {
		t.Fatal(err)
	}
	stream, err := collection.ParseStream(nil)
	if err != nil {
		t.Fatal(err)
	}
	stream.Add(collection.StreamID{MS: 5, Seq: 1}, [][]byte{[]byte("field"), []byte("value")})
	return map[client.Type][]byte{client.Hash: h, client.Set: set, client.List: list, client.Stream: stream.Bytes(true),
		client.SortedSet: collection.ZSet{}.AppendChanged(nil, nil,
			[]collection.ZEntry{{Member: []byte("m"), Score: 1.5}})}
}

// A file of scan --long brings back everything, and no less than everything: in the store it is from, and in another
// one.
func TestBackup(t *testing.T) {
	e := newEnds(t)
	far := time.Now().Add(time.Hour)
	ops := []client.Op{
		{Key: []byte("empty")},
		{Key: []byte{0}, Value: []byte("nul")},
		{Key: []byte("a\n\xff\x1b[31m\"quoted\"<&>"), Value: []byte{0, 1, 2}},
		{Key: []byte("text \ufffd \u2028 \U0001f511"), Value: []byte("\ufffd\\ufffd")},
		{Key: randomBytes(client.MaxKeyLen, 1), Value: []byte("the longest key")},
		{Key: []byte("flags"), Value: []byte("x"), Flags: 1<<32 - 1, Note: 1<<64 - 1},
		{Key: []byte("note"), Value: []byte("x"), Note: 1},
		{Key: []byte("expiring"), Value: []byte("x"), Expires: far},
		{Key: []byte("far"), Value: []byte("x"), Expires: time.UnixMilli(253402300800000)}, // the year 10000
		{Key: []byte("farthest"), Value: []byte("x"), Expires: time.UnixMilli(1<<63 - 1)},
		{Key: []byte("long"), Value: randomBytes(9<<20+5, 2), Flags: 9, Note: 8},
		{Key: []byte("longest"), Value: bytes.Repeat([]byte{1}, client.DefaultMaxValueLen)},
	}
	for i := range 300 { // more than scan lists by itself
		ops = append(ops, client.Op{Key: fmt.Appendf(nil, "key:%04d", i), Value: randomBytes(i, uint64(i))})
	}
	for typ, v := range collections(t) {
		ops = append(ops, client.Op{Key: []byte(typ.String()), Value: v, Type: typ, Note: 3},
			client.Op{Key: []byte("expiring " + typ.String()), Value: v, Type: typ, Expires: far})
	}
	put(t, e.src, ops...)
	put(t, e.src, client.Op{Key: []byte("soon"), Value: []byte("x"), Expires: time.Now().Add(time.Hour)})
	put(t, e.dst, client.Op{Key: []byte("soon"), Value: []byte("of another time")},
		client.Op{Key: []byte("hash"), Value: []byte("no hash")})
	for _, flags := range [][]string{nil, {"--hex"}} {
		file := e.backup(flags...)
		e.there.now = func() time.Time { return time.Now().Add(30 * time.Minute) }
		got := decode[bulk.PipeReport](t, e.there.must("", "-o", "json", "pipe", file))
		if got.Failed != 0 || got.OK != int64(len(ops)+1) {
			t.Errorf("%v: %+v, want %d", flags, got, len(ops)+1)
		}
		e.alike()
	}

	// And back, later, from nothing.
	file := e.backup()
	e.must("", "flush", "--yes")
	put(t, e.src, client.Op{Key: []byte("soon"), Value: []byte("x")})
	e.now = func() time.Time { return time.Now().Add(2 * time.Hour) }
	e.must("", "pipe", file)
	gone := 0
	for _, it := range contents(t, e.dst) {
		if it.Expires.Equal(far.Truncate(time.Millisecond)) {
			gone++
		}
	}
	if was, is := len(contents(t, e.dst)), len(contents(t, e.src)); is != was-gone-1 {
		t.Errorf("%d keys of %d are back, where %d have expired meanwhile", is, was, gone+1)
	}
}

// A damaged or hostile file does what is whole of it, and says which lines are not, and why.
func TestBackupDamaged(t *testing.T) {
	e := newEnds(t)
	var good []string
	for typ, v := range collections(t) {
		put(t, e.src, client.Op{Key: []byte(typ.String()), Value: v, Type: typ})
	}
	b, err := os.ReadFile(e.backup())
	if err != nil {
		t.Fatal(err)
	}
	good = strings.Split(strings.TrimSpace(string(b)), "\n")
	for _, c := range []struct{ line, want string }{
		{`{"key":"k","value":"v","type":"ghost"}`, `type "ghost": want string, hash, set, zset, list or stream`},
		{`{"key":"k","value":"v","type":""}`, `type "": want`},
		{`{"key":"k","value":"v","type":7}`, "type is a JSON number"},
		{`{"key":"k","value":"","type":"hash"}`, "value of 0 bytes is no hash"},
		{`{"key":"k","value":"","type":"list"}`, "value of 0 bytes is no list"},
		{`{"key":"k","value":"","type":"stream"}`, "value of 0 bytes is no stream"},
		{`{"key":"k","value":"some text","type":"hash"}`, "value of 9 bytes is no hash"},
		{`{"key":"k","value":"some text","type":"set"}`, "value of 9 bytes is no set"},
		{`{"key":"k","value":"some text","type":"zset"}`, "value of 9 bytes is no zset"},
		{`{"key":"k","value":"some text","type":"list"}`, "value of 9 bytes is no list"},
		{`{"key":"k","value":"some text","type":"stream"}`, "value of 9 bytes is no stream"},
		{`{"key":"k","value":"v","note":"-1"}`, `note "-1": want a decimal number`},
		{`{"key":"k","value":"v","note":1}`, "note is a JSON number"},
		{`{"key":"k","value":"v","flags":4294967296}`, "flags is a JSON number"},
		{`{"key":"k","value":"v","expires":"99999-13-01T00:00:00Z"}`, "month out of range"},
		{`{"key":"k","value":"v","expires":"292278995-01-01T00:00:00Z"}`, "out of range"},
		{`{"key":"k","value":"v","expires":"9999999999999999999-01-01T00:00:00Z"}`, "cannot parse"},
		{`{"key":"k","value":"v","expires":"1969-01-01T00:00:00Z"}`, "want a time after 1970"},
		{`{"key":"k","value":"v","ghost":1}`, `unknown field "ghost"`},
		{"{\"key\":\"k\",\"value\":\"\xff\"}", "no UTF-8"},
		{`{"key":"k","value":"\ud800"}`, "half of a surrogate pair"},
		{`{"key":"\udc00","value":"v"}`, "half of a surrogate pair"},
		{`{"key":"k","value_base64":"A"}`, "illegal base64"},
		{`{"key":"k","value":"v"`, "unexpected EOF"},
		{good[0][:len(good[0])/2], "unexpected EOF"},
		{"\x00\x00\x00\x00", "no UTF-8|invalid character"},
	} {
		e.there.must("", "flush", "--yes")
		file := strings.Join(append(append([]string{}, good[:2]...), append([]string{c.line}, good[2:]...)...), "\n")
		r := e.there.run(file, "-o", "json", "pipe", "--format", "jsonl")
		got := decode[bulk.PipeReport](t, r.stdout)
		named := false
		for _, want := range strings.Split(c.want, "|") {
			named = named || strings.Contains(r.stderr, want)
		}
		if r.code != ctl.ExitUsage || !strings.Contains(r.stderr, "kvctl pipe: line 3: ") || !named {
			t.Errorf("%.60q: exit %d, %s; want %q", c.line, r.code, r.stderr, c.want)
		}
		if got.OK != int64(len(good)) || got.Failed != 1 {
			t.Errorf("%.60q: %+v, want %d", c.line, got, len(good))
		}
		e.alike()
	}
	// Each byte of a value that is damaged is noticed, or leaves something that can be served.
	for typ, v := range collections(t) {
		for i := range v {
			b := bytes.Clone(v)
			b[i] ^= 0x81
			_ = bulk.CheckItem(typ, b)
			_ = bulk.CheckItem(typ, b[:i])
		}
		if err := bulk.CheckItem(typ, v); err != nil {
			t.Error(err)
		}
	}
}

// A scan that stops by itself says so: what it printed is not all.
func TestScanSaysThatThereIsMore(t *testing.T) {
	e := newEnds(t)
	var ops []client.Op
	for i := range 101 {
		ops = append(ops, client.Op{Key: fmt.Appendf(nil, "k0-%03d", i), Value: []byte("v")})
	}
	put(t, e.src, ops[:100]...)
	const more = "kvctl scan: there are more than 100 keys; --limit 0 lists all\n"
	for _, args := range [][]string{{"scan"}, {"scan", "-o", "json"}, {"scan", "--long"}} {
		for n := 100; n <= 101; n++ {
			put(t, e.src, ops[:n]...)
			want := map[int]string{101: more}[n]
			r := e.run("", args...)
			if r.code != ctl.ExitOK || r.stderr != want || strings.Count(r.stdout, "k0") != 100 {
				t.Errorf("%v of %d keys: exit %d, %q, %d keys", args, n, r.code, r.stderr,
					strings.Count(r.stdout, "k0"))
			}
			for limit, keys := range map[string]int{"0": n, "7": 7} {
				if r := e.run("", append(args, "--limit", limit)...); r.stderr != "" ||
					strings.Count(r.stdout, "k0") != keys {
					t.Errorf("%v --limit %s: %q, %s", args, limit, r.stderr, r.stdout)
				}
			}
		}
		e.must("", "del", "k0-100")
	}
}
