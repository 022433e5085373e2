package bench

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// envBench says how a benchmark runs: not at all without it; "smoke": small, for seconds,
// without a verdict on speed, to see that it still works; otherwise in full.
const envBench = "KVD_BENCH"

// gated skips a benchmark that nobody asked for. target is the make target that runs it.
func gated(t *testing.T, target string) {
	t.Helper()
	if os.Getenv(envBench) == "" {
		t.Skipf("%s is not set; run make %s", envBench, target)
	}
}

func smoke() bool { return os.Getenv(envBench) == "smoke" }

// scaled is full, or small in a smoke run.
func scaled[T any](full, small T) T {
	if smoke() {
		return small
	}
	return full
}

// report is a table of what was measured of ours and of another.
type report struct {
	tb   testing.TB
	rows []row
}

type row struct {
	what        string
	ours, other string
	ratio       float64
	want        *target // nil: none
}

// target is what a ratio should be.
type target struct {
	sign string // ">=" or "<="
	than float64
}

func atLeast(v float64) *target { return &target{">=", v} }
func atMost(v float64) *target  { return &target{"<=", v} }

func (g *target) met(ratio float64) bool {
	if g.sign == "<=" {
		return ratio <= g.than
	}
	return ratio >= g.than
}

// add adds a row. Figures that cannot be fail the test, slow ones do not.
func (r *report) add(what string, show func(float64) string, ours, other, ratio float64, want *target) {
	r.tb.Helper()
	for _, v := range []float64{ours, other, ratio} {
		if !(v > 0) || math.IsInf(v, 0) {
			r.tb.Errorf("%s: ours is %v, the other's %v, the ratio %v: want numbers above 0", what, ours, other, ratio)
			break
		}
	}
	if slices.ContainsFunc(r.rows, func(x row) bool { return x.what == what }) {
		r.tb.Errorf("%s: two rows", what)
	}
	r.rows = append(r.rows, row{what, show(ours), show(other), ratio, want})
}

// part runs a part of a benchmark as a subtest, which has to add rows.
func (r *report) part(t *testing.T, name string, f func(*testing.T)) {
	t.Run(name, func(t *testing.T) {
		n := len(r.rows)
		f(t)
		if len(r.rows) == n && !t.Failed() {
			t.Error("no rows")
		}
	})
}

func (r *report) print(began time.Time) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	defer w.Flush()
	fmt.Fprintf(w, "\n%s\n\n", machine(began))
	fmt.Fprintln(w, "what\tkvd\tother\tratio\ttarget\t\t")
	for _, x := range r.rows {
		want, verdict := "", ""
		if x.want != nil {
			want = fmt.Sprintf("%s %.4g", x.want.sign, x.want.than)
			switch {
			case smoke():
				verdict = "not judged"
			case x.want.met(x.ratio):
				verdict = "met"
			default:
				verdict = "MISSED"
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.2f\t%s\t%s\t\n", x.what, x.ours, x.other, x.ratio, want, verdict)
	}
}

// rounds is how often rivals take turns.
func rounds() int { return scaled(5, 1) }

// duel is what two measured in turns: ours[i] and other[i] are neighbours in time, so that
// what else the machine does hits both alike.
type duel[T any] struct{ ours, other []T }

// takeTurns measures ours and other n times each. Each of them goes first every second time.
func takeTurns[T any](n int, ours, other func() T) (d duel[T]) {
	for i := range n {
		if i%2 == 0 {
			d.ours = append(d.ours, ours())
		}
		d.other = append(d.other, other())
		if i%2 == 1 {
			d.ours = append(d.ours, ours())
		}
	}
	return d
}

// row adds one figure of a duel: both medians, and the median of ours divided by the
// other's in each turn.
func (d duel[T]) row(r *report, what string, show func(float64) string, of func(T) float64, want *target) {
	r.tb.Helper()
	var a, b, ratios []float64
	for i := range d.ours {
		x, y := of(d.ours[i]), of(d.other[i])
		a, b, ratios = append(a, x), append(b, y), append(ratios, x/y)
	}
	r.add(what, show, median(a), median(b), median(ratios), want)
}

// contest is takeTurns and row for what measures one figure.
func (r *report) contest(what string, show func(float64) string, want *target, ours, other func() float64) {
	r.tb.Helper()
	takeTurns(rounds(), ours, other).row(r, what, show, func(v float64) float64 { return v }, want)
}

func median[T int64 | float64 | time.Duration](s []T) T {
	s = slices.Clone(s)
	slices.Sort(s)
	return s[len(s)/2]
}

// Figures are nanoseconds, or something a second.

func micros(v float64) string { return fmt.Sprintf("%.1f µs", v/1e3) }
func millis(v float64) string { return fmt.Sprintf("%.1f ms", v/1e6) }
func kops(v float64) string   { return fmt.Sprintf("%.1f k/s", v/1e3) }
func mops(v float64) string   { return fmt.Sprintf("%.2f M/s", v/1e6) }
func gigs(v float64) string   { return fmt.Sprintf("%.2f GB/s", v/1e9) }

// each shows something a second as the time that one takes.
func each(v float64) string { return fmt.Sprintf("%.0f ns", 1e9/v) }

// machine says where the numbers are from. A busy machine is no place to measure: the
// reader should know.
func machine(began time.Time) string {
	avg, _ := os.ReadFile("/proc/loadavg")
	return fmt.Sprintf("%s, %d processors, GOMAXPROCS %d, %s, %s, %.0f s in all, load average at the end %.14s",
		cpuModel(), runtime.NumCPU(),
		runtime.GOMAXPROCS(0), runtime.Version(), began.UTC().Format("2006-01-02 15:04 UTC"),
		time.Since(began).Seconds(), avg)
}

func cpuModel() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return "unknown processor"
}

// judge records what a report complains of.
type judge struct {
	testing.TB
	complaints int
}

func (j *judge) Helper()               {}
func (j *judge) Errorf(string, ...any) { j.complaints++ }

func TestReportRefuses(t *testing.T) {
	for _, tc := range []struct {
		what               string
		ours, other, ratio float64
		bad                bool
	}{
		{"a row", 1, 2, 0.5, false},
		{"nothing measured", 0, 2, 0, true},
		{"a rival that did nothing", 1, 0, math.Inf(1), true},
		{"neither did anything", 0, 0, math.NaN(), true},
		{"time that ran backwards", -1, 2, -0.5, true},
	} {
		j := &judge{TB: t}
		r := &report{tb: j}
		r.add(tc.what, each, tc.ours, tc.other, tc.ratio, atLeast(1))
		if (j.complaints > 0) != tc.bad {
			t.Errorf("%s: %d complaints", tc.what, j.complaints)
		}
		if r.add(tc.what, each, 1, 2, 0.5, nil); !tc.bad && j.complaints == 0 {
			t.Errorf("%s twice: no complaint", tc.what)
		}
	}
}

func TestTurns(t *testing.T) {
	var order string
	d := takeTurns(3, func() float64 {
		order += "a"
		return 4 * float64(len(order))
	}, func() float64 { order += "b"; return float64(len(order)) })
	if want := "abbaab"; order != want {
		t.Errorf("turns were taken in the order %s, want %s", order, want)
	}
	r := &report{tb: t}
	d.row(r, "x", each, func(v float64) float64 { return v }, atMost(4))
	if x := r.rows[0]; x.ratio != 20.0/6 || !x.want.met(x.ratio) {
		t.Errorf("the median ratio is %v, want that of the last turn: %v", x.ratio, d)
	}
}
