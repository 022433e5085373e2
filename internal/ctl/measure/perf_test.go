package measure

import (
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/ctl"
)

func TestPerfHome(t *testing.T) {
	for _, c := range []struct {
		app  ctl.App
		to   string
		want string // "": an error
	}{
		{ctl.App{}, "shm,@x,1,0", "@"},
		{ctl.App{}, "tcp,127.0.0.1:1,1,0", "127.0.0.1:0"},
		{ctl.App{TLSCA: "ca"}, "tcp,127.0.0.1:1,1,0", ""},
		{ctl.App{TLSCA: "ca", TLSCert: "cert"}, "tcp,127.0.0.1:1,1,0", "127.0.0.1:0"},
		{ctl.App{}, "tcp,127.0.0.1,1,0", ""},
	} {
		provider, _, _ := strings.Cut(c.to, ",")
		home, err := (&commands{&c.app}).perfHome(provider, c.to)
		if (c.want == "") != (err != nil) || !strings.HasPrefix(home, c.want) {
			t.Errorf("%s: %q, %v; want %q", c.to, home, err, c.want)
		}
	}
}
