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

func TestOpenFor(t *testing.T) {
	for provider, want := range map[string]string{"": "shm tcp", "tcp": "tcp"} {
		devices, err := OpenFor(provider, Options{})
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, d := range devices {
			names = append(names, d.Name())
		}
		if err := Close(devices); err != nil {
			t.Error(err)
		}
		// verbs comes first where there is an adapter.
		if got := strings.TrimPrefix(strings.Join(names, " "), "verbs "); got != want {
			t.Errorf("OpenFor(%q) opened %q, want %q", provider, got, want)
		}
	}
}

// With RequireRDMA there is verbs, or an error that says why not.
func TestRequire(t *testing.T) {
	devices, err := OpenFor("", Options{Require: RequireRDMA})
	if err == nil {
		if len(devices) != 1 || devices[0].Name() != "verbs" {
			t.Errorf("opened %d devices, the first of %s", len(devices), devices[0].Name())
		}
		if err := Close(devices); err != nil {
			t.Error(err)
		}
	} else if !errors.Is(err, ErrUnavailable) || !strings.HasPrefix(err.Error(), "require is rdma, so no other") {
		t.Error(err)
	}
	for _, o := range [][2]string{{"tcp", RequireRDMA}, {"shm", RequireRDMA}, {"", "verbs"}} {
		if _, err := OpenFor(o[0], Options{Require: o[1]}); err == nil || errors.Is(err, ErrUnavailable) {
			t.Errorf("provider %q, require %q: %v", o[0], o[1], err)
		}
	}
}

// Those that are opened say why verbs was left out, exactly if it was.
func TestPassedOver(t *testing.T) {
	devices, err := OpenFor("", Options{})
	if err != nil {
		t.Fatal(err)
	}
	_, unusable := OpenFor("verbs", Options{})
	for _, d := range devices {
		if why := d.PassedOver(); (why == nil) != (devices[0].Name() == "verbs") ||
			why != nil && unusable != nil && why.Error() != unusable.Error() {
			t.Errorf("%s: verbs was left out: %v; it says %v", d.Name(), unusable, why)
		}
	}
	if err := Close(devices); err != nil {
		t.Error(err)
	}
}

func TestUnknown(t *testing.T) {
	for what, err := range map[string]error{
		"Open":    func() error { _, err := Open("rocket", Options{}); return err }(),
		"OpenFor": func() error { _, err := OpenFor("rocket", Options{}); return err }(),
	} {
		if !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "shm, tcp") {
			t.Errorf("%s: got %v, want ErrUnknown that lists the names", what, err)
		}
	}
}
