package bulk

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/patient"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/units"
)

const pipeHelp = `Change many keys, as FILE or stdin says, a few hundred at a time. The formats:

  resp   what redis-cli --pipe takes: commands of the Redis protocol. SET (with EX,
         PX, EXAT, PXAT, NX, XX), SETEX, PSETEX, DEL, EXPIRE and PEXPIRE; any other
         is counted as failed.
  tsv    a line a key: KEY, a tab, VALUE, and perhaps another tab and a time to live
         such as 30s. There is no quoting: a value has no tab and no newline.
  jsonl  an object a line, as get, mget and scan --long print them with -o json: key
         or key_hex or key_base64, value or value_base64, and optionally expires,
         ttl_seconds, flags, note and type, for collections of gateways. A key that has
         expired is deleted. kvctl scan --long -o json > FILE keeps a namespace, and
         kvctl pipe FILE brings it back, here or in another store.

A command or line that is wrong is counted as failed, the others go on; the first few
are named on stderr. Deleting a missing key, or a SET whose NX or XX does not hold, is
no failure. The exit status is that of the first failure.`

func (a *commands) pipeCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:   "pipe [FILE|-]",
		Short: "Change many keys: Redis protocol, tab-separated lines or JSON lines",
		Long:  pipeHelp,
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch format {
			case "", "resp", "tsv", "jsonl":
			default:
				return ctl.Usagef("--format %q: want resp, tsv or jsonl", format)
			}
			var in io.Reader
			size := int64(-1)
			if len(args) == 0 || args[0] == "-" {
				in = a.Input(cmd.Context(), "commands")
			} else {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer f.Close()
				if st, err := f.Stat(); err == nil && st.Mode().IsRegular() {
					size = st.Size()
				}
				in = f
			}
			return a.With(cmd.Context(), ctl.SessionOptions{}, func(s ctl.Store) error {
				return a.pipe(cmd.Context(), s, in, size, format)
			})
		},
	}
	c.Flags().StringVar(&format, "format", "", "resp, tsv or jsonl (default: by the first byte, * { or any other)")
	_ = c.RegisterFlagCompletionFunc("format", cobra.FixedCompletions([]string{"resp", "tsv", "jsonl"},
		cobra.ShellCompDirectiveNoFileComp))
	return c
}

// Bounds of pipe. A batch holds at most PipeKeys operations, and pipeBytes and one
// value of the largest size.
const (
	PipeKeys  = 512
	pipeBytes = 4 << 20
	// maxPipeLine bounds a line: a value of the largest size in base64, or half of it
	// if all of it is escaped.
	maxPipeLine = 3*client.MaxValueLen + 1<<20
	// maxPipeArgs bounds the arguments of a command of the Redis protocol.
	maxPipeArgs = 1 << 20
	// FailuresNamed is how many failures are told one by one.
	FailuresNamed = 10
)

// loader makes operations of what it reads, and counts them.
type loader struct {
	a     *commands
	ctx   context.Context
	s     ctl.Store
	in    *counter
	bar   *ctl.Bar
	start time.Time
	now   func() time.Time

	// The batch. It names no key twice, since its operations have no order.
	ops   []client.Op
	where []string // each stands in the input
	names map[string]bool
	size  int

	rep   PipeReport
	first error // failure
}

// PipeReport is what pipe prints at the end: operations, by what became of them, and bytes that were read.
type PipeReport struct {
	Format   string  `json:"format"`
	OK       int64   `json:"ok"`
	NoEffect int64   `json:"no_effect"` // missing keys deleted, also as what has expired; conditions that did not hold
	Failed   int64   `json:"failed"`
	Bytes    int64   `json:"bytes"` // of the input
	Seconds  float64 `json:"seconds"`
}

// counter counts the bytes that pass.
type counter struct {
	r   io.Reader
	n   int64
	bar *ctl.Bar
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	c.bar.Step(n)
	return n, err
}

