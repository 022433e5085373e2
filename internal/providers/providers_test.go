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
		if name == "verbs" && errors.Is(err, ErrUnavailable) {
			continue // OpenAll does without it
		}
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

func TestOpenAll(t *testing.T) {
	devices, err := OpenAll(Options{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, d := range devices {
		names = append(names, d.Name())
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	if got := strings.Join(names, " "); !strings.HasSuffix(got, "shm tcp") {
		t.Errorf("opened %s, want shm and tcp on any machine", got)
	}
}

func TestUnknown(t *testing.T) {
	_, err := Open("rocket", Options{})
	if !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "shm, tcp") {
		t.Fatalf("got %v, want ErrUnknown that lists the names", err)
	}
}
