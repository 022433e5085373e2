package nemesis

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// redisConfig is what the process of Redis clients is told. Its stdout is lines of fields
// separated by tabs:
//
//	redis  CLIENT CALL RETURN OUT ERR  an INCR ended
//	bad    TEXT                        a sum that cannot be
type redisConfig struct {
	Gateways []string
	// Clients is how many there are; one in Silent says something now and then only.
	Clients, Silent int
	Timeout         time.Duration // of one INCR, all tries together
}

const (
	// redisPace is between two commands of a client that has much to say; far less than what a
	// gateway that stops takes for silence. silentPace is far more.
	redisPace, silentPace = 5 * time.Millisecond, 300 * time.Millisecond
	// redisLife is how long a connection is used, and how long a client stays with the other
	// gateway after its own was not there.
	redisLife = time.Second
)

// redisMain counts by way of the gateways until SIGTERM.
func redisMain(cfg redisConfig) error {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	var wg sync.WaitGroup
	var out sync.Mutex
	for n := range cfg.Clients {
		c := &redisClient{cfg: cfg, n: n, key: fmt.Sprint("redis/", n), pace: redisPace,
			printf: func(format string, a ...any) {
				out.Lock()
				defer out.Unlock()
				fmt.Printf(format+"\n", a...)
			}}
		if cfg.Silent > 0 && n%cfg.Silent == 0 {
			c.pace = silentPace
		}
		wg.Go(func() { c.run(ctx) })
	}
	wg.Wait()
	return nil
}

// redisClient counts in a key of its own. It sends a command again only if it knows that
// nothing has happened: the gateway has said so, or nothing was sent.
type redisClient struct {
	cfg    redisConfig
	n      int
	key    string
	pace   time.Duration
	printf func(string, ...any)

	c     *net.TCPConn // nil: none
	r     *bufio.Reader
	until time.Time // when the connection has been used for long enough
	away  int       // gateways to go on from the client's own, modulo their number
	sum   int64     // what the key holds, at least
	doubt bool      // one more than that is possible
}

func (r *redisClient) run(ctx context.Context) {
	defer r.hangUp()
	for ctx.Err() == nil {
		call := now()
		got, err := r.add(ctx, 1)
		retn, out, text := now(), outOK, ""
		var unsure *unsureError
		switch {
		case errors.As(err, &unsure):
			out, text = outUnknown, err.Error()
		case err != nil && ctx.Err() != nil:
			return
		case err != nil:
			out, text = outNo, err.Error()
		}
		r.printf("redis\t%d\t%d\t%d\t%s\t%q", r.n, call, retn, out, text)
		switch out {
		case outOK:
			r.saw("INCR", got, got-1)
		case outUnknown:
			r.doubt = true
			for r.doubt && ctx.Err() == nil { // a read tells, if not at once
				if got, err := r.add(ctx, 0); err == nil {
					r.saw("GET after "+text, got, got)
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(r.pace):
		}
	}
}

// saw checks what the key held before a command against what is known, and notes what it
// holds now.
func (r *redisClient) saw(what string, now, before int64) {
	if before != r.sum && !(r.doubt && before == r.sum+1) {
		r.printf("bad\t%q", fmt.Sprintf("Redis client %d: %s: %q held %d, but its only writer counted to %d", r.n, what,
			r.key, before, r.sum))
	}
	r.sum, r.doubt = now, false
}

// unsureError is an end of which nobody knows whether the command has happened.
type unsureError struct{ err error }

func (e *unsureError) Error() string { return e.err.Error() }

// add adds to the key, or reads it, by whichever gateway does it first.
func (r *redisClient) add(ctx context.Context, n int) (got int64, err error) {
	command := fmt.Sprintf("*2\r\n$4\r\nINCR\r\n$%d\r\n%s\r\n", len(r.key), r.key)
	if n == 0 {
		command = fmt.Sprintf("*3\r\n$6\r\nINCRBY\r\n$%d\r\n%s\r\n$1\r\n0\r\n", len(r.key), r.key)
	}
	for end := time.Now().Add(r.cfg.Timeout); time.Now().Before(end) && ctx.Err() == nil; {
		if err = r.connect(); err != nil {
			time.Sleep(time.Millisecond)
			continue
		}
		if _, err := io.WriteString(r.c, command); err != nil {
			r.switchGateway()
			return 0, &unsureError{fmt.Errorf("sending: %w", err)}
		}
		line, err := r.r.ReadString('\n')
		if err != nil {
			r.switchGateway()
			return 0, &unsureError{fmt.Errorf("no reply: %w", err)}
		}
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, ":"):
			return strconv.ParseInt(line[1:], 10, 64)
		case strings.HasPrefix(line, "-LOADING ") && strings.HasSuffix(line, "nothing was done"):
			r.switchGateway()
		case strings.HasPrefix(line, "-ERR unknown outcome"):
			return 0, &unsureError{errors.New(line)}
		default:
			return 0, errors.New(line)
		}
	}
	return 0, fmt.Errorf("not within %v: %w", r.cfg.Timeout, err)
}