func (a *commands) pipe(ctx context.Context, s ctl.Store, in io.Reader, size int64, format string) error {
	l := &loader{a: a, ctx: ctx, s: s, start: time.Now(), now: a.Now, names: make(map[string]bool)}
	l.bar = a.Bar("pipe", "B", func() int64 { return size })
	buffered := bufio.NewReaderSize(in, 64<<10)
	l.in = &counter{r: buffered, bar: l.bar}
	head, err := buffered.Peek(1)
	if err != nil && err != io.EOF {
		return fmt.Errorf("read: %w", err)
	}
	if format == "" {
		switch string(head) {
		case "*":
			format = "resp"
		case "{":
			format = "jsonl"
		default:
			format = "tsv"
		}
	}
	l.rep.Format = format
	if format == "resp" {
		err = l.resp()
	} else {
		err = l.lines(format)
	}
	// The operations before a fault of the input are performed.
	if e := l.flush(); err == nil {
		err = e
	}
	l.bar.End()
	l.rep.Bytes, l.rep.Seconds = l.in.n, time.Since(l.start).Seconds()
	if e := l.print(); err == nil {
		err = e
	}
	switch {
	case err != nil:
		// Earlier failures, and how much is done, have been told.
		return ctl.Partly(l.rep.OK+l.rep.NoEffect+l.rep.Failed > 0, err, "after %d operations", l.rep.OK+l.rep.NoEffect)
	case l.first != nil:
		return ctl.Fail(ctl.ExitCode(l.first))
	}
	return nil
}

func (l *loader) print() error {
	r := &l.rep
	if l.a.JSON() {
		return l.a.PrintJSON(r)
	}
	l.a.PrintTable(ctl.Row{"Format", "OK", "No effect", "Failed", "Bytes", "Seconds", "Keys/s"},
		[]ctl.Row{{r.Format, r.OK, r.NoEffect, r.Failed, r.Bytes,
			fmt.Sprintf("%.3f", r.Seconds), fmt.Sprintf("%.0f", float64(r.OK+r.NoEffect)/r.Seconds)}})
	return nil
}

// fail counts what is wrong at a place of the input.
func (l *loader) fail(where string, err error) {
	if l.first == nil {
		l.first = err
	}
	if l.rep.Failed++; l.rep.Failed <= FailuresNamed {
		l.a.Say("kvctl pipe: %s: %s", where, ctl.OneLine(err.Error()))
	}
	if l.rep.Failed == FailuresNamed {
		l.a.Say("kvctl pipe: further failures are only counted")
	}
}

// add puts an operation into the batch; key and value are the batch's then. A put of what has expired leaves no key,
// and asks for no memory.
func (l *loader) add(where string, op client.Op) error {
	if len(op.Key) == 0 || len(op.Key) > client.MaxKeyLen {
		l.fail(where, ctl.Usagef("key of %d bytes, want 1 to %d", len(op.Key), client.MaxKeyLen))
		return nil
	}
	if len(op.Value) > client.MaxValueLen {
		l.fail(where, ctl.Usagef("value of %s, at most %s", units.Bytes(len(op.Value)),
			units.Bytes(client.MaxValueLen)))
		return nil
	}
	if op.Kind == client.OpPut && op.Cond == client.Always && !op.Expires.IsZero() && !op.Expires.After(l.now()) {
		op = client.Op{Kind: client.OpDelete, Key: op.Key}
	}
	n := len(op.Key) + len(op.Value)
	if l.names[string(op.Key)] || len(l.ops) == PipeKeys || len(l.ops) > 0 && l.size+n > pipeBytes {
		if err := l.flush(); err != nil {
			return err
		}
	}
	l.ops, l.where, l.size = append(l.ops, op), append(l.where, where), l.size+n
	l.names[string(op.Key)] = true
	return nil
}

