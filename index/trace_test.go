package index_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// TestTraces replays the interleavings in testdata/traces, a round trip at a
// time, and prints every access with what it found. Commands:
//
//	new replicas=N [cache]  an empty placement group
//	run [quiet]           one operation a line, each to its end: "c1 put k v"
//	start                 begin operations, one a line
//	step c1 c2:1 …        one round trip each; c2:1 performs one access of it only
//	finish c1 …           go on to the end
//	fail c1 before|after  a round trip whose accesses fail before or after their effect
//	fail c1 r1            one whose accesses to replica 1 fail without effect
//	giveup c1             end the operation from outside
//	fence c1              its fence is confirmed; it does nothing more
//	forget c1 key         drop a hint
//	memory c1 n           allocations that succeed from now on
//	fill home|stash n     occupy slots
//	state k FROZEN [r=0]  change the state of a key's slot
//	header home SPLIT     say in the group's header that it was split, on every replica
//	moving split|migrate  the map has the shard move, within its placement group
//	moved                 the map names the child alone, for what has moved
//	joining [retains]     the last replica is a joiner, all of it zero, or with what it held
//	clock ms              the Unix time
//	route off|on          whether the map has an active placement group
//	corrupt k [r=N] [key] flip a bit of the key's value, or of the key, on every replica or on one
//	twice k               the key's word is in another slot of its group, too
//	lose                  objects are not where they were
//	volume n away|lost    a volume is out of reach, or given up
//	recall n              extent n is recalled
//	show                  what the replicas hold
func TestTraces(t *testing.T) {
	covered := map[string]bool{}
	files, err := os.ReadDir("testdata/traces")
	if err != nil {
		t.Fatal(err)
	}
	ran := 0
	datadriven.Walk(t, "testdata/traces", func(t *testing.T, path string) {
		ran++
		w := newWorld(1, 64)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				var replicas int
				units := 1024
				d.ScanArgs(t, "replicas", &replicas)
				d.MaybeScanArgs(t, "units", &units)
				w = newWorld(uint8(replicas), uint32(units))
				if d.HasArg("cache") {
					w.asCache()
				}
				w.pg.Speculative = d.HasArg("speculative")
				w.covered = covered
				return ""
			}
			out, err := w.command(d)
			if err != nil {
				d.Fatalf(t, "%v", err)
			}
			return out
		})
	})
	if ran < len(files) {
		return // -run chose some of them
	}
	for _, s := range index.Steps() {
		// These only say where a sync leads back to; no round trip is their own.
		if !covered[s.String()] && s.String() != "sync-group" && s.String() != "split-seen" &&
			s.String() != "sync-status" {
			t.Errorf("no trace reaches step %v", s)
		}
	}
}

