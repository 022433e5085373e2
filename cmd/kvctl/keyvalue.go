package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/units"
)

// key decodes a key given on the command line or a line of stdin.
func (a *app) key(s string) ([]byte, error) {
	k := []byte(s)
	if a.hex {
		var err error
		if k, err = hex.DecodeString(s); err != nil {
			return nil, usagef("key %q: %w", s, err)
		}
	}
	if len(k) == 0 || len(k) > client.MaxKeyLen {
		return nil, usagef("key of %d bytes, want 1 to %d", len(k), client.MaxKeyLen)
	}
	return k, nil
}

// keys decodes args, or lines of stdin if there are none: those that scan prints, so one
// that begins with a quote is quoted.
func (a *app) keys(ctx context.Context, args []string) ([][]byte, error) {
	var out [][]byte
	for _, s := range args {
		k, err := a.key(s)
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	if len(args) > 0 {
		return out, nil
	}
	sc := bufio.NewScanner(a.input(ctx, "keys, one a line,"))
	sc.Buffer(nil, maxQuoted+2)
	for n := 1; sc.Scan(); n++ {
		line := sc.Text()
		if line == "" {
			continue
		}
		if !a.hex && line[0] == '"' {
			q, err := strconv.Unquote(line)
			if err != nil {
				return nil, usagef("line %d: %.80s: it begins with a quote, so it must be quoted as scan does", n, line)
			}
			line = q
		}
		k, err := a.key(line)
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
func (a *app) value(ctx context.Context, args []string, i int) ([]byte, error) {
	if i < len(args) && args[i] != "-" {
		return []byte(args[i]), nil
	}
	b, err := io.ReadAll(io.LimitReader(a.input(ctx, "the value"), client.MaxValueLen+1))
	if err != nil {
		return nil, fmt.Errorf("read value from stdin: %w", err)
	}
	if len(b) > client.MaxValueLen {
		return nil, longInput()
	}
	return b, nil
}

func longInput() error {
	return usagef("value on stdin is longer than %s", units.Bytes(client.MaxValueLen))
}

// valueFile is the regular file that is the value, and how many bytes there are from where it is read: the one named,
// else stdin if it is one and the value comes from there. nil: it is neither. A named one is the caller's to close.
func (a *app) valueFile(args []string, name string) (f *os.File, size int64, err error) {
	if name != "" {
		return openFile(name, os.OpenFile)
	}
	f, ok := a.stdin.(*os.File)
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

// putFile puts the size bytes of f from where it is read, and goes there. Bytes that come to f meanwhile are left out.
func putFile(ctx context.Context, s store, key []byte, f *os.File, size int64, o client.PutOptions) (version uint64,
	err error) {
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0, err
	}
	if version, err = s.PutFrom(ctx, key, io.NewSectionReader(f, at, size), size, o); err == nil {
		_, _ = f.Seek(at+size, io.SeekStart) // the value is there in any case
	}
	return version, err
}

// show prints a key for people and for keys: itself if printable, else quoted.
func (a *app) show(b []byte) string {
	if a.hex {
		return hex.EncodeToString(b)
	}
	return printable(b)
}

func printable(b []byte) string {
	s := string(b)
	if s != "" && s[0] != '"' && utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool {
		return !unicode.IsPrint(r)
	}) < 0 {
		return s
	}
	return strconv.Quote(s)
}

// showKey names a key in an error.
func (a *app) showKey(k []byte) string {
	if len(k) > 64 {
		return fmt.Sprintf("%s… (%d bytes)", a.show(k[:48]), len(k))
	}
	if a.hex {
		return hex.EncodeToString(k)
	}
	return strconv.Quote(string(k))
}

// setKey and setBytes add bytes to an object of JSON output: as a string if
// that is possible, else as name_base64; keys under --hex as name_hex.
func (a *app) setKey(m map[string]any, name string, k []byte) {
	if a.hex {
		m[name+"_hex"] = hex.EncodeToString(k)
		return
	}
	setBytes(m, name, k)
}

func setBytes(m map[string]any, name string, b []byte) {
	if utf8.Valid(b) {
		m[name] = string(b)
	} else {
		m[name+"_base64"] = base64.StdEncoding.EncodeToString(b)
	}
}
