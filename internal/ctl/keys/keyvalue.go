package keys

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/units"
)

// keys decodes args, or lines of stdin if there are none: those that scan prints, so one
// that begins with a quote is quoted.
func (a *commands) keys(ctx context.Context, args []string) ([][]byte, error) {
	var out [][]byte
	for _, s := range args {
		k, err := a.Key(s)
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	if len(args) > 0 {
		return out, nil
	}
	sc := bufio.NewScanner(a.Input(ctx, "keys, one a line,"))
	sc.Buffer(nil, maxQuoted+2)
	for n := 1; sc.Scan(); n++ {
		line := sc.Text()
		if line == "" {
			continue
		}
		if !a.Hex && line[0] == '"' {
			q, err := strconv.Unquote(line)
			if err != nil {
				return nil, ctl.Usagef("line %d: %.80s: it begins with a quote, so it must be quoted as scan does", n,
					line)
			}
			line = q
		}
		k, err := a.Key(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		out = append(out, k)
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("read keys from stdin: %w", err)
	}
	return out, nil
}

// maxQuoted bounds a key as scan prints it: every byte may be quoted \xHH.
const maxQuoted = 4*client.MaxKeyLen + 2

// value takes the value at args[i]; "-" or none reads stdin.
func (a *commands) value(ctx context.Context, args []string, i int) ([]byte, error) {
	if i < len(args) && args[i] != "-" {
		return []byte(args[i]), nil
	}
	b, err := io.ReadAll(io.LimitReader(a.Input(ctx, "the value"), client.MaxValueLen+1))
	if err != nil {
		return nil, fmt.Errorf("read value from stdin: %w", err)
	}
	if len(b) > client.MaxValueLen {
		return nil, longInput()
	}
	return b, nil
}

func longInput() error {
	return ctl.Usagef("value on stdin is longer than %s", units.Bytes(client.MaxValueLen))
}

// valueFile is the regular file that is the value, and how many bytes there are from where it is read: the one named,
// else stdin if it is one and the value comes from there. nil: it is neither. A named one is the caller's to close.
func (a *commands) valueFile(args []string, name string) (f *os.File, size int64, err error) {
	if name != "" {
		return ctl.OpenFile(name, os.OpenFile)
	}
	f, ok := a.Stdin.(*os.File)
	if !ok || len(args) > 1 && args[1] != "-" {
		return nil, 0, nil
	}
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return nil, 0, nil
	}
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil, 0, fmt.Errorf("read value from stdin: %w", err)
	}
	if size = max(st.Size()-at, 0); size > client.MaxValueLen {
		return nil, 0, longInput()
	}
	return f, size, nil
}
