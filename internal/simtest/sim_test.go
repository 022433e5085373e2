package simtest

import (
	"flag"
	"fmt"
	"testing"
	"time"
)

var (
	flagScope = flag.String("scope", "", "replay: the scope's name")
	flagSeed  = flag.Uint64("seed", 0, "replay: the random schedule's seed")
	flagRuns  = flag.Int("runs", 0, "random schedules of each scope; 0: the default")
)

func k(v Verb, key int) Step { return Step{v, key} }

// scopes are small enough to be searched exhaustively.
var scopes = map[string]Config{
	"insert-insert": {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}}},
	"add-add":       {Scripts: [][]Step{{k(Add, 0), k(Get, 0)}, {k(Add, 0), k(Del, 0)}}},
	"update-get":    {Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"delete-insert": {Scripts: [][]Step{{k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"delete-delete": {Scripts: [][]Step{{k(Del, 0), k(Add, 0)}, {k(Del, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"cas-cas":       {Scripts: [][]Step{{k(CAS, 0), k(Get, 0)}, {k(CAS, 0), k(Put, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"put-cas":       {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Get, 0), k(CAS, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"incr-incr":     {Scripts: [][]Step{{k(Incr, 0), k(Incr, 0)}, {k(Incr, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"same-fp":       {Scripts: [][]Step{{k(Put, 0), k(Get, 1)}, {k(Put, 1), k(Get, 0)}}},
	"crash-insert":  {Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Put, 0), k(Get, 0)}}, Crashes: 1},
	"crash-delete":  {Scripts: [][]Step{{k(Del, 0), k(Put, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true, Crashes: 1},
	"fail-update":   {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true, Failures: 1},
	"fail-insert":   {Scripts: [][]Step{{k(Add, 0), k(Get, 0)}, {k(Del, 0), k(Get, 0)}}, Failures: 1},
	"deadline":      {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Get, 0), k(Put, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true, Deadlines: 1},
	"reuse":         {Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true, Units: 2, Epochs: 2},
	"r2-update-get": {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-insert":     {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Add, 0), k(Get, 0)}}},
	"r2-cas-get":    {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(CAS, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
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

func replayHint(scope string, seed uint64) string {
	return fmt.Sprintf("replay: go test ./internal/simtest -run TestReplay -scope %s -seed %d", scope, seed)
}

func TestExhaustive(t *testing.T) {
	limit := 150_000
	if testing.Short() {
		limit = 5_000
	}
	for name, cfg := range scopes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			res, err := Exhaust(cfg, limit)
			if err != nil {
				t.Fatal(err)
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