// flush performs the batch, again what the store could not serve and may be done
// twice.
func (l *loader) flush() error {
	defer func() {
		clear(l.ops)
		clear(l.names)
		l.ops, l.where, l.size = l.ops[:0], l.where[:0], 0
	}()
	if len(l.ops) == 0 {
		return nil
	}
	err := patient.Do(l.ctx, func() error {
		l.s.Do(l.ctx, l.ops)
		var first error
		n := 0
		for i := range l.ops {
			op, where := l.ops[i], l.where[i]
			switch err := op.Err; {
			case err == nil:
				l.rep.OK++
			case errors.Is(err, client.ErrNotFound), errors.Is(err, client.ErrExists):
				l.rep.NoEffect++
			case errors.Is(err, client.ErrUnavailable), errors.Is(err, client.ErrUnknownOutcome) &&
				op.Cond == client.Always, l.ctx.Err() != nil:
				if first == nil {
					first = fmt.Errorf("%s: %w", where, l.a.About(op.Key, err))
				}
				l.ops[n], l.where[n] = op, where
				n++
			default:
				l.fail(where, l.a.About(op.Key, err))
			}
		}
		l.ops, l.where = l.ops[:n], l.where[:n]
		return first
	})
	l.rep.Failed += int64(len(l.ops))
	return err
}

func (l *loader) lines(format string) error {
	sc := bufio.NewScanner(l.in)
	sc.Buffer(make([]byte, 64<<10), maxPipeLine)
	// Nothing but the newline is cut off.
	sc.Split(func(data []byte, atEOF bool) (int, []byte, error) {
		if i := bytes.IndexByte(data, '\n'); i >= 0 {
			return i + 1, data[:i], nil
		}
		if atEOF && len(data) > 0 {
			return len(data), data, nil
		}
		return 0, nil, nil
	})
	n := 0
	for sc.Scan() {
		n++
		if len(bytes.TrimSpace(sc.Bytes())) == 0 {
			continue
		}
		where := "line " + strconv.Itoa(n)
		parse := l.tsv
		if format == "jsonl" {
			parse = l.jsonl
		}
		op, err := parse(sc.Bytes())
		if err != nil {
			l.fail(where, ctl.UsageError(err))
			continue
		}
		if err := l.add(where, op); err != nil {
			return err
		}
	}
	switch err := sc.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return ctl.Usagef("line %d: longer than %s", n+1, units.Bytes(maxPipeLine))
	case err != nil:
		return fmt.Errorf("read line %d: %w", n+1, err)
	}
	return nil
}

func (l *loader) tsv(line []byte) (op client.Op, err error) {
	f := bytes.Split(line, []byte{'\t'})
	if len(f) != 2 && len(f) != 3 {
		return op, fmt.Errorf("%d fields, want KEY, VALUE and perhaps a time to live, with tabs between", len(f))
	}
	op = client.Op{Kind: client.OpPut, Value: bytes.Clone(f[1])}
	if op.Key, err = l.a.Key(string(f[0])); err != nil {
		return op, err
	}
	if len(f) == 3 && len(f[2]) > 0 {
		ttl, err := time.ParseDuration(string(f[2]))
		if err != nil || ttl < time.Millisecond {
			return op, fmt.Errorf("time to live %q: want at least 1ms, such as 90s or 24h", f[2])
		}
		op.Expires = l.now().Add(ttl)
	}
	return op, nil
}

// pipeLine is an object of JSON lines.
type pipeLine struct {
	Key         *string  `json:"key"`
	KeyHex      *string  `json:"key_hex"`
	KeyBase64   *string  `json:"key_base64"`
	Value       *string  `json:"value"`
	ValueBase64 *string  `json:"value_base64"`
	Expires     *expiry  `json:"expires"`
	TTL         *float64 `json:"ttl_seconds"`
	Flags       uint32   `json:"flags"`
	Note        *string  `json:"note"`
	Type        *string  `json:"type"`
	// Of mget, and not used.
	Version any   `json:"version"`
	Found   *bool `json:"found"`
}

