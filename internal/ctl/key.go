package ctl

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/glob"
)

// About names the key in an error.
func (a *App) About(k []byte, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", a.ShowKey(k), err)
}

// Prefix decodes a key prefix, which may be empty.
func (a *App) Prefix(s string) ([]byte, error) {
	if s == "" {
		return nil, nil
	}
	return a.Key(s)
}

// Matcher selects keys that begin with prefix and match pattern; an empty one is
// matched by all. nil selects every key.
func Matcher(prefix []byte, pattern string) func([]byte) bool {
	switch {
	case pattern != "":
		p := []byte(pattern)
		return func(k []byte) bool { return bytes.HasPrefix(k, prefix) && glob.Match(p, k) }
	case len(prefix) > 0:
		return func(k []byte) bool { return bytes.HasPrefix(k, prefix) }
	}
	return nil
}

// CompleteMost bounds what a completion of keys offers.
const CompleteMost = 100

// CompleteFor bounds how long a completion of keys looks for them. Tests on a busy machine set it before they start.
var CompleteFor = 500 * time.Millisecond

// CompleteKey suggests keys that begin with the word typed so far: those that are
// found in the time that it takes to wait for. Keys that a line of text cannot hold
// are left out.
func (a *App) CompleteKey(several bool) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		const directive = cobra.ShellCompDirectiveNoFileComp
		if len(args) > 0 && !several || a.Ready(cmd) != nil {
			return nil, directive
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), CompleteFor)
		defer cancel()
		found := make(map[string]bool)
		_ = a.WithBackend(func(b Backend) error {
			// To open a session would make a default namespace if there is none.
			st, err := ClusterStatus(ctx, b)
			if err != nil {
				return err
			}
			if _, err := a.OwnNamespace(st.GetMap()); err != nil {
				return err
			}
			return a.With(ctx, SessionOptions{Lanes: 1, ReadOnly: true}, func(s Store) error {
				// Match sees the keys one by one, also those before a time-out.
				for _, err := range s.Scan(ctx, client.ScanOptions{KeysOnly: true, Match: func(k []byte) bool {
					text := string(k)
					if a.Hex {
						text = hex.EncodeToString(k)
					}
					if strings.HasPrefix(text, typed) && Printable([]byte(text)) == text && len(found) < CompleteMost {
						if found[text] = true; len(found) == CompleteMost {
							cancel()
						}
					}
					return false
				}}) {
					return err
				}
				return nil
			})
		})
		return slices.Sorted(maps.Keys(found)), directive
	}
}

// Key decodes a key given on the command line or a line of stdin.
func (a *App) Key(s string) ([]byte, error) {
	k := []byte(s)
	if a.Hex {
		var err error
		if k, err = hex.DecodeString(s); err != nil {
			return nil, Usagef("key %q: %w", s, err)
		}
	}
	if len(k) == 0 || len(k) > client.MaxKeyLen {
		return nil, Usagef("key of %d bytes, want 1 to %d", len(k), client.MaxKeyLen)
	}
	return k, nil
}

// Show prints a key for people and for keys: itself if printable, else quoted.
func (a *App) Show(b []byte) string {
	if a.Hex {
		return hex.EncodeToString(b)
	}
	return Printable(b)
}

// Printable is b if it is plain text that no line of keys takes for quoted, else quoted as in Go.
func Printable(b []byte) string {
	s := string(b)
	if s != "" && s[0] != '"' && utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool {
		return !unicode.IsPrint(r)
	}) < 0 {
		return s
	}
	return strconv.Quote(s)
}

// ShowKey names a key in an error.
func (a *App) ShowKey(k []byte) string {
	if len(k) > 64 {
		return fmt.Sprintf("%s… (%d bytes)", a.Show(k[:48]), len(k))
	}
	if a.Hex {
		return hex.EncodeToString(k)
	}
	return strconv.Quote(string(k))
}

// SetKey and SetBytes add bytes to an object of JSON output: as a string if that is possible, else as name_base64.
// Keys under --hex are name_hex.
func (a *App) SetKey(m map[string]any, name string, k []byte) {
	if a.Hex {
		m[name+"_hex"] = hex.EncodeToString(k)
		return
	}
	SetBytes(m, name, k)
}

// SetBytes adds b to an object of JSON output: see SetKey.
func SetBytes(m map[string]any, name string, b []byte) {
	if utf8.Valid(b) {
		m[name] = string(b)
	} else {
		m[name+"_base64"] = base64.StdEncoding.EncodeToString(b)
	}
}
