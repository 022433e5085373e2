// Package verbperf measures the verbs of one provider between two processes, without the store, as
// perftest's ib_read_lat and ib_read_bw do. It measures the latency of one verb at a time, and what
// chains of them bring.
//
// It leaves starting the other process, flags and tables to kvctl perf. Start with [Listen], the passive
// side, which lends memory, and [Dial], the active one, whose [Conn.Measure] measures a [Case]. A Passive
// serves any number of connections by itself; a Conn has one goroutine. Both own what they allocate
// until their Close; Listen takes over the device, Dial does not.
package verbperf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Region is how much memory the passive side lends, and so the longest
// message.
const Region = 4 << 20

// Case is what is measured as one line of the result.
type Case struct {
	Op       rdma.Opcode
	PingPong bool // WRITEs back and forth
	Bytes    int  // of a message, at most Region
	Iters    int  // verbs
	Depth    int  // verbs behind one doorbell, when bandwidth is measured
}

func (c Case) String() string {
	if c.PingPong {
		return "WRITE_PINGPONG"
	}
	return c.Op.String()
}

// Result is one measured case.
type Result struct {
	Verb        string  `json:"verb"`
	Bytes       int     `json:"bytes"`
	Iterations  int     `json:"iterations"`
	MinNanos    int64   `json:"min_ns"`
	MedianNanos int64   `json:"median_ns"`
	AvgNanos    float64 `json:"avg_ns"`
	P10Nanos    int64   `json:"p10_ns"`
	P99Nanos    int64   `json:"p99_ns"`
	MiBPerSec   float64 `json:"mib_per_second"`
	VerbsPerSec float64 `json:"verbs_per_second"`
	Depth       int     `json:"depth"`
	// The rest is this process's work for a verb while latency was measured, of all threads together.
	CgoCalls float64 `json:"cgo_calls"`
	Switches float64 `json:"switches"` // of context, voluntary and not
	CPUNanos float64 `json:"cpu_ns"`   // of the process and of the kernel for it
}

// Passive lends [Region] bytes to anybody who connects and knows their key, and
// answers one ping-pong at a time.
type Passive struct {
	dev *rdma.Device
	mem *rdma.Memory
	pd  *rdma.PD
	mr  *rdma.MR
	l   rdma.Listener

	// Limit bounds the silence between two messages of a ping-pong.
	Limit time.Duration
	// Failed hears why a ping-pong ended before the active side closed it.
	Failed func(error)
	echoes sync.WaitGroup
	mu     struct {
		sync.Mutex
		peer   rdma.Peer          // of the ping-pong that is under way
		stop   context.CancelFunc // of the same; nil while there is none
		closed bool
	}
}

const rights = rdma.AccessRemoteRead | rdma.AccessRemoteWrite | rdma.AccessRemoteAtomic

// Listen makes a Passive at addr, "" being a private address. It owns dev also when it fails.
func Listen(dev *rdma.Device, addr string) (s *Passive, err error) {
	s = &Passive{dev: dev, Limit: 5 * time.Second, Failed: func(error) {}}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.mem, err = dev.Alloc(Region, rdma.AllocOptions{Name: "kvctl-perf", Shared: true}); err != nil {
		return s, err
	}
	if s.pd, err = dev.AllocPD(); err != nil {
		return s, err
	}
	if s.mr, err = s.pd.RegMR(s.mem, 0, Region, rights); err != nil {
		return s, err
	}
	switch {
	case addr != "":
	case dev.Name() == "shm":
		addr = fmt.Sprintf("@kvctl-perf-%d", os.Getpid())
	default:
		addr = "127.0.0.1:0"
	}
	s.l, err = dev.Listen(addr, rdma.ListenOptions{Accept: s.accept, Closed: s.gone})
	return s, err
}

// To is what the active side needs.
func (s *Passive) To() string {
	return fmt.Sprintf("%s,%s,%#x,%#x", s.dev.Name(), s.l.Addr(), s.mr.RKey(), s.mr.Base())
}

// Close ends what is under way and gives back all, the device too.
func (s *Passive) Close() error {
	var errs []error
	if s.l != nil {
		errs = append(errs, s.l.Close())
	}
	s.mu.Lock()
	s.mu.closed = true
	if s.mu.stop != nil {
		s.mu.stop()
	}
	s.mu.Unlock()
	s.echoes.Wait()
	if s.mr != nil {
		errs = append(errs, s.mr.Deregister())
	}
	if s.pd != nil {
		errs = append(errs, s.pd.Dealloc())
	}
	if s.mem != nil {
		errs = append(errs, s.mem.Free())
	}
	return errors.Join(append(errs, s.dev.Close())...)
}