func (w *world) command(d *datadriven.TestData) (string, error) {
	var b strings.Builder
	arg := func(i int) string {
		if i < len(d.CmdArgs) {
			return d.CmdArgs[i].String()
		}
		return ""
	}
	named := func(s string) *client {
		var id uint32
		_, _ = fmt.Sscanf(s, "c%d", &id)
		return w.client(id)
	}
	print := func(c *client, lines []string) {
		for i, l := range lines {
			if strings.HasPrefix(l, "  ") {
				if i == 0 {
					fmt.Fprintf(&b, "c%d\n", c.id)
				}
				fmt.Fprintf(&b, "  %s\n", strings.TrimRight(l, " "))
			} else {
				fmt.Fprintf(&b, "c%d %v %s: %s\n", c.id, c.op.Kind, c.op.Key, l)
			}
		}
	}
	ops := func(f func(c *client) error) error {
		for line := range strings.Lines(d.Input) {
			words := strings.Fields(line)
			c := named(words[0])
			if err := c.start(words[1:]); err != nil {
				return err
			}
			if err := f(c); err != nil {
				return err
			}
		}
		return nil
	}
	switch d.Cmd {
	case "run":
		err := ops(func(c *client) error {
			lines, err := c.run(60)
			if arg(0) == "quiet" {
				lines = lines[len(lines)-1:]
			}
			print(c, lines)
			return err
		})
		return b.String(), err
	case "start":
		return "", ops(func(*client) error { return nil })
	case "step":
		for i := range d.CmdArgs {
			name, part, _ := strings.Cut(arg(i), ":")
			limit := 1 << 30
			_, _ = fmt.Sscan(part, &limit)
			c := named(name)
			lines, _ := c.advance(limit, noFault)
			print(c, lines)
		}
	case "finish":
		for i := range d.CmdArgs {
			c := named(arg(i))
			lines, err := c.run(60)
			print(c, lines)
			if err != nil {
				return "", err
			}
		}
	case "fail":
		f, ok := map[string]fault{"before": failBefore, "after": failAfter, "r0": failR0, "r1": failR1}[arg(1)]
		if !ok {
			return "", fmt.Errorf("fail %q", arg(1))
		}
		c := named(arg(0))
		lines, _ := c.advance(1<<30, f)
		print(c, lines)
	case "giveup":
		c := named(arg(0))
		if a := c.op.Fail(errors.New("given up")); a != index.Done {
			return "", fmt.Errorf("Fail: action %d", a)
		}
		lines := append(c.takePlaces(), c.noWait()...)
		print(c, append(lines, c.answer()))
	case "fence":
		w.fenced[named(arg(0)).id] = true
	case "forget":
		delete(named(arg(0)).hints, arg(1))
	case "memory":
		_, _ = fmt.Sscan(arg(1), &named(arg(0)).memory)
	case "clock":
		_, _ = fmt.Sscan(arg(0), &w.millis)
	case "route":
		w.noRoute = arg(0) == "off"
	case "fill":
		g := home()
		if arg(0) == "stash" {
			g = stash()
		}
		var n int
		_, _ = fmt.Sscan(arg(1), &n)
		w.fill(g, n)
	case "state":
		to := layout.State(slices.Index([]string{"EMPTY", "LIVE", "FROZEN", "MOVED"}, arg(1)))
		for r := range w.pg.Replicas {
			if g, i, x, ok := w.find(r, arg(0)); ok {
				w.setSlot(r, g, i, x.WithState(to))
			}
		}
	case "header":
		for r := range w.pg.Replicas {
			binary.LittleEndian.PutUint64(w.region[r][home():], uint64(w.groupAt(r, home()).Header().WithSplit(1)))
		}
	case "moving":
		moveCase{split: arg(0) == "split"}.begin(w)
	case "moved":
		w.moved = true
	case "joining":
		if w.pg.Joining = true; arg(0) != "retains" {
			clear(w.region[w.pg.Replicas-1])
		}
	case "corrupt":
		_, one, any := strings.Cut(arg(1), "r=")
		at := layout.RecordHeaderSize + uint64(len(arg(0)))
		if d.HasArg("key") {
			at--
		}
		for r := range w.pg.Replicas {
			if _, _, x, ok := w.find(r, arg(0)); ok && (!any || one == fmt.Sprint(r)) {
				w.region[r][x.Off()+at] ^= 1
			}
		}
	case "lose":
		clear(w.objects)
	case "volume":
		var id uint32
		_, _ = fmt.Sscan(arg(0), &id)
		w.volumes[id] = map[string]index.VolumeState{"away": index.VolumeAway, "lost": index.VolumeLost}[arg(1)]
	case "twice":
		for r := range w.pg.Replicas {
			if g, i, x, ok := w.find(r, arg(0)); ok {
				w.setSlot(r, g, i+1, x)
			}
		}
	case "recall":
		var extent uint32
		_, _ = fmt.Sscan(arg(0), &extent)
		w.pg.Recalled = []uint32{extent}
	case "show":
		for r := range w.pg.Replicas {
			g := w.groupAt(r, home())
			lock := "free"
			if l := g.Lock(); l != 0 {
				lock = fmt.Sprintf("s%d#%d", l.Session(), l.Stamp())
			}
			fmt.Fprintf(&b, "R%d lock %s, %s\n", r, lock, showGroup(g))
		}
	default:
		return "", fmt.Errorf("unknown command %q", d.Cmd)
	}
	return b.String(), nil
}

// TestProtocolNamesEveryStep keeps docs/protocol.md's table complete.
func TestProtocolNamesEveryStep(t *testing.T) {
	doc, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range index.Steps() {
		if !strings.Contains(string(doc), "`"+s.String()+"`") {
			t.Errorf("docs/protocol.md does not name step %v", s)
		}
	}
}
