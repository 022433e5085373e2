package bulk

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/inside"
)

// pipeStore checks what a pipe asks of a store.
type pipeStore struct {
	client.API
	t   *testing.T
	ops int64
}

func (p *pipeStore) Stats() client.Stats                      { return client.Stats{} }
func (p *pipeStore) Locate([]byte) (inside.Location, error)   { return inside.Location{}, nil }
func (p *pipeStore) Close() error                             { return nil }
func (p *pipeStore) PutGiven(context.Context, []inside.Given) { p.t.Error("a pipe gives no versions") }
func (p *pipeStore) ReadRaw(context.Context, uint32, int, uint64, int) ([]byte, error) {
	return nil, client.ErrUnavailable
}

func (p *pipeStore) Work(context.Context, index.Kind, []*repair.Work) []error { return nil }

func (p *pipeStore) Do(ctx context.Context, ops []client.Op) {
	if len(ops) == 0 || len(ops) > PipeKeys {
		p.t.Fatalf("a batch of %d operations", len(ops))
	}
	seen := map[string]bool{}
	for i := range ops {
		o := &ops[i]
		if len(o.Key) == 0 || len(o.Key) > client.MaxKeyLen || len(o.Value) > client.MaxValueLen ||
			seen[string(o.Key)] {
			p.t.Fatalf("operation on a key of %d bytes, a value of %d, seen %v", len(o.Key), len(o.Value),
				seen[string(o.Key)])
		}
		seen[string(o.Key)] = true
		// A store keeps expiries as milliseconds since 1970.
		if !o.Expires.IsZero() && o.Expires.UnixMilli() <= 0 {
			p.t.Fatalf("expires %v", o.Expires)
		}
	}
	p.ops += int64(len(ops))
	p.API.Do(ctx, ops)
}

// FuzzPipe feeds the parsers of pipe anything. They neither panic nor go on for ever, ask the
// store for nothing that it cannot do, and count every command and line once.
func FuzzPipe(f *testing.F) {
	for _, in := range []string{
		"", "\n", "*", "*\r\n", "*-1\r\n", "*0\r\n", "*1\r\n$-1\r\n", "*2\r\n$3\r\nDEL\r\n$1\r\na\r\n", "*1048577\r\n",
		"*1\r\n$67108865\r\n",
		"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n*3\r\n$3\r\nset\r\n$1\r\na\r\n$1\r\nc\r\n",
		"*5\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n$2\r\nPX\r\n$4\r\n1000\r\n",
		"*4\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n$2\r\nEX\r\n",
		"*7\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n$4\r\nEXAT\r\n$10\r\n4102444800\r\n$2\r\nNX\r\n$2\r\nXX\r\n",
		"*4\r\n$6\r\nPSETEX\r\n$1\r\na\r\n$20\r\n-9223372036854775808\r\n$1\r\nv\r\n",
		"*3\r\n$6\r\nEXPIRE\r\n$1\r\na\r\n$19\r\n9223372036854775807\r\n",
		"*3\r\n$6\r\nEXPIRE\r\n$1\r\na\r\n$2\r\n-1\r\n", "SET a b\r\nDEL a\r\n", "*1\r\n$0\r\n\r\n",
		"a\tb\n", "a\tb\t30s\n\n \nc\td\t\n", "a\n", "a\tb\tc\td\n", "a\tb\t9999999h\n", "\tv\n", "a\tb\t-1s",
		`{"key":"a","value":"b"}` + "\n", `{"key_hex":"00ff","value_base64":"AA==","ttl_seconds":1.5,"flags":7}`,
		`{"key":"a","value":"b","expires":"2100-01-01T00:00:00Z"}`,
		`{"key":"a","value":"b","expires":"0001-01-01T00:00:00Z"}`,
		`{"key":"a","value":"b","expires":"9999-12-31T23:59:59Z"}`, `{"key":"a","value":"b","ttl_seconds":1e300}`,
		`{"key":"a","key_hex":"61","value":"b"}`, `{"key":"a","value":"b"}{}`, `[{}]`, `{"key":1}`, `{`, `null`,
		"\x00\xff",
	} {
		for format := range byte(4) {
			f.Add(format, []byte(in))
		}
	}
	eternal := []byte(`{"key":"a","value":"b","expires":"0001-01-01T00:00:00Z"}`) // a past time is not: never
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	f.Fuzz(func(t *testing.T, format byte, in []byte) {
		a := &commands{ctl.New(strings.NewReader(""), io.Discard, io.Discard)}
		a.Output = "json"
		a.Now = func() time.Time { return now }
		var out bytes.Buffer
		a.Stdout = &out
		s := &pipeStore{API: clienttest.New(clienttest.Options{Now: a.Now}), t: t}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		err := a.pipe(ctx, s, bytes.NewReader(in), int64(len(in)), []string{"", "resp", "tsv", "jsonl"}[format%4])
		if ctx.Err() != nil {
			t.Fatalf("no end: %v", err)
		}
		if bytes.Equal(in, eternal) && s.ops > 0 {
			t.Fatal("a key that expired in the year 1 is put for ever")
		}
		if s.ops > int64(len(in)) {
			t.Fatalf("%d operations of %d bytes", s.ops, len(in))
		}
		if err != nil && ctl.ExitCode(err) == ctl.ExitUnavailable {
			t.Fatalf("the store is not to blame: %v", err)
		}
	})
}
