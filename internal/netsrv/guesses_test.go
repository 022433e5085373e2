package netsrv

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"
)

// TestGuessesByAddress: an address that guesses waits, and no other does.
func TestGuessesByAddress(t *testing.T) {
	var g Guesses
	bad := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1}
	for range guessFree + 1 {
		g.Wrong(bad)
	}
	for addr, want := range map[string]time.Duration{"10.0.0.1:2": GuessDelay, "[::ffff:10.0.0.1]:3": GuessDelay,
		"10.0.0.2:1": 0, "[2001:db8::1]:1": 0} {
		if got := g.Delay(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(addr))); got != want {
			t.Errorf("%s waits %v, want %v", addr, got, want)
		}
	}
	for i := range guessFree + 1 {
		ip := netip.MustParseAddr("2001:db8::").As16()
		ip[15] = byte(i)
		g.Wrong(&net.TCPAddr{IP: ip[:]})
	}
	if g.Delay(&net.TCPAddr{IP: net.ParseIP("2001:db8::ffff:1")}) == 0 {
		t.Error("a host with a whole /64 guesses without waiting")
	}
	socket := &net.UnixAddr{Name: "@", Net: "unix"}
	for range guessFree + 1 {
		g.Wrong(socket)
	}
	if g.Delay(socket) == 0 {
		t.Error("a socket of the file system is no address")
	}
}

// TestGuessesAreForgotten: each wrong password counts for guessPause, and no more than so many of them do.
func TestGuessesAreForgotten(t *testing.T) {
	var g Guesses
	who, now := netip.MustParsePrefix("10.0.0.1/32"), time.Now()
	for range 10_000 {
		g.wrong(who, now)
	}
	if g.delay(who, now.Add(guessTail*guessPause-1)) == 0 {
		t.Error("they were forgotten too early")
	}
	if d := g.delay(who, now.Add(guessTail*guessPause)); d != 0 {
		t.Errorf("they were remembered too long: %v", d)
	}
}

// TestGuessersAreBounded: however many addresses guess, the memory for them is bounded, new ones wait
// together, and those known before are forgotten in time.
func TestGuessersAreBounded(t *testing.T) {
	var g Guesses
	now := time.Now()
	address := func(i int) netip.Prefix {
		var ip [4]byte
		binary.BigEndian.PutUint32(ip[:], uint32(i))
		return netip.PrefixFrom(netip.AddrFrom4(ip), 32)
	}
	for i := range 4 * maxGuessers {
		g.wrong(address(i+1), now)
	}
	if n := len(g.mu.paid); n > maxGuessers+1 {
		t.Errorf("%d addresses are remembered", n)
	}
	if g.delay(address(1<<20), now) == 0 {
		t.Error("an address guesses without waiting since there are too many")
	}
	later := now.Add(time.Hour)
	g.wrong(address(1<<20), later)
	if n := len(g.mu.paid); n != 1 {
		t.Errorf("%d addresses are remembered after an hour", n)
	}
	if d := g.delay(address(5), later); d != 0 {
		t.Errorf("an address waits %v for what others did", d)
	}
}