// Conn is one connection with its registered buffer.
type Conn struct {
	// Home is where this side listens for ping-pongs; see [Home]. Needed for those alone.
	Home string

	dev        *rdma.Device
	addr       string // the passive side's
	mem        *rdma.Memory
	pd         *rdma.PD
	mr         *rdma.MR
	cq         *rdma.CQ
	qp         *rdma.QP
	rkey, base uint64
	wcs        [1]rdma.WC
	// spin is how long a wait polls before it sleeps.
	spin  time.Duration
	timer *time.Timer // of a wait that sleeps
	begin time.Time   // what stamps count from
	// stamps are one batch's; the histogram is filled between batches.
	stamps [4096]int64
	used   usage // by the latest latency
}

// bufferBytes holds two chains of the longest kind.
const bufferBytes = 2 * Region

// ErrAddress: it is not what a passive side says of itself.
var ErrAddress = errors.New("not the address of a passive side")

// Dial connects to what [Passive.To] said.
func Dial(ctx context.Context, dev *rdma.Device, to string) (_ *Conn, err error) {
	f := strings.Split(to, ",")
	if len(f) != 4 || f[0] != dev.Name() {
		return nil, fmt.Errorf("%w: %q, want provider,address,rkey,base", ErrAddress, to)
	}
	p := &Conn{dev: dev, addr: f[1], spin: Spin, timer: time.NewTimer(time.Hour), begin: time.Now()}
	if dev.Name() == "tcp" {
		// Completions come through goroutines that a busy one would keep from running.
		p.spin = 0
	}
	if p.rkey, err = strconv.ParseUint(f[2], 0, 64); err != nil {
		return nil, fmt.Errorf("%w: rkey %q", ErrAddress, f[2])
	}
	if p.base, err = strconv.ParseUint(f[3], 0, 64); err != nil {
		return nil, fmt.Errorf("%w: base %q", ErrAddress, f[3])
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if p.mem, err = dev.Alloc(bufferBytes, rdma.AllocOptions{Name: "kvctl-perf-local"}); err != nil {
		return nil, err
	}
	if p.pd, err = dev.AllocPD(); err != nil {
		return nil, err
	}
	if p.mr, err = p.pd.RegMR(p.mem, 0, bufferBytes, rdma.AccessLocal); err != nil {
		return nil, err
	}
	if p.cq, err = dev.CreateCQ(256); err != nil {
		return nil, err
	}
	if p.qp, err = dev.Dial(ctx, p.pd, p.cq, p.addr, []byte(plain)); err != nil {
		return nil, err
	}
	return p, nil
}

// Close gives back all but the device.
func (p *Conn) Close() error {
	var errs []error
	p.timer.Stop()
	if p.qp != nil {
		errs = append(errs, p.qp.Close())
	}
	if p.cq != nil {
		errs = append(errs, p.cq.Close())
	}
	if p.mr != nil {
		errs = append(errs, p.mr.Deregister())
	}
	if p.pd != nil {
		errs = append(errs, p.pd.Dealloc())
	}
	if p.mem != nil {
		errs = append(errs, p.mem.Free())
	}
	return errors.Join(errs...)
}

// chain makes the WRs of one doorbell with n verbs; only the last is signaled.
// half chooses the half of the buffer, so that two chains can be under way.
func (p *Conn) chain(c Case, n, half int) []rdma.WR {
	wrs := make([]rdma.WR, n)
	for i := range wrs {
		off := half*Region + i*((c.Bytes+63)&^63)%Region
		if off+c.Bytes > (half+1)*Region {
			off = half * Region
		}
		w := &wrs[i]
		*w = rdma.WR{ID: uint64(half), Op: c.Op, Local: p.mr.Bytes()[off : off+c.Bytes : off+c.Bytes],
			LKey:       p.mr.LKey(),
			RemoteAddr: p.base + uint64(off-half*Region), RKey: p.rkey, Swap: 1}
		if c.Op.IsAtomic() {
			w.RemoteAddr = p.base
		}
	}
	wrs[n-1].Flags = rdma.Signaled
	return wrs
}

// Spin is long against any adapter's latency.
const Spin = time.Millisecond

// wait takes one completion. It polls for p.spin, and then sleeps until there may
// be one; the clock is read now and then only.
func (p *Conn) wait(ctx context.Context, limit time.Duration) error {
	var began time.Duration
	for polls := 0; ; polls++ {
		if p.cq.Poll(p.wcs[:]) == 1 {
			if p.wcs[0].Status != driver.Success {
				return &rdma.WCError{WC: p.wcs[0]}
			}
			return nil
		}
		if p.spin > 0 {
			if polls%32 != 0 {
				continue
			}
			now := time.Since(p.begin)
			if polls == 0 {
				began = now
			}
			if now-began < p.spin {
				continue
			}
		}
		p.timer.Reset(limit)
		select {
		case <-p.cq.Ready():
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-p.timer.C:
			return fmt.Errorf("no completion: %w", context.DeadlineExceeded)
		}
	}
}

// latency times iters runs of f behind a tenth as many to warm up. A run lasts
// from the end of the one before to its own: the clock is read once a run, as
// perftest does, and nothing else happens in between.
func (p *Conn) latency(iters int, f func() error) (*hdrhistogram.Histogram, error) {
	h := hdrhistogram.New(1, int64(time.Minute), 3)
	var before usage
	for i := -iters / 10; i < iters; {
		until := iters
		if i < 0 {
			until = 0
		} else if i == 0 {
			before = usedSoFar()
		}
		batch := p.stamps[:min(until-i, len(p.stamps))]
		last := int64(time.Since(p.begin))
		for j := range batch {
			if err := f(); err != nil {
				return nil, err
			}
			batch[j] = int64(time.Since(p.begin))
		}
		for _, stamp := range batch {
			if i >= 0 {
				_ = h.RecordValue(stamp - last)
			}
			last = stamp
			i++
		}
	}
	p.used = usedSoFar().since(before)
	return h, nil
}

// usage is what this process has done so far.
type usage struct {
	cgoCalls, switches int64
	cpu                time.Duration
}

func usedSoFar() usage {
	u := usage{cgoCalls: runtime.NumCgoCall()}
	var r syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &r) == nil { // it fails for other arguments alone
		u.switches, u.cpu = r.Nvcsw+r.Nivcsw, time.Duration(r.Utime.Nano()+r.Stime.Nano())
	}
	return u
}

