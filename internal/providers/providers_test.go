package providers

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/rdma"
)

func TestOpen(t *testing.T) {
	for _, name := range Names() {
		d, err := Open(name, Options{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if d.Name() != name {
			t.Errorf("opened %q for %q", d.Name(), name)
		}
		m, err := d.Alloc(1, rdma.AllocOptions{Shared: true})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := errors.Join(m.Free(), d.Close()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUnknown(t *testing.T) {
	_, err := Open("rocket", Options{})
	if !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "shm, tcp") {
		t.Fatalf("got %v, want ErrUnknown that lists the names", err)
	}
}
