package keys

import (
	"bytes"
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvd-project/kvd/internal/ctl"
)

// A list of keys on stdin, as scan prints them, is those keys.
func TestKeysReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 1, 40), 1, 8).Draw(t, "keys")
		a := &commands{ctl.New(nil, nil, nil)}
		var lines bytes.Buffer
		for _, k := range want {
			fmt.Fprintln(&lines, a.Show(k))
		}
		a.Stdin = &lines
		got, err := a.keys(t.Context(), nil)
		if err != nil || len(got) != len(want) {
			t.Fatalf("%q: %q %v", want, got, err)
		}
		for i := range want {
			if !bytes.Equal(got[i], want[i]) {
				t.Errorf("%q: %q", want, got)
			}
		}
	})
}