func (l *loader) jsonl(line []byte) (op client.Op, err error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	var o pipeLine
	if err := d.Decode(&o); err != nil {
		if t := (*json.UnmarshalTypeError)(nil); errors.As(err, &t) {
			err = fmt.Errorf("%s is a JSON %s", cmp.Or(t.Field, "the line"), t.Value)
		}
		return op, err
	}
	if _, err := d.Token(); err != io.EOF {
		return op, errors.New("more than one object on the line")
	}
	if err := checkText(line, o.Key, o.Value); err != nil {
		return op, err
	}
	op = client.Op{Kind: client.OpPut, Flags: o.Flags}
	if op.Key, err = oneOf("key", o.Key, o.KeyHex, o.KeyBase64); err != nil {
		return op, err
	}
	if op.Value, err = oneOf("value", o.Value, nil, o.ValueBase64); err != nil {
		return op, err
	}
	if o.Note != nil {
		if op.Note, err = strconv.ParseUint(*o.Note, 10, 64); err != nil {
			return op, fmt.Errorf("note %.40q: want a decimal number", *o.Note)
		}
	}
	if o.Type != nil {
		if op.Type, err = typeNamed(*o.Type); err != nil {
			return op, err
		}
		if err := CheckItem(op.Type, op.Value); err != nil {
			return op, err
		}
	}
	switch {
	case o.Expires != nil && o.TTL != nil:
		return op, errors.New("expires and ttl_seconds: want at most one of them")
	case o.Expires != nil:
		// The zero time would mean never.
		if op.Expires = o.Expires.Time; op.Expires.UnixMilli() <= 0 {
			return op, fmt.Errorf("expires %s: want a time after 1970", op.Expires.Format(time.RFC3339))
		}
	case o.TTL != nil:
		if !(*o.TTL >= 0.001 && *o.TTL < maxTTL.Seconds()) {
			return op, fmt.Errorf("ttl_seconds %v: want at least 0.001", *o.TTL)
		}
		op.Expires = l.now().Add(time.Duration(*o.TTL * float64(time.Second)))
	}
	return op, nil
}

