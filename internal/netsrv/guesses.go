package netsrv

import (
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Guesses slows down peers that try passwords, by their address. The zero value is ready. Its methods
// may be called concurrently.
type Guesses struct {
	mu struct {
		sync.Mutex
		// paid is when the wrong passwords so far will have been forgotten: each counts for guessPause.
		paid map[netip.Prefix]time.Time
		// swept is when those who have paid were last dropped.
		swept time.Time
	}
}

const (
	// guessFree wrong passwords in a row cost nothing; after that each one takes GuessDelay, until they
	// have been fewer than one each guessPause for a while, of at most guessFree + guessTail.
	guessFree, guessTail = 10, 50
	guessPause           = 100 * time.Millisecond
	// maxGuessers bounds the addresses; beyond it those that are new are taken for one.
	maxGuessers = 4096
)

// GuessDelay is how long a peer waits for an answer that has given too many wrong passwords.
const GuessDelay = time.Second

// guesser is the address that guesses of a peer count for. A host has a whole /64 of IPv6, and all of
// this machine that come by a socket of the file system are one.
func guesser(peer net.Addr) netip.Prefix {
	tcp, ok := peer.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip := tcp.AddrPort().Addr().Unmap().WithZone("")
	p, _ := ip.Prefix(min(ip.BitLen(), 64))
	return p
}

// Wrong is told of a wrong password.
func (g *Guesses) Wrong(peer net.Addr) { g.wrong(guesser(peer), time.Now()) }

func (g *Guesses) wrong(who netip.Prefix, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.paid == nil {
		g.mu.paid = make(map[netip.Prefix]time.Time)
	}
	if _, known := g.mu.paid[who]; !known && len(g.mu.paid) >= maxGuessers {
		if now.Sub(g.mu.swept) >= guessPause {
			g.mu.swept = now
			maps.DeleteFunc(g.mu.paid, func(_ netip.Prefix, paid time.Time) bool { return !paid.After(now) })
		}
		if len(g.mu.paid) >= maxGuessers {
			who = netip.Prefix{}
		}
	}
	paid := g.mu.paid[who]
	if paid.Before(now) {
		paid = now
	}
	if paid = paid.Add(guessPause); paid.After(now.Add((guessFree + guessTail) * guessPause)) {
		paid = now.Add((guessFree + guessTail) * guessPause)
	}
	g.mu.paid[who] = paid
}

// Delay is how long the peer must wait before its next password is looked at, right or wrong.
func (g *Guesses) Delay(peer net.Addr) time.Duration { return g.delay(guesser(peer), time.Now()) }

func (g *Guesses) delay(who netip.Prefix, now time.Time) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	paid, known := g.mu.paid[who]
	if !known && len(g.mu.paid) >= maxGuessers {
		paid = g.mu.paid[netip.Prefix{}]
	}
	if paid.Sub(now) <= guessFree*guessPause {
		return 0
	}
	return GuessDelay
}
