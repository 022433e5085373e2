package simtest

import (
	"flag"
	"fmt"
	"runtime/debug"
	"testing"
	"time"

	"github.com/kvd-project/kvd/index"
)

var (
	flagScope = flag.String("scope", "", "replay: the scope's name")
	flagSync  = flag.Bool("sync", false, "replay: the provider is synchronous")
	flagSeed  = flag.Uint64("seed", 0, "replay: the random schedule's seed; TestRandom: the first one of a scope "+
		"that is not heavy")
	flagStates = flag.Int("states", 0, "states of each exhaustive scope at most; 0: the default")
	flagRuns   = flag.Int("runs", 0, "random schedules of each scope; 0: the default")
)

// Worlds are built and dropped by the hundred thousand.
func init() { debug.SetGCPercent(400) }

func k(v Verb, key int) Step { return Step{v, key} }

// scopes are small enough to be searched exhaustively.
var scopes = map[string]Config{
	"insert-insert": {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}}},
	"add-add":       {Scripts: [][]Step{{k(Add, 0), k(Get, 0)}, {k(Add, 0), k(Del, 0)}}},
	"update-get": {Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true},
	"delete-insert": {Scripts: [][]Step{{k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true},
	"delete-delete": {Scripts: [][]Step{{k(Del, 0), k(Add, 0)}, {k(Del, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true},
	"cas-cas": {Scripts: [][]Step{{k(CAS, 0), k(Get, 0)}, {k(CAS, 0), k(Put, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true},
	"put-cas": {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Get, 0), k(CAS, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true},
	"incr-incr": {Scripts: [][]Step{{k(Incr, 0), k(Incr, 0)}, {k(Incr, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true},
	"give-put": {Scripts: [][]Step{{k(Give, 0), k(Get, 0)}, {k(Put, 0), k(Give, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"give-give": {Scripts: [][]Step{{k(Give, 0), k(Give, 0)}, {k(Give, 0), k(Del, 0), k(Give, 0)}}},
	"r2-give-cas": {Replicas: 2, Scripts: [][]Step{{k(Give, 0)}, {k(CAS, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true},
	"same-fp":      {Scripts: [][]Step{{k(Put, 0), k(Get, 1)}, {k(Put, 1), k(Get, 0)}}},
	"crash-insert": {Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Put, 0), k(Get, 0)}}, Crashes: 1},
	"crash-delete": {Scripts: [][]Step{{k(Del, 0), k(Put, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true, Crashes: 1},
	"fail-update": {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true, Failures: 1},
	"fail-insert": {Scripts: [][]Step{{k(Add, 0), k(Get, 0)}, {k(Del, 0), k(Get, 0)}}, Failures: 1},
	"deadline": {Scripts: [][]Step{{k(Put, 0), k(Get, 0)}, {k(Get, 0), k(Put, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true, Deadlines: 1},
	"reuse": {Scripts: [][]Step{{k(Put, 0), k(Put, 0)}, {k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true,
		Units: 2, Epochs: 2},
	"cached-negative": {Scripts: [][]Step{{k(Del, 0), k(Put, 2), k(Put, 0), k(Del, 2)}, {k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-update-get": {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true},
	"r2-insert": {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(Add, 0), k(Get, 0)}}},
	"r2-cas-get": {Replicas: 2, Scripts: [][]Step{{k(Put, 0)}, {k(CAS, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true},
	"r2-loss": {Replicas: 2, NodeCrashes: 1, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-silence": {Replicas: 2, NodePauses: 1, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-join": {Replicas: 2, Missing: 1, Janitors: 1, Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-join-delete": {Replicas: 2, Missing: 1, Janitors: 1, Scripts: [][]Step{{k(Del, 0)}, {k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"split-update": {Children: 1, Janitors: 1, Acts: []Act{{Split, 1, 0}},
		Scripts: [][]Step{{k(Put, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}, Warm: true},
	"split-insert": {Children: 1, Janitors: 1, Acts: []Act{{Split, 1, 0}},
		Scripts: [][]Step{{k(Put, 12)}, {k(Get, 12)}}, Setup: []Step{k(Put, 10)}},
	"r2-split-update": {Replicas: 2, Children: 1, Janitors: 1, Acts: []Act{{Split, 1, 0}},
		Scripts: [][]Step{{k(Put, 10)}, {k(Get, 10)}}, Setup: []Step{k(Put, 10)}, Warm: true},
	"r2-split-insert": {Replicas: 2, Children: 1, Janitors: 1, Acts: []Act{{Split, 1, 0}},
		Scripts: [][]Step{{k(Put, 12)}, {k(Get, 12)}}, Setup: []Step{k(Put, 10)}},
	"grow-update": {Children: 2, Janitors: 1, Acts: []Act{{Grow, 1, 2}},
		Scripts: [][]Step{{k(Put, 80)}, {k(Get, 80)}}, Setup: []Step{k(Put, 80)}, Warm: true},
	"grow-insert": {Children: 2, Janitors: 1, Acts: []Act{{Grow, 1, 2}},
		Scripts: [][]Step{{k(Put, 82)}, {k(Get, 82)}}, Setup: []Step{k(Put, 0)}},
	"r2-grow-update": {Replicas: 2, Children: 2, Janitors: 1, Acts: []Act{{Grow, 1, 2}},
		Scripts: [][]Step{{k(Put, 80)}, {k(Get, 80)}}, Setup: []Step{k(Put, 80)}, Warm: true},
	"recall-update": {TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Units: 3, Epochs: 2,
		Scripts: [][]Step{{k(Put, 0)}, {k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-recall-write": {Replicas: 2, TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Units: 3,
		Scripts: [][]Step{{k(Put, 0)}, {k(Del, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"evict-put": {Cache: true, Scripts: [][]Step{{k(Evict, 0), k(Get, 0)}, {k(Put, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"evict-delete": {Cache: true, Scripts: [][]Step{{k(Evict, 0), k(Add, 0)}, {k(Del, 0), k(GetIf, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"evict-fail": {Cache: true, Scripts: [][]Step{{k(Evict, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)},
		Warm: true, Failures: 1},
	"r2-evict-put": {Cache: true, Replicas: 2, Scripts: [][]Step{{k(Evict, 0)}, {k(Put, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-evict-get": {Cache: true, Replicas: 2, Scripts: [][]Step{{k(Evict, 0), k(Put, 0)}, {k(Get, 0), k(GetIf, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-evict-crash": {Cache: true, Replicas: 2, Scripts: [][]Step{{k(Evict, 0)}, {k(DelIf, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Crashes: 1},
}

// heavy scopes are searched by so much less.
var heavy = map[string]int{"everything": 8, "r3-everything": 8, "r2-migrate": 4, "r3-loss": 4, "deletes": 4,
	"evict": 4, "r2-evict": 2, "r2-evict-loss": 8, "r3-evict": 4, "r2-evict-split": 16, "r2-evict-recall": 8,
	"evict-reuse": 4, "evict-lanes": 8,
	"evict-stash": 4, "expire": 4, "expire-store": 4, "expire-words": 4,
	"home": 2, "home-r2": 4, "home-close": 4, "home-tight": 4, "home-slow": 4, "home-recall": 4, "home-recall-r2": 8,
	"home-reclaim": 8}

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
		Setup: []Step{k(Put, 0)}, Warm: true, Units: 4, Epochs: 12, Crashes: 1, Deadlines: 2, Failures: 1,
		WritePieces: 2},
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
	// Records rot in one copy, and are mended by whoever meets them.
	"r2-rot": {Replicas: 2, Rots: 2, Deadlines: 1, Failures: 1, Scripts: [][]Step{
		{k(Put, 0), k(Get, 0), k(Del, 0), k(Add, 0), k(Get, 0)},
		{k(Get, 0), k(CAS, 0), k(Put, 0), k(Incr, 0), k(Get, 0)},
		{k(Add, 0), k(Get, 0), k(Scan, 0), k(DelIf, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}},
	"r3-rot": {Replicas: 3, Rots: 3, Crashes: 1, Scripts: [][]Step{
		{k(Put, 0), k(Get, 0), k(Del, 0), k(Add, 0)},
		{k(Get, 0), k(Add, 0), k(Incr, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}},
	"r2-rot-reuse": {Replicas: 2, Rots: 3, Units: 4, Epochs: 10, Failures: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0), k(Put, 0)},
		{k(Get, 0), k(Incr, 0), k(Get, 0), k(Add, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}},
	"r2-rot-recall": {Replicas: 2, Rots: 2, TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Units: 6,
		Epochs: 4, Scripts: [][]Step{
			{k(Put, 0), k(Get, 0), k(Add, 1)}, {k(Get, 0), k(Incr, 0), k(Get, 1)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}},
	"r2-rot-split": {Replicas: 2, Rots: 2, Children: 1, Janitors: 1, Acts: []Act{{Split, 1, 0}}, Scripts: [][]Step{
		{k(Put, 10), k(Get, 10), k(Add, 12)}, {k(Get, 10), k(Incr, 10), k(Scan, 0)}},
		Setup: []Step{k(Put, 10), k(Put, 12)}},
	// Copies are lost and made again.
	"r2-loss": {Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1, Scripts: [][]Step{
		{k(Put, 0), k(Get, 0), k(Del, 0), k(Put, 0), k(Get, 0)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 0), k(Add, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-loss-faults": {Replicas: 2, Nodes: 3, Janitors: 2, NodeCrashes: 1, NodePauses: 1, Crashes: 1, Pauses: 1,
		Deadlines: 1, Failures: 1, Leaders: 1,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0), k(Get, 1)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(Add, 1), k(Get, 0)},
			{k(Del, 1), k(Get, 0), k(Put, 1), k(Get, 1), k(Incr, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Units: 6, Epochs: 6, WritePieces: 2},
	"r3-loss": {Replicas: 3, Nodes: 4, Janitors: 2, NodeCrashes: 2, NodePauses: 1, Pauses: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 0)},
		{k(Get, 0), k(Put, 0), k(Get, 0), k(Add, 1)},
		{k(Get, 1), k(CAS, 0), k(Get, 1), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-drain": {Replicas: 2, Nodes: 3, Janitors: 1, Acts: []Act{{Drain, 0, 0}}, Crashes: 1, Scripts: [][]Step{
		{k(Put, 0), k(Get, 0), k(Del, 0), k(Put, 0), k(Get, 0)},
		{k(Get, 0), k(Put, 0), k(CAS, 0), k(Get, 0), k(Add, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	// Shards move.
	"split": {Janitors: 1, Children: 1, Acts: []Act{{Split, 1, 0}}, Scripts: [][]Step{
		{k(Put, 10), k(Get, 0), k(Del, 10), k(Put, 0), k(Put, 10)},
		{k(Get, 10), k(Put, 11), k(CAS, 10), k(Get, 10), k(Add, 10)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"r2-split": {Replicas: 2, Janitors: 2, Children: 1, Acts: []Act{{Split, 1, 0}}, Crashes: 1, Pauses: 1, Leaders: 1,
		Deadlines: 1, Scripts: [][]Step{
			{k(Put, 10), k(Get, 10), k(Del, 10), k(Put, 12)},
			{k(Get, 10), k(Put, 11), k(Put, 10), k(Get, 12)},
			{k(Add, 10), k(CAS, 10), k(Get, 11), k(Get, 10)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"migrate": {Nodes: 2, PGs: 2, Janitors: 2, Children: 1, Acts: []Act{{Migrate, 1, 2}}, Crashes: 1, Scripts: [][]Step{
		{k(Put, 0), k(Get, 0), k(Del, 0), k(Put, 2)},
		{k(Get, 0), k(Put, 1), k(Put, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 10)}, Warm: true},
	"r2-migrate": {Replicas: 2, PGs: 2, Janitors: 2, Children: 1, Acts: []Act{{Migrate, 1, 2}, {Split, 1, 0}},
		Crashes: 1, Pauses: 1, Scripts: [][]Step{
			{k(Put, 0), k(Get, 0), k(Del, 0), k(Put, 2)},
			{k(Get, 0), k(Put, 1), k(Put, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 10)}, Warm: true},
	// Shards grow: a group of the parent is two of the child.
	"grow": {Janitors: 1, Children: 2, Acts: []Act{{Grow, 1, 2}}, Scripts: [][]Step{
		{k(Put, 80), k(Get, 0), k(Del, 80), k(Put, 0), k(Put, 80)},
		{k(Get, 80), k(Put, 81), k(CAS, 80), k(Get, 0), k(Add, 80)}},
		Setup: []Step{k(Put, 80), k(Put, 0)}, Warm: true},
	"r2-grow": {Replicas: 2, Janitors: 2, Children: 6, Acts: []Act{{Grow, 1, 2}, {Split, 2, 0}, {Grow, 2, 4}},
		Crashes: 1, Pauses: 1, Leaders: 1, Deadlines: 1, Scripts: [][]Step{
			{k(Put, 80), k(Get, 0), k(Del, 80), k(Put, 12)},
			{k(Get, 80), k(Put, 81), k(Put, 90), k(Get, 12)},
			{k(Add, 80), k(CAS, 0), k(Get, 81), k(Get, 90)}},
		Setup: []Step{k(Put, 80), k(Put, 0), k(Put, 90)}, Warm: true},
	"r2-grow-loss": {Replicas: 2, Nodes: 3, PGs: 2, Janitors: 2, Children: 4, NodeCrashes: 1, NodePauses: 1,
		Acts: []Act{{Grow, 1, 2}, {Migrate, 2, 2}, {Drain, 0, 0}}, Scripts: [][]Step{
			{k(Put, 80), k(Get, 0), k(Del, 80), k(Put, 82)},
			{k(Get, 80), k(Put, 1), k(Put, 0), k(Get, 82)}},
		Setup: []Step{k(Put, 80), k(Put, 0)}, Warm: true},
	"stash-grow": {Replicas: 2, Fill: 28, Janitors: 2, Children: 2, Acts: []Act{{Grow, 1, 2}}, Crashes: 1,
		Scripts: [][]Step{
			{k(Put, 80), k(Put, 2), k(Del, 80), k(Get, 83)},
			{k(Put, 83), k(Get, 80), k(Put, 80), k(Del, 0)}},
		Setup: []Step{k(Put, 80), k(Put, 0), k(Put, 81)}, Warm: true},
	"scan-grow": {Janitors: 1, Children: 6, Acts: []Act{{Grow, 1, 2}, {Grow, 2, 4}}, Scripts: [][]Step{
		{k(Scan, 0), k(Scan, 0)}, {k(Put, 80), k(Put, 82), k(Put, 0), k(Put, 100)}},
		Setup: []Step{k(Put, 80), k(Put, 0), k(Put, 20)}, Warm: true},
	"recall": {Janitors: 2, TwoExtents: true, Acts: []Act{{Recall, 1, 0}}, Crashes: 1, Pauses: 1, Leaders: 1, Epochs: 6,
		Units: 4, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0), k(Put, 2)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(Put, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"r2-recall": {Replicas: 2, Janitors: 2, TwoExtents: true, Acts: []Act{{Recall, 1, 0}}, Crashes: 1, Epochs: 6,
		Units: 4, Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Del, 0), k(Put, 0), k(Put, 2)},
			{k(Get, 0), k(Put, 0), k(Get, 0), k(Put, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"scrub": {Replicas: 2, Janitors: 1, TwoExtents: true, Acts: []Act{{Scrub, 1, 0}}, Crashes: 1, Scripts: [][]Step{
		{k(Put, 0), k(Del, 0), k(Put, 0)}, {k(Get, 0), k(Put, 0), k(Get, 0)}}, Setup: []Step{k(Put, 0)}, Warm: true},
	"deletes": {Window: 2, Failures: 1, Epochs: 6, Units: 6, Scripts: [][]Step{
		{k(Put, 0), k(Del, 0), k(Del, 0), k(Put, 0), k(Del, 0), k(DelIf, 0)}, {k(Get, 0), k(Put, 0), k(DelIf, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	// Caches.
	"evict": {Cache: true, Scripts: [][]Step{
		{k(Put, 0), k(Evict, 0), k(Put, 1), k(GetIf, 0), k(Add, 0)},
		{k(Get, 0), k(Put, 0), k(Evict, 0), k(GetIf, 0), k(CAS, 0)},
		{k(Del, 0), k(Put, 0), k(GetIf, 0), k(Get, 1), k(Evict, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Crashes: 1, Deadlines: 1, Failures: 1, Pauses: 1, Epochs: 6, Units: 6,
		WritePieces: 2},
	"r2-evict": {Cache: true, Replicas: 2, Scripts: [][]Step{
		{k(Put, 0), k(Evict, 0), k(Put, 0), k(Get, 0)},
		{k(GetIf, 0), k(Put, 0), k(Evict, 0), k(Add, 0)},
		{k(CAS, 0), k(GetIf, 0), k(Incr, 0), k(Del, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true, Crashes: 1, Deadlines: 1, Failures: 1, Epochs: 6, Units: 6,
		WritePieces: 2},
	"r2-evict-loss": {Cache: true, Replicas: 2, Nodes: 3, Janitors: 2, NodeCrashes: 1, NodePauses: 1, Crashes: 1,
		Pauses: 1, Failures: 1, Leaders: 1, Scripts: [][]Step{
			{k(Evict, 0), k(Put, 0), k(Evict, 0), k(Get, 0)},
			{k(Get, 0), k(Put, 0), k(GetIf, 0), k(Add, 1)},
			{k(Put, 1), k(CAS, 0), k(Evict, 1), k(GetIf, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r3-evict": {Cache: true, Replicas: 3, Nodes: 4, Janitors: 1, NodeCrashes: 1, Crashes: 1, Failures: 1,
		Scripts: [][]Step{
			{k(Put, 0), k(Evict, 0), k(Put, 0)},
			{k(Get, 0), k(CAS, 0), k(Evict, 0), k(GetIf, 0)},
			{k(Put, 0), k(Get, 0), k(Del, 0), k(GetIf, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"r2-evict-split": {Cache: true, Replicas: 2, PGs: 2, Janitors: 2, Children: 2,
		Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}}, Crashes: 1, Pauses: 1, Epochs: 4, Units: 6, Scripts: [][]Step{
			{k(Evict, 10), k(Put, 10), k(Evict, 10), k(GetIf, 10)},
			{k(Get, 10), k(Put, 10), k(Evict, 0), k(Add, 10)},
			{k(Put, 11), k(Evict, 11), k(Get, 0), k(Put, 0)}},
		Setup: []Step{k(Put, 10), k(Put, 0)}, Warm: true},
	"r2-evict-recall": {Cache: true, Replicas: 2, Janitors: 2, TwoExtents: true, Acts: []Act{{Recall, 1, 0}},
		Crashes: 1, Epochs: 6, Units: 4, Scripts: [][]Step{
			{k(Put, 0), k(Evict, 0), k(Put, 0), k(Put, 2)},
			{k(Get, 0), k(Put, 0), k(Evict, 2), k(GetIf, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	// Memory is short: who lacks it evicts by itself.
	"evict-reuse": {Cache: true, Replicas: 2, HeapUnits: 6, Units: 3, Epochs: 12, Crashes: 1, Deadlines: 1,
		WritePieces: 2, ReadPieces: 2, Scripts: [][]Step{
			{k(Put, 0), k(Put, 2), k(GetIf, 0), k(Put, 3), k(Put, 0)},
			{k(Put, 1), k(Get, 0), k(Put, 4), k(GetIf, 0), k(Get, 3)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"evict-lanes": {Cache: true, Lanes: 2, Window: 2, Failures: 1, Deadlines: 1, Epochs: 6, Units: 64,
		Scripts: [][]Step{
			{k(Put, 0), k(Evict, 0), k(Del, 0), k(Put, 1), k(Get, 0), k(Evict, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 0), k(Evict, 0), k(GetIf, 0), k(Add, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true},
	// Slots are short.
	"evict-stash": {Cache: true, Replicas: 2, Fill: 29, FillStash: 29, Crashes: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 2), k(Evict, 0), k(GetIf, 3)},
		{k(Put, 3), k(Get, 0), k(Put, 0), k(Put, 4)},
		{k(Get, 2), k(Add, 2), k(Evict, 2), k(Get, 0)}}},
	"expire": {Cache: true, Replicas: 2, Clock: 2, Crashes: 1, Failures: 1, Epochs: 4, Units: 6, Scripts: [][]Step{
		{k(PutEx, 0), k(Expire, 0), k(Put, 1), k(Expire, 0), k(Get, 0)},
		{k(GetIf, 0), k(PutEx, 0), k(GetIf, 0), k(CAS, 0), k(GetIf, 0)},
		{k(PutEx, 1), k(Get, 0), k(Expire, 0), k(Add, 0), k(Evict, 0)}},
		Setup: []Step{k(PutEx, 0), k(Put, 1)}, Warm: true},
	// Without access words every header is read.
	"expire-store": {Replicas: 2, Clock: 2, Crashes: 1, Epochs: 4, Units: 6, Scripts: [][]Step{
		{k(PutEx, 0), k(Expire, 0), k(Put, 1), k(Expire, 0)},
		{k(Get, 0), k(PutEx, 0), k(Incr, 0), k(GetIf, 1)},
		{k(PutEx, 1), k(Expire, 0), k(Add, 0), k(Get, 1)}},
		Setup: []Step{k(PutEx, 0), k(Put, 1)}, Warm: true},
	// A store with access words: nothing rests on them there.
	"expire-words": {Words: true, Replicas: 2, Clock: 2, Crashes: 1, Epochs: 4, Units: 6, Scripts: [][]Step{
		{k(PutEx, 0), k(Expire, 0), k(Put, 1), k(Expire, 0)},
		{k(Get, 0), k(PutEx, 0), k(Incr, 0), k(GetIf, 1)}},
		Setup: []Step{k(PutEx, 0), k(Put, 1)}, Warm: true},
	// The stash.
	"stash": {Replicas: 2, Fill: 29, Crashes: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 2), k(Del, 0), k(Get, 3)},
		{k(Put, 3), k(Get, 0), k(Put, 0), k(Del, 2)},
		{k(Get, 2), k(Add, 2), k(Del, 3), k(Get, 0)}}},
	"stash-split": {Replicas: 2, Fill: 28, Janitors: 2, Children: 1, Acts: []Act{{Split, 1, 0}}, Crashes: 1,
		Scripts: [][]Step{
			{k(Put, 10), k(Put, 12), k(Del, 10), k(Get, 13)},
			{k(Put, 13), k(Get, 10), k(Put, 10), k(Del, 2)}},
		Setup: []Step{k(Put, 10), k(Put, 0), k(Put, 11)}, Warm: true},
	"scan-split": {Janitors: 1, Children: 1, Acts: []Act{{Split, 1, 0}}, Scripts: [][]Step{
		{k(Scan, 0), k(Scan, 0)}, {k(Put, 10), k(Put, 12), k(Put, 0), k(Put, 32)}},
		Setup: []Step{k(Put, 10), k(Put, 0), k(Put, 30)}, Warm: true},
	"lanes": {Replicas: 2, Lanes: 2, Window: 2, Deadlines: 2, Failures: 1, Pauses: 1, Epochs: 6, Units: 96,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 1), k(Get, 0)},
			{k(Get, 1), k(Put, 0), k(CAS, 1), k(Get, 0), k(Add, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true, WritePieces: 2},
	// Memory goes home: one client writes what another unlinks, and all of it goes round.
	"home": {HeapUnits: 6, Units: 6, Stingy: true, Waits: true, Epochs: 16, Losses: 2, Leaders: 1, Scripts: [][]Step{
		{k(Put, 0), k(Put, 1), k(Put, 2), k(Put, 0), k(Put, 1)},
		{k(Del, 0), k(Del, 1), k(Put, 3), k(Del, 2), k(Get, 0), k(Del, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"home-r2": {Replicas: 2, Lanes: 2, HeapUnits: 8, Units: 8, Stingy: true, Waits: true, Epochs: 14, Losses: 2,
		Crashes: 1, WritePieces: 2, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Put, 2), k(Put, 0), k(Put, 1)},
			{k(Del, 0), k(Put, 1), k(Put, 3), k(Del, 2), k(Put, 0)},
			{k(Get, 0), k(Del, 1), k(Get, 2), k(Put, 2), k(Get, 1)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	// Homes end: in good order, and by a crash.
	"home-close": {HeapUnits: 8, Units: 8, Stingy: true, Waits: true, Epochs: 12, Leap: 1100, Losses: 2, Leaders: 1,
		Crashes: 1, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Close, 0)},
			{k(Del, 0), k(Put, 2), k(Del, 1), k(Put, 0), k(Close, 0)},
			{k(Get, 0), k(Put, 1), k(Del, 2), k(Put, 3), k(Put, 2), k(Get, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	// Memory that came back is soon granted again.
	"home-tight": {HeapUnits: 3, Units: 3, Stingy: true, Waits: true, Epochs: 14, Leap: 1100, Losses: 1,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 0), k(Put, 1), k(Put, 0), k(Put, 0), k(Get, 1)},
			{k(Del, 0), k(Put, 0), k(Del, 1), k(Put, 1), k(Del, 0), k(Put, 0)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	// As before, with reclaim epochs that pass slowly: what comes back must wait for all of them.
	"home-slow": {HeapUnits: 6, Units: 6, Stingy: true, Waits: true, Epochs: 16, Leap: 2, Losses: 1, Crashes: 1,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Close, 0)},
			{k(Get, 0), k(Del, 0), k(Put, 2), k(Del, 1), k(Put, 0), k(Put, 0)},
			{k(Get, 0), k(Put, 1), k(Get, 1), k(Put, 0), k(CAS, 0), k(Get, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true},
	// An extent is recalled while places of it are on their way.
	"home-recall": {TwoExtents: true, InPlace: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}}, Units: 4, Waits: true,
		Epochs: 10, Leap: 600, Losses: 2, Leaders: 1, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Put, 0), k(Put, 2), k(Put, 1)},
			{k(Del, 0), k(Put, 1), k(Del, 1), k(Get, 0), k(Put, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true},
	"home-recall-r2": {Replicas: 2, TwoExtents: true, InPlace: true, Emptied: 2, Janitors: 1,
		Acts: []Act{{Recall, 1, 0}}, Units: 6, Waits: true, Epochs: 8, Leap: 1100, Losses: 1, Crashes: 1, Failures: 1,
		Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 2)},
			{k(Del, 0), k(Put, 1), k(Del, 1), k(Put, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true},
	// Memory that a killed client leaves comes back without anybody asking.
	"home-reclaim": {Reclaims: true, TwoExtents: true, Janitors: 1, Units: 3, Waits: true, Stingy: true, Epochs: 10,
		Leap: 1100, Losses: 1, Crashes: 1, Leaders: 1, Scripts: [][]Step{
			{k(Put, 0), k(Put, 1), k(Del, 0), k(Put, 2)},
			{k(Del, 0), k(Put, 1), k(Del, 1), k(Put, 0), k(Put, 3)}},
		Setup: []Step{k(Put, 0), k(Put, 1)}, Warm: true},
	"close": {Epochs: 4, Leaders: 2, Units: 3, Scripts: [][]Step{
		{k(Put, 0), k(Del, 0), k(Close, 0)},
		{k(Get, 0), k(Put, 0), k(Get, 0)},
		{k(Put, 1), k(Put, 0), k(Del, 1), k(Put, 1)}},
		Setup: []Step{k(Put, 0)}, Warm: true},
	"everything": {Replicas: 2, Nodes: 3, PGs: 2, TwoExtents: true, Lanes: 2, Janitors: 2, Children: 2, NodeCrashes: 1,
		NodePauses: 1, Crashes: 1, Pauses: 1, Deadlines: 1, Failures: 1,
		Leaders: 1, Epochs: 4, Units: 12, WritePieces: 2, Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}, {Drain, 0, 0},
			{Scrub, 1, 0}}, Scripts: [][]Step{
			{k(Put, 0), k(Put, 10), k(Del, 0), k(Put, 1), k(Get, 11)},
			{k(Get, 10), k(Put, 11), k(CAS, 10), k(Get, 0), k(Add, 0)},
			{k(Scan, 0), k(Put, 30), k(Del, 30), k(Incr, 10), k(Get, 30)}},
		Setup: []Step{k(Put, 0), k(Put, 10), k(Put, 30)}, Warm: true},
	"r3-everything": {Replicas: 3, Nodes: 4, PGs: 2, Janitors: 2, Children: 2, NodeCrashes: 2, NodePauses: 1,
		Crashes: 1, Pauses: 1, Deadlines: 1, Failures: 1,
		Leaders: 1, Units: 12, Acts: []Act{{Split, 1, 0}, {Migrate, 1, 2}, {Drain, 0, 0}}, Scripts: [][]Step{
			{k(Put, 0), k(Put, 10), k(Del, 0), k(Put, 1)},
			{k(Get, 10), k(Put, 11), k(CAS, 10), k(Get, 0)},
			{k(Add, 0), k(Get, 10), k(Put, 10), k(Get, 0)}},
		Setup: []Step{k(Put, 0), k(Put, 10)}, Warm: true},
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

func replayHint(scope string, sync bool, seed uint64) string {
	return fmt.Sprintf("replay: go test ./internal/simtest -run TestReplay -scope %s -sync=%t -seed %d", scope, sync,
		seed)
}

// eachMode runs a test of a scope for providers that execute WRs after PostSend, and for those that do so
// within it.
func eachMode(t *testing.T, cfg Config, test func(t *testing.T, cfg Config)) {
	for _, sync := range []bool{false, true} {
		t.Run(map[bool]string{false: "asynchronous", true: "synchronous"}[sync], func(t *testing.T) {
			t.Parallel()
			cfg := cfg
			cfg.Synchronous = sync
			test(t, cfg)
		})
	}
}

// inMode is a wide scope in one of the two modes: two operations are under way at once, so that some share a
// chain.
func inMode(cfg Config, sync bool) Config {
	if cfg.Synchronous = sync; sync {
		cfg.Window = max(cfg.Window, 2)
	}
	return cfg
}

func TestExhaustive(t *testing.T) {
	limit := *flagStates
	if limit == 0 {
		limit = 1_500
		if testing.Short() {
			limit = 1_000
		}
	}
	for name, cfg := range scopes {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // as in TestRandom
			eachMode(t, cfg, func(t *testing.T, cfg Config) {
				began := time.Now()
				res, err := Exhaust(cfg, limit)
				if err != nil {
					t.Fatal(err)
				}
				if cfg.Replicas <= 1 && cfg.Crashes+cfg.Deadlines+cfg.Failures+cfg.Epochs == 0 && !cfg.changes() &&
					limit >= 30_000 && !res.Complete {
					t.Errorf("not exhausted within %d states", limit)
				}
				t.Logf("%d states, %d ends, complete %v, %v", res.States, res.Schedules, res.Complete,
					time.Since(began).Round(time.Millisecond))
			})
		})
	}
}

func TestRandom(t *testing.T) {
	runs := *flagRuns
	if runs == 0 {
		runs = 200
		if testing.Short() {
			runs = 100
		}
	}
	for name, cfg := range wide {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // the two modes take different times
			eachMode(t, cfg, func(t *testing.T, cfg Config) {
				part := uint64(max(1, heavy[name]))
				for i := range max(1, uint64(runs)/part) {
					seed := *flagSeed/part + i
					if err := Random(inMode(cfg, cfg.Synchronous), seed); err != nil {
						t.Fatalf("%s\n%v", replayHint(name, cfg.Synchronous, seed), err)
					}
				}
			})
		})
	}
}

// TestHinted: with a synchronous provider operations that need no task are among what the searches see, gets
// and puts, alone and in shared chains.
func TestHinted(t *testing.T) {
	w, err := NewWorld(inMode(wide["mixed"], true), false)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, c := range w.cls {
		w.runScript(c, []Step{k(Put, 0), k(Put, 2), k(Get, 0), k(Put, 2), k(Get, 2), k(Get, 0)})
	}
	gets, puts := w.quick[index.Get], w.quick[index.Put]
	c := w.cls[len(w.cls)-1] // the others' hints are old
	c.script, c.pos = []Step{k(Get, 0), k(Put, 2)}, 0
	if !c.canBeginTwo() {
		t.Fatal("two steps cannot begin at once")
	}
	w.do(choice{kind: chBeginTwo, c: c.i})
	if n := len(w.fab.Events()); n != 1 || len(c.run) != 2 {
		t.Errorf("two operations under way: %d, with %d verbs next; want 2 in one chain", len(c.run), n)
	}
	w.runScript(c, nil)
	if w.err != nil || gets < 3 || puts < 3 || w.quick[index.Get] == gets || w.quick[index.Put] == puts {
		t.Errorf("without a task: %d gets and %d puts, then %v; %v", gets, puts, w.quick, w.err)
	}
}

// TestGoesOn: among what the searches see are PUTs that the head has decided without a task and that end in one.
func TestGoesOn(t *testing.T) {
	for _, name := range []string{"r2-mixed", "r2-faults", "r3-loss"} {
		n := 0
		for seed := range uint64(600) {
			w, err := NewWorld(inMode(wide[name], true), false)
			if err != nil {
				t.Fatal(err)
			}
			w.runRandom(seed)
			n += w.wentOn
			w.Close()
		}
		if n < 3 {
			t.Errorf("%s: %d in 600 schedules", name, n)
		}
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
	if err := Random(inMode(cfg, *flagSync), *flagSeed); err != nil {
		t.Fatal(err)
	}
}