// oneOf decodes bytes that are given in one of three forms.
func oneOf(name string, text, inHex, inBase64 *string) ([]byte, error) {
	n := 0
	for _, s := range []*string{text, inHex, inBase64} {
		if s != nil {
			n++
		}
	}
	if n != 1 {
		return nil, fmt.Errorf("%s: given %d times, want once", name, n)
	}
	var b []byte
	var err error
	switch {
	case inHex != nil:
		b, err = hex.DecodeString(*inHex)
	case inBase64 != nil:
		b, err = base64.StdEncoding.DecodeString(*inBase64)
	default:
		b = []byte(*text)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return b, nil
}

func (l *loader) resp() error {
	r := resp.NewReader(l.in, resp.Limits{Args: maxPipeArgs, Bulk: client.MaxValueLen,
		Query: client.MaxValueLen + 1<<20})
	defer r.Release()
	for n := 1; ; n++ {
		at := l.in.n - int64(r.Buffered())
		args, err := r.Next()
		if errors.Is(err, resp.ErrIncomplete) {
			if err = r.Fill(); err == nil {
				n--
				continue
			}
		}
		switch {
		case err == io.EOF && r.Buffered() == 0:
			return nil
		case err == io.EOF:
			return ctl.Usagef("byte %d: the input ends within the command that begins at byte %d", l.in.n, at)
		case errors.As(err, new(*resp.ProtocolError)):
			return ctl.Usagef("command %d at byte %d: %w", n, at, err)
		case err != nil:
			return fmt.Errorf("read: %w", err)
		}
		// The arguments that Next returns are overwritten soon.
		where := fmt.Sprintf("command %d at byte %d", n, at)
		ops, err := l.respOps(ctl.MapTo(args, bytes.Clone))
		if err != nil {
			l.fail(where, ctl.UsageError(err))
			continue
		}
		for _, op := range ops {
			if err := l.add(where, op); err != nil {
				return err
			}
		}
	}
}

// maxTTL is the longest time to live that is taken.
const maxTTL = 200 * 365 * 24 * time.Hour

// after reads a number of units, from now or from the epoch on.
func (l *loader) after(arg []byte, unit time.Duration, absolute bool) (time.Time, error) {
	n, err := strconv.ParseInt(string(arg), 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("time %.40q: want a decimal number", arg)
	}
	t := l.now()
	if absolute {
		t = time.UnixMilli(0)
	}
	if n > int64(maxTTL/unit) || n < -int64(maxTTL/unit) {
		return time.Time{}, fmt.Errorf("time %d: out of range", n)
	}
	return t.Add(time.Duration(n) * unit), nil
}

// future is after for a time that must be ahead.
func (l *loader) future(arg []byte, unit time.Duration, absolute bool) (time.Time, error) {
	t, err := l.after(arg, unit, absolute)
	if err == nil && (bytes.HasPrefix(arg, []byte("-")) || string(arg) == "0") {
		err = fmt.Errorf("time %s: want > 0", arg)
	}
	return t, err
}

// respOps are what a command asks for.
func (l *loader) respOps(args [][]byte) ([]client.Op, error) {
	name := strings.ToUpper(string(args[0][:min(len(args[0]), 32)]))
	want := func(least, most int) error {
		if n := len(args) - 1; n < least || n > most {
			return fmt.Errorf("%s with %d arguments", name, n)
		}
		return nil
	}
	var err error
	switch name {
	case "SET":
		if err := want(2, 6); err != nil {
			return nil, err
		}
		op := client.Op{Kind: client.OpPut, Key: args[1], Value: args[2]}
		err = l.setOptions(&op, args[3:])
		return []client.Op{op}, err
	case "SETEX", "PSETEX":
		if err := want(3, 3); err != nil {
			return nil, err
		}
		op := client.Op{Kind: client.OpPut, Key: args[1], Value: args[3]}
		op.Expires, err = l.future(args[2], unitOf(name), false)
		return []client.Op{op}, err
	case "DEL":
		if err := want(1, maxPipeArgs); err != nil {
			return nil, err
		}
		return ctl.MapTo(args[1:], func(k []byte) client.Op { return client.Op{Kind: client.OpDelete, Key: k} }), nil
	case "EXPIRE", "PEXPIRE":
		if err := want(2, 2); err != nil {
			return nil, err
		}
		t, err := l.after(args[2], unitOf(name), false)
		op := client.Op{Kind: client.OpDelete, Key: args[1]}
		if t.After(l.now()) {
			op = client.Op{Kind: client.OpUpdate, Key: args[1], Update: func(cur client.Item, present bool) (
				client.Change, error) {
				if !present {
					return client.Change{}, client.ErrNotFound
				}
				return client.Change{Value: cur.Value, Expires: t, Flags: cur.Flags}, nil
			}}
		}
		return []client.Op{op}, err
	}
	return nil, fmt.Errorf("%.32q: want one of SET, SETEX, PSETEX, DEL, EXPIRE, PEXPIRE", args[0])
}

// unitOf is that of a time: milliseconds if the name begins with P.
func unitOf(name string) time.Duration {
	if name[0] == 'P' {
		return time.Millisecond
	}
	return time.Second
}

func (l *loader) setOptions(op *client.Op, opts [][]byte) (err error) {
	for i := 0; i < len(opts); i++ {
		name := strings.ToUpper(string(opts[i][:min(len(opts[i]), 32)]))
		switch name {
		case "NX", "XX":
			if op.Cond != client.Always {
				return errors.New("SET with NX and XX")
			}
			op.Cond = map[string]client.Cond{"NX": client.IfAbsent, "XX": client.IfPresent}[name]
		case "EX", "PX", "EXAT", "PXAT":
			if i++; i == len(opts) || !op.Expires.IsZero() {
				return fmt.Errorf("SET: want one %s and one time", name)
			}
			if op.Expires, err = l.future(opts[i], unitOf(name), strings.HasSuffix(name, "AT")); err != nil {
				return err
			}
		default:
			return fmt.Errorf("SET with %q: want EX, PX, EXAT, PXAT, NX or XX", name)
		}
	}
	return nil
}