// connect sees to it that there is a connection that was not closed by the other side when
// it was last looked at. The client's own gateway comes first.
func (r *redisClient) connect() error {
	if r.c != nil {
		if time.Now().After(r.until) {
			r.hangUp()
			r.away = 0
		} else if r.closed() {
			r.switchGateway()
		}
	}
	if r.c != nil {
		return nil
	}
	c, err := net.DialTimeout("tcp", r.cfg.Gateways[(r.n+r.away)%len(r.cfg.Gateways)], time.Second)
	if err != nil {
		r.away++
		return err
	}
	r.c, r.until = c.(*net.TCPConn), time.Now().Add(redisLife)
	r.r = bufio.NewReader(r.c)
	return r.c.SetDeadline(r.until.Add(r.cfg.Timeout))
}

// closed reports whether the gateway has closed the connection, as far as is known here.
func (r *redisClient) closed() (ended bool) {
	raw, err := r.c.SyscallConn()
	if err != nil {
		return true
	}
	err = raw.Read(func(fd uintptr) bool {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		ended = n == 0 && err == nil || err != nil && !errors.Is(err, unix.EAGAIN)
		return true
	})
	return ended || err != nil
}

// switchGateway goes on to another gateway.
func (r *redisClient) switchGateway() {
	r.hangUp()
	r.away++
}

func (r *redisClient) hangUp() {
	if r.c != nil {
		_ = r.c.Close() // all that came over it has been read, or is not awaited
		r.c = nil
	}
}

// heardRedis takes the fields of a line of redisMain.
func (s *probes) heardRedis(fields []string) error {
	if len(fields) != 5 {
		return fmt.Errorf("redis with %d fields", len(fields))
	}
	var n [3]int64
	for i := range n {
		var err error
		if n[i], err = strconv.ParseInt(fields[i], 10, 64); err != nil {
			return err
		}
	}
	text, err := strconv.Unquote(fields[4])
	if err != nil {
		return err
	}
	client, call, retn, out := int(n[0]), n[1], n[2], fields[3]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.partingLocked(call, retn, out, true, fmt.Sprintf("INCR of Redis client %d: %s", client, text))
	if out == outOK {
		s.counted[client] = max(s.counted[client], call)
	}
	return nil
}

// redisServed tells which of so many Redis clients have not counted since then.
func (s *probes) redisServed(since int64, clients int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range clients {
		if s.counted[c] < since {
			return fmt.Sprintf("Redis client %d last counted %v ago", c, time.Duration(now()-s.counted[c]).Round(
				time.Millisecond))
		}
	}
	return ""
}

// redisClients is how many there are where gateways are stopped.
const redisClients = 10

// launchRedis starts the Redis clients.
func (h *harness) launchRedis(p *proc, self string) error {
	cfg := redisConfig{Clients: redisClients, Silent: 5, Timeout: max(5*time.Second, 3*h.lease)}
	for _, g := range h.scope.gateways {
		cfg.Gateways = append(cfg.Gateways, h.net.ip(g)+":6379")
	}
	doc, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	return p.start(h.net, environ("KVD_NEMESIS_PROGRAM=redis", "KVD_NEMESIS_LOAD="+string(doc)), []string{self},
		func(l string) {
			h.heard(0, 0, l)
		})
}