func (u usage) since(b usage) usage {
	return usage{u.cgoCalls - b.cgoCalls, u.switches - b.switches, u.cpu - b.cpu}
}

// take copies the latencies of p's runs, and what they used; each is the time of per verbs.
func (r *Result) take(p *Conn, h *hdrhistogram.Histogram, per int64) {
	each := func(n int64) float64 { return float64(n) / float64(h.TotalCount()*per) }
	r.CgoCalls, r.Switches, r.CPUNanos = each(p.used.cgoCalls), each(p.used.switches), each(int64(p.used.cpu))
	r.P10Nanos = h.ValueAtQuantile(10) / per
	r.MinNanos, r.MedianNanos, r.P99Nanos = h.Min()/per, h.ValueAtQuantile(50)/per, h.ValueAtQuantile(99)/per
	r.AvgNanos = h.Mean() / float64(per)
}

// minBandwidthTime is how long bandwidth is measured at least; the iterations
// asked for may be over much sooner.
const minBandwidthTime = 100 * time.Millisecond

// Measure measures c. limit bounds the wait for one completion.
func (p *Conn) Measure(ctx context.Context, c Case, limit time.Duration) (Result, error) {
	if c.PingPong {
		return p.pingpong(ctx, c, limit)
	}
	return p.oneWay(ctx, c, limit)
}

// oneWay measures verbs from this side alone.
func (p *Conn) oneWay(ctx context.Context, c Case, limit time.Duration) (Result, error) {
	r := Result{Verb: c.String(), Bytes: c.Bytes, Iterations: c.Iters, Depth: c.Depth}
	one := p.chain(c, 1, 0)
	h, err := p.latency(c.Iters, func() error {
		if _, err := p.qp.PostSend(one); err != nil {
			return err
		}
		return p.wait(ctx, limit)
	})
	if err != nil {
		return r, err
	}
	r.take(p, h, 1)

	// Two chains are under way, so that the wire does not idle between doorbells.
	chains := [2][]rdma.WR{p.chain(c, c.Depth, 0), p.chain(c, c.Depth, 1)}
	begin, posted, done := time.Now(), 0, 0
	var busy [2]bool
	for half := 0; posted == 0 || done < posted; half ^= 1 {
		if busy[half] {
			if err := p.wait(ctx, limit); err != nil {
				return r, err
			}
			done += c.Depth
			busy[half] = false
		}
		if posted < c.Iters || time.Since(begin) < minBandwidthTime {
			if _, err := p.qp.PostSend(chains[half]); err != nil {
				return r, err
			}
			posted += c.Depth
			busy[half] = true
		}
	}
	sec := time.Since(begin).Seconds()
	r.VerbsPerSec = float64(done) / sec
	r.MiBPerSec = r.VerbsPerSec * float64(c.Bytes) / (1 << 20)
	return r, nil
}
