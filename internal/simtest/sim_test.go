package simtest

import (
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"
)

var (
	flagScope  = flag.String("scope", "", "replay: the scope's name")
	flagSeed   = flag.Uint64("seed", 0, "replay: the random schedule's seed")
	flagStates = flag.Int("states", 0, "states of each exhaustive scope at most; 0: the default")
	flagRuns   = flag.Int("runs", 0, "random schedules of each scope; 0: the default")
)

func k(v Verb, key int) Step { return Step{v, key} }

// scopes are small enough to be searched exhaustively.
var scopes = map[string]Config{
	"insert-insert":   {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}}},
	"add-add":         {Scripts: [][]Step{{k(Add, 0), k(Get, 0)}, {k(Add, 0), k(Del, 0)}}},
	"update-get":      {Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"delete-insert":   {Scripts: [][]Step{{k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"delete-delete":   {Scripts: [][]Step{{k(Del, 0), k(Add, 0)}, {k(Del, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"cas-cas":         {Scripts: [][]Step{{k(CAS, 0), k(Get, 0)}, {k(CAS, 0), k(Put, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"put-cas":         {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Get, 0), k(CAS, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"incr-incr":       {Scripts: [][]Step{{k(Incr, 0), k(Incr, 0)}, {k(Incr, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"same-fp":         {Scripts: [][]Step{{k(Put, 0), k(Get, 1)}, {k(Put, 1), k(Get, 0)}}},
	"crash-insert":    {Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Put, 0), k(Get, 0)}}, Crashes: 1},
	"crash-delete":    {Scripts: [][]Step{{k(Del, 0), k(Put, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true, Crashes: 1},
	"fail-update":     {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true, Failures: 1},
	"fail-insert":     {Scripts: [][]Step{{k(Add, 0), k(Get, 0)}, {k(Del, 0), k(Get, 0)}}, Failures: 1},
	"deadline":        {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Get, 0), k(Put, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true, Deadlines: 1},
	"reuse":           {Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true, Units: 2, Epochs: 2},
	"cached-negative": {Scripts: [][]Step{{k(Del, 0), k(Put, 2), k(Put, 0), k(Del, 2)}, {k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-update-get":   {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-insert":       {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Add, 0), k(Get, 0)}}},
	"r2-cas-get":      {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(CAS, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
}

// wide scopes are searched at random.
var wide = map[string]Config{
	"mixed": {Scripts: [][]Step{
		{k(Put, 0), k(Get, 1), k(Del, 0), k(Add, 1), k(Get, 0)},
		{k(Put, 1), k(Get, 0), k(CAS, 0), k(Del, 1), k(Put, 0)},
		{k(Get, 0), k(DelIf, 0), k(Put, 1), k(Get, 1), k(CAS, 1)}},
		Setup: []Step{k(Put, 0)}, Warm: true, WritePieces: 2, ReadPieces: 2},
	"faults": {Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Add, 0), k(Get, 0)},
		{k(Put, 0), k(Get, 0), k(Put, 0), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Put, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Crashes: 1, Deadlines: 2, Failures: 2, WritePieces: 2},
	"reuse": {Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0), k(Put, 0)},
		{k(Get, 0), k(Get, 0), k(Put, 0), k(Get, 0), k(Put, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Units: 3, Epochs: 12, WritePieces: 2, ReadPieces: 2},
	"reuse-faults": {Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0), k(Put, 1)},
		{k(Get, 0), k(Put, 0), k(Put, 0), k(Get, 0), k(Del, 0)},
		{k(Get, 0), k(Get, 0), k(Put, 1), k(Get, 1)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Units: 4, Epochs: 12, Crashes: 1, Deadlines: 2, Failures: 1, WritePieces: 2},
	"r2-faults": {Replicas: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0)},
		{k(Put, 0), k(Get, 0), k(Put, 0), k(Get, 0)},
		{k(CAS, 0), k(Get, 0), k(Add, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Units: 3, Epochs: 10, Deadlines: 2, Failures: 1, WritePieces: 2},
	"r2-insert": {Replicas: 2, Scripts: [][]Step{
		{k(Put, 2), k(Put, 0), k(Del, 0), k(Put, 0)},
		{k(Put, 0), k(Get, 0), k(Del, 0), k(Get, 0)},
		{k(Get, 0), k(Add, 0), k(Get, 0), k(Add, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Crashes: 1},
	"r2-mixed": {Replicas: 2, Scripts: [][]Step{
		{k(Put, 0), k(Get, 0), k(Del, 0), k(Add, 0)},
		{k(Put, 0), k(Get, 0), k(CAS, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 1), k(Get, 0), k(Get, 1)}},
		Setup: []Step{k(Put, 0)}, Warm: true, WritePieces: 2},
	"r2-reuse": {Replicas: 2, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Put, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Units: 3, Epochs: 10, WritePieces: 2},
}

// renewals is one round of the reclaim epoch: E advances and every client of two
// learns of it and reports.
var renewals = []string{"c0 E advances", "c0 sends renewal", "c0 renewal served", "c0 renewal answered",
	"c1 sends renewal", "c1 renewal served", "c1 renewal answered"}

type scenario struct {
	cfg   Config
	steps []string
}

// scenarios are schedules that random search rarely meets.
var scenarios = map[string]scenario{
	// c1's read has answered at its deadline but its READs are still queued;
	// the place that it reads must not be reused.
	"answered-read-still-queued": {
		Config{Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true, Units: 2, Epochs: 6, Deadlines: 1},
		slices.Concat([]string{"c1 begins", "c1 reaches", "c0 begins", "c0*", "c0 begins", "c0*"},
			renewals, []string{"c0*"}, renewals, []string{"c0*"}, renewals, []string{"c0*"}, renewals, []string{"c0*"})},
	// c0's insert took effect, the completion says otherwise, and somebody has
	// deleted the key before c0 looks: its word must not be linked again.
	"insert-resolved-after-delete": {
		Config{Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Del, 0), k(Get, 0)}}, Failures: 1},
		[]string{"c0 begins", "c0 is granted", "c0 connects", "c0 qp", "c0 qp", "c0 qp", "c0 fails after", "c0 qp",
			"c1 begins", "c1*", "c1 begins", "c1*", "c0 connects", "c0*", "c1 begins", "c1*"}},
	// A deleter dies between A and P: P still shows the key in slot 1. The insert
	// that follows takes slot 0 and must first bring slot 1 up to date.
	"r2-insert-beside-a-half-deleted-key": {
		Config{Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Del, 0)}, {k(Get, 0)}},
			Setup: []Step{k(Put, 2), k(Put, 0), k(Del, 2)}, Warm: true, Crashes: 1},
		[]string{"c1 begins", "c1 connects", "c1 qp", "c1 crashes", "c1 lease", "c1 is fenced", "c0 begins", "c0*", "c2 begins", "c2*"}},
	// The lock's owner is dead but not fenced: its queued CAS must not land in
	// the group of a later owner.
	"lock-owner-not-fenced": {
		Config{Scripts: [][]Step{{k(Put, 0)}, {k(Put, 0), k(Get, 0), k(Get, 0)}}, Crashes: 1},
		[]string{"c0 begins", "c0 is granted", "c0 connects", "c0 qp", "c0 qp", "c0 qp", "c0 crashes", "c0 lease",
			"c1 begins", "c1 is granted", "c1 connects", "c1*", "c1 wakes", "c1*", "c0 qp", "c0 qp", "c0 is fenced", "c1*"}},
}

// TestScenarios runs the directed schedules.
func TestScenarios(t *testing.T) {
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			if err := Directed(s.cfg, s.steps); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func replayHint(scope string, seed uint64) string {
	return fmt.Sprintf("replay: go test ./internal/simtest -run TestReplay -scope %s -seed %d", scope, seed)
}

func TestExhaustive(t *testing.T) {
	limit := *flagStates
	if limit == 0 {
		limit = 30_000
		if testing.Short() {
			limit = 2_000
		}
	}
	for name, cfg := range scopes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			res, err := Exhaust(cfg, limit)
			if err != nil {
				t.Fatal(err)
			}
			if cfg.Replicas <= 1 && cfg.Crashes+cfg.Deadlines+cfg.Failures+cfg.Epochs == 0 && limit >= 30_000 && !res.Complete {
				t.Errorf("not exhausted within %d states", limit)
			}
			t.Logf("%d states, %d ends, complete %v, %v", res.States, res.Schedules, res.Complete, time.Since(began).Round(time.Millisecond))
		})
	}
}

func TestRandom(t *testing.T) {
	runs := *flagRuns
	if runs == 0 {
		runs = 4_000
		if testing.Short() {
			runs = 400
		}
	}
	for name, cfg := range wide {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(runs) {
				if err := Random(cfg, seed); err != nil {
					t.Fatalf("%s\n%v", replayHint(name, seed), err)
				}
			}
		})
	}
}

// TestReplay runs one seed of one wide scope again.
func TestReplay(t *testing.T) {
	if *flagScope == "" {
		return // only by hand
	}
	cfg, ok := wide[*flagScope]
	if !ok {
		t.Fatalf("no scope %q", *flagScope)
	}
	if err := Random(cfg, *flagSeed); err != nil {
		t.Fatal(err)
	}
}
