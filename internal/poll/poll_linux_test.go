package poll

import (
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func pair(t *testing.T) (a, b int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fds[0]); _ = unix.Close(fds[1]) })
	return fds[0], fds[1]
}

func open(t *testing.T) *Poller {
	t.Helper()
	p, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// TestReady follows descriptors from data to their end.
func TestReady(t *testing.T) {
	p := open(t)
	a, peerA := pair(t)
	b, peerB := pair(t)
	for _, fd := range []int{a, b} {
		if err := p.Add(fd); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Add(a); !errors.Is(err, unix.EEXIST) {
		t.Errorf("adding twice gave %v", err)
	}
	expect := func(what string, wantWoken bool, want ...int) {
		t.Helper()
		ready, woken := p.Wait(-1)
		slices.Sort(ready)
		slices.Sort(want)
		if !slices.Equal(ready, want) || woken != wantWoken {
			t.Errorf("%s: ready %v woken %v, want %v %v", what, ready, woken, want, wantWoken)
		}
	}
	say := func(fd int) {
		t.Helper()
		if n, err := unix.Write(fd, []byte("x")); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	buf := make([]byte, 8)
	if p.Wait(0); !p.Slept() {
		t.Error("nothing was ready, and Wait did not wait")
	}
	say(peerA)
	expect("one has data", false, a)
	if p.Slept() {
		t.Error("Wait waited for what was ready")
	}
	expect("it was not read", false, a)
	say(peerB)
	expect("both have", false, a, b)
	p.Wake()
	p.Wake()
	expect("and a wake", true, a, b)
	for _, fd := range []int{a, b} {
		if n, err := unix.Read(fd, buf); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	p.Wake()
	expect("a wake alone", true)
	_ = unix.Shutdown(peerB, unix.SHUT_RDWR)
	expect("one has ended", false, b)
	p.Remove(b)
	say(peerA)
	expect("the ended one is removed", false, a)
}

// TestWakeFromElsewhere wakes a Wait under way, again and again.
func TestWakeFromElsewhere(t *testing.T) {
	p := open(t)
	turns := make(chan struct{})
	go func() {
		for range 100 {
			p.Wake()
			<-turns
		}
	}()
	for range 100 {
		if _, woken := p.Wait(-1); !woken {
			t.Fatal("not woken")
		}
		turns <- struct{}{}
	}
}

func TestCloseLeavesNoDescriptors(t *testing.T) {
	count := func() int {
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(d)
	}
	before := count()
	for range 100 {
		p, err := New()
		if err != nil {
			t.Fatal(err)
		}
		p.Close()
	}
	if n := count(); n != before {
		t.Errorf("%d descriptors, %d before", n, before)
	}
}

// TestLook: a look finds what Wait would return, and nothing before that is there.
func TestLook(t *testing.T) {
	p := open(t)
	a, peer := pair(t)
	if err := p.Add(a); err != nil {
		t.Fatal(err)
	}
	if p.Look(0) {
		t.Error("it found something where nothing is")
	}
	if _, err := unix.Write(peer, []byte{1}); err != nil {
		t.Fatal(err)
	}
	if !p.Look(0) {
		t.Error("it did not find input")
	}
	if ready, woken := p.Wait(-1); len(ready) != 1 || ready[0] != a || woken {
		t.Errorf("Wait gave %v, %v", ready, woken)
	}
	p.Remove(a)
	p.Wake()
	if !p.Look(0) {
		t.Error("it did not find a Wake")
	}
}
